"""The doctor on SQLite and on MariaDB."""

import contextlib
import sqlite3
import time
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pymysql
import pytest
import sqlalchemy as sa
from click.testing import CliRunner
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

import sqlaqueue
from sqlaqueue import (
    ConcurrencyLimit,
    Consumer,
    FairShare,
    InOrder,
    QueueConfig,
    QueueMixin,
    RateLimit,
    Schedule,
    Unique,
    __version__,
    claim,
)
from sqlaqueue.admin import Finding, QueueAdmin, Thresholds, doctor
from sqlaqueue.admin.doctor.doctor import CHECKS_OF_OTHERS, COMPLETE_OF_OTHERS
from sqlaqueue.admin.doctor.examination import Examination
from sqlaqueue.admin.doctor.server import check_clock
from sqlaqueue.cli import main
from sqlaqueue.exc import ConfigurationError
from sqlaqueue.mapping.mixin import spec_of
from tests.doctor.conftest import split
from tests.flow_control.models import make_queue, of_customers
from tests.programs import wait_until

pytestmark = pytest.mark.once

LONG_AGO = datetime.now(UTC) - timedelta(days=2)
OF_THE_SERVER = {"flush_log_off"}
"""What is found in each test: the server of the tests does not wait for a disk."""


class Base(DeclarativeBase):
    pass


class Plain(QueueMixin, Base):
    __tablename__ = "plain"

    id: Mapped[int] = mapped_column(primary_key=True)


class Order(QueueMixin, Base):
    """A queue with all side tables, and a name that has to be quoted."""

    __tablename__ = "order"
    __queue__ = QueueConfig(
        unique=Unique("customer"), attempt_history=timedelta(days=3), retention={"completed": timedelta(days=1)}
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    customer: Mapped[int]


class Short(QueueMixin, Base):
    """A queue whose jobs are claimed in the order of their keys."""

    __tablename__ = "short"
    __queue__ = QueueConfig(columns={"priority": None, "run_at": None})

    id: Mapped[int] = mapped_column(primary_key=True)


NIGHTLY = Schedule("nightly", Plain, cron="0 3 * * *")
"""Declared here, so that the tables of schedules are created with the others."""


def handle(session: Session, job: object) -> None:
    """Complete a job."""


class Patient:
    """A database with the queues, in the place of that of the doctor's tests."""

    def __init__(self, engine: sa.Engine) -> None:
        self.engine, self.sessions = engine, sessionmaker(engine)
        Base.metadata.create_all(engine)

    @property
    def is_sqlite(self) -> bool:
        return self.engine.dialect.name == "sqlite"

    def plain(self) -> Any:
        """Return a connection of the driver, as other programs have it."""
        url = self.engine.url
        if self.is_sqlite:
            return sqlite3.connect(str(url.database), isolation_level=None)
        socket = str(url.query["unix_socket"])
        return pymysql.connect(unix_socket=socket, user="root", database=url.database, autocommit=True)

    def execute(self, *statements: str) -> None:
        with contextlib.closing(self.plain()) as connection:
            for statement in statements:
                connection.cursor().execute(statement)

    def quoted(self, name: str) -> str:
        return self.engine.dialect.identifier_preparer.quote(name)

    def drop_index(self, name: str, table: str) -> None:
        self.execute(f"DROP INDEX {name}" + ("" if self.is_sqlite else f" ON {self.quoted(table)}"))

    def add(self, *jobs: Any) -> None:
        with self.sessions() as session:
            session.add_all(jobs)
            session.commit()

    def insert(self, table: str, **values: Any) -> None:
        with self.engine.begin() as connection:
            connection.execute(sa.insert(Base.metadata.tables[table]).values(values))

    def update(self, model: Any, **values: Any) -> None:
        with self.engine.begin() as connection:
            connection.execute(sa.update(model).values(values))

    def add_consumer(self, queue: str, **values: Any) -> None:
        now = datetime.now(UTC)
        row = {
            "id": str(uuid.uuid4()),
            "queue": queue,
            "name": "web:1",
            "host": "web",
            "pid": 1,
            "version": __version__,
            "listening": False,
            "running": [],
            "claimed": 0,
            "created_at": now - timedelta(hours=1),
            "heartbeat_at": now,
            "expires_at": now + timedelta(minutes=1),
        }
        self.insert("sqlaqueue_consumer", **(row | values))

    def findings(self, *models: Any, deep: bool = False, **limits: Any) -> list[Finding]:
        with self.sessions() as session:
            found = doctor(session, *(models or (Plain, Order)), deep=deep, thresholds=Thresholds(**limits))
        for each in found:
            assert each.summary.endswith((".", "?")), each
            assert each.consequence.endswith("."), each
        return [each for each in found if each.code not in OF_THE_SERVER]

    def codes(self, *models: Any, **options: Any) -> list[str]:
        return [each.code for each in self.findings(*models, **options)]

    def find(self, code: str, *models: Any, **options: Any) -> Finding:
        found = self.findings(*models, **options)
        matching = [each for each in found if each.code == code]
        assert len(matching) == 1, found
        return matching[0]

    def repaired(self, code: str, *models: Any, fix: int = 0, **options: Any) -> Finding:
        """Return the finding with this code, and execute its fix as an operator does, after which it must be gone."""
        finding = self.find(code, *models, **options)
        text = finding.fixes[fix]
        if text.startswith("sqlaqueue "):
            url = self.engine.url.render_as_string(hide_password=False)
            result = CliRunner().invoke(main, text.removeprefix("sqlaqueue ").split(), env={"SQLAQUEUE_URL": url})
            assert result.exit_code == 0, result.output
        else:
            self.execute(*split(text))
        # Connections to a file keep the statistics with which they were opened.
        self.engine.dispose()
        assert code not in self.codes(*models, **options)
        return finding


@pytest.fixture
def patient(engine: sa.Engine) -> Patient:
    return Patient(engine)


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Patient]:
    engine = sqlaqueue.prepare(sa.create_engine(f"sqlite:///{tmp_path / 'file.db'}"))
    yield Patient(engine)
    engine.dispose()


