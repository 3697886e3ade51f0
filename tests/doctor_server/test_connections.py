"""Connections that run out, and poolers."""

from __future__ import annotations

import asyncio
import re
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import create_async_engine

from sqlaqueue.admin.doctor.examination import Examination, Thresholds
from sqlaqueue.admin.doctor.server import check_pool, check_pooler, check_server_connections
from tests.doctor_server.examine import apply, codes, find, plain_engine
from tests.pooler import PROGRAM, Pooler

if TYPE_CHECKING:
    from tests.servers import Database

needs_pgbouncer = pytest.mark.skipif(PROGRAM is None, reason="pgbouncer is not installed; apt-get install pgbouncer")


def test_connections_of_the_server(own: Database, own_engine: sa.Engine) -> None:
    apply(own.dsn, "ALTER SYSTEM SET max_connections = 23;")
    own_engine.dispose()
    own.server.restart()
    check = [check_server_connections]
    # Three are reserved for superusers; the examination has one as well.
    opened = [psycopg.connect(own.dsn, application_name="leak's", autocommit=True) for _ in range(16)]
    assert codes(own_engine, checks=check) == []
    opened.append(psycopg.connect(own.dsn, application_name="other", autocommit=True))
    finding = find("connections_used", own_engine, checks=check, connection_idle=timedelta(0))
    assert finding.summary.startswith("18 of the server's 20 connections are in use: 16 of the role postgres and the")
    assert repr("leak's") in finding.summary
    # Sessions that were used just now are not ended.
    assert "max_connections" in find("connections_used", own_engine, checks=check).fixes[0]
    apply(own.dsn, finding.fixes[0])
    assert codes(own_engine, checks=check) == []
    for connection in opened:
        connection.close()


def test_the_other_fix_raises_the_limit(own: Database, own_engine: sa.Engine) -> None:
    check = [check_server_connections]
    finding = find("connections_used", own_engine, checks=check, connections_used=0.001)
    apply(own.dsn, finding.fixes[-1])
    own.server.restart()
    assert find("connections_used", own_engine, checks=check, connections_used=0.001).facts["limit"] == 2 * 297 - 3


@pytest.mark.parametrize(
    ("size", "overflow", "expected"), [(1, 0, ["small_pool"]), (1, 1, []), (5, 10, []), (1, -1, [])]
)
def test_pool(database: Database, size: int, overflow: int, expected: list[str]) -> None:
    engine = sa.create_engine(database.url(), pool_size=size, max_overflow=overflow)
    assert codes(engine, checks=[check_pool]) == expected
    if expected:
        assert "pool_size=2" in find("small_pool", engine, checks=[check_pool]).consequence
    engine.dispose()


def options(driver: str) -> dict[str, Any]:
    return {"connect_args": {"prepare_threshold": None}} if driver == "psycopg" else {}


@needs_pgbouncer
@pytest.mark.parametrize("driver", ["psycopg", "psycopg2"])
@pytest.mark.parametrize("pool_size", [1, 5])
def test_pooler_in_transaction_mode(database: Database, driver: str, pool_size: int) -> None:
    with Pooler(database, "transaction") as pooler:
        # Also where the examination has the only connection of the engine's pool.
        engine = sa.create_engine(pooler.url(driver), pool_size=pool_size, max_overflow=0, **options(driver))
        finding = find("transaction_pooler", engine, checks=[check_pooler])
        assert finding.severity == "warning"
        first, _, last = finding.facts["pids"]
        assert f"the processes {first} and {last}" in finding.summary
        assert str(database.server.directory) in finding.summary
        engine.dispose()
    found = re.search(r"SQLAQUEUE_URL='(.*)'", finding.fixes[0])
    assert found is not None
    direct = plain_engine(found[1])
    assert codes(direct, checks=[check_pooler]) == []


@needs_pgbouncer
def test_pooler_in_session_mode(database: Database) -> None:
    with Pooler(database, "session") as pooler:
        engine = sa.create_engine(pooler.url("psycopg"), **options("psycopg"))
        assert codes(engine, checks=[check_pooler]) == []
        engine.dispose()


@needs_pgbouncer
@pytest.mark.parametrize("driver", ["psycopg", "psycopg2"])
def test_pooler_without_a_free_connection(database: Database, driver: str) -> None:
    with Pooler(database, "transaction", size=1) as pooler:
        engine = sa.create_engine(pooler.url(driver), **options(driver))
        limits = {"statement_timeout": timedelta(seconds=1)}
        finding = find("transaction_pooler", engine, checks=[check_pooler], **limits)
        assert finding.severity == "notice"
        assert "its mode is not known" in finding.summary
        engine.dispose()


def codes_of_async_engine(url: str, **options: Any) -> list[str]:
    def check(connection: sa.Connection) -> list[str]:
        return [each.code for each in check_pooler(Examination(connection, [], Thresholds(), deep=False))]

    async def run() -> list[str]:
        engine = create_async_engine(url, **options)
        async with engine.connect() as connection:
            found = await connection.run_sync(check)
        await engine.dispose()
        return found

    return asyncio.run(run())


def test_async_engine(database: Database) -> None:
    assert codes_of_async_engine(database.url("asyncpg")) == []


@needs_pgbouncer
def test_async_engine_behind_a_pooler(database: Database) -> None:
    unprepared = {"statement_cache_size": 0, "prepared_statement_cache_size": 0}
    with Pooler(database, "transaction") as pooler:
        url = pooler.url("asyncpg")
        assert codes_of_async_engine(url, connect_args=unprepared, pool_size=1, max_overflow=0) == [
            "transaction_pooler"
        ]
