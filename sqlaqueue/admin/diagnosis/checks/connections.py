"""Whether there are connections left, on the server and in the engine's pool."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

from sqlaqueue.admin.diagnosis.examination import Examination
from sqlaqueue.admin.diagnosis.finding import Finding
from sqlaqueue.consumer.sessions import pool_limit
from sqlaqueue.postgresql.catalog_text import literal
from sqlaqueue.postgresql.server import connections

_NAMED = 3
"""How many groups of connections the text names."""

_CONSUMER = 2
"""The connections of a Consumer with the default options: a worker and maintenance."""


def check_server_connections(examination: Examination) -> Iterator[Finding]:
    """Find that the server has hardly any connection left.

    Thresholds: ``connections_used``, ``connection_idle``.
    """
    limits = examination.thresholds
    seconds = limits.connection_idle.total_seconds()
    found = connections(examination.connection, seconds)
    if found.used < limits.connections_used * found.limit:
        return
    most = "; ".join(
        f"{group.number} of the role {group.role}"
        + (f" and the application {group.application!r}" if group.application else "")
        for group in found.groups[:_NAMED]
    )
    idlest = max(found.groups, key=lambda group: group.idle or 0)
    fixes = []
    if idlest.idle:
        fixes.append(
            f"-- End {idlest.idle} idle sessions.\n"
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE backend_type = 'client backend' "
            f"AND pid <> pg_backend_pid() AND usename = {literal(idlest.role)} "
            f"AND application_name = {literal(idlest.application)} AND state = 'idle' "
            f"AND state_change < now() - interval '{seconds:g} seconds';"
        )
    fixes.append(f"-- Needs a restart of the server.\nALTER SYSTEM SET max_connections = {2 * found.limit};")
    yield Finding(
        severity="warning",
        code="connections_used",
        queue=None,
        summary=f"{found.used} of the server's {found.limit} connections are in use: {most}.",
        consequence="When none is left, workers and programs that add jobs cannot connect.",
        fixes=tuple(fixes),
        facts={"used": found.used, "limit": found.limit, "groups": [asdict(group) for group in found.groups]},
    )


def check_pool(examination: Examination) -> Iterator[Finding]:
    """Find an engine whose pool is too small for a Consumer with the default options."""
    limit = pool_limit(examination.connection.engine.pool)
    if limit is None or limit >= _CONSUMER:
        return
    yield Finding(
        severity="notice",
        code="small_pool",
        queue=None,
        summary=f"The pool of this engine allows {limit} connection; a Consumer needs {_CONSUMER} or more.",
        consequence=f"A Consumer refuses to start with it: use create_engine(..., pool_size={_CONSUMER}).",
        facts={"limit": limit, "needed": _CONSUMER},
    )
