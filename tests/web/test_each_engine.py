"""What is the same on PostgreSQL, SQLite and MariaDB, with sessions of threads and of asyncio.

Undo, the audit, pauses, changes of many jobs, requeues over some time, schedules, search, failures and history.
"""

import re
import uuid
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from html import unescape
from typing import Any
from urllib.parse import quote

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from sqlaqueue import Consumer, Fail, QueueConfig, QueueMixin, Schedule, Unique, claim, complete, fail
from sqlaqueue.admin import QueueAdmin, ScheduleAdmin
from sqlaqueue.mapping.mixin import spec_of
from sqlaqueue.schedules.schedule import schedule_groups
from sqlaqueue.schedules.store import declare
from sqlaqueue.testing import fire_schedules
from sqlaqueue.web import AuditMixin
from sqlaqueue.web.data.history import read_history
from sqlaqueue.web.data.past import HOUR
from tests.web.conftest import follow, hidden
from tests.web.engines import FULL, Place, each_place
from tests.web.test_engine_actions import scheduled_queue
from tests.web.test_schedule_forms import texts

__all__ = ["each_place"]

RUN_AT = datetime(2030, 12, 31, 8, 30, 15, 123456, tzinfo=UTC)
"""A time with microseconds, which comes back as it was."""


def rows(place: Place, model: Any) -> list[Any]:
    spec = spec_of(model)
    with place.engine.connect() as connection:
        return [tuple(row) for row in connection.execute(sa.select(spec.table).order_by(*spec.keys))]


def audit_of(place: Place) -> Any:
    """Create the table of an audit."""

    class Base(DeclarativeBase):
        pass

    class Action(AuditMixin, Base):
        __tablename__ = "queue_action"

    Base.metadata.create_all(place.engine)
    return Action


async def done_by(browser: Any, action: str, queue: str = "email", **fields: Any) -> Any:
    """Carry an action out, and return the page of what it has changed."""
    page = await follow(browser, await browser.post(f"/queues/{queue}/actions/{action}", data=fields))
    (link,) = re.findall(r'<a href="([^"]*)">Show what was changed, or undo it<', page.text)
    shown = await browser.get(str(page.url.join(unescape(link))))
    assert shown.status_code == 200, shown.text
    return shown


async def undo(browser: Any, page: Any, queue: str = "email") -> str:
    """Undo what a page shows, and return the text of the page after it."""
    answer = await browser.post(f"/queues/{queue}/actions/undo", data=dict(hidden(page.text)))
    return " ".join(re.sub(r"<[^>]*>", " ", (await follow(browser, answer)).text).split())


@pytest.mark.parametrize("api", ["sync", "async"])
@pytest.mark.parametrize("kept", ["memory", "table"])
@pytest.mark.parametrize("action", ["requeue", "cancel", "change"])
async def test_jobs_get_back_what_they_had(each_place: Place, action: str, kept: str, api: str) -> None:
    jobs = [each_place.email(n, priority=n, attempts=n, run_at=RUN_AT + n * timedelta(microseconds=1)) for n in (1, 2)]
    if action == "requeue":
        for job in jobs:
            job.status, job.finished_at, job.last_error = "failed", RUN_AT - timedelta(days=1000), "ValueError: x"
    each_place.add(*jobs)
    before = rows(each_place, each_place.Email)
    options = {"audit": audit_of(each_place)} if kept == "table" else {}
    values = {"v.priority": "9", "v.run_at": "2031-01-01T01:00:00.5+01:00"} if action == "change" else {}
    async with each_place.browser(api, **options) as browser:
        page = await done_by(browser, action, key=["1", "2"], **values)
        assert rows(each_place, each_place.Email) != before
        text = " ".join(re.sub(r"<[^>]*>", " ", page.text).split())
        assert "2 jobs still are as this action left them" in text
        assert "2 jobs are as they were before." in await undo(browser, page)
        assert rows(each_place, each_place.Email) == before
        assert "0 jobs are as they were before." in await undo(browser, page)
    assert rows(each_place, each_place.Email) == before