@pytest.fixture
def server(mariadb: Any) -> Iterator[Patient]:
    with mariadb.database() as name:
        engine = sqlaqueue.prepare(sa.create_engine(mariadb.url(name)))
        yield Patient(engine)
        engine.dispose()


# -- how it examines ---------------------------------------------------------------------------------------------------


def test_a_healthy_queue(patient: Patient) -> None:
    assert patient.findings(deep=True) == []
    patient.add(*(Plain() for _ in range(30)), *(Order(customer=number) for number in range(30)))
    assert patient.findings(deep=True) == []
    for model in (Plain, Order):
        assert Consumer(model, handle, patient.sessions).drain() == 30
        with Consumer(model, handle, patient.sessions):
            assert patient.findings(model, deep=True) == []


def settings(session: Session) -> Any:
    # By the connection, as the session would flush.
    connection = session.connection()
    on_sqlite = connection.dialect.name == "sqlite"
    query = "PRAGMA query_only" if on_sqlite else "SELECT @@max_statement_time, @@lock_wait_timeout"
    return connection.exec_driver_sql(query).one()


def test_a_healthy_queue_with_flow_control(engine: sa.Engine) -> None:
    rules = [ConcurrencyLimit("most", per="customer_id"), RateLimit(1, every=60, per="kind"), FairShare("customer_id")]
    model = make_queue(engine, of_customers(1), flow_control=[*rules, InOrder("document_id")])
    with Session(engine) as session:
        assert {finding.code for finding in doctor(session, model)} <= OF_THE_SERVER


def test_the_session_is_left_as_it_was(patient: Patient) -> None:
    patient.drop_index("ix_plain_queue_claim", "plain")
    with patient.sessions() as session:
        before = settings(session)
        session.add(Plain(id=1))
        assert "missing_index" in [each.code for each in doctor(session, Plain)]
        # It has not flushed.
        assert session.new
        assert session.in_transaction()
        assert settings(session) == before
        # Another transaction does not wait for this one.
        patient.execute("INSERT INTO plain (id) VALUES (2)")
        session.rollback()
        session.add(Plain(id=1))
        session.commit()


