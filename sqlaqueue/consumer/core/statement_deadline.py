"""How threads break off what they wait for; tasks are cancelled."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from sqlalchemy.orm import Session

from sqlaqueue.consumer.core.effects import Beside
from sqlaqueue.log import fields, logger

_LOOK_EVERY, _QUIET = 0.5, 2.0
"""Seconds between looks, and without any such statement after which nobody looks until there is one."""

_LONGEST_CANCEL = 10.0


@dataclass(eq=False)
class _Statement:
    """What may not be waited for beyond a deadline, and the thread that breaks it off."""

    driver: Any
    deadline: float
    canceller: threading.Thread | None = None

    def cancel(self) -> None:
        """Ask the server to end it, which takes another connection: it may be refused, or take long."""
        try:
            self.driver.cancel()
        except Exception as error:  # noqa: BLE001 - the server is not there: then it cannot hold anybody up either
            kind = type(error).__name__
            extra = fields("cancel_failed", error_kind=kind)
            logger.warning("cannot break a statement off: %s: %s", kind, error, extra=extra)


class StatementDeadlines:
    """The statements that may not wait for ever, and when to look for them.

    Whoever looks must wait for no database itself.

    :param wake: has somebody ask again when to look.
    """

    def __init__(self, wake: Callable[[], object]) -> None:
        self._lock, self._wake = threading.Lock(), wake
        self._open: set[_Statement] = set()
        self._used, self._looks = float("-inf"), False

    @contextlib.contextmanager
    def limit(self, step: Beside, session: Session, bind: dict[str, Any]) -> Iterator[None]:
        """Have the statements of a step broken off when its patience is over.

        :param bind: says which connection it is, in a session that has several.
        """
        if step.patience is None:
            yield
            return
        connection = session.connection(bind_arguments=bind)
        now = time.monotonic()
        statement = _Statement(connection.connection.driver_connection, now + step.patience)
        with self._lock:
            self._used = now
            self._open.add(statement)
            looks, self._looks = self._looks, True
        if not looks:
            self._wake()
        try:
            yield
        finally:
            with self._lock:
                self._open.discard(statement)
            if statement.canceller is not None:
                # The word may arrive late: whoever is given this connection next must not be broken off by it.
                statement.canceller.join(_LONGEST_CANCEL)
                if not connection.closed:
                    connection.invalidate()

    def until_check(self) -> float:
        """Return the seconds until somebody should look; inf when it would wake first."""
        with self._lock:
            self._looks = bool(self._open) or time.monotonic() - self._used < _QUIET
            return _LOOK_EVERY if self._looks else float("inf")

    def cancel_overdue(self) -> None:
        """End the statements whose time is over."""
        now = time.monotonic()
        with self._lock:
            late = [one for one in self._open if one.canceller is None and one.deadline <= now]
            for one in late:
                one.canceller = threading.Thread(target=one.cancel, name="sqlaqueue-cancel", daemon=True)
                one.canceller.start()
