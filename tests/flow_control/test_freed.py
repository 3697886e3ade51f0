"""Claims among many keys that are held back: where they look first, and that no key is forgotten."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from statistics import median
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.orm import Session, sessionmaker

from sqlaqueue import ConcurrencyLimit, Consumer, FairShare, InOrder, RateLimit, rescue
from sqlaqueue.consumer import claim as claim_module
from sqlaqueue.consumer import pace
from sqlaqueue.consumer.pace import BatchSizer, WalkTimer
from sqlaqueue.flow_control.freed import Freed
from sqlaqueue.flow_control.keys import flow_control
from sqlaqueue.mapping.mixin import spec_of
from sqlaqueue.queue.names import RATE
from sqlaqueue.queue.options import FlowRule
from tests.flow_control.models import create, insert, make_job, of_customers
from tests.models import execute
from tests.programs import wait_until

MANY = 10_000
BOUNDED = 2_000
"""Buffers that a claim reads at most, however many keys are held back."""

ONE, HOUR = [ConcurrencyLimit(1, per="customer_id")], timedelta(hours=1)


class Claims:
    """The buffers of each claim that has found jobs, by an EXPLAIN that is undone before the claim is executed."""

    def __init__(self) -> None:
        self.buffers: list[int] = []
        self._explains = False

    def explain(self, connection: Any, _: Any, statement: str, parameters: Any, *__: Any) -> None:
        if self._explains or "sqlaqueue_picked" not in statement:
            return
        self._explains = True
        with connection.connection.driver_connection.cursor() as cursor:
            cursor.execute("SAVEPOINT explained")
            cursor.execute(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {statement}", parameters)
            plan = cursor.fetchone()[0][0]["Plan"]
            cursor.execute("ROLLBACK TO SAVEPOINT explained")
        self._explains = False
        if plan["Actual Rows"]:
            self.buffers.append(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"])


@contextlib.contextmanager
def claims_of(engine: sa.Engine) -> Iterator[Claims]:
    claims = Claims()
    event.listen(engine, "before_cursor_execute", claims.explain)
    try:
        yield claims
    finally:
        event.remove(engine, "before_cursor_execute", claims.explain)


def make_full(engine: sa.Engine, keys: int, flow: list[FlowRule], jobs_of_free_key: int = 5) -> Any:
    """Return a queue in which a job of each key runs and others wait, except for the last key, in which none runs."""
    job = create(engine, make_job(flow_control=flow))
    insert(engine, job, of_customers(*range(keys)))
    execute(
        engine,
        sa.update(job.__table__).values(
            status="processing", lease_expires_at=sa.func.now() + HOUR, lease_token=sa.func.gen_random_uuid()
        ),
    )
    insert(engine, job, of_customers(*range(keys), *[keys] * jobs_of_free_key))
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.exec_driver_sql("VACUUM ANALYZE job")
    return job


@contextlib.contextmanager
def consumer(engine: sa.Engine, job: Any, handler: Callable[[Session, Any], None], **options: Any) -> Iterator[None]:
    with Consumer(job, handler, sessionmaker(engine), signals=False, concurrency=1, **options):
        yield


def buffers_after_a_walk(engine: sa.Engine, monkeypatch: pytest.MonkeyPatch, job: Any, number: int) -> int:
    """Run the jobs of the one key with room, of which a walk finds the first; return the buffers of the worst claim."""
    done: list[int] = []

    def handle(_: Session, one: Any) -> None:
        monkeypatch.setattr(WalkTimer, "is_due", False)
        done.append(one.customer_id)

    with claims_of(engine) as claims, consumer(engine, job, handle, batch_size=1):
        wait_until(lambda: len(done) == number)
    assert done == [MANY] * number
    return max(claims.buffers[1:])


FLOWS: dict[str, list[FlowRule]] = {
    "limit": ONE,
    "order": [InOrder("customer_id")],
    "turns and limit": [FairShare("customer_id"), *ONE],
}


@pytest.mark.few(1)
@pytest.mark.parametrize("flow", FLOWS.values(), ids=FLOWS)
def test_a_claim_after_the_end_of_a_run_looks_at_its_key(
    engine: sa.Engine, monkeypatch: pytest.MonkeyPatch, flow: list[FlowRule]
) -> None:
    job = make_full(engine, MANY, flow)
    assert buffers_after_a_walk(engine, monkeypatch, job, 5) < BOUNDED


def test_a_claim_looks_at_the_key_of_a_rate_when_its_time_comes(
    engine: sa.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = create(engine, make_job(flow_control=[RateLimit(1, every=0.3, per="customer_id")]))
    insert(engine, job, of_customers(*range(MANY), *[MANY] * 4))
    spec = spec_of(job)
    flow = flow_control(spec)
    assert flow is not None
    (rate,), table, times = flow.rates, spec.side_tables[RATE], sa.func.now() + HOUR
    keys = sa.select(sa.literal(spec.name), sa.literal(rate.name), rate.hashed(spec.table), times, times)
    names = ["queue", "rate", "key", "next_at", "throttled_until"]
    used_up = keys.where(spec.table.c.customer_id < MANY)
    execute(engine, sa.insert(table).from_select(names, used_up))
    assert buffers_after_a_walk(engine, monkeypatch, job, 4) < BOUNDED


def set_free(engine: sa.Engine, job: Any, key: int, **values: Any) -> None:
    table = job.__table__
    one = sa.and_(table.c.customer_id == key, table.c.status == "processing")
    execute(engine, sa.update(table).where(one).values(**values) if values else sa.delete(table).where(one))


WAYS: dict[str, Callable[[sa.Engine, Any], None]] = {
    "plain SQL ends a run": lambda engine, job: set_free(engine, job, 77, status="completed"),
    "a row is deleted": lambda engine, job: set_free(engine, job, 77),
    "a run is cancelled": lambda engine, job: set_free(engine, job, 77, status="cancelled"),
    "a lease expires": lambda engine, job: (
        set_free(engine, job, 77, lease_expires_at=sa.func.now(), lease_token=None),
        execute(engine, rescue(job)),
    )[0],
    "a limit is raised": lambda engine, job: execute(
        engine, sa.update(job.__table__).where(job.customer_id == 77).values(most=2)
    ),
    "a job of a new key": lambda engine, job: insert(engine, job, of_customers(10**6, most=1)),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("way", WAYS)
def test_no_key_is_forgotten(engine: sa.Engine, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """Nobody tells a Consumer the key, and it is among many more than a claim walks over."""
    monkeypatch.setattr(claim_module, "FEW_PARTS", 2)
    job, done = make_full(engine, 500, [ConcurrencyLimit("most", per="customer_id")], 0), list[int]()
    execute(engine, sa.update(job.__table__).values(most=1))
    # A raised limit is noticed by polling alone.
    interval = 0.5 if way == "a limit is raised" else 600.0
    with consumer(engine, job, lambda _, one: done.append(one.customer_id), poll_interval=interval):
        time.sleep(1.0)
        assert not done
        WAYS[way](engine, job)
        wait_until(lambda: bool(done))
    assert set(done) <= {77, 10**6}


def test_keys_with_room_have_a_turn_beside_those_of_runs_that_end(
    engine: sa.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The window is full of jobs that are held back, and behind it are keys with more jobs than the worker can run."""
    monkeypatch.setattr(WalkTimer, "is_due", False)
    job, done = make_full(engine, 200, ONE, 1_000), list[int]()
    insert(engine, job, of_customers(*[1000, 1001] * 1_000))
    # Each claim is full with the next job of the key whose run has ended.
    with consumer(engine, job, lambda _, one: done.append(one.customer_id), batch_size=1):
        wait_until(lambda: len({*done}) == 3)
    assert len(done) < 900


