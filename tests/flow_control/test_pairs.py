"""Every pair of statements in two transactions that are open at once, on one key.

The first statement is executed, then the second one, which may have to wait for the first transaction; then both
transactions end, in each order, or one of them is rolled back. After that, what runs is within the limit, an ordered
key has one run, the row of a rate is not behind what has begun, and the next claims take exactly what is left.
"""

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
    ConcurrencyLimit,
    InOrder,
    QueueConfig,
    QueueMixin,
    RateLimit,
    cancel,
    claim,
    complete,
    fail,
    release,
    requeue,
    rescue,
    retry,
)
from sqlaqueue.flow_control.admission import was_contended
from sqlaqueue.flow_control.rates import hold_back
from sqlaqueue.mapping.mixin import spec_of
from sqlaqueue.queue.names import RATE
from tests.faults.mutants import lose_in_database
from tests.servers import Database, Server

pytestmark = pytest.mark.once

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
        "__queue__": QueueConfig(max_attempts=9, **config),
        "__annotations__": {"id": Mapped[int], "customer_id": Mapped[int]},
        "id": mapped_column(primary_key=True),
    }
    return type(f"Job_{name}", (QueueMixin, Base), columns)


LIMITED = _queue(
    "limit",
    flow_control=[
        ConcurrencyLimit(lambda job: sa.select(Tenant.most).where(Tenant.id == job.customer_id), per="customer_id")
    ],
)
ORDERED = _queue("order", flow_control=[InOrder("customer_id")])
TWO_RATES = _queue(
    "two_rates",
    flow_control=[RateLimit(10, every=60, per="customer_id"), RateLimit(100, every=3600, per="customer_id")],
)
RATED = _queue("rate", flow_control=[RateLimit(BURST, every=INTERVAL * BURST, per="customer_id")])
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


# -- all pairs -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair_engine(server: Server) -> Iterator[sa.Engine]:
    with server.database() as database, make_engine(database) as engine:
        yield engine


@pytest.fixture(scope="module")
def thread() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


def _pairs() -> Iterator[Any]:
    for name in QUEUES:
        for state in ("idle", "busy"):
            all_of_queue = ANY | OF_QUEUE[name] | (OF_RUN if state == "busy" else {})
            for first in all_of_queue:
                for second in all_of_queue:
                    marks = () if _is_quick(name, state, {first, second}) else pytest.mark.thorough
                    title = f"{name}-{state}-{first}-{second}"
                    yield pytest.param(name, state, first, second, marks=marks, id=title)


def _is_quick(name: str, state: str, pair: set[str]) -> bool:
    """Return whether each session runs a pair: a claim, and one of each kind that may let it begin too many jobs."""
    others = {"complete", "rescue", "requeue", "enqueue an earlier job", "lower the limit", "throttle"}
    is_one_of_them = state == "busy" and name != "limit 2" and not pair.isdisjoint(others)
    return pair in ({"claim"}, {"claim", "throttle"}) or ("claim" in pair and is_one_of_them)


TOUCHED = dict.fromkeys(OF_RUN, RUNNING) | dict.fromkeys(OF_QUEUE["limit 1"], "the limit")
TOUCHED |= dict.fromkeys(["cancel", "delete a waiting job"], PENDING)
"""The row that a statement changes; two statements of one row wait for each other."""


def _may_wait(first: str, second: str) -> bool:
    """Return whether the second statement may wait for the first transaction: claims and rescues pass locked rows."""
    if second in {"claim", "rescue"}:
        return False
    same_row = TOUCHED.get(first, first) == TOUCHED.get(second, second)
    # A claim has moved the row of the rate, or locked the job.
    return same_row or first == "claim"


@pytest.mark.few(12)
@pytest.mark.parametrize(("name", "state", "first", "second"), list(_pairs()))
def test_a_pair(
    pair_engine: sa.Engine, thread: ThreadPoolExecutor, name: str, state: str, first: str, second: str
) -> None:
    world = World(name, pair_engine)
    for ending in ENDINGS:
        world.reset(busy=state == "busy", expired="rescue" in {first, second})
        blocked = play(world, thread, first, second, ending)
        assert not blocked or _may_wait(first, second), f"{second} waits for a lock"
        check(world)


@pytest.mark.parametrize("earlier", ["requeue", "enqueue an earlier job"])
def test_an_earlier_job_that_comes_beside_a_claim_waits_for_its_run(pair_engine: sa.Engine, earlier: str) -> None:
    world = World("order", pair_engine)
    come_beside_a_claim(world, earlier)
    check(world)


@pytest.mark.parametrize(
    ("mutant", "name"),
    [
        ("limit without a lock", "limit 1"),
        ("limit without a lock", "limit 2"),
        ("order without a lock", "order"),
        ("order is not checked", "order"),
        ("order does not see running jobs", "order"),
        ("rate without a lock", "rate"),
    ],
)
@pytest.mark.thorough
def test_a_lost_safeguard_is_detected(server: Server, thread: ThreadPoolExecutor, mutant: str, name: str) -> None:
    with server.database() as database, ExitStack() as stack:
        engine = stack.enter_context(make_engine(database))
        with engine.begin() as connection:
            lose_in_database(connection, mutant)
        with pytest.raises(AssertionError):
            for first in ("claim", "fail", "requeue"):
                world = World(name, engine)
                world.reset(busy=first != "claim", expired=False)
                play(world, thread, first, "claim", "both commit")
                check(world)
            come_beside_a_claim(World("order", engine), "requeue")
            check(World("order", engine))


# -- a handler that throttles a rate while another worker claims ---------------------------------------------------


def test_a_shorter_throttle_leaves_a_longer_one(pair_engine: sa.Engine) -> None:
    world = World("rate", pair_engine)
    world.reset(busy=False, expired=False)
    with Session(pair_engine) as session:
        for seconds in (60.0, 0.0):
            for statement in hold_back(spec_of(RATED), ("customer_id",), [(PENDING,)], seconds):
                session.execute(statement)
            session.commit()
        assert session.scalars(claim(RATED, 1)).all() == []


def test_a_claim_passes_over_a_key_that_a_throttle_holds_back(pair_engine: sa.Engine) -> None:
    world = World("rate", pair_engine)
    world.reset(busy=True, expired=False)
    with Session(pair_engine) as one, Session(pair_engine) as other:
        throttle(world, one)
        other.execute(sa.text("SET LOCAL lock_timeout = '5s'"))
        assert STATEMENTS["claim"](world, other) == []
        assert other.scalar(sa.select(was_contended()))
        one.rollback()
        assert len(STATEMENTS["claim"](world, other)) == 1


def test_a_claim_and_a_throttle_of_two_rates_do_not_wait_for_each_other(pair_engine: sa.Engine) -> None:
    with Session(pair_engine) as one, Session(pair_engine) as other:
        one.execute(sa.insert(TWO_RATES.__table__), [{"id": key, "customer_id": 1} for key in (1, 2)])
        one.commit()
        [first] = one.scalars(claim(TWO_RATES, 1)).all()
        one.commit()
        other.execute(sa.text("SET LOCAL lock_timeout = '5s'"))
        for statement in hold_back(spec_of(TWO_RATES), ("customer_id",), [(first.id,)], 0):
            one.execute(statement)
            assert other.scalars(claim(TWO_RATES, 1)).all() == []
        one.commit()
        assert len(other.scalars(claim(TWO_RATES, 1)).all()) == 1
