"""Consumers that only do what they are called for, and how to tell that they hear."""

from __future__ import annotations

from typing import Any

from tests.consumer.bench import Bench, Server, nothing, wait_until

LATER = 600.0
"""Seconds that no test waits for."""


def hears(server: Server) -> bool:
    """Tell whether it knows that it hears calls, and has said so, or is about to."""
    shift = server.consumer._shift
    return shift is not None and shift.calls.hears and shift.said_to_hear is True and not shift.calls.wants_outlook()


def idle(bench: Bench, **options: Any) -> Server:
    return bench.consumer(nothing, **{"poll_interval": LATER} | options)


def await_hearing(*servers: Server) -> None:
    for server in servers:
        wait_until(lambda server=server: hears(server), "that it hears itself")


def execute(bench: Bench, statement: Any) -> Any:
    """Execute something in a session and commit; return its rows, if it has any."""
    with bench.sessions() as session:
        result = session.execute(statement)
        found = result.all() if getattr(result, "returns_rows", True) else None
        session.commit()
        return found


def listening(bench: Bench) -> int:
    """Return how many connections to its database listen."""
    return bench.execute("""
        SELECT count(*) FROM pg_stat_activity
        WHERE datname = current_database() AND pid <> pg_backend_pid() AND query LIKE 'LISTEN%'
    """)
