"""Every action on SQLite and MariaDB, what programs ask for, and rights and redaction."""

import asyncio
import importlib
import json
import re
import threading
import time
import uuid
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from html import unescape
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from click.testing import CliRunner
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from sqlaqueue import (
    ConcurrencyLimit,
    Consumer,
    Fail,
    QueueConfig,
    QueueMixin,
    Schedule,
    Unique,
    claim,
    fail,
)
from sqlaqueue.admin import QueueAdmin, ScheduleAdmin
from sqlaqueue.cli import main
from sqlaqueue.mapping.mixin import spec_of
from sqlaqueue.queue.names import MINUTE
from sqlaqueue.schedules.schedule import schedule_groups
from sqlaqueue.schedules.store import declare
from sqlaqueue.web import Access, Dashboard
from sqlaqueue.web.data.failures import Failures, read_failures
from sqlaqueue.web.data.history import read_history
from sqlaqueue.web.data.past import HOUR
from sqlaqueue.web.data.reader import QueueReader
from tests.web.conftest import act, client, everything, follow, hidden
from tests.web.engines import FULL, Kind, Place, around, place

__all__ = ["place"]


# -- acting ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("action", "before", "after"),
    [
        ("requeue", ("failed", "failed", "pending"), ("pending", "pending", "pending")),
        ("cancel", ("failed", "pending", "pending"), ("failed", "cancelled", "cancelled")),
        ("purge", ("failed", "completed", "pending"), (None, None, "pending")),
    ],
)
@pytest.mark.parametrize("chosen", ["keys", "filter"])
async def test_an_action_changes_what_its_preview_says(
    place: Place, action: str, before: tuple[str, ...], after: tuple[str, ...], chosen: str
) -> None:
    jobs = [place.email(number) for number in range(1, 4)]
    for job, state in zip(jobs, before, strict=True):
        job.status, job.finished_at = state, None if state == "pending" else datetime.now(UTC) - timedelta(hours=1)
    place.add(*jobs)
    by: dict[str, Any] = {"key": ["1", "2", "3"]} if chosen == "keys" else {"all": "1", "f.recipient.starts": "ada"}
    async with place.client() as browser:
        preview = await browser.get("/queues/email/confirm", params={"action": action, **by})
        assert "cannot be read" not in preview.text
        fields: dict[str, Any] = {}
        for name, value in hidden(preview.text):
            fields.setdefault(name, []).append(value)
        done = await browser.post(f"/queues/email/actions/{action}", data=fields)
        await follow(browser, done)
    expected = {number: state for number, state in enumerate(after, start=1) if state is not None}
    assert place.states() == expected


@pytest.mark.parametrize("action", ["pause", "resume"])
async def test_a_queue_is_paused_and_resumed(place: Place, action: str) -> None:
    if action == "resume":
        with Session(place.engine) as session:
            QueueAdmin(session, place.Email).pause()
    async with place.client() as browser:
        await follow(browser, await browser.post(f"/queues/email/actions/{action}", data={}))
        assert (await browser.get("/api/queues/email")).json()["is_paused"] is (action == "pause")


async def test_an_edit_writes_values_of_each_type(place: Place) -> None:
    place.add(place.email(1, **FULL))
    place.settle(fail, error="ValueError: no stock")
    typed = {
        "subject": "Ho",
        "kind": "WELCOME",
        "payload": '{"n": 2}',
        "total": "7.25",
        "urgent": "false",
        "day": "2031-01-02",
        "at": "2031-01-02T03:04:05+01:00",
        "reference": str(uuid.UUID(int=7)),
    }
    async with place.client() as browser:
        form = (await browser.get("/queues/email/edit?key=1")).text
        assert "2030-12-31" in form
        fields = dict(hidden(form)) | {f"v.{name}": text for name, text in typed.items()}
        saved = await browser.post("/queues/email/actions/edit", data=fields)
        await follow(browser, saved)
        # The form was shown before: what it would write was written for another row.
        assert "changed" in (await browser.post("/queues/email/actions/edit", data=fields | {"v.subject": "Hu"})).text
    with Session(place.engine) as session:
        job = session.get(place.Email, 1)
    assert (job.subject, job.kind, job.payload, job.total) == ("Ho", Kind.WELCOME, {"n": 2}, Decimal("7.25"))
    assert (job.urgent, job.day, job.reference) == (False, date(2031, 1, 2), uuid.UUID(int=7))
    assert job.at == datetime(2031, 1, 2, 2, 4, 5, tzinfo=UTC)
    assert job.blob == FULL["blob"]


