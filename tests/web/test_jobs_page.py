"""The page with the jobs of a queue."""

from __future__ import annotations

import html
import re
from typing import Any
from urllib.parse import urljoin

import pytest
import sqlalchemy as sa

from sqlaqueue.web import Access
from tests.web.job_lists import make_window_small


def add(sessions: Any, *jobs: Any) -> None:
    with sessions() as session:
        session.add_all(jobs)
        session.commit()


def hrefs(text: str, rel: str) -> list[str]:
    return [html.unescape(each) for each in re.findall(rf'rel="{rel}" href="([^"]+)"', text)]


async def test_lists_jobs_with_their_columns(client_of: Any, queues: Any, sessions: Any) -> None:
    add(
        sessions,
        queues.Email(id=2**62, recipient="ada@example.com", subject="<script>alert(1)</script>", status="failed"),
    )
    response = await client_of().get("/queues/email/jobs")
    assert response.status_code == 200, response.text
    assert str(2**62) in response.text
    assert "<script>alert" not in response.text
    assert "&lt;script&gt;alert(1)" in response.text


@pytest.mark.parametrize(
    ("query", "parameter"),
    [
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
    ],
)
async def test_bad_parameter_is_named(client_of: Any, query: str, parameter: str) -> None:
    response = await client_of().get(f"/queues/email/jobs?{query}")
    assert response.status_code == 400
    assert parameter in response.text


async def test_pages_follow_their_links(client_of: Any, queues: Any, sessions: Any) -> None:
    add(sessions, *(queues.Picture(tenant="a,b", name=f"x {number:03}") for number in range(120)))
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


async def test_filter_tabs_and_order_are_kept_in_links(client_of: Any, queues: Any, sessions: Any) -> None:
    jobs = [queues.Email(recipient="ada@example.com", subject=f"s{number}", customer_id=None) for number in range(60)]
    add(sessions, *jobs)
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


async def test_order_that_depends_on_the_filter_is_dropped_with_it(client_of: Any, queues: Any, sessions: Any) -> None:
    add(sessions, queues.Email(recipient="ada@example.com"))
    response = await client_of().get("/queues/email/jobs?state=pending&sort=priority&f.recipient=ada%40example.com")
    assert response.status_code == 200
    (removed,) = re.findall(r'href="([^"]+)" aria-label="Remove the condition', response.text)
    assert "sort" not in removed
    assert 'name="sort"' not in response.text.split("job-list")[0]


@pytest.mark.parametrize("state", ["", "pending", "failed", "completed", "cancelled", "processing"])
async def test_empty_lists_say_what_to_do(client_of: Any, state: str) -> None:
    response = await client_of().get("/queues/email/jobs", params={"state": state} if state else {})
    assert response.status_code == 200
    assert 'class="empty-title">No ' in response.text
    response = await client_of().get("/queues/email/jobs", params={"f.urgent": "true", **response.url.params})
    assert "No job meets these conditions." in response.text
    assert "Remove all conditions" in response.text


async def test_links_and_actions_are_those_that_the_application_allows(
    client_of: Any, queues: Any, sessions: Any
) -> None:
    add(sessions, queues.Customer(id=7, name="Ada"))
    add(sessions, queues.Email(id=5, recipient="a b&c", customer_id=7))
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
    client_of: Any, queues: Any, sessions: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_window_small(monkeypatch, 10)
    add(sessions, *(queues.Invoice(id=number, note="odd" if number == 3 else "even") for number in range(1, 31)))
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


async def test_problem_of_the_list_is_shown_in_its_place(client_of: Any, queues: Any, sessions: Any) -> None:
    with sessions() as session:
        session.execute(sa.text("ALTER TABLE invoice DROP COLUMN note"))
        session.commit()
    response = await client_of().get("/queues/invoice/jobs")
    assert response.status_code == 200
    assert "A column is missing" in response.text


async def test_jobs_of_no_state_have_a_list_of_their_own(client_of: Any, queues: Any, sessions: Any) -> None:
    add(sessions, *(queues.Email(id=number, recipient="a") for number in range(1, 6)))
    with sessions() as session:
        session.execute(sa.text("UPDATE email SET status = 'strange' WHERE id IN (2, 4)"))
        session.commit()
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
    with sessions() as session:
        session.execute(sa.text("DELETE FROM email WHERE status = 'strange'"))
        session.commit()
    assert ">Other <" not in (await client.get("/queues/email/jobs")).text
    response = await client.get("/queues/email/jobs?state=other")
    assert ">Other <" in response.text
    assert "No other jobs." in response.text


async def test_empty_parameters_are_taken_out_of_the_url(client_of: Any, queues: Any, sessions: Any) -> None:
    add(sessions, queues.Email(recipient="a b&c"), queues.Email(recipient="d"))
    client = client_of()
    listed = await client.get("/queues/email/jobs")
    (form,) = re.findall(r'<form class="filter".*?</form>', listed.text, re.DOTALL)
    names = re.findall(r' name="([^"]+)"', form)
    assert len(names) > 20
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
    client_of: Any, queues: Any, sessions: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(sessions, *(queues.Invoice(id=number, note="odd" if number % 2 else "even") for number in range(1, 31)))
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
