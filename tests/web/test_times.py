"""Times: how long ago beside when, in one zone that the reader chooses, and schedules in their own."""

import re
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest
import sqlalchemy as sa

from sqlaqueue.web.rendering import ZONE, ZONE_COOKIE, Zone, ago, clock_text, moment, zone_of
from tests.models import add
from tests.web.conftest import follow
from tests.web.jobs import fail_jobs
from tests.web.models import Queues


@pytest.fixture
def in_new_york(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the server's process be in a zone of its own."""
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def zone_in(page: str) -> str:
    (label,) = re.findall(r'Times in <b data-zone="[^"]*">([^<]*)</b>', page)
    return str(label)


def choices_in(page: str) -> list[str]:
    return re.findall(r'name="zone" value="([^"]+)"', page)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "now"),
        (4.9, "4 s ago"),
        (185, "3 min ago"),
        (2 * 3600 + 5, "2 h ago"),
        (3 * 86400 + 5, "3 d ago"),
        (-185, "in 3 min"),
        (-86405, "in 1 d"),
    ],
)
def test_how_long_ago(seconds: float, text: str) -> None:
    now = datetime.now(UTC)
    assert ago(now - timedelta(seconds=seconds), now) == text


def test_a_moment_has_both_and_the_date_unless_it_is_today() -> None:
    ZONE.set(Zone("UTC", UTC))
    today = datetime.now(UTC).replace(hour=12, minute=0, second=0)
    assert "</span> · 12:00:00</time>" in str(moment(today)) or datetime.now(UTC).date() != today.date()
    shown = str(moment(datetime(2020, 5, 1, 10, tzinfo=UTC)))
    assert "d ago</span> · 2020-05-01 10:00:00</time>" in shown
    assert 'datetime="2020-05-01T10:00:00+00:00" title="2020-05-01 10:00:00 UTC"' in shown


def test_a_moment_is_shown_in_a_zone_with_its_summer_time() -> None:
    berlin = zone_of("Europe/Berlin")
    assert berlin is not None
    ZONE.set(berlin)
    assert "· 2020-05-01 12:00:00<" in str(moment(datetime(2020, 5, 1, 10, tzinfo=UTC)))
    assert "· 2020-01-01 11:00:00<" in str(moment(datetime(2020, 1, 1, 10, tzinfo=UTC)))
    of_schedule = str(moment(datetime(2020, 1, 1, 10, tzinfo=UTC), "Asia/Tokyo"))
    assert "· 2020-01-01 19:00:00 Asia/Tokyo<" in of_schedule
    assert clock_text(datetime(2020, 1, 1, 10, tzinfo=UTC)) == "11:00 CET"
    assert clock_text(datetime(2020, 1, 1, 10, tzinfo=UTC), with_date=True) == "2020-01-01 11:00 CET"


def test_a_moment_at_the_end_of_the_years_is_shown() -> None:
    for name in ("Pacific/Kiritimati", "server"):
        zone = zone_of(name)
        assert zone is not None
        ZONE.set(zone)
        assert "9999-12-31 23:59:59" in str(moment(datetime.max.replace(tzinfo=UTC))) or name == "server"


@pytest.mark.parametrize(
    "name",
    ["", "Nowhere", "../../etc/passwd", "/etc/passwd", "Europe", "Europe/Berlin; x=1", "é", "a" * 5000, "UTC\r\nX: 1"],
)
async def test_a_zone_that_does_not_exist_is_refused(client_of: Any, name: str) -> None:
    assert zone_of(name) is None
    async with client_of() as browser:
        answer = await browser.post("/zone", data={"zone": name, "back": ""})
        assert answer.status_code == 400
        assert "there is no such time zone" in answer.text
        assert "set-cookie" not in answer.headers
        if name.isascii() and "\r" not in name:
            # A cookie that something else has set is not used.
            browser.headers["Cookie"] = f"{ZONE_COOKIE}={name}"
            assert (await browser.get("/schedules")).status_code == 200


@pytest.mark.usefixtures("in_new_york", "no_examination")
async def test_the_reader_chooses_a_zone_and_stays_on_the_page(
    engine: sa.Engine, queues: Queues, client_of: Any
) -> None:
    add(engine, queues.Email(recipient="a"))
    fail_jobs(engine, queues.Email)
    async with client_of() as browser:
        page = await browser.get("/queues/email/jobs?state=failed&sort=-id&notice=edited:1")
        assert zone_in(page.text) in {"EST", "EDT"}
        assert choices_in(page.text) == ["UTC"]
        (back,) = re.findall(r'name="back" value="([^"]*)"', page.text)
        back = back.replace("&amp;", "&")
        shown = await follow(browser, await browser.post("/zone", data={"zone": "UTC", "back": back}))
        assert str(shown.url).endswith("/queues/email/jobs?state=failed&sort=-id")
        assert zone_in(shown.text) == "UTC"
        assert choices_in(shown.text) == ["server"]
        for other, label in (("server", {"EST", "EDT"}), ("Asia/Kolkata", {"Asia/Kolkata"})):
            shown = await follow(browser, await browser.post("/zone", data={"zone": other, "back": back}))
            assert zone_in(shown.text) in label
        (iso, title) = re.findall(r'datetime="([^"]*)" title="([^"]*) Asia/Kolkata"', shown.text)[0]
        local = datetime.fromisoformat(title).replace(tzinfo=UTC) - timedelta(hours=5, minutes=30)
        assert local == datetime.fromisoformat(iso).replace(microsecond=0)


EVIL = {"Origin": "http://evil.example", "Sec-Fetch-Site": "cross-site"}


async def test_the_cookie_is_of_the_dashboard_alone(client_of: Any) -> None:
    async with client_of() as browser:
        answer = await browser.post("/zone", data={"zone": "Europe/Berlin", "back": "health"})
        assert answer.headers["set-cookie"] == f"{ZONE_COOKIE}=Europe/Berlin; Max-Age=31536000; SameSite=Lax"
        answer = await browser.post("/zone", data={"zone": "UTC"}, headers=EVIL)
        assert answer.status_code == 403


@pytest.mark.parametrize(
    "back", ["//evil.example/", "https://evil.example/", "\\\\evil.example", "/evil", "javascript:alert(1)"]
)
async def test_the_way_back_leads_to_no_other_site(client_of: Any, back: str) -> None:
    async with client_of() as browser:
        answer = await browser.post("/zone", data={"zone": "UTC", "back": back})
        target = httpx.URL("http://localhost/mount/zone").join(answer.headers["location"].replace("\\", "/"))
        assert (target.scheme, target.host) == ("http", "localhost")
        answer = await browser.post("/zone", data={"zone": "UTC", "back": f"{back}\nX: 1"})
        assert answer.status_code == 400


async def test_a_due_job_says_since_when(engine: sa.Engine, queues: Queues, client_of: Any) -> None:
    late = datetime.now(UTC) - timedelta(minutes=22, seconds=30)
    add(engine, queues.Email(recipient="a", run_at=late), queues.Email(recipient="b", run_at=late + timedelta(days=1)))
    async with client_of() as browser:
        listed = (await browser.get("/queues/email/jobs?state=pending&columns=run_at")).text
        # In its column, and in what a phone shows of it.
        assert len(re.findall(r"due <time[^>]*><span data-ago>22 min ago</span>", listed)) == 2
        assert "<span data-ago>in 23 h</span>" in listed
        page = (await browser.get("/queues/email/job?key=1")).text
        assert "<dt>Due</dt><dd>22 min ago</dd>" in page
        assert "<dt>Due</dt>" not in (await browser.get("/queues/email/job?key=2")).text
