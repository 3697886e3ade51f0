"""The JSON API of the dashboard, the export of a list, and the number on the tab."""

import asyncio
import csv
import io
import json
import re
from collections.abc import Callable
from html import unescape
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session, sessionmaker

from sqlaqueue import Schedule
from sqlaqueue.schedules.schedule import schedule_groups
from sqlaqueue.schedules.store import declare
from sqlaqueue.web import Access, Dashboard, api
from sqlaqueue.web import database as database_module
from sqlaqueue.web import queues as page_module
from sqlaqueue.web.data import job_windows
from sqlaqueue.web.settings import Settings
from tests.models import execute
from tests.web.conftest import ask
from tests.web.jobs import add
from tests.web.models import Queues, make_wide
from tests.web.test_workers import heartbeat


async def answer_of(client_of: Any, path: str, status: int = 200, **options: Any) -> Any:
    response = await client_of(**options).get(f"/api/{path}")
    assert (response.status_code, response.headers["content-type"]) == (status, "application/json"), response.text
    return response.json()


def emails_only(_: Any) -> Access:
    return Access(read=["email"])


# -- the API -----------------------------------------------------------------------------------------------------------


async def test_queues(client_of: Any, queues: Queues, engine: sa.Engine) -> None:
    add(engine, queues.Email(recipient="ada"), queues.Email(recipient="bob", status="failed"))
    found = (await answer_of(client_of, "queues"))["queues"]
    assert [each["name"] for each in found] == ["email", "invoice", "picture"]
    email = await answer_of(client_of, "queues/email")
    assert {name: email[name] for name in ("pending", "due", "processing", "failed", "is_paused", "consumers")} == {
        "pending": 1,
        "due": 1,
        "processing": 0,
        "failed": 1,
        "is_paused": False,
        "consumers": 0,
    }
    assert (email["problem"], email["is_blocked"]) == (None, False)
    execute(engine, "DROP TABLE invoice CASCADE")
    (_, invoice, picture) = (await answer_of(client_of, "queues"))["queues"]
    assert invoice["problem"].startswith("A table is missing.")
    assert picture["problem"] is None


async def test_a_program_sees_what_its_user_sees(client_of: Any, engine: sa.Engine, queues: Queues) -> None:
    heartbeat(engine, "web:1", "email")
    heartbeat(engine, "web:2", "invoice")
    for path, name in [("queues", "queues"), ("consumers", "consumers"), ("schedules", "schedules")]:
        found = await answer_of(client_of, path, access=emails_only)
        assert {each.get("queue", each["name"]) for each in found[name]} <= {"email"}
    for path in ("queues/invoice", "queues/invoice/jobs", "queues/invoice/job?key=1", "nothing", "queues/email/x"):
        assert set(await answer_of(client_of, path, 404, access=emails_only)) == {"error", "advice"}
    refused = await answer_of(client_of, "queues", 403, access=lambda _: None)
    assert refused["error"] == "You have no access to this dashboard."


async def test_consumers(client_of: Any, queues: Queues, engine: sa.Engine) -> None:
    heartbeat(engine, "web:1", running=[["7"]], unclaimable=[{"handlers": ["app:send"], "quiet": True}])
    (found,) = (await answer_of(client_of, "consumers"))["consumers"]
    shown = ("queue", "name", "host", "pid", "handlers", "is_alive", "is_quiet", "is_failing", "running")
    assert [found[name] for name in shown] == ["email", "web:1", "web", 1, ["app:send"], True, True, False, ["7"]]


async def test_schedules(client_of: Any, queues: Queues, engine: sa.Engine) -> None:
    schedule = Schedule("nightly", queues.Email, cron="0 3 * * *", values={"recipient": "secret", "subject": "Hello"})
    (group,) = schedule_groups([schedule], "test")
    queues.metadata.create_all(engine)
    with Session(engine) as session:
        declare(session, group)
        session.commit()
    execute(engine, "UPDATE sqlaqueue_schedule SET last_error = 'it is secret'")
    (found,) = (await answer_of(client_of, "schedules", redact=["recipient", "last_error"]))["schedules"]
    assert (found["name"], found["queue"], found["cron"]) == ("nightly", "email", "0 3 * * *")
    assert (found["timezone"], found["paused_at"], found["late"]) == ("UTC", None, None)
    assert found["values"] == {"recipient": "redacted", "subject": "Hello"}
    assert found["last_error"] == "redacted"


