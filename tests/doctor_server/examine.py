"""Runs checks on a live database, and executes the fixes that they give."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import psycopg
import sqlalchemy as sa
from sqlalchemy.pool import NullPool

from sqlaqueue.admin.doctor.examination import Check, Examination, Finding, Thresholds
from sqlaqueue.admin.doctor.objects import check_claim_indexes
from sqlaqueue.admin.doctor.server import (
    check_clock,
    check_durability,
    check_lock_table,
    check_pool,
    check_pooler,
    check_server,
    check_server_connections,
)
from sqlaqueue.admin.doctor.vacuum import (
    check_autovacuum,
    check_horizon,
    check_keys,
    check_notification_queue,
    check_status_statistics,
    check_table_statistics,
)
from sqlaqueue.mapping.mixin import spec_of

CHECKS: tuple[Check, ...] = (
    check_autovacuum,
    check_claim_indexes,
    check_clock,
    check_durability,
    check_horizon,
    check_keys,
    check_lock_table,
    check_notification_queue,
    check_pool,
    check_pooler,
    check_server,
    check_server_connections,
    check_status_statistics,
    check_table_statistics,
)


def examine(
    engine: sa.Engine,
    models: Iterable[Any] = (),
    checks: Iterable[Callable[[Examination], Iterator[Finding]]] = CHECKS,
    *,
    deep: bool = False,
    **thresholds: Any,
) -> list[Finding]:
    """Return what checks find, in a read-only transaction as a doctor has it."""
    with engine.connect() as plain:
        connection = plain.execution_options(postgresql_readonly=True)
        connection.execute(sa.text("SET LOCAL statement_timeout = '5s'"))
        specs = [spec_of(model) for model in models]
        examination = Examination(connection, specs, Thresholds(**thresholds), deep)
        return [finding for check in checks for finding in check(examination)]


def find(code: str, *arguments: Any, **options: Any) -> Finding:
    """Return the one finding of a code, with what every finding has."""
    found = [each for each in examine(*arguments, **options) if each.code == code]
    assert len(found) == 1, found
    (finding,) = found
    assert finding.summary.endswith("."), finding.summary
    assert finding.consequence.endswith("."), finding.consequence
    return finding


def codes(*arguments: Any, **options: Any) -> list[str]:
    return [finding.code for finding in examine(*arguments, **options)]


def apply(dsn: str, fix: str) -> None:
    """Execute a fix as psql does: one statement after the other, each by itself."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        for statement in re.split(r";\n", fix):
            connection.execute(statement.encode())


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)


def plain_engine(url: str, **options: Any) -> sa.Engine:
    """Return an engine that keeps no connection."""
    return sa.create_engine(url, poolclass=NullPool, **options)
