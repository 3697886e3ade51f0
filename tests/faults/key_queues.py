"""A queue under flow control, drawn at random from a seed, and the roles of the processes that work on it."""

import asyncio
import contextlib
import random
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from sqlaqueue import (
    AsyncConsumer,
    ConcurrencyLimit,
    Constant,
    Consumer,
    Fail,
    FairShare,
    InOrder,
    QueueConfig,
    QueueMixin,
    RateLimit,
    Retry,
    Snooze,
    Throttle,
    cancel,
    claim,
    complete,
    fail,
    pause,
    purge,
    release,
    requeue,
    resume,
    retry,
)
from sqlaqueue.consumer import pace
from tests.consumer.models import HandlerIO, for_async, for_sync
from tests.faults.key_history import Marks
from tests.faults.mutants import lose
from tests.faults.processes import Actor

LEASE = 1.5
"""Seconds of a lease: a worker that is paused for longer loses its jobs."""

PAYLOADS = ("ok", "ok", "ok", "flaky", "fails", "retry", "snooze", "throttle", "slow")
"""What a handler does; see :class:`Handler`."""


WorkerOptions = tuple[str, int, int | None, float | None]
"""Of a worker: its API, its concurrency, its batch size, and its timeout."""


@dataclass(frozen=True)
class Configuration:
    seed: int
    strategy: str = "update_status"
    """``update_status``, or one of :data:`HELD`."""
    limits: tuple[str, ...] = ()
    """Kinds of limits: ``number``, ``attribute`` and ``tenant`` for each customer, ``pair`` for each customer and
    kind, and ``queue``."""
    most: int = 2
    """The number of the limits ``number`` and ``pair``, and the first one of each tenant."""
    most_of_queue: int = 5
    rates: tuple[tuple[int, float, str | None, int], ...] = ()
    """For each rate: how many, in how many seconds, the attribute of its key, and the burst."""
    order: str | None = None
    """The ``on_failure`` of the order of each document; None for no order."""
    fair: int | None = None
    """The weight of the turns of customers; None for no turns."""
    priorities: bool = False
    notify: bool = True
    poll_interval: float = 0.3
    customers: int = 3
    documents: int = 10
    jobs: int = 200
    work: float = 0.01
    """The longest time that most handlers take, in seconds."""
    workers: tuple[WorkerOptions, ...] = (("sync", 2, None, None), ("async", 4, None, None))
    seconds: float = 2.0
    """For how long faults are injected."""
    faults: tuple[str, ...] = ()
    """The kinds of faults of the processes and connections, see :mod:`tests.faults.key_rounds`."""
    actions: tuple[str, ...] = ()
    """What operators do, see :data:`OPERATIONS`."""
    mutant: str | None = None
    """The safeguard that is removed, see :mod:`tests.faults.mutants`."""
    payloads: tuple[str, ...] = field(default=PAYLOADS)

    def __str__(self) -> str:
        """Return what differs from the defaults, without the lists of faults."""
        fields = self.__dataclass_fields__.values()
        shown = [one for one in fields if one.name not in {"seed", "faults", "actions", "payloads"}]
        changed = [one.name for one in shown if getattr(self, one.name) != one.default]
        return " ".join(f"{name}={getattr(self, name)!r}" for name in changed)


HELD = ("batch_select", "delete_returning", "delete_row")
"""The strategies whose transaction holds the jobs; ``delete_row`` is the one with rows as messages."""

FAULTS = ("kill", "pause", "terminate", "stop")
ACTIONS = ("cancel", "requeue", "purge", "settle", "delete", "claim", "abandon", "limit", "pause", "lock")