async def test_findings(client_of: Any, queues: Queues, engine: sa.Engine) -> None:
    execute(engine, "DROP INDEX ix_email_queue_claim")
    found = await answer_of(client_of, "findings")
    (missing,) = (each for each in found["findings"] if each["code"] == "missing_index")
    assert (missing["severity"], missing["queue"]) == ("warning", "email")
    assert missing["fixes"]
    add(engine, queues.Email(recipient="ada"))
    heartbeat(engine, unclaimable=[{"failures": 8, "seconds": 5, "error": "the secret is 5"}])
    for redact, shows in ((), True), (["last_error"], False):
        found = await answer_of(client_of, "findings", redact=redact)
        assert "claims_fail" in {each["code"] for each in found["findings"]}
        assert ("the secret is 5" in str(found)) is shows


async def test_jobs_page_by_page(client_of: Any, queues: Queues, engine: sa.Engine) -> None:
    jobs = [queues.Email(recipient="secret", payload={"n": [n, 2.5]}, urgent=n == 1, big=2**60) for n in (1, 2, 3)]
    add(engine, *jobs, queues.Email(recipient="x", subject="x" * 300, status="failed"))
    path = "queues/email/jobs?state=pending&sort=-id&columns=recipient,payload,urgent,big&size=2"
    first = await answer_of(client_of, path, redact=["recipient"])
    assert (first["queue"], first["state"], first["sort"], first["redacted"]) == (
        "email",
        "pending",
        "-id",
        ["recipient"],
    )
    assert [each["key"] for each in first["jobs"]] == ["3", "2"]
    assert first["jobs"][1] == {
        "key": "2",
        "state": "pending",
        "columns": {"payload": {"n": [2, 2.5]}, "urgent": False, "big": 2**60},
        "cut": [],
    }
    last = await answer_of(client_of, f"{path}&after={first['next']}")
    assert ([each["key"] for each in last["jobs"]], last["next"]) == (["1"], None)
    before = await answer_of(client_of, f"{path}&before={last['previous']}")
    assert [each["key"] for each in before["jobs"]] == ["3", "2"]
    (failed,) = (await answer_of(client_of, "queues/email/jobs?state=failed&columns=subject"))["jobs"]
    assert (failed["columns"], failed["cut"]) == ({"subject": "x" * job_windows.SHOWN}, ["subject"])


@pytest.mark.parametrize(
    "query", ["size=0", "size=501", "size=x", "size=%D9%A1", "size=9999999", "f.nothing=1", "after=x"]
)
async def test_wrong_parameters(client_of: Any, query: str) -> None:
    found = await answer_of(client_of, f"queues/email/jobs?{query}", 400)
    assert found["error"].startswith(query.partition("=")[0])


# -- exports -----------------------------------------------------------------------------------------------------------


def make_pages_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "_EXPORTED_AT_ONCE", 2)


async def exported(client_of: Any, path: str, **options: Any) -> str:
    """Return what the link of a page leads to."""
    form = path.partition(" ")[0]
    async with client_of(**options) as browser:
        page = await browser.get(path.partition(" ")[2])
        (href,) = re.findall(rf'<a class="button" href="([^"]+)" download[^>]*>{form}</a>', page.text)
        response = await browser.get(str(page.url.join(unescape(href))))
        assert response.status_code == 200, response.text
        assert response.headers["content-disposition"].startswith('attachment; filename="email-')
        return str(response.text)


async def test_a_list_as_csv(
    client_of: Any,
    queues: Queues,
    engine: sa.Engine,
    monkeypatch: pytest.MonkeyPatch,
    audit: Callable[[], list[str]],
) -> None:
    make_pages_small(monkeypatch)
    jobs = [queues.Email(recipient="secret", subject=f'{n} "a", b\nc', big=-n, status="failed") for n in range(1, 6)]
    add(engine, *jobs, queues.Email(recipient="x"))
    path = "CSV /queues/email/jobs?state=failed&sort=id&columns=recipient,subject,big,day&f.big.max=-2"
    text = await exported(client_of, path, redact=["recipient"])
    rows = [*csv.reader(io.StringIO(text))]
    assert rows == [["key", "subject", "big", "day"], *([f"{n}", f'{n} "a", b\nc', f"{-n}", ""] for n in range(2, 6))]
    assert audit() == ["user='ada' action=export queue='email' count=4 filter='state=failed&f.big.max=-2'"]


