"""The server may keep the plan of a claim of a few jobs, which halves its time, but not of a claim of many."""

from __future__ import annotations

import uuid
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Session, mapped_column

from sqlaqueue import QueueConfig, QueueMixin, claim
from sqlaqueue.consumer.executor import load_again
from sqlaqueue.consumer.maintenance import state
from sqlaqueue.consumer.maintenance.cleanup import reconcile_range
from sqlaqueue.consumer.maintenance.state import Retention
from sqlaqueue.consumer.statements import EXCEPT, EXPECTED, KEYS, LIMIT, RUN_TOKEN
from sqlaqueue.mapping.mixin import spec_of
from sqlaqueue.postgresql.claim_scan import FEW
from sqlaqueue.queue.run import Run
from tests.contexts import make_context
from tests.models import shared

if TYPE_CHECKING:
    from collections.abc import Iterator

KEPT = sa.text("""SELECT generic_plans > 0 FROM pg_prepared_statements
                  WHERE statement LIKE '%SKIP LOCKED%' AND statement NOT LIKE '%pg_prepared%'
                  ORDER BY prepare_time DESC LIMIT 1""")


@shared
def make_model(strategy: Any, **config: Any) -> Any:
    class Base(DeclarativeBase):
        pass

    class Job(QueueMixin, Base):
        __tablename__ = "job"
        __queue__ = QueueConfig(strategy=strategy, **config)
        id = mapped_column(sa.Integer(), primary_key=True)

    return Job


def test_a_large_limit_makes_a_claim_no_slower(engine: sa.Engine) -> None:
    model = make_model("batch_select")
    model.metadata.create_all(engine)
    with Session(engine) as session:
        session.add_all([model(), model()])
        session.execute(sa.text("SET LOCAL statement_timeout = '5s'"))
        assert len(session.scalars(claim(model, 2**40)).all()) == 2


@pytest.mark.each_value
@pytest.mark.parametrize("strategy", ["update_status", "batch_select", "delete_returning"])
@pytest.mark.parametrize(
    ("limit", "from_mark", "kept"),
    [(1, False, True), (FEW, False, True), (2 * FEW + 2, False, False), (1, True, False)],
)
def test_a_claim_of_a_few_jobs_may_keep_its_plan(
    engine: sa.Engine, strategy: Any, limit: int, *, from_mark: bool, kept: bool
) -> None:
    """After a claim that returned as many jobs as requested there may be many more."""
    model = make_model(strategy)
    model.metadata.create_all(engine)
    context = make_context(model)
    with Session(engine) as session:
        driver: Any = session.connection().connection.driver_connection
        driver.prepare_threshold = 0
        session.add_all(model() for _ in range(30 * FEW))
        session.commit()
        parameters: dict[str, Any] = {LIMIT: limit, EXCEPT: []}
        if from_mark:
            (job,) = session.execute(context.statements.claim, parameters).scalars()
            parameters |= context.claimer._cursor_after([job]) or {}
            session.commit()
        for _ in range(12):
            statements = context.statements
            statement = statements.claim_from_cursor if from_mark else statements.claim
            session.execute(statement, parameters).scalars().all()
            session.commit()
        assert session.scalar(KEPT) is kept
        driver.prepare_threshold = 5


@pytest.fixture
def session(engine: sa.Engine) -> Iterator[Session]:
    """Return a session that prepares each statement on first use."""
    with Session(engine) as session:
        driver: Any = session.connection().connection.driver_connection
        driver.prepare_threshold = 0
        yield session
        driver.prepare_threshold = 5


def kept_of(session: Session, beginning: str) -> int:
    """Return how often statements that begin with this text used a generic plan."""
    kept = "SELECT sum(generic_plans)::int FROM pg_prepared_statements WHERE starts_with(statement, :beginning)"
    times: int = session.scalar(sa.text(kept), {"beginning": beginning})
    return times


@pytest.mark.parametrize("strategy", ["update_status", "batch_select"])
def test_no_plan_is_kept_for_settling_many_runs(engine: sa.Engine, session: Session, strategy: Any) -> None:
    model = make_model(strategy)
    model.metadata.create_all(engine)
    context = make_context(model)
    for number in range(12):
        bound = {KEYS: [number, number + 1], EXPECTED: 2, RUN_TOKEN: None}
        assert session.connection().execute(context.statements.complete, bound).all() == [(0, None)]
    assert kept_of(session, "WITH sqlaqueue_ended") == 0


def test_no_plan_is_kept_for_loading_again(
    engine: sa.Engine, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    # At a rollback psycopg forgets what it has prepared. Not every driver does.
    monkeypatch.setattr(session, "rollback", session.commit)
    model = make_model("update_status")
    model.metadata.create_all(engine)
    context = make_context(model)
    for _ in range(12):
        token = uuid.uuid4()
        assert load_again(session, context, [Run((number,), token, 1, 5) for number in range(30)]) == []
    assert kept_of(session, "SELECT job") == 0


def test_no_plan_is_kept_for_deleting_old_jobs(
    engine: sa.Engine, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The server ends a batch that is idle for that long, which a busy machine may be.
    monkeypatch.setattr(state, "_LONGEST", 60.0)
    model = make_model("update_status", retention={"completed": timedelta(days=1)})
    model.metadata.create_all(engine)
    retention, context = Retention(spec_of(model)), make_context(model)
    (walk,) = retention.walks
    for _ in range(12):
        assert retention.delete_batch(session, context.settings, walk)[0] == 0
    assert kept_of(session, "DELETE FROM job") == 0


def test_no_plan_is_kept_for_reconciling_a_range(engine: sa.Engine, session: Session) -> None:
    model = make_model("delete_returning")
    model.metadata.create_all(engine)
    context = make_context(model)
    for _ in range(12):
        assert reconcile_range(session, context, (0,)) == ([], None)
    assert kept_of(session, "SELECT job.id") == 0
