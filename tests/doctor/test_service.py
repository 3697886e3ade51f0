"""What runs the jobs: Consumers, due jobs, schedules, leases, the plan of claims, and what nothing cleans up."""

import re
import uuid
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Mapped, Session, mapped_column, sessionmaker

from sqlaqueue import Consumer, QueueConfig, QueueMixin, Schedule, Scheduler, States, cancel, claim
from sqlaqueue.admin import QueueAdmin, ScheduleAdmin
from sqlaqueue.admin.doctor.service import check_consumers, check_due_jobs
from tests.doctor.conftest import Patient, add_consumer, codes, find, long
from tests.doctor.models import MODELS, SOME, Delivery, Email, Entry, Export, Letter, Note, Report, Task, handle
from tests.models import new_base
from tests.programs import wait_until

AGO = timedelta(minutes=10)
SERVICE = [check_consumers, check_due_jobs]


def add_old(patient: Patient, model: Any, number: int = 1) -> None:
    """Insert jobs that have been due for ten minutes."""
    patient.add(*(model(run_at=datetime.now(UTC) - AGO) for _ in range(number)))
    if model is Delivery:
        patient.execute("INSERT INTO note (order_id) SELECT id FROM delivery")


@pytest.mark.parametrize("model", MODELS)
def test_no_consumer(patient: Patient, model: Any) -> None:
    add_old(patient, model, 3)
    finding = find("no_consumer", patient.engine, [model], SERVICE)
    assert finding.severity == "critical"
    assert f"No live Consumer works for the queue {model.__tablename__}, and 3 jobs are due" in finding.summary
    assert "the oldest for 10 min" in finding.summary
    assert finding.fixes[0].startswith(f"sqlaqueue worker tests.doctor.models:{model.__name__}=")
    assert codes(patient.engine, [model], SERVICE, **long(unserved_for=3600)) == []
    add_consumer(patient, model.__tablename__)
    assert codes(patient.engine, [model], SERVICE, **long(oldest_due=3600)) == []


def test_the_worker_of_the_fix_runs_the_jobs(patient: Patient) -> None:
    add_old(patient, Email)
    command = patient.find("no_consumer", Email).fixes[0]
    patient.repair(command.replace("MODULE:HANDLER", "tests.doctor.models:handle") + " --drain")
    assert patient.codes(Email) == []


def test_a_paused_queue(patient: Patient) -> None:
    with Session(patient.engine) as session:
        QueueAdmin(session, Letter).pause()
    assert patient.codes() == []
    add_old(patient, Letter)
    add_consumer(patient, "letter")
    finding = patient.repaired("paused", Letter)
    assert f"has been paused since {datetime.now(UTC):%Y-%m-%d}" in finding.summary
    assert "1 job is due" in finding.summary


@pytest.mark.parametrize("model", [*SOME, Export])
def test_a_backlog(patient: Patient, model: Any) -> None:
    add_old(patient, model, 2)
    add_consumer(patient, model.__tablename__)
    finding = find("backlog", patient.engine, [model], SERVICE)
    assert finding.severity == "warning"
    assert finding.summary.startswith("2 jobs are due, the oldest for 10 min")
    assert finding.summary.endswith(", though 1 Consumer is alive.")
    # More workers would not help if claims fail.
    assert "No Consumer has claimed a job" in finding.consequence
    assert "--processes" not in finding.fixes[0]
    assert ("Limits, rates or an order" in finding.consequence) == (model.__tablename__ in {"export", "import"})
    patient.execute(f'DELETE FROM "{model.__tablename__}"')
    assert codes(patient.engine, [model], SERVICE) == []


def test_a_backlog_of_which_some_jobs_run(patient: Patient) -> None:
    add_old(patient, Email, 2)
    add_consumer(patient, "email", running=[["9"]], claimed=0)
    finding = patient.find("backlog", Email)
    assert finding.consequence == "More jobs are enqueued than run."
    assert finding.fixes[0].endswith(" --processes 4")


def test_running_jobs_of_a_held_strategy_are_no_backlog(patient: Patient) -> None:
    add_old(patient, Entry, 3)
    add_consumer(patient, "Entry of a book", running=[["1"]], claimed=2)
    assert patient.codes(Entry) == []


def test_jobs_that_are_not_due(patient: Patient) -> None:
    patient.add(Email(run_at=datetime.now(UTC) + AGO))
    assert patient.codes(Email) == []


def test_consumers_that_receive_no_notifications(patient: Patient) -> None:
    add_consumer(patient, "email", listening=False)
    assert patient.codes(Email) == []
    patient.execute("UPDATE sqlaqueue_consumer SET created_at = now() - interval '2 minutes'")
    finding = patient.find("not_listening", Email)
    assert finding.severity == "warning"
    assert finding.summary == "1 of 1 live Consumers receive no notifications: web:1."
    assert patient.codes(Email, **long(not_listening_for=3600)) == []
    patient.execute("UPDATE sqlaqueue_consumer SET listening = true")
    assert patient.codes(Email) == []


