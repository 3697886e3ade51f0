"""``sqlaqueue doctor``, and the line of ``stats`` and ``worker``."""

import json
import logging
import sys
from dataclasses import fields
from typing import Any

import pytest
from click.testing import CliRunner, Result

from sqlaqueue.admin import Thresholds
from sqlaqueue.cli import main
from tests.doctor.conftest import Patient, add_consumer

pytestmark = pytest.mark.once

EMAIL, LETTER = "tests.doctor.models:Email", "tests.doctor.models:Letter"


def run(patient: Patient, *arguments: str, **environment: str) -> Result:
    settings = {"SQLAQUEUE_URL": patient.database.url(), **environment}
    return CliRunner().invoke(main, arguments, env=settings, prog_name="sqlaqueue")


def doctor(patient: Patient, *arguments: str, code: int = 0, **environment: str) -> str:
    result = run(patient, "doctor", *arguments, **environment)
    assert result.exit_code == code, result.output
    return result.stdout if code < 2 else result.output


def test_a_healthy_queue(patient: Patient) -> None:
    assert doctor(patient, EMAIL, LETTER, "--deep") == "Nothing is wrong with email, letter.\n"
    healthy = "Nothing is wrong with email. With --deep all jobs and messages are read as well.\n"
    assert doctor(patient, EMAIL) == healthy
    assert json.loads(doctor(patient, EMAIL, "--json")) == []


def test_what_it_prints(patient: Patient) -> None:
    patient.execute("DROP INDEX ix_email_queue_unique", "ALTER TABLE letter DISABLE TRIGGER sqlaqueue_wake_insert")
    assert doctor(patient, LETTER, EMAIL, code=1) == (
        "critical: email\n"
        "  The index ix_email_queue_unique of email is missing.\n"
        "  Jobs are not unique, and enqueue() fails. If the fix reports a duplicate key, cancel or delete one of the "
        "jobs that have this key, and repeat it.\n"
        "  Fix, in psql:\n"
        '    CREATE UNIQUE INDEX CONCURRENTLY ix_email_queue_unique ON email ("to") '
        "WHERE status = 'pending' OR status = 'processing';\n"
        "  Or, in a shell:\n"
        "    alembic revision --autogenerate -m sqlaqueue && alembic upgrade head\n"
        "\n"
        "warning: letter\n"
        "  The trigger sqlaqueue_wake_insert of letter is disabled.\n"
        "  Idle Consumers are not notified of new jobs, and find them at their next poll.\n"
        "  Fix, in psql:\n"
        "    ALTER TABLE letter ENABLE TRIGGER sqlaqueue_wake_insert;\n"
    )


def test_commands_name_what_the_user_has_named(patient: Patient) -> None:
    patient.execute("INSERT INTO email (id, run_at) VALUES (1, now() - interval '1 hour')")
    output = doctor(patient, EMAIL, code=1)
    assert f"  Fix, in a shell:\n    sqlaqueue worker {EMAIL}=MODULE:HANDLER\n    # MODULE:HANDLER is" in output
    consumer = "tests.doctor.models:make_consumer"
    output = doctor(patient, consumer, code=1)
    assert f"  Fix, in a shell:\n    sqlaqueue worker {consumer}\n" in output
    url = patient.database.url().replace("postgres@", "postgres:secret@")
    output = doctor(patient, EMAIL, "--url", url, code=1)
    assert "=MODULE:HANDLER --url 'postgresql+psycopg://postgres:***@/" in output
    assert "secret" not in output


def test_one_fix_of_two_findings_is_printed_once(patient: Patient) -> None:
    patient.execute("DROP INDEX ix_email_queue_claim")
    patient.execute("INSERT INTO email (id) SELECT number FROM generate_series(1, 5000) AS number", "ANALYZE email")
    output = doctor(patient, EMAIL, code=1)
    assert "is missing" in output
    assert "reads the whole table" in output
    assert output.count("CREATE INDEX CONCURRENTLY ix_email_queue_claim") == 1
    assert "  Fix: as above." in output


def test_a_statement_of_several_lines_can_be_copied(patient: Patient) -> None:
    patient.execute("DROP TABLE sqlaqueue_control")
    output = doctor(patient, EMAIL, code=1)
    assert "CREATE TABLE sqlaqueue_control (\n" in output
    # In psql, \t is a command.
    assert "\\t" not in output


