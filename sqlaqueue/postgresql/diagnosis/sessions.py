"""Rows of pg_stat_activity as facts."""

from __future__ import annotations

from typing import Any

from sqlaqueue.queue.server_facts import OpenTransaction

SESSION = """
    a.pid, a.usename::text AS role, coalesce(a.application_name, '') AS application, host(a.client_addr) AS client,
    a.state, a.xact_start AS since,
    extract(epoch FROM clock_timestamp() - a.xact_start)::float8 AS seconds,
    coalesce(greatest(age(a.backend_xid), age(a.backend_xmin)), 0) AS age,
    left(regexp_replace(coalesce(a.query, ''), '\\s+', ' ', 'g'), 80) AS query
"""
"""The columns of an :class:`~sqlaqueue.queue.server_facts.OpenTransaction`, of ``pg_stat_activity AS a``."""


def open_transaction(row: Any) -> OpenTransaction:
    """Return the fact of a row with the columns :data:`SESSION`."""
    return OpenTransaction(
        pid=row.pid,
        role=row.role,
        application=row.application,
        client=row.client,
        state=row.state,
        since=row.since,
        seconds=row.seconds,
        age=row.age,
        query=row.query,
    )