@pytest.mark.parametrize("api", ["sync", "async"])
async def test_jobs_that_have_run_changed_or_gone_since_are_named(each_place: Place, api: str) -> None:
    each_place.add(*(each_place.email(n, status="failed", finished_at=RUN_AT, attempts=2) for n in range(1, 5)))
    table = each_place.Email.__table__
    async with each_place.browser(api) as browser:
        page = await done_by(browser, "requeue", key=["1", "2", "3", "4"])
        each_place.settle(complete)
        with each_place.engine.begin() as connection:
            moved = sa.update(table).where(table.c.id == 3).values(run_at=datetime(2031, 1, 1, tzinfo=UTC))
            connection.execute(moved)
            connection.execute(sa.delete(table).where(table.c.id == 4))
        text = await undo(browser, page)
    assert "1 job is as it was before." in text
    assert "2 jobs were left as they are: they have run, or were changed, since." in text
    assert each_place.states() == {1: "completed", 2: "failed", 3: "pending"}


async def test_a_job_that_a_worker_runs_is_left(each_place: Place) -> None:
    each_place.add(*(each_place.email(n, status="failed", finished_at=RUN_AT) for n in (1, 2)))
    async with each_place.browser("sync") as browser:
        page = await done_by(browser, "requeue", key=["1", "2"])
        with Session(each_place.engine) as session:
            (job,) = session.scalars(claim(each_place.Email, 1)).all()
            running = job.id
            session.commit()
        assert "1 job is as it was before." in await undo(browser, page)
    assert each_place.states() == {running: "processing", 3 - running: "failed"}


@pytest.mark.parametrize("each_place", ["postgresql", "mariadb"], indirect=True)
async def test_a_job_that_somebody_has_locked_is_left(each_place: Place) -> None:
    """SQLite has one write lock, for which an undo waits."""
    each_place.add(*(each_place.email(n, status="failed", finished_at=RUN_AT) for n in (1, 2)))
    async with each_place.browser("sync") as browser:
        page = await done_by(browser, "requeue", key=["1", "2"])
        with each_place.engine.begin() as connection:
            table = each_place.Email.__table__
            connection.execute(sa.select(table.c.id).where(table.c.id == 2).with_for_update())
            text = await undo(browser, page)
    assert "1 job is as it was before." in text
    assert "1 job was left as it is" in text
    assert each_place.states() == {1: "failed", 2: "pending"}


async def test_a_job_whose_duplicate_is_there_by_now_is_refused(each_place: Place) -> None:
    class Base(DeclarativeBase):
        pass

    class Task(QueueMixin, Base):
        __tablename__ = "task"
        __queue__ = QueueConfig(unique=Unique("name"))
        id: Mapped[int] = mapped_column(primary_key=True)
        name: Mapped[str] = mapped_column(sa.String(20))

    Base.metadata.create_all(each_place.engine)
    each_place.add(*(Task(id=number, name=name) for number, name in enumerate("abc", start=1)))
    async with each_place.browser("sync", Task) as browser:
        page = await done_by(browser, "cancel", "task", key=["1", "2", "3"])
        each_place.add(Task(id=4, name="b"))
        text = await undo(browser, page, "task")
    assert "2 jobs are as they were before." in text
    with Session(each_place.engine) as session:
        found = {job.id: job.status for job in session.scalars(sa.select(Task))}
    assert found == {1: "pending", 2: "cancelled", 3: "pending", 4: "pending"}


