"""The pages of one job: what they show, that no value is code, and what is answered for wrong addresses."""

from __future__ import annotations

import re
from datetime import timedelta
from html.parser import HTMLParser
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import sqlalchemy as sa

from sqlaqueue.web import Access
from tests.unique.models import create, make_job
from tests.web.jobs_of import KINDS, XSS, add, claimed, fail_jobs
from tests.web.models import Kind, Queues

MEGABYTES = 10_000_000


class Page(HTMLParser):
    """The elements of a page, their attributes, and the text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def assert_harmless(text: str) -> Page:
    page = Page(text)
    assert [attributes for tag, attributes in page.tags if tag == "script"] == [
        attributes for tag, attributes in page.tags if tag == "script" and attributes.get("src")
    ]
    names = {name for _, attributes in page.tags for name in attributes}
    assert not [name for name in names if name.startswith("on") or name == "style"]
    assert "img" not in {tag for tag, _ in page.tags}
    links = [
        str(attributes.get(name))
        for _, attributes in page.tags
        for name in ("href", "src", "action")
        if name in attributes
    ]
    assert not [link for link in links if link.strip().lower().startswith(("javascript:", "data:"))]
    return page


async def get(client: Any, path: str, **query: Any) -> Any:
    async with client as browser:
        return await browser.get(path, params=query)


async def test_job_shows_its_values_exactly(engine: sa.Engine, queues: Queues, client_of: Any) -> None:
    key = 2**63 - 1
    add(engine, queues.Email(id=key, recipient="Zoë 🚀", kind=Kind.RECEIPT, big=-(2**63), payload={"n": 2**70}))
    response = await get(client_of(), "/queues/email/job", key=str(key))
    assert response.status_code == 200
    page = assert_harmless(response.text)
    for text in (str(key), "Zoë 🚀", "RECEIPT", str(-(2**63)), f'"n": {2**70}', "no_consumer", "Enqueued"):
        assert text in page.text, text


@pytest.mark.parametrize("kind", KINDS)
async def test_each_strategy_has_a_page_for_each_state(engine: sa.Engine, kind: str, client_of: Any) -> None:
    model = make_job(kind)
    create(engine, model)
    add(engine, model(id=1, key=XSS, note=XSS))
    text = (await get(client_of(model), "/queues/job/job", key="1")).text
    assert XSS in assert_harmless(text).text
    with claimed(engine, model):
        assert (await get(client_of(model), "/queues/job/job", key="1")).status_code == 200
    fail_jobs(engine, model, error=XSS)
    response = await get(client_of(model), "/queues/job/job", key="1")
    page = assert_harmless(response.text)
    assert response.status_code == 200
    assert "failed" in page.text
    assert XSS in page.text
    for path in ("edit", "confirm"):
        response = await get(client_of(model), f"/queues/job/{path}", key="1", action="requeue")
        assert response.status_code == 200, path
        assert_harmless(response.text)


async def test_stored_scripts_are_text_in_every_column(engine: sa.Engine, queues: Queues, client_of: Any) -> None:
    values = {"recipient": XSS, "subject": XSS, "payload": {XSS: XSS}, "claimed_by": XSS, "last_error": XSS}
    add(engine, queues.Email(**values, status="failed", blob=XSS.encode()), queues.Picture(tenant=XSS, name=XSS))
    with engine.begin() as connection:
        connection.execute(
            sa.text(
                "INSERT INTO sqlaqueue_attempt (queue, key, attempt, ended_at, worker, outcome, error, traceback) "
                "VALUES ('email', '[1]', 1, now(), :x, 'failed', :x, :x)"
            ),
            {"x": XSS},
        )
    key = '"' + XSS.replace('"', '""') + '"'
    for path, query in (
        ("/queues/email/job", {"key": "1"}),
        ("/queues/email/edit", {"key": "1"}),
        ("/queues/email/confirm", {"key": "1", "action": "purge"}),
        ("/queues/email/confirm", {"all": "1", "action": "purge", "f.subject": XSS}),
        ("/queues/picture/job", {"key": f"{key},{key}"}),
        ("/queues/picture/confirm", {"key": f"{key},{key}", "action": "cancel"}),
        ("/queues/picture/edit", {"key": f"{key},{key}"}),
    ):
        response = await get(client_of(), path, **query)
        assert response.status_code == 200, path
        page = assert_harmless(response.text)
        assert "alert(" in page.text + str(page.tags) or query == {"key": "1", "action": "purge"}


async def test_wrong_links_of_the_application_are_left_out(engine: sa.Engine, queues: Queues, client_of: Any) -> None:
    add(engine, queues.Email(recipient="javascript:alert(1)", big=5))
    links = {"Email.recipient": lambda value: value, "Email.big": "https://shop.example/big/{value}"}
    page = assert_harmless((await get(client_of(links=links), "/queues/email/job", key="1")).text)
    assert ("a", {"href": "https://shop.example/big/5", "rel": "noreferrer"}) in page.tags


async def test_ten_megabytes_are_cut(engine: sa.Engine, queues: Queues, client_of: Any) -> None:
    add(engine, queues.Email(recipient="a", payload={"x": "y" * MEGABYTES}))
    response = await get(client_of(), "/queues/email/job", key="1")
    assert response.status_code == 200
    assert len(response.text) < 200_000
    assert "The beginning of 10,000,009 characters" in response.text
    response = await get(client_of(), "/queues/email/edit", key="1")
    assert len(response.text) < 100_000
    assert "too large" in response.text


async def test_a_value_that_is_too_large_to_be_read(engine: sa.Engine, queues: Queues, client_of: Any) -> None:
    add(engine, queues.Email(recipient="a"))
    with engine.begin() as connection:
        connection.exec_driver_sql("UPDATE email SET subject = repeat('a', 200000000)")
        connection.exec_driver_sql("UPDATE email SET payload = jsonb_build_object('x', repeat('y', 200000000))")
    response = await get(client_of(), "/queues/email/job", key="1")
    assert response.status_code == 200
    assert len(response.text) < 200_000
    assert "2.2 MB as stored, too large to be shown" in response.text
    assert "The beginning of 190.7 MB" in response.text
    response = await get(client_of(), "/queues/email/jobs", columns="subject,payload")
    assert response.status_code == 200
    assert len(response.text) < 100_000
    response = await get(client_of(), "/queues/email/edit", key="1")
    assert response.status_code == 200
    assert response.text.count("too large") == 2


async def test_redacted_values_are_on_no_page(engine: sa.Engine, queues: Queues, client_of: Any) -> None:
    add(engine, queues.Email(recipient="secret", subject="secret", payload={"a": "secret"}))
    fail_jobs(engine, queues.Email, error="ValueError: secret")
    client = {"redact": ["recipient", "subject", "payload", "last_error"]}
    for path, query in (
        ("job", {"key": "1"}),
        ("edit", {"key": "1"}),
        ("confirm", {"action": "requeue", "key": "1"}),
        ("confirm", {"action": "requeue", "all": "1", "state": "failed"}),
    ):
        response = await get(client_of(**client), f"/queues/email/{path}", **query)
        assert response.status_code == 200
        assert "secret" not in response.text
        assert path != "job" or "redacted" in response.text
    assert "v.subject" not in (await get(client_of(**client), "/queues/email/edit", key="1")).text


@pytest.mark.parametrize("path", ["job", "edit"])
@pytest.mark.parametrize(
    ("key", "status"),
    [(None, 400), ("", 400), ("x", 400), ("1,2", 400), (str(2**63), 400), ("'; DROP TABLE email", 400), ("77", 404)],
)
async def test_wrong_keys_have_a_page(path: str, key: str | None, status: int, queues: Queues, client_of: Any) -> None:
    response = await get(client_of(), f"/queues/email/{path}", **({} if key is None else {"key": key}))
    assert response.status_code == status
    assert "Traceback" not in response.text


@pytest.mark.parametrize(
    "query",
    [
        {"key": "1"},
        {"action": "drop", "key": "1"},
        {"action": "requeue", "all": "1", "key": "1"},
        {"action": "requeue", "all": "1", "state": "nothing"},
        {"action": "requeue", "all": "1", "f.nothing": "1"},
        {"action": "requeue", "all": "1", "until": "yesterday"},
        {"action": "requeue", "all": "1", "most": "-1"},
        {"action": "requeue", "all": "1", "from": "nonsense"},
        {"action": "requeue", "key": "x"},
        {"action": "requeue", "key": [str(each) for each in range(1001)]},
    ],
)
async def test_wrong_parameters_have_a_page(query: dict[str, Any], queues: Queues, client_of: Any) -> None:
    response = await get(client_of(), "/queues/email/confirm", **query)
    assert response.status_code == 400
    assert "Traceback" not in response.text


async def test_unreadable_queue_is_no_queue(engine: sa.Engine, queues: Queues, client_of: Any) -> None:
    add(engine, queues.Email(recipient="a"))
    access = {"access": lambda _: Access(read=["invoice"], act=True)}
    for path in ("job", "edit", "confirm"):
        response = await get(client_of(**access), f"/queues/email/{path}", key="1", action="purge")
        missing = await get(client_of(**access), f"/queues/nothing/{path}", key="1", action="purge")
        assert (response.status_code, response.text) == (404, missing.text)


async def test_reader_is_offered_nothing(engine: sa.Engine, queues: Queues, client_of: Any) -> None:
    add(engine, queues.Email(recipient="a"))
    fail_jobs(engine, queues.Email)
    reader = {"access": lambda _: Access(read=True)}
    response = await get(client_of(**reader), "/queues/email/job", key="1")
    assert response.status_code == 200
    assert "<form" not in response.text
    assert "Edit" not in response.text
    for path in ("edit", "confirm"):
        response = await get(client_of(**reader), f"/queues/email/{path}", key="1", action="purge")
        assert response.status_code == 403


async def test_why_a_retry_cannot_be_made(engine: sa.Engine, queues: Queues, client_of: Any) -> None:
    model = make_job("update_status")
    create(engine, model)
    add(engine, model(id=1, key="a"))
    # A pending job runs anyway, so that nothing is said of Requeue.
    pending = Page((await get(client_of(model), "/queues/job/job", key="1")).text).text
    assert "Requeue" not in pending
    assert "not possible" not in pending
    fail_jobs(engine, model)
    add(engine, model(id=2, key="a"))
    assert "twin, job 2, counts" in (await get(client_of(model), "/queues/job/job", key="1")).text
    add(engine, queues.Email(recipient="a"))
    with engine.begin() as connection:
        connection.execute(
            sa.text(
                "INSERT INTO sqlaqueue_attempt (queue, key, attempt, ended_at, outcome) "
                "VALUES ('email', '[9]', 1, now(), 'failed')"
            )
        )
    text = (await get(client_of(), "/queues/email/job", key="9")).text
    assert "row was deleted, so it cannot run again" in text


async def test_only_actions_that_make_sense_for_the_state_are_shown(
    engine: sa.Engine, queues: Queues, client_of: Any
) -> None:
    add(engine, *(queues.Email(recipient="a") for _ in range(4)))
    with engine.begin() as connection:
        connection.execute(sa.text("UPDATE email SET status = 'failed' WHERE id = 2"))
        connection.execute(sa.text("UPDATE email SET status = 'completed' WHERE id = 3"))
        connection.execute(
            sa.text("UPDATE email SET status = 'processing', lease_expires_at = now() + interval '1 h' WHERE id = 4")
        )

    async def shown(key: str) -> tuple[list[str], str]:
        text = (await get(client_of(), "/queues/email/job", key=key)).text
        head = text.partition('<div class="page-actions">')[2].partition('<div class="stack">')[0]
        buttons = re.findall(r"<(?:button|a) class=\"button[^>]*>([^<]+)<", head)
        return buttons, " ".join(re.findall(r'class="muted why"[^>]*>([^<]*)<', head))

    assert await shown("1") == (["Edit…", "Cancel", "Refresh"], "")
    assert await shown("2") == (["Edit and requeue…", "Requeue", "Delete…", "Refresh"], "")
    assert await shown("3") == (["Edit and requeue…", "Requeue…", "Delete…", "Refresh"], "")
    why = "Edit is not possible: it is processing. Wait for its end, or cancel it first."
    assert await shown("4") == (["Edit…", "Cancel", "Refresh"], why)


async def test_an_expired_lease_says_who_rescues_the_job(engine: sa.Engine, queues: Queues, client_of: Any) -> None:
    add(engine, queues.Email(recipient="a"), queues.Email(recipient="b"))
    expire = "UPDATE email SET status = 'processing', lease_expires_at = now() + :left, attempts = 1 WHERE id = :id"
    with engine.begin() as connection:
        for key, left in ((1, timedelta(minutes=-1)), (2, timedelta(minutes=1))):
            connection.execute(sa.text(expire), {"left": left, "id": key})
    page = (await get(client_of(), "/queues/email/job", key="1")).text
    assert "looks for expired leases every 3 seconds" in page
    assert "no live Consumer is there to rescue it: start one, or use Rescue." in page
    assert "rescue()" not in page
    assert "Rescue" not in (await get(client_of(), "/queues/email/job", key="2")).text
    reader = {"access": lambda _: Access(read=True)}
    page = (await get(client_of(**reader), "/queues/email/job", key="1")).text
    assert "looks for expired leases every 3 seconds" in page
    assert "<form" not in page
    async with client_of() as browser:
        response = await browser.post("/queues/email/actions/rescue?key=1")
        assert response.status_code == 303
        assert "/queues/email/job?key=1&notice=rescued" in response.headers["location"]
        assert "pending" in (await browser.get("/queues/email/job?key=1")).text


async def test_preview_says_what_happens(engine: sa.Engine, queues: Queues, client_of: Any) -> None:
    add(engine, *(queues.Email(recipient="a") for _ in range(5)))
    with claimed(engine, queues.Email, 2):
        text = Page((await get(client_of(), "/queues/email/confirm", action="cancel", all="1")).text).text
    assert "Cancel 5 jobs?" in text
    assert re.search(r"processing\s+2\s+will be asked to stop", text)
    text = (await get(client_of(), "/queues/email/confirm", action="purge", key="1")).text
    assert "Delete 0 jobs" in text
    assert 'type="submit"' not in text


async def test_preview_counts_up_to_a_limit(engine: sa.Engine, queues: Queues, client_of: Any) -> None:
    with engine.begin() as connection:
        connection.execute(
            sa.text("INSERT INTO email (recipient, status) SELECT 'a', 'failed' FROM generate_series(1, 10050)")
        )
    response = await get(client_of(), "/queues/email/confirm", action="requeue", all="1", state="failed")
    assert "Requeue 10,000+ jobs?" in response.text
    page = Page(response.text)
    rows = [attributes for tag, attributes in page.tags if tag == "a" and "job?key=" in str(attributes.get("href"))]
    assert len(rows) == 20
    fields = [attributes.get("name") for tag, attributes in page.tags if tag == "input"]
    assert sorted(map(str, fields)) == ["all", "state", "until"]


async def test_links_keep_strange_keys(engine: sa.Engine, queues: Queues, client_of: Any) -> None:
    add(engine, queues.Picture(tenant='a,"&?#/', name="../%2f é"))
    async with client_of() as browser:
        listed = await browser.get("/queues/picture/jobs")
        page = Page(listed.text)
        (href,) = [str(a.get("href")) for tag, a in page.tags if tag == "a" and "job?key=" in str(a.get("href"))]
        response = await browser.get(str(listed.url.join(href)))
        assert response.status_code == 200
        assert parse_qs(urlsplit(href).query)["key"] == ['"a,""&?#/",../%2f é']


async def test_problem_of_one_part_is_in_its_panel(engine: sa.Engine, queues: Queues, client_of: Any) -> None:
    add(engine, queues.Email(recipient="ada"))
    with engine.begin() as connection:
        connection.execute(sa.text("DROP TABLE sqlaqueue_attempt"))
    response = await get(client_of(), "/queues/email/job", key="1")
    assert response.status_code == 200
    assert "A table is missing" in response.text
    assert "ada" in response.text