def test_a_finding_about_the_server(patient: Patient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    # The servers of the tests do not wait for a disk.
    output = doctor(patient, EMAIL, code=1)
    assert output.startswith("critical: the server\n  The setting fsync is off")


def test_json(patient: Patient) -> None:
    patient.execute("ALTER TABLE letter DISABLE TRIGGER sqlaqueue_wake_insert")
    (found,) = json.loads(doctor(patient, LETTER, "--json", code=1))
    assert (found["code"], found["severity"], found["queue"]) == ("disabled_trigger", "warning", "letter")
    assert found["fixes"] == ["ALTER TABLE letter ENABLE TRIGGER sqlaqueue_wake_insert;"]


@pytest.mark.parametrize(("level", "code"), [("critical", 0), ("warning", 1), ("notice", 1), (None, 1)])
def test_exit_codes(patient: Patient, level: str | None, code: int) -> None:
    patient.execute("ALTER TABLE letter DISABLE TRIGGER sqlaqueue_wake_insert")
    doctor(patient, LETTER, *([] if level is None else ["--fail-on", level]), code=code)


def test_a_notice_is_no_failure_unless_asked(patient: Patient) -> None:
    add_consumer(patient, "email", version="0.1.0")
    assert "notice: email" in doctor(patient, EMAIL)
    doctor(patient, EMAIL, "--fail-on", "notice", code=1)


def test_thresholds(patient: Patient) -> None:
    patient.execute("INSERT INTO email (id, run_at) VALUES (1, now() - interval '1 hour')")
    assert "No live Consumer" in doctor(patient, EMAIL, code=1)
    doctor(patient, EMAIL, "--threshold", "unserved-for=2h", "--threshold", "small_table=7")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("nonsense=1", "--threshold nonsense=1: give NAME=VALUE; the names are "),
        ("small_table", "the names are "),
        ("small_table=many", "--threshold small_table=many: the value has to be an integer"),
        ("oldest_due=soon", "--threshold oldest_due=soon: 'soon' is not a duration"),
        ("keys_used=-1", "Thresholds(keys_used=-1.0): give zero or more"),
        ("statement_timeout=2d", "give at most a day"),
    ],
)
def test_wrong_thresholds(patient: Patient, given: str, said: str) -> None:
    output = doctor(patient, EMAIL, "--threshold", given, code=2)
    assert said in output
    if "names" in said:
        assert "lease_expired_for" in output


def test_help_lists_the_thresholds(patient: Patient) -> None:
    lines = doctor(patient, "--help").splitlines()
    for each in fields(Thresholds):
        assert any(line.strip().startswith(f"{each.name}=") for line in lines), each.name
    for line in ("oldest_due=5m", "lock_timeout=500ms", "leftover_age=25h", "keys_used=0.7 (share)"):
        assert f"    {line}" in lines


def test_wrong_input_and_no_database(patient: Patient) -> None:
    doctor(patient, "tests.doctor.models:Nothing", code=2)
    output = doctor(patient, EMAIL, code=3, SQLAQUEUE_URL="postgresql+psycopg://localhost:1/nothing")
    assert "the database does not answer" in output


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
def test_stats_print_the_worst_finding(patient: Patient, driver: Any) -> None:
    url = patient.database.url(driver)
    assert "doctor" not in run(patient, "stats", EMAIL, LETTER, SQLAQUEUE_URL=url).output
    patient.execute("DROP INDEX ix_email_queue_claim")
    output = " ".join(run(patient, "stats", EMAIL, LETTER, SQLAQUEUE_URL=url).output.split())
    assert "doctor: warning: The index ix_email_queue_claim of email is missing; run `sqlaqueue doctor" in output
    patient.execute(
        "ALTER TABLE email DISABLE TRIGGER sqlaqueue_wake_insert",
        "ALTER TABLE letter DISABLE TRIGGER sqlaqueue_message_insert",
    )
    output = " ".join(run(patient, "stats", EMAIL, LETTER, SQLAQUEUE_URL=url).output.split())
    assert output.count("doctor:") == 1
    assert (
        "doctor: critical: The trigger sqlaqueue_message_insert of letter is disabled; run `sqlaqueue doctor" in output
    )
    assert output.endswith(f"`sqlaqueue doctor {LETTER}`")


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
def test_a_worker_logs_the_worst_finding(patient: Patient, driver: Any, caplog: pytest.LogCaptureFixture) -> None:
    patient.execute(
        "DROP INDEX ix_email_queue_lease",
        "DROP INDEX ix_email_queue_claim",
        "CREATE INDEX ix_email_queue_claim ON email (run_at)",
        "ALTER TABLE email DISABLE TRIGGER sqlaqueue_wake_insert",
    )
    handler = "handle" if driver == "psycopg" else "handle_async"
    target = f"{EMAIL}=tests.doctor.models:{handler}"
    with caplog.at_level(logging.INFO, "sqlaqueue"):
        result = run(patient, "worker", target, "--drain", SQLAQUEUE_URL=patient.database.url(driver))
    assert result.exit_code == 0, result.output
    lines = [record for record in caplog.records if record.event == "doctor_finding"]
    assert [record.levelname for record in lines] == ["WARNING"]
    assert lines[0].getMessage().startswith("doctor: warning: ")
    assert lines[0].getMessage().endswith(f"; run `sqlaqueue doctor {EMAIL}`")


def test_the_worst_finding_is_one_that_a_consumer_logs_as_well(
    patient: Patient, caplog: pytest.LogCaptureFixture
) -> None:
    patient.execute(
        "ALTER TABLE letter DISABLE TRIGGER sqlaqueue_message_insert",
        "ALTER TABLE letter SET (autovacuum_enabled = off)",
    )
    with caplog.at_level(logging.INFO, "sqlaqueue"):
        result = run(patient, "worker", f"{LETTER}=tests.doctor.models:handle", "--drain")
    assert result.exit_code == 0, result.output
    (line,) = [record.getMessage() for record in caplog.records if record.event == "doctor_finding"]
    assert line.startswith("doctor: critical: The trigger sqlaqueue_message_insert of letter is disabled")


def test_a_doctor_that_fails_is_silent(
    patient: Patient, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(sys.modules["sqlaqueue.cli.doctor"], "examine", fail)
    with caplog.at_level(logging.DEBUG, "sqlaqueue"):
        result = run(patient, "worker", f"{EMAIL}=tests.doctor.models:handle", "--drain")
    assert result.exit_code == 0, result.output
    lines = [record.levelname for record in caplog.records if "doctor" in record.getMessage()]
    assert lines == ["DEBUG"]
    assert "doctor" not in run(patient, "stats", EMAIL).output
