"""The proxy passes everything on but the COMMITs it is told of, whichever way a driver sends them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import create_async_engine

from tests.faults.proxy import Action, Proxy, kind_of
from tests.servers import Database

pytestmark = pytest.mark.once


@pytest.fixture
def proxy(database: Database) -> Iterator[Proxy]:
    with database.connect() as connection:
        connection.execute("CREATE TABLE effect (job int)")
    with Proxy(database) as proxy:
        yield proxy


def there(database: Database) -> int:
    with database.connect() as connection:
        row = connection.execute("SELECT count(*) FROM effect").fetchone()
    assert row is not None
    return row[0]


def write_by_psycopg(proxy: Proxy) -> None:
    engine = sa.create_engine(proxy.url("psycopg"), poolclass=sa.NullPool)
    with engine.begin() as connection:
        for job in range(8):  # the last of them by a prepared statement
            connection.execute(sa.text("INSERT INTO effect VALUES (:job)"), {"job": job})


def write_by_asyncpg(proxy: Proxy) -> None:
    async def write() -> None:
        engine = create_async_engine(proxy.url("asyncpg"), poolclass=sa.NullPool)
        async with engine.begin() as connection:
            for job in range(8):
                await connection.execute(sa.text("INSERT INTO effect VALUES (:job)"), {"job": job})

    asyncio.run(write())


def write_by_extended_protocol(proxy: Proxy) -> None:
    """No driver sends its COMMIT like that by itself."""
    url = proxy.url("psycopg").replace("+psycopg", "")
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("BEGIN")
        with connection.cursor() as cursor:
            cursor.executemany("INSERT INTO effect VALUES (%s)", [[job] for job in range(8)])
            cursor.execute("COMMIT", binary=True)


WAYS = [write_by_psycopg, write_by_asyncpg, write_by_extended_protocol]


@pytest.mark.parametrize("write", WAYS)
def test_what_has_no_rule_passes(database: Database, proxy: Proxy, write: Any) -> None:
    rule = proxy.once("claim", "lose before")
    write(proxy)
    assert there(database) == 8
    assert not rule.met.is_set()


@pytest.mark.parametrize("write", WAYS)
@pytest.mark.parametrize(("action", "committed"), [("lose before", 0), ("lose after", 8)])
def test_a_commit_is_lost(database: Database, proxy: Proxy, write: Any, action: Action, committed: int) -> None:
    rule = proxy.once("settle", action)
    with pytest.raises((psycopg.OperationalError, sa.exc.DBAPIError, OSError)):
        write(proxy)
    assert rule.met.is_set()
    assert there(database) == committed
    # Once.
    write(proxy)
    assert there(database) == committed + 8


def test_a_commit_is_held(database: Database, proxy: Proxy) -> None:
    rule = proxy.once("settle", "hold")

    async def both() -> None:
        writing = asyncio.create_task(asyncio.to_thread(write_by_psycopg, proxy))
        assert await asyncio.to_thread(rule.met.wait, 30)
        assert there(database) == 0
        rule.go_on.set()
        await writing

    asyncio.run(both())
    assert there(database) == 8


def test_a_transaction_is_known_by_its_statements() -> None:
    assert kind_of(["SELECT 1"]) == "other"
    assert kind_of(["WITH a AS (SELECT id FROM job LIMIT 4 FOR UPDATE SKIP LOCKED)"]) == "claim"
    assert kind_of(["WITH a AS (SELECT id LIMIT 4 FOR UPDATE SKIP LOCKED)", "INSERT INTO effect"]) == "settle"
    assert kind_of(["UPDATE job SET lease_expires_at=now()"]) == "extend"
    assert kind_of(["UPDATE job SET status='completed', lease_expires_at=NULL"]) == "bulk"
    assert kind_of(["WITH ended AS (UPDATE job SET status='completed' RETURNING id) SELECT count(*)"]) == "bulk"
