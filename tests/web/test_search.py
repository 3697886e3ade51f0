"""The search: what a line means, over all queues and in one list, and that it tells nothing that is hidden."""

import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from html import unescape
from typing import Any
from urllib.parse import urlsplit
from zoneinfo import ZoneInfo

import anyio
import httpx
import pytest
import sqlalchemy as sa

from sqlaqueue.web import Access, Dashboard
from sqlaqueue.web.data.reader import ParameterError
from sqlaqueue.web.rendering import Zone
from sqlaqueue.web.search import parse_line, with_added
from tests.models import execute
from tests.web.conftest import client
from tests.web.jobs import KINDS, add, columns, fail_jobs, make_window_small, new_queue, page
from tests.web.models import Queues, make_wide

BERLIN = Zone("Europe/Berlin", ZoneInfo("Europe/Berlin"))


@pytest.mark.parametrize(
    ("line", "conditions", "words"),
    [
        ("", {}, ""),
        ("number:5", {"f.number": "5"}, ""),
        ("number:>=5 number:<=7", {"f.number.min": "5", "f.number.max": "7"}, ""),
        ("number:5..7", {"f.number.min": "5", "f.number.max": "7"}, ""),
        ("number:5..", {"f.number.min": "5"}, ""),
        ("name:ada", {"f.name": "ada"}, ""),
        ('name:"ada lovelace" flag:true', {"f.name": "ada lovelace", "f.flag": "true"}, ""),
        ("name:ad*", {"f.name.starts": "ad"}, ""),
        ('name:~"a b"', {"f.name.contains": "a b"}, ""),
        ('name:">=5*"', {"f.name": ">=5*"}, ""),
        ("name:null", {"f.name.null": "yes"}, ""),
        ("name:!null", {"f.name.null": "no"}, ""),
        ('name:"null"', {"f.name": "null"}, ""),
        ("at:1h", {"f.at.last": "1h"}, ""),
        ("at:>=2030-06-01T08:00", {"f.at.min": "2030-06-01T08:00:00+02:00"}, ""),
        ("at:2030-06-01T08:00Z", {"f.at": "2030-06-01T08:00Z"}, ""),
        ("naive:>=2030-06-01T08:00", {"f.naive.min": "2030-06-01T08:00"}, ""),
        ("document.customer.id:5", {"f.document.json.customer.id": "5"}, ""),
        ('plain_json.a:"x y"', {"f.plain_json.json.a": "x y"}, ""),
        ("document:null", {"f.document.null": "yes"}, ""),
        ("state:failed error:KeyError key:7", {"state": "failed", "error": "KeyError", "job": "7"}, ""),
        # By the name of the attribute, or by what the queue uses it for.
        ("last_error:~smtp problem:x", {"f.problem.contains": "smtp", "f.problem": "x"}, ""),
        ("no answer", {}, "no answer"),
        ('"number:5"', {}, "number:5"),
        ("TimeoutError: no answer", {}, "TimeoutError: no answer"),
        ("number:5 no answer", {"f.number": "5"}, "no answer"),
        ('"cut off', {}, "cut off"),
    ],
)
def test_what_a_line_means(line: str, conditions: dict[str, str], words: str) -> None:
    found = parse_line(columns(make_wide()), line, BERLIN)
    assert (dict(found.conditions), found.words) == (conditions, words)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("nothing:5", "no column 'nothing' is shown"),
        ("blob:x", "blob as a whole is not compared"),
        ("document:x", "not compared; write document.name:value for a value in it"),
        ("name.a:x", "no column 'name.a' is shown"),
        ("a" * 1001, "use at most 1000 characters"),
    ],
)
def test_a_line_that_means_nothing(line: str, problem: str) -> None:
    with pytest.raises(ParameterError, match=problem):
        parse_line(columns(make_wide()), line, BERLIN)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("f.at.last", "1"),
        ("f.at.last", "0h"),
        ("f.at.last", "1 h"),
        ("f.at.last", "99999d"),
        ("f.day.last", "1d"),
        ("f.number.contains", "1"),
        ("f.document.json", "1"),
        ("f.document.json.", "1"),
        ("f.document.json.a b", "1"),
        ("f.document.json.a..b", "1"),
        ("f.document.json." + ".".join("abcdefghijk"), "1"),
        ("f.name.json.a", "1"),
    ],
)
def test_malformed_conditions_are_refused(name: str, value: str) -> None:
    with pytest.raises(ParameterError) as caught:
        with_added(columns(make_wide()), [("add", name), ("value", value)], BERLIN)
        page_of(make_wide(), {name: value})
    assert caught.value.parameter == name


