"""Due jobs and Consumers, and what nothing cleans up."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session, sessionmaker

from sqlaqueue import Consumer, admin, cancel, claim
from tests.doctor.conftest import Patient, add_consumer, long
from tests.doctor.models import MODELS, SOME, Delivery, Email, Entry, Export, Letter, Note

AGO = timedelta(minutes=10)


def add_old(patient: Patient, model: Any, number: int = 1) -> None:
    """Insert jobs that have been due for ten minutes."""
    patient.add(*(model(run_at=datetime.now(UTC) - AGO) for _ in range(number)))
    if model is Delivery:
        patient.execute("INSERT INTO note (order_id) SELECT id FROM delivery")


@pytest.mark.parametrize("model", MODELS)
def test_no_consumer(patient: Patient, model: Any) -> None:
    add_old(patient, model, 3)
    finding = patient.find("no_consumer", model)
    assert finding.severity == "critical"
    assert f"No live Consumer serves the queue {model.__tablename__}, and 3 jobs are due" in finding.summary
    assert "the oldest for 10 min" in finding.summary
    assert finding.fixes[0].startswith(f"sqlaqueue worker tests.doctor.models:{model.__name__}=")
    assert patient.codes(model, **long(unserved_for=3600)) == []
    add_consumer(patient, model.__tablename__)
    assert patient.codes(model, **long(oldest_due=3600)) == []


def test_the_worker_of_the_fix_runs_the_jobs(patient: Patient) -> None:
    add_old(patient, Email)
    command = patient.find("no_consumer", Email).fixes[0]
    patient.repair(command.replace("MODULE:HANDLER", "tests.doctor.models:handle") + " --drain")
    assert patient.codes(Email) == []


def test_a_paused_queue(patient: Patient) -> None:
    with Session(patient.engine) as session:
        admin.pause(session, Letter)
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
    finding = patient.find("backlog", model)
    assert finding.severity == "warning"
    assert finding.summary.startswith("2 jobs are due, the oldest for 10 min")
    assert finding.summary.endswith(", though 1 Consumer is alive.")
    # More workers would not help if claims fail.
    assert "No Consumer has claimed a job" in finding.consequence
    assert "--processes" not in finding.fixes[0]
    assert ("Limits, rates or an order" in finding.consequence) == (model.__tablename__ in {"export", "import"})
    patient.execute(f'DELETE FROM "{model.__tablename__}"')
    assert "backlog" not in patient.codes(model)


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
    add_consumer(patient, "email", version="0.0.1")
    finding = patient.find("other_version", Email)
    assert finding.severity == "notice"
    assert "web:1 (0.0.1)" in finding.summary
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
        admin.pause(session, Email)
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
    with Consumer(Email, lambda session, job: None, sessionmaker(engine)):
        # Until it is registered.
        while not patient.execute("SELECT FROM sqlaqueue_consumer WHERE listening"):
            pass
        assert patient.findings(Email, deep=True, **long(not_listening_for=0, unserved_for=0)) == []
    engine.dispose()
