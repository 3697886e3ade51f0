"""The effects of every verb under every strategy: a table, random histories, and queues that keep no completed jobs."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from sqlalchemy.orm import Session

from sqlaqueue import cancel, claim, complete, extend, fail, purge, reconcile, release, requeue, rescue, retry
from sqlaqueue.testing import QueueUnderTest
from tests.mapping.conftest import awaitable_engine
from tests.models import create, insert, make_job
from tests.servers import Database

STRATEGIES: dict[str, tuple[str, dict[str, str | None]]] = {
    "update_status": ("update_status", {}),
    "batch_select": ("batch_select", {}),
    "delete_returning": ("delete_returning", {}),
    "own_message": ("delete_returning", {"status": None}),
}


class Left(NamedTuple):
    """What a verb leaves behind of a job, as everybody sees it."""

    state: str | None
    attempts: int | None
    changed: bool = True
    """Whether its key came back."""


PENDING = Left("pending", 0)
UNTOUCHED = Left("pending", 0, changed=False)
COUNTED = Left("pending", 1)
RUNNING = Left("processing", 1)
GONE = Left(None, None)
TABLE: dict[str, dict[str, Left]] = {
    verb: dict(zip(STRATEGIES, cells, strict=True))
    for verb, cells in {
        # verb: update_status, batch_select, delete_returning, rows that are their own message
        "claim": (RUNNING, PENDING, PENDING, PENDING),
        "claim a select": (RUNNING, PENDING, PENDING, PENDING),
        "complete": (Left("completed", 1), Left("completed", 1), Left("completed", 1), GONE),
        "retry": (COUNTED, COUNTED, COUNTED, COUNTED),
        "retry later": (COUNTED, COUNTED, COUNTED, COUNTED),
        "fail": (Left("failed", 1), Left("failed", 1), Left("failed", 1), Left("failed", None)),
        "release": (PENDING, PENDING, PENDING, PENDING),
        "release later": (PENDING, PENDING, PENDING, PENDING),
        "extend": (RUNNING, PENDING, PENDING, PENDING),
        "cancel": (Left("cancelled", 0),) * 3 + (Left("cancelled", None),),
        "cancel a select": (Left("cancelled", 0),) * 3 + (Left("cancelled", None),),
        "requeue": (PENDING, PENDING, PENDING, PENDING),
        "rescue": (COUNTED, UNTOUCHED, UNTOUCHED, UNTOUCHED),
        "purge": (GONE, GONE, GONE, GONE),
        "reconcile": (UNTOUCHED, UNTOUCHED, PENDING, UNTOUCHED),
    }.items()
}


Action = "Callable[[QueueUnderTest, Any], Awaitable[list[Any]]]"


async def keys_of(session: Any, statement: Any) -> list[Any]:
    """Execute a statement on an AsyncSession, or on a Session that is awaited as well."""
    return list(await session.scalars(statement))


def of_run(verb: Callable[[Any], Any]) -> Action:
    """Claim the job and end or extend its run."""

    async def act(queue: QueueUnderTest, session: Any) -> list[Any]:
        jobs = await keys_of(session, claim(queue.Job, 5))
        return await keys_of(session, verb(jobs))

    return act


def of_queue(statement: Callable[[QueueUnderTest], Any], *, after: Any = None) -> Action:
    """Do something with a job that waits, or whose run ended by ``after``."""

    async def act(queue: QueueUnderTest, session: Any) -> list[Any]:
        if after is not None:
            await keys_of(session, after(await keys_of(session, claim(queue.Job, 5))))
            await session.commit()
        return await keys_of(session, statement(queue))

    return act


def of_claim(statement: Callable[[QueueUnderTest], Any]) -> Action:
    async def act(queue: QueueUnderTest, session: Any) -> list[Any]:
        return [job.number for job in await keys_of(session, statement(queue))]

    return act


async def rescue_expired(queue: QueueUnderTest, session: Any) -> list[Any]:
    if queue.leased:
        await keys_of(session, extend(await keys_of(session, claim(queue.Job, 5)), lease=0))
        await session.commit()
    return await keys_of(session, rescue(queue.Job))


async def reconcile_lost(queue: QueueUnderTest, session: Any) -> list[Any]:
    if queue.keeps_rows and not queue.leased:
        await keys_of(session, claim(queue.Job, 5))
        await session.commit()
    return await keys_of(session, reconcile(queue.Job))


ACTIONS: dict[str, Action] = {
    "claim": of_claim(lambda queue: claim(queue.Job, 5)),
    "claim a select": of_claim(lambda queue: claim(sa.select(queue.Job).where(queue.Job.payload == "x"), 5)),
    "complete": of_run(complete),
    "retry": of_run(lambda jobs: retry(jobs, error=ValueError("no"))),
    "retry later": of_run(lambda jobs: retry(jobs, delay=60)),
    "fail": of_run(lambda jobs: fail(jobs, error="no")),
    "release": of_run(release),
    "release later": of_run(lambda jobs: release(jobs, delay=60)),
    "extend": of_run(lambda jobs: extend(jobs, lease=60)),
    "cancel": of_queue(lambda queue: cancel(queue.Job)),
    "cancel a select": of_queue(lambda queue: cancel(queue.only(0))),
    "requeue": of_queue(lambda queue: requeue(queue.Job), after=fail),
    "rescue": rescue_expired,
    "purge": of_queue(lambda queue: purge(queue.Job, older_than=0), after=fail),
    "reconcile": reconcile_lost,
}
HELD_OPEN = {"claim", "claim a select", "extend"}
"""The verbs after which a strategy without leases must not commit yet."""


@pytest.fixture(scope="module")
def tables(shared: Database, request: pytest.FixtureRequest) -> Iterator[tuple[str, QueueUnderTest]]:
    engine = sa.create_engine(shared.url())
    strategy, columns = STRATEGIES[request.param]
    with QueueUnderTest(engine, strategy, columns) as queue:
        yield request.param, queue
    engine.dispose()


DRIVERS = ("psycopg", "psycopg-async", "asyncpg")


def cells() -> Iterator[Any]:
    """Return each cell of the table with each driver; all but one driver of a cell are marked ``thorough``.

    The drivers alternate: each verb has all of them, with one strategy or another.
    """
    for row, verb in enumerate(TABLE):
        for column, strategy in enumerate(STRATEGIES):
            for number, driver in enumerate(DRIVERS):
                marks = [] if (row + column) % len(DRIVERS) == number else pytest.mark.thorough
                yield pytest.param(strategy, verb, driver, marks=marks)


@pytest.mark.few(24)
@pytest.mark.parametrize(("tables", "verb", "driver"), list(cells()), indirect=["tables"])
async def test_verb(tables: tuple[str, QueueUnderTest], shared: Database, verb: str, driver: str) -> None:
    strategy, queue = tables
    expected = TABLE[verb][strategy]
    queue.clear()
    queue.enqueue(1, payload="x")
    async with awaitable_engine(shared, driver, {}) as engine, engine.session() as session:
        keys = await ACTIONS[verb](queue, session)
        if queue.leased or verb not in HELD_OPEN:
            await session.commit()
        assert keys == ([queue.key(0)] if expected.changed else [])
        assert (queue.state(0), queue.attempts(0)) == expected[:2]


# -- random histories of a queue are compared with a model, the same for every strategy --------------------------------

numbers = st.integers(0, 7)
priorities = st.integers(-1, 1)
endings = st.sampled_from([complete, retry, fail, release])
ENDS = {complete: "completed", retry: "pending", fail: "failed", release: "pending"}


@dataclass(frozen=True)
class Job:
    state: str = "pending"
    priority: int = 0
    attempts: int = 0


class Histories(RuleBasedStateMachine):
    """One worker with one batch at a time, and other transactions."""

    queue: ClassVar[QueueUnderTest]

    def __init__(self) -> None:
        super().__init__()
        self.queue.clear()
        self.jobs: dict[int, Job] = {}
        self.committed: dict[int, Job] = {}
        self.batch: dict[int, Any] = {}
        self.context: AbstractContextManager[Session] = self.queue.session()
        self.session = self.context.__enter__()

    def teardown(self) -> None:
        self.context.__exit__(None, None, None)

    def waiting(self) -> list[int]:
        return sorted(number for number, job in self.committed.items() if job.state == "pending")

    def change(self, number: int, **changes: Any) -> None:
        self.jobs[number] = replace(self.jobs[number], **changes)

    # -- other transactions -------------------------------------------------------------------------------------

    @rule(number=numbers, priority=priorities)
    def enqueue(self, number: int, priority: int) -> None:
        if self.queue.row(number) is None and number not in self.batch:
            self.queue.enqueue([number], priority=priority)
            self.jobs[number] = self.committed[number] = Job(priority=priority)
            if not self.queue.keeps_rows:
                # A dead letter with this key would be requeued beside the new job.
                self.execute_and_commit(purge(self.queue.only(number)))

    @rule(number=numbers)
    def cancel(self, number: int) -> None:
        free = number not in self.batch and self.jobs.get(number, Job("")).state == "pending"
        self.expect(
            self.execute_and_commit(cancel(self.queue.only(number))), number if free else None, state="cancelled"
        )

    @rule(number=numbers)
    def requeue(self, number: int) -> None:
        over = number not in self.batch and self.jobs.get(number, Job("")).state in self.requeued_states
        expected = number if over else None
        self.expect(self.execute_and_commit(requeue(self.queue.only(number))), expected, state="pending", attempts=0)

    @rule(number=numbers)
    def purge(self, number: int) -> None:
        over = number not in self.batch and self.jobs.get(number, Job("")).state in self.requeued_states
        self.expect(self.execute_and_commit(purge(self.queue.only(number))), number if over else None)
        if over:
            del self.jobs[number], self.committed[number]

    @rule()
    def repair_nothing(self) -> None:
        assert self.execute_and_commit(reconcile(self.queue.Job)) == []
        assert self.execute_and_commit(rescue(self.queue.Job)) == []

    @rule(number=numbers, priority=priorities)
    def edit(self, number: int, priority: int) -> None:
        if number not in self.batch and self.queue.row(number) is not None:
            self.queue.execute(
                sa.update(self.queue.Job).where(self.queue.Job.number == number).values(priority=priority)
            )
            self.change(number, priority=priority)
            self.committed[number] = self.jobs[number]

    @rule(number=numbers)
    def delete(self, number: int) -> None:
        if number not in self.batch and self.queue.row(number) is not None:
            self.queue.execute(sa.delete(self.queue.Job).where(self.queue.Job.number == number))
            del self.jobs[number], self.committed[number]

    @property
    def requeued_states(self) -> set[str]:
        return {"completed", "failed", "cancelled"} if self.queue.keeps_rows else {"failed", "cancelled"}

    def execute_and_commit(self, statement: Any) -> list[Any]:
        with self.queue.impatient() as session:
            keys = session.scalars(statement).all()
            session.commit()
        return list(keys)

    def expect(self, keys: list[Any], number: int | None, **changes: Any) -> None:
        assert keys == ([] if number is None else [self.queue.key(number)])
        if number is not None:
            self.change(number, **changes)
            self.committed[number] = self.jobs[number]

    # -- the worker ------------------------------------------------------------------------------------

    @precondition(lambda self: not self.batch)
    @rule(n=st.integers(1, 4))
    def claim(self, n: int) -> None:
        waiting = self.waiting()
        jobs = self.queue.claim(self.session, n)
        self.batch = {job.number: job for job in jobs}
        assert len(self.batch) == len(jobs) == min(n, len(waiting))
        assert set(self.batch) <= set(waiting)
        taken = [self.jobs[job.number].priority for job in jobs]
        assert taken == sorted(self.jobs[number].priority for number in waiting)[:n]
        for job in jobs:
            self.change(job.number, state="processing", attempts=self.jobs[job.number].attempts + 1)
            assert job.attempts == self.jobs[job.number].attempts
            if self.queue.leased:
                self.committed[job.number] = self.jobs[job.number]

    @precondition(lambda self: self.batch)
    @rule(ends=st.lists(endings, min_size=4, max_size=4), commit=st.booleans())
    def settle(self, ends: list[Any], commit: bool) -> None:  # noqa: FBT001 - drawn by name
        for (number, job), end in zip(self.batch.items(), ends, strict=False):
            assert self.session.scalars(end(job)).all() == [self.queue.key(number)]
            self.change(number, state=ENDS[end], attempts=self.jobs[number].attempts - (end is release))
        if not commit:
            self.session.rollback()
            self.jobs = dict(self.committed)
            if self.queue.leased:
                return
        else:
            self.session.commit()
            done = {number for number in self.batch if self.jobs[number].state == "completed"}
            for number in done if not self.queue.keeps_rows else ():
                del self.jobs[number]
            self.committed = dict(self.jobs)
        self.batch = {}

    @precondition(lambda self: self.batch)
    @rule()
    def die(self) -> None:
        if self.queue.leased:
            self.session.execute(extend(list(self.batch.values()), lease=0))
            self.session.commit()
            assert set(self.execute_and_commit(rescue(self.queue.Job))) == self.queue.keys(*self.batch)
            for number in self.batch:
                job = self.jobs[number]
                alone = len(self.batch) == 1
                spent = alone and job.attempts >= 3
                self.change(number, state="failed" if spent else "pending", attempts=job.attempts - (not alone))
            self.committed = dict(self.jobs)
        self.session.rollback()
        self.jobs = dict(self.committed)
        self.batch = {}

    # -- invariants --------------------------------------------------------------------------------

    @invariant()
    def every_job_is_as_it_was_left(self) -> None:
        with self.queue.impatient() as session:
            rows = session.execute(sa.select(self.queue.Job.__table__)).mappings().all()
            claimed = sorted(job.number for job in session.scalars(claim(self.queue.Job, 100)))
        assert claimed == [number for number in self.waiting() if number not in self.batch]
        found = {row["number"]: row for row in rows}
        assert set(found) == set(self.committed if self.queue.keeps_rows else self.waiting())
        for number, row in found.items():
            job = self.committed[number]
            assert row["attempts"] == job.attempts
            assert row.get("status", "pending") == job.state


@pytest.mark.few(2)
@pytest.mark.once
@pytest.mark.parametrize("composite", [False, True], ids=["single-key", "composite-key"])
@pytest.mark.parametrize("kind", STRATEGIES)
def test_any_history_agrees_with_the_model(
    class_engine: sa.Engine, pytestconfig: pytest.Config, kind: str, *, composite: bool
) -> None:
    strategy, columns = STRATEGIES[kind]
    is_full = "not thorough" not in pytestconfig.option.markexpr
    with QueueUnderTest(class_engine, strategy, columns, composite=composite) as queue:
        machine = type("HistoriesOfOne", (Histories,), {"queue": queue})
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=8 if is_full else 4,
                stateful_step_count=20,
                deadline=None,
                database=None,
                suppress_health_check=list(HealthCheck),
            ),
        )


# -- queues that delete completed jobs ---------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["update_status", "batch_select", "delete_returning"])
def test_a_completed_job_is_deleted(class_engine: sa.Engine, strategy: str) -> None:
    model = create(class_engine, make_job(strategy, on_complete="delete"))
    insert(class_engine, model, [{"id": number} for number in range(3)])
    with Session(class_engine) as session:
        first, second = session.scalars(claim(model, 2)).all()
        assert session.scalars(complete(first)).all() == [0]
        assert session.scalars(complete(first)).all() == []
        assert session.scalars(fail(second)).all() == [1]
        session.commit()
        assert session.scalars(sa.select(model.id).order_by(model.id)).all() == [1, 2]
        assert session.scalars(reconcile(model)).all() == []


def test_a_late_result_deletes_nothing(class_engine: sa.Engine) -> None:
    model = create(class_engine, make_job("update_status", on_complete="delete"))
    insert(class_engine, model, [{"id": 1}])
    with Session(class_engine) as session, Session(class_engine) as thief:
        late = session.scalars(claim(model, 1)).all()
        session.commit()
        session.execute(extend(late, lease=0))
        session.execute(rescue(model))
        session.commit()
        (job,) = thief.scalars(claim(model, 1)).all()
        thief.commit()
        assert session.scalars(complete(late)).all() == []
        session.commit()
        assert thief.scalars(complete(job)).all() == [1]
