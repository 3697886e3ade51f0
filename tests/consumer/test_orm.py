"""Jobs as the ORM's objects: eager loading, what a job costs in statements, and unusual sessions."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session, scoped_session, selectinload, sessionmaker

from sqlaqueue import Consumer
from sqlaqueue.exc import ConfigurationError
from tests.consumer.bench import Bench, nothing
from tests.consumer.models import for_sync


def with_owners(bench: Bench, n: int) -> Any:
    """Add jobs of one owner and return the select that loads it with them."""
    with bench.sessions() as session:
        owner = bench.Owner(name="the owner")
        session.add_all([bench.Job(owner=owner) for _ in range(n)])
        session.commit()
    return sa.select(bench.Job).options(selectinload(bench.Job.owner))


def test_related_objects_are_loaded_with_the_jobs(bench: Bench) -> None:
    """Several handlers at once work on jobs that share one."""
    names: list[str] = []

    async def work(io: Any, job: Any) -> None:
        names.append(job.owner.name)
        job.payload = job.owner.name
        await io.flush()

    server = bench.consumer(work, model=with_owners(bench, 12), concurrency=4, batch_size=6)
    assert server.drain() == 12
    assert names == ["the owner"] * 12
    assert {row.payload for row in bench.rows().values()} == {"the owner"}


def test_related_objects_are_loaded_with_the_jobs_of_a_batch(bench: Bench) -> None:
    """And are loaded again when it is tried job by job."""
    calls: list[int] = []

    async def work(io: Any, jobs: Any) -> None:
        assert {job.owner.name for job in jobs} == {"the owner"}
        for job in jobs:
            job.payload = job.owner.name
        await io.flush()
        calls.append(len(jobs))
        if len(jobs) > 1:
            raise ValueError

    server = bench.consumer(work, model=with_owners(bench, 6), batch=True, batch_size=3, concurrency=2)
    assert server.drain() == 6
    assert sorted(calls) == [1] * 6 + [3, 3]
    assert {row.payload for row in bench.rows().values()} == {"the owner"}


class Counter:
    """Counts the statements of an engine."""

    def __init__(self, engine: sa.Engine) -> None:
        self.statements: list[str] = []
        sa.event.listen(engine, "before_cursor_execute", self._count)

    def _count(self, connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        self.statements.append(statement)


def test_jobs_without_writes_cost_no_statement_each(bench: Bench) -> None:
    """They are claimed together and settled together, and nothing is read again after a commit."""
    bench.enqueue(200)

    async def read(io: Any, job: Any) -> None:
        assert job.payload is None
        assert job.id

    server = bench.consumer(read, batch_size=100)
    counter = Counter(server.sync_engine)
    assert server.drain() == 200
    assert len(counter.statements) < 60, "\n".join(counter.statements)


def test_a_job_with_writes_costs_its_settlement_and_no_more(bench: Bench) -> None:
    bench.enqueue(100)

    async def work(io: Any, job: Any) -> None:
        await io.execute(bench.effect(job.id))

    server = bench.consumer(work, batch_size=100)
    counter = Counter(server.sync_engine)
    assert server.drain() == 100
    inserts = [statement for statement in counter.statements if "INTO effect" in statement]
    assert len(inserts) == 100
    # A savepoint for each in a held batch; an UPDATE for each under a lease.
    assert len(counter.statements) < 100 + 200 + 60


def test_a_factory_without_autoflush_or_expiry(bench: Bench) -> None:
    keys = bench.enqueue(4)

    async def work(io: Any, job: Any) -> None:
        job.payload = "written"
        io.add(bench.Effect(job=job.id))
        if job.id == keys[0]:
            raise ValueError

    server = bench.consumer(work, retry=lambda *_: None, session={"autoflush": False, "expire_on_commit": False})
    server.drain()
    assert bench.states() == {"completed": 3, "failed": 1}
    assert [row.payload for row in bench.rows().values()] == [None, "written", "written", "written"]
    assert bench.effects() == dict.fromkeys(keys[1:], 1)
    bench.assert_tidy()


def test_sessions_of_a_custom_class(supply: Any, strategy: str) -> None:
    """With a bind for each class and none for the rest, and an event of its own."""
    bench = supply.take(strategy, "sync")
    bench.enqueue(3)
    engine = sa.create_engine(bench.database.url(), pool_size=3)
    commits: list[Session] = []

    class OwnSession(Session):
        """A session of the user's."""

    make = sessionmaker(class_=OwnSession, binds={bench.models.base: engine})
    sa.event.listen(make, "after_commit", commits.append)
    seen: list[type] = []

    async def work(io: Any, job: Any) -> None:
        seen.append(type(io.session))
        await io.execute(bench.effect(job.id))

    assert Consumer(bench.Job, for_sync(work), make, concurrency=2).drain() == 3
    engine.dispose()
    assert all(issubclass(kind, OwnSession) for kind in seen)
    assert len(seen) == 3
    assert commits
    assert set(bench.effects().values()) == {1}
    bench.assert_tidy()