def page_of(model: Any, conditions: dict[str, str]) -> Any:
    from sqlaqueue.web.data.job_pages import parse_request  # noqa: PLC0415 - what a URL means, without a database

    return parse_request(columns(model), conditions.items())


def test_conditions_select(engine: sa.Engine) -> None:
    wide = make_wide()
    wide.metadata.create_all(engine)
    document = '{"customer": {"id": 5, "name": "Ada"}, "tags": ["a", "b"], "none": null, "flag": true}'
    insert = sa.text(
        'INSERT INTO "Wide table" ("The Number", body, problem, at, naive, document, plain_json) VALUES '
        "(1, 'Order 5% of_x', 'ValueError: No Stock', now() - interval '30 minutes', "
        "(now() AT TIME ZONE 'UTC') - interval '30 minutes', CAST(:document AS jsonb), CAST(:document AS json)), "
        "(2, 'nothing', NULL, now() - interval '90 minutes', (now() AT TIME ZONE 'UTC') - interval '90 minutes', "
        "'[1]', '\"x\"'), (3, NULL, NULL, NULL, NULL, NULL, NULL)"
    )
    with engine.begin() as connection:
        connection.execute(insert, {"document": document})
    for conditions, found in (
        ({"f.body.contains": "ORDER 5%"}, ["1"]),
        ({"f.body.contains": "of%x"}, []),
        ({"f.problem.contains": "no stock"}, ["1"]),
        ({"f.at.last": "1h"}, ["1"]),
        ({"f.at.last": "2h"}, ["1", "2"]),
        ({"f.naive.last": "60min"}, ["1"]),
        ({"f.naive.last": "1d"}, ["1", "2"]),
        ({"f.document.json.customer.id": "5"}, ["1"]),
        ({"f.document.json.customer.name": "Ada", "f.document.json.flag": "true"}, ["1"]),
        ({"f.document.json.tags.1": "b"}, ["1"]),
        ({"f.document.json.0": "1"}, ["2"]),
        ({"f.document.json.customer.id": "6"}, []),
        ({"f.document.json.none": "null"}, []),
        ({"f.plain_json.json.customer.id": "5"}, ["1"]),
        ({"f.plain_json.json.customer.id": "%s'\""}, []),
    ):
        assert sorted(job.key for job in page(engine, wide, *conditions.items()).jobs) == found, conditions


