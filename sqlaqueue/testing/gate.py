"""Concurrency under control: a gate that holds statements up, and waiting for what must happen."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import sqlalchemy as sa

DEADLINE = 60
"""Seconds until the suite gives up on something that must happen."""

_GATE = 7_219_402
_ARRIVED = sa.text(
    "SELECT count(*) FROM pg_locks JOIN pg_stat_activity USING (pid)"
    " WHERE datname = current_database() AND locktype = 'advisory' AND objid = :gate AND NOT granted"
)


class Gate:
    """Holds a statement in the middle: after its snapshot, before it locks a row.

    A condition that waits for an advisory lock is judged while rows are scanned, so what others commit
    meanwhile is newer than what the scan sees.
    """

    passed: sa.ColumnElement[bool] = sa.func.pg_advisory_xact_lock_shared(_GATE).is_not(None)
    """The condition that lets a row through once the gate is open."""

    def __init__(self, keeper: sa.Connection) -> None:
        self._keeper = keeper
        self._closed = False

    def close(self) -> None:
        """Hold up whoever arrives from now on."""
        self._keeper.execute(sa.select(sa.func.pg_advisory_lock(_GATE)))
        self._keeper.commit()
        self._closed = True

    def open(self) -> None:
        """Let everybody through."""
        if self._closed:
            self._keeper.execute(sa.select(sa.func.pg_advisory_unlock(_GATE)))
            self._keeper.commit()
            self._closed = False

    def await_arrival(self) -> None:
        """Wait until somebody stands before the gate."""
        wait_for(lambda: bool(self._keeper.scalar(_ARRIVED, {"gate": _GATE})), self._keeper.commit)


def wait_for(condition: Callable[[], bool], between: Callable[[], Any] = lambda: None) -> None:
    """Wait until ``condition`` holds; far beyond what it can take, fail."""
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline, "what the test waits for did not happen"
        between()
        time.sleep(0.01)
