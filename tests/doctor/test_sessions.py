"""The session that an examination gets, and what it leaves of it."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from sqlaqueue import admin
from sqlaqueue.admin.doctor.examination import Examination
from sqlaqueue.exc import ConfigurationError, NotAQueueError, StatementError
from tests.doctor.conftest import Patient, examining
from tests.doctor.models import MODELS, SOME, Base, Email, Letter
from tests.servers import Server

SETTINGS = ("statement_timeout", "lock_timeout", "transaction_read_only")


def settings(session: Session) -> list[str]:
    return [session.scalar(sa.text(f"SHOW {name}")) for name in SETTINGS]


def test_the_session_is_left_as_it_was(patient: Patient) -> None:
    patient.execute("DROP INDEX ix_email_queue_claim")
    with Session(patient.engine) as session:
        session.execute(sa.text("SET LOCAL statement_timeout = '7s'"))
        before = settings(session)
        session.add(Email(id=1))
        assert [each.code for each in admin.doctor(session, *MODELS)] == ["missing_index"]
        # It has not flushed.
        assert session.new
        assert settings(session) == before
        session.commit()
    assert patient.execute("SELECT id FROM email") == [(1,)]


def test_nothing_is_written(patient: Patient) -> None:
    with Session(patient.engine) as session:
        assert admin.doctor(session, *MODELS, deep=True) == []
        assert session.scalar(sa.text("SELECT pg_current_xact_id_if_assigned()")) is None
        assert session.in_transaction()


@pytest.mark.parametrize("model", SOME)
def test_the_number_of_statements(patient: Patient, model: Any) -> None:
    sent: list[str] = []
    sa.event.listen(patient.engine, "before_cursor_execute", lambda *given: sent.append(given[2]))
    assert patient.findings(model, deep=True) == []
    statements = [each for each in sent if "SAVEPOINT" not in each]
    assert len(statements) <= 101


def test_a_check_that_fails_lets_the_others_go_on(patient: Patient) -> None:
    patient.execute("ALTER TABLE letter DISABLE TRIGGER sqlaqueue_wake_insert")
    with patient.database.connect() as holder:
        holder.execute("BEGIN")
        holder.execute("LOCK TABLE email IN ACCESS EXCLUSIVE MODE")
        found = patient.findings(lock_timeout=timedelta(milliseconds=10))
        holder.execute("ROLLBACK")
    assert [(each.code, each.queue) for each in found if each.severity != "notice"] == [("disabled_trigger", "letter")]
    failed = [each for each in found if each.severity == "notice"]
    assert {(each.code, each.queue) for each in failed} == {("check_failed", "email")}
    assert "The check of leases could not be made: canceling statement due to lock timeout." in [
        each.summary for each in failed
    ]


def test_a_check_with_an_error_lets_the_others_go_on(patient: Patient, monkeypatch: pytest.MonkeyPatch) -> None:
    patient.execute("ALTER TABLE letter DISABLE TRIGGER sqlaqueue_wake_insert")

    def check_that_fails(examination: Examination) -> Iterator[admin.Finding]:
        examination.connection.execute(sa.text("SET LOCAL statement_timeout = 0"))
        yield from {}["nothing"]

    monkeypatch.setattr(examining, "CHECKS", (check_that_fails, *examining.CHECKS))
    found = patient.findings(Email, Letter)
    assert [(each.code, each.queue) for each in found] == [("disabled_trigger", "letter"), ("check_failed", None)]
    assert found[1].summary == "The check of that fails could not be made: KeyError: 'nothing'."


def test_a_check_that_cannot_connect_lets_the_others_go_on(patient: Patient, monkeypatch: pytest.MonkeyPatch) -> None:
    nowhere = sa.create_engine("postgresql+psycopg://localhost:1/nothing", poolclass=sa.NullPool)

    def check_elsewhere(examination: Examination) -> Iterator[admin.Finding]:
        nowhere.connect()
        yield from ()

    monkeypatch.setattr(examining, "CHECKS", (check_elsewhere,))
    assert patient.codes(Email) == ["check_failed"]


def test_a_statement_that_takes_too_long(patient: Patient) -> None:
    patient.execute("INSERT INTO email (id) SELECT number FROM generate_series(1, 30000) AS number")
    found = patient.findings(Email, deep=True, statement_timeout=timedelta(milliseconds=1))
    assert "check_failed" in [each.code for each in found]


def test_a_lost_connection_is_an_error(patient: Patient) -> None:
    with Session(patient.engine) as session:
        session.connection()
        patient.database.kill_backends()
        with pytest.raises(sa.exc.OperationalError):
            admin.doctor(session, Email)


def test_a_session_that_reads_from_a_replica(patient: Patient) -> None:
    replica = sa.create_engine("postgresql+psycopg://nobody@nowhere.invalid/replica")

    class Routing(Session):
        def get_bind(self, mapper: Any = None, *, clause: Any = None, **_: Any) -> sa.Engine:
            return patient.engine if isinstance(clause, sa.UpdateBase) else replica

    patient.execute("DROP INDEX ix_email_queue_claim")
    with Routing() as session:
        assert [each.code for each in admin.doctor(session, *MODELS)] == ["missing_index"]


def test_queues_of_two_databases(patient: Patient, server: Server) -> None:
    with server.database() as another:
        engine = sa.create_engine(another.url(), poolclass=sa.NullPool)
        Base.metadata.create_all(engine)
        with engine.begin() as connection:
            connection.exec_driver_sql("DROP INDEX ix_sqlaqueue_message_letter_claim")
        patient.execute("DROP INDEX ix_email_queue_claim")
        with Session(binds={Email: patient.engine, Letter: engine}) as session:
            found = admin.doctor(session, Letter, Email)
    assert [(each.code, each.queue) for each in found] == [("missing_index", "email"), ("missing_index", "letter")]


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
async def test_an_async_session(patient: Patient, driver: Any) -> None:
    patient.execute("DROP INDEX ix_email_queue_claim")
    patient.execute("INSERT INTO email (id) SELECT number FROM generate_series(1, 5000) AS number")
    engine = create_async_engine(patient.database.url(driver), poolclass=sa.NullPool)
    async with AsyncSession(engine) as session:
        found = await admin.async_doctor(session, *MODELS, deep=True)
    assert [each.code for each in found] == ["missing_index", "claim_reads_table"]


@pytest.mark.parametrize("driver", ["psycopg2"])
def test_another_driver(patient: Patient, driver: Any) -> None:
    patient.execute("DROP INDEX ix_email_queue_claim")
    engine = sa.create_engine(patient.database.url(driver), poolclass=sa.NullPool)
    with Session(engine) as session:
        assert [each.code for each in admin.doctor(session, *MODELS, deep=True)] == ["missing_index"]


def test_the_worst_comes_first(patient: Patient) -> None:
    patient.execute(
        "DROP INDEX ix_email_queue_claim",
        "ALTER TABLE letter DISABLE TRIGGER sqlaqueue_message_insert",
        "DROP INDEX ix_email_queue_unique",
        "ALTER TABLE email DISABLE TRIGGER sqlaqueue_wake_insert",
    )
    found = [(each.severity, each.queue) for each in patient.findings()]
    assert found == [
        ("critical", "email"),
        ("critical", "letter"),
        ("warning", "email"),
        ("warning", "email"),
    ]


def test_wrong_input(patient: Patient) -> None:
    with Session(patient.engine) as session:
        with pytest.raises(StatementError, match="name at least one queue class"):
            admin.doctor(session)
        with pytest.raises(NotAQueueError):
            admin.doctor(session, Base)
    with pytest.raises(ConfigurationError, match="doctor\\(\\): this is an? Engine"):
        admin.doctor(patient.engine, Email)
    for wrong, said in (
        ({"oldest_due": "10m"}, r"Thresholds\(oldest_due='10m'\): give a timedelta, such as timedelta\(minutes=10\)"),
        ({"oldest_due": timedelta(-1)}, "give zero or more"),
        ({"small_table": 1.5}, r"Thresholds\(small_table=1.5\): give an integer \(rows\)"),
        ({"keys_used": True}, r"give a number \(share\)"),
        ({"keys_used": float("nan")}, r"give a number \(share\)"),
        ({"lock_timeout": timedelta(days=2)}, "at most a day"),
    ):
        with pytest.raises(ConfigurationError, match=said):
            admin.Thresholds(**wrong)
    engine = patient.engine.execution_options(isolation_level="AUTOCOMMIT")
    with Session(engine) as session, pytest.raises(StatementError, match="autocommit"):
        admin.doctor(session, Email)
