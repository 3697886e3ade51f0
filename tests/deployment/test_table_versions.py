"""The versions in the comments of side tables: which workers go on after a migration, which stop, and which start."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Mapped, Session, mapped_column, sessionmaker

from sqlaqueue import ConcurrencyLimit, Consumer, QueueConfig, QueueMixin, RateLimit, Schedule, Scheduler
from sqlaqueue._version import __version__
from sqlaqueue.admin import doctor
from sqlaqueue.consumer.pace import HEARTBEAT, Intervals
from sqlaqueue.exc import DatabaseNotReadyError
from sqlaqueue.queue.names import CONTROL, SCHEDULE
from sqlaqueue.queue.versions import TABLE_VERSIONS, TableVersion, table_comment, table_version, too_new
from tests.models import new_base
from tests.programs import wait_until

pytestmark = pytest.mark.once

ALL_CAN = "sqlaqueue, as of 9.1, for 0.1 and newer"
ONLY_NEWER_CAN = "sqlaqueue, as of 9.1, for 9.0 and newer"
REFUSED = (
    "was migrated to sqlaqueue 9.1, for workers of 9.0 and newer, and this process has sqlaqueue "
    f"{__version__}: start the version of the program that has sqlaqueue 9.1"
)


with_comments = pytest.mark.parametrize("engine", ["postgresql", "mariadb"], indirect=True)


@pytest.fixture(autouse=True)
def frequent_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Intervals, "heartbeat", lambda *_: 0.05)


def make(**config: Any) -> Any:
    """Return a queue class whose side tables have the versions that this process has now."""
    columns = {"__annotations__": {"id": Mapped[int]}, "id": mapped_column(primary_key=True)}
    options = {"strategy": "update_status", **config}
    body = {"__module__": __name__, "__tablename__": "job", "__queue__": QueueConfig(**options), **columns}
    return type("Job", (QueueMixin, new_base()), body)


def set_comment(engine: sa.Engine, table: sa.Table, comment: str | None) -> None:
    """Do what a migration of another version does."""
    changed = table.to_metadata(sa.MetaData())
    changed.comment = comment
    statement = sa.schema.DropTableComment(changed) if comment is None else sa.schema.SetTableComment(changed)
    with engine.begin() as connection:
        connection.execute(statement)


def states(engine: sa.Engine, model: Any) -> list[tuple[str, int]]:
    with Session(engine) as session:
        rows = session.execute(sa.select(model.status, model.attempts).order_by(model.id))
        return [(str(status), attempts) for status, attempts in rows]


def add(engine: sa.Engine, model: Any, number: int) -> None:
    with Session(engine) as session:
        session.add_all([model() for _ in range(number)])
        session.commit()


@contextmanager
def running(consumer: Consumer[Any], errors: list[BaseException]) -> Iterator[threading.Thread]:
    def run() -> None:
        try:
            consumer.run()
        except DatabaseNotReadyError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        wait_until(lambda: consumer.health().ready)
        yield thread
    finally:
        consumer.stop()
        thread.join(30)


@with_comments
def test_a_worker_that_is_too_old_ends_its_job_and_releases_the_others(engine: sa.Engine) -> None:
    model = make()
    model.metadata.create_all(engine)
    begun, may_end, errors = threading.Event(), threading.Event(), list[BaseException]()

    def handle(_session: Session, _job: Any) -> None:
        begun.set()
        may_end.wait(30)

    consumer = Consumer(model, handle, sessionmaker(engine), batch_size=3, poll_interval=0.05)
    add(engine, model, 3)
    with running(consumer, errors) as thread:
        begun.wait(30)
        set_comment(engine, model.metadata.tables[CONTROL], ONLY_NEWER_CAN)
        wait_until(lambda: "it is stopping" in consumer.health().problems)
        add(engine, model, 1)
        may_end.set()
        thread.join(30)
    assert [str(error) for error in errors] == [f"Job: the table {CONTROL} {REFUSED}"]
    assert states(engine, model) == [("completed", 1), ("pending", 0), ("pending", 0), ("pending", 0)]
    with Session(engine) as session:
        assert session.scalar(sa.select(sa.func.count()).select_from(model.metadata.tables["sqlaqueue_consumer"])) == 0


@with_comments
def test_a_worker_goes_on_beside_a_newer_table_that_it_may_use(
    engine: sa.Engine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="sqlaqueue")
    model = make()
    model.metadata.create_all(engine)
    consumer: Consumer[Any] = Consumer(model, lambda *_: None, sessionmaker(engine), poll_interval=0.05)
    with running(consumer, []):
        set_comment(engine, model.metadata.tables[CONTROL], ALL_CAN)
        registered = model.metadata.tables["sqlaqueue_consumer"]
        with engine.connect() as connection:
            before = connection.scalar(sa.select(registered.c.heartbeat_at))
        add(engine, model, 1)

        def has_beaten() -> bool:
            with engine.connect() as connection:
                return connection.scalar(sa.select(registered.c.heartbeat_at)) not in {None, before}

        wait_until(has_beaten)
        wait_until(lambda: states(engine, model) == [("completed", 1)])
        assert consumer.health().ready
    assert [each.getMessage() for each in caplog.records if "sqlaqueue 9" in each.getMessage()] == []


@with_comments
def test_a_worker_whose_claims_fail_after_the_migration_looks_immediately(
    engine: sa.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Intervals, "heartbeat", lambda *_: 60 * HEARTBEAT)
    model = make()
    model.metadata.create_all(engine)
    errors = list[BaseException]()
    with running(Consumer(model, lambda *_: None, sessionmaker(engine), poll_interval=0.05), errors) as thread:
        # A column with another meaning has another name, so the statements of older workers fail.
        with engine.begin() as connection:
            connection.exec_driver_sql(f"ALTER TABLE {CONTROL} RENAME COLUMN created_at TO requested_at")
        set_comment(engine, model.metadata.tables[CONTROL], ONLY_NEWER_CAN)
        with engine.begin() as connection:
            connection.exec_driver_sql("ALTER TABLE job RENAME COLUMN status TO state")
        thread.join(30)
    assert [str(error) for error in errors] == [f"Job: the table {CONTROL} {REFUSED}"]


@with_comments
def test_which_version_starts(engine: sa.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    older, sessions = make(), sessionmaker(engine)
    older.metadata.create_all(engine)
    monkeypatch.setitem(TABLE_VERSIONS, CONTROL, TableVersion((0, 2), (0, 1)))
    newer = make()
    needed = f"Job: the table {CONTROL} is as of sqlaqueue 0.1, and this process, which has sqlaqueue {__version__}, "
    for comment in (table_comment("messages"), None, "a comment of the application"):
        set_comment(engine, older.metadata.tables[CONTROL], comment)
        with pytest.raises(DatabaseNotReadyError) as refused:
            Consumer(newer, lambda *_: None, sessions).drain()
        assert str(refused.value).startswith(f"{needed}needs it as of 0.2. Run `alembic revision --autogenerate")
        assert Consumer(older, lambda *_: None, sessions).drain() == 0
    set_comment(engine, older.metadata.tables[CONTROL], table_comment(CONTROL))
    for model in (older, newer):
        assert Consumer(model, lambda *_: None, sessions).drain() == 0
    set_comment(engine, older.metadata.tables[CONTROL], ONLY_NEWER_CAN)
    add(engine, older, 1)
    for model in (older, newer):
        with pytest.raises(DatabaseNotReadyError) as refused:
            Consumer(model, lambda *_: None, sessions).drain()
        assert str(refused.value) == f"Job: the table {CONTROL} {REFUSED}"
        # It was refused before its first claim.
        assert states(engine, older) == [("pending", 0)]


@with_comments
def test_the_doctor_names_both_versions(engine: sa.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make()
    model.metadata.create_all(engine)
    monkeypatch.setitem(TABLE_VERSIONS, CONTROL, TableVersion((0, 2), (0, 2)))
    newer = make()

    def found(given: Any) -> dict[str, tuple[str, str]]:
        with Session(engine) as session:
            return {each.code: (each.severity, each.summary) for each in doctor(session, given)}

    assert "table_version" not in found(model)
    severity, summary = found(newer)["table_version"]
    assert severity == "critical"
    assert summary.endswith("needs it as of 0.2.")
    set_comment(engine, model.metadata.tables[CONTROL], ONLY_NEWER_CAN)
    assert found(model)["table_version"] == ("critical", f"The table {CONTROL} {REFUSED}.")
    # Before the migration of a version that some of the workers cannot live with.
    consumer: Consumer[Any] = Consumer(model, lambda *_: None, sessionmaker(engine), poll_interval=0.05)
    set_comment(engine, model.metadata.tables[CONTROL], None)
    with running(consumer, []):
        wait_until(lambda: "no_consumer" not in found(model))
        with engine.begin() as connection:
            connection.execute(sa.update(model.metadata.tables["sqlaqueue_consumer"]).values(version="0.1.7"))
        assert found(model)["other_version"][0] == "notice"
        assert found(newer)["other_version"][0] == "warning"


@with_comments
def test_a_scheduler_stops_and_does_not_start(engine: sa.Engine) -> None:
    model = make()
    daily: Schedule[Any] = Schedule("daily", model, every=timedelta(seconds=1))
    model.metadata.create_all(engine)
    refused = f"a process that fires schedules: the table {SCHEDULE} {REFUSED}"
    scheduler, errors = Scheduler(sessionmaker(engine), [daily]), list[BaseException]()

    def run() -> None:
        try:
            scheduler.run()
        except DatabaseNotReadyError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        wait_until(lambda: len(states(engine, model)) > 0)
        set_comment(engine, model.metadata.tables[SCHEDULE], ONLY_NEWER_CAN)
        thread.join(30)
    finally:
        scheduler.stop()
        thread.join(30)
    fired = len(states(engine, model))
    assert [str(error) for error in errors] == [refused]
    with pytest.raises(DatabaseNotReadyError) as error:
        scheduler.run()
    assert str(error.value) == refused
    assert len(states(engine, model)) == fired


def test_every_table_of_the_library_has_a_version() -> None:
    limits = [ConcurrencyLimit(2), RateLimit(10, every=1)]
    tables: dict[str, sa.Table] = {}
    for strategy in ("update_status", "delete_returning", "batch_select"):
        flow: dict[str, Any] = {} if strategy == "batch_select" else {"flow_control": limits}
        model = make(strategy=strategy, attempt_history=60, statistics=True, **flow)
        Schedule("daily", model, every=timedelta(days=1))
        tables |= model.metadata.tables
    tables |= make(strategy="delete_returning", rows_are_messages=True).metadata.tables
    own = {name: table.comment for name, table in tables.items() if name.startswith("sqlaqueue_")}
    # Without that of jobs that wait for others, which the upgrades have.
    assert len(own) == len(TABLE_VERSIONS) - 1
    assert own == dict.fromkeys(own, "sqlaqueue, as of 0.1, for 0.1 and newer")
    assert table_version("sqlaqueue, as of 1.12, for 0.9 and newer; see the docs") == TableVersion((1, 12), (0, 9))
    assert table_version("Ours. sqlaqueue, as of 1.12.3, for 0.9.1 and newer") == TableVersion((1, 12), (0, 9))


def test_the_table_that_asks_for_most_is_named() -> None:
    """The version of another one would be refused as well."""
    own = "sqlaqueue, as of 0.1, for 0.1 and newer"
    found = {"messages": "9.4, for 9.3", "attempts": "9.6, for 9.5", "rates": "9.7, for 0.1"}
    comments = {
        sa.Table(name, sa.MetaData(), comment=own): f"sqlaqueue, as of {text} and newer" for name, text in found.items()
    }
    text = too_new(comments)
    assert text is not None
    assert text.startswith("the table attempts was migrated to sqlaqueue 9.6, for workers of 9.5 and newer")