def test_nothing_can_be_written_on_sqlite(file: Patient, monkeypatch: pytest.MonkeyPatch) -> None:
    def check_that_writes(examination: Examination) -> Iterator[Finding]:
        examination.connection.execute(sa.insert(Plain))
        yield from ()

    monkeypatch.setitem(CHECKS_OF_OTHERS, "sqlite", (check_that_writes,))
    finding = file.find("check_failed", Plain)
    assert finding.summary == "The check of that writes could not be made: attempt to write a readonly database."


def test_a_statement_that_takes_too_long(server: Patient, monkeypatch: pytest.MonkeyPatch) -> None:
    def check_that_sleeps(examination: Examination) -> Iterator[Finding]:
        examination.connection.execute(sa.text("SELECT COUNT(*), SLEEP(30) FROM plain"))
        yield from ()

    others = CHECKS_OF_OTHERS["mariadb"]
    monkeypatch.setitem(CHECKS_OF_OTHERS, "mariadb", (check_that_sleeps, *others))
    server.drop_index("ix_plain_queue_lease", "plain")
    found = server.findings(Plain, statement_timeout=timedelta(milliseconds=500))
    assert [each.code for each in found] == ["missing_index", "check_failed"]
    assert found[1].summary.startswith("The check of that sleeps could not be made: Query execution was interrupted")


async def test_an_async_session(patient: Patient) -> None:
    patient.drop_index("ix_plain_queue_claim", "plain")
    driver = "sqlite+aiosqlite" if patient.is_sqlite else "mariadb+asyncmy"
    engine = sqlaqueue.prepare(create_async_engine(patient.engine.url.set(drivername=driver)))
    async with AsyncSession(engine) as session:
        found = await session.run_sync(partial(doctor, deep=True), Plain, Order)
    assert [each.code for each in found if each.code not in OF_THE_SERVER] == ["missing_index"]
    await engine.dispose()


def test_an_engine_that_is_not_prepared(patient: Patient) -> None:
    engine = sa.create_engine(patient.engine.url)
    with Session(engine) as session, pytest.raises(ConfigurationError, match=r"doctor\(\): .* prepare"):
        doctor(session, Plain)
    engine.dispose()


def test_the_command(patient: Patient) -> None:
    url = patient.engine.url.render_as_string(hide_password=False)
    command = ["doctor", "tests.engines.test_doctor:Order", "--url", url]
    result = CliRunner().invoke(main, [*command, "--fail-on", "warning"])
    assert result.exit_code == 0, result.output
    patient.drop_index("ix_order_queue_unique", "order")
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 1, result.output
    client = "sqlite3" if patient.is_sqlite else "mariadb"
    assert result.stdout.startswith(
        f"critical: order\n  The index ix_order_queue_unique of {patient.quoted('order')} is missing.\n  Jobs are not"
    )
    assert f"  Fix, in {client}:\n" in result.stdout
    shown = CliRunner().invoke(main, ["stats", *command[1:]])
    assert "doctor: critical: The index ix_order_queue_unique" in shown.stdout


@pytest.mark.parametrize("name", ["sqlite", "mariadb"])
def test_every_check_is_made_once(name: str) -> None:
    checks = [*COMPLETE_OF_OTHERS, *CHECKS_OF_OTHERS[name]]
    assert len(checks) == len(set(checks))


# -- tables and indexes ------------------------------------------------------------------------------------------------


def test_a_missing_table(patient: Patient) -> None:
    patient.execute("DROP TABLE sqlaqueue_attempt")
    patient.drop_index("ix_order_queue_claim", "order")
    # The queue is not examined further.
    assert patient.codes(Order) == ["missing_table"]
    fixes = patient.find("missing_table", Order).fixes
    assert fixes[0].startswith("alembic")
    finding = patient.repaired("missing_table", Order, fix=len(fixes) - 1)
    assert finding.summary == "The table sqlaqueue_attempt is missing."
    assert patient.codes(Order) == ["missing_index"]


