"""Schedules that are added and changed in the browser."""

import json
import re
from datetime import timedelta
from decimal import Decimal
from html import unescape
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue import Schedule
from sqlaqueue.admin import ScheduleAdmin, ScheduleInfo
from sqlaqueue.schedules.schedule import schedule_groups
from sqlaqueue.schedules.store import declare
from sqlaqueue.testing import fire_schedules
from sqlaqueue.web import Access
from tests.models import execute
from tests.web.conftest import follow, hidden, post
from tests.web.jobs import XSS
from tests.web.models import Queues


@pytest.fixture
def scheduled(queues: Queues, engine: sa.Engine) -> Queues:
    """Schedules: one of a program, and one of another queue."""
    made = [
        Schedule("nightly", queues.Email, cron="0 3 * * *", values={"recipient": "a", "subject": "the secret"}),
        Schedule("of invoices", queues.Invoice, every=3600),
    ]
    queues.metadata.create_all(engine)
    with Session(engine) as session:
        for group in schedule_groups(made, "test"):
            declare(session, group)
        session.commit()
    return queues


def stored(engine: sa.Engine, queues: Queues, name: str) -> ScheduleInfo:
    with Session(engine) as session:
        return ScheduleAdmin(session, queues.Email).get(name)


def texts(page: str) -> dict[str, str]:
    """Return the fields of the form as a browser would send them."""
    start = page.index('class="panel edit"')
    page = page[start : page.index("</form>", start)]
    found = dict(hidden(page))
    for name, value in re.findall(r'<input id="[^"]*" name="([^"]*)" value="([^"]*)"', page):
        found[name] = unescape(value)
    for name, value in re.findall(r'<textarea id="[^"]*" name="([^"]*)"[^>]*>\n([^<]*)</textarea>', page):
        found[name] = unescape(value)
    if 'name="skip_unfinished" value="1" checked' in page:
        found["skip_unfinished"] = "1"
    return found


EDIT = "/schedules/edit?queue=email&schedule=nightly"
MINE = {"queue": "email", "schedule": "mine", "every": "60", "values": '{"recipient": "a"}'}


async def test_a_schedule_is_added_and_fires(engine: sa.Engine, scheduled: Queues, client_of: Any, audit: Any) -> None:
    async with client_of() as browser:
        assert "New schedule" in (await browser.get("/schedules")).text
        page = await browser.get("/schedules/edit?queue=email")
        assert '<option value="email" selected>' in page.text
        fields = texts(page.text) | {
            "schedule": f"every hour {XSS}",
            "queue": "email",
            "every": "3600",
            "values": json.dumps({"recipient": "ada", "total": "1.50"}),
            "skip_unfinished": "1",
            "catch_up": "5",
        }
        looked = await browser.post("/schedules/save", data=fields | {"then": "look"})
        assert looked.status_code == 200
        assert "<b>Every 1 h</b>, next:" in looked.text
        assert looked.text.count("<time ") >= 3
        sent = texts(looked.text)
        assert (sent["values"], sent["skip_unfinished"]) == (fields["values"], "1")
        page = await follow(browser, await browser.post("/schedules/save", data=fields))
        assert "The schedule was added." in page.text
        assert XSS not in page.text
        # A name identifies one schedule.
        again = await browser.post("/schedules/save", data=fields)
        assert (again.status_code, "already" in again.text) == (422, True)
    info = stored(engine, scheduled, f"every hour {XSS}")
    assert (info.every, info.origin, info.skip_unfinished, info.catch_up) == (timedelta(hours=1), "added", True, 5)
    assert info.values == {"recipient": "ada", "total": "1.50"}
    with Session(engine) as session:
        ScheduleAdmin(session, scheduled.Email).run(info.name)
        fire_schedules(session, [scheduled.Email])
        session.commit()
    assert execute(engine, "SELECT total FROM email WHERE recipient = 'ada'") == Decimal("1.5")
    (line,) = audit()
    assert "action=add_schedule queue='email' schedule=" in line


