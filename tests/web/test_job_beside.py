"""The page of a job: its error once and first, the jobs beside it in the list, those that failed alike, and JSON."""

import re
from html import unescape
from typing import Any

import httpx
import pytest
import sqlalchemy as sa

from tests.models import add, execute
from tests.web.conftest import follow, hidden
from tests.web.jobs import fail_jobs, make_window_small
from tests.web.models import Queues

ERROR = "ValueError: no stock\nof it"


ATTEMPT = """
INSERT INTO sqlaqueue_attempt (queue, key, attempt, started_at, ended_at, outcome, error)
VALUES ('email', '[1]', :number, now(), now(), :outcome, :error)
"""


def link(response: httpx.Response, rel: str) -> str | None:
    found = re.search(rf'rel="{rel}" href="([^"]+)"', response.text)
    return None if found is None else str(response.url.join(unescape(found[1])))


def title_of(response: httpx.Response) -> str:
    return re.findall(r"<h1>([^<]*)</h1>", response.text)[0]


async def test_an_error_is_shown_once_and_first(engine: sa.Engine, queues: Queues, client_of: Any) -> None:
    add(engine, queues.Email(recipient="a", subject="Hello"))
    fail_jobs(engine, queues.Email, 1, error=ERROR)
    execute(engine, ATTEMPT, number=1, outcome="retried", error=ERROR)
    execute(engine, ATTEMPT, number=2, outcome="failed", error=ERROR)
    async with client_of() as browser:
        page = (await browser.get("/queues/email/job?key=1")).text
    assert page.count("no stock") == 1
    assert page.count("With the error above.") == 2
    titles = re.findall(r'<h2 id="([\w-]+)-title">', page)
    assert titles == ["job-state", "job-error", "job-life", "job-arguments", "job-columns"]


async def test_another_error_of_an_attempt_stays(engine: sa.Engine, queues: Queues, client_of: Any) -> None:
    add(engine, queues.Email(recipient="a"))
    fail_jobs(engine, queues.Email, 1, error=ERROR)
    execute(engine, ATTEMPT, number=1, outcome="retried", error="KeyError: first")
    execute(engine, ATTEMPT, number=2, outcome="failed", error=ERROR)
    async with client_of() as browser:
        page = (await browser.get("/queues/email/job?key=1")).text
    assert page.count("KeyError: first") == page.count("no stock") == 1


async def test_empty_columns_of_the_queue_are_folded(engine: sa.Engine, queues: Queues, client_of: Any) -> None:
    add(engine, queues.Email(recipient="a"))
    async with client_of() as browser:
        page = (await browser.get("/queues/email/job?key=1")).text
    shown, _, folded = page.partition('<details class="panel-body" id="empty-columns">')
    assert "finished_at" in folded
    assert "finished_at" not in shown.partition('id="job-columns"')[2]
    assert "run_at" in shown.partition('id="job-columns"')[2]


async def test_the_jobs_beside_it_in_the_list(engine: sa.Engine, queues: Queues, client_of: Any) -> None:
    add(engine, *(queues.Email(recipient="ab"[number % 2]) for number in range(10)))
    fail_jobs(engine, queues.Email, 10)
    async with client_of() as browser:
        listed = await browser.get("/queues/email/jobs?state=failed&f.recipient=a&sort=-id")
        (href,) = re.findall(r'<a href="([^"]+)">5</a>', listed.text)
        shown = await browser.get(str(listed.url.join(unescape(href))))
        assert title_of(shown) == "Job 5"
        keys = []
        page = shown
        while (following := link(page, "next")) is not None:
            page = await browser.get(following)
            keys.append(title_of(page))
        assert keys == ["Job 3", "Job 1"]
        page = await browser.get(link(shown, "prev") or "")
        assert title_of(page) == "Job 7"
        (back,) = re.findall(r'<a href="([^"]+)">Back to the list</a>', page.text)
        target = await browser.get(str(page.url.join(unescape(back))))
        assert re.findall(r'class="key"><a [^>]*>(\d+)<', target.text) == ["9", "7", "5", "3", "1"]
        # A job that was requeued is gone from the list, and its page still leads on.
        fields = dict(hidden(page.text.partition("actions/requeue")[2].partition("</form>")[0]))
        after = await follow(browser, await browser.post("/queues/email/actions/requeue", data=fields))
        assert title_of(after) == "Job 7"
        assert "1 job is pending again." in after.text
        assert title_of(await browser.get(link(after, "next") or "")) == "Job 5"
        # After a deletion the list is left.
        asked = await browser.get("/queues/email/confirm", params={**fields, "action": "purge", "key": "5"})
        gone = await follow(browser, await browser.post("/queues/email/actions/purge", data=dict(hidden(asked.text))))
        assert "/queues/email/jobs?" in str(gone.url)


