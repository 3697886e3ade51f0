"""Two queues in one MetaData, database and process."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from sqlaqueue import Consumer, QueueConfig, QueueMixin, cancel, claim, complete, fail, purge, requeue, retry
from sqlaqueue.exc import StatementError
from tests.mapping.tidy import TidyDatabase, created

STRATEGIES = ["update_status", "delete_returning", "batch_select"]


class Queues:
    """Two queues with the same columns in one MetaData."""

    def __init__(self, first: QueueConfig, second: QueueConfig, **options: Any) -> None:
        class Base(DeclarativeBase):
            pass

        class First(QueueMixin, Base):
            __tablename__ = "first"
            __queue__ = first

            id: Mapped[int] = mapped_column(primary_key=True)
            done_by: Mapped[str | None]

        class Second(QueueMixin, Base):
            __tablename__ = options.pop("name", "second")
            __queue__ = second
            __table_args__ = options

            id: Mapped[int] = mapped_column(primary_key=True)
            done_by: Mapped[str | None]

        self.metadata, self.First, self.Second = Base.metadata, First, Second


def configs() -> list[Any]:
    own = QueueConfig(strategy="delete_returning", rows_are_messages=True)
    plain = [QueueConfig(strategy=strategy) for strategy in STRATEGIES]
    pairs = [(plain[0], plain[1]), (plain[1], plain[2]), (plain[2], plain[0]), (plain[1], plain[1]), (own, own)]
    names = ["update-delete", "delete-batch", "batch-update", "delete-delete", "own-own"]
    return [pytest.param(pair, id=name) for pair, name in zip(pairs, names, strict=True)]


@pytest.fixture(params=configs())
def pair(request: pytest.FixtureRequest) -> tuple[QueueConfig, QueueConfig]:
    pair: tuple[QueueConfig, QueueConfig] = request.param
    return pair


@pytest.fixture(params=["two tables", "two schemas"])
def queues(
    request: pytest.FixtureRequest, pair: tuple[QueueConfig, QueueConfig], tidy: TidyDatabase, engine: sa.Engine
) -> Iterator[Queues]:
    options = {"name": "first", "schema": "work"} if request.param == "two schemas" else {}
    queues = Queues(*pair, **options)
    with tidy.schemas(*([options["schema"]] if options else [])), created(engine, queues.metadata):
        yield queues


def ids(jobs: Any) -> list[int]:
    return sorted(job.id for job in jobs)


def test_two_queues_are_independent(queues: Queues, engine: sa.Engine) -> None:
    q = queues
    with Session(engine) as session:
        session.add_all([q.First(id=1), q.First(id=2), q.Second(id=1)])
        session.commit()
        first = session.scalars(claim(q.First, 10)).all()
        second = session.scalars(claim(q.Second, 10)).all()
        assert (ids(first), ids(second)) == ([1, 2], [1])
        assert {type(job) for job in first} == {q.First}
        session.execute(fail(first))
        session.execute(retry(second))
        session.commit()
        assert session.scalars(claim(q.First, 10)).all() == []
        assert ids(session.scalars(claim(q.Second, 10))) == [1]
        session.rollback()
        assert session.scalars(requeue(q.Second)).all() == []
        assert session.scalars(purge(q.Second)).all() == []
        assert sorted(session.scalars(requeue(q.First)).all()) == [1, 2]
        session.commit()
        assert session.scalars(cancel(sa.select(q.Second).where(q.Second.id == 1))).all() == [1]
        session.commit()
        assert ids(session.scalars(claim(q.First, 10))) == [1, 2]


def test_jobs_of_two_queues_in_one_verb_are_refused(queues: Queues, engine: sa.Engine) -> None:
    with Session(engine) as session:
        session.add_all([queues.First(), queues.Second()])
        session.commit()
        jobs = [session.scalars(claim(model, 1)).one() for model in (queues.First, queues.Second)]
        with pytest.raises(StatementError, match=r"different queues \(First, Second\); call it once for each queue"):
            complete(jobs)


@pytest.mark.each_value
def test_one_process_runs_two_queues(queues: Queues, engine: sa.Engine) -> None:
    factory, done = sessionmaker(engine), []
    with factory() as session:
        session.add_all([model(id=n) for model in (queues.First, queues.Second) for n in range(20)])
        session.commit()

    def handle(session: Session, job: Any) -> None:
        done.append((type(job), job.id))

    consumers = [Consumer(model, handle, factory) for model in (queues.First, queues.Second)]
    threads = [threading.Thread(target=consumer.drain) for consumer in consumers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    expected = {(model, n) for model in (queues.First, queues.Second) for n in range(20)}
    assert set(done) == expected
    assert len(done) == len(expected)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_side_tables_are_in_the_schema_of_the_queue(strategy: str) -> None:
    config = QueueConfig(strategy=strategy)

    class Base(DeclarativeBase):
        metadata = sa.MetaData(schema="work")

    for name, schema in (("one", sa.BLANK_SCHEMA), ("two", sa.BLANK_SCHEMA), ("three", None), ("four", "other")):
        options = {} if schema is None else {"schema": schema}
        body = {"__tablename__": name, "__queue__": config, "__table_args__": options}
        type(name, (QueueMixin, Base), {**body, "id": mapped_column(sa.Integer, primary_key=True)})
    tables = {(table.schema, table.name) for table in Base.metadata.tables.values()}
    shared = {"sqlaqueue_control", "sqlaqueue_consumer"} | (
        set() if strategy == "update_status" else {"sqlaqueue_crash_journal"}
    )
    expected = {(schema, name) for schema in (None, "work", "other") for name in shared}
    for place in ((None, "one"), (None, "two"), ("work", "three"), ("other", "four")):
        expected.add(place)
        if strategy == "delete_returning":
            expected.add((place[0], f"sqlaqueue_message_{place[1]}"))
    assert tables == expected