def test_an_edit_is_refused_while_the_job_runs(place: Place) -> None:
    place.add(place.email(1))
    form = place.text("/queues/email/edit?key=1")
    with Session(place.engine) as session:
        session.scalars(claim(place.Email, 1)).one()
        session.commit()
    fields = dict(hidden(form)) | {"v.subject": "Ho"}
    response = asyncio.run(act(place.client(), "edit", **fields))
    assert "It is processing" in response.text
    with Session(place.engine) as session:
        assert session.get(place.Email, 1).subject == "Hello 1"


async def test_another_job_like_one_is_enqueued(place: Place) -> None:
    place.add(place.email(1, **FULL))
    async with place.client() as browser:
        form = (await browser.get("/queues/email/enqueue?key=1")).text
        fields = dict(hidden(form)) | {"v.subject": "Ho", "v.run_at": ""}
        await follow(browser, await browser.post("/queues/email/actions/enqueue", data=fields))
    with Session(place.engine) as session:
        job = session.get(place.Email, 2)
    assert (job.subject, job.status, job.blob, job.reference) == ("Ho", "pending", FULL["blob"], FULL["reference"])


# -- schedules, workers, health ----------------------------------------------------------------------------------------


async def test_schedules_are_shown_paused_and_run(place: Place) -> None:
    queue = scheduled_queue()
    groups = schedule_groups([Schedule("nightly", queue, cron="0 3 * * *", values={"note": "x"})], "test")
    queue.metadata.create_all(place.engine)
    with Session(place.engine) as session:
        for group in groups:
            declare(session, group)
        session.commit()
    async with place.client(queue) as browser:
        assert "nightly" in (await browser.get("/schedules")).text
        for action in ("pause", "resume", "run"):
            fields = {"queue": "task", "schedule": "nightly"}
            await follow(browser, await browser.post(f"/schedules/{action}", data=fields))
        (shown,) = (await browser.get("/api/schedules")).json()["schedules"]
        assert (shown["name"], shown["cron"], shown["paused_at"]) == ("nightly", "0 3 * * *", None)
    with Session(place.engine) as session:
        assert ScheduleAdmin(session, queue).get("nightly").run_requested_at is not None


@pytest.mark.parametrize("place", ["sqlite"], indirect=True)
async def test_half_a_pair_of_surrogates_hides_no_schedule(place: Place) -> None:
    """JSON may have one, except that of MariaDB, and no page."""
    queue = scheduled_queue()
    groups = schedule_groups([Schedule("nightly", queue, every=60, values={"note": "x"})], "test")
    queue.metadata.create_all(place.engine)
    with Session(place.engine) as session:
        for group in groups:
            declare(session, group)
        session.commit()
    update = sa.text("""UPDATE sqlaqueue_schedule SET "values" = '{"note": "\\ud800"}'""")
    with place.engine.begin() as connection:
        connection.execute(update)
    async with place.client(queue) as browser:
        for path in ("/schedules", "/schedules/edit?queue=task&schedule=nightly", "/api/schedules"):
            response = await browser.get(path)
            assert response.status_code == 200, path
            assert "\\ud800" in response.text, path


def scheduled_queue() -> Any:
    class Base(DeclarativeBase):
        pass

    class Task(QueueMixin, Base):
        __tablename__ = "task"
        id: Mapped[int] = mapped_column(primary_key=True)
        note: Mapped[str | None] = mapped_column(sa.String(50))

    return Task