@pytest.mark.parametrize("api", ["sync", "async"])
async def test_keys_of_several_columns_and_types_are_undone(each_place: Place, api: str) -> None:
    class Base(DeclarativeBase):
        type_annotation_map = {datetime: sa.DateTime(timezone=True)}  # noqa: RUF012 - SQLAlchemy's form

    class Odd(QueueMixin, Base):
        __tablename__ = "odd"
        __queue__ = QueueConfig()
        day: Mapped[date] = mapped_column(primary_key=True)
        name: Mapped[str] = mapped_column(sa.String(20), primary_key=True)
        reference: Mapped[uuid.UUID] = mapped_column(primary_key=True)
        number: Mapped[Decimal] = mapped_column(sa.Numeric(20, 2), primary_key=True)

    Base.metadata.create_all(each_place.engine)
    jobs = [
        Odd(day=date(2030, 1, n), name='a, "b"', reference=uuid.UUID(int=n), number=Decimal("7.25"), run_at=RUN_AT)
        for n in (1, 2)
    ]
    with Session(each_place.engine) as session:
        session.add_all(jobs)
        session.commit()
    before = rows(each_place, Odd)
    keys = [f'2030-01-0{n},"a, ""b""",{uuid.UUID(int=n)},7.25' for n in (1, 2)]
    async with each_place.browser(api, Odd) as browser:
        listed = (await browser.get("/api/queues/odd/jobs?sort=day")).json()["jobs"]
        assert [job["key"] for job in listed] == keys
        page = await done_by(browser, "cancel", "odd", key=keys)
        with Session(each_place.engine) as session:
            session.execute(sa.delete(Odd).where(Odd.reference == uuid.UUID(int=2)))
            session.commit()
        shown = " ".join(unescape(re.sub(r"<[^>]*>", " ", (await browser.get(str(page.url))).text)).split())
        assert f"1 job does not exist any more: {keys[1]}" in shown
        assert "1 job is as it was before." in await undo(browser, page, "odd")
    assert rows(each_place, Odd) == before[:1]


# -- the audit and pauses ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("api", ["sync", "async"])
async def test_the_audit_lists_what_was_done(each_place: Place, api: str) -> None:
    each_place.add(*(each_place.email(number) for number in range(1, 4)))
    async with each_place.browser(api, audit=audit_of(each_place)) as browser:
        await done_by(browser, "cancel", key=["1", "2"])
        paused = await done_by(browser, "pause", reason="moved to Größe 7")
        page = (await browser.get("/audit")).text
        assert re.findall(r'<th scope="row"><a href="[^"]*">(\w+)</a>', page) == ["pause", "cancel"]
        assert "moved to Größe 7" in page
        assert "The queue is resumed" in await undo(browser, paused)
        assert "undone" in (await browser.get("/audit")).text.lower()
    with Session(each_place.engine) as session:
        assert QueueAdmin(session, each_place.Email).pause_info() is None


@pytest.mark.parametrize("api", ["sync", "async"])
async def test_a_pause_has_a_reason_and_an_author_on_every_page(each_place: Place, api: str) -> None:
    async with each_place.browser(api) as browser:
        await follow(browser, await browser.post("/queues/email/actions/pause", data={"reason": "moved"}))
        for path in ("/", "/queues/letter", "/schedules", "/workers", "/health", "/failures"):
            page = (await browser.get(path)).text
            (shown,) = re.findall(r'<section id="pauses"[^>]*>(.*?)</section>', page, re.DOTALL)
            assert "by ada: moved" in shown, path
        # One that is paused already keeps the first reason.
        await browser.post("/queues/email/actions/pause", data={"reason": "another"})
    with Session(each_place.engine) as session:
        admin = QueueAdmin(session, each_place.Email)
        found = admin.pause_info()
        assert found is not None
        assert (found.reason, found.author) == ("moved", "ada")
        assert abs(datetime.now(UTC) - found.since) < timedelta(minutes=5)
        admin.resume()
        assert admin.pause_info() is None


# -- new values for many jobs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("api", ["sync", "async"])
@pytest.mark.parametrize("chosen", ["keys", "filter"])
async def test_values_of_many_jobs_are_changed(each_place: Place, chosen: str, api: str) -> None:
    each_place.add(
        *(each_place.email(number, max_attempts=number, run_at=RUN_AT) for number in (1, 2)),
        each_place.email(3, status="failed", finished_at=RUN_AT, run_at=RUN_AT),
        each_place.email(4, recipient="eve", run_at=RUN_AT),
    )
    by = [("key", "1"), ("key", "2"), ("key", "3")] if chosen == "keys" else [("all", "1"), ("f.recipient.starts", "a")]
    async with each_place.browser(api) as browser:
        preview = await browser.get("/queues/email/confirm", params=[("action", "change"), *by])
        assert "cannot be read" not in preview.text
        fields: dict[str, Any] = {"v.priority": "-7", "v.run_at": "2031-01-01T01:00:00.25+01:00", "v.max_attempts": ""}
        for name, value in hidden(preview.text[preview.text.index('actions/change"') :]):
            fields.setdefault(name, []).append(value)
        page = await follow(browser, await browser.post("/queues/email/actions/change", data=fields))
        assert "2 jobs were changed." in page.text
        table = each_place.Email.__table__
        columns = (table.c.id, table.c.priority, table.c.max_attempts, table.c.run_at)
        with each_place.engine.connect() as connection:
            found = {row.id: tuple(row[1:]) for row in connection.execute(sa.select(*columns))}
        moved = datetime(2031, 1, 1, 0, 0, 0, 250_000, tzinfo=UTC)
        assert (found[1], found[2]) == ((-7, 1, moved), (-7, 2, moved))
        assert (found[3][0], found[4][0]) == (0, 0)
        assert (found[3][2], found[4][2]) == (RUN_AT, RUN_AT)
        # A time may be that of the database.
        await follow(browser, await browser.post("/queues/email/actions/change", data={"key": "1", "v.run_at": "now"}))
    with each_place.engine.connect() as connection:
        (now,) = connection.execute(sa.select(table.c.run_at).where(table.c.id == 1)).one()
    assert abs(datetime.now(UTC) - now) < timedelta(minutes=5)


