"""The list from which jobs are chosen: the user comes back to it, and never to another page."""

from __future__ import annotations

import re
from html import unescape
from typing import Any

import httpx
import pytest
import sqlalchemy as sa

from sqlaqueue.web.data import bulk
from tests.web.jobs_of import add, states
from tests.web.models import Queues
from tests.web.test_actions import act, hidden


def form_of(text: str, name: str) -> list[tuple[str, str]]:
    """Return the hidden fields of a form of a list."""
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
        assert response.status_code == 303
        shown = await browser.get(str(response.url.join(response.headers["location"])))
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
        params = [("action", "cancel"), *form_of(listed.text, "selected-jobs"), ("key", "1")]
        shown = await browser.get("/queues/email/confirm", params=params)
        assert back_of(shown) == str(listed.url)
        response = await browser.post("/queues/email/actions/cancel", data=dict(hidden(shown.text)))
        shown = await browser.get(str(response.url.join(response.headers["location"])))
        assert "1 job was cancelled." in shown.text
        assert "No jobs on this page." in shown.text


@pytest.mark.parametrize("given", ["//evil.example/?state=failed", "https://evil.example/", "../../?notice=purged:9"])
async def test_a_list_is_never_another_page(engine: sa.Engine, queues: Queues, client_of: Any, given: str) -> None:
    add(engine, queues.Email(recipient="a"), queues.Email(recipient="a"))
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
        shown = await browser.get(str(response.url.join(response.headers["location"])))
        assert "Cancel 1 job?" in shown.text
        assert back_of(shown) == target
        response = await browser.post("/queues/email/actions/cancel", data=dict(hidden(shown.text)))
        assert str(response.url.join(response.headers["location"])) == f"{target}&notice=cancelled%3A1"