def test_a_database_without_any_table(patient: Patient) -> None:
    Base.metadata.drop_all(patient.engine)
    finding = patient.find("missing_table", Plain)
    assert finding.summary.startswith(f"The database {patient.engine.url.database} has no table of this queue")
    assert "create_all(engine)" in finding.consequence
    # SQL would leave out the trigger of the table of schedules.
    assert [fix for fix in finding.fixes if not fix.startswith("alembic")] == []


@pytest.mark.parametrize("name", ["attempts", "created_at"])
def test_a_missing_column(patient: Patient, name: str) -> None:
    patient.execute(f"ALTER TABLE plain DROP COLUMN {name}")
    finding = patient.find("missing_column", Plain)
    assert finding.summary == f"The column plain.{name} is missing."
    if patient.is_sqlite and name == "created_at":
        # SQLite refuses to add it.
        assert [each for each in finding.fixes if each.endswith(";")] == []
        return
    patient.repaired("missing_column", Plain, fix=len(finding.fixes) - 1)


@pytest.mark.few(2)
@pytest.mark.parametrize("purpose", ["claim", "lease", "quarantined", "unique", "finished"])
def test_a_missing_index(patient: Patient, purpose: str) -> None:
    patient.drop_index(f"ix_order_queue_{purpose}", "order")
    finding = patient.repaired("missing_index", Order)
    assert f"ix_order_queue_{purpose}" in finding.summary
    is_warning = purpose == "finished" or (patient.is_sqlite and purpose != "unique")
    assert finding.severity == ("warning" if is_warning else "critical")
    assert patient.codes(Order) == []


def many(patient: Patient) -> None:
    with patient.engine.begin() as connection:
        connection.execute(sa.insert(Plain), [{"run_at": datetime.now(UTC)} for _ in range(1500)])


def test_a_claim_that_finds_no_index(patient: Patient) -> None:
    many(patient)
    patient.drop_index("ix_plain_queue_claim", "plain")
    finding = patient.repaired("claim_reads_table", Plain)
    assert finding.summary.endswith("of more than 1000 rows: the index ix_plain_queue_claim is missing.")
    assert "claim_reads_table" not in patient.codes(Plain, small_table=1400)


def test_an_index_of_other_columns(patient: Patient) -> None:
    many(patient)
    patient.drop_index("ix_plain_queue_claim", "plain")
    patient.execute("CREATE INDEX ix_plain_queue_claim ON plain (status)")
    assert patient.codes(Plain, small_table=2000, unserved_for=timedelta(hours=1)) == []
    finding = patient.repaired("claim_reads_table", Plain)
    assert finding.summary.endswith("the index ix_plain_queue_claim has another definition than the model's.")


def test_an_index_that_mariadb_would_prefer(server: Patient) -> None:
    """A claim names its index, whatever else the planner would choose."""
    with server.engine.begin() as connection:
        later = datetime.now(UTC) + timedelta(days=9)
        connection.execute(sa.insert(Plain), [{"run_at": later} for _ in range(1500)])
    server.execute("CREATE INDEX own ON plain (run_at)", "ANALYZE TABLE plain")
    assert server.codes(Plain) == []


def test_a_table_that_a_claim_reads_in_its_own_order(patient: Patient) -> None:
    """SQLite reads the table if it knows that most jobs are pending, and goes on to do so when they have ended."""
    analyze = "ANALYZE" if patient.is_sqlite else "ANALYZE TABLE short"
    with patient.engine.begin() as connection:
        connection.execute(sa.insert(Short), [{"status": "pending"} for _ in range(1500)])
    patient.execute(analyze)
    assert patient.codes(Short, unserved_for=timedelta(hours=1)) == []
    patient.update(Short, status="completed")
    if not patient.is_sqlite:
        assert patient.codes(Short) == []
        return
    finding = patient.repaired("claim_reads_table", Short)
    assert finding.summary.endswith("the planner does not use the index ix_short_queue_claim.")
    assert finding.severity == "warning"