async def test_jobs_that_the_database_refuses_keep_their_values(each_place: Place) -> None:
    class Base(DeclarativeBase):
        pass

    class Task(QueueMixin, Base):
        __tablename__ = "task"
        __queue__ = QueueConfig()
        __table_args__ = (sa.CheckConstraint("id <> 2 OR priority < 9", name="no_two"),)
        id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)

    Base.metadata.create_all(each_place.engine)
    each_place.add(*(Task(id=number) for number in (1, 2, 3)))
    async with each_place.browser("sync", Task) as browser:
        fields = {"key": ["1", "2", "3"], "v.priority": "9"}
        answer = await browser.post("/queues/task/actions/change", data=fields)
        assert "refuses to change job 2" in answer.text
    with Session(each_place.engine) as session:
        assert {job.id: job.priority for job in session.scalars(sa.select(Task))} == {1: 9, 2: 0, 3: 9}


# -- requeues, failures, search ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("api", ["sync", "async"])
@pytest.mark.parametrize("chosen", ["keys", "filter"])
async def test_requeued_jobs_are_spread_over_some_time(each_place: Place, chosen: str, api: str) -> None:
    values: dict[str, Any] = {"status": "failed", "finished_at": RUN_AT - timedelta(days=3000), "priority": 1}
    each_place.add(*(each_place.email(number, **values) for number in range(1, 5)))
    by = {"key": ["1", "2", "3", "4"]} if chosen == "keys" else {"all": "1", "f.recipient.starts": "ada"}
    async with each_place.browser(api) as browser:
        preview = await browser.get("/queues/email/confirm", params={"action": "requeue", **by})
        fields: dict[str, Any] = {"spread": "10min"}
        for name, value in hidden(preview.text[preview.text.index('actions/requeue"') :]):
            fields.setdefault(name, []).append(value)
        page = await follow(browser, await browser.post("/queues/email/actions/requeue", data=fields))
        (link,) = re.findall(r'<a href="([^"]*)">Show what was changed, or undo it<', page.text)
        with each_place.engine.connect() as connection:
            times = connection.scalars(sa.select(each_place.Email.run_at).order_by(each_place.Email.id)).all()
        assert [(each - times[0]).total_seconds() for each in times] == pytest.approx([0, 150, 300, 450], abs=1e-5)
        assert abs(times[0] - datetime.now(UTC)) < timedelta(minutes=5)
        shown = await browser.get(str(page.url.join(unescape(link))))
        assert "4 jobs are as they were before." in await undo(browser, shown)
    assert set(each_place.states().values()) == {"failed"}


