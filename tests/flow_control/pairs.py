"""What the tests of pairs share: the queues, the statements, and what must hold after two of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from sqlaqueue import (
    Limit,
    Order,
    QueueConfig,
    QueueMixin,
    Rate,
    cancel,
    claim,
    complete,
    fail,
    release,
    requeue,
    rescue,
    retry,
)
from sqlaqueue.flow_control.rates import hold_back
from sqlaqueue.mapping.mixin import spec_of
from sqlaqueue.queue.names import RATE
from tests.servers import Database

EARLIER, FINISHED, RUNNING, BESIDE, PENDING = 5, 10, 20, 25, 30
"""The jobs that are enqueued come before the first one; then the one that is requeued, those that run, and the first
one that waits."""

INTERVAL, BURST = 3600.0, 2
"""Of the rate: seconds that do not pass during a test, so each beginning uses a part of the burst up."""


class Base(DeclarativeBase):
    pass


class Tenant(Base):
    __tablename__ = "tenant"
    id: Mapped[int] = mapped_column(primary_key=True)
    most: Mapped[int]


def _queue(name: str, **config: Any) -> Any:
    columns = {
        "__tablename__": f"job_{name}",
        "__queue__": QueueConfig(columns={"started_at": "started_at"}, max_attempts=9, **config),
        "__annotations__": {"id": Mapped[int], "customer_id": Mapped[int]},
        "id": mapped_column(primary_key=True),
    }
    return type(f"Job_{name}", (QueueMixin, Base), columns)


LIMITED = _queue(
    "limit", limits=[Limit(lambda job: sa.select(Tenant.most).where(Tenant.id == job.customer_id), per="customer_id")]
)
ORDERED = _queue("order", order=Order("customer_id"))
TWO_RATES = _queue("two_rates", rates=[Rate(10, every=60, per="customer_id"), Rate(100, every=3600, per="customer_id")])
RATED = _queue("rate", rates=[Rate(BURST, every=INTERVAL * BURST, per="customer_id")])

QUEUES: dict[str, tuple[Any, int]] = {
    "limit 1": (LIMITED, 1),
    "limit 2": (LIMITED, 2),
    "order": (ORDERED, 1),
    "rate": (RATED, BURST),
}
"""For each queue, its class and how many jobs run where it is busy."""


@dataclass
class World:
    """One queue at the beginning of a pair, and what the pair has done."""

    name: str
    engine: sa.Engine
    runs: dict[int, Any] = field(default_factory=dict)
    """The instances of the jobs that run."""
    begun: int = 0
    """How many jobs have begun, by claims that were committed."""
    enqueued: int = 0
    """How many earlier jobs were enqueued."""

    @property
    def model(self) -> Any:
        return QUEUES[self.name][0]

    @property
    def number(self) -> int:
        return QUEUES[self.name][1]

    @property
    def some(self) -> Any:
        return sa.select(self.model)

    def reset(self, *, busy: bool, expired: bool) -> None:
        """Make the rows of the beginning."""
        self.runs, self.begun, table = {}, 0, self.model.__table__
        with Session(self.engine, expire_on_commit=False) as session:
            session.execute(sa.delete(table))
            session.execute(sa.delete(spec_of(RATED).side_tables[RATE]))
            session.execute(sa.update(Tenant).values(most=self.number))
            running = [RUNNING, BESIDE][: self.number] if busy else []
            for key in running if self.name != "rate" else running[:1]:
                session.execute(sa.insert(table), {"id": key, "customer_id": 1})
                [self.runs[key]] = session.scalars(claim(self.model, 1))
                session.commit()
                self.begun += 1
            pending = [{"id": PENDING + number, "customer_id": 1} for number in range(3)]
            session.execute(sa.insert(table), pending)
            session.execute(sa.insert(table), {"id": FINISHED, "customer_id": 1, "status": "completed"})
            if expired:
                passed = sa.func.now() - sa.text("interval '1 second'")
                session.execute(sa.update(table).where(table.c.id == RUNNING).values(lease_expires_at=passed))
            session.commit()


def _set_status(status: str) -> Callable[[World, Session], None]:
    def change(world: World, session: Session) -> None:
        table = world.model.__table__
        mine = table.c.id == RUNNING, table.c.status == "processing"
        session.execute(sa.update(table).where(*mine).values(status=status))

    return change


def _set_limit(step: int) -> Callable[[World, Session], None]:
    return lambda world, session: session.execute(sa.update(Tenant).values(most=Tenant.most + step))


def _enqueue(world: World, session: Session) -> None:
    world.enqueued += 1
    session.execute(sa.insert(world.model.__table__), {"id": EARLIER - world.enqueued, "customer_id": 1})


def throttle(world: World, session: Session) -> None:
    for statement in hold_back(spec_of(world.model), ("customer_id",), [(PENDING,)], 0):
        session.execute(statement)


def _delete(key: int) -> Callable[[World, Session], None]:
    def delete(world: World, session: Session) -> None:
        table = world.model.__table__
        session.execute(sa.delete(table).where(table.c.id == key))

    return delete


ANY: dict[str, Callable[[World, Session], Any]] = {
    "claim": lambda world, session: session.scalars(claim(world.model, 2)).all(),
    "cancel": lambda world, session: session.execute(cancel(world.some.where(world.model.id == PENDING))),
    "requeue": lambda world, session: session.execute(requeue(world.some.where(world.model.id == FINISHED))),
    "delete a waiting job": _delete(PENDING),
    "enqueue an earlier job": _enqueue,
}
"""The statements that do something whether a job runs or not."""

OF_RUN: dict[str, Callable[[World, Session], Any]] = {
    "complete": lambda world, session: session.execute(complete(world.runs[RUNNING])),
    "fail": lambda world, session: session.execute(fail(world.runs[RUNNING])),
    "retry": lambda world, session: session.execute(retry(world.runs[RUNNING])),
    "release": lambda world, session: session.execute(release(world.runs[RUNNING])),
    "rescue": lambda world, session: session.execute(rescue(world.model)),
    "set completed": _set_status("completed"),
    "set pending": _set_status("pending"),
    "delete the run": _delete(RUNNING),
}
OF_QUEUE: dict[str, dict[str, Callable[[World, Session], Any]]] = {
    "limit 1": {"raise the limit": _set_limit(1), "lower the limit": _set_limit(-1)},
    "limit 2": {"raise the limit": _set_limit(1), "lower the limit": _set_limit(-1)},
    "order": {},
    "rate": {"throttle": throttle},
}
STATEMENTS = ANY | OF_RUN | OF_QUEUE["limit 1"] | OF_QUEUE["rate"]

ENDINGS = {
    "both commit": ((True, True), False),
    "both commit, the second one first": ((True, True), True),
    "the first one rolls back": ((False, True), False),
    "the second one rolls back": ((True, False), False),
}
"""For each ending, which transactions commit, and whether the second one ends first."""


@contextmanager
def make_engine(database: Database) -> Iterator[sa.Engine]:
    """Create the tables, and return an engine."""
    engine = sa.create_engine(database.url(), pool_size=5)
    Base.metadata.create_all(engine)
    with engine.begin() as connection:
        connection.execute(sa.insert(Tenant), {"id": 1, "most": 1})
    yield engine
    engine.dispose()


def play(world: World, thread: ThreadPoolExecutor, first: str, second: str, ending: str) -> bool:
    """Execute a pair; return whether the second statement had to wait for the first transaction."""
    commits, is_second_first = ENDINGS[ending]
    with ExitStack() as stack:
        one, other, third = (stack.enter_context(Session(world.engine)) for _ in range(3))
        done: list[Any] = [STATEMENTS[first](world, one), None]
        pid = other.scalar(sa.text("SELECT pg_backend_pid()"))
        waiting = thread.submit(STATEMENTS[second], world, other)
        blocked = is_blocked(third, pid, waiting)
        sessions = [(0, one), (1, other)]
        for number, session in reversed(sessions) if is_second_first and not blocked else sessions:
            if number == 1:
                done[1] = waiting.result(30)
            session.commit() if commits[number] else session.rollback()
    for number, name in enumerate((first, second)):
        if name == "claim" and commits[number]:
            world.begun += len(done[number])
    return blocked


def is_blocked(session: Session, pid: Any, waiting: Future[Any]) -> bool:
    """Wait until a statement has ended or waits for a lock."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            waiting.result(0.003)
        except TimeoutError:
            if session.scalar(sa.text("SELECT cardinality(pg_blocking_pids(:pid)) > 0"), {"pid": pid}):
                return True
        else:
            return False
    pytest.fail("the second statement neither ends nor waits for a lock")


