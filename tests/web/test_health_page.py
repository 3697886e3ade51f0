"""The page of the doctor's findings."""

from __future__ import annotations

import html
import importlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa

from sqlaqueue.admin.doctor.examination import Finding, Thresholds
from sqlaqueue.web import Access
from sqlaqueue.web import queues as page_module
from tests.web.queue_data import counting_statements

examining = importlib.import_module("sqlaqueue.admin.doctor.doctor")


@pytest.fixture(autouse=True)
def _durable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out what would be found in each test: the servers of the tests do not wait for a disk."""
    checks = tuple(check for check in examining.CHECKS if check.__name__ != "check_durability")
    monkeypatch.setattr(examining, "CHECKS", checks)


async def page_of(client_of: Any, path: str = "health", *, status: int = 200, **options: Any) -> str:
    response = await client_of(**options).get(f"/{path}")
    assert response.status_code == status, response.text
    return html.unescape(response.text)


def execute(engine: sa.Engine, *statements: str) -> None:
    with engine.begin() as connection:
        for statement in statements:
            connection.exec_driver_sql(statement)


async def test_nothing_is_wrong(client_of: Any) -> None:
    page = await page_of(client_of)
    assert "Nothing is wrong" in page
    assert "finding--" not in page


async def test_findings_are_shown_with_their_fixes_the_worst_first(client_of: Any, engine: sa.Engine) -> None:
    execute(engine, "DROP INDEX ix_email_queue_claim", "DROP TABLE invoice CASCADE")
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
        with counting_statements(engine) as first:
            await browser.get("/health")
        with counting_statements(engine) as second:
            await browser.get("/health")
        assert len(first) > 50
        assert second == []
        with counting_statements(engine) as deep:
            assert "with all jobs and messages" in (await browser.get("/health?deep=1")).text
        assert len(deep) > len(first)


@pytest.mark.parametrize("value", ["2", "", "yes", "-1"])
async def test_deep_is_0_or_1(client_of: Any, value: str) -> None:
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
    code = "<script>alert(1)</script>"
    finding = Finding(
        severity="notice", code="x", queue=code, summary=code, consequence=code, fixes=(code, "SELECT 1;")
    )
    with found(monkeypatch, finding):
        response = await client_of().get("/health")
    assert code not in response.text
    assert response.text.count("&lt;script&gt;") >= 3


async def test_no_queue_is_not_examined(client_of: Any, engine: sa.Engine) -> None:
    with counting_statements(engine) as sent:
        await page_of(client_of, access=lambda _: Access(read=False))
    assert sent == []
