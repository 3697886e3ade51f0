"""How an examination runs: in which session, what it finds of a healthy queue, and what codes there are."""

import ast
import re
from collections.abc import Iterator
from dataclasses import fields
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from sqlaqueue import ConcurrencyLimit, Consumer
from sqlaqueue.admin import Finding, Thresholds, doctor
from sqlaqueue.admin.doctor.doctor import CHECKS, CHECKS_OF_OTHERS, COMPLETE, COMPLETE_OF_OTHERS
from sqlaqueue.admin.doctor.examination import Examination
from sqlaqueue.exc import ConfigurationError, NotAQueueError, StatementError
from tests.doctor.conftest import Patient, examining, plain_engine
from tests.doctor.models import MODELS, SOME, Base, Delivery, Email, Letter, Note, handle
from tests.models import execute, make_job
from tests.servers import Database, Server


def settings(session: Session) -> list[str]:
    names = ("statement_timeout", "lock_timeout", "transaction_read_only")
    return [session.scalar(sa.text(f"SHOW {name}")) for name in names]


def test_the_session_is_left_as_it_was(patient: Patient) -> None:
    patient.execute("DROP INDEX ix_email_queue_claim")
    with Session(patient.engine) as session:
        session.execute(sa.text("SET LOCAL statement_timeout = '7s'"))
        before = settings(session)
        session.add(Email(id=1))
        assert [each.code for each in doctor(session, *SOME)] == ["missing_index"]
        # It has not flushed.
        assert session.new
        assert settings(session) == before
        session.commit()
    assert patient.execute("SELECT id FROM email") == [(1,)]


def test_nothing_is_written(patient: Patient) -> None:
    with Session(patient.engine) as session:
        assert doctor(session, *MODELS, deep=True) == []
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
        found = patient.findings(Email, Letter, lock_timeout=timedelta(milliseconds=10))
        holder.execute("ROLLBACK")
    assert [(each.code, each.queue) for each in found if each.severity != "notice"] == [("disabled_trigger", "letter")]
    failed = [each for each in found if each.severity == "notice"]
    assert {(each.code, each.queue) for each in failed} == {("check_failed", "email")}
    assert "The check of leases could not be made: canceling statement due to lock timeout." in [
        each.summary for each in failed
    ]


def test_a_check_with_an_error_lets_the_others_go_on(patient: Patient, monkeypatch: pytest.MonkeyPatch) -> None:
    patient.execute("ALTER TABLE letter DISABLE TRIGGER sqlaqueue_wake_insert")

    def check_that_fails(examination: Examination) -> Iterator[Finding]:
        examination.connection.execute(sa.text("SET LOCAL statement_timeout = 0"))
        yield from {}["nothing"]

    monkeypatch.setattr(examining, "CHECKS", (check_that_fails, *examining.CHECKS))
    found = patient.findings(Email, Letter)
    assert [(each.code, each.queue) for each in found] == [("disabled_trigger", "letter"), ("check_failed", None)]
    assert found[1].summary == "The check of that fails could not be made: KeyError: 'nothing'."


def test_a_check_that_cannot_connect_lets_the_others_go_on(patient: Patient, monkeypatch: pytest.MonkeyPatch) -> None:
    nowhere = sa.create_engine("postgresql+psycopg://localhost:1/nothing", poolclass=sa.NullPool)

    def check_elsewhere(examination: Examination) -> Iterator[Finding]:
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
            doctor(session, Email)


def test_a_session_that_reads_from_a_replica(patient: Patient) -> None:
    replica = sa.create_engine("postgresql+psycopg://nobody@nowhere.invalid/replica")

    class Routing(Session):
        def get_bind(self, mapper: Any = None, *, clause: Any = None, **_: Any) -> sa.Engine:
            return patient.engine if isinstance(clause, sa.UpdateBase) else replica

    patient.execute("DROP INDEX ix_email_queue_claim")
    with Routing() as session:
        assert [each.code for each in doctor(session, *SOME)] == ["missing_index"]