async def test_no_cell_is_a_formula(client_of: Any, queues: Queues, engine: sa.Engine) -> None:
    """A spreadsheet executes what begins as one, and the texts of jobs come from anybody."""
    texts = {each: f"'{each}" for each in ("=1+1", "+1", "-1", "@SUM(1)", "\uff1d1")}
    # Where a semicolon separates cells, and where a text with a comma before it is no text in quotes.
    texts |= {"\t=1": "'\t'=1", "\r=1": "'\r'=1", "a;=1": "a;'=1", "a,b\n-1": "a,b\n'-1"}
    texts |= {each: each for each in ("a=1", "a; b", "2030-12-31", "a\nb-1")}
    add(engine, *(queues.Email(recipient=text, big=-1) for text in texts))
    text = await exported(client_of, "CSV /queues/email/jobs?sort=id&columns=recipient,big")
    shown = [row[1:] for row in csv.reader(io.StringIO(text, newline=""))][1:]
    assert shown == [[each, "-1"] for each in texts.values()]


async def test_a_list_as_json(
    client_of: Any, queues: Queues, engine: sa.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_pages_small(monkeypatch)
    assert json.loads(await exported(client_of, "JSON /queues/email/jobs")) == []
    add(engine, *(queues.Email(recipient="x" * 300, payload={"n": n}) for n in range(5)))
    found = json.loads(await exported(client_of, "JSON /queues/email/jobs?sort=id&columns=recipient,payload"))
    assert [each["columns"] for each in found] == [{"recipient": "x" * 300, "payload": {"n": n}} for n in range(5)]
    execute(engine, "UPDATE email SET status = 'failed', last_error = 'ValueError: x\nTraceback'")
    found = json.loads(await exported(client_of, "JSON /queues/email/jobs?sort=id&columns=last_error"))
    assert found[0]["columns"]["last_error"] == "ValueError: x\nTraceback"
    monkeypatch.setattr(api, "_LONGEST", 250)
    found = json.loads(await exported(client_of, "JSON /queues/email/jobs?sort=id&columns=recipient"))
    assert (len(found[0]["columns"]["recipient"]), found[0]["cut"]) == (250, ["recipient"])


async def test_an_export_has_a_limit_and_goes_on_after_a_page(
    client_of: Any, queues: Queues, engine: sa.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_pages_small(monkeypatch)
    monkeypatch.setattr(api, "MOST_EXPORTED", 3)
    add(engine, *(queues.Email(recipient="x") for _ in range(7)))
    first = await answer_of(client_of, "queues/email/jobs?sort=id&size=2")
    path = f"JSON /queues/email/jobs?sort=id&after={first['next']}"
    assert [each["key"] for each in json.loads(await exported(client_of, path))] == ["3", "4", "5"]


async def test_an_export_that_fails_is_broken_off(
    client_of: Any,
    queues: Queues,
    engine: sa.Engine,
    monkeypatch: pytest.MonkeyPatch,
    audit: Callable[[], list[str]],
) -> None:
    make_pages_small(monkeypatch)
    add(engine, *(queues.Email(recipient="x") for _ in range(5)))
    pages, read = [], api.read_page

    def read_once(*arguments: Any) -> Any:
        pages.append(arguments)
        if len(pages) > 1:
            raise OperationalError("SELECT", {}, Exception("canceling statement due to statement timeout"))
        return read(*arguments)

    monkeypatch.setattr(api, "read_page", read_once)
    with pytest.raises(OperationalError):
        await client_of().get("/queues/email/jobs.csv")
    assert audit() == ["user='ada' action=export queue='email' count=2 filter='all jobs'"]


async def test_half_a_pair_of_surrogates_in_json_hides_no_job(engine: sa.Engine) -> None:
    """JSON may have one, as PostgreSQL stores it, and no text in UTF-8 has it."""
    model = make_wide()
    model.metadata.create_all(engine)
    execute(engine, """INSERT INTO "Wide table" ("The Number", plain_json) VALUES (1, '{"\\udfff": "\\ud800"}')""")
    slug = Settings.of([model], (), {}, ()).queues["Wide table"].slug
    async with ask(engine, model) as browser:
        columns = "columns=plain_json"
        for path in (
            f"api/queues/{slug}/jobs?{columns}",
            f"api/queues/{slug}/job?key=1",
            f"queues/{slug}/jobs.json?{columns}",
        ):
            response = await browser.get(f"/{path}")
            assert response.status_code == 200, path
            assert '{"\\udfff": "\\ud800"}' in re.sub(r"\s*\n\s*", "", response.text), path


async def test_some_exports_are_made_at_the_same_time_and_few_of_one_reader(
    client_of: Any, queues: Queues, engine: sa.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has a page in memory, for as long as its browser takes."""
    monkeypatch.setattr(database_module, "_LONGEST_WAIT", 0.2)
    make_pages_small(monkeypatch)
    add(engine, *(queues.Email(recipient="x") for _ in range(5)))
    made = Dashboard(queues.all, sessionmaker(engine), access=lambda asked: Access(read=True, user=asked.headers["x"]))
    go_on, status = asyncio.Event(), list[int]()

    async def export(name: str) -> None:
        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                status.append(message["status"])
            await go_on.wait()

        headers = [(b"host", b"localhost"), (b"x", name.encode())]
        path = "/queues/email/jobs.csv"
        scope = {"type": "http", "method": "GET", "path": path, "query_string": b"", "headers": headers}
        await made(scope, asyncio.Event().wait, send)

    async def started(*names: str) -> list[asyncio.Task[None]]:
        before, tasks = len(status), [asyncio.create_task(export(name)) for name in names]
        while len(status) < before + len(names):
            await asyncio.sleep(0.01)
        return tasks

    tasks = await started("ada", "ada")
    assert status == [200, 200]
    tasks += await started("ada")
    assert status.pop() == 503
    tasks += await started("eve", "eve")
    assert status == [200] * 4
    tasks += await started("bob")
    assert status.pop() == 503
    go_on.set()
    await asyncio.gather(*tasks)
    tasks = await started("bob", "ada")
    assert status == [200] * 6
    await asyncio.gather(*tasks)


async def test_an_export_that_takes_too_long_is_broken_off(
    client_of: Any, queues: Queues, engine: sa.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "_LONGEST_EXPORT", 0.0)
    make_pages_small(monkeypatch)
    add(engine, *(queues.Email(recipient="x") for _ in range(5)))
    async with client_of() as browser:
        with pytest.raises(AssertionError):  # the answer has no end
            await browser.get("/queues/email/jobs.csv")
        monkeypatch.setattr(api, "_LONGEST_EXPORT", 60.0)
        assert (await browser.get("/queues/email/jobs.csv")).status_code == 200


async def test_what_cannot_be_exported(client_of: Any) -> None:
    for path, status in [("jobs.xml", 404), ("jobs.csv?f.nothing=1", 400), ("jobs.csv?before=x", 400)]:
        assert (await client_of().get(f"/queues/email/{path}")).status_code == status
    assert (await client_of(access=emails_only).get("/queues/invoice/jobs.csv")).status_code == 404


# -- the number on the tab ---------------------------------------------------------------------------------------------


async def test_the_title_has_the_number_of_critical_findings(
    client_of: Any, monkeypatch: pytest.MonkeyPatch, engine: sa.Engine
) -> None:
    async with client_of() as browser:
        assert "<title>Queues · sqlaqueue" in (await browser.get("/")).text
        execute(engine, "DROP INDEX ix_email_queue_claim")
        monkeypatch.setattr(page_module, "FINDINGS_SHARED_FOR", 0.0)
        await browser.get("/health")
        page = (await browser.get("/")).text
        number = re.findall(r"<title>\((\d+)\) Queues", page)
        assert number
        assert re.findall(r'<link rel="icon"[^>]* href="./static/icon-critical.svg', page)