# -- jobs, Consumers and schedules -------------------------------------------------------------------------------------


def test_jobs_that_nobody_runs(patient: Patient) -> None:
    patient.add(*(Plain(run_at=datetime.now(UTC) - timedelta(minutes=10)) for _ in range(3)))
    finding = patient.find("no_consumer", Plain)
    assert finding.summary == "No live Consumer works for the queue plain, and 3 jobs are due, the oldest for 10 min."
    assert patient.codes(Plain, unserved_for=timedelta(hours=1)) == []
    patient.add_consumer("plain")
    finding = patient.find("backlog", Plain)
    assert finding.summary.startswith("3 jobs are due, the oldest for 10 min")
    with patient.sessions() as session:
        QueueAdmin(session, Plain).pause()
    finding = patient.repaired("paused", Plain)
    assert f"has been paused since {datetime.now(UTC):%Y-%m-%d}" in finding.summary


def test_expired_leases(patient: Patient) -> None:
    patient.add(Plain())
    with patient.sessions() as session:
        session.execute(claim(Plain, 1)).all()
        session.commit()
    assert patient.codes(Plain) == []
    patient.update(Plain, lease_expires_at=datetime.now(UTC) - timedelta(minutes=10))
    finding = patient.repaired("expired_leases", Plain, unserved_for=timedelta(hours=1))
    assert "The leases of 1 job have expired, the first 10 min ago, and no Consumer is alive." in finding.summary


def test_leases_that_plain_sql_has_set(patient: Patient) -> None:
    patient.add(Plain())
    patient.update(Plain, status="processing", lease_expires_at=datetime.now(UTC) + timedelta(days=9))
    finding = patient.repaired("long_leases", Plain)
    assert f"until {datetime.now(UTC) + timedelta(days=9):%Y-%m-%d}" in finding.summary
    patient.update(Plain, status="processing", lease_expires_at=None)
    patient.repaired("runs_without_lease", Plain)


def test_an_unknown_status(patient: Patient) -> None:
    patient.add(Plain(), Plain())
    patient.update(Plain, status="Pending")
    assert patient.codes(Plain) == []
    finding = patient.repaired("unknown_status", Plain, deep=True)
    assert finding.summary == "2 jobs of plain with an unknown status: 'Pending'."


def test_consumers(patient: Patient) -> None:
    # It listens to nothing, as no Consumer does here.
    patient.add_consumer("plain", version="0.0.1", unclaimable=[{"key": ["7"], "error": "no such column"}])
    found = {each.code: each for each in patient.findings(Plain)}
    assert list(found) == ["unclaimable_jobs", "other_version"]
    assert "job 7 not by web:1: no such column." in found["unclaimable_jobs"].summary
    assert found["other_version"].facts == {"consumers": {"web:1": "0.0.1"}}


def test_leftovers(patient: Patient) -> None:
    patient.insert("sqlaqueue_control", queue="plain", key=["1"], created_at=LONG_AGO)
    finding = patient.repaired("old_cancellations", Plain)
    assert finding.summary == "1 request to cancel a job older than 1 d 1 h remain."


def test_a_late_schedule(patient: Patient) -> None:
    patient.insert("sqlaqueue_schedule", name="nightly", **NIGHTLY.columns())
    assert patient.codes(Plain) == ["unserved_schedule"]
    with patient.engine.begin() as connection:
        connection.execute(sa.update(Base.metadata.tables["sqlaqueue_schedule"]).values(next_tick=LONG_AGO))
    finding = patient.find("late_schedule", Plain)
    assert finding.summary.startswith("The schedule 'nightly' has been overdue for 2 d")


# -- the file of SQLite ------------------------------------------------------------------------------------------------