def test_queues_of_two_databases(patient: Patient, server: Server) -> None:
    with server.database() as another:
        engine = plain_engine(another.url())
        Base.metadata.create_all(engine)
        execute(engine, "DROP INDEX ix_sqlaqueue_message_letter_claim")
        patient.execute("DROP INDEX ix_email_queue_claim")
        with Session(binds={Email: patient.engine, Letter: engine}) as session:
            found = doctor(session, Letter, Email)
    assert [(each.code, each.queue) for each in found] == [("missing_index", "email"), ("missing_index", "letter")]


@pytest.mark.parametrize(("driver", "models"), [("psycopg", SOME), ("asyncpg", MODELS)])
async def test_an_async_session(patient: Patient, driver: Any, models: Any) -> None:
    patient.execute("DROP INDEX ix_email_queue_claim")
    patient.execute("INSERT INTO email (id) SELECT number FROM generate_series(1, 5000) AS number")
    engine = create_async_engine(patient.database.url(driver), poolclass=sa.NullPool)
    async with AsyncSession(engine) as session:
        found = await session.run_sync(doctor, *models, deep=True)
    assert [each.code for each in found] == ["missing_index", "claim_reads_table"]


@pytest.mark.parametrize("driver", ["psycopg2"])
def test_another_driver(patient: Patient, driver: Any) -> None:
    patient.execute("DROP INDEX ix_email_queue_claim")
    engine = plain_engine(patient.database.url(driver))
    with Session(engine) as session:
        assert [each.code for each in doctor(session, *MODELS, deep=True)] == ["missing_index"]


def test_the_worst_comes_first(patient: Patient) -> None:
    patient.execute(
        "DROP INDEX ix_email_queue_claim",
        "ALTER TABLE letter DISABLE TRIGGER sqlaqueue_message_insert",
        "DROP INDEX ix_email_queue_unique",
        "ALTER TABLE email DISABLE TRIGGER sqlaqueue_wake_insert",
    )
    found = [(each.severity, each.queue) for each in patient.findings(Email, Letter)]
    assert found == [("critical", "email"), ("critical", "letter"), ("warning", "email"), ("warning", "email")]


def test_wrong_input(patient: Patient) -> None:
    with Session(patient.engine) as session:
        with pytest.raises(StatementError, match="name at least one queue class"):
            doctor(session)
        with pytest.raises(NotAQueueError):
            doctor(session, Base)
    with pytest.raises(ConfigurationError, match="doctor\\(\\): this is an? Engine"):
        doctor(patient.engine, Email)
    for wrong, said in (
        ({"oldest_due": "10m"}, r"Thresholds\(oldest_due='10m'\): give a timedelta, such as timedelta\(minutes=10\)"),
        ({"oldest_due": timedelta(-1)}, "give zero or more"),
        ({"small_table": 1.5}, r"Thresholds\(small_table=1.5\): give an integer \(rows\)"),
        ({"keys_used": True}, r"give a number \(share\)"),
        ({"keys_used": float("nan")}, r"give a number \(share\)"),
        ({"lock_timeout": timedelta(days=2)}, "at most a day"),
    ):
        with pytest.raises(ConfigurationError, match=said):
            Thresholds(**wrong)
    engine = patient.engine.execution_options(isolation_level="AUTOCOMMIT")
    with Session(engine) as session, pytest.raises(StatementError, match="autocommit"):
        doctor(session, Email)


# -- the codes of findings: in the code, in the list and on the page of the documentation --------------------------

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "sqlaqueue" / "admin" / "doctor"
FAULTS = ROOT / "sqlaqueue" / "postgresql"
PAGE = ROOT / "docs" / "doctor-codes.md"
SEVERITIES = {"critical", "warning", "notice"}
COMPUTED = {
    "fsync_off": {"critical"},
    "full_page_writes_off": {"critical"},
    "synchronous_commit_off": {"notice"},
    "synchronous_off": {"critical"},
    "synchronous_normal": {"notice"},
    "missing_index": {"warning", "critical"},
    "invalid_index": {"warning", "critical"},
    "altered_index": {"warning", "critical"},
    "leftover_index": {"warning"},
    "index_building": {"warning", "notice"},
    "missing_function": {"warning", "critical"},
    "outdated_function": {"warning"},
    "newer_function": {"warning"},
}
"""The codes that are made from the name of a setting, or from the state of an index or a function."""


