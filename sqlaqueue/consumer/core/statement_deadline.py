"""Deadlines for statements of threads; async code cancels the task instead.

A statement that waits for a lock would keep its thread for as long as another transaction holds the row. A
``statement_timeout`` would take a round trip for each transaction to set.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from sqlalchemy.orm import Session

from sqlaqueue.log import fields, logger

_CHECK_INTERVAL = 0.5
_IDLE_AFTER = 2.0
"""Seconds without a deadline after which the checks stop until there is one."""

_CANCEL_TIMEOUT = 10.0


@dataclass(eq=False)
class _LimitedBlock:
    """The statements of one block, and the thread that cancels them after their deadline."""

    driver: Any
    deadline: float
    canceller: threading.Thread | None = None

    def cancel(self) -> None:
        """Ask the server to cancel what the connection executes; this takes another connection."""
        try:
            # sqlite3 calls it by another name.
            (getattr(self.driver, "cancel", None) or self.driver.interrupt)()
        except Exception as error:  # noqa: BLE001 - a server that cannot be reached executes nothing either
            kind = type(error).__name__
            extra = fields("cancel_failed", error_kind=kind)
            logger.warning("cannot cancel a statement after its deadline: %s: %s", kind, error, extra=extra)


class StatementDeadlines:
    """The statements that have a deadline. One thread, which executes none itself, checks them periodically.

    :param wake: wakes that thread, to ask :meth:`until_check` again.
    """

    def __init__(self, wake: Callable[[], object]) -> None:
        self._lock, self._wake = threading.Lock(), wake
        self._open: set[_LimitedBlock] = set()
        self._used, self._is_checked = float("-inf"), False

    @contextlib.contextmanager
    def limit(self, seconds: float | None, session: Session, bind: dict[str, Any]) -> Iterator[None]:
        """Cancel the statements of this block that are executed after ``seconds``; None sets no deadline.

        :param bind: the bind arguments that select the connection of the session.
        """
        if seconds is None:
            yield
            return
        connection = session.connection(bind_arguments=bind)
        now = time.monotonic()
        statement = _LimitedBlock(connection.connection.driver_connection, now + seconds)
        with self._lock:
            self._used = now
            self._open.add(statement)
            was_checked, self._is_checked = self._is_checked, True
        if not was_checked:
            self._wake()
        try:
            yield
        finally:
            with self._lock:
                self._open.discard(statement)
            if statement.canceller is not None:
                # The request may arrive late, and would cancel a statement of this connection's next user.
                statement.canceller.join(_CANCEL_TIMEOUT)
                if not connection.closed:
                    connection.invalidate()

    def until_check(self) -> float:
        """Return the seconds until the next check; inf if the thread will be woken first."""
        with self._lock:
            self._is_checked = bool(self._open) or time.monotonic() - self._used < _IDLE_AFTER
            return _CHECK_INTERVAL if self._is_checked else float("inf")

    def cancel_overdue(self) -> None:
        """Cancel the statements whose deadline has passed, each in a thread of its own."""
        now = time.monotonic()
        with self._lock:
            overdue = [one for one in self._open if one.canceller is None and one.deadline <= now]
            for one in overdue:
                one.canceller = threading.Thread(target=one.cancel, name="sqlaqueue-cancel", daemon=True)
                one.canceller.start()