def test_a_settlement_and_the_claim_of_what_it_frees_are_one_transaction(engine: sa.Engine) -> None:
    job, done, gate = create(engine, make_job(flow_control=ONE)), list[int](), threading.Event()
    insert(engine, job, of_customers(1, 1, 1))
    commits: list[bool] = []

    def handle(_: Session, one: Any) -> None:
        done.append(one.id)
        gate.wait(30)

    # Of the two workers, one finds that the jobs are held back.
    with Consumer(job, handle, sessionmaker(engine), signals=False, concurrency=2, poll_interval=600):
        wait_until(lambda: len(done) == 1)
        time.sleep(1.5)
        event.listen(engine, "commit", lambda _: commits.append(len(done) == 1))
        gate.set()
        wait_until(lambda: len(done) == 3)
    # By the first commit after the end of the run, its job is settled and the next one claimed.
    assert commits.count(True) == 1


# -- dead entries --------------------------------------------------------------------------------------------------


def claims_behind_dead_entries(engine: sa.Engine, job: Any, number: int) -> list[int]:
    """Leave dead entries that no VACUUM can remove; return the buffers of the claims of a backlog."""
    done: list[int] = []
    with engine.connect().execution_options(isolation_level="REPEATABLE READ") as holder:
        insert(engine, job, of_customers(*[1] * number))
        holder.exec_driver_sql("SELECT 1")
        execute(engine, sa.update(job.__table__).values(status="processing"))
        execute(engine, sa.delete(job.__table__))
        insert(engine, job, of_customers(*range(100, 2_000)))
        options: dict[str, Any] = {"signals": False, "batch": True, "batch_size": 100}
        consumer = Consumer(job, lambda _, jobs: done.extend(one.id for one in jobs), sessionmaker(engine), **options)
        with claims_of(engine) as claims, consumer:
            wait_until(lambda: len(done) >= 1_500)
        return claims.buffers


