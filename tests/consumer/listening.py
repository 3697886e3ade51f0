"""Consumers that poll only when they are notified, and how tests find out that they are listening."""

from __future__ import annotations

from typing import Any

from tests.consumer.bench import Bench, Server, nothing, wait_until

LATER = 600.0
"""Seconds that no test waits for."""


def is_listening(server: Server) -> bool:
    """Return whether it receives its own heartbeats, has told the other consumers so, and knows all upcoming jobs."""
    context = server.consumer._context
    if context is None or not context.polls.peers.listening or context.polls.wants_upcoming():
        return False
    return bool(server.bench.execute("SELECT listening FROM sqlaqueue_consumer WHERE id = :id", id=context.id))


def idle(bench: Bench, **options: Any) -> Server:
    """Return a Consumer that finds new jobs by notifications only."""
    return bench.consumer(nothing, **{"poll_interval": LATER} | options)


def await_listening(*servers: Server) -> None:
    """Wait until Consumers are listening."""
    for server in servers:
        wait_until(lambda server=server: is_listening(server), "that it receives its own heartbeat")


def execute(bench: Bench, statement: Any) -> Any:
    """Execute a statement in a session and commit; return its rows, if it has any."""
    with bench.sessions() as session:
        result = session.execute(statement)
        found = result.all() if getattr(result, "returns_rows", True) else None
        session.commit()
        return found


def listening_connections(bench: Bench) -> int:
    """Return how many connections to its database listen."""
    return bench.execute("""
        SELECT count(*) FROM pg_stat_activity
        WHERE datname = current_database() AND pid <> pg_backend_pid() AND query LIKE 'LISTEN%'
    """)