async def test_a_consumer_is_shown_and_asked(place: Place) -> None:
    consumer = Consumer(place.Email, lambda *_: None, sessionmaker(place.engine), worker_name="web", poll_interval=0.1)
    thread = threading.Thread(target=consumer.run)
    thread.start()
    try:
        async with place.client() as browser:

            async def shown() -> Any:
                found = (await browser.get("/api/consumers")).json()
                assert found["problems"] == []
                return found["consumers"]

            deadline = time.monotonic() + 30
            while not (listed := await shown()):
                assert time.monotonic() < deadline
                await asyncio.sleep(0.05)
            assert [each["name"].rpartition(":")[2] for each in listed] == ["web"]
            page = (await browser.get("/workers")).text
            links = [unescape(link) for link in re.findall(r'href="([^"]*workers/confirm[^"]*)"', page)]
            quiet = next(link for link in links if "action=quiet" in link)
            form = (await browser.get(quiet.lstrip("."))).text
            await follow(browser, await browser.post("/workers/quiet", data=dict(hidden(form))))
            while not (await shown())[0]["is_quiet"]:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.05)
            stop = dict(hidden(form)) | {"action": "stop"}
            await follow(browser, await browser.post("/workers/stop", data=stop))
        thread.join(30)
        assert not thread.is_alive()
    finally:
        consumer.stop()
        thread.join(30)


def test_health_shows_what_the_doctor_finds(place: Place) -> None:
    place.add(place.email(1))
    place.settle(fail, error="ValueError: no stock")
    for path in ("/health", "/health?deep=1"):
        text = place.text(path)
        assert "check could not" not in text
        assert "email" in text
    assert place.get("/api/findings").status_code == 200


# -- searching, and for machines ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    ["1", "recipient:ada1@example.com", '"no stock"', "subject:~LO", "payload.order.number:5", "error:ValueError"],
)
def test_a_search_finds_the_job(place: Place, words: str) -> None:
    place.add(place.email(1, **FULL), *(place.email(number, subject="x") for number in range(20, 24)))
    place.settle(fail, error="ValueError: no stock")
    text = place.text("/search", params={"q": words})
    assert "job?key=1" in unescape(text), text


def test_failures_are_shown_in_groups(place: Place) -> None:
    place.add(*(place.email(number) for number in range(1, 6)))
    for number in (1, 2, 3):
        place.settle(fail, error=f"ValueError: no stock of item {number} in 'shop {number}'")
    place.settle(fail, error="it's Größe 7")
    text = unescape(place.text("/failures"))
    assert "no stock of item … in …" in text
    assert "it's Größe …" in text
    with Session(place.engine) as session:
        found = read_failures(QueueReader.begin(session, spec_of(place.Email)))
    assert isinstance(found, Failures)
    first = found.groups[0]
    assert (first.kind, first.number, first.last_hour) == ("ValueError", 3, 3)


def test_the_history_of_minutes_is_drawn(place: Place) -> None:
    table = place.metadata.tables[MINUTE]
    minute = int(datetime.now(UTC).timestamp()) // 60
    with place.engine.begin() as connection:
        for ago, done in ((3, 5), (2, 7)):
            row = {"queue": "letter", "minute": minute - ago, "completed": done, "pending": 3, "due": 1, "wait_3": done}
            connection.execute(sa.insert(table).values(row))
    with Session(place.engine) as session:
        found = read_history(session, spec_of(place.Letter), HOUR, datetime.now(UTC))
    assert found is not None
    assert sum(point.counts["completed"] for point in found.points if point is not None) == 12
    place.text("/queues/letter")


@pytest.mark.parametrize("form", ["csv", "json"])
def test_a_list_is_exported(place: Place, form: str) -> None:
    place.add(place.email(1, **FULL), place.email(2))
    names = ",".join(["recipient", *FULL])
    response = place.get(f"/queues/email/jobs.{form}?columns={names}")
    assert response.status_code == 200
    assert "ada1@example.com" in response.text
    assert "12345678-1234-5678-1234-567812345678" in response.text
    if form == "json":
        assert [job["key"] for job in json.loads(response.text)] == ["2", "1"]


