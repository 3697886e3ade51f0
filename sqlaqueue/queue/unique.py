"""The configuration of unique jobs: :class:`Unique`.

::

    class Reminder(QueueMixin, Base):
        __queue__ = QueueConfig(unique=Unique("customer_id", "kind"))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

from sqlaqueue.exc import ConfigurationError
from sqlaqueue.queue.retry_policies import Delay, seconds
from sqlaqueue.queue.states import FINISHED, STATES

UNFINISHED = ("pending", "processing")

_SHORTEST_PERIOD = 1.0
_LONGEST_PERIOD = 100 * 366 * 86400.0

OnReturn = Literal["cancel", "wait"]


@dataclass(frozen=True, init=False)
class Unique:
    """At most one job with the same values of some attributes, among the jobs in some states.

    Two jobs with the same values are *twins*. A unique partial index refuses the second one, whichever way it is
    inserted; :func:`~sqlaqueue.enqueue` returns the first one instead.

    :param attributes: the names of attributes of the class that have columns in the queue's table.
    :param states: the states in which a job counts: ``"pending"``, and by default ``"processing"``.
    :param per: jobs count only with those that were created in the same period, such as ``timedelta(hours=1)``: in
        seconds or as a timedelta. Periods follow each other from Monday, 1970-01-05, 00:00 UTC. None for no limit.
    :param nulls_distinct: whether jobs with a NULL in one of the attributes are never twins, as in SQL.
    :param on_return: what becomes of a job that would be pending again while a twin of it counts: ``"cancel"``
        cancels it, with the twin's key in ``last_error``; ``"wait"`` leaves it until the twin no longer counts.
    :raises ConfigurationError: for invalid values.
    """

    attributes: tuple[str, ...]
    states: tuple[str, ...]
    per: timedelta | None
    nulls_distinct: bool
    on_return: OnReturn

    def __init__(
        self,
        *attributes: str,
        states: Sequence[str] = UNFINISHED,
        per: Delay | None = None,
        nulls_distinct: bool = True,
        on_return: OnReturn = "cancel",
    ) -> None:
        """Refuse invalid values."""
        set_field = object.__setattr__
        set_field(self, "attributes", _checked_attributes(attributes))
        set_field(self, "states", _checked_states(states))
        set_field(self, "per", None if per is None else _checked_period(per))
        if not isinstance(nulls_distinct, bool):
            msg = f"Unique(nulls_distinct={nulls_distinct!r}): use True or False"
            raise ConfigurationError(msg)
        set_field(self, "nulls_distinct", nulls_distinct)
        if on_return not in {"cancel", "wait"}:
            msg = f'Unique(on_return={on_return!r}): use "cancel" or "wait"'
            raise ConfigurationError(msg)
        set_field(self, "on_return", on_return)

    @property
    def finished(self) -> tuple[str, ...]:
        """The states of finished jobs that count."""
        return tuple(state for state in self.states if state in FINISHED)


def _checked_attributes(given: tuple[object, ...]) -> tuple[str, ...]:
    names = [name for name in given if isinstance(name, str) and name]
    if not given or len(names) != len(given):
        msg = (
            f"Unique({', '.join(map(repr, given))}): give the names of attributes, as in Unique('customer_id', 'kind')"
        )
        raise ConfigurationError(msg)
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        msg = f"Unique(...): the attribute {twice[0]!r} is named twice"
        raise ConfigurationError(msg)
    return tuple(names)


def _checked_states(given: object) -> tuple[str, ...]:
    what = f"Unique(states={given!r})"
    if isinstance(given, str) or not isinstance(given, Sequence):
        msg = f"{what}: use a tuple of states, such as {UNFINISHED!r}"
        raise ConfigurationError(msg)
    unknown = [state for state in given if state not in STATES]
    if unknown:
        msg = f"{what}: there is no state {unknown[0]!r}; use some of {', '.join(STATES)}"
        raise ConfigurationError(msg)
    if "pending" not in given:
        msg = f'{what}: a new job is pending, so "pending" must be among them'
        raise ConfigurationError(msg)
    if set(given) - set(UNFINISHED) and "processing" not in given:
        msg = (
            f"{what}: a job that counts while it is pending and again after it has finished must count while it runs; "
            'add "processing"'
        )
        raise ConfigurationError(msg)
    # In the order of a job's life, so that two spellings are equal.
    return tuple(state for state in STATES if state in given)


def _checked_period(per: Delay) -> timedelta:
    what = f"Unique(per={per!r})"
    if not _SHORTEST_PERIOD <= seconds(per, what) <= _LONGEST_PERIOD:
        msg = f"{what}: use from one second to 100 years"
        raise ConfigurationError(msg)
    return timedelta(seconds=seconds(per))
