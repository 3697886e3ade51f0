"""Schedules that are overdue, cannot be fired, or whose queue nothing serves."""

from __future__ import annotations

import re
from datetime import timedelta

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session, sessionmaker

from sqlaqueue import Schedule, Scheduler, admin
from tests.doctor.conftest import Patient, add_consumer
from tests.doctor.models import Email, Letter
from tests.doctor.scheduled import Report


@pytest.fixture
def reports(patient: Patient) -> Patient:
    """Return a database with a schedule of a day, which was just planned."""
    Report.metadata.create_all(patient.engine)
    with Session(patient.engine) as session:
        admin.add_schedule(session, Schedule("daily", Report, every=timedelta(days=1)))
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
    assert finding.fixes == ("sqlaqueue scheduler tests.doctor.scheduled:Report",)
    # Schedules of other queues are theirs.
    assert reports.codes(Letter) == []
    engine = sa.create_engine(reports.database.url())
    with Scheduler(sessionmaker(engine), [Schedule("daily", Report, every=timedelta(days=1))]):
        while "late_schedule" in reports.codes(Report):
            pass
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
        admin.pause_schedule(session, Report, "daily")
    assert reports.findings(Report) == []
