"""The features of a queue as far as they differ in a file, and the command line; ``tests/engines`` has the others."""

import logging
import uuid
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from click.testing import CliRunner, Result
from sqlalchemy import event
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from sqlaqueue import Fail, QueueConfig, QueueMixin, cancel, claim, complete, prepare, rescue
from sqlaqueue.admin import QueueAdmin
from sqlaqueue.cli import main
from sqlaqueue.consumer import pace
from sqlaqueue.consumer.maintenance.handlers_running import _take_in_steps
from sqlaqueue.mapping.mixin import spec_of
from sqlaqueue.postgresql.checks_of import checks_of
from sqlaqueue.testing import crash, drain, enqueued, run_job, travel
from tests.cli.conftest import fill, sqlaqueue
from tests.models import add, new_base
from tests.programs import wait_until
from tests.sqlite.models import Email, Hourly, Measured, Order, SQLiteBench, do_nothing, made

pytestmark = pytest.mark.once


def test_an_application_tests_its_jobs_in_memory() -> None:
    sessions = made(Path(":memory:"))
    with sessions() as session:
        session.add(Email(id=100, to="before"))
        session.commit()
        session.add_all([Email(id=7, to="new"), job := Email(to="other")])
        session.flush()
        assert [each.to for each in enqueued(session, Email)] == ["new", "other"]
        assert run_job(session, job, do_nothing).outcome == "completed"
        assert drain(session, Email, do_nothing) == 2
        session.rollback()
        assert [each.to for each in session.scalars(sa.select(Email))] == ["before"]
        crash(session, session.scalars(sa.select(Email)).one())
        session.execute(rescue(Email))
        assert session.scalars(sa.select(Email.status)).all() == ["pending"]
    sessions.kw["bind"].dispose()


def test_a_cached_statement_has_the_values_of_each_call(sessions: sessionmaker[Session]) -> None:
    with sessions() as session:
        session.add_all(Email() for _ in range(10))
        session.commit()
        assert [QueueAdmin(session, Email).depth(limit=limit).due for limit in (2, 100, 5)] == [2, 10, 5]
        before = session.scalars(sa.select(Email.run_at)).first()
        for hours in (1, 5):
            travel(session, timedelta(hours=hours))
        after = session.scalars(sa.select(Email.run_at)).first()
        assert before is not None
        assert after is not None
        assert before - after == timedelta(hours=6)


def test_an_infinite_number_does_not_block_the_queue(sessions: sessionmaker[Session]) -> None:
    with sessions() as session:
        session.add(Measured(value=float("inf")))
        session.commit()
        (job,) = session.scalars(claim(Measured, 1)).all()
        assert job.value == float("inf")


def test_an_explicit_lock_is_kept(sessions: sessionmaker[Session]) -> None:
    with sessions() as session:
        session.add(Email())
        session.commit()
        (job,) = session.scalars(claim(Email, 1)).all()
        session.commit()
        session.scalars(sa.select(Email)).all()
        session.rollback()
        sent: list[str] = []
        sa.event.listen(session.get_bind(), "before_cursor_execute", lambda *event: sent.append(event[2]))
        session.execute(sa.text("BEGIN IMMEDIATE"))
        session.scalars(sa.select(Email)).all()
        session.execute(complete([job]))
        assert "COMMIT" not in sent


def test_comments_before_a_statement(sessions: sessionmaker[Session]) -> None:
    with sessions() as session:
        session.execute(sa.text("/* of this function */\n-- and why\nBEGIN IMMEDIATE"))
        session.execute(sa.text("/* * / */PRAGMA user_version"))
        session.rollback()
        session.execute(sa.text("-- a read\nSELECT 1"))
        with sessions() as other:
            other.add(Email())
            other.commit()


def test_a_program_may_commit_each_statement(tmp_path: Path) -> None:
    made(tmp_path / "jobs.db").kw["bind"].dispose()
    engine = prepare(sa.create_engine(f"sqlite:///{tmp_path}/jobs.db", isolation_level="AUTOCOMMIT"))
    with engine.connect() as connection:
        connection.execute(sa.insert(Email).values(to="kept"))
    with engine.connect() as connection:
        assert connection.scalars(sa.select(Email.to)).all() == ["kept"]
    engine.dispose()


def test_a_programs_any_of_rows_is_not_translated(sessions: sessionmaker[Session]) -> None:
    """SQLite has no ANY, and refuses it as it always does."""
    with sessions() as session, pytest.raises(sa.exc.OperationalError):
        session.execute(sa.select(Email.id).where(Email.id != sa.all_(sa.select(Email.id).scalar_subquery())))