def test_a_scoped_session_is_not_used(supply: Any, strategy: str) -> None:
    """It is one session per thread, which one operation of a Consumer would commit or close under another."""
    bench = supply.take(strategy, "sync")
    bench.enqueue(5)
    engine = sa.create_engine(bench.database.url(), pool_size=3)
    scoped = scoped_session(sessionmaker(engine))
    mine = scoped()

    async def work(io: Any, job: Any) -> None:
        assert io.session is not scoped()
        await io.execute(bench.effect(job.id))

    assert Consumer(bench.Job, for_sync(work), scoped, concurrency=2).drain() == 5
    assert scoped() is mine
    scoped.remove()
    engine.dispose()
    assert len(bench.effects()) == 5
    bench.assert_tidy()


def test_two_phase_commits(postgres_server: Any, strategy: str) -> None:
    """Where the server can prepare transactions, and the queue is one that does without notifications."""
    with postgres_server.database() as database:
        bench = Bench(database, strategy, "sync", notify=False)
        with database.connect() as connection:
            connection.execute("ALTER SYSTEM SET max_prepared_transactions = 20")
        postgres_server.restart()
        bench.create()
        bad, *good = bench.enqueue(4)

        async def work(io: Any, job: Any) -> None:
            await io.execute(bench.effect(job.id))
            if job.id == bad:
                raise ValueError

        engine = sa.create_engine(database.url(), pool_size=3)
        make = sessionmaker(engine, twophase=True)
        Consumer(bench.Job, for_sync(work), make, concurrency=2, batch_size=2).drain()
        engine.dispose()
        assert bench.states() == {"completed": 3, "failed": 1}
        assert bench.effects() == dict.fromkeys(good, 1)
        bench.assert_tidy()


def test_two_phase_commits_and_notifications_are_refused(supply: Any, strategy: str) -> None:
    bench = supply.take(strategy, "sync")
    consumer = Consumer(bench.Job, for_sync(nothing), sessionmaker(bench.engine, twophase=True))
    with pytest.raises(ConfigurationError, match=r"Job: .* two-phase .*QueueConfig\(notify=False\)"):
        consumer.drain()


def test_rows_as_messages(supply: Any, api: str) -> None:
    """Their rows are gone while they run: what fails is written again as it was, or moves to the dead letters."""
    bench = supply.take("own_message", api)
    keys = bench.enqueue(4, payload="as it was")
    calls: list[int] = []

    async def work(io: Any, job: Any) -> None:
        calls.append(job.id)
        assert job.payload == "as it was"
        job.payload = "changed"
        await io.execute(bench.effect(job.id))
        if job.id == keys[1]:
            raise ValueError
        if job.id == keys[2] and calls.count(job.id) == 1:
            raise ValueError

    server = bench.consumer(work, concurrency=2, batch_size=2)
    server.drain()
    assert bench.states() == {"failed": 1}
    assert calls.count(keys[1]) == 3
    assert calls.count(keys[2]) == 2
    assert bench.effects() == {keys[0]: 1, keys[2]: 1, keys[3]: 1}
    assert sorted(server.told("completed")) == [keys[0], keys[2], keys[3]]
    assert bench.execute("SELECT \"row\" ->> 'payload' FROM sqlaqueue_dead_letter") == "as it was"
    bench.assert_tidy()


@pytest.mark.parametrize("batch", [False, True])
def test_rows_as_messages_that_a_worker_held_when_it_stopped(supply: Any, api: str, batch: bool) -> None:  # noqa: FBT001 - a parameter of the test
    bench = supply.take("own_message", api)
    bench.enqueue(5, payload="as it was")
    seen = threading.Event()

    async def work(io: Any, jobs: Any) -> None:
        for job in jobs if batch else [jobs]:
            job.payload = "changed"
        if not seen.is_set():
            seen.set()
            server.stop()
            raise ValueError

    server = bench.consumer(work, batch=batch)
    server.run()
    assert {row.payload for row in bench.rows().values()} == {"as it was"}
    assert len(bench.rows()) == 5
    assert sum(bench.attempts().values()) == (0 if batch else 1)
    bench.assert_tidy()
