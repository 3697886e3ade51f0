"""The page with the jobs of a queue, the list to which actions come back, and keys that Python does not have."""

import html
import logging
import re
from html import unescape
from typing import Any
from urllib.parse import unquote, urljoin

import httpx
import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import sessionmaker

from sqlaqueue.web import Access, Dashboard
from sqlaqueue.web.data import bulk
from tests.models import execute
from tests.servers import Database
from tests.web.conftest import act, ask, client, everything, follow, hidden
from tests.web.jobs import add, created, make_window_small, states
from tests.web.models import Queues, make_daily


def hrefs(text: str, rel: str) -> list[str]:
    return [html.unescape(each) for each in re.findall(rf'rel="{rel}" href="([^"]+)"', text)]


async def test_lists_jobs_with_their_columns(client_of: Any, queues: Any, engine: sa.Engine) -> None:
    add(
        engine,
        queues.Email(id=2**62, recipient="ada@example.com", subject="<script>alert(1)</script>", status="failed"),
    )
    response = await client_of().get("/queues/email/jobs")
    assert response.status_code == 200, response.text
    assert str(2**62) in response.text
    assert "<script>alert" not in response.text
    assert "&lt;script&gt;alert(1)" in response.text


async def test_bad_parameter_is_named(client_of: Any) -> None:
    for query, parameter in (
        ("f.big=x", "f.big"),
        ("f.nothing=1", "f.nothing"),
        ("f.big=99999999999999999999", "f.big"),
        ("sort=subject", "sort"),
        ("sort=--id", "sort"),
        ("after=abc", "after"),
        ("state=done", "state"),
        ("columns=id,secret", "columns"),
        ("f.at.min=yesterday", "f.at.min"),
        ("job=x", "job"),
        ("f.kind=OTHER", "f.kind"),
        ("f.urgent=1", "f.urgent"),
        ("f.reference=1", "f.reference"),
        ("f.big=1&f.big=2", "f.big"),
        ("f.subject=%00", ""),
    ):
        response = await client_of().get(f"/queues/email/jobs?{query}")
        assert response.status_code == 400, query
        assert parameter in response.text


async def test_a_list_has_some_conditions_only(client_of: Any) -> None:
    """Each has a link with all others: a page with a thousand would have megabytes."""
    conditions = [(f"f.payload.json.a{number}", "x") for number in range(51)]
    for path in ("/queues/email/jobs", "/queues/email/jobs.csv", "/api/queues/email/jobs"):
        assert (await client_of().get(path, params=conditions[:50])).status_code == 200
        response = await client_of().get(path, params=conditions)
        assert response.status_code == 400
        assert "conditions: use at most 50." in response.text


async def test_pages_follow_their_links(client_of: Any, queues: Any, engine: sa.Engine) -> None:
    add(engine, *(queues.Picture(tenant="a,b", name=f"x {number:03}") for number in range(120)))
    client, seen, url = client_of(), [], "/queues/picture/jobs?sort=tenant"
    while url:
        response = await client.get(url)
        assert response.status_code == 200, response.text
        seen += re.findall(r'name="key" value="([^"]+)"', response.text)
        url = next((urljoin(str(response.url), each) for each in hrefs(response.text, "next")), "")
    assert [html.unescape(each) for each in seen] == [f'"a,b",x {number:03}' for number in range(120)]
    (back,) = hrefs(response.text, "prev")
    response = await client.get(urljoin(str(response.url), back))
    assert response.status_code == 200