@pytest.mark.parametrize("api", ["sync", "async"])
async def test_a_group_of_failures_leads_to_its_jobs_and_is_requeued(each_place: Place, api: str) -> None:
    now = datetime.now(UTC)
    errors = ["ValueError: no stock of item 7 in 'a b'", "ValueError: no stock of item 8 in 'c'", "it's Größe 7", "x"]
    for number, error in enumerate(errors, start=1):
        values = {"status": "failed", "finished_at": now - timedelta(hours=number), "last_error": error}
        each_place.add(each_place.email(number, **values))
    async with each_place.browser(api) as browser:
        page = (await browser.get("/failures")).text
        links = [unescape(each) for each in re.findall(r'href="([^"]*message=[^"]*)"', page)]
        lists = [each for each in links if "/jobs?" in each]
        found = []
        for each in lists:
            listed = await browser.get("/api" + each.removeprefix("."), params=None)
            found.append(sorted(job["key"] for job in listed.json()["jobs"]))
        assert sorted(found) == [["1", "2"], ["3"], ["4"]]
        shown = unescape((await browser.get("/queues/email/job?key=1")).text)
        assert "2 failed jobs with this error</a>: <b>ValueError</b> no stock of item … in …" in shown
        assert "1 failed job with this error</a>: it's Größe …" in unescape(
            (await browser.get("/queues/email/job?key=3")).text
        )
        requeue = next(each for each in links if "action=requeue" in each and "no+stock" in each)
        preview = await browser.get(requeue.removeprefix("."))
        fields = dict(hidden(preview.text[preview.text.index('actions/requeue"') :]))
        page = await follow(browser, await browser.post("/queues/email/actions/requeue", data=fields))
        assert "2 jobs are pending again" in page.text, page.text
    assert each_place.states() == {1: "pending", 2: "pending", 3: "failed", 4: "failed"}


@pytest.mark.parametrize("api", ["sync", "async"])
async def test_a_search_finds_and_suggests_the_same(each_place: Place, api: str) -> None:
    each_place.add(each_place.email(1, **FULL), *(each_place.email(number, subject="x") for number in (20, 21)))
    each_place.settle(fail, error="ValueError: no stock")
    lines = {
        "1": ["1"],
        "recipient:ada1@example.com": ["1"],
        '"NO STOCK"': ["1"],
        "subject:~LO": ["1"],
        "payload.order.number:5": ["1"],
        "error:ValueError": ["1"],
        "total:12..13": ["1"],
        "day:>=2030-12-31": ["1"],
        "urgent:true": ["1"],
        "kind:!null": ["1"],
        "subject:x": ["20", "21"],
        "created_at:1h": ["1", "20", "21"],
        "subject:nothing": [],
    }
    async with each_place.browser(api, each_place.Email) as browser:
        for line, keys in lines.items():
            page = unescape((await browser.get("/search", params={"q": line})).text)
            assert sorted(set(re.findall(r"queues/email/job\?key=(\d+)", page)), key=int) == keys, line
            assert "not searched" not in page
        for suggestion in ("payload.order:", "kind:RECEIPT", "urgent:true", "error:ValueError"):
            assert f'value="{suggestion}"' in page


# -- schedules ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("api", ["sync", "async"])
async def test_a_schedule_is_added_edited_fired_reset_and_removed(each_place: Place, api: str) -> None:
    queue = scheduled_queue()
    groups = schedule_groups([Schedule("nightly", queue, cron="0 3 * * *", values={"note": "x"})], "test")
    queue.metadata.create_all(each_place.engine)
    with Session(each_place.engine) as session:
        for group in groups:
            declare(session, group)
        session.commit()

    def stored(name: str) -> Any:
        with Session(each_place.engine) as session:
            return ScheduleAdmin(session, queue).get(name)

    async with each_place.browser(api, queue) as browser:
        new = texts((await browser.get("/schedules/edit?queue=task")).text)
        new |= {
            "schedule": "hourly Größe",
            "queue": "task",
            "every": "3600.5",
            "values": '{"note": "é"}',
            "jitter": "9",
        }
        looked = await browser.post("/schedules/save", data=new | {"then": "look"})
        assert "<b>Every 1 h" in looked.text
        page = await follow(browser, await browser.post("/schedules/save", data=new))
        assert "The schedule was added." in page.text
        assert (await browser.post("/schedules/save", data=new)).status_code == 422
        added = stored("hourly Größe")
        assert (added.every, added.values, added.origin) == (timedelta(seconds=3600.5), {"note": "é"}, "added")
        shown = texts((await browser.get("/schedules/edit?queue=task&schedule=nightly")).text)
        page = await follow(browser, await browser.post("/schedules/save", data=shown))
        assert "The schedule is as it was." in page.text
        await follow(browser, await browser.post("/schedules/save", data=shown | {"cron": "0 5 * * 1"}))
        assert (stored("nightly").cron, stored("nightly").origin) == ("0 5 * * 1", "edited")
        # What was shown before is not written over the other change.
        again = await browser.post("/schedules/save", data=shown | {"jitter": "7"})
        assert (again.status_code, "was changed since" in again.text) == (422, True)
        for action, name in (("run", "hourly Größe"), ("reset", "nightly")):
            await follow(browser, await browser.post(f"/schedules/{action}", data={"queue": "task", "schedule": name}))
        assert stored("nightly").cron == "0 3 * * *"
        with Session(each_place.engine) as session:
            fire_schedules(session, [queue])
            session.commit()
            assert session.scalars(sa.select(queue.note)).all() == ["é"]
        remove = {"queue": "task", "schedule": "hourly Größe"}
        await follow(browser, await browser.post("/schedules/remove", data=remove))
        listed = (await browser.get("/api/schedules")).json()
    assert ([each["name"] for each in listed["schedules"]], listed["problems"]) == (["nightly"], [])


