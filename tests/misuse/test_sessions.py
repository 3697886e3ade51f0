"""Claims and Consumers refuse sessions that cannot work."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from sqlaqueue import AsyncConsumer, Consumer, QueueConfig, QueueMixin, cancel, claim, complete, purge, rescue
from sqlaqueue.exc import ConfigurationError, StatementError
from tests.servers import Server


def make_model(strategy: str) -> Any:
    class Base(DeclarativeBase):
        pass

    class Order(QueueMixin, Base):
        __tablename__ = "orders"
        __queue__ = QueueConfig(strategy=strategy)
        id: Mapped[int] = mapped_column(primary_key=True)

    return Order


MODELS = {strategy: make_model(strategy) for strategy in ("update_status", "batch_select", "delete_returning")}


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> Any:
    return MODELS[request.param]


@pytest.fixture
def engine(server: Server, model: Any) -> Iterator[sa.Engine]:
    with server.database() as database:
        engine = sa.create_engine(database.url())
        model.metadata.create_all(engine)
        with Session(engine) as session:
            session.add_all([model() for _ in range(3)])
            session.commit()
        yield engine
        engine.dispose()


@pytest.fixture
def sqlite() -> Iterator[sa.Engine]:
    engine = sa.create_engine("sqlite://")
    yield engine
    engine.dispose()


def test_a_second_claim_in_the_same_transaction(engine: sa.Engine, model: Any) -> None:
    """SKIP LOCKED does not skip rows that its own transaction has locked."""
    with Session(engine) as session:
        first = session.scalars(claim(model, 2)).all()
        if model is MODELS["batch_select"]:
            with pytest.raises(StatementError, match=r"Order \d was claimed twice in one transaction"):
                session.scalars(claim(model, 2)).all()
            session.execute(complete(first))
        assert len(session.scalars(claim(model, 2)).all()) == 1


def test_a_claim_with_yield_per(engine: sa.Engine, model: Any) -> None:
    """A claim that only locks rows works; a claim that writes is refused before it claims."""
    with Session(engine) as session:
        statement = claim(model, 3).execution_options(yield_per=2)
        if model is MODELS["batch_select"]:
            assert len(session.scalars(statement).all()) == 3
            return
        with pytest.raises(StatementError, match=r"yield_per=2 .* claim fewer jobs at a time"):
            session.scalars(statement)
        session.rollback()
        assert len(session.scalars(claim(model, 3)).all()) == 3


def test_a_claim_after_a_rollback(engine: sa.Engine, model: Any) -> None:
    with Session(engine) as session:
        savepoint = session.begin_nested()
        first = session.scalars(claim(model, 5)).all()
        savepoint.rollback()
        assert len(session.scalars(claim(model, 5)).all()) == len(first)
        session.rollback()
        assert len(session.scalars(claim(model, 5)).all()) == len(first)


def test_a_claim_in_an_aborted_transaction_raises_the_usual_error(engine: sa.Engine, model: Any) -> None:
    """The errors are those of any other statement, and no job is claimed."""
    with Session(engine) as session:
        with pytest.raises(sa.exc.DataError):
            session.execute(sa.text("SELECT 1 / 0"))
        with pytest.raises(sa.exc.InternalError, match="current transaction is aborted"):
            session.scalars(claim(model, 1)).all()
        session.rollback()
        session.add(model(id=1))
        with pytest.raises(sa.exc.IntegrityError):
            session.scalars(claim(model, 1)).all()
        with pytest.raises(sa.exc.PendingRollbackError, match=r"first issue Session\.rollback"):
            session.scalars(claim(model, 1)).all()
    with Session(engine) as session:
        assert len(session.scalars(claim(model, 5)).all()) == 3


@pytest.mark.once
@pytest.mark.parametrize("verb", [lambda model: claim(model, 1), rescue, cancel, purge])
def test_another_database_is_refused(sqlite: sa.Engine, model: Any, verb: Any) -> None:
    """No statement is sent: without SKIP LOCKED two workers could claim the same job."""
    said = r"engine is for sqlite, and is not prepared; call sqlaqueue.sqlite.prepare\(engine\) before its first use"
    with Session(sqlite) as session, pytest.raises(ConfigurationError, match=said):
        session.execute(verb(model))


@pytest.mark.once
def test_a_consumer_on_another_database_is_refused(sqlite: sa.Engine, model: Any) -> None:
    sessions = sessionmaker(sqlite)
    with pytest.raises(ConfigurationError, match=r"Consumer\(Order, \.\.\.\): its sessions' engine is for sqlite"):
        Consumer(model, lambda session, job: None, sessions).run()


@pytest.mark.parametrize("pool_size", [1, 2])
def test_a_pool_that_is_too_small_is_refused(engine: sa.Engine, model: Any, pool_size: int) -> None:
    small = create_async_engine(engine.url, pool_size=pool_size, max_overflow=0)

    async def handle(session: Any, job: Any) -> None:
        pass

    consumer = AsyncConsumer(model, handle, async_sessionmaker(small), concurrency=2)
    with pytest.raises(ConfigurationError, match=rf"needs 3 connections, .* allows {pool_size}; .*pool_size=3"):
        asyncio.run(consumer.run())


def test_an_engine_with_autocommit_is_refused(engine: sa.Engine, model: Any) -> None:
    sessions = sessionmaker(engine.execution_options(isolation_level="AUTOCOMMIT"))
    with pytest.raises(ConfigurationError, match=r"Order commit each statement by itself \(AUTOCOMMIT\)"):
        Consumer(model, lambda session, job: None, sessions).run()