async def test_filter_tabs_and_order_are_kept_in_links(client_of: Any, queues: Any, engine: sa.Engine) -> None:
    jobs = [queues.Email(recipient="ada@example.com", subject=f"s{number}", customer_id=None) for number in range(60)]
    add(engine, *jobs)
    client = client_of()
    url = "/queues/email/jobs?state=pending&f.recipient=ada%40example.com&sort=recipient&columns=subject,recipient"
    response = await client.get(url)
    assert 'aria-sort="ascending"' in response.text
    (following,) = hrefs(response.text, "next")
    for kept in ("state=pending", "f.recipient=ada%40example.com", "sort=recipient", "columns=subject%2Crecipient"):
        assert kept in following
    removed = re.findall(r'href="([^"]+)" aria-label="Remove the condition recipient = ada@example.com"', response.text)
    assert "f.recipient" not in removed[0]
    assert "state=pending" in removed[0]
    assert (await client.get(urljoin(str(response.url), html.unescape(removed[0])))).status_code == 200
    tabs = re.findall(r'<a href="([^"]+)"(?: aria-current="page")?>(\w+) <span', response.text)
    assert [name for _, name in tabs] == ["All", "Pending", "Processing", "Completed", "Failed", "Cancelled"]
    for tab, _ in tabs:
        assert (await client.get(urljoin(str(response.url), html.unescape(tab)))).status_code == 200


async def test_order_that_depends_on_the_filter_is_dropped_with_it(
    client_of: Any, queues: Any, engine: sa.Engine
) -> None:
    add(engine, queues.Email(recipient="ada@example.com"))
    response = await client_of().get("/queues/email/jobs?state=pending&sort=priority&f.recipient=ada%40example.com")
    assert response.status_code == 200
    (removed,) = re.findall(r'href="([^"]+)" aria-label="Remove the condition', response.text)
    assert "sort" not in removed
    assert 'name="sort"' not in response.text.split("job-list")[0]


async def test_empty_lists_say_what_to_do(client_of: Any) -> None:
    for state in ("", "pending", "failed", "completed", "cancelled", "processing"):
        response = await client_of().get("/queues/email/jobs", params={"state": state} if state else {})
        assert response.status_code == 200
        assert 'class="empty-title">No ' in response.text
        response = await client_of().get("/queues/email/jobs", params={"f.urgent": "true", **response.url.params})
        assert "No job meets these conditions." in response.text
        assert "Remove all conditions" in response.text


async def test_links_and_actions_are_those_that_the_application_allows(
    client_of: Any, queues: Any, engine: sa.Engine
) -> None:
    add(engine, queues.Customer(id=7, name="Ada"))
    add(engine, queues.Email(id=5, recipient="a b&c", customer_id=7))
    links = {"Email.customer_id": "https://shop.example/{value}", "Email.recipient": "mailto.html?to={value}"}
    response = await client_of(links=links).get("/queues/email/jobs?state=pending")
    assert '<a href="https://shop.example/7" rel="noreferrer">7</a>' in response.text
    assert "mailto.html?to=a%20b%26c" in response.text
    assert 'name="action" value="cancel"' in response.text
    assert 'value="purge"' not in response.text
    reader = client_of(access=lambda _: Access(read=True), redact=["Email.recipient"])
    response = await reader.get("/queues/email/jobs")
    assert 'name="action"' not in response.text
    assert 'type="checkbox" form=' not in response.text
    assert "a b&amp;c" not in response.text
    assert "redacted" in response.text
    assert "f.recipient" not in response.text


