"""Ranges of a queue: a claim scans one priority after another or from a cursor, and a Consumer reconciles by parts."""

import threading
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from itertools import product
from typing import Any, NamedTuple

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session, load_only, mapped_column, sessionmaker

from sqlaqueue import Consumer, reconcile
from sqlaqueue.consumer.maintenance import cleanup as reconciling
from sqlaqueue.consumer.pace import Intervals
from sqlaqueue.consumer.statements import EXCEPT, LIMIT
from sqlaqueue.strategies import ClaimRequest, ClaimStrategy, find_strategy
from sqlaqueue.strategies.existing_messages import ExistingMessages
from tests.contexts import make_context
from tests.models import STRATEGIES, create, make_job, shared
from tests.programs import wait_until
from tests.strategies.conftest import nodes_of

HOUR = timedelta(hours=1)
NOW = datetime.now(UTC)


class Order(NamedTuple):
    """The columns of the claim order: each is present, missing or nullable."""

    priority: str = "present"
    run_at: str = "present"


ORDERS = [Order(*each) for each in product(("present", "missing", "nullable"), repeat=2)]
KINDS = (*STRATEGIES, "rows_are_messages")


@shared
def make_model(kind: str, order: Order, **config: Any) -> Any:
    attributes = {
        "id": None,
        "tenant": mapped_column(sa.String(5), primary_key=True),
        "number": mapped_column("my number", sa.Integer(), primary_key=True, autoincrement=False),
    }
    if order.priority != "missing":
        nullable = order.priority == "nullable"
        attributes["my_priority"] = mapped_column("my priority", sa.SmallInteger(), nullable=nullable)
    if order.run_at != "missing":
        attributes["my_run_at"] = mapped_column(sa.DateTime(timezone=True), nullable=order.run_at == "nullable")
    roles = {role: None if kind == "missing" else f"my_{role}" for role, kind in order._asdict().items()}
    return make_job(kind, attributes, columns=roles, **config)


def values_of(order: Order) -> Iterator[dict[str, Any]]:
    """All combinations of priorities and times, and a priority with nothing that is due."""
    priorities = {"present": [2, -1, 0], "nullable": [2, None, -1, 0], "missing": [None]}[order.priority]
    times = [NOW - HOUR, NOW - 2 * HOUR, NOW + HOUR]
    times = {"present": times, "nullable": [*times, None], "missing": [None]}[order.run_at]
    combinations = [*product(priorities, times)]
    if order == ORDERS[0]:
        combinations.append((-7, NOW + HOUR))
    for priority, run_at in combinations:
        values = {"my_priority": priority, "my_run_at": run_at}
        yield {name: value for name, value in values.items() if getattr(order, name[3:]) != "missing"}


class Queue:
    def __init__(self, engine: sa.Engine, model: Any) -> None:
        self.engine, self.model = engine, model
        model.metadata.create_all(engine)
        self.context = make_context(model)

    def claimed(self, n: int, mark: Mapping[str, Any] | None = None) -> list[Any]:
        """Claim as a Consumer does."""
        parameters = {LIMIT: n, **(mark or {})}
        if not self.context.statements.marks_rows:
            parameters[EXCEPT] = []
        with Session(self.engine) as session:
            statements = self.context.statements
            statement = statements.claim if mark is None else statements.claim_from_cursor
            jobs = session.execute(statement, parameters).scalars().all()
            session.expunge_all()
            return list(jobs)


def position(job: Any) -> tuple[Any, ...]:
    """Return the position of a job in the claim order; nulls come last."""
    parts = [getattr(job, name, 0) for name in ("my_priority", "my_run_at")]
    return (*((part is None, part) for part in parts), job.tenant, job.number)


def key(job: Any) -> tuple[Any, ...]:
    return job.tenant, job.number