def test_consumers_of_another_version(patient: Patient) -> None:
    add_consumer(patient, "email", version="0.1.7")
    finding = patient.find("other_version", Email)
    assert finding.severity == "notice"
    assert "web:1 (0.1.7)" in finding.summary
    patient.execute("DELETE FROM sqlaqueue_consumer")
    assert patient.codes(Email) == []


def test_old_entries_of_the_crash_journal(patient: Patient) -> None:
    journal = Entry.metadata.tables["sqlaqueue_crash_journal"]
    row = {"queue": "Entry of a book", "keys": ["1"], "starts": 1}
    with patient.engine.begin() as connection:
        for worker, days in (("dead:1", 2), ("web:1", 2), ("dead:1", 0)):
            created_at = datetime.now(UTC) - timedelta(days=days)
            values = {**row, "id": uuid.uuid4(), "worker": worker, "created_at": created_at}
            connection.execute(sa.insert(journal).values(values))
    add_consumer(patient, "Entry of a book")
    finding = patient.repaired("old_journal_entries", Entry)
    assert finding.facts == {"entries": 1}
    assert len(patient.execute("SELECT FROM sqlaqueue_crash_journal")) == 2


def test_old_requests_to_cancel(patient: Patient) -> None:
    patient.add(Email(id=1))
    with Session(patient.engine) as session:
        session.scalars(claim(Email, 1)).all()
        session.commit()
        session.execute(cancel(sa.select(Email)))
        session.commit()
        QueueAdmin(session, Email).pause()
    assert patient.codes(Email) == []
    patient.execute("UPDATE sqlaqueue_control SET created_at = now() - interval '2 days'")
    assert patient.repaired("old_cancellations", Email).facts == {"requests": 1}
    # The pause is not one of them.
    assert patient.execute("SELECT key FROM sqlaqueue_control") == [([],)]


def test_jobs_without_a_message(patient: Patient) -> None:
    patient.execute("ALTER TABLE letter DISABLE TRIGGER sqlaqueue_message_insert")
    add_old(patient, Letter, 2)
    patient.execute("ALTER TABLE letter ENABLE TRIGGER sqlaqueue_message_insert")
    assert patient.codes(Letter) == []
    finding = patient.repaired("jobs_without_message", Letter, deep=True)
    assert finding.severity == "critical"
    assert finding.summary.startswith("2 pending jobs of letter without a message")


def test_jobs_without_a_message_of_the_application(patient: Patient) -> None:
    patient.add(Delivery(id=1))
    finding = patient.repaired("jobs_without_message", Delivery, deep=True)
    assert "INSERT INTO note" in finding.fixes[0]
    assert patient.execute("SELECT order_id FROM note") == [(1,)]


@pytest.mark.parametrize("model", [Letter, Delivery])
def test_messages_without_a_job(patient: Patient, model: Any) -> None:
    if model is Letter:
        patient.execute("INSERT INTO sqlaqueue_message_letter (id, priority, run_at) VALUES (7, 0, now())")
    else:
        patient.add(Note(order_id=7))
    assert patient.codes(model) == []
    assert patient.repaired("messages_without_job", model, deep=True).facts == {"messages": 1}


def test_unknown_status_values(patient: Patient) -> None:
    patient.add(Email(id=1), Email(id=2), Email(id=3))
    patient.execute("UPDATE email SET status = 'done''?' WHERE id = 1")
    assert patient.codes(Email) == []
    finding = patient.repaired("unknown_status", Email, deep=True)
    assert '1 job of email with an unknown status: "done\'?"' in finding.summary
    assert patient.execute("SELECT status FROM email ORDER BY id") == [("failed",), ("pending",), ("pending",)]


def test_a_live_consumer_that_listens(patient: Patient) -> None:
    engine = sa.create_engine(patient.database.url())
    with Consumer(Email, handle, sessionmaker(engine)):
        wait_until(lambda: patient.execute("SELECT FROM sqlaqueue_consumer WHERE listening"), "it is registered")
        assert patient.findings(Email, deep=True, **long(not_listening_for=0, unserved_for=0)) == []
    engine.dispose()


# -- schedules that are overdue, cannot be fired, or whose queue nothing serves ------------------------------------


@pytest.fixture
def reports(patient: Patient) -> Patient:
    """Return a database with a schedule of a day, which was just planned."""
    Report.metadata.create_all(patient.engine)
    with Session(patient.engine) as session:
        ScheduleAdmin(session, Report).add(Schedule("daily", Report, every=timedelta(days=1)))
    add_consumer(patient, "report")
    return patient


