"""What fails is left out, and does not hide the rest; results are served again for a while."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from prometheus_client import CollectorRegistry
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from sqlaqueue.exc import ConfigurationError
from sqlaqueue.prometheus import QueueCollector, metrics_app, queues
from tests.prometheus.test_gauges import make_two
from tests.prometheus.values import STATEMENT_TIMEOUT, collect, parse, values
from tests.servers import Database
from tests.unique.models import create


@pytest.fixture
def two(engine: sa.Engine) -> tuple[Any, Any]:
    models = make_two()
    create(engine, models[0])
    with Session(engine) as session:
        session.add_all([models[0](), models[1]()])
        session.commit()
    return models


@pytest.fixture
def statements(engine: sa.Engine) -> Iterator[list[str]]:
    """The statements that the engine executes."""
    seen: list[str] = []

    def remember(connection: Any, cursor: Any, statement: str, *others: Any) -> None:
        seen.append(statement)

    sa.event.listen(engine, "before_cursor_execute", remember)
    yield seen
    sa.event.remove(engine, "before_cursor_execute", remember)


def test_a_dropped_table_hides_neither_other_queues_nor_other_gauges(engine: sa.Engine, two: tuple[Any, Any]) -> None:
    with engine.begin() as connection:
        connection.exec_driver_sql("DROP TABLE first")
    found = collect(engine, *two)
    assert (found["scrape_success", "first"], found["scrape_success", "second"]) == (0, 1)
    assert ("jobs", "first", "pending") not in found
    assert found["consumers", "first"] == 0
    assert found["jobs", "second", "pending"] == 1


def test_a_locked_table_is_waited_for_no_longer_than_the_timeout(
    engine: sa.Engine, two: tuple[Any, Any], statements: list[str]
) -> None:
    with engine.connect() as connection:
        connection.exec_driver_sql("LOCK TABLE first")
        statements.clear()
        found = collect(engine, *two, statement_timeout=0.3)
        connection.rollback()
    assert (found["scrape_success", "first"], found["scrape_success", "second"]) == (0, 1)
    assert found["jobs", "second", "pending"] == 1
    # Nothing more is read of a queue that has taken as long as the timeout.
    begun = [number for number, statement in enumerate(statements) if "set_config" in statement]
    assert begun[1] - begun[0] == 2
    assert ("consumers", "first") not in found


def test_a_scrape_cannot_write(engine: sa.Engine, two: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def write(reader: queues.GaugeReader, session: Session) -> Iterator[Any]:
        session.execute(sa.insert(two[0]))
        yield from ()

    monkeypatch.setattr(queues, "_PARTS", (*queues._PARTS, write))
    found = collect(engine, *two)
    assert (found["scrape_success", "first"], found["jobs", "first", "pending"]) == (0, 1)
    assert collect(engine, *two)["jobs", "first", "pending"] == 1


def test_a_server_that_does_not_answer(database: Any, two: tuple[Any, Any], caplog: pytest.LogCaptureFixture) -> None:
    engine = sa.create_engine(database.url().replace(database.name, "missing"), poolclass=sa.NullPool)
    registry, collector = CollectorRegistry(), QueueCollector(two, sessionmaker(engine), max_age=0)
    registry.register(collector)
    with caplog.at_level(logging.INFO, "sqlaqueue"):
        found = values(registry.collect())
        assert values(registry.collect())["scrape_success", "first"] == 0
    assert {key[0] for key in found} == {"scrape_success", "scrape_duration_seconds"}
    assert found["scrape_success", "first"] == found["scrape_success", "second"] == 0
    # The first failure of each queue is logged, not those that follow.
    assert [(record.event, record.queue) for record in caplog.records] == [
        ("scrape_failed", "first"),
        ("scrape_failed", "second"),
    ]


@pytest.mark.parametrize("driver", ["psycopg", "psycopg2"])
def test_closed_connections_of_the_pool_are_replaced(database: Database, two: tuple[Any, Any], driver: Any) -> None:
    engine = sa.create_engine(database.url(driver))
    create(engine, two[0])
    collector = QueueCollector(two, sessionmaker(engine), max_age=0, statement_timeout=STATEMENT_TIMEOUT)
    try:
        assert values(collector.collect())["scrape_success", "first"] == 1
        database.kill_backends()
        found = values(collector.collect())
        assert found["scrape_success", "first"] == found["scrape_success", "second"] == 1
    finally:
        engine.dispose()


async def test_closed_connections_of_an_async_pool_are_replaced(database: Database, two: tuple[Any, Any]) -> None:
    plain = sa.create_engine(database.url(), poolclass=sa.NullPool)
    create(plain, two[0])
    engine = create_async_engine(database.url("asyncpg"))
    app = metrics_app(two, async_sessionmaker(engine), max_age=0, statement_timeout=STATEMENT_TIMEOUT)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        for _ in range(2):
            found = parse((await client.get("/metrics")).text)
            assert found["scrape_success", "first"] == found["scrape_success", "second"] == 1
            await asyncio.to_thread(database.kill_backends)
    await engine.dispose()


def test_failure_and_recovery_are_logged_once(
    engine: sa.Engine, two: tuple[Any, Any], caplog: pytest.LogCaptureFixture
) -> None:
    collector = QueueCollector([two[0]], sessionmaker(engine), max_age=0, statement_timeout=STATEMENT_TIMEOUT)
    with caplog.at_level(logging.INFO, "sqlaqueue"):
        for statement in (
            "ALTER TABLE first RENAME TO away",
            "SELECT 1",
            "ALTER TABLE away RENAME TO first",
            "SELECT 1",
        ):
            with engine.begin() as connection:
                connection.exec_driver_sql(statement)
            list(collector.collect())
    assert [record.event for record in caplog.records] == ["scrape_failed", "scrape_recovered"]


def test_a_result_is_served_again(engine: sa.Engine, two: tuple[Any, Any], statements: list[str]) -> None:
    collector = QueueCollector(two, sessionmaker(engine), max_age=3600, statement_timeout=STATEMENT_TIMEOUT)
    first = values(collector.collect())
    number = len(statements)
    assert number > 0
    with Session(engine) as session:
        session.add(two[0]())
        session.commit()
    statements.clear()
    assert values(collector.collect()) == first
    assert statements == []


def test_without_a_maximum_age_each_scrape_reads(engine: sa.Engine, two: tuple[Any, Any]) -> None:
    collector = QueueCollector(two, sessionmaker(engine), max_age=0, statement_timeout=STATEMENT_TIMEOUT)
    assert values(collector.collect())["jobs", "first", "pending"] == 1
    with Session(engine) as session:
        session.add(two[0]())
        session.commit()
    assert values(collector.collect())["jobs", "first", "pending"] == 2


def test_several_scrapes_at_once_cost_one(engine: sa.Engine, two: tuple[Any, Any], statements: list[str]) -> None:
    collector = QueueCollector(two, sessionmaker(engine), max_age=3600, statement_timeout=STATEMENT_TIMEOUT)
    with engine.connect() as connection:
        connection.exec_driver_sql("LOCK TABLE first")
        threads = [threading.Thread(target=collector.collect) for _ in range(5)]
        for thread in threads:
            thread.start()
        connection.rollback()
    for thread in threads:
        thread.join()
    assert sum("set_config" in statement for statement in statements) == len(two)


def test_registering_reads_nothing(engine: sa.Engine, two: tuple[Any, Any], statements: list[str]) -> None:
    CollectorRegistry(auto_describe=True).register(QueueCollector(two, sessionmaker(engine)))
    assert statements == []


def test_a_function_that_makes_async_sessions(two: tuple[Any, Any]) -> None:
    def make() -> Any:
        return AsyncSession()

    with pytest.raises(ConfigurationError, match=r"makes AsyncSession; give a sessionmaker, or use metrics_app"):
        list(QueueCollector(two, make).collect())