async def test_a_place_that_the_list_does_not_have_leads_nowhere(
    engine: sa.Engine, queues: Queues, client_of: Any
) -> None:
    add(engine, queues.Email(recipient="a"))
    async with client_of() as browser:
        shown = await browser.get("/queues/email/job?key=1&list=state%3Dpending&at=nonsense")
        assert shown.status_code == 200
        assert link(shown, "next") is link(shown, "prev") is None
        assert (await browser.get("/queues/email/job?key=1&at=a&at=b")).status_code == 400
        assert (await browser.get("/queues/email/job?key=1&list=state%3Dnone&at=a")).status_code == 400
        assert "Back to the list" not in (await browser.get("/queues/email/job?key=1")).text


async def test_failed_jobs_with_the_same_error_are_counted(
    engine: sa.Engine, queues: Queues, client_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are those of its group of failures: with the same kind and message, whatever the numbers in it."""
    errors = (
        "ValueError: no stock of item 5 in 'a'\nof it",
        "ValueError: no stock of item 61 in 'b'",
        "ValueError: no stock of item 7 in 'c'",
        "ValueError: no such item",
        "it's 5 <b>o'clock</b>",
    )
    for error in errors:
        add(engine, queues.Email(recipient="a", status="failed", last_error=error))
    add(engine, queues.Email(recipient="a"), queues.Email(recipient="a", status="completed", last_error=errors[0]))
    async with client_of() as browser:

        async def group(key: int) -> tuple[str, str, list[str]] | None:
            page = await browser.get(f"/queues/email/job?key={key}")
            found = re.search(r'<a href="([^"]+)">([^<]+ with this error)</a>(.*?)</p>', page.text)
            if found is None:
                return None
            listed = await browser.get(str(page.url.join(unescape(found[1]))))
            keys = re.findall(r'class="key"><a [^>]*>(\d+)<', listed.text)
            return found[2], found[3], sorted(keys)

        text = ": <b>ValueError</b> no stock of item … in …"
        for key in (1, 2, 3):
            assert await group(key) == ("3 failed jobs with this error", text, ["1", "2", "3"])
        # The error is above, and shown once.
        assert await group(4) == ("1 failed job with this error", "", ["4"])
        assert await group(5) == ("1 failed job with this error", ": it&#39;s … &lt;b&gt;o&#39;clock&lt;/b&gt;", ["5"])
        assert await group(6) is None
        assert await group(7) is None
        make_window_small(monkeypatch, 2)
        found = await group(1)
        assert found is not None
        assert re.fullmatch(r"\d\+ failed jobs with this error", found[0])
    async with client_of(redact=["last_error"]) as browser:
        page = (await browser.get("/queues/email/job?key=1")).text
        assert ("ValueError" in page, "with this error" in page) == (False, False)


async def test_a_job_as_json(engine: sa.Engine, queues: Queues, client_of: Any) -> None:
    add(engine, queues.Email(recipient="secret", subject="Hello", payload={"a": [1, 2.5]}, urgent=True, big=2**60))
    fail_jobs(engine, queues.Email, 1, error=ERROR)
    execute(engine, ATTEMPT, number=1, outcome="failed", error=ERROR)
    async with client_of(redact=["recipient"]) as browser:
        page = await browser.get("/queues/email/job?key=1")
        (href,) = re.findall(r'<a class="button" href="([^"]+)">JSON</a>', page.text)
        answer = await browser.get(str(page.url.join(unescape(href))))
        assert answer.headers["content-type"] == "application/json"
        assert "secret" not in answer.text
        found = answer.json()
        assert found["columns"]["payload"] == {"a": [1, 2.5]}
        assert found["columns"]["urgent"] is True
        assert found["columns"]["big"] == 2**60
        assert found["columns"]["last_error"] == ERROR
        assert (found["state"], found["redacted"], found["cut"]) == ("failed", ["recipient"], [])
        assert [each["outcome"] for each in found["attempts"]] == ["failed"]
        assert (await browser.get("/api/queues/email/job?key=99")).status_code == 404
        assert (await browser.get("/api/queues/email/job?key=x")).status_code == 400