def test_tables_of_schedules_that_no_program_declares(patient: Patient) -> None:
    assert patient.findings(Email) == []


def test_a_missing_table_of_schedules(reports: Patient) -> None:
    assert reports.findings(Report) == []
    reports.execute("DROP TABLE sqlaqueue_tick")
    finding = reports.find("missing_table", Report)
    assert "sqlaqueue_tick" in finding.summary
    reports.repair(finding.fixes[1])
    assert reports.findings(Report) == []


def test_a_schedule_that_nothing_fires(reports: Patient) -> None:
    reports.execute(
        "UPDATE sqlaqueue_schedule SET created_at = now() - interval '3 days', edited_at = null, "
        "next_tick = now() - interval '5 hours'"
    )
    finding = reports.find("late_schedule", Report)
    assert finding.severity == "critical"
    assert "The schedule 'daily' has been overdue for 5 h" in finding.summary
    assert finding.fixes == ("sqlaqueue scheduler tests.doctor.models:Report",)
    # Schedules of other queues are theirs.
    assert reports.codes(Letter) == []
    engine = sa.create_engine(reports.database.url())
    with Scheduler(sessionmaker(engine), [Schedule("daily", Report, every=timedelta(days=1))]):
        wait_until(lambda: "late_schedule" not in reports.codes(Report))
    engine.dispose()


def test_a_schedule_that_cannot_be_fired(reports: Patient) -> None:
    reports.execute("UPDATE sqlaqueue_schedule SET last_error = 'no such function'")
    finding = reports.find("schedule_error", Report)
    assert finding.severity == "critical"
    assert "The schedule 'daily' could not be fired: no such function" in finding.summary
    # It is found until a process has fired the schedule, which the fix asks for.
    assert re.fullmatch(r"sqlaqueue schedules run \S+ daily", finding.fixes[0])


def test_a_schedule_whose_queue_nothing_serves(reports: Patient) -> None:
    reports.execute("DELETE FROM sqlaqueue_consumer")
    finding = reports.find("unserved_schedule", Report)
    assert finding.severity == "notice"
    assert "report" in finding.summary
    assert "'daily'" in finding.summary
    add_consumer(reports, "report")
    assert reports.findings(Report) == []


def test_a_paused_schedule(reports: Patient) -> None:
    reports.execute("DELETE FROM sqlaqueue_consumer")
    with Session(reports.engine) as session:
        ScheduleAdmin(session, Report).pause("daily")
    assert reports.findings(Report) == []


# -- the plan of claims, leases, and runs without one --------------------------------------------------------------

ROWS = 5_000


def fill(patient: Patient, model: Any, rows: int = ROWS) -> None:
    """Insert pending jobs that are due later, so that no consumer is missed."""
    columns = {"export": "customer_id, document_id, ", "import": "customer_id, "}.get(model.__tablename__, "")
    values = "mod(number, 100), " * columns.count(",")
    patient.execute(
        f"INSERT INTO \"{model.__tablename__}\" ({columns}id, run_at) SELECT {values}number, now() + interval '1 hour' "
        f"FROM generate_series(1, {rows}) AS number"
    )
    if model is Delivery:
        patient.execute(f"INSERT INTO note (order_id) SELECT number FROM generate_series(1, {rows}) AS number")


@pytest.mark.few(2)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("analyze", [True, pytest.param(False, marks=pytest.mark.thorough)])
def test_claims_of_a_large_queue(patient: Patient, model: Any, analyze: bool) -> None:  # noqa: FBT001 - a parameter
    patient.execute(f'ALTER TABLE "{model.__tablename__}" SET (autovacuum_enabled = off)')
    fill(patient, model)
    if analyze:
        patient.analyze()
    assert "claim_reads_table" not in patient.codes(model, deep=True)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("model", "index"),
    [
        (Email, "ix_email_queue_claim"),
        (Entry, "ix_Entry of a book_queue_claim"),
        (Letter, "ix_sqlaqueue_message_letter_claim"),
        (Task, "ix_task_queue_claim"),
    ],
)
def test_a_claim_without_its_index(patient: Patient, model: Any, index: str) -> None:
    patient.execute(f'DROP INDEX "{index}"')
    if model is Email:
        patient.execute("DROP INDEX ix_email_queue_quarantined")
    assert "claim_reads_table" not in patient.codes(model)
    fill(patient, model)
    patient.analyze()
    assert "claim_reads_table" not in patient.codes(model, small_table=ROWS * 2)
    finding = patient.repaired("claim_reads_table", model)
    assert f"the index {index} is missing" in finding.summary
    assert finding.severity == "warning"
    assert finding.facts["rows"] == pytest.approx(ROWS, rel=0.1)