@pytest.mark.parametrize("order", ORDERS, ids="-".join)
@pytest.mark.parametrize("kind", KINDS)
def test_claims_follow_the_claim_order_from_their_start(engine: sa.Engine, kind: str, order: Order) -> None:
    queue = Queue(engine, make_model(kind, order))
    with Session(engine) as session:
        every = [values for values in values_of(order) for _ in range(3)]
        session.add_all([queue.model(tenant="ba"[i % 2], number=i, **values) for i, values in enumerate(every)])
        session.commit()
        jobs = session.scalars(sa.select(queue.model)).all()
    due = sorted((job for job in jobs if (getattr(job, "my_run_at", None) or NOW) <= NOW), key=position)
    for n in (1, 4, len(due), len(due) + 1):
        assert [key(job) for job in queue.claimed(n)] == [key(job) for job in due[:n]]
    for at, job in enumerate(queue.claimed(len(due))):
        mark = queue.context.claimer._cursor_after([due[0], job])
        assert (mark is None) == (None in {getattr(job, name, 0) for name in ("my_priority", "my_run_at")})
        if mark is None:
            continue
        level = getattr(job, "my_priority", 0)
        rest = [other for other in due[at:] if getattr(other, "my_priority", 0) == level]
        rest = [other for other in rest if getattr(other, "my_run_at", 0) is not None]
        for n in (2, len(due)):
            assert [key(other) for other in queue.claimed(n, mark)] == [key(other) for other in rest[:n]]


def test_a_partly_loaded_job_is_no_cursor(engine: sa.Engine) -> None:
    model = make_model("update_status", Order())
    queue = Queue(engine, model)
    with Session(engine) as session:
        session.add(model(tenant="a", number=1, my_priority=0, my_run_at=NOW))
        session.commit()
        job = session.scalars(sa.select(model).options(load_only(model.tenant))).one()
        assert queue.context.claimer._cursor_after([job]) is None
    assert queue.context.claimer._cursor_after([]) is None


@pytest.mark.once
def test_a_strategy_has_to_declare_scan_ranges() -> None:
    """Messages of an application have their own order, and strategies of other packages may not support it."""
    assert not ClaimStrategy.supports_scan_range
    assert not ExistingMessages.supports_scan_range
    assert all(find_strategy(name).supports_scan_range for name in STRATEGIES)


@pytest.mark.once
def test_a_strategy_without_scan_ranges_gets_plain_claims() -> None:
    class ByLock(ClaimStrategy):
        name = "by_lock"
        holds_transaction = True

        def claim(self, request: ClaimRequest) -> Any:
            spec = request.spec
            assert request.scan_range is None
            waiting = self.pick(spec, request.candidates, *spec.table.c).where(spec.in_state("pending"))
            rows = self.first_due(spec, waiting, spec.table, request.limit, request.scan_range)
            return self.in_claim_order(spec, self.lock(spec, rows).cte("claimed"))

    model = make_model("update_status", Order(), strategy=ByLock())
    context = make_context(model)
    assert not context.statements.has_cursor
    assert context.claimer._cursor_after([model(tenant="a", number=1, my_priority=0, my_run_at=NOW)]) is None


# -- consumers reconcile a message table in ranges of keys, to spread the reads of a large table over time -------------


@pytest.fixture(params=["single", "composite"])
def model(request: pytest.FixtureRequest, engine: sa.Engine) -> Any:
    attributes = {
        "shop": mapped_column(sa.Text, primary_key=request.param == "composite", default="a", sort_order=-1),
        "id": mapped_column(sa.Integer, primary_key=True, autoincrement=False),
    }
    return create(engine, make_job("delete_returning", attributes))


def break_some(engine: sa.Engine, model: Any) -> None:
    """Enqueue ten jobs: 2 and 8 are pending without a message, 3 and 9 have a message and are not pending."""
    with Session(engine) as session:
        # Two shops, so that the parts of a composite key end within one and at its end.
        session.add_all(model(id=number, shop="ab"[number > 5]) for number in range(1, 11))
        session.commit()
        session.execute(sa.text("ALTER TABLE job DISABLE TRIGGER USER"))
        session.execute(sa.text("DELETE FROM sqlaqueue_message_job WHERE id IN (2, 8)"))
        session.execute(sa.text("DELETE FROM job WHERE id = 3"))
        session.execute(sa.text("UPDATE job SET status = 'completed' WHERE id = 9"))
        session.execute(sa.text("ALTER TABLE job ENABLE TRIGGER USER"))
        session.commit()


