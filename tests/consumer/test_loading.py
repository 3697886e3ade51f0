"""Instances are made of what a claim has returned, with all that their mapping loads, in sessions of many kinds."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.orm import (
    DeclarativeBase,
    Mapped,
    Session,
    column_property,
    mapped_column,
    relationship,
    scoped_session,
    selectinload,
    sessionmaker,
)

from sqlaqueue import Consumer, QueueConfig, QueueMixin
from sqlaqueue.consumer.sessions import transaction_used
from sqlaqueue.exc import ConfigurationError
from tests.consumer.bench import Bench, Server, logged, nothing, noting
from tests.consumer.models import STRATEGIES, for_sync, models
from tests.contexts import statements_of
from tests.models import create, insert, make_job, read, sent_statements
from tests.programs import wait_until
from tests.servers import Database

N, CLAIM = 12, 4


@contextlib.contextmanager
def loading(bench: Bench, noted: Callable[[Any], None]) -> Iterator[None]:
    """Call something for each instance that is made."""

    def loaded(job: Any, _: Any) -> None:
        noted(job)

    event.listen(bench.Job, "load", loaded)
    try:
        yield
    finally:
        event.remove(bench.Job, "load", loaded)


@pytest.mark.parametrize("failing", [0, CLAIM + 1, N - 1])
def test_a_claim_that_cannot_be_loaded_is_rolled_back(bench: Bench, failing: int) -> None:
    """Its jobs are claimed again without a counted attempt, and runs that ended before are settled once."""
    keys = bench.enqueue(N)
    failures: list[int] = []

    def fail_once(job: Any) -> None:
        if job.id == keys[failing] and not failures:
            failures.append(job.id)
            raise RuntimeError

    server = bench.consumer(batch_size=CLAIM)
    with loading(bench, fail_once):
        assert server.drain() == N
    assert failures == [keys[failing]]
    assert server.told()["completed"] == N
    assert not server.told("lease_lost", "rescued", "retried")
    bench.expect(attempts=1)


def test_a_job_that_can_never_be_loaded_waits(leased: Bench) -> None:
    """For a program that can load it, such as the earlier version; no attempt is counted."""
    leased.enqueue(N)
    failures: list[int] = []

    def fail(job: Any) -> None:
        failures.append(job.id)
        raise RuntimeError

    with loading(leased, fail), leased.consumer(batch_size=CLAIM).running():
        wait_until(lambda: len(failures) > 2)
    assert leased.states() == {"pending": N}
    assert {row.lease_token for row in leased.rows().values()} == {None}
    assert leased.consumer(batch_size=CLAIM).drain() == N
    assert set(leased.attempts().values()) == {1}


def test_a_class_that_does_not_fit_its_table_is_named(leased: Bench, log: Any) -> None:
    """A Consumer starts nevertheless: another process may have a class that does, and takes the jobs."""
    keys = leased.enqueue(N)

    def fail(job: Any) -> None:
        msg = f"no payload in {job.id}"
        raise ValueError(msg)

    with loading(leased, fail):
        assert leased.consumer(batch_size=CLAIM).drain() == 0
    assert leased.states() == {"pending": N}
    assert {record.job_key for record in logged(log, "job_unclaimable")} == set(keys)


def test_eager_loading_leaves_no_transaction_open(leased: Bench) -> None:
    """Otherwise each handler would seem to have used its session."""
    with leased.sessions() as session:
        session.add_all([leased.Job(owner=leased.Owner(name=str(number))) for number in range(N)])
        session.commit()
    seen: list[tuple[str, bool]] = []

    async def look(io: Any, jobs: Any) -> None:
        session = getattr(io.session, "sync_session", io.session)
        # One without a statement begins when a slow claim's jobs move to another session.
        seen.extend((job.owner.name, transaction_used(session, session.get_transaction())) for job in jobs)

    chosen = sa.select(leased.Job).options(selectinload(leased.Job.owner))
    assert leased.consumer(look, model=chosen, batch=True, batch_size=CLAIM).drain() == N
    assert seen == [(str(number), False) for number in range(N)]


@pytest.mark.parametrize("kept", [1, N])
def test_a_session_need_not_be_empty(sync_bench: Bench, kept: int) -> None:
    """Its instance of a job is from before the claim."""
    keys = sync_bench.enqueue(N)

    class Loaded(Session):
        """A session that loads jobs when it is made."""

        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options | {"expire_on_commit": False})
            self.kept = [self.get(sync_bench.Job, key) for key in keys[:kept]]
            self.commit()

    seen: list[tuple[int, int]] = []
    note = noting(seen, lambda _, job: (job.id, job.attempts))
    assert sync_bench.consumer(note, batch_size=CLAIM, session={"class_": Loaded}).drain() == N
    assert sorted(seen) == [(key, 1) for key in keys]
    sync_bench.expect({"completed": N})


def test_one_job_may_load_another(shared: Database, engine: sa.Engine, strategy: str) -> None:
    """Of the same claim, before its own row is fetched; then the row has nothing left to load."""
    task_class = create(engine, make_job(strategy, {"unused": mapped_column(sa.Integer)}))
    insert(engine, task_class, [{"id": number} for number in range(N)])
    following: dict[int, Any] = {}

    @event.listens_for(task_class, "load", restore_load_context=True)
    def load_next(task: Any, context: Any) -> None:
        if task.id < N:
            following[task.id] = context.session.get(task_class, task.id + 1)

    seen: list[tuple[int, int]] = []

    async def note(_: Any, tasks: Any) -> None:
        seen.extend((task.id, task.attempts) for task in tasks)

    assert Server(shared, "sync", task_class, note, batch=True, batch_size=CLAIM).drain() == N
    assert sorted(seen) == [(number, 1) for number in range(N)]
    assert len(following) == N


def test_an_instance_that_the_application_keeps_is_not_used_again(bench: Bench) -> None:
    """Its values belong to a run that has ended."""
    bench.enqueue(N)
    kept: list[tuple[Any, int]] = []

    async def fail_first(io: Any, job: Any) -> None:
        kept.append((job, job.attempts))
        if job.attempts == 1:
            raise ValueError

    assert bench.consumer(fail_first, batch_size=CLAIM).drain() == 2 * N
    assert len({id(job) for job, _ in kept}) == 2 * N
    assert sorted(attempt for _, attempt in kept) == [1] * N + [2] * N


# -- handlers get instances with everything that their mapping loads: async code cannot load it later --------------


def mapped(strategy: str) -> tuple[Any, Any, dict[Any, str]]:
    """Return a base, a class that jobs refer to, and classes of jobs with what a claim by itself leaves out of each."""

    class Base(DeclarativeBase):
        pass

    class Owner(Base):
        __tablename__ = "owner"
        id: Mapped[int] = mapped_column(primary_key=True)
        name: Mapped[str]
        boss_id: Mapped[int | None] = mapped_column(sa.ForeignKey("owner.id"))
        boss: Mapped[Owner | None] = relationship(lazy="joined", join_depth=2, remote_side="Owner.id")

    class Task(QueueMixin, Base):
        __abstract__ = True
        __queue__ = QueueConfig(strategy=strategy)
        id: Mapped[int] = mapped_column(primary_key=True)
        owner_id: Mapped[int | None] = mapped_column(sa.ForeignKey(Owner.id), default=1)

    class Joined(Task):
        __tablename__ = "joined"
        owner: Mapped[Owner] = relationship(lazy="joined")

    class Subquery(Task):
        __tablename__ = "subquery"
        owner: Mapped[Owner] = relationship(lazy="subquery")

    class Computed(Task):
        __tablename__ = "computed"
        owner_name: Mapped[str] = column_property(sa.func.concat("the ", "owner", type_=sa.Text()))

    class AnyTask(Task):
        __tablename__ = "any"
        kind: Mapped[str]
        __mapper_args__ = {"polymorphic_on": "kind", "polymorphic_identity": "any", "with_polymorphic": "*"}  # noqa: RUF012 - as declarative has it

    class OfAny(AnyTask):
        __tablename__ = "of_any"
        id: Mapped[int] = mapped_column(sa.ForeignKey(AnyTask.id), primary_key=True)
        to: Mapped[str] = mapped_column(default="its own")
        __mapper_args__ = {"polymorphic_identity": "of any"}  # noqa: RUF012 - as declarative has it

    class Some(Task):
        __tablename__ = "some"
        kind: Mapped[str]
        __mapper_args__ = {"polymorphic_on": "kind", "polymorphic_identity": "some"}  # noqa: RUF012 - as declarative has it

    class OfSome(Some):
        __tablename__ = "of_some"
        id: Mapped[int] = mapped_column(sa.ForeignKey(Some.id), primary_key=True)
        friend_id: Mapped[int] = mapped_column(sa.ForeignKey(Owner.id), default=2)
        friend: Mapped[Owner] = relationship(lazy="joined")
        __mapper_args__ = {"polymorphic_identity": "of some", "polymorphic_load": "inline"}  # noqa: RUF012 - as declarative has it

    return Base, Owner, {Joined: "owner", Subquery: "owner", Computed: "owner_name", OfAny: "to", OfSome: "friend"}


def test_everything_that_the_mapping_loads_is_there(
    shared: Database, engine: sa.Engine, strategy: str, api: str
) -> None:
    base, owner, kinds = mapped(strategy)
    base.metadata.create_all(engine)
    with Session(engine) as session:
        session.add_all([owner(id=2, name="the boss"), owner(id=1, name="the owner", boss_id=2)])
        session.commit()
        session.add_all([kind() for kind in kinds for _ in range(3)])
        session.commit()
    seen: list[tuple[Any, int]] = []

    async def note(_: Any, job: Any) -> None:
        value = vars(job)[kinds[type(job)]]
        seen.append((type(job), job.id))
        assert value in {"the owner", "its own"} or value.name == "the boss" or vars(value)["boss"].name == "the boss"
        assert job.status == "processing", "what the claim has shown is not read again"

    for kind in kinds:
        model = sa.inspect(kind).base_mapper.class_
        assert Server(shared, api, model, note).drain() == 3
        assert set(read(engine, model).values()) == {"completed"}
    assert seen == [(kind, number) for kind in kinds for number in (1, 2, 3)]


@pytest.mark.once
def test_a_claim_that_returns_everything_is_not_followed_by_a_select() -> None:
    """Lazy relationships, and those that are loaded by a SELECT of their own, do not need one."""
    assert statements_of(models("update_status").job).load_rest is None


# -- jobs as the ORM's objects: eager loading, what a job costs in statements, and unusual sessions ----------------


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


def test_jobs_without_writes_cost_no_statement_each(bench: Bench) -> None:
    """They are claimed together and settled together, and nothing is read again after a commit."""
    bench.enqueue(200)

    async def read(io: Any, job: Any) -> None:
        assert job.payload is None
        assert job.id

    server = bench.consumer(read, batch_size=100)
    with sent_statements(server.sync_engine) as sent:
        assert server.drain() == 200
    assert len(sent) < 60, sent


def test_a_job_with_writes_costs_its_settlement_and_no_more(bench: Bench) -> None:
    bench.enqueue(100)
    server = bench.consumer(bench.work, batch_size=100)
    with sent_statements(server.sync_engine) as sent:
        assert server.drain() == 100
    assert len([text for text, _ in sent if "INTO effect" in text]) == 100
    # A savepoint for each in a held batch; an UPDATE for each under a lease.
    assert len(sent) < 100 + 200 + 60


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
    bench.expect(effects=keys[1:])


def test_sessions_of_a_custom_class(sync_bench: Bench) -> None:
    """With a bind for each class and none for the rest, and an event of its own."""
    sync_bench.enqueue(3)
    engine = sa.create_engine(sync_bench.database.url(), pool_size=3)
    commits: list[Session] = []

    class OwnSession(Session):
        """A session of the user's."""

    make = sessionmaker(class_=OwnSession, binds={sync_bench.models.base: engine})
    sa.event.listen(make, "after_commit", commits.append)
    seen: list[type] = []

    async def work(io: Any, job: Any) -> None:
        seen.append(type(io.session))
        await io.execute(sync_bench.effect(job.id))

    assert Consumer(sync_bench.Job, for_sync(work), make, concurrency=2).drain() == 3
    engine.dispose()
    assert all(issubclass(kind, OwnSession) for kind in seen)
    assert len(seen) == 3
    assert commits
    sync_bench.expect(effects=1)


