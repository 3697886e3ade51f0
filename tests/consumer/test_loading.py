"""Instances are made of what a claim has returned: in any session, and what happens if they cannot be made."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, selectinload, sessionmaker

from sqlaqueue import Consumer, QueueConfig, QueueMixin
from tests.consumer.bench import Bench
from tests.programs import wait_until

if TYPE_CHECKING:
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
    assert set(bench.attempts().values()) == {1}
    bench.assert_tidy()


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


def test_a_class_that_does_not_fit_its_table_is_named(leased: Bench, log: pytest.LogCaptureFixture) -> None:
    """A Consumer starts nevertheless: another process may have a class that does, and takes the jobs."""
    keys = leased.enqueue(N)

    def fail(job: Any) -> None:
        msg = f"no payload in {job.id}"
        raise ValueError(msg)

    with loading(leased, fail):
        assert leased.consumer(batch_size=CLAIM).drain() == 0
    assert leased.states() == {"pending": N}
    named = [record for record in log.records if getattr(record, "event", None) == "job_unclaimable"]
    assert {record.job_key for record in named} == set(keys)  # type: ignore[attr-defined] # set by `extra`


def test_eager_loading_leaves_no_transaction_open(leased: Bench) -> None:
    """Otherwise each handler would seem to have used its session."""
    with leased.sessions() as session:
        session.add_all([leased.Job(owner=leased.Owner(name=str(number))) for number in range(N)])
        session.commit()
    seen: list[tuple[str, bool]] = []

    async def look(io: Any, jobs: Any) -> None:
        seen.extend((job.owner.name, io.session.in_transaction()) for job in jobs)

    chosen = sa.select(leased.Job).options(selectinload(leased.Job.owner))
    assert leased.consumer(look, model=chosen, batch=True, batch_size=CLAIM).drain() == N
    assert seen == [(str(number), False) for number in range(N)]


@pytest.mark.parametrize("kept", [1, N])
def test_a_session_need_not_be_empty(supply: Any, strategy: str, kept: int) -> None:
    """Its instance of a job is from before the claim."""
    bench = supply.take(strategy, "sync")
    keys = bench.enqueue(N)

    class Loaded(Session):
        """A session that loads jobs when it is made."""

        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options | {"expire_on_commit": False})
            self.kept = [self.get(bench.Job, key) for key in keys[:kept]]
            self.commit()

    seen: list[tuple[int, int]] = []

    async def note(io: Any, job: Any) -> None:
        seen.append((job.id, job.attempts))

    assert bench.consumer(note, batch_size=CLAIM, session={"class_": Loaded}).drain() == N
    assert sorted(seen) == [(key, 1) for key in keys]
    assert bench.states() == {"completed": N}
    bench.assert_tidy()


def test_one_job_may_load_another(database: Database, strategy: str) -> None:
    """Of the same claim, before its own row is fetched; then the row has nothing left to load."""

    class Base(DeclarativeBase):
        pass

    class Task(QueueMixin, Base):
        __tablename__ = "task"
        __queue__ = QueueConfig(strategy=strategy)
        id: Mapped[int] = mapped_column(primary_key=True)

    engine = sa.create_engine(database.url())
    Base.metadata.create_all(engine)
    with Session(engine) as session:
        session.add_all([Task(id=number) for number in range(N)])
        session.commit()
    following: dict[int, Any] = {}

    @event.listens_for(Task, "load", restore_load_context=True)
    def load_next(task: Any, context: Any) -> None:
        if task.id < N:
            following[task.id] = context.session.get(Task, task.id + 1)

    seen: list[tuple[int, int]] = []

    def note(_: Any, tasks: Any) -> None:
        seen.extend((task.id, task.attempts) for task in tasks)

    assert Consumer(Task, note, sessionmaker(engine), batch=True, batch_size=CLAIM).drain() == N
    engine.dispose()
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
