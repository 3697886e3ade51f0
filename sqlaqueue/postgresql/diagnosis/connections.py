"""Connections of clients, and which process of the server executes their statements."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import Any

import sqlalchemy as sa

from sqlaqueue.queue.server_facts import ConnectionGroup, Connections

# Where the current role may not see the type of a process, the name of a role tells clients from the server's own.
_GROUPS = sa.text("""
    SELECT a.usename::text AS role, coalesce(a.application_name, '') AS application, count(*) AS number,
           CASE WHEN bool_or(a.backend_type IS NULL) THEN NULL
             ELSE count(*) FILTER (WHERE a.state = 'idle' AND a.pid <> pg_backend_pid()
               AND a.state_change < clock_timestamp() - make_interval(secs => :idle_for)) END AS idle
    FROM pg_stat_activity AS a
    WHERE a.usename IS NOT NULL AND coalesce(a.backend_type, 'client backend') = 'client backend'
    GROUP BY 1, 2 ORDER BY number DESC, 1, 2
""")

_LIMIT = sa.text("""
    SELECT sum(CASE name WHEN 'max_connections' THEN setting::int ELSE -setting::int END)::int FROM pg_settings
    WHERE name IN ('max_connections', 'superuser_reserved_connections', 'reserved_connections')
""")


def connections(connection: sa.Connection, idle_for: float) -> Connections:
    """Return the connections to the server.

    :param idle_for: the seconds from which on a session counts as idle.
    """
    groups = [ConnectionGroup(**row) for row in connection.execute(_GROUPS, {"idle_for": idle_for}).mappings()]
    limit: int = connection.execute(_LIMIT).scalar_one()
    return Connections(used=sum(group.number for group in groups), limit=limit, groups=groups)


def backend_pid(connection: sa.Connection) -> int:
    """Return the process id of the server's process that executes the statements of a connection."""
    pid: int = connection.execute(sa.select(sa.func.pg_backend_pid())).scalar_one()
    return pid


def announced_pid(connection: sa.Connection) -> int | None:
    """Return the process id that the driver was told when it connected; None if the driver does not say."""
    driver: Any = connection.connection.driver_connection
    if hasattr(driver, "get_server_pid"):
        pid: int = driver.get_server_pid()  # asyncpg
        return pid
    return getattr(getattr(driver, "info", None), "backend_pid", None)  # psycopg and psycopg2


def probe_backends(engine: sa.Engine) -> Sequence[int]:
    """Return the process ids of three transactions, the first and the last of one further connection.

    The second transaction belongs to another connection. It begins between the two others, and takes the server
    connection that a pooler has got back from the first.
    """
    # Pools of their own: the engine's may have no connection left.
    pools = engine.pool.recreate(), engine.pool.recreate()
    try:
        with closing(pools[0].connect()) as first, closing(pools[1].connect()) as second:
            before = _pid(first)
            first.rollback()
            return [before, _pid(second), _pid(first)]
    finally:
        for pool in pools:
            pool.dispose()


def _pid(connection: Any) -> int:
    cursor = connection.cursor()
    try:
        cursor.execute("SELECT pg_backend_pid()")
        pid: int = cursor.fetchone()[0]
    finally:
        cursor.close()
    return pid