def test_the_last_hour_is_found_by_an_index(engine: sa.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    wide = make_wide()
    wide.metadata.create_all(engine)
    execute(engine, "INSERT INTO \"Wide table\" (at) SELECT now() - i * interval '1 day' FROM generate_series(0, 99) i")
    make_window_small(monkeypatch, 10)
    found = page(engine, wide, ("f.at.last", "1h"))
    # Otherwise a window of rows would be examined, and the search broken off.
    assert (len(found.jobs), found.examined) == (1, None)


# -- all queues -----------------------------------------------------------------------------------------------------


def results(text: str) -> dict[str, list[str]]:
    """Return the keys that were found, by the heading above them."""
    found = {}
    for part in re.findall(r'<section class="panel".*?</section>', text, re.DOTALL):
        heading = re.sub(r"<[^>]*>", "", re.findall(r"<h2.*?</h2>", part, re.DOTALL)[0]).strip()
        found[heading] = [unescape(key) for key in re.findall(r'class="key"><a [^>]*>([^<]*)<', part)]
    return found


def notes(text: str) -> list[str]:
    (part,) = re.findall(r'<ul class="notes.*?</ul>', text, re.DOTALL) or [""]
    return [unescape(re.sub(r"<[^>]*>", "", each)) for each in re.findall(r"<li>.*?</li>", part, re.DOTALL)]


async def ask(client: httpx.AsyncClient, line: str) -> str:
    response = await client.get("/search", params={"q": line})
    assert response.status_code == 200, response.text
    return response.text


async def test_all_queues_are_searched(engine: sa.Engine, queues: Queues, client_of: Any) -> None:
    add(
        engine, *(queues.Email(id=number, recipient=f"r{number}", payload={"order": number}) for number in range(1, 15))
    )
    add(engine, queues.Invoice(id=5, note="five"), queues.Picture(tenant="a", name="5"))
    fail_jobs(engine, queues.Email, 2, error="TimeoutError: No answer")
    fail_jobs(engine, queues.Picture, error="x: no answer")
    async with client_of() as browser:
        assert results(await ask(browser, "5")) == {"email by key": ["5"], "invoice by key": ["5"]}
        assert results(await ask(browser, "a,5")) == {"picture by key": ["a,5"]}
        text = await ask(browser, '"no answer"')
        assert results(text) == {"email in errors": ["2", "1"], "picture in errors": ["a,5"]}
        assert "Nothing in invoice." in notes(text)
        text = await ask(browser, "note:five")
        assert results(text) == {"invoice": ["5"]}
        assert notes(text) == [
            "email, picture were not searched: no column 'note' is shown; put words of an error in quotes."
        ]
        assert results(await ask(browser, "payload.order:7")) == {"email": ["7"]}
        # The first ten, with a link to the list that has them all.
        text = await ask(browser, "state:pending recipient:r*")
        assert len(results(text)["email"]) == 10
        (href,) = re.findall(r'The first 10. <a href="([^"]*)">The whole list</a>', text)
        assert urlsplit(unescape(href)).query == "state=pending&f.recipient.starts=r"
        assert "Nothing was found" in await ask(browser, '"zzz"')
        shown = (await browser.get("/search")).text
        assert "Nothing was found" not in shown


@pytest.mark.parametrize("kind", KINDS)
async def test_jobs_of_each_strategy_are_found(engine: sa.Engine, kind: str) -> None:
    from tests.web.conftest import ask as client_for  # noqa: PLC0415 - of a dashboard with one model

    model = new_queue(engine, kind)
    add(engine, *(model(id=number, key=f"k{number}") for number in range(1, 4)))
    fail_jobs(engine, model, error="E: no answer")
    async with client_for(engine, model) as browser:
        for line, found in (("1", "job by key"), ("2", "job by key"), ("answer", "job in errors"), ("key:k2", "")):
            if found:
                assert [*results(await ask(browser, line))] == [found], line
        assert [each for keys in results(await ask(browser, "state:failed")).values() for each in keys] == ["1"]
        assert [each for keys in results(await ask(browser, "id:>=1")).values() for each in keys] != []


async def test_a_queue_that_is_not_seen_is_not_searched(engine: sa.Engine, queues: Queues, client_of: Any) -> None:
    add(engine, queues.Email(id=5, recipient="a", payload={"secret_name": 1}), queues.Invoice(id=5))
    async with client_of(access=lambda _: Access(read=["invoice"])) as browser:
        for line in ("5", "recipient:a", "state:pending", '"x y"'):
            text = await ask(browser, line)
            assert "email" not in text, line
            # Only what was typed.
            shown = re.sub(r'value="[^"]*recipient:a"|recipient%3Aa|&#39;recipient&#39;', "", text)
            assert "recipient" not in shown, line
            assert "secret_name" not in text


@pytest.mark.parametrize("hidden", ["recipient", "payload", "last_error", "total"])
async def test_a_redacted_column_is_as_unknown_as_none(
    engine: sa.Engine, queues: Queues, client_of: Any, hidden: str
) -> None:
    add(engine, queues.Email(id=5, recipient="secret", payload={"a": "secret", "named": 1}, total=5))
    fail_jobs(engine, queues.Email, error="E: secret")
    lines = {
        "recipient": ["recipient:{}", "recipient:~{}", "recipient:!null"],
        "payload": ["payload.a:{}", "payload:!null"],
        "last_error": ["last_error:~{}", "error:{}", "message:{}", '"{}"'],
        "total": ["total:>=1", "total:5"],
    }
    async with client_of(redact=[hidden]) as browser:
        for line in lines[hidden]:
            right, wrong = [await ask(browser, line.format(each)) for each in ("secret", "other")]
            assert results(right) == {}, line
            # Whether a value is there is not told: the pages differ in what was typed only.
            assert right.replace("secret", "other") == wrong
            assert "was not searched" in right or "were not searched" in right
        shown = (await browser.get("/search")).text
        assert f'value="{hidden}' not in shown
        assert ("payload.named" in shown) == (hidden != "payload")
        assert ("error:E" in shown) == (hidden != "last_error")
        for name in ("f.recipient.contains", "f.payload.json.a", "f.last_error.contains", "f.total.min"):
            listed = await browser.get("/queues/email/jobs", params={name: "1"})
            assert (listed.status_code == 400) == name.startswith(f"f.{hidden}"), name


async def test_a_search_that_ended_early_says_so(
    engine: sa.Engine, queues: Queues, client_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_window_small(monkeypatch, 10)
    add(engine, *(queues.Invoice(id=number, note="odd" if number < 3 else "even") for number in range(1, 31)))
    async with client_of() as browser:
        text = await ask(browser, "note:odd")
        assert any(each.startswith("invoice: none among the first") for each in notes(text))
        (href,) = re.findall(r'<a href="([^"]*)">Search on in its list', text)
        assert urlsplit(unescape(href)).query == "f.note=odd"


async def test_a_queue_that_takes_long_hides_no_other(
    engine: sa.Engine, queues: Queues, client_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sqlaqueue.web.search._STATEMENT_TIMEOUT", 0.3)
    add(engine, queues.Invoice(id=5))
    with engine.connect() as other:
        other.execute(sa.text("LOCK TABLE email IN ACCESS EXCLUSIVE MODE"))
        async with client_of() as browser:
            text = await ask(browser, "5")
    assert results(text) == {"invoice by key": ["5"]}
    assert any(each.startswith("email was not searched: ") and "took too long" in each for each in notes(text)) or any(
        "locked by another session" in each for each in notes(text)
    )


async def test_no_further_queue_is_searched_when_the_time_is_over(
    engine: sa.Engine, queues: Queues, client_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sqlaqueue.web.search._LONGEST", -1.0)
    async with client_of() as browser:
        text = await ask(browser, "5")
    assert "email, invoice, picture were not searched: the search had taken" in notes(text)[0]


async def test_searches_leave_sessions_to_other_pages(
    engine: sa.Engine, queues: Queues, client_of: Any, no_examination: None
) -> None:
    ended: list[str] = []

    async def get(browser: httpx.AsyncClient, path: str) -> None:
        response = await browser.get(path)
        assert response.status_code in {200, 503}
        ended.append(path.partition("?")[0])

    async with client_of(queues.Email, queues.Invoice) as browser:
        await browser.get("/search")  # what is suggested is remembered
        with engine.connect() as other:
            other.execute(sa.text("LOCK TABLE email IN ACCESS EXCLUSIVE MODE"))
            async with anyio.create_task_group() as group:
                for _ in range(6):
                    group.start_soon(get, browser, "/search?q=state:pending")
                await anyio.sleep(0.3)
                group.start_soon(get, browser, "/queues/invoice/jobs")
    # It did not have to wait for one of the searches, which all wait for the lock.
    assert ended[0] == "/queues/invoice/jobs"


async def test_searches_of_one_reader_do_not_delay_those_of_another(
    engine: sa.Engine, queues: Queues, sessions: Any, no_examination: None
) -> None:
    def access(request: Any) -> Access:
        name = request.headers["x-user"]
        return Access(read=["email" if name == "eve" else "invoice"], user=name)

    ended: list[str] = []

    async def search(browser: httpx.AsyncClient, name: str) -> None:
        await browser.get("/search?q=state:pending", headers={"X-User": name})
        ended.append(name)

    async with client(Dashboard(queues.all, sessions, access=access)) as browser:
        for name in ("eve", "ada"):
            await browser.get("/search", headers={"X-User": name})  # what is suggested is remembered
        with engine.connect() as other:
            other.execute(sa.text("LOCK TABLE email IN ACCESS EXCLUSIVE MODE"))
            async with anyio.create_task_group() as group:
                for _ in range(4):
                    group.start_soon(search, browser, "eve")
                await anyio.sleep(0.3)
                group.start_soon(search, browser, "ada")
    assert ended[0] == "ada"


# -- one list: conditions are added one by one ----------------------------------------------------------------------


Add = Callable[..., Any]


async def added(browser: httpx.AsyncClient, query: str, **fields: str) -> dict[str, str]:
    """Return the parameters of the list to which a form leads that adds a condition to those of ``query``."""
    shown = await browser.get(f"/queues/email/jobs?{query}")
    (form,) = re.findall(rf'<form [^>]*>(?:(?!</form>).)*name="{next(iter(fields))}".*?</form>', shown.text, re.DOTALL)
    kept = re.findall(r'<input type="hidden" name="([^"]*)" value="([^"]*)">', form)
    assert 'method="get"' in form
    response = await browser.get("/queues/email/jobs", params=[*((a, unescape(b)) for a, b in kept), *fields.items()])
    assert response.status_code == 303, response.text
    target = response.url.join(response.headers["location"])
    assert (await browser.get(target)).status_code == 200
    return dict(target.params.multi_items())


async def test_conditions_are_added_one_by_one(engine: sa.Engine, queues: Queues, client_of: Any) -> None:
    add(engine, queues.Email(id=5, recipient="a"))
    start = "state=pending&f.recipient=a"
    before = {"state": "pending", "f.recipient": "a"}
    async with client_of() as browser:
        browser.headers["Cookie"] = "sqlaqueue_zone=Europe/Berlin"
        assert await added(browser, start, q="urgent:true kind:WELCOME") == before | {
            "f.urgent": "true",
            "f.kind": "WELCOME",
        }
        assert await added(browser, start, q="recipient:b") == before | {"f.recipient": "b"}
        assert await added(browser, start, q="5") == before | {"job": "5"}
        assert await added(browser, start, q="no answer") == before | {"f.last_error.contains": "no answer"}
        assert await added(browser, start, q="") == before
        assert await added(browser, start, add="f.big.min", value="7") == before | {"f.big.min": "7"}
        assert await added(browser, start, add="f.big.null=no", value="") == before | {"f.big.null": "no"}
        times = {"within": "", "since": "2030-06-01T08:00", "until": "2030-01-01T08:00:30"}
        assert await added(browser, start, time="created_at", **times) == before | {
            "f.created_at.min": "2030-06-01T08:00:00+02:00",
            "f.created_at.max": "2030-01-01T08:00:30+01:00",
        }
        assert await added(browser, start, time="at", within="1h", since="", until="") == before | {"f.at.last": "1h"}
        shown = (await browser.get("/queues/email/jobs?f.at.last=1h&f.payload.json.a=5&f.recipient.contains=x")).text
    chips = re.findall(r'<li class="chip">(.*?) <a', shown)
    assert chips == ["recipient contains x", "at is within the last 1h", "payload.a = 5"]


async def test_a_page_further_on_is_none_of_another_list(engine: sa.Engine, queues: Queues, client_of: Any) -> None:
    add(engine, queues.Email(recipient="a"))
    async with client_of() as browser:
        response = await browser.get("/queues/email/jobs?after=abc&sort=-id&q=recipient:a")
    assert response.status_code == 303
    assert urlsplit(response.headers["location"]).query == "sort=-id&f.recipient=a"


@pytest.mark.parametrize(
    ("query", "problem", "kept"),
    [
        ("q=nothing:5", "q: no column", 'value="nothing:5"'),
        ("q=big:x", "big: use an integer of 64 bits.", 'value="big:x"'),
        ("add=f.big&value=x", "big: use an integer of 64 bits.", '<option value="f.big" selected>'),
        ("add=f.big&value=", "value: type a value", "selected"),
        ("add=&value=5", "add: choose what to compare", 'value="5"'),
        ("add=f.nothing&value=5", "nothing: there is no such condition.", 'value="5"'),
        ("time=recipient&within=1h", "time: choose one of the columns with times.", ""),
        ("time=at&since=yesterday", "at.min: use a date and a time", 'value="yesterday"'),
        ("time=at&within=1y", "at.last: use a number of minutes, hours or days", ""),
    ],
)
async def test_a_problem_is_shown_at_the_form(client_of: Any, query: str, problem: str, kept: str) -> None:
    async with client_of() as browser:
        response = await browser.get(f"/queues/email/jobs?state=failed&f.recipient=a&{query}")
    assert response.status_code == 200
    (shown,) = re.findall(r'<p class="wrong" role="alert">(.*?)</p>', response.text)
    assert unescape(shown).startswith(problem)
    assert kept in response.text
    # The conditions that were there before are still there.
    assert '<li class="chip">recipient = a' in response.text


async def test_what_can_be_searched_for_is_suggested(engine: sa.Engine, queues: Queues, client_of: Any) -> None:
    add(
        engine,
        queues.Email(recipient="a", payload={"order": 1, "not this": 2}),
        queues.Email(recipient="b", payload=[]),
    )
    fail_jobs(engine, queues.Email, error="smtp.Refused: 550")
    async with client_of() as browser:
        texts = [(await browser.get(path)).text for path in ("/queues/email/jobs", "/search", "/")]
    for text in texts:
        found = [unescape(each) for each in re.findall(r'<option value="([^"]*)"></option>', text)]
        assert {"state:failed", "recipient:", "kind:WELCOME", "urgent:true", "payload.order:", "error:"} <= {*found}
        assert "error:smtp.Refused" in found
        assert "payload.not this:" not in found
    assert "width:" in texts[1]
    assert "width:" not in texts[0]


async def test_the_first_page_reads_no_jobs_for_its_suggestions(
    engine: sa.Engine, queues: Queues, client_of: Any, no_examination: None
) -> None:
    add(engine, queues.Email(recipient="a", payload={"order": 1}))
    async with client_of() as browser:
        text = (await browser.get("/")).text
        assert '<option value="recipient:">' in text
        assert "payload.order" not in text
        await browser.get("/search")
        assert "payload.order" in (await browser.get("/")).text


def test_a_time_of_a_form_is_in_the_zone_of_the_page() -> None:
    now = datetime(2030, 1, 1, 12, tzinfo=UTC)
    pairs = [("time", "at"), ("since", now.astimezone(BERLIN.info).replace(tzinfo=None).isoformat())]
    ((_, text),) = with_added(columns(make_wide()), pairs, BERLIN) or []
    assert datetime.fromisoformat(text) - now == timedelta(0)