def sources() -> str:
    return "".join(module.read_text() for module in FOLDER.glob("*.py") if module.name != "examination.py")


def words(node: ast.expr) -> set[str]:
    return {each.value for each in ast.walk(node) if isinstance(each, ast.Constant) and isinstance(each.value, str)}


def found() -> dict[str, set[str]]:
    """Return the codes of all findings in the code, each with its severities."""
    codes: dict[str, set[str]] = {}
    for path in (*FOLDER.glob("*.py"), *FAULTS.glob("faults*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
                continue
            if node.func.id == "Finding":
                given = {each.arg: each.value for each in node.keywords}
                severity, code = given["severity"], given["code"]
            elif node.func.id == "Fault":
                severity, code = node.args[:2]
            else:
                continue
            if not isinstance(code, ast.JoinedStr):
                for each in words(code):
                    codes.setdefault(each, set()).update(words(severity) & SEVERITIES)
    return codes


@pytest.mark.once
def test_the_page_lists_every_code_with_its_severities() -> None:
    rows = re.findall(r"^\| `(\w+)` \| ([\w, ]+) \| [^|]+ \| [^|]+ \|$", PAGE.read_text(), re.MULTILINE)
    assert {code: set(severities.split(", ")) for code, severities in rows} == found() | COMPUTED
    assert len(rows) == len({code for code, _ in rows})


@pytest.mark.once
def test_the_page_lists_every_threshold() -> None:
    text = PAGE.read_text()
    rows = re.findall(r"^\| `(\w+)` \| [^|`]+ \| [^|]+ \|$", text[text.index(" Thresholds\n") :], re.MULTILINE)
    assert sorted(rows) == sorted(each.name for each in fields(Thresholds))


@pytest.mark.once
def test_every_check_is_made() -> None:
    made = r"^(?:def )?(check_\w+)(?:\(\s*examination\b| = _check_of\()"
    defined = set(re.findall(made, sources(), re.MULTILINE))
    others = [check for checks in CHECKS_OF_OTHERS.values() for check in checks]
    listed = {check.__name__ for check in (*COMPLETE, *CHECKS, *COMPLETE_OF_OTHERS, *others)}
    assert defined == listed | {"check_durability"}


# -- a healthy queue has no finding --------------------------------------------------------------------------------


def test_empty_queues(patient: Patient) -> None:
    assert patient.findings(deep=True) == []


@pytest.mark.few(2)
@pytest.mark.parametrize("model", MODELS)
def test_a_queue_that_has_run_jobs(patient: Patient, model: Any) -> None:
    attributes = [name for name in ("customer_id", "document_id") if hasattr(model, name)]
    patient.add(*(model(id=number, **dict.fromkeys(attributes, number % 7)) for number in range(1, 101)))
    if model is Delivery:
        patient.add(*(Note(order_id=number) for number in range(1, 101)))
    assert patient.findings(model, deep=True) == []
    patient.analyze()
    engine = sa.create_engine(patient.database.url())
    assert Consumer(model, handle, sessionmaker(engine)).drain() == 100
    with Consumer(model, handle, sessionmaker(engine)):
        assert patient.findings(model, deep=True) == []
    engine.dispose()


def test_a_new_queue_of_messages_with_a_limit_and_a_drained_one(sessions: Any) -> None:
    job = make_job("delete_returning", flow_control=[ConcurrencyLimit(5, per="payload")])
    maker = sessions(job)
    with maker() as session:
        assert doctor(session, job, deep=True) == []
        session.add_all([job(payload=str(number)) for number in range(60)])
        session.commit()
        assert doctor(session, job, deep=True) == []
        session.commit()
        assert Consumer(job, handle, maker).drain() == 60
        assert doctor(session, job, deep=True) == []


@pytest.mark.parametrize("driver", ["psycopg", "psycopg2"])
def test_another_driver_of_a_healthy_queue(database: Database, driver: Any) -> None:
    engine = plain_engine(database.url(driver))
    job = make_job("update_status")
    job.metadata.create_all(engine)
    with Session(engine) as session:
        assert doctor(session, job, deep=True) == []