async def test_a_schedule_is_edited_and_reset(engine: sa.Engine, scheduled: Queues, client_of: Any, audit: Any) -> None:
    async with client_of() as browser:
        fields = texts((await browser.get(EDIT)).text)
        assert fields["cron"] == "0 3 * * *"
        # Nothing typed changes nothing; browsers have their own line breaks.
        same = fields | {"values": fields["values"].replace("\n", "\r\n")}
        page = await follow(browser, await browser.post("/schedules/save", data=same))
        assert "The schedule is as it was." in page.text
        assert stored(engine, scheduled, "nightly").origin == "program"
        await browser.post("/schedules/save", data=fields | {"cron": "0 5 * * 1", "timezone": "Europe/Berlin"})
        info = stored(engine, scheduled, "nightly")
        assert (info.cron, info.timezone, info.origin) == ("0 5 * * 1", "Europe/Berlin", "edited")
        assert info.values == {"recipient": "a", "subject": "the secret"}
        # What was shown before is not written over the other change.
        answer = await browser.post("/schedules/save", data=fields | {"jitter": "9"})
        assert (answer.status_code, "was changed since" in answer.text) == (422, True)
        assert texts(answer.text)["jitter"] == "9"
        assert stored(engine, scheduled, "nightly").cron == "0 5 * * 1"
        assert "Reset it" in (await browser.get(EDIT)).text
        await browser.post("/schedules/reset", data={"queue": "email", "schedule": "nightly"})
        assert stored(engine, scheduled, "nightly").cron == "0 3 * * *"
    assert [line.split()[1] for line in audit()] == ["action=edit_schedule", "action=reset_schedule"]


async def test_redacted_values_stay_as_they_are(engine: sa.Engine, scheduled: Queues, client_of: Any) -> None:
    async with client_of(redact=["subject"]) as browser:
        page = (await browser.get(EDIT)).text
        assert "the secret" not in page
        assert "those of redacted columns (subject) stay as they are" in page
        fields = texts(page)
        assert json.loads(fields["values"]) == {"recipient": "a"}
        await browser.post("/schedules/save", data=fields | {"values": '{"recipient": "b"}'})
        assert stored(engine, scheduled, "nightly").values == {"recipient": "b", "subject": "the secret"}
        fields = texts((await browser.get(EDIT)).text)
        for wrong in ('{"recipient": "b", "subject": "x"}', '{"recipient": null}', '{"nothing": 1}'):
            answer = await browser.post("/schedules/save", data=fields | {"values": wrong})
            assert answer.status_code == 422, wrong
            assert "the secret" not in answer.text
    assert stored(engine, scheduled, "nightly").values == {"recipient": "b", "subject": "the secret"}


async def test_the_form_of_a_schedule_does_not_let_redacted_values_be_guessed(
    engine: sa.Engine, scheduled: Queues, client_of: Any
) -> None:
    async def version_with(**values: str) -> str:
        with Session(engine) as session:
            ScheduleAdmin(session, scheduled.Email).edit("nightly", values=values)
        async with client_of(redact=["subject"]) as browser:
            return texts((await browser.get(EDIT)).text)["version"]

    version = await version_with(recipient="a", subject="one")
    # A digest of the other values and a guess would tell whether the guess is right.
    assert await version_with(recipient="a", subject="two") == version
    assert await version_with(recipient="b", subject="two") != version


@pytest.mark.parametrize(
    ("typed", "text"),
    [
        ({"cron": "x"}, "cron"),
        ({"cron": "", "every": ""}, "every"),
        ({"every": "60"}, "cron"),
        ({"cron": "", "every": "soon"}, "every: write a number of seconds"),
        ({"cron": "", "every": "inf"}, "every: write a number of seconds"),
        ({"timezone": "Mars"}, "Mars"),
        ({"values": "[1]"}, "write a JSON object"),
        ({"values": "{"}, "no JSON"),
        ({"values": '{"status": "failed"}'}, "belongs to the queue"),
        ({"catch_up": "some"}, "catch_up"),
        ({"jitter": "-1"}, "jitter: write a number of seconds"),
        ({"cron": XSS}, "cron"),
    ],
)
async def test_wrong_definitions_are_told_and_nothing_is_lost(
    engine: sa.Engine, scheduled: Queues, client_of: Any, audit: Any, typed: dict[str, str], text: str
) -> None:
    before = stored(engine, scheduled, "nightly")
    async with client_of() as browser:
        fields = texts((await browser.get(EDIT)).text) | typed
        answer = await browser.post("/schedules/save", data=fields)
        assert answer.status_code == 422
        assert text in unescape(answer.text)
        assert XSS not in answer.text
        sent = texts(answer.text)
        assert {name: sent[name] for name in typed} == typed
    after = stored(engine, scheduled, "nightly")
    assert (after.cron, after.every, after.values, after.origin) == ("0 3 * * *", None, before.values, "program")
    assert audit() == []