def listened(path: Path, *statements: str, first: bool) -> Patient:
    """Return the patient of a program that executes statements when it connects, before or after the library."""

    def connected(connection: Any, _: Any) -> None:
        cursor = connection.cursor()
        for statement in statements:
            cursor.execute(statement)
        cursor.close()

    engine = sa.create_engine(f"sqlite:///{path / 'listened.db'}")
    if first:
        sa.event.listen(engine, "connect", connected)
    sqlaqueue.prepare(engine)
    if not first:
        sa.event.listen(engine, "connect", connected)
    return Patient(engine)


def test_another_journal_mode(tmp_path: Path) -> None:
    patient = listened(tmp_path, "PRAGMA journal_mode = DELETE", first=False)
    finding = patient.find("journal_mode", Plain)
    assert "has the journal mode DELETE instead of WAL" in finding.summary
    assert 'listeners to "connect"' in finding.consequence
    patient.engine.dispose()
    engine = sqlaqueue.prepare(sa.create_engine(patient.engine.url))
    assert Patient(engine).codes(Plain) == []
    engine.dispose()


def test_a_listener_that_fights_for_the_journal_mode(tmp_path: Path) -> None:
    patient = listened(tmp_path, "PRAGMA journal_mode = DELETE", first=True)
    finding = patient.find("second_connection", Plain)
    assert finding.summary.endswith("listened.db fails: database is locked.")
    assert 'listeners to "connect"' in finding.consequence
    patient.engine.dispose()


def test_a_large_write_ahead_log(file: Patient) -> None:
    with contextlib.closing(file.plain()) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM plain").fetchone()
        file.add(*(Plain() for _ in range(100)))
        assert file.codes(Plain) == []
        finding = file.find("large_wal", Plain, wal_size=1000)
        assert finding.facts["size"] > 1000
    file.repaired("large_wal", Plain, wal_size=1000)


@pytest.mark.parametrize(
    ("statement", "code", "severity"),
    [
        ("PRAGMA wal_autocheckpoint = 0", "autocheckpoint_off", "warning"),
        ("PRAGMA synchronous = OFF", "synchronous_off", "critical"),
        ("PRAGMA synchronous = NORMAL", "synchronous_normal", "notice"),
        ("PRAGMA busy_timeout = 100", "short_busy_timeout", "warning"),
    ],
)
def test_settings_of_connections(tmp_path: Path, statement: str, code: str, severity: str) -> None:
    patient = listened(tmp_path, statement, first=False)
    found = patient.findings(Plain)
    assert [(each.code, each.severity) for each in found] == [(code, severity)]
    patient.engine.dispose()