async def test_search_that_ended_early_goes_on(
    client_of: Any, queues: Any, engine: sa.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_window_small(monkeypatch, 10)
    add(engine, *(queues.Invoice(id=number, note="odd" if number == 3 else "even") for number in range(1, 31)))
    client, url, pages_seen = client_of(), "/queues/invoice/jobs?f.note=odd", 0
    while True:
        response = await client.get(url)
        assert response.status_code == 200
        pages_seen += 1
        if 'value="3"' in response.text:
            break
        assert "found in 10 examined rows" in response.text
        (further,) = re.findall(r'href="([^"]+)">Search on', response.text)
        url = urljoin(str(response.url), html.unescape(further))
    assert pages_seen == 3


async def test_problem_of_the_list_is_shown_in_its_place(client_of: Any, queues: Any, engine: sa.Engine) -> None:
    execute(engine, "ALTER TABLE invoice DROP COLUMN note")
    response = await client_of().get("/queues/invoice/jobs")
    assert response.status_code == 200
    assert "A column is missing" in response.text


async def test_jobs_of_no_state_have_a_list_of_their_own(client_of: Any, queues: Any, engine: sa.Engine) -> None:
    add(engine, *(queues.Email(id=number, recipient="a") for number in range(1, 6)))
    execute(engine, "UPDATE email SET status = 'strange' WHERE id IN (2, 4)")
    client = client_of()
    response = await client.get("/queues/email/jobs")
    counts = dict(re.findall(r'">(\w+) <span class="count"[^>]*>([^<]+)</span>', response.text))
    assert counts == {
        "All": "5",
        "Pending": "3",
        "Due": "3",
        "Processing": "0",
        "Expired": "0",
        "Completed": "0",
        "Failed": "0",
        "Cancelled": "0",
        "Other": "2",
    }
    (tab,) = re.findall(r'<a href="([^"]+)">Other ', response.text)
    response = await client.get(urljoin(str(response.url), html.unescape(tab)))
    assert response.status_code == 200, response.text
    assert re.findall(r"key=(\d+)", response.text) == ["4", "2"]
    assert "cannot be requeued, cancelled or deleted here" in response.text
    assert 'name="action"' not in response.text
    # The preview of an action on all jobs counts them as well, and no action changes them.
    shown = await client.get("/queues/email/confirm?action=cancel&all=1")
    assert "left alone: the queue does not use this status" in shown.text
    shown = await client.get("/queues/email/confirm?action=purge&all=1&state=other")
    assert "Delete 0 jobs?" in shown.text
    execute(engine, "DELETE FROM email WHERE status = 'strange'")
    assert ">Other <" not in (await client.get("/queues/email/jobs")).text
    response = await client.get("/queues/email/jobs?state=other")
    assert ">Other <" in response.text
    assert "No other jobs." in response.text


async def test_empty_parameters_are_taken_out_of_the_url(client_of: Any, queues: Any, engine: sa.Engine) -> None:
    add(engine, queues.Email(recipient="a b&c"), queues.Email(recipient="d"))
    client = client_of()
    listed = await client.get("/queues/email/jobs")
    (forms,) = re.findall(r'<div class="filter">.*?<section', listed.text, re.DOTALL)
    names = ["f.recipient", "f.total.min", "error", "job", *re.findall(r' name="([^"]+)"', forms)]
    assert {"q", "add", "value", "time", "within", "since", "until"} <= {*names}
    kept = {"f.recipient": "a b&c", "state": "pending", "notice": "unchanged:2"}
    response = await client.get("/queues/email/jobs", params={**dict.fromkeys(names, ""), **kept})
    assert response.status_code == 303
    target = response.url.join(response.headers["location"])
    assert target.path == "/queues/email/jobs"
    assert dict(target.params.multi_items()) == kept
    shown = await client.get(target)
    assert shown.status_code == 200
    assert "2 jobs were not changed." in shown.text
    assert len(re.findall(r'name="key"', shown.text)) == 1
    response = await client.get("/queues/email/jobs", params=dict.fromkeys(names, ""))
    assert response.headers["location"] == "../../queues/email/jobs"
    # What is no condition of this queue is told, not left out.
    assert (await client.get("/queues/email/jobs?f.nothing=")).status_code == 400


async def test_an_action_on_all_jobs_says_how_many_match(
    client_of: Any, queues: Any, engine: sa.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(engine, *(queues.Invoice(id=number, note="odd" if number % 2 else "even") for number in range(1, 31)))
    client = client_of()
    for query, label in (
        ("", "All 30 matching jobs"),
        ("f.note=odd", "All 15 matching jobs"),
        ("job=3", "The 1 matching job"),
    ):
        shown = await client.get(f"/queues/invoice/jobs?{query}")
        assert f"<summary>{label}</summary>" in shown.text
    make_window_small(monkeypatch, 10)
    shown = await client.get("/queues/invoice/jobs?f.note=odd")
    assert "<summary>All matching jobs</summary>" in shown.text
    assert "5+ jobs" in shown.text


# -- the list from which jobs are chosen: the user comes back to it, and never to another page ---------------------


def form_of(text: str, name: str) -> list[tuple[str, str]]:
    (form,) = re.findall(rf'<form id="{name}".*?</form>', text, re.DOTALL)
    return hidden(form)


def back_of(response: httpx.Response) -> str:
    """Return where the preview of an action leads back to."""
    (href,) = re.findall(r'<a class="button" href="([^"]*)">Go back</a>', response.text)
    return str(response.url.join(unescape(href)))


@pytest.mark.parametrize("method", ["confirm", "act"])
async def test_nothing_selected_leads_back_to_the_list(
    engine: sa.Engine, queues: Queues, client_of: Any, method: str
) -> None:
    add(engine, queues.Email(recipient="a&b"))
    async with client_of() as browser:
        listed = await browser.get("/queues/email/jobs?state=pending&f.recipient=a%26b&sort=id&columns=recipient")
        fields = dict(form_of(listed.text, "selected-jobs"))
        if method == "confirm":
            response = await browser.get("/queues/email/confirm", params={**fields, "action": "cancel"})
        else:
            response = await browser.post("/queues/email/actions/cancel", data=fields)
        shown = await follow(browser, response)
    assert shown.status_code == 200
    assert "No job is selected." in shown.text
    query = "state=pending&f.recipient=a%26b&sort=id&columns=recipient"
    assert str(shown.url).startswith(f"http://localhost/queues/email/jobs?{query}&notice=")
    assert states(engine, queues.Email) == {"1": "pending"}


@pytest.mark.parametrize("form", ["selected-jobs", "all-jobs"])
@pytest.mark.parametrize("count", [1, 60])
async def test_the_list_is_kept_through_an_action(
    engine: sa.Engine, queues: Queues, client_of: Any, form: str, count: int
) -> None:
    add(engine, *(queues.Email(recipient="a&list=b", subject="x") for _ in range(count + 1)))
    query = "state=pending&f.recipient=a%26list%3Db&sort=id&columns=recipient"
    target = f"http://localhost/queues/email/jobs?{query}"
    async with client_of() as browser:
        listed = await browser.get(target)
        keys = [("key", key) for key in re.findall(r'name="key" value="([^"]+)"', listed.text)[:count]]
        chosen = [*form_of(listed.text, form), *(keys if form == "selected-jobs" else [])]
        shown = await browser.get("/queues/email/confirm", params=[("action", "cancel"), *chosen])
        assert back_of(shown) == target
        fields: dict[str, list[str]] = {}
        for name, value in hidden(shown.text):
            fields.setdefault(name, []).append(value)
        response = await browser.post("/queues/email/actions/cancel", data=fields)
        assert response.status_code == 303
        assert str(response.url.join(response.headers["location"])).startswith(f"{target}&notice=cancelled%3A")


async def test_the_page_of_a_list_is_kept_and_may_be_empty_then(
    engine: sa.Engine, queues: Queues, client_of: Any
) -> None:
    add(engine, *(queues.Email(recipient="a") for _ in range(51)))
    async with client_of() as browser:
        listed = await browser.get("/queues/email/jobs?state=pending")
        (following,) = re.findall(r'rel="next" href="([^"]+)"', listed.text)
        listed = await browser.get(str(listed.url.join(unescape(following))))
        params = [
            ("action", "cancel"),
            *form_of(listed.text, "selected-jobs"),
            ("key", "51"),
        ]  # in claim order it is the last one
        shown = await browser.get("/queues/email/confirm", params=params)
        assert back_of(shown) == str(listed.url)
        response = await browser.post("/queues/email/actions/cancel", data=dict(hidden(shown.text)))
        shown = await follow(browser, response)
        assert "1 job was cancelled." in shown.text
        assert "No jobs on this page." in shown.text


async def test_a_list_is_never_another_page(engine: sa.Engine, queues: Queues, client_of: Any) -> None:
    add(engine, queues.Email(recipient="a"), queues.Email(recipient="a"))
    for given in ("//evil.example/?state=failed", "https://evil.example/", "../../?notice=purged:9"):
        for keys in ([], ["1", "2"]):
            response = await act(client_of(), "purge", list=given, key=keys)
            location = response.headers["location"]
            assert location.startswith("../../../queues/email/jobs?notice="), location
            assert location.count("notice") == 1


async def test_a_long_list_is_not_carried(queues: Queues, engine: sa.Engine, client_of: Any) -> None:
    add(engine, queues.Email(recipient="é" * 1000, subject="é" * 1000))
    async with client_of() as browser:
        query = {"f.recipient": "é" * 1000, "f.subject": "é" * 1000}
        listed = await browser.get("/queues/email/jobs", params=query)
        assert listed.status_code == 200
        assert form_of(listed.text, "selected-jobs") == []


async def test_the_list_is_kept_by_an_action_that_goes_on(
    engine: sa.Engine, queues: Queues, client_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk, "MOST_AT_ONCE", 2)
    add(engine, *(queues.Email(recipient="a") for _ in range(3)))
    target = "http://localhost/queues/email/jobs?state=pending&sort=id"
    async with client_of() as browser:
        listed = await browser.get(target)
        params = [("action", "cancel"), *form_of(listed.text, "all-jobs")]
        shown = await browser.get("/queues/email/confirm", params=params)
        response = await browser.post("/queues/email/actions/cancel", data=dict(hidden(shown.text)))
        shown = await follow(browser, response)
        assert "Cancel 1 job?" in shown.text
        assert back_of(shown) == target
        response = await browser.post("/queues/email/actions/cancel", data=dict(hidden(shown.text)))
        location = str(response.url.join(response.headers["location"]))
        assert location.partition("&notice=undoable")[0] == f"{target}&notice=cancelled%3A1"


# -- keys that are dates: infinity and years before Christ, which Python does not have -----------------------------

KEYS = ["infinity", "-infinity", "0044-03-15 BC", "12000-01-01"]


@pytest.fixture(params=["update_status", "batch_select", "delete_returning"])
def daily(request: pytest.FixtureRequest, engine: sa.Engine) -> Any:
    model = created(engine, make_daily(request.param))
    for key in (*KEYS, "2031-05-06"):
        execute(engine, "INSERT INTO daily (day) VALUES (CAST(:key AS date))", key=key)
    return model


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
async def test_lists_show_them_and_no_page_fails(
    daily: Any, shared: Database, driver: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine: Any
    if driver == "psycopg":
        engine = sa.create_engine(shared.url("psycopg"), poolclass=sa.NullPool)
        factory: Any = sessionmaker(engine)
    else:
        engine = create_async_engine(shared.url("asyncpg"), poolclass=sa.NullPool)
        factory = async_sessionmaker(engine)
    async with client(Dashboard([daily], factory, access=everything)) as browser:
        for query in ("", "?sort=day", "?sort=-day", "?state=pending"):
            response = await browser.get(f"/queues/daily/jobs{query}")
            assert response.status_code == 200
            assert [key for key in (*KEYS, "2031-05-06") if key not in response.text] == []
        for path in ("/", "/queues/daily", "/queues/daily/claim", "/schedules"):
            assert (await browser.get(path)).status_code == 200
        for key in KEYS:
            for page in ("job", "edit", "confirm"):
                response = await browser.get(f"/queues/daily/{page}", params={"key": key, "action": "cancel"})
                assert response.status_code == 400
            for action in ("cancel", "requeue", "purge", "edit"):
                assert (await browser.post(f"/queues/daily/actions/{action}", data={"key": key})).status_code == 400
    if driver == "asyncpg":
        await engine.dispose()
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_an_action_on_all_jobs_leaves_them_alone(daily: Any, engine: sa.Engine) -> None:
    async with ask(engine, daily) as browser:
        page = await browser.get("/queues/daily/confirm", params={"all": "1", "action": "cancel", "state": "pending"})
        assert page.status_code == 200
        assert "2031-05-06" in page.text
        form = dict(re.findall(r'name="([^"]+)" value="([^"]*)"', page.text))
        answer = await browser.post("/queues/daily/actions/cancel", data=form)
        assert answer.status_code == 303
        assert "cancelled:1" in unquote(answer.headers["location"])
        assert "unchanged" not in answer.headers["location"]
        left = await browser.get("/queues/daily/jobs", params={"state": "pending"})
    assert [key for key in KEYS if key not in left.text] == []
    assert "2031-05-06" not in left.text
