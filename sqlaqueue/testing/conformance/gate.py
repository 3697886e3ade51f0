"""Controlled concurrency: a gate that blocks statements, and waiting for a condition."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import sqlalchemy as sa

DEADLINE = 60
"""Seconds until the suite stops waiting for a condition that must become true."""

_GATE = 7_219_402
_ARRIVED = sa.text(
    "SELECT count(*) FROM pg_locks JOIN pg_stat_activity USING (pid)"
    " WHERE datname = current_database() AND locktype = 'advisory' AND objid = :gate AND NOT granted"
)


class Gate:
    """Blocks a statement after its snapshot and before it locks a row.

    A condition that waits for an advisory lock is evaluated while rows are scanned, so other transactions can commit
    changes that the scan does not see.
    """

    passed: sa.ColumnElement[bool] = sa.func.pg_advisory_xact_lock_shared(_GATE).is_not(None)
    """The condition that is true for a row once the gate is open."""

    def __init__(self, connection: sa.Connection) -> None:
        self._connection = connection
        self._closed = False

    def close(self) -> None:
        """Block statements that arrive from now on."""
        self._connection.execute(sa.select(sa.func.pg_advisory_lock(_GATE)))
        self._connection.commit()
        self._closed = True

    def open(self) -> None:
        """Let all statements pass."""
        if self._closed:
            self._connection.execute(sa.select(sa.func.pg_advisory_unlock(_GATE)))
            self._connection.commit()
            self._closed = False

    def await_arrival(self) -> None:
        """Wait until a statement is blocked."""
        wait_for(lambda: bool(self._connection.scalar(_ARRIVED, {"gate": _GATE})), self._connection.commit)


def wait_for(condition: Callable[[], bool], between: Callable[[], Any] = lambda: None) -> None:
    """Wait until ``condition`` is true; fail after :data:`DEADLINE` seconds."""
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true"
        between()
        time.sleep(0.01)
