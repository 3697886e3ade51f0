"""Scan ranges: a claim begins at the head, scans one priority after another, or begins at a cursor."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Session, load_only, mapped_column

from sqlaqueue import QueueConfig, QueueMixin
from sqlaqueue.consumer.statements import EXCEPT, LIMIT
from sqlaqueue.strategies import ClaimRequest, ClaimStrategy, find_strategy
from sqlaqueue.strategies.existing_messages import ExistingMessages
from tests.contexts import make_context
from tests.models import shared

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

from tests.servers import Database

HOUR = timedelta(hours=1)
NOW = datetime.now(UTC)


class Order(NamedTuple):
    """The columns of the claim order: each is present, missing or nullable."""

    priority: str = "present"
    run_at: str = "present"


ORDERS = [Order(*each) for each in product(("present", "missing", "nullable"), repeat=2)]
STRATEGIES: dict[str, tuple[str, dict[str, str | None]]] = {
    "update_status": ("update_status", {}),
    "batch_select": ("batch_select", {}),
    "delete_returning": ("delete_returning", {}),
    "own_message": ("delete_returning", {"status": None}),
}


@shared
def make_model(strategy: str | ClaimStrategy, columns: Mapping[str, str | None], order: Order) -> Any:
    roles = {role: None if kind == "missing" else f"my_{role}" for role, kind in order._asdict().items()}

    class Base(DeclarativeBase):
        pass

    class Job(QueueMixin, Base):
        __tablename__ = "job"
        __queue__ = QueueConfig(strategy=strategy, columns={**columns, **roles}, rows_are_messages="status" in columns)
        tenant = mapped_column(sa.String(5), primary_key=True)
        number = mapped_column("my number", sa.Integer(), primary_key=True, autoincrement=False)
        if order.priority != "missing":
            my_priority = mapped_column("my priority", sa.SmallInteger(), nullable=order.priority == "nullable")
        if order.run_at != "missing":
            my_run_at = mapped_column(sa.DateTime(timezone=True), nullable=order.run_at == "nullable")

    return Job


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


@pytest.fixture
def engine(database: Database) -> Iterator[sa.Engine]:
    engine = sa.create_engine(database.url())
    yield engine
    engine.dispose()


@pytest.mark.each_value
@pytest.mark.parametrize("order", ORDERS, ids="-".join)
@pytest.mark.parametrize("name", STRATEGIES)
def test_claims_follow_the_claim_order_from_their_start(engine: sa.Engine, name: str, order: Order) -> None:
    queue = Queue(engine, make_model(*STRATEGIES[name], order))
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
    model = make_model("update_status", {}, Order())
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
    assert all(find_strategy(name).supports_scan_range for name, _ in STRATEGIES.values())


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

    model = make_model(ByLock(), {}, Order())
    context = make_context(model)
    assert not context.statements.has_cursor
    assert context.claimer._cursor_after([model(tenant="a", number=1, my_priority=0, my_run_at=NOW)]) is None