async def test_schedules_need_both_rights_and_their_queue(engine: sa.Engine, scheduled: Queues, client_of: Any) -> None:
    for rights in (["schedule"], ["enqueue"], []):
        access = Access(read=True, act={"email": rights})
        async with client_of(access=lambda _, access=access: access) as browser:
            assert (await browser.get(EDIT)).status_code == 403
            assert (await browser.get("/schedules/edit")).status_code == 403
            assert (await browser.post("/schedules/save", data=MINE)).status_code == 403
            assert "schedules/edit" not in (await browser.get("/schedules")).text
    access = Access(read=["email"], act=True)
    async with client_of(access=lambda _: access) as browser:
        for queue, name in (("email", "of invoices"), ("invoice", "of invoices"), ("email", "x")):
            answer = await browser.get("/schedules/edit", params={"queue": queue, "schedule": name})
            assert answer.status_code == 404
            data = MINE | {"queue": queue, "schedule": name, "version": "x"}
            answer = await browser.post("/schedules/save", data=data)
            assert (answer.status_code, "of invoices" in answer.text) == (404, False)
    elsewhere = {"Origin": "https://evil.example", "Sec-Fetch-Site": "cross-site"}
    assert (await post(client_of(), "/schedules/save", MINE, headers=elsewhere)).status_code == 403
    with Session(engine) as session:
        assert [each.name for each in ScheduleAdmin(session, scheduled.Email).list()] == ["nightly", "of invoices"]


async def test_one_that_was_added_is_removed(engine: sa.Engine, scheduled: Queues, client_of: Any) -> None:
    async with client_of() as browser:
        await browser.post("/schedules/save", data=MINE)
        assert "Remove it" in (await browser.get("/schedules/edit?queue=email&schedule=mine")).text
        answer = await browser.post("/schedules/remove", data={"queue": "email", "schedule": "mine"})
        assert "The schedule was removed." in (await follow(browser, answer)).text
        assert "Remove it" not in (await browser.get(EDIT)).text


async def test_without_the_table_nothing_can_be_added(queues: Queues, client_of: Any) -> None:
    tables = set(queues.metadata.tables)
    answer = await post(client_of(), "/schedules/save", MINE)
    assert (answer.status_code, "The database has no table of schedules" in answer.text) == (422, True)
    assert set(queues.metadata.tables) == tables, "the dashboard declares no tables"


@pytest.mark.parametrize("then", ["look", "save"])
@pytest.mark.parametrize(
    ("field", "typed", "problem"),
    [
        ("every", "1e308", "every: write a number of seconds up to a hundred years"),
        ("every", "4e9", "every: write a number of seconds up to a hundred years"),
        ("jitter", "1e300", "jitter: write a number of seconds up to a hundred years"),
        ("misfire_grace", "inf", "misfire_grace: write a number of seconds up to a hundred years"),
        ("catch_up", "9" * 5000, "catch_up"),
    ],
)
async def test_numbers_that_are_too_large_are_told_at_the_form(
    scheduled: Queues, client_of: Any, field: str, typed: str, problem: str, then: str
) -> None:
    fields = {"queue": "email", "schedule": "new", "every": "60", "timezone": "UTC", "values": '{"recipient": "a"}'}
    answer = await post(client_of(), "/schedules/save", fields | {field: typed, "then": then})
    assert answer.status_code == (200 if then == "look" else 422)
    # The ticks do not depend on how many are caught up.
    assert problem in unescape(answer.text)