async def test_windows_are_told_by_the_timer(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def listen(*_: Any) -> None:
        pytest.fail("there are no notifications of other processes to listen for")

    monkeypatch.setattr("sqlaqueue.web.dashboard.listener.listen", listen)
    monkeypatch.setattr("sqlaqueue.web.dashboard.TIMER", 0.1)
    monkeypatch.setattr("sqlaqueue.web.dashboard.LIFETIME", 1.0)
    async with place.client() as browser:
        response = await browser.get("/events")
    assert response.text.count("data: ") >= 2


# -- other queues ------------------------------------------------------------------------------------------------------


def make_item(strategy: str, **options: Any) -> Any:
    class Base(DeclarativeBase):
        pass

    class Item(QueueMixin, Base):
        __tablename__ = "item"
        __queue__ = QueueConfig(strategy=strategy, **options)
        tenant: Mapped[str] = mapped_column(sa.String(20), primary_key=True)
        number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
        note: Mapped[str | None] = mapped_column(sa.String(50))
        reference: Mapped[uuid.UUID | None]

    return Item


KINDS: dict[str, dict[str, Any]] = {
    "update_status": {"strategy": "update_status", "unique": Unique("note")},
    "limits": {"strategy": "update_status", "flow_control": [ConcurrencyLimit(1, per="tenant")]},
    "batch_select": {"strategy": "batch_select"},
    "rows_are_messages": {"strategy": "delete_returning", "rows_are_messages": True},
}


PLACES_OF_KINDS = [
    *(("mariadb", kind) for kind in KINDS),
    # SQLite has one write lock, which the claims of the other strategies keep.
    *(("sqlite", kind) for kind, options in KINDS.items() if options["strategy"] == "update_status"),
]


@pytest.mark.parametrize(("place", "kind"), PLACES_OF_KINDS, indirect=["place"])
async def test_queues_of_each_strategy_are_shown_and_changed(place: Place, kind: str) -> None:
    """With keys of two columns; the failed jobs of the last one are dead letters."""
    options = KINDS[kind]
    model = make_item(**options)
    model.metadata.create_all(place.engine)
    with Session(place.engine) as session:
        session.add_all(
            [model(tenant="a,b", number=number, note=f"n{number}", reference=uuid.UUID(int=1)) for number in (1, 2, 3)]
        )
        session.commit()

    def handler(_: Session, item: Any) -> None:
        if item.number < 3:
            raise Fail(f"no stock of item {item.number}")

    Consumer(model, handler, sessionmaker(place.engine)).drain()
    key = '"a,b",1'
    async with place.client(model) as browser:
        paths = ["/", "/queues/item", "/queues/item/jobs?state=failed", "/queues/item/jobs?state=pending", "/failures"]
        for path in paths:
            text = (await browser.get(path)).text
            assert "cannot be read" not in text, around(text, "cannot be read")
        shown = await browser.get("/queues/item/job", params={"key": key})
        assert shown.status_code == 200, shown.text
        assert "no stock of item 1" in shown.text
        form = await browser.get("/queues/item/edit", params={"key": key})
        fields = dict(hidden(form.text)) | {"v.note": "typed", "then": "requeue"}
        edited = await browser.post("/queues/item/actions/edit", data=fields)
        await follow(browser, edited)
        preview = await browser.get("/queues/item/confirm", params={"action": "requeue", "key": '"a,b",2'})
        await follow(browser, await browser.post("/queues/item/actions/requeue", data=dict(hidden(preview.text))))
        jobs = (await browser.get("/api/queues/item/jobs?state=pending&columns=note,reference")).json()["jobs"]
    assert {job["key"]: job["columns"] for job in jobs} == {
        key: {"note": "typed", "reference": str(uuid.UUID(int=1))},
        '"a,b",2': {"note": "n2", "reference": str(uuid.UUID(int=1))},
    }


# -- rights and redaction ----------------------------------------------------------------------------------------------


def test_redacted_values_are_nowhere(place: Place) -> None:
    place.add(place.email(1, secret="tiger", subject="seen"))  # noqa: S106 - it is none
    place.settle(fail, error="ValueError: tiger")
    options = {"redact": ["Email.secret", "Email.last_error"]}
    paths = (
        "/",
        "/queues/email",
        "/queues/email/jobs?columns=secret,last_error,subject",
        "/queues/email/job?key=1",
        "/queues/email/edit?key=1",
        "/queues/email/jobs.csv?columns=secret,last_error,subject",
        "/api/queues/email/job?key=1",
        "/api/queues/email/jobs?columns=secret,last_error",
        "/failures",
        "/health",
        "/search?q=seen",
    )
    for path in paths:
        response = place.get(path, **options)
        assert response.status_code == 200, path
        assert "tiger" not in response.text, path
    assert place.get("/queues/email/jobs?f.secret=tiger", **options).status_code == 400


@pytest.mark.parametrize("until", ["0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00"])
async def test_a_moment_that_python_does_not_have_in_utc_is_refused(place: Place, until: str) -> None:
    answer = await act(place.client(), "cancel", all="1", state="due", until=until)
    assert answer.status_code == 400
    assert "until: it is no moment with a time zone" in answer.text


async def test_a_form_does_not_let_redacted_values_be_guessed(place: Place) -> None:
    place.add(place.email(1, secret="tiger"))  # noqa: S106 - it is none

    async def version(**options: Any) -> str:
        async with place.client(**options) as browser:
            return dict(hidden((await browser.get("/queues/email/edit?key=1")).text))["version"]

    shown, redacted = await version(), await version(redact=["Email.secret"])
    for column, value in [("secret", "lion"), ("subject", "other")]:
        with place.engine.begin() as connection:
            connection.execute(sa.update(place.Email.__table__).values({column: value}))
        # A hash of the other values and a guess would tell whether the guess is right.
        assert (await version(redact=["Email.secret"]) == redacted) == (column == "secret")
        assert await version() != shown


async def test_actions_need_their_right_and_the_same_origin(place: Place) -> None:
    place.add(place.email(1))
    app = Dashboard(place.models, sessionmaker(place.engine), access=lambda _: Access(read=["email"], act=False))
    async with client(app) as browser:
        for path, fields in (
            ("/queues/email/actions/cancel", {"key": "1"}),
            ("/queues/email/actions/pause", {}),
            ("/queues/email/actions/edit", {"key": "1", "v.subject": "x"}),
            ("/queues/email/actions/enqueue", {"key": "1"}),
        ):
            assert (await browser.post(path, data=fields)).status_code == 403
        for path in ("/queues/letter", "/queues/letter/jobs", "/api/queues/letter"):
            assert (await browser.get(path)).status_code == 404
    async with place.client() as browser:
        foreign = {"Origin": "https://evil.example", "Sec-Fetch-Site": "cross-site"}
        response = await browser.post("/queues/email/actions/cancel", data={"key": "1"}, headers=foreign)
        assert response.status_code == 403
    assert place.states() == {1: "pending"}


def test_an_engine_that_is_not_prepared_is_refused_with_the_line_that_is_missing(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    engine = sa.create_engine(place.url)

    async def ask() -> httpx.Response:
        async with client(Dashboard(place.models, sessionmaker(engine), access=everything)) as browser:
            return await browser.get("/queues/email/jobs")

    assert asyncio.run(ask()).status_code == 500
    engine.dispose()
    assert "use engine = sqlaqueue.prepare(create_engine(...))" in caplog.text


PROGRAM = """
import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from sqlaqueue import QueueMixin


class Base(DeclarativeBase):
    pass


class Parcel(QueueMixin, Base):
    __tablename__ = "parcel"
    id: Mapped[int] = mapped_column(primary_key=True)
"""


async def test_the_command_serves_the_dashboard(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"program_of_{place.name}"
    (tmp_path / f"{name}.py").write_text(PROGRAM)
    monkeypatch.syspath_prepend(str(tmp_path))
    model = importlib.import_module(name).Parcel
    model.metadata.create_all(place.engine)
    place.add(model(id=1))
    served: list[Any] = []
    # Of the command all but the server.
    monkeypatch.setattr("sqlaqueue.cli.worker._serve", lambda app, _, __, engine, **___: served.extend((app, engine)))
    url = place.url.render_as_string(hide_password=False)
    result = CliRunner().invoke(main, ["web", f"{name}:Parcel", "--url", url])
    assert result.exit_code == 0, result.output
    async with client(served[0]) as browser:
        shown = await browser.get("/queues/parcel/job?key=1")
        assert shown.status_code == 200, shown.text
        await follow(browser, await browser.post("/queues/parcel/actions/cancel", data={"key": "1"}))
    served[1].dispose()
    with Session(place.engine) as session:
        assert session.scalars(sa.select(model.status)).all() == ["cancelled"]
