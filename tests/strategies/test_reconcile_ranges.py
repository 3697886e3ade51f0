"""Consumers reconcile a message table in ranges of keys, to spread the reads of a large table over time."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Session, mapped_column, sessionmaker

from sqlaqueue import Consumer, QueueConfig, QueueMixin, reconcile
from sqlaqueue.consumer.maintenance import cleanup as reconciling
from sqlaqueue.consumer.pace import Intervals
from sqlaqueue.testing.conformance.engines import wait_for
from tests.contexts import make_context
from tests.strategies.explain import nodes_of


def make_model(*, composite: bool) -> Any:
    class Base(DeclarativeBase):
        pass

    class Job(QueueMixin, Base):
        __tablename__ = "job"
        __queue__ = QueueConfig(strategy="delete_returning")
        shop = mapped_column(sa.Text(), primary_key=composite, default="a")
        id = mapped_column(sa.Integer(), primary_key=True, autoincrement=False)

    return Job


@pytest.fixture(params=["single", "composite"])
def model(request: pytest.FixtureRequest, engine: sa.Engine) -> Any:
    made = make_model(composite=request.param == "composite")
    made.metadata.create_all(engine)
    return made


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
        wait_for(lambda: sorted(done) == [1, 2, 4, 5, 6, 7, 8, 10])
        wait_for(lambda: is_right(engine, model))
    finally:
        consumer.stop()
        thread.join()
    assert caplog.text.count("jobs that waited without a message") == 2
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
