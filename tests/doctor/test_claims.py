"""The plan of claims, leases, and runs without one."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from sqlaqueue import QueueConfig, QueueMixin, States, claim
from tests.doctor.conftest import Patient, add_consumer, long
from tests.doctor.models import MODELS, Delivery, Email, Entry, Letter, Task

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


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("analyze", [True, pytest.param(False, marks=pytest.mark.thorough)])
def test_claims_of_a_large_queue(patient: Patient, model: Any, analyze: bool) -> None:  # noqa: FBT001 - a parameter
    patient.execute(f'ALTER TABLE "{model.__tablename__}" SET (autovacuum_enabled = off)')
    fill(patient, model)
    if analyze:
        patient.execute("ANALYZE")
    assert "claim_reads_table" not in patient.codes(model, deep=True)


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
    patient.execute("ANALYZE")
    assert "claim_reads_table" not in patient.codes(model, small_table=ROWS * 2)
    finding = patient.repaired("claim_reads_table", model)
    assert f"the index {index} is missing" in finding.summary
    assert finding.severity == "warning"
    assert finding.facts["rows"] == pytest.approx(ROWS, rel=0.1)


def test_a_claim_of_a_very_large_table(patient: Patient) -> None:
    patient.execute("UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'ix_email_queue_claim'::regclass")
    fill(patient, Email)
    patient.execute("ANALYZE")
    finding = patient.find("claim_reads_table", Email, small_table=40)
    assert finding.severity == "critical"
    assert "the index ix_email_queue_claim is invalid" in finding.summary


def test_a_planner_that_may_not_use_indexes(patient: Patient) -> None:
    fill(patient, Email)
    patient.execute(
        "ANALYZE", *(f'ALTER DATABASE "{patient.database.name}" SET {name} = off' for name in ("enable_indexscan",))
    )
    finding = patient.repaired("claim_reads_table", Email)
    assert "enable_indexscan is off" in finding.summary


def test_statistics_that_are_out_of_date(patient: Patient) -> None:
    """By them no job is due, so that a claim would read all messages anyway."""
    for table in ("delivery", "note"):
        patient.execute(f"ALTER TABLE {table} SET (autovacuum_enabled = off)")
    fill(patient, Delivery)
    patient.execute("ANALYZE")
    assert "claim_reads_table" not in patient.codes(Delivery)
    patient.execute("UPDATE delivery SET run_at = now()", "UPDATE note SET order_id = order_id")
    add_consumer(patient, "delivery")
    finding = patient.repaired("claim_reads_table", Delivery)
    assert "the statistics of" in finding.summary
    assert "ANALYZE" in finding.fixes[0]


def test_a_model_that_no_consumer_can_serve(patient: Patient) -> None:
    """It has no value for completed jobs, so that only programs claim from it."""

    class Base(DeclarativeBase):
        pass

    class Line(QueueMixin, Base):
        __tablename__ = "line"
        __queue__ = QueueConfig(states=States(completed=None))
        id: Mapped[int] = mapped_column(primary_key=True)

    Base.metadata.create_all(patient.engine)
    assert patient.findings(Line, deep=True) == []


def test_expired_leases(patient: Patient) -> None:
    patient.add(*(Email(id=number) for number in range(3)))
    with Session(patient.engine) as session:
        assert len(session.scalars(claim(Email, 3)).all()) == 3
        session.commit()
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


def test_runs_without_a_lease(patient: Patient) -> None:
    patient.add(Email(id=1))
    patient.execute("UPDATE email SET status = 'processing'")
    finding = patient.repaired("runs_without_lease", Email)
    assert finding.severity == "critical"
    assert "1 job in the state processing" in finding.summary
    assert patient.execute("SELECT status FROM email") == [("pending",)]


def test_jobs_that_wait_for_a_twin_have_no_expired_lease(patient: Patient) -> None:
    patient.add(Email(id=1))
    patient.execute("UPDATE email SET status = 'processing', lease_expires_at = to_timestamp(0)")
    assert patient.findings(Email) == []