def strategy_of(seed: int) -> str:
    """Return the strategy of a seed: even ones have ``update_status``."""
    return HELD[seed // 2 % 3] if seed % 2 else "update_status"


def draw(seed: int) -> Configuration:
    found = _draw(seed)
    if seed % 2 == 0:
        return found
    # No other transaction sees that such a job runs, and no lease ends.
    without = {"settle", "abandon"} if strategy_of(seed) == "delete_row" else {"abandon"}
    if found.rates:
        without.add("claim")  # it is refused
    if found.poll_interval > 60:
        without |= {"claim", "lock"}  # a rollback notifies nobody
    return replace(
        found,
        strategy=strategy_of(seed),
        order="continue" if found.order is not None and strategy_of(seed) == "delete_row" else found.order,
        actions=tuple(name for name in found.actions if name not in without),
    )


def _draw(seed: int) -> Configuration:
    rng = random.Random(seed)
    features = rng.sample(
        ["limit", "limit", "limit", "rate", "order", "order", "fair", "queue"], rng.choice([1, 2, 2, 3, 4])
    )
    # Two limits of the same key are refused.
    kinds = rng.sample([rng.choice(["number", "attribute", "tenant"]), "pair"], min(2, features.count("limit")))
    limits = kinds + ["queue"] * ("queue" in features)
    per, burst = rng.choice(["customer_id", "customer_id", None]), rng.choice([1, 3, 10])
    rate = (rng.choice([20, 40]) if per else rng.choice([80, 150]), 1.0, per, burst)
    # Of the same key, so that a throttle holds both back.
    rates = (rate, (5 * rate[0], 10.0, per, 3 * burst)) if rng.random() < 0.3 else (rate,)
    # A wait for a poll of this length would be seen as a stall: all wakeups have to come by notifications.
    only_notified = rng.random() < 0.2
    few = rng.random() < 0.5
    slowest = rng.choice([0.002, 0.01, 0.03])
    return Configuration(
        seed,
        limits=tuple(limits),
        most=rng.choice([1, 1, 2, 3, 8]),
        most_of_queue=rng.choice([1, 3, 8]),
        rates=rates if "rate" in features else (),
        order=rng.choice(["block", "continue", "cancel"]) if "order" in features else None,
        fair=rng.choice([1, 1, 3]) if "fair" in features else None,
        priorities=rng.random() < 0.4,
        notify=only_notified or rng.random() < 0.7,
        poll_interval=600.0 if only_notified else rng.choice([0.1, 0.3, 1.0]),
        customers=rng.choice([1, 3, 5]) if few else rng.choice([40, 150]),
        documents=rng.choice([2, 6]) if few else rng.choice([40, 300]),
        jobs=rng.choice([150, 250, 400]) if few else rng.choice([300, 600, 1200]),
        work=slowest,
        workers=tuple(_worker(rng) for _ in range(rng.randint(2, 4))),
        seconds=rng.uniform(2, 5),
        faults=() if only_notified else tuple(sorted(rng.sample(FAULTS, rng.randint(0, len(FAULTS))))),
        # Only a poll notices a raised limit, and a rescue needs a poll where no worker knows of the lease.
        actions=tuple(
            name
            for name in sorted(rng.sample(ACTIONS, rng.randint(0, len(ACTIONS))))
            if not only_notified or name not in {"limit", "abandon"}
        ),
    )


def _worker(rng: random.Random) -> WorkerOptions:
    batch_size, timeout = rng.choice([None, None, 1, 5]), rng.choice([None, None, 0.3])
    return rng.choice(["sync", "async"]), rng.randint(1, 6), batch_size, timeout


class Models(NamedTuple):
    base: type[DeclarativeBase]
    job: Any
    tenant: Any
    effect: Any


@cache
def models(configuration: Configuration) -> Models:
    class Base(DeclarativeBase):
        pass

    class Tenant(Base):
        __tablename__ = "tenant"
        id: Mapped[int] = mapped_column(primary_key=True)
        most: Mapped[int | None]

    class Job(QueueMixin, Base):
        __tablename__ = "job"
        __queue__ = _config(configuration, Tenant)
        id: Mapped[int] = mapped_column(primary_key=True)
        customer_id: Mapped[int | None]
        kind: Mapped[str]
        document_id: Mapped[int | None]
        most: Mapped[int | None]
        payload: Mapped[str]

    class Effect(Base):
        __tablename__ = "effect"
        id: Mapped[int] = mapped_column(primary_key=True)
        job: Mapped[int]
        token: Mapped[str]
        xid: Mapped[int] = mapped_column(sa.BigInteger, server_default=sa.text("pg_current_xact_id()::text::bigint"))

    return Models(Base, Job, Tenant, Effect)


def _config(configuration: Configuration, tenant: Any) -> QueueConfig:
    limits = {
        "number": ConcurrencyLimit(configuration.most, per="customer_id"),
        "attribute": ConcurrencyLimit("most", per="customer_id"),
        "tenant": ConcurrencyLimit(
            lambda job: sa.select(tenant.most).where(tenant.id == job.customer_id), per="customer_id"
        ),
        "queue": ConcurrencyLimit(configuration.most_of_queue),
        "pair": ConcurrencyLimit(configuration.most, per=("customer_id", "kind")),
    }
    rows_are_messages = configuration.strategy == "delete_row"
    return QueueConfig(
        flow_control=[
            *(limits[kind] for kind in configuration.limits),
            *(RateLimit(most, every=every, per=per, burst=burst) for most, every, per, burst in configuration.rates),
            *([] if configuration.order is None else [InOrder("document_id", on_failure=configuration.order)]),
            *([] if configuration.fair is None else [FairShare("customer_id", weight=configuration.fair)]),
        ],
        strategy="delete_returning" if rows_are_messages else configuration.strategy,
        rows_are_messages=rows_are_messages,
        extra_columns=("started_at",),
        columns={"status": None} if rows_are_messages else {},
        notify=configuration.notify,
        lease=LEASE,
        max_attempts=3,
        retry=Constant(delay=0.05),
    )


# -- workers, and what enqueues ----------------------------------------------------------------------------------------


class Urls(NamedTuple):
    """The database of a round."""

    sync: str
    asynchronous: str


def engine_of(actor: Actor, url: str, **options: Any) -> sa.Engine:
    """Return an engine whose connections have the name of the process."""
    return sa.create_engine(url, connect_args={"application_name": actor.name}, **options or {"poolclass": sa.NullPool})


def marks_of(actor: Actor, configuration: Configuration, url: str) -> Marks | None:
    """Return what records runs, under a strategy whose transaction holds the jobs."""
    return Marks(url, actor.name) if configuration.strategy in HELD else None


class Handler:
    """Does what the payload of a job says, and records when each call began and ended, by the clock of the server."""

    def __init__(self, actor: Actor, configuration: Configuration, marks: Marks | None) -> None:
        self._configuration, self._recorder, self._rng, self._marks = configuration, actor.recorder, actor.rng, marks
        self._effect = sa.text("INSERT INTO effect (job, token) VALUES (:job, :token)")

    async def __call__(self, io: Any, job: Any) -> None:
        # Read before an error can roll the session back.
        key, token = job.id, str(uuid.uuid4() if self._marks else job.lease_token)
        if self._marks is not None:
            await self._marks.write(io, key, token)
        self._recorder.record("start", key, token=token, at=time.time())
        try:
            await self._handle(io, job, token)
        finally:
            self._recorder.record("end", key, token=token, at=time.time())

    async def _handle(self, io: Any, job: Any, token: str) -> None:
        seconds, rng = self._rng.uniform(0, self._configuration.work), self._rng
        if job.payload == "slow" and rng.random() < 0.1:
            # Longer than the timeout of those workers that have one.
            seconds = 0.5
        await io.execute(sa.text("SELECT pg_sleep(:seconds)"), {"seconds": seconds})
        await io.execute(self._effect, {"job": job.id, "token": token})
        match job.payload:
            case "flaky" if job.attempts == 1:
                raise RuntimeError("the first attempt fails")
            case "fails":
                raise Fail if rng.random() < 0.5 else RuntimeError("each attempt fails")
            case "retry" if job.attempts == 1:
                raise Retry(rng.choice([0, 0.02, 0.2]))
            case "snooze" if rng.random() < 0.5:
                raise Snooze(rng.choice([0, 0.05, 0.3]))
            case "throttle" if self._configuration.rates and rng.random() < 0.2:
                raise Throttle(0.2, per=self._configuration.rates[0][2])


def run_worker(actor: Actor, *, configuration: Configuration, urls: Urls, worker: WorkerOptions) -> None:
    pace.RESCUE = 0.3
    lose(configuration.mutant)
    handler = Handler(actor, configuration, marks_of(actor, configuration, urls.sync))
    api, concurrency, batch_size, timeout = worker
    options = {"concurrency": concurrency, "poll_interval": configuration.poll_interval, "grace": 20}
    options |= {"batch_size": batch_size, "timeout": timeout, "worker_name": actor.name}
    job, pool_size = models(configuration).job, concurrency + 2
    if api == "sync":
        engine = engine_of(actor, urls.sync, pool_size=pool_size)
        consumer = Consumer(job, for_sync(handler), sessionmaker(engine), **options)
        actor.recorder.record("ready")
        consumer.run()
        engine.dispose()
        return

    async def run() -> None:
        arguments = {"server_settings": {"application_name": actor.name}}
        engine = create_async_engine(urls.asynchronous, pool_size=pool_size, connect_args=arguments)
        consumer = AsyncConsumer(job, for_async(handler), async_sessionmaker(engine), **options)
        actor.recorder.record("ready")
        await consumer.run()
        await engine.dispose()

    asyncio.run(run())


def run_enqueuer(actor: Actor, *, configuration: Configuration, urls: Urls, jobs: int, seconds: float) -> None:
    """Enqueue the jobs in transactions of various sizes, some of which are rolled back."""
    rng, job, engine = actor.rng, models(configuration).job, engine_of(actor, urls.sync)
    left, pause = jobs, seconds / max(jobs / 10, 1)
    while left > 0:
        number = min(left, rng.choice([1, 1, 5, 10, 40]))
        left -= number
        # A fault may end this connection.
        with contextlib.suppress(sa.exc.OperationalError, sa.exc.InterfaceError), Session(engine) as session:
            session.add_all([job(**new_job(configuration, rng)) for _ in range(number)])
            session.flush()
            # The jobs of another transaction may be committed first.
            time.sleep(rng.uniform(0, pause * number / 10))
            session.commit() if rng.random() < 0.95 else session.rollback()
    engine.dispose()


def new_job(configuration: Configuration, rng: random.Random) -> dict[str, Any]:
    """Return the values of a random job. A few keys have many of the jobs."""

    def key(number: int) -> int | None:
        if rng.random() < 0.03:
            return None
        return rng.randrange(max(1, number // 5)) if rng.random() < 0.5 else rng.randrange(number)

    values: dict[str, Any] = {"customer_id": key(configuration.customers), "document_id": key(configuration.documents)}
    values |= {"kind": rng.choice("ab"), "most": rng.choice([None, 1, 2, 2, 3, 5])}
    values |= {"payload": rng.choice(configuration.payloads)}
    if configuration.priorities:
        values["priority"] = rng.randint(-1, 1)
    if rng.random() < 0.1:
        values["run_at"] = sa.func.now() + sa.func.make_interval(0, 0, 0, 0, 0, 0, rng.uniform(0, 1.5))
    return values


# -- operators: they change jobs, limits and the queue at random, by the library and by plain SQL ----------------------


class Operator:
    """A session, and the jobs that it may change."""

    def __init__(
        self, configuration: Configuration, session: Session, rng: random.Random, marks: Marks | None = None
    ) -> None:
        self.configuration, self.session, self.rng, self.marks = configuration, session, rng, marks
        self.models = models(configuration)

    def some(self, *states: str, most: int = 3) -> Any:
        """Return a select of a few random jobs in some states."""
        job, session = self.models.job, self.session
        if self.configuration.strategy != "delete_row":
            found = sa.select(job.id).where(job.status.in_(states))
        elif {"pending", "processing"} & set(states):
            found = sa.select(job.id)
        else:
            letters = job.metadata.tables["sqlaqueue_dead_letter"]
            found = sa.select(sa.cast(letters.c.key[0], sa.Integer))
        keys = session.scalars(found.limit(500)).all()
        chosen = self.rng.sample(list(keys), min(len(keys), self.rng.randint(1, most)))
        return sa.select(job).where(job.id.in_(sorted(chosen)))

    def end(self, *, commit: float = 0.8) -> None:
        """Commit with a probability, or roll back; sometimes a moment later."""
        if self.rng.random() < 0.3:
            time.sleep(self.rng.uniform(0, 0.1))
        self.session.commit() if self.rng.random() < commit else self.session.rollback()


def _cancel(one: Operator) -> None:
    one.session.execute(cancel(one.some("pending", "processing")))
    one.end()


def _requeue(one: Operator) -> None:
    one.session.execute(requeue(one.some("completed", "failed", "failed", "cancelled")))
    one.end()


def _purge(one: Operator) -> None:
    one.session.execute(purge(one.models.job, limit=one.rng.randint(1, 20)))
    one.end()


def _settle(one: Operator) -> None:
    """Settle running jobs by plain SQL; under a held strategy they read as pending."""
    job, state = one.models.job.__table__, one.rng.choice(["completed", "failed", "pending", "cancelled"])
    running = "processing" if one.marks is None else "pending"
    keys = [row.id for row in one.session.scalars(one.some(running))]
    finished = None if state == "pending" else sa.func.now()
    mine = job.c.id.in_(keys), job.c.status == running
    one.session.execute(sa.update(job).where(*mine).values(status=state, finished_at=finished))
    one.end()


def _delete(one: Operator) -> None:
    job = one.models.job.__table__
    keys = [row.id for row in one.session.scalars(one.some("processing", "pending", "failed", most=2))]
    one.session.execute(sa.delete(job).where(job.c.id.in_(keys)))
    one.end()


def _claim(one: Operator) -> None:
    """Claim without a Consumer, and settle in a second transaction or in the same one."""
    jobs = one.session.scalars(claim(one.models.job, one.rng.randint(1, 8))).all()
    if one.marks is not None:
        _run(one, jobs)
        return
    if one.rng.random() < 0.7:
        if one.rng.random() < 0.3:
            time.sleep(one.rng.uniform(0, 0.1))
        if one.rng.random() < 0.3:
            one.session.rollback()
            return
        one.session.commit()
    for job in jobs:
        verb = one.rng.choice([complete, complete, fail, release, lambda run: retry(run, delay=0.05)])
        one.session.execute(verb(job))
    one.end(commit=0.9)


def _run(one: Operator, jobs: Sequence[Any]) -> None:
    """Run jobs in the transaction that holds them."""
    assert one.marks is not None
    for job in jobs:
        # With a Session nothing suspends.
        with contextlib.suppress(StopIteration):
            one.marks.write(HandlerIO(one.session), job.id, str(uuid.uuid4())).send(None)
        if one.rng.random() < 0.3:
            time.sleep(one.rng.uniform(0, 0.03))
        verb = one.rng.choice([complete, complete, fail, release, lambda run: retry(run, delay=0.05)])
        one.session.execute(verb(job))
    one.end(commit=0.7)


def _abandon(one: Operator) -> None:
    """Claim, and leave the jobs to the end of their leases."""
    one.session.scalars(claim(one.models.job, one.rng.randint(1, 3))).all()
    one.session.commit()


def _limit(one: Operator) -> None:
    tenant = one.models.tenant.__table__
    few = tenant.c.id.in_(one.rng.sample(range(one.configuration.customers), min(3, one.configuration.customers)))
    one.session.execute(sa.update(tenant).where(few).values(most=one.rng.choice([0, 1, 1, 2, 3, 8, None])))
    one.end()


def _pause(one: Operator) -> None:
    one.session.execute(pause(one.models.job))
    one.session.commit()
    time.sleep(one.rng.uniform(0, 0.2))
    one.session.execute(resume(one.models.job))
    one.session.commit()


def _lock(one: Operator) -> None:
    """Hold the locks of a few rows for a while."""
    one.session.execute(one.some("pending", "processing").order_by("id").with_for_update())
    time.sleep(one.rng.uniform(0, 0.3))
    one.session.rollback()


OPERATIONS: dict[str, Callable[[Operator], None]] = {
    "cancel": _cancel,
    "requeue": _requeue,
    "purge": _purge,
    "settle": _settle,
    "delete": _delete,
    "claim": _claim,
    "abandon": _abandon,
    "limit": _limit,
    "pause": _pause,
    "lock": _lock,
}


def run_operator(actor: Actor, *, configuration: Configuration, urls: Urls, seconds: float) -> None:
    """Act at random until the time is over; at the end the queue is not paused, and each tenant may run jobs."""
    engine, marks = engine_of(actor, urls.sync), marks_of(actor, configuration, urls.sync)
    deadline = time.monotonic() + seconds
    while configuration.actions and time.monotonic() < deadline:
        name = actor.rng.choice(configuration.actions)
        # A fault may end this connection, and transactions of operators may deadlock with each other, on rows that
        # each has locked for longer than one statement.
        with contextlib.suppress(sa.exc.OperationalError, sa.exc.InterfaceError), Session(engine) as session:
            OPERATIONS[name](Operator(configuration, session, actor.rng, marks))
            actor.recorder.record("acted", kind=name)
        time.sleep(actor.rng.uniform(0, 0.1))
    engine.dispose()