def test_a_scoped_session_is_not_used(sync_bench: Bench) -> None:
    """It is one session per thread, which one operation of a Consumer would commit or close under another."""
    sync_bench.enqueue(5)
    engine = sa.create_engine(sync_bench.database.url(), pool_size=3)
    scoped = scoped_session(sessionmaker(engine))
    mine = scoped()

    async def work(io: Any, job: Any) -> None:
        assert io.session is not scoped()
        await io.execute(sync_bench.effect(job.id))

    assert Consumer(sync_bench.Job, for_sync(work), scoped, concurrency=2).drain() == 5
    assert scoped() is mine
    scoped.remove()
    engine.dispose()
    assert len(sync_bench.effects()) == 5
    sync_bench.assert_tidy()


def test_two_phase_commits(postgres_server: Any) -> None:
    """Where the server can prepare transactions, and the queue is one that does without notifications."""
    with psycopg.connect(postgres_server.dsn(), autocommit=True) as connection:
        connection.execute("ALTER SYSTEM SET max_prepared_transactions = 20")
    postgres_server.restart()
    for strategy in STRATEGIES:
        with postgres_server.database() as database:
            bench = Bench(database, strategy, "sync", notify=False)
            bench.create()
            bad, *good = bench.enqueue(4)
            work = bench.doing({bad: ValueError()})
            engine = sa.create_engine(database.url(), pool_size=3)
            make = sessionmaker(engine, twophase=True)
            Consumer(bench.Job, for_sync(work), make, concurrency=2, batch_size=2).drain()
            engine.dispose()
            bench.expect({"completed": 3, "failed": 1}, effects=good)


def test_two_phase_commits_and_notifications_are_refused(sync_bench: Bench) -> None:
    consumer = Consumer(sync_bench.Job, for_sync(nothing), sessionmaker(sync_bench.engine, twophase=True))
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
        if job.id == keys[1] or (job.id == keys[2] and calls.count(job.id) == 1):
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