def test_missing_indexes_are_named(sessions: sessionmaker[Session]) -> None:
    with sessions() as session:
        connection = session.connection()
        for model in (Order, Hourly):
            assert checks_of(connection).missing_indexes(connection, spec_of(model)) == []
        session.execute(sa.text("DROP INDEX ix_hourly_queue_unique"))
        session.execute(sa.text("DROP INDEX ix_orders_queue_unique"))
        session.execute(sa.text("DROP INDEX ix_orders_queue_claim"))
        [missing] = checks_of(connection).missing_indexes(connection, spec_of(Hourly))
        assert missing.name == "ix_hourly_queue_unique"
        advice = checks_of(connection).missing_index_advice(connection, spec_of(Order))
        assert advice is not None
        assert "claims are slow, and jobs are not unique, and enqueue() fails, without the indexes" in advice
        assert {"ix_orders_queue_claim,", "ix_orders_queue_unique;"} < set(advice.split())


def test_rows_of_a_test_are_known_in_another_schema(tmp_path: Path) -> None:
    """An attached file is a schema; both have a table of this name."""
    made(tmp_path / "tenant.db").kw["bind"].dispose()
    sessions = made(tmp_path / "jobs.db")
    engine = sessions.kw["bind"]

    @event.listens_for(engine, "begin")
    def attach(connection: sa.Connection) -> None:
        databases = {row[1] for row in connection.exec_driver_sql("PRAGMA database_list")}
        if "tenant" not in databases:
            driver: Any = connection.connection.driver_connection
            driver.execute(f"ATTACH '{tmp_path}/tenant.db' AS tenant")

    add(sessions, Email(), Email())
    tenant = engine.execution_options(schema_translate_map={None: "tenant"})
    with Session(tenant) as session:
        session.add(Email())
        session.flush()
        assert [job.id for job in enqueued(session, Email)] == [1]
    tenant.dispose()


class Wrapped(sa.types.TypeDecorator[datetime]):
    impl = sa.DateTime(timezone=True)
    cache_ok = True


def test_moments_of_an_applications_type_are_calculated_with(sessions: sessionmaker[Session]) -> None:
    with sessions() as session:
        session.add(Email())
        session.commit()
        run_at = sa.type_coerce(Email.run_at, Wrapped())
        hour = sa.literal(timedelta(hours=1), sa.Interval())
        later = session.scalar(sa.select(sa.type_coerce(run_at + hour, sa.DateTime(timezone=True))))
        assert later == session.scalars(sa.select(Email.run_at)).one() + timedelta(hours=1)
        assert session.scalar(sa.select(sa.extract("epoch", (run_at + hour) - run_at))) == 3600


def test_a_span_in_a_column_of_the_program_is_as_sqlalchemy_has_it(sessions: sessionmaker[Session]) -> None:
    """The library's own spans are numbers of seconds, and so are those that are added to moments."""
    took = timedelta(minutes=90)
    with sessions() as session:
        session.add_all([Measured(value=1.0), Measured(value=2.0, took=timedelta(0))])
        session.commit()
        assert session.scalars(sa.text("SELECT took FROM measured")).first() == "1970-01-01 01:30:00.000000"
        [job] = session.scalars(claim(sa.select(Measured).where(Measured.took > timedelta(hours=1)), 5)).all()
        assert (job.value, job.took) == (1.0, took)
        mine = Measured.id == job.id
        assert session.scalars(sa.select(Measured.took).where(mine)).one() == took
        later = session.scalars(sa.select(Measured.run_at + Measured.took).where(mine)).one()
        assert later == job.run_at + took
        assert session.scalars(sa.select((Measured.run_at + took) - Measured.run_at).where(mine)).one() == took
        assert session.scalars(sa.select(sa.extract("epoch", Measured.took)).where(mine)).one() == 5400
        assert session.scalars(sa.select(Measured.id).where(Measured.run_at < sa.func.now() - took)).all() == []


# -- jobs that are cancelled while they run ----------------------------------------------------------------------------