def test_a_claim_of_a_very_large_table(patient: Patient) -> None:
    patient.execute("UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'ix_email_queue_claim'::regclass")
    fill(patient, Email)
    patient.analyze()
    finding = patient.find("claim_reads_table", Email, small_table=40)
    assert finding.severity == "critical"
    assert "the index ix_email_queue_claim is invalid" in finding.summary


def test_a_planner_that_may_not_use_indexes(patient: Patient) -> None:
    fill(patient, Email)
    patient.analyze()
    patient.execute(f'ALTER DATABASE "{patient.database.name}" SET enable_indexscan = off')
    finding = patient.repaired("claim_reads_table", Email)
    assert "enable_indexscan is off" in finding.summary


def test_statistics_that_are_out_of_date(patient: Patient) -> None:
    """By them no job is due, so that a claim would read all messages anyway."""
    for table in ("delivery", "note"):
        patient.execute(f"ALTER TABLE {table} SET (autovacuum_enabled = off)")
    fill(patient, Delivery)
    patient.analyze()
    assert "claim_reads_table" not in patient.codes(Delivery)
    patient.execute("UPDATE delivery SET run_at = now()", "UPDATE note SET order_id = order_id")
    add_consumer(patient, "delivery")
    finding = patient.repaired("claim_reads_table", Delivery)
    assert "the statistics of" in finding.summary
    assert "ANALYZE" in finding.fixes[0]


def test_a_model_that_no_consumer_can_serve(patient: Patient) -> None:
    """It has no value for completed jobs, so that only programs claim from it."""
    base = new_base()

    class Line(QueueMixin, base):
        __tablename__ = "line"
        __queue__ = QueueConfig(states=States(completed=None))
        id: Mapped[int] = mapped_column(primary_key=True)

    base.metadata.create_all(patient.engine)
    assert patient.findings(Line, deep=True) == []


def test_expired_leases(patient: Patient) -> None:
    patient.add(*(Email(id=number) for number in range(3)))
    with Session(patient.engine) as session, session.begin():
        assert len(session.scalars(claim(Email, 3)).all()) == 3
    assert patient.findings(Email) == []
    patient.execute("UPDATE email SET lease_expires_at = now() - interval '10 seconds'")
    assert patient.findings(Email) == []
    patient.execute("UPDATE email SET lease_expires_at = now() - interval '10 minutes'")
    assert patient.codes(Email, **long(lease_expired_for=3600)) == []
    finding = patient.repaired("expired_leases", Email)
    assert finding.severity == "critical"
    assert "leases of 3 jobs have expired, the first 10 min" in finding.summary
    assert finding.summary.endswith(" ago, and no Consumer is alive.")
    assert (finding.facts["jobs"], finding.facts["consumers"]) == (3, 0)


def test_many_expired_leases_though_a_consumer_is_alive(patient: Patient) -> None:
    patient.execute(
        "INSERT INTO email (id, status, lease_expires_at) "
        "SELECT number, 'processing', now() - interval '1 minute' FROM generate_series(1, 1500) AS number"
    )
    add_consumer(patient, "email")
    finding = patient.find("expired_leases", Email)
    assert "leases of more than 1000 jobs" in finding.summary
    assert "though 1 Consumer is alive" in finding.summary


def test_a_lease_that_lasts_much_longer_than_configured(patient: Patient) -> None:
    patient.execute(
        "INSERT INTO email (id, status, lease_expires_at) VALUES (1, 'processing', now() + interval '50 minutes')"
    )
    assert patient.findings(Email) == []
    patient.execute("INSERT INTO email (id, status, lease_expires_at) VALUES (2, 'processing', 'infinity')")
    finding = patient.repaired("long_leases", Email)
    assert finding.severity == "warning"
    assert "1 running job with a lease that lasts much longer than the 1 min of QueueConfig" in finding.summary
    assert finding.facts["jobs"] == 1
    assert patient.execute("SELECT id FROM email WHERE lease_expires_at <= now()") == [(2,)]
    patient.execute("UPDATE email SET lease_expires_at = now() + interval '2 hours'")
    assert patient.find("long_leases", Email).facts["jobs"] == 2
    assert patient.codes(Email, **long(lease_beyond=7200)) == []


def test_runs_without_a_lease(patient: Patient) -> None:
    patient.add(Email(id=1))
    patient.execute("UPDATE email SET status = 'processing'")
    finding = patient.repaired("runs_without_lease", Email)
    assert finding.severity == "critical"
    assert "1 job in the state processing" in finding.summary
    assert patient.execute("SELECT status FROM email") == [("pending",)]


def test_jobs_that_wait_for_a_duplicate_have_no_expired_lease(patient: Patient) -> None:
    patient.add(Email(id=1))
    patient.execute("UPDATE email SET status = 'processing', lease_expires_at = to_timestamp(0)")
    assert patient.findings(Email) == []
