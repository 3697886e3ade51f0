"""The page with the jobs of a queue."""

from __future__ import annotations

import html
import re
from typing import Any
from urllib.parse import urljoin

import pytest


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