def test_claims_begin_behind_dead_entries(engine: sa.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "_SLOW_LOOK", 0.0)
    plain = claims_behind_dead_entries(engine, create(engine, make_job()), 60_000)
    with engine.begin() as connection:
        connection.exec_driver_sql("DROP SCHEMA public CASCADE; CREATE SCHEMA public")
    limited = claims_behind_dead_entries(engine, create(engine, make_job(flow_control=ONE)), 60_000)
    assert median(limited) <= 2 * median(plain)


def test_a_cursor_passes_over_no_job_that_is_held_back(engine: sa.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "_SLOW_LOOK", 0.0)
    monkeypatch.setattr(pace, "LONGEST", 1.0)
    job, done = create(engine, make_job(flow_control=ONE)), list[Any]()
    insert(engine, job, of_customers(*[1] * 100, *range(10, 400), *[1] * 100))
    urgent = threading.Event()

    def handle(_: Session, one: Any) -> None:
        done.append(one)
        if len(done) == 100:
            insert(engine, job, of_customers(2, priority=-1))
        if one.priority:
            urgent.set()

    with consumer(engine, job, handle, batch_size=2):
        wait_until(lambda: len(done) == 591)
    assert urgent.is_set()
    of_first = [one.id for one in done if one.customer_id == 1]
    assert of_first == sorted(of_first)


# -- without a database --------------------------------------------------------------------------------------------


def freed_of(engine: sa.Engine, *flow: FlowRule) -> tuple[Freed, list[float]]:
    now = [0.0]
    return Freed(flow_control(spec_of(make_job(flow_control=[*flow]))), lambda: now[0]), now


def test_a_key_is_known_until_a_claim_has_looked_at_it(engine: sa.Engine) -> None:
    freed, _ = freed_of(engine, *ONE)
    freed.ended((1,))
    freed.ended((2,))
    freed.ended((1,))
    assert freed.take() == [(2,), (1,)]
    freed.claimed([(2,), (1,)], [(2,)], full=True)
    assert freed.take() == [(1,), (2,)]
    freed.claimed([(1,)], [], full=False)
    assert freed.take() == [(2,)]


def test_a_key_of_a_rate_is_known_when_its_next_job_may_begin(engine: sa.Engine) -> None:
    freed, now = freed_of(engine, RateLimit(2, every=10, per="customer_id"))
    freed.claimed([], [(1,)], full=False)
    # The end of a run frees nothing.
    freed.ended((2,))
    freed.ended((3,), throttled=60.0)
    assert freed.take() == []
    now[0] = 5.0
    assert freed.take() == [(1,)]
    now[0] = 60.0
    assert freed.take() == [(1,), (3,)]


def test_what_is_known_has_an_end(engine: sa.Engine) -> None:
    freed, now = freed_of(engine, *ONE, RateLimit(1, every=1, per="customer_id"))
    for number in range(20_000):
        freed.ended((number,))
        freed.ended((number,), throttled=1.0)
    assert freed.take()[0] == (19_000,)
    now[0] = 2.0
    assert len(freed.take()) == 100


def test_claims_have_room_for_few_jobs_while_places_are_scarce() -> None:
    sizer = BatchSizer(1_000, 8, prompt=True)
    sizer.record_calls(0.0001, unused=True)
    assert sizer.claim_size(idle=2) > 2
    assert sizer.claim_size(idle=2, scarce=True) == 2


def test_walks_take_a_quarter_of_the_time() -> None:
    now = [0.0]
    timer = WalkTimer(lambda: now[0])
    assert timer.is_due
    with timer:
        assert not timer.is_due
        now[0] = 2.0
    assert timer.until_due == pytest.approx(6.0)
    now[0] = 8.0
    assert timer.is_due