def rows_of(world: World, session: Session) -> dict[str, list[int]]:
    """Return the keys of jobs by status."""
    found: dict[str, list[int]] = {"pending": [], "processing": [], "failed": []}
    for row in session.execute(sa.select(world.model.__table__).order_by("id")):
        found.setdefault(row.status, []).append(row.id)
    return found


def free(world: World, session: Session) -> int:
    """Return how many jobs the next claim has to begin; fail if too many have begun already."""
    rows = rows_of(world, session)
    pending, running = rows["pending"], rows["processing"]
    if world.name == "rate":
        ahead = sa.text("SELECT extract(epoch FROM next_at - clock_timestamp()) FROM sqlaqueue_rate")
        seconds = float(session.scalar(ahead) or 0)
        assert world.begun <= BURST
        assert seconds > (world.begun - 0.1) * INTERVAL or not world.begun, "the row of the rate is behind"
        return min(len(pending), BURST - world.begun)
    if world.name == "order":
        assert len(running) <= 1
        head = min([*pending, *rows["failed"]], default=0)
        return int(not running and head in pending)
    limit = session.scalar(sa.select(Tenant.most))
    assert limit is not None
    # A claim that has seen the higher limit may begin its job beside a change.
    assert len(running) <= max(limit, world.number)
    return max(0, min(len(pending), limit - len(running)))


def check(world: World) -> None:
    """Check what runs, and that the next claims begin what is left, one after the other."""
    with Session(world.engine) as session:
        expected = free(world, session)
        while True:
            begun = [job.id for job in session.scalars(claim(world.model, 9))]
            assert len(begun) == expected
            session.commit()
            world.begun += len(begun)
            free(world, session)
            if world.name == "rate" or not begun:
                break
            session.execute(
                sa.update(world.model.__table__).where(world.model.id.in_(begun)).values(status="completed")
            )
            session.commit()
            expected = free(world, session)


def come_beside_a_claim(world: World, earlier: str) -> None:
    """Commit an earlier job while a claim is open, and claim once more."""
    world.reset(busy=False, expired=False)
    with Session(world.engine) as one, Session(world.engine) as other:
        assert len(STATEMENTS["claim"](world, one)) == 1
        STATEMENTS[earlier](world, other)
        other.commit()
        STATEMENTS["claim"](world, other)
        other.commit()
        one.commit()
