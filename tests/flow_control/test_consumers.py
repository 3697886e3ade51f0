"""Consumers of queues under flow control: several at once, in threads, each with its connections."""

import asyncio
import contextlib
import threading
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from sqlaqueue import (
    AsyncConsumer,
    ConcurrencyLimit,
    Constant,
    Consumer,
    FairShare,
    InOrder,
    QueueConfig,
    QueueMixin,
    RateLimit,
    Retry,
    complete,
    prepare,
)
from sqlaqueue.admin import QueueAdmin
from sqlaqueue.consumer import claim
from sqlaqueue.consumer import held as held_module
from sqlaqueue.consumer.maintenance import handlers_running
from sqlaqueue.queue.options import FlowRule
from tests.flow_control.models import HELD, claimed, create, customers, insert, make_job, make_queue, of_customers
from tests.models import execute
from tests.programs import wait_until
from tests.servers import Database

LONG = 30.0
"""Seconds after which a test gives up."""


class Handlers:
    """Handlers that record what runs, and wait until they are let go."""

    def __init__(self, *, wait: bool = False) -> None:
        self._lock, self._gate = threading.Lock(), threading.Event()
        self.running: Counter[Any] = Counter()
        self.most: Counter[Any] = Counter()
        self.begun: dict[Any, list[int]] = defaultdict(list)
        self.moments: list[float] = []
        if not wait:
            self._gate.set()

    def __call__(self, session: Session, job: Any) -> None:
        key = job.customer_id
        with self._lock:
            self.moments.append(time.monotonic())
            self.begun[key].append(job.id)
            self.running[key] += 1
            self.most[key] = max(self.most[key], self.running[key])
        self._gate.wait(LONG)
        time.sleep(0.002)
        with self._lock:
            self.running[key] -= 1

    def let_go(self) -> None:
        self._gate.set()


def unfinished(engine: sa.Engine, job: Any) -> int:
    table = job.__table__
    left = [table.c.status != "completed"] if "status" in table.c else []
    with engine.connect() as connection:
        return connection.scalar(sa.select(sa.func.count()).select_from(table).where(*left)) or 0


HOLDS = pytest.mark.postgresql("other engines have no strategy that holds a transaction")
KINDS = ["update_status", *(pytest.param(kind, marks=HOLDS) for kind in HELD)]


@contextlib.contextmanager
def consumers(engine: sa.Engine, job: Any, handler: Any, number: int, **options: Any) -> Iterator[None]:
    """Run Consumers until the end of the block."""
    with contextlib.ExitStack() as stack:
        for each in range(number):
            consumer = Consumer(job, handler, sessionmaker(engine), signals=False, worker_name=str(each), **options)
            stack.enter_context(consumer)
        yield


