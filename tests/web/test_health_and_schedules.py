"""The pages of the doctor's findings and of all schedules."""

import html
import importlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue import Schedule
from sqlaqueue._version import __version__
from sqlaqueue.admin.doctor.examination import Finding, Thresholds
from sqlaqueue.schedules.schedule import schedule_groups
from sqlaqueue.schedules.store import declare
from sqlaqueue.web import Access
from sqlaqueue.web import queues as page_module
from tests.models import execute, sent_statements

CODE = "<script>alert(1)</script>"
examining = importlib.import_module("sqlaqueue.admin.doctor.doctor")


@pytest.fixture(autouse=True)
def _durable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out what would be found in each test: the servers of the tests do not wait for a disk."""
    checks = tuple(check for check in examining.CHECKS if check.__name__ != "check_durability")
    monkeypatch.setattr(examining, "CHECKS", checks)


async def page_of(client_of: Any, path: str = "health", *, status: int = 200, **options: Any) -> str:
    response = await client_of(**options).get(f"/{path}")
    assert response.status_code == status, response.text
    assert CODE not in response.text
    return html.unescape(response.text)


async def test_nothing_is_wrong(client_of: Any) -> None:
    page = await page_of(client_of)
    assert "Nothing is wrong" in page
    assert "finding--" not in page


async def test_findings_are_shown_with_their_fixes_the_worst_first(client_of: Any, engine: sa.Engine) -> None:
    execute(engine, "DROP INDEX ix_email_queue_claim; DROP TABLE invoice CASCADE")
    page = await page_of(client_of)
    assert "CREATE INDEX CONCURRENTLY ix_email_queue_claim" in page
    assert "<code>missing_index</code>" in page
    assert page.index("finding--critical") < page.index("finding--warning")
    assert 'href="./queues/email"' in page


async def test_findings_are_grouped_by_queue(client_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    places = [
        ("warning", "email"),
        ("critical", "email"),
        ("notice", None),
        ("critical", "invoice"),
        ("notice", "email"),
    ]
    findings = [
        Finding(severity=severity, code=f"code_{number}", queue=queue, summary="It is wrong.")  # type: ignore[arg-type] # of the list above
        for number, (severity, queue) in enumerate(places)
    ]
    with found(monkeypatch, *findings):
        page = await page_of(client_of)
    heads = re.findall(r'<h2 id="findings-\d">(?:<a [^>]*>)?(\w+)|<code>code_(\d)</code>', page)
    assert [name or number for name, number in heads] == ["Server", "2", "email", "1", "0", "4", "invoice", "3"]


async def test_findings_of_other_queues_are_not_shown(client_of: Any, engine: sa.Engine) -> None:
    execute(engine, "DROP INDEX ix_email_queue_claim")
    for _ in range(2):
        # Not by way of what another viewer has been shown, either.
        assert "ix_email_queue_claim" in await page_of(client_of)
        page = await page_of(client_of, access=lambda _: Access(read=["invoice"]))
        assert "email" not in page


async def test_one_dashboard_keeps_the_findings_of_each_access_apart(client_of: Any, engine: sa.Engine) -> None:
    execute(engine, "DROP INDEX ix_email_queue_claim")
    browser = client_of(access=lambda request: Access(read=[request.headers["x-queue"]]))
    pages = {
        queue: (await browser.get("/health", headers={"X-Queue": queue})).text
        for queue in ("email", "invoice", "email", "invoice")
    }
    assert "ix_email_queue_claim" in pages["email"]
    assert "email" not in pages["invoice"]


async def test_many_viewers_share_an_examination(client_of: Any, engine: sa.Engine) -> None:
    async with client_of() as browser:
        with sent_statements(engine) as first:
            await browser.get("/health")
        with sent_statements(engine) as second:
            await browser.get("/health")
        assert len(first) > 50
        assert second == []
        with sent_statements(engine) as deep:
            assert "with all jobs and messages" in (await browser.get("/health?deep=1")).text
        assert len(deep) > len(first)


async def test_deep_is_0_or_1(client_of: Any) -> None:
    for value in ("2", "", "yes", "-1"):
        assert "deep=" in await page_of(client_of, f"health?deep={value}", status=400)


@contextmanager
def found(monkeypatch: pytest.MonkeyPatch, *findings: Finding) -> Iterator[None]:
    monkeypatch.setattr(page_module, "doctor", lambda *_, **__: [*findings])
    yield


async def test_errors_of_schedules_are_redacted(client_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    finding = Finding(
        severity="critical",
        code="schedule_error",
        queue="email",
        summary="The schedule 'nightly' could not be fired: the secret.",
        facts={"schedule": "nightly", "error": "the secret"},
    )
    with found(monkeypatch, finding):
        assert "the secret" in await page_of(client_of)
        page = await page_of(client_of, redact=["last_error"])
    assert "the secret" not in page
    assert "The schedule 'nightly' could not be fired: (hidden)." in page


async def test_the_statement_of_another_session_is_not_shown(
    client_of: Any, engine: sa.Engine, monkeypatch: Any
) -> None:
    limits = Thresholds(transaction_open=timedelta(0))
    monkeypatch.setattr(
        page_module, "doctor", lambda *given, **options: examining.doctor(*given, **options, thresholds=limits)
    )
    with engine.connect() as connection:
        connection.exec_driver_sql("SELECT pg_current_xact_id(), 'the secret'")
        page = await page_of(client_of)
        connection.rollback()
    assert "idle_in_transaction" in page
    assert "the secret" not in page


async def test_findings_are_no_code(client_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    finding = Finding(
        severity="notice", code="x", queue=CODE, summary=CODE, consequence=CODE, fixes=(CODE, "SELECT 1;")
    )
    with found(monkeypatch, finding):
        response = await client_of().get("/health")
    assert CODE not in response.text
    assert response.text.count("&lt;script&gt;") >= 3


async def test_no_queue_is_not_examined(client_of: Any, engine: sa.Engine) -> None:
    with sent_statements(engine) as sent:
        await page_of(client_of, access=lambda _: Access(read=False))
    assert sent == []


# -- the page of all schedules -------------------------------------------------------------------------------------


@pytest.fixture
def change(queues: Any, engine: sa.Engine) -> Any:
    """Declare schedules of two queues, and return a function that executes SQL."""
    schedules = [
        Schedule("nightly", queues.Invoice, cron="0 3 * * *", timezone="Europe/Berlin", values={"note": "the secret"}),
        Schedule("heartbeat", queues.Email, every=timedelta(minutes=5), values={"recipient": "ada@example.com"}),
    ]
    groups = schedule_groups(schedules, "test")
    queues.metadata.create_all(engine)
    with Session(engine) as session:
        for group in groups:
            declare(session, group)
        session.commit()

    return partial(execute, engine)


async def test_schedules_of_all_queues(client_of: Any, change: Any) -> None:
    change("UPDATE sqlaqueue_schedule SET next_tick = '2126-01-01 02:00+00' WHERE name = 'nightly'")
    page = await page_of(client_of, "schedules")
    assert page.index(">heartbeat<") < page.index(">nightly<")
    assert "at 03:00 every day, Europe/Berlin" in page
    assert 'datetime="2126-01-01T02:00:00+00:00"' in page
    # The two after it.
    assert 'datetime="2126-01-02T02:00:00+00:00"' in page
    assert "the secret" in page
    # No process has looked at the other one.
    assert "not started" in page


async def test_states(client_of: Any, change: Any) -> None:
    change(
        "UPDATE sqlaqueue_schedule SET next_tick = now() - interval '2 hours', last_error = 'no_values: ' "
        "WHERE name = 'nightly'"
    )
    change("UPDATE sqlaqueue_schedule SET paused_at = now() WHERE name = 'heartbeat'")
    page = await page_of(client_of, "schedules")
    for text in ("due 2 h", ">error<", "no_values: ", ">paused<"):
        assert text in page
    assert ">on time<" not in page


async def test_buttons_are_offered_to_whom_they_are_allowed(client_of: Any, change: Any) -> None:
    act: Any
    for act, shown in ((True, 2), ({"invoice": ["schedule"]}, 1), ({"invoice": ["pause"]}, 0), (False, 0)):
        access = Access(read=True, act=act)
        page = await page_of(client_of, "schedules", access=lambda _, access=access: access)
        assert page.count("Run now") == shown
        if shown:
            assert 'action="./schedules/run"' in page
            assert '<input type="hidden" name="queue" value="invoice">' in page


async def test_schedules_of_other_queues_are_not_shown(client_of: Any, change: Any) -> None:
    page = await page_of(client_of, "schedules", access=lambda _: Access(read=["email"]))
    assert "heartbeat" in page
    assert "nightly" not in page


async def test_redacted_values_are_not_shown(client_of: Any, change: Any) -> None:
    change("UPDATE sqlaqueue_schedule SET last_error = 'the secret: x' WHERE name = 'nightly'")
    page = await page_of(client_of, "schedules", redact=["Invoice.note", "last_error"])
    assert "the secret" not in page
    assert page.count("redacted") == 2
    assert "ada@example.com" in page


async def test_names_are_no_code(client_of: Any, change: Any) -> None:
    change(f"UPDATE sqlaqueue_schedule SET name = '{CODE}', last_error = '{CODE}' WHERE name = 'nightly'")
    assert CODE in await page_of(client_of, "schedules")


async def test_without_tables_there_are_no_schedules(client_of: Any, engine: sa.Engine) -> None:
    with sent_statements(engine) as sent:
        page = await page_of(client_of, "schedules")
    assert "No schedules" in page
    # The queues share one table, which is looked for once.
    assert len([each for each, _ in sent if "to_regclass" in each]) == 1


async def test_a_locked_table_is_said(client_of: Any, change: Any, engine: sa.Engine) -> None:
    with engine.connect() as connection:
        connection.exec_driver_sql("LOCK TABLE sqlaqueue_schedule IN ACCESS EXCLUSIVE MODE")
        page = await page_of(client_of, "schedules")
        connection.rollback()
    assert "A table is locked by another session" in page or "Reading this took too long" in page
    assert "No schedules" not in page


async def test_a_schedule_of_any_name_can_be_paused(client_of: Any, change: Any, engine: sa.Engine) -> None:
    for name in ("a/b", "..", ".", "%2f", "~x", "a?b#c", "\u00fc \\", CODE):
        change("UPDATE sqlaqueue_schedule SET name = :name, paused_at = NULL WHERE queue = 'invoice'", name=name)
        browser = client_of()
        page = await browser.get("/schedules")
        fields = [html.unescape(each) for each in re.findall(r'name="schedule" value="([^"]*)"', page.text)]
        assert name in fields
        response = await browser.post("/schedules/pause", data={"queue": "invoice", "schedule": name})
        assert response.status_code == 303, response.text
        assert execute(engine, "SELECT array_agg(name) FROM sqlaqueue_schedule WHERE paused_at IS NOT NULL") == [name]


# -- failed jobs, repairs and buttons ------------------------------------------------------------------------------


def failed_jobs(engine: sa.Engine, number: int, error: str, hours: float = 0.5, table: str = "invoice") -> None:
    execute(
        engine,
        f"INSERT INTO {table} (status, priority, attempts, max_attempts, created_at, run_at, finished_at, last_error) "
        "SELECT 'failed', 0, 1, 1, now(), now(), now() - :hours * interval '1 hour', :error "
        "FROM generate_series(1, :number)",
        number=number,
        error=error,
        hours=hours,
    )


async def test_failed_jobs_are_not_nothing(client_of: Any, engine: sa.Engine) -> None:
    failed_jobs(engine, 3, "ValueError: x")
    failed_jobs(engine, 2, "KeyError: y", hours=5)
    failed_jobs(engine, 9, "OSError: long ago", hours=30)
    page = await page_of(client_of)
    assert "Nothing is wrong" not in page
    assert "5 jobs have failed</a> within the last day, 3 of them within the last hour." in page
    assert page.index(">ValueError</a>: 3, ") < page.index(">KeyError</a>: 2.")
    assert 'href="./queues/invoice/jobs?state=failed&error=ValueError"' in page
    assert "OSError" not in page
    assert "finding--critical" not in page
    redacted = await page_of(client_of, redact=["invoice.last_error"])
    assert "5 jobs have failed</a> within the last day" in redacted
    assert "ValueError" not in redacted
    assert "Nothing is wrong" in await page_of(client_of, access=lambda _: Access(read=["email"]))


async def test_jobs_that_have_failed_longer_ago_are_no_finding(client_of: Any, engine: sa.Engine) -> None:
    failed_jobs(engine, 9, "OSError: long ago", hours=30)
    assert "Nothing is wrong" in await page_of(client_of)


def due(engine: sa.Engine) -> None:
    execute(
        engine,
        "INSERT INTO invoice (status, priority, attempts, max_attempts, created_at, run_at) "
        "VALUES ('pending', 0, 0, 5, now() - interval '1 hour', now() - interval '1 hour')",
    )


def heartbeat(engine: sa.Engine, name: str, handlers: str, *, alive: bool = False) -> None:
    execute(
        engine,
        "INSERT INTO sqlaqueue_consumer (id, queue, name, host, pid, version, listening, running, unclaimable, "
        "heartbeat_at, expires_at) VALUES (:name, 'invoice', :name, 'web', 1, :version, true, '[]', "
        "CAST(:about AS jsonb), now(), now() + :left * interval '1 min')",
        name=name,
        version=__version__,
        about=f"[{handlers}]",
        left=1 if alive else -1,
    )


async def test_a_command_names_the_handler_that_heartbeats_name(client_of: Any, engine: sa.Engine) -> None:
    due(engine)
    in_words = await page_of(client_of)
    assert "no_consumer" in in_words
    assert "MODULE" not in in_words
    assert "Start a worker with the function that handles its jobs: no heartbeat names it." in in_words
    heartbeat(engine, "web:1", '{"handlers": ["app.jobs:send"]}')
    assert "Invoice=app.jobs:send</code>" in await page_of(client_of)
    # Which of two is not known.
    heartbeat(engine, "web:2", '{"handlers": ["app.jobs:other"]}')
    assert "MODULE" not in await page_of(client_of)


@pytest.mark.parametrize("name", ["app.jobs:make.<locals>.send", "sqlaqueue.functions:FunctionMixin.run", "x; rm -rf"])
async def test_a_handler_that_no_command_can_name_is_left_out(client_of: Any, engine: sa.Engine, name: str) -> None:
    due(engine)
    heartbeat(engine, "web:1", f'{{"handlers": ["{name}"]}}')
    page = await page_of(client_of)
    assert name not in page
    assert "no heartbeat names it" in page


async def test_a_paused_queue_and_expired_leases_have_buttons(client_of: Any, engine: sa.Engine) -> None:
    due(engine)
    heartbeat(engine, "web:1", "", alive=True)
    execute(engine, "INSERT INTO sqlaqueue_control (queue, key) VALUES ('invoice', '[]')")
    execute(
        engine,
        "INSERT INTO email (recipient, status, lease_token, lease_expires_at) "
        "VALUES ('ada', 'processing', gen_random_uuid(), now() - interval '1 hour')",
    )
    page = await page_of(client_of)
    assert 'action="./queues/invoice/actions/resume"' in page
    assert 'action="./queues/email/actions/rescue"' in page
    reader = await page_of(client_of, access=lambda _: Access(read=True))
    assert "paused" in reader
    assert "/actions/" not in reader


async def test_a_queue_whose_consumers_are_all_quiet_is_a_finding(client_of: Any, engine: sa.Engine) -> None:
    due(engine)
    heartbeat(engine, "web:1", '{"handlers": ["app.jobs:send"], "quiet": true}', alive=True)
    page = await page_of(client_of)
    assert "all_quiet" in page
    assert "Invoice --resume web:1</code>" in page
    assert 'href="./workers">Consumers</a></div>' in page
    assert "backlog" not in page
    heartbeat(engine, "web:2", '{"handlers": ["app.jobs:send"]}', alive=True)
    assert "all_quiet" not in await page_of(client_of)