def test_a_running_job_is_cancelled(
    bench: SQLiteBench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its task ends at once; a thread runs on, and its failure is not tried again."""
    monkeypatch.setattr(pace, "RESCUE", 0.1)
    caplog.set_level(logging.WARNING, "sqlaqueue")
    good, bad = bench.enqueue(2)
    running: set[int] = set()

    async def handle(io: Any, job: Any) -> None:
        running.add(job.id)
        if job.id == bad:
            # In a task this is where it is cancelled.
            await io.wait_for(lambda: all(one.cancelled for one in server.consumer._context.in_flight.busy()))
            raise ValueError

    server = bench.consumer(handle, concurrency=2, batch_size=1)
    with server.running():
        wait_until(lambda: bad in running, "the handler runs")
        with bench.sessions.begin() as session:
            session.execute(cancel(sa.select(bench.Job).where(bench.Job.id == bad)))
        wait_until(lambda: bench.states() == {"cancelled": 1, "completed": 1}, "the job is cancelled")
    assert server.told("cancelled") == [bad]
    assert bench.attempts() == {good: 1, bad: 1}
    assert bench.execute("SELECT count(*) FROM sqlaqueue_control") == 0
    assert "OperationalError" not in caplog.text


def test_requests_are_taken_by_keys_of_any_type(tmp_path: Path) -> None:
    base = new_base()

    class Job(QueueMixin, base):
        __tablename__ = "job"
        __queue__ = QueueConfig(strategy="update_status")
        tenant = mapped_column(sa.String(10), primary_key=True)
        id = mapped_column(sa.Uuid(), primary_key=True)

    engine = prepare(sa.create_engine(f"sqlite:///{tmp_path / 'jobs.db'}"))
    base.metadata.create_all(engine)
    keys = [("a", uuid.UUID(int=1)), ("a", uuid.UUID(int=2)), ("b", uuid.UUID(int=1))]
    with Session(engine) as session:
        session.add_all([Job(tenant=tenant, id=key) for tenant, key in keys])
        session.commit()
        assert len(session.scalars(claim(Job, 3)).all()) == 3
        session.commit()
        session.execute(cancel(sa.select(Job).where(Job.id == keys[0][1])))
        session.commit()
        rows = _take_in_steps(session, spec_of(Job), keys[:2], {})
        assert [tuple(row[:2]) for row in rows] == [keys[0]]
        assert 0 <= rows[0][2] < 60
        assert _take_in_steps(session, spec_of(Job), keys[:2], {}) == []
        # The request for the job of another Consumer is left.
        assert [tuple(row[:2]) for row in _take_in_steps(session, spec_of(Job), keys[2:], {})] == [keys[2]]
        session.commit()
    engine.dispose()


# -- a row that cannot be loaded or changed keeps no other job from running --------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE job SET created_at = 'yesterday' WHERE id = 5",
        "CREATE TRIGGER refuse BEFORE UPDATE ON job WHEN OLD.id = 5 BEGIN SELECT RAISE(ABORT, 'no'); END",
    ],
    ids=["it cannot be loaded", "a trigger refuses to change it"],
)
def test_a_row_that_cannot_be_claimed(bench: SQLiteBench, caplog: pytest.LogCaptureFixture, change: str) -> None:
    bench.create()
    bench.enqueue(20)
    bench.execute(change)
    assert bench.consumer(concurrency=2).drain() == 19
    assert bench.execute("SELECT group_concat(id) FROM job WHERE status = 'pending'") == "5"
    assert [r.job_key for r in caplog.records if getattr(r, "event", None) == "job_unclaimable"] == [5]


# -- the command line and the demo -------------------------------------------------------------------------------------


EMAIL = "tests.sqlite.models:Email"


def refuse(_: object, job: Any) -> None:
    raise Fail("no such address")


class Base(DeclarativeBase):
    pass


class Held(QueueMixin, Base):
    __tablename__ = "held"
    __queue__ = QueueConfig(strategy="batch_select")

    id: Mapped[int] = mapped_column(primary_key=True)


@pytest.fixture
def url(tmp_path: Path) -> str:
    sessions = made(tmp_path / "jobs.db")
    add(sessions, *(Email() for _ in range(3)))
    sessions.kw["bind"].dispose()
    return f"sqlite:///{tmp_path}/jobs.db"


def run(command: str, *arguments: str) -> Result:
    """Run a command in this process."""
    return CliRunner().invoke(main, [command, *arguments], prog_name="sqlaqueue")


def test_workers_run_jobs_and_operators_look_at_them(url: str) -> None:
    result = sqlaqueue("worker", EMAIL, "--handler", "tests.sqlite.test_features:refuse", "--url", url, "--drain")
    assert result.returncode == 0, result.stderr
    assert "no such address" in run("failed", EMAIL, "--url", url).stdout
    assert "3" in run("requeue", EMAIL, "--yes", "--url", url).stdout
    for command in ("stats", "jobs", "health", "pause", "resume", "rescue", "reconcile", "purge"):
        confirmed = ["--yes"] if command == "purge" else []
        shown = run(command, EMAIL, *confirmed, "--url", url)
        assert isinstance(shown.exception, SystemExit | None), command
        # No worker is there, which `health` reports.
        assert shown.exit_code == (1 if command == "health" else 0), (command, shown.output)
    assert "pending" in run("why", EMAIL, "1", "--url", url).stdout


def test_workers_refuse_an_option_before_they_ask_for_its_table(url: str) -> None:
    names = [f"tests.sqlite.test_features:{name}" for name in ("Held", "refuse")]
    result = run("worker", "=".join(names), "--url", url, "--drain")
    assert result.exit_code != 0
    assert 'Held: strategy "batch_select" is not available on SQLite' in result.stderr


@pytest.mark.parametrize("path", ["nothing.db", ":memory:"])
def test_a_file_that_does_not_exist_is_refused(path: str, tmp_path: Path) -> None:
    """SQLite would create it."""
    result = run("stats", EMAIL, "--url", f"sqlite:///{path}")
    assert (result.exit_code, "there is no file" in result.stderr) == (2, True)
    assert not Path(path).exists()


def test_the_demo_needs_no_server(tmp_path: Path) -> None:
    files = tmp_path / "files"
    files.mkdir()
    number = fill(files)
    result = sqlaqueue("demo", "--sqlite", "--path", files, "--workers", "2", "--batch", "8")
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"{number} files: every one stored exactly once, none lost" in result.stdout
    refused = run("demo", "--sqlite", "--strategy", "batch_select")
    assert (refused.exit_code, "--strategy update_status" in refused.stderr) == (2, True)