def is_right(engine: sa.Engine, model: Any) -> bool:
    with Session(engine) as session:
        return session.scalars(reconcile(model)).all() == []


def test_reconciling_all_ranges_repairs_everything(
    engine: sa.Engine, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reconciling, "RANGE", 4)
    break_some(engine, model)
    context = make_context(model)
    after, parts = None, []
    with Session(engine) as session:
        for _ in range(3):
            keys, after = reconciling.reconcile_range(session, context, after)
            parts.append(([key[-1] for key in keys], after and after[-1]))
    # Nine jobs are left, of which the fourth is 5 and the eighth 9.
    assert [(sorted(mended), upto) for mended, upto in parts] == [([2, 3], 5), ([8, 9], 9), ([], None)]
    assert is_right(engine, model)


def test_messages_after_the_last_job_are_deleted(engine: sa.Engine, model: Any) -> None:
    context = make_context(model)
    break_some(engine, model)
    with Session(engine) as session:
        session.execute(sa.text("ALTER TABLE job DISABLE TRIGGER USER"))
        session.execute(sa.text("DELETE FROM job"))
        session.execute(sa.text("ALTER TABLE job ENABLE TRIGGER USER"))
        session.commit()
        keys, after = reconciling.reconcile_range(session, context, None)
    assert sorted(key[-1] for key in keys) == [1, 3, 4, 5, 6, 7, 9, 10]
    assert after is None


def test_a_consumer_reconciles_all_ranges(
    engine: sa.Engine, model: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(reconciling, "RANGE", 4)
    break_some(engine, model)
    found_any: list[bool] = []
    monkeypatch.setattr(Intervals, "between_ranges", lambda self, took, *, found: found_any.append(found) or 0.05)
    done: list[int] = []
    consumer = Consumer(model, lambda session, job: done.append(job.id), sessionmaker(engine), poll_interval=0.05)
    thread = threading.Thread(target=consumer.run)
    thread.start()
    try:
        wait_until(lambda: sorted(done) == [1, 2, 4, 5, 6, 7, 8, 10])
        wait_until(lambda: is_right(engine, model))
    finally:
        consumer.stop()
        thread.join()
    assert caplog.text.count("repaired what writes without triggers left") == 2
    assert found_any[:2] == [True, True], "the first two of three parts"


def test_a_range_is_read_by_index(engine: sa.Engine, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the size of the tables and their statistics."""
    monkeypatch.setattr(reconciling, "RANGE", 100)
    context = make_context(model)
    explained: list[dict[str, Any]] = []

    @sa.event.listens_for(engine, "before_cursor_execute")
    def _explain(connection: Any, cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        if "without_job" in statement:
            cursor.execute(f"EXPLAIN (ANALYZE, FORMAT JSON) {statement}", parameters)
            explained.extend(nodes_of(cursor.fetchone()[0][0]["Plan"]))

    try:
        with Session(engine) as session:
            session.execute(sa.text("INSERT INTO job (id, shop) SELECT i, 'a' FROM generate_series(1, 20000) i"))
            session.commit()
            after = (9000,) if len(context.spec.keys) == 1 else ("a", 9000)
            assert reconciling.reconcile_range(session, context, after) == ([], (*after[:-1], 9100))
    finally:
        sa.event.remove(engine, "before_cursor_execute", _explain)
    assert [node for node in explained if node["Node Type"] == "Seq Scan"] == []
    # The condition by which it is planned anew goes through a hundred rows as well.
    assert max(node["Actual Rows"] * node["Actual Loops"] for node in explained) == 100
