"""Processes whose models differ from the database, as during a deployment: they say so, and what to do."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from threading import Thread
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Mapped, Session, mapped_column, sessionmaker

from sqlaqueue import Consumer, QueueConfig, QueueMixin
from sqlaqueue.admin import Finding, QueueAdmin, doctor
from sqlaqueue.consumer.pace import Intervals
from sqlaqueue.exc import DatabaseNotReadyError
from tests.models import new_base
from tests.programs import wait_until

pytestmark = pytest.mark.once


@pytest.fixture(autouse=True)
def rare_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test waits for is not to come with a usual heartbeat."""
    monkeypatch.setattr(Intervals, "heartbeat", lambda *_: 600.0)


def make(*, older: bool, strategy: str = "update_status") -> Any:
    """Return the queue class of a version of the program: the newer one has no column ``note``."""
    columns = {"__annotations__": {"id": Mapped[int]}, "id": mapped_column(primary_key=True)}
    if older:
        columns["note"] = mapped_column(sa.String(20), nullable=True)
    body = {"__module__": __name__, "__tablename__": "email", "__queue__": QueueConfig(strategy=strategy), **columns}
    return type("Email", (QueueMixin, new_base()), body)


@contextmanager
def running(engine: sa.Engine, model: Any) -> Iterator[Consumer[Any]]:
    consumer = Consumer(model, lambda _session, _job: None, sessionmaker(engine), poll_interval=0.05)
    thread = Thread(target=consumer.run)
    thread.start()
    try:
        wait_until(lambda: consumer.health().ready)
        yield consumer
    finally:
        consumer.stop()
        thread.join(30)


def drop_the_column(engine: sa.Engine) -> None:
    with engine.begin() as connection:
        connection.exec_driver_sql("ALTER TABLE email DROP COLUMN note")


def enqueue(engine: sa.Engine, model: Any) -> int:
    with Session(engine) as session:
        job = model()
        session.add(job)
        session.commit()
        return int(job.id)


def reasons(engine: sa.Engine, model: Any, key: int) -> dict[str, str]:
    with Session(engine) as session:
        return {each.code: each.text for each in QueueAdmin(session, model).explain(key).reasons}


def found(engine: sa.Engine, model: Any) -> dict[str, Finding]:
    with Session(engine) as session:
        return {each.code: each for each in doctor(session, model)}


def when(engine: sa.Engine, model: Any, key: int, condition: Callable[[dict[str, str]], bool]) -> dict[str, str]:
    said = list[dict[str, str]]()

    def is_so() -> bool:
        said.append(reasons(engine, model, key))
        return condition(said[-1])

    wait_until(is_so)
    return said[-1]


@pytest.mark.few(1)
def test_a_worker_says_that_a_newer_version_has_changed_the_table(
    engine: sa.Engine, caplog: pytest.LogCaptureFixture
) -> None:
    old, new = make(older=True), make(older=False)
    old.metadata.create_all(engine)
    caplog.set_level(logging.INFO, logger="sqlaqueue")
    with running(engine, old) as consumer:
        drop_the_column(engine)
        job = enqueue(engine, new)
        said = when(engine, new, job, lambda given: "claims_fail" in given)["claims_fail"]
        assert "note" in said
        assert "restart this process with that version. No other Consumer is alive." in said
        (problem,) = consumer.health().problems
        assert "claims have failed" in problem
        assert "restart this process with that version" in problem
        # The doctor of a process with the older models does not propose the column.
        findings = found(engine, old)
        assert findings["missing_column"].fixes == ()
        assert "a newer version of the program has dropped it" in findings["missing_column"].consequence
        assert found(engine, new)["claims_fail"].severity == "critical"
        with running(engine, new):
            wait_until(lambda: "finished" in reasons(engine, new, job))
            # The first heartbeat that says that its claims work may come after its first job.
            wait_until(lambda: found(engine, old)["missing_column"].fixes == ("alembic upgrade head",))
            findings = found(engine, old)
            assert "restart this process with that version" in findings["missing_column"].consequence
            findings = found(engine, new)
            assert "missing_column" not in findings
            assert findings["claims_fail"].severity == "warning"
    texts = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert len([text for text in texts if "restart this process with that version" in text]) == 1


@pytest.mark.parametrize("engine", ["sqlite"], indirect=True)
def test_claims_that_work_again_are_not_reported(engine: sa.Engine) -> None:
    old, new = make(older=True), make(older=False)
    old.metadata.create_all(engine)
    with running(engine, old):
        drop_the_column(engine)
        job = enqueue(engine, new)
        when(engine, new, job, lambda given: "claims_fail" in given)
        with engine.begin() as connection:
            connection.exec_driver_sql("ALTER TABLE email ADD COLUMN note VARCHAR(20)")
        wait_until(lambda: "finished" in reasons(engine, new, job))
        wait_until(lambda: "claims_fail" not in found(engine, new))


def test_an_older_version_does_not_start(engine: sa.Engine) -> None:
    old, new = make(older=True), make(older=False)
    new.metadata.create_all(engine)
    with pytest.raises(DatabaseNotReadyError, match="email.note.*start that version"):
        Consumer(old, lambda _session, _job: None, sessionmaker(engine)).drain()


def test_the_last_heartbeat_of_a_dead_worker_is_named(engine: sa.Engine) -> None:
    model = make(older=True)
    model.metadata.create_all(engine)
    job = enqueue(engine, model)
    assert "all have stopped" in reasons(engine, model, job)["no_consumer"]
    table = model.metadata.tables["sqlaqueue_consumer"]
    past = datetime(2020, 1, 1, 12, tzinfo=UTC)
    with engine.begin() as connection:
        connection.execute(
            sa.insert(table).values(
                id="1",
                queue="email",
                host="web",
                pid=1,
                version="0",
                listening=False,
                running=[],
                heartbeat_at=past,
                expires_at=past,
            )
        )
    assert "the last heartbeat was sent at 2020-01-01 12:00:00 UTC" in reasons(engine, model, job)["no_consumer"]