def test_a_file_that_cannot_be_written(file: Patient, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(file.engine.url.database)
    # Root may write to everything, whatever the mode of the file is.
    monkeypatch.setattr("os.access", lambda place, _: place != path)
    finding = file.find("read_only_file", Plain)
    assert finding.fixes == (f"chmod u+w {path}",)


def test_a_database_in_memory_has_no_file() -> None:
    engine = sqlaqueue.prepare(sa.create_engine("sqlite://"))
    assert Patient(engine).codes(Plain) in ([], ["small_pool"])
    engine.dispose()


# -- the server of MariaDB ---------------------------------------------------------------------------------------------


def test_another_storage_engine(server: Patient) -> None:
    server.execute("ALTER TABLE plain ENGINE = MyISAM")
    finding = server.repaired("storage_engine", Plain)
    assert finding.summary == "The storage engine of the table plain is MyISAM."


class Named(QueueMixin, Base):
    __tablename__ = "named"
    __queue__ = QueueConfig(lease=20)

    name: Mapped[str] = mapped_column(sa.String(20), primary_key=True)


def test_a_key_of_another_character_set(server: Patient) -> None:
    server.execute("ALTER TABLE named MODIFY name VARCHAR(20) CHARACTER SET latin1 NOT NULL")
    finding = server.repaired("key_character_set", Named)
    assert finding.summary == "The character set of the column named.name is latin1."


def test_a_lock_timeout_longer_than_a_lease(server: Patient) -> None:
    # The server's default of 50 seconds.
    assert server.codes(Plain) == []
    finding = server.find("long_lock_timeout", Named)
    assert finding.fixes == ("SET GLOBAL innodb_lock_wait_timeout = 2;",)


def test_another_isolation_level(server: Patient) -> None:
    engine = sqlaqueue.prepare(sa.create_engine(server.engine.url, isolation_level="REPEATABLE READ"))
    with Session(engine) as session:
        found = [each for each in doctor(session, Plain) if each.code not in OF_THE_SERVER]
    assert [(each.code, each.severity) for each in found] == [("isolation_level", "notice")]
    engine.dispose()


def test_a_server_that_does_not_wait_for_the_disk(server: Patient) -> None:
    with server.sessions() as session:
        assert "flush_log_off" in [each.code for each in doctor(session, Plain)]


def test_a_server_that_is_read_only(server: Patient) -> None:
    server.execute("SET GLOBAL read_only = ON")
    try:
        server.repaired("read_only_server", Plain)
    finally:
        server.execute("SET GLOBAL read_only = OFF")


def test_few_connections_are_left(server: Patient) -> None:
    assert "connections_used" not in server.codes(Plain)
    finding = server.find("connections_used", Plain, connections_used=0.0)
    assert finding.facts["limit"] == 300


def test_a_long_transaction(server: Patient) -> None:
    server.add(Plain())
    with contextlib.closing(server.plain()) as other:
        cursor = other.cursor()
        cursor.execute("BEGIN")
        cursor.execute("SELECT * FROM plain FOR UPDATE")
        # A time zone of its own, as that of the server in these tests, changes no duration.
        assert "idle_in_transaction" not in server.codes(Plain)
        # InnoDB reads its transactions again only if nobody has looked at them for a tenth of a second.
        time.sleep(0.2)
        finding = server.find("idle_in_transaction", Plain, transaction_open=timedelta())
        assert finding.summary.startswith(f"Session {other.thread_id()} (user root, client localhost)")
        assert 0 <= finding.facts["seconds"] < 60
        server.execute(*split(finding.fixes[0]))
        # The server rolls back in the background.
        wait_until(lambda: "idle_in_transaction" not in server.codes(Plain, transaction_open=timedelta()))
        with pytest.raises(pymysql.err.OperationalError):
            cursor.execute("SELECT 1")


def test_a_long_history(server: Patient) -> None:
    with contextlib.closing(server.plain()) as other:
        other.cursor().execute("START TRANSACTION WITH CONSISTENT SNAPSHOT")
        server.add(Plain())
        server.update(Plain, priority=1)
        finding = server.find("long_history", Plain, history_length=0)
    assert finding.facts["history_length"] > 0


def test_a_user_who_does_not_see_other_sessions(server: Patient) -> None:
    database = server.engine.url.database
    server.execute(
        "CREATE OR REPLACE USER limited@localhost",
        f"GRANT ALL ON {database}.* TO limited@localhost",
    )
    engine = sqlaqueue.prepare(sa.create_engine(server.engine.url.set(username="limited")))
    with Session(engine) as session:
        found = [each for each in doctor(session, Plain) if each.code not in OF_THE_SERVER]
    assert [(each.code, each.severity) for each in found] == [("hidden_sessions", "notice")]
    server.execute(*found[0].fixes)
    engine.dispose()
    with Session(engine) as session:
        assert {each.code for each in doctor(session, Plain)} <= OF_THE_SERVER
    engine.dispose()
    server.execute("DROP USER limited@localhost")


@pytest.mark.parametrize("seconds", [-3600, 0, 3600])
def test_another_clock(server: Patient, seconds: int) -> None:
    with server.engine.connect() as connection:
        examination = Examination(connection, [spec_of(Plain)], Thresholds(), deep=False)
        found = list(check_clock(examination, lambda: datetime.now(UTC) + timedelta(seconds=seconds)))
    assert [each.severity for each in found] == (["critical"] if seconds else [])