# -- for machines ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("api", ["sync", "async"])
async def test_programs_are_told_the_same(each_place: Place, api: str) -> None:
    each_place.add(each_place.email(1, **FULL), *(each_place.email(number) for number in (2, 3)))
    each_place.settle(fail, error="ValueError: no stock")
    names = ",".join(["recipient", *FULL])
    async with each_place.browser(api) as browser:
        queue = (await browser.get("/api/queues/email")).json()
        job = (await browser.get("/api/queues/email/job?key=1")).json()
        listed = (await browser.get(f"/api/queues/email/jobs?size=2&columns={names}")).json()
        rest = (await browser.get(f"/api/queues/email/jobs?size=2&after={quote(listed['next'])}")).json()
        exported = (await browser.get(f"/queues/email/jobs.json?columns={names}")).json()
        rows = (await browser.get(f"/queues/email/jobs.csv?columns={names}")).text.splitlines()
    assert {name: queue[name] for name in ("pending", "due", "failed", "is_paused", "problem")} == {
        "pending": 2,
        "due": 2,
        "failed": 1,
        "is_paused": False,
        "problem": None,
    }
    told = {
        "recipient": "ada1@example.com",
        "kind": "RECEIPT",
        "payload": FULL["payload"],
        "weight": "0.25",
        "urgent": True,
        "day": "2030-12-31",
        "at": "2030-12-31T08:30:15.123456+00:00",
        "reference": str(FULL["reference"]),
        "blob": "\\x00ff",
    }
    assert (job["state"], job["cut"], job["redacted"]) == ("failed", [], [])
    assert [[each["key"] for each in page["jobs"]] for page in (listed, rest)] == [["3", "2"], ["1"]]
    for columns in (job["columns"], exported[-1]["columns"]):
        assert {name: columns[name] for name in told} == told
        # SQLite keeps no zeros behind the point.
        assert Decimal(columns["total"]) == FULL["total"]
    assert [row.split(",")[0] for row in rows] == ["key", "3", "2", "1"]
    assert "RECEIPT" in rows[-1]


@pytest.mark.parametrize("api", ["sync", "async"])
async def test_consumers_write_the_history_that_is_drawn(each_place: Place, api: str) -> None:
    """The minute is written when the Consumer ends."""
    each_place.add(*(each_place.Letter(id=number) for number in range(1, 5)))

    def handler(_: Session, letter: Any) -> None:
        if letter.id == 2:
            raise Fail("no such street")

    Consumer(each_place.Letter, handler, sessionmaker(each_place.engine)).drain()
    async with each_place.browser(api) as browser:
        page = (await browser.get("/queues/letter")).text
    with Session(each_place.engine) as session:
        found = read_history(session, spec_of(each_place.Letter), HOUR, datetime.now(UTC))
    assert found is not None
    points = [point for point in found.points if point is not None]
    assert sum(point.counts.get("completed", 0) for point in points) == 3
    assert sum(point.counts.get("failed", 0) for point in points) == 1
    assert max(point.failure_rate or 0 for point in points) == pytest.approx(0.25)
    assert any(point.runs is not None and point.waits is not None for point in points)
    assert 'id="history' in page or "Failure rate" in page
    for broken in ("cannot be read", "took too long"):
        assert broken not in page