class Looks:
    """Counts how often a Consumer asks why its claim has found nothing."""

    def __init__(self) -> None:
        self.number = 0
        self._last = 0.0

    def executed(self, connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        if statement.startswith("SELECT coalesce(current_setting("):
            self.number, self._last = self.number + 1, time.monotonic()

    def is_idle(self) -> bool:
        """Return whether the Consumer has found nothing, and waits; at its start it claims several times."""
        return self.number > 0 and time.monotonic() - self._last > 0.5


@contextlib.contextmanager
def looks(engine: sa.Engine) -> Iterator[Looks]:
    counted = Looks()
    event.listen(engine, "after_cursor_execute", counted.executed)
    try:
        yield counted
    finally:
        event.remove(engine, "after_cursor_execute", counted.executed)


# -- the strategy with leases --------------------------------------------------------------------------------------


@pytest.mark.few(1)
def test_ten_workers_of_one_thread_run_the_ten_jobs_of_a_limit(pool: sa.Engine) -> None:
    job, handlers = make_queue(pool, of_customers(*range(40)), flow_control=[ConcurrencyLimit(10)]), Handlers(wait=True)
    with consumers(pool, job, handlers, 10, concurrency=1):
        wait_until(lambda: len(handlers.begun) == 10)
        handlers.let_go()
        wait_until(lambda: not unfinished(pool, job))


def test_workers_of_several_threads_share_the_places_of_a_key(pool: sa.Engine) -> None:
    job = make_queue(pool, of_customers(*[1] * 20, *[2] * 20), flow_control=[ConcurrencyLimit(3, per="customer_id")])
    handlers = Handlers(wait=True)
    with consumers(pool, job, handlers, 3, concurrency=4):
        wait_until(lambda: handlers.running == {1: 3, 2: 3})
        handlers.let_go()
        wait_until(lambda: not unfinished(pool, job))
    assert handlers.most == {1: 3, 2: 3}


def test_jobs_behind_a_handler_that_turns_out_slow_run_elsewhere(
    pool: sa.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As long as jobs may wait that hold no places.
    monkeypatch.setattr(handlers_running, "LONGEST_IN_BUFFER", 600)
    monkeypatch.setattr(handlers_running, "LATE", 600)
    job, handlers = create(pool, make_job(flow_control=[ConcurrencyLimit(2)])), Handlers()
    gate, slow = threading.Event(), set[int]()

    def handle(session: Session, one: Any) -> None:
        handlers(session, one)
        if one.customer_id == 2:
            slow.add(one.id)
            gate.wait(LONG)

    # After quick handlers each Consumer claims several jobs ahead.
    with consumers(pool, job, handle, 2, concurrency=1, poll_interval=600):
        insert(pool, job, of_customers(*[1] * 100))
        wait_until(lambda: not unfinished(pool, job))
        insert(pool, job, of_customers(2, 2, 2))
        # The limit allows two, and neither Consumer may keep the second place for a job that waits.
        wait_until(lambda: len(slow) == 2)
        gate.set()
        wait_until(lambda: not unfinished(pool, job))


def test_a_consumer_claims_no_job_that_has_to_wait_for_a_handler(pool: sa.Engine) -> None:
    job, counted = make_queue(pool, of_customers(*range(12)), flow_control=[ConcurrencyLimit(50)]), list[int]()

    def handle(session: Session, one: Any) -> None:
        counted.append(session.scalars(sa.select(sa.func.count()).where(job.status == "processing")).one())
        # A claim ahead would be for 0.02 seconds.
        time.sleep(0.03)

    with consumers(pool, job, handle, 1, concurrency=1):
        wait_until(lambda: not unfinished(pool, job))
    assert counted == [1] * 12


@pytest.mark.few(1)
@pytest.mark.parametrize("number", [1, 2])
def test_freed_places_are_taken_without_polling(pool: sa.Engine, number: int) -> None:
    job, handlers = create(pool, make_job(flow_control=[ConcurrencyLimit(1, per="customer_id")])), Handlers()
    with consumers(pool, job, handlers, number, concurrency=2, poll_interval=600):
        insert(pool, job, of_customers(*[1] * 10, *[2] * 10))
        wait_until(lambda: not unfinished(pool, job))
    assert handlers.most == {1: 1, 2: 1}


@pytest.mark.postgresql("elsewhere no trigger notifies")
def test_a_place_that_plain_sql_frees_is_taken_without_polling(pool: sa.Engine) -> None:
    job = make_queue(pool, of_customers(1, status="processing"), flow_control=[ConcurrencyLimit(1, per="customer_id")])
    handlers = Handlers()
    insert(pool, job, of_customers(1))
    with looks(pool) as looked, consumers(pool, job, handlers, 1, poll_interval=600):
        wait_until(looked.is_idle)
        execute(pool, sa.delete(job.__table__).where(job.__table__.c.id == 1))
        wait_until(lambda: not unfinished(pool, job))


def test_a_quarantined_job_that_its_limit_holds_back_runs_later(pool: sa.Engine) -> None:
    job = make_queue(pool, of_customers(1, status="processing"), flow_control=[ConcurrencyLimit(1, per="customer_id")])
    handlers = Handlers()
    # Its last worker died: a rescued job keeps the token of the claim.
    insert(pool, job, of_customers(1, lease_token=uuid.uuid4()))
    with consumers(pool, job, handlers, 1, poll_interval=0.05):
        insert(pool, job, of_customers(2))
        wait_until(lambda: handlers.begun[2])
        time.sleep(0.2)
        execute(pool, sa.delete(job.__table__).where(job.__table__.c.id == 1))
        # Without waiting for the rescue that looks for such jobs now and then.
        wait_until(lambda: not unfinished(pool, job), seconds=15)


def test_without_notifications_a_consumer_takes_the_places_that_it_frees(pool: sa.Engine) -> None:
    job = make_queue(pool, of_customers(*[1] * 10), flow_control=[ConcurrencyLimit(1, per="customer_id")], notify=False)
    handlers = Handlers()
    with consumers(pool, job, handlers, 1, concurrency=3, poll_interval=600):
        wait_until(lambda: not unfinished(pool, job))


@pytest.mark.postgresql("it knows a statement by its text")
def test_a_run_that_ends_while_a_claim_finds_nothing_is_noticed(pool: sa.Engine) -> None:
    job, handlers = (
        make_queue(pool, of_customers(1, 1), flow_control=[ConcurrencyLimit(1)], notify=False),
        Handlers(wait=True),
    )

    def handle(session: Session, one: Any) -> None:
        session.execute(sa.text("SELECT 1"))  # so that its own transaction completes it
        handlers(session, one)

    @event.listens_for(pool, "after_cursor_execute")
    def end_the_run(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        # The statement that tells why the other worker's claim has found nothing.
        if statement.startswith("SELECT coalesce(current_setting(") and unfinished(pool, job) == 2:
            wait_until(lambda: handlers.running[1])
            handlers.let_go()
            wait_until(lambda: unfinished(pool, job) == 1)
            time.sleep(0.2)

    with consumers(pool, job, handle, 1, concurrency=2, poll_interval=600):
        wait_until(lambda: not unfinished(pool, job))


@pytest.mark.postgresql("it locks the key as a claim of PostgreSQL does")
def test_a_consumer_claims_again_when_a_transaction_had_locked_the_key_and_is_rolled_back(pool: sa.Engine) -> None:
    job, handlers = (
        make_queue(pool, of_customers(1, 1), flow_control=[ConcurrencyLimit(2, per="customer_id")]),
        Handlers(),
    )
    with Session(pool) as other, looks(pool) as looked:
        assert len(claimed(other, job, 1)) == 1
        with consumers(pool, job, handlers, 1, concurrency=1, poll_interval=600):
            wait_until(lambda: looked.number > 20)
            # Nothing announces it.
            other.rollback()
            wait_until(lambda: not unfinished(pool, job))


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", KINDS)
def test_jobs_of_a_key_run_in_order_with_retries_and_several_consumers(pool: sa.Engine, kind: str) -> None:
    order = InOrder("customer_id", on_failure="block" if kind == "update_status" else "continue")
    job = make_job(flow_control=[order], retry=lambda *_: timedelta(seconds=0.02), **HELD.get(kind, {}))
    handlers, seen = Handlers(), set[int]()
    create(pool, job)
    insert(pool, job, of_customers(*list(range(5)) * 12))

    def handle(session: Session, one: Any) -> None:
        handlers(session, one)
        if one.id % 7 == 0 and one.id not in seen:
            seen.add(one.id)
            raise Retry

    with consumers(pool, job, handle, 3, concurrency=3, poll_interval=600):
        wait_until(lambda: not unfinished(pool, job))
    assert set(handlers.most.values()) == {1}
    for keys in handlers.begun.values():
        assert keys == sorted(keys)
        assert len(set(keys)) == 12


@pytest.mark.parametrize("kind", KINDS)
def test_a_rate_spreads_the_beginnings_over_all_consumers(pool: sa.Engine, kind: str) -> None:
    job = make_queue(
        pool, of_customers(*range(30)), flow_control=[RateLimit(50, every=1, burst=1)], **HELD.get(kind, {})
    )
    handlers = Handlers()
    with consumers(pool, job, handlers, 3, concurrency=3, poll_interval=600):
        wait_until(lambda: not unfinished(pool, job))
    # The promise is about the claims; a handler begins a moment after its claim.
    moments = sorted(handlers.moments)
    assert len(moments) == 30
    assert moments[-1] - moments[0] > 29 / 50 - 0.1


def test_a_drain_waits_for_a_rate_and_ends_beside_a_failed_head(engine: sa.Engine) -> None:
    job = create(
        engine, make_job(flow_control=[RateLimit(20, every=1, burst=1), InOrder("customer_id")], max_attempts=1)
    )
    insert(engine, job, of_customers(1, 2, 2, 3, 4))

    def handle(session: Session, one: Any) -> None:
        if one.id == 2:
            raise ValueError

    Consumer(job, handle, sessionmaker(engine), concurrency=2).drain()
    with engine.connect() as connection:
        statuses = connection.execute(sa.select(job.__table__.c.status).order_by(job.__table__.c.id)).scalars().all()
    assert statuses == ["completed", "failed", "pending", "completed", "completed"]


# -- strategies whose transaction holds the jobs -------------------------------------------------------------------


def test_workers_of_one_thread_run_as_many_jobs_as_the_limit_is(pool: sa.Engine, held: Any) -> None:
    job, handlers = (
        make_queue(pool, of_customers(*range(12)), flow_control=[ConcurrencyLimit(4)], **held),
        Handlers(wait=True),
    )
    with consumers(pool, job, handlers, 5, concurrency=1):
        wait_until(lambda: len(handlers.begun) == 4)
        handlers.let_go()
        wait_until(lambda: not unfinished(pool, job))
    assert max(handlers.most.values()) == 1


def test_a_job_that_runs_holds_no_slot_for_another_one(pool: sa.Engine, held: Any) -> None:
    job, handlers = make_job(flow_control=[ConcurrencyLimit(1, per="customer_id")], **held), Handlers()
    slow = Handlers(wait=True)
    create(pool, job)

    def handle(session: Session, one: Any) -> None:
        (handlers if one.customer_id is None else slow)(session, one)

    with consumers(pool, job, handle, 1, concurrency=1):
        # After quick handlers a Consumer without flow control claims several jobs at once.
        insert(pool, job, of_customers(*[None] * 50))
        wait_until(lambda: not unfinished(pool, job))
        insert(pool, job, of_customers(1, 2))
        wait_until(lambda: slow.begun[1])
        with Session(pool) as session:
            assert customers(claimed(session, job)) == [2]
        slow.let_go()
        wait_until(lambda: not unfinished(pool, job))


@pytest.mark.few(2)
@pytest.mark.postgresql("other engines have no strategy that holds a transaction")
@pytest.mark.parametrize(
    "values",
    [
        {"status": "failed"},
        {"attempts": 1},
        {"run_at": sa.func.now() + timedelta(hours=1)},
        {"started_at": sa.func.now()},
        None,
    ],
    ids=["status", "attempts", "run_at", "started_at", "deleted"],
)
def test_a_slot_that_plain_sql_frees_is_taken_without_polling(pool: sa.Engine, values: Any) -> None:
    job = make_job(flow_control=[ConcurrencyLimit(1)], extra_columns=("started_at",), **HELD["batch_select"])
    handlers = Handlers()
    create(pool, job)
    insert(pool, job, of_customers(1, 2))
    with Session(pool) as other, looks(pool) as looked:
        (mine,) = claimed(other, job, 1)
        with consumers(pool, job, handlers, 1, concurrency=1, poll_interval=600):
            wait_until(looked.is_idle)
            mine = job.__table__.c.id == mine.id
            other.execute(sa.delete(job).where(mine) if values is None else sa.update(job).where(mine).values(values))
            other.commit()
            wait_until(lambda: handlers.begun[2])


def test_a_slot_that_a_settlement_frees_is_taken_without_polling(pool: sa.Engine, held: Any) -> None:
    job, handlers = make_queue(pool, of_customers(1, 2), flow_control=[ConcurrencyLimit(1)], **held), Handlers()
    with Session(pool) as other, looks(pool) as looked:
        mine = claimed(other, job, 1)
        with consumers(pool, job, handlers, 1, concurrency=1, poll_interval=600):
            wait_until(looked.is_idle)
            other.execute(complete(mine))
            other.commit()
            wait_until(lambda: handlers.begun[2])


def test_freed_slots_are_taken_without_polling(pool: sa.Engine, held: Any) -> None:
    job, handlers = create(pool, make_job(flow_control=[ConcurrencyLimit(1, per="customer_id")], **held)), Handlers()
    with consumers(pool, job, handlers, 2, concurrency=2, poll_interval=600):
        insert(pool, job, of_customers(*[1] * 10, *[2] * 10))
        wait_until(lambda: not unfinished(pool, job))
    assert handlers.most == {1: 1, 2: 1}


def test_a_batch_begins_with_the_jobs_that_the_rate_allows(engine: sa.Engine, held: Any) -> None:
    job = make_queue(engine, of_customers(*range(5)), flow_control=[RateLimit(3, every=3600, burst=3)], **held)
    called: list[int] = []

    def handle(session: Session, jobs: Any) -> None:
        called.extend(one.customer_id for one in jobs)

    with Consumer(job, handle, sessionmaker(engine), batch=True, batch_size=5, signals=False):
        wait_until(lambda: unfinished(engine, job) == 2)
    assert sorted(called) == [0, 1, 2]


def test_a_beginning_stays_used_when_the_transaction_is_rolled_back(engine: sa.Engine, held: Any) -> None:
    job = make_queue(
        engine, of_customers(1), flow_control=[RateLimit(2, every=3600, burst=2)], retry=Constant(0), **held
    )
    called: list[int] = []

    def handle(session: Session, one: Any) -> None:
        called.append(one.customer_id)
        raise Retry

    with Consumer(job, handle, sessionmaker(engine), signals=False, poll_interval=0.05):
        wait_until(lambda: len(called) == 2)
        time.sleep(0.3)
    assert len(called) == 2


def test_an_attempt_counts_though_the_rate_is_used_up(engine: sa.Engine, held: Any) -> None:
    # The first loss of the connection counts no attempt, and the job runs once more by itself.
    job = make_queue(engine, of_customers(1), flow_control=[RateLimit(2, every=3600, burst=2)], max_attempts=1, **held)

    def handle(session: Session, one: Any) -> None:
        session.execute(sa.text("SELECT pg_terminate_backend(pg_backend_pid())"))

    def failed() -> int:
        with Session(engine) as session:
            return QueueAdmin(session, job).stats().states.get("failed", 0)

    with Consumer(job, handle, sessionmaker(engine), signals=False):
        wait_until(lambda: failed() == 1)


def test_jobs_are_released_when_another_claim_has_reserved_their_beginnings(
    pool: sa.Engine, held: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both claims saw the same room."""
    job, handlers = (
        make_queue(pool, of_customers(*range(5)), flow_control=[RateLimit(5, every=3600, burst=5)], **held),
        Handlers(),
    )
    reserve, calls = held_module.reserve_rates, list[int]()

    def after_another_one(session: Session, context: Any, keys: Any) -> Any:
        if not calls:
            with Session(pool) as other, other.begin():
                calls.append(len(reserve(other, context, keys[:3])))
        return reserve(session, context, keys)

    monkeypatch.setattr(held_module, "reserve_rates", after_another_one)
    with Consumer(job, handlers, sessionmaker(pool), batch_size=5, signals=False):
        wait_until(lambda: unfinished(pool, job) == 3)
    assert calls == [3]
    assert len(handlers.begun) == 2
    with Session(pool) as session:
        left = session.scalars(sa.select(job.attempts).where(job.id > 2)).all()
    assert left == [0, 0, 0]


@pytest.mark.postgresql("other engines have no strategy that holds a transaction")
def test_a_consumer_looks_again_for_a_slot_that_was_taken_for_a_moment(
    pool: sa.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a claim that another limit refuses afterwards: no run ends when it releases the slot."""
    monkeypatch.setattr(claim, "_CONTENDED", (2.0, 2.0))
    job = make_queue(
        pool, of_customers(1, 1), flow_control=[ConcurrencyLimit(1, per="customer_id")], **HELD["batch_select"]
    )
    handlers = Handlers()
    with Session(pool) as other, looks(pool) as looked:
        assert len(claimed(other, job)) == 2
        with consumers(pool, job, handlers, 1, concurrency=1, poll_interval=600):
            wait_until(looked.is_idle)
            other.rollback()
            wait_until(lambda: not unfinished(pool, job))


# -- every strategy ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
async def test_async_consumers_obey(shared: Database, engine: sa.Engine, kind: str) -> None:
    job = make_job(
        flow_control=[
            ConcurrencyLimit(2, per="customer_id"),
            InOrder("document_id", on_failure="continue"),
            RateLimit(1000, every=1),
        ],
        **HELD.get(kind, {}),
    )
    create(engine, job)
    insert(engine, job, [{"customer_id": number % 3, "document_id": number % 10} for number in range(24)])
    running: Counter[int] = Counter()
    begun: dict[int, list[int]] = defaultdict(list)
    most = 0

    async def handle(session: Any, one: Any) -> None:
        nonlocal most
        running[one.customer_id] += 1
        most = max(most, *running.values())
        begun[one.document_id].append(one.id)
        await asyncio.sleep(0.002)
        running[one.customer_id] -= 1

    drivers = {"sqlite": "sqlite+aiosqlite", "mariadb": "mariadb+asyncmy"}
    name = engine.dialect.name
    url = engine.url.set(drivername=drivers[name]) if name in drivers else shared.url("asyncpg")
    many = prepare(create_async_engine(url, pool_size=20))
    await AsyncConsumer(job, handle, async_sessionmaker(many), concurrency=8).drain()
    await many.dispose()
    assert unfinished(engine, job) == 0
    assert most <= 2
    assert all(keys == sorted(keys) for keys in begun.values())


CONTROLS: dict[str, FlowRule] = {
    "limit": ConcurrencyLimit(2, per="customer_id"),
    "limit of the queue": ConcurrencyLimit(2),
    "order": InOrder("customer_id", on_failure="continue"),
    "turns": FairShare("customer_id"),
    "rate": RateLimit(1000, every=1),
}


@pytest.mark.parametrize("strategy", KINDS)
@pytest.mark.parametrize("control", CONTROLS.values(), ids=CONTROLS)
def test_a_consumer_needs_no_other_kind_of_control(engine: sa.Engine, strategy: str, control: FlowRule) -> None:
    """It claims quarantined jobs as well, by a statement of its own."""
    job = make_queue(engine, of_customers(1, 1, 1, 2, 3), flow_control=[control], **HELD.get(strategy, {}))
    begun = list[int]()

    def handle(_: Session, one: Any) -> None:
        begun.append(one.customer_id)

    Consumer(job, handle, sessionmaker(engine)).drain()
    assert sorted(begun) == [1, 1, 1, 2, 3]
    if isinstance(control, FairShare):
        assert sorted(begun[:3]) == [1, 2, 3]


@pytest.mark.parametrize("strategy", KINDS)
@pytest.mark.parametrize("control", [*CONTROLS, "all"])
def test_columns_have_other_names_than_their_attributes(engine: sa.Engine, strategy: str, control: str) -> None:
    rules = [CONTROLS[name] for name in (("limit", "order", "rate") if control == "all" else (control,))]
    columns = {"priority": "level", **HELD.get(strategy, {}).get("columns", {})}

    class Base(DeclarativeBase):
        pass

    class Job(QueueMixin, Base):
        __tablename__ = "job"
        __queue__ = QueueConfig(**{**HELD.get(strategy, {}), "flow_control": rules, "columns": columns})
        id: Mapped[int] = mapped_column("the id", primary_key=True)
        level: Mapped[int] = mapped_column("its level", default=0)
        customer_id: Mapped[int | None] = mapped_column("the customer")

    begun = list[int]()
    create(engine, Job)
    insert(engine, Job, of_customers(1, 1, 1, 2, 3))
    Consumer(Job, lambda _, one: begun.append(one.customer_id), sessionmaker(engine)).drain()
    assert sorted(begun) == [1, 1, 1, 2, 3]
