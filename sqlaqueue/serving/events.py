"""What a Consumer tells about its jobs, to listeners and to the log."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from sqlaqueue.exc import ConfigurationError
from sqlaqueue.serving.outcomes import text_of
from sqlaqueue.spec import Key

logger = logging.getLogger("sqlaqueue")

EventName = Literal["claimed", "completed", "retried", "failed", "cancelled", "released", "rescued", "lease_lost"]


@dataclass(frozen=True, slots=True)
class JobEvent:
    """One thing that happened to one job.

    An event follows the commit that made it true, except ``lease_lost``, which reports a result that was refused.
    """

    name: EventName
    queue: str
    key: Key
    """The job's primary key, as a tuple."""
    attempt: int | None = None
    delay: float | None = None
    """Seconds until the job is due again, where it is held back."""
    error: BaseException | None = None


Listener = Callable[[JobEvent], object]

_LEVELS: dict[EventName, int] = {
    "failed": logging.ERROR,
    "retried": logging.WARNING,
    "lease_lost": logging.WARNING,
    "rescued": logging.WARNING,
}


class Announcer:
    """Calls the listeners of a Consumer and writes its log."""

    def __init__(self) -> None:
        self._listeners: dict[str, list[Listener]] = {name: [] for name in get_args(EventName)}

    def add(self, name: EventName, listener: Listener) -> None:
        """Have ``listener`` called with each event of that name.

        :raises ConfigurationError: for a name that is no event.
        """
        if name not in self._listeners:
            msg = f"on({name!r}): there is no such event; there are {', '.join(self._listeners)}"
            raise ConfigurationError(msg)
        self._listeners[name].append(listener)

    def heeds(self, name: EventName) -> bool:
        """Return whether anybody listens to an event, or the log has it."""
        return bool(self._listeners[name]) or logger.isEnabledFor(_LEVELS.get(name, logging.DEBUG))

    def tell(self, event: JobEvent) -> None:
        """Announce ``event``; a listener that raises is logged and never disturbs the work."""
        level = _LEVELS.get(event.name, logging.DEBUG)
        if logger.isEnabledFor(level):
            logger.log(
                level,
                "%s %s of queue %s (attempt %s)%s",
                event.name,
                event.key[0] if len(event.key) == 1 else event.key,
                event.queue,
                event.attempt,
                f": {text_of(event.error)}" if event.error else "",
                exc_info=event.error if level == logging.ERROR else None,
            )
        for listener in self._listeners[event.name]:
            try:
                listener(event)
            except BaseException:
                logger.exception("a listener for %r failed", event.name)
