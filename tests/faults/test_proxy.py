"""The proxy drops or holds a COMMIT, however a driver sends it, and forwards everything else."""

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


def count_effects(database: Database) -> int:
    with database.connect() as connection:
        row = connection.execute("SELECT count(*) FROM effect").fetchone()
    assert row is not None
    return row[0]


def write_by_psycopg(proxy: Proxy) -> None:
    engine = sa.create_engine(proxy.url("psycopg"), poolclass=sa.NullPool)
    with engine.begin() as connection:
        for job in range(8):  # psycopg prepares the statement after some executions
            connection.execute(sa.text("INSERT INTO effect VALUES (:job)"), {"job": job})


def write_by_asyncpg(proxy: Proxy) -> None:
    async def write() -> None:
        engine = create_async_engine(proxy.url("asyncpg"), poolclass=sa.NullPool)
        async with engine.begin() as connection:
            for job in range(8):
                await connection.execute(sa.text("INSERT INTO effect VALUES (:job)"), {"job": job})

    asyncio.run(write())


def write_by_extended_protocol(proxy: Proxy) -> None:
    """Send the COMMIT by the extended protocol, which no driver does by itself."""
    url = proxy.url("psycopg").replace("+psycopg", "")
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("BEGIN")
        with connection.cursor() as cursor:
            cursor.executemany("INSERT INTO effect VALUES (%s)", [[job] for job in range(8)])
            cursor.execute("COMMIT", binary=True)


WRITERS = [write_by_psycopg, write_by_asyncpg, write_by_extended_protocol]


@pytest.mark.parametrize("write", WRITERS)
def test_a_commit_without_a_rule_is_forwarded(database: Database, proxy: Proxy, write: Any) -> None:
    rule = proxy.on_commit("claim", "drop_commit")
    write(proxy)
    assert count_effects(database) == 8
    assert not rule.triggered.is_set()


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize(("action", "committed"), [("drop_commit", 0), ("drop_reply", 8)])
def test_a_commit_or_its_reply_is_dropped(
    database: Database, proxy: Proxy, write: Any, action: Action, committed: int
) -> None:
    rule = proxy.on_commit("settle_with_effects", action)
    with pytest.raises((psycopg.OperationalError, sa.exc.DBAPIError, OSError)):
        write(proxy)
    assert rule.triggered.is_set()
    assert count_effects(database) == committed
    # A rule applies once.
    write(proxy)
    assert count_effects(database) == committed + 8


def test_a_commit_is_held(database: Database, proxy: Proxy) -> None:
    rule = proxy.on_commit("settle_with_effects", "hold_commit")

    async def write_and_resume() -> None:
        writing = asyncio.create_task(asyncio.to_thread(write_by_psycopg, proxy))
        assert await asyncio.to_thread(rule.triggered.wait, 30)
        assert count_effects(database) == 0
        rule.resume.set()
        await writing

    asyncio.run(write_and_resume())
    assert count_effects(database) == 8


def test_the_kind_of_a_transaction_follows_from_its_statements() -> None:
    assert kind_of(["SELECT 1"]) == "other"
    assert kind_of(["WITH a AS (SELECT id FROM job LIMIT 4 FOR UPDATE SKIP LOCKED)"]) == "claim"
    assert (
        kind_of(["WITH a AS (SELECT id LIMIT 4 FOR UPDATE SKIP LOCKED)", "INSERT INTO effect"]) == "settle_with_effects"
    )
    assert kind_of(["UPDATE job SET lease_expires_at=now()"]) == "extend"
    assert kind_of(["UPDATE job SET status='completed', lease_expires_at=NULL"]) == "settle"
    assert (
        kind_of(["WITH sqlaqueue_ended AS \n(UPDATE job SET status='completed' RETURNING id) SELECT count(*)"])
        == "complete"
    )
