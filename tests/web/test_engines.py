"""Every page and action on SQLite and MariaDB, as a browser asks for them."""

import asyncio
import enum
import json
import re
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from html import unescape
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, relationship, sessionmaker

from sqlaqueue import Consumer, Fail, QueueConfig, QueueMixin, Schedule, claim, complete, fail, prepare
from sqlaqueue.admin import QueueAdmin, ScheduleAdmin
from sqlaqueue.mapping.mixin import spec_of
from sqlaqueue.queue.names import MINUTE
from sqlaqueue.queue.run import key_text
from sqlaqueue.schedules.schedule import schedule_groups
from sqlaqueue.schedules.store import declare
from sqlaqueue.sql.engine import sqlstate
from sqlaqueue.web import Access, Dashboard
from sqlaqueue.web.data.failures import Failures, read_failures
from sqlaqueue.web.data.history import read_history
from sqlaqueue.web.data.job_columns import columns_of
from sqlaqueue.web.data.job_pages import parse_request, read_page
from sqlaqueue.web.data.past import HOUR, Percentiles, read_durations
from sqlaqueue.web.data.reader import QueueReader
from sqlaqueue.web.database import Database
from tests.models import sent_statements, shared
from tests.web.conftest import act, client, everything, follow, hidden

ASYNC = {"sqlite": "sqlite+aiosqlite", "mariadb": "mariadb+asyncmy"}


class Kind(enum.Enum):
    WELCOME = "welcome"
    RECEIPT = "receipt"


@shared
def make_queues() -> Any:
    class Base(DeclarativeBase):
        type_annotation_map = {str: sa.String(100), datetime: sa.DateTime(timezone=True)}  # noqa: RUF012 - SQLAlchemy's form

    class Email(QueueMixin, Base):
        __tablename__ = "email"
        __queue__ = QueueConfig(extra_columns=("started_at",))
        id: Mapped[int] = mapped_column(sa.BigInteger, primary_key=True)
        recipient: Mapped[str] = mapped_column(index=True)
        subject: Mapped[str | None]
        secret: Mapped[str | None]
        kind: Mapped[Kind | None]
        payload: Mapped[dict[str, Any] | None] = mapped_column(sa.JSON(none_as_null=True))
        total: Mapped[Decimal | None] = mapped_column(sa.Numeric(20, 4))
        weight: Mapped[float | None] = mapped_column(sa.Double)
        urgent: Mapped[bool | None]
        day: Mapped[date | None]
        at: Mapped[datetime | None]
        reference: Mapped[uuid.UUID | None]
        blob: Mapped[bytes | None]

    class Letter(QueueMixin, Base):
        __tablename__ = "letter"
        __queue__ = QueueConfig(attempt_history=timedelta(days=14), statistics=True)
        id: Mapped[int] = mapped_column(primary_key=True)

    class Page(QueueMixin, Base):
        __tablename__ = "page"
        id: Mapped[uuid.UUID] = mapped_column(primary_key=True, default=uuid.uuid4)
        batch_id: Mapped[uuid.UUID | None] = mapped_column(sa.ForeignKey("book.id"), index=True)
        batch: Mapped["Book | None"] = relationship(back_populates="pages")

    class Book(QueueMixin, Base):
        __tablename__ = "book"
        __queue__ = QueueConfig(waits_for="pages")
        id: Mapped[uuid.UUID] = mapped_column(primary_key=True, default=uuid.uuid4)
        pages: Mapped[list["Page"]] = relationship(back_populates="batch")

    # The annotations name classes of this function.
    Base.registry._class_registry |= {"Book": Book, "Page": Page}
    return Email, Letter, Page, Book


class Place:
    """A database of one engine with the tables of the queues, and a dashboard of them."""

    def __init__(self, url: str) -> None:
        self.engine = prepare(sa.create_engine(url))
        self.url, self.name = self.engine.url, self.engine.dialect.name
        self.Email, self.Letter, self.Page, self.Book = self.models = make_queues()
        self.metadata: sa.MetaData = self.Email.metadata
        self.metadata.create_all(self.engine)

    def client(self, *models: Any, access: Any = everything, **options: Any) -> httpx.AsyncClient:
        return client(Dashboard(models or self.models, sessionmaker(self.engine), access=access, **options))

    def add(self, *jobs: Any) -> list[Any]:
        with Session(self.engine) as session:
            session.add_all(jobs)
            session.commit()
            return [job.id for job in jobs]

    def email(self, number: int, **values: Any) -> Any:
        given: dict[str, Any] = {"recipient": f"ada{number}@example.com", "subject": f"Hello {number}"}
        return self.Email(id=number, **(given | values))

    def settle(self, verb: Callable[..., Any], number: int = 1, **options: Any) -> None:
        with Session(self.engine) as session:
            jobs = session.scalars(claim(self.Email, number)).all()
            assert len(jobs) == number
            session.commit()
            session.execute(verb(jobs, **options))
            session.commit()

    def states(self) -> dict[int, str]:
        with Session(self.engine) as session:
            return {int(key_text(job.key)): job.state for job in QueueAdmin(session, self.Email).jobs(limit=1000)}

    def get(self, path: str, params: Any = None, **options: Any) -> httpx.Response:
        async def ask() -> httpx.Response:
            async with self.client(**options) as browser:
                return await browser.get(path, params=params)

        return asyncio.run(ask())

    def text(self, path: str, params: Any = None, **options: Any) -> str:
        response = self.get(path, params, **options)
        assert response.status_code == 200, response.text
        for broken in ("cannot be read", "took too long", "This page cannot", "internal error"):
            assert broken not in response.text, _around(response.text, broken)
        return response.text


def _around(text: str, words: str) -> str:
    place = text.index(words)
    return re.sub(r"\s+", " ", text[max(0, place - 300) : place + 300])


@pytest.fixture(params=["sqlite", "mariadb"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    with contextmanager(_url)(request, tmp_path) as url:
        found = Place(url)
        yield found
        found.engine.dispose()


def _url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'jobs.db'}"
        return
    server = request.getfixturevalue("mariadb")
    with server.database() as name:
        yield server.url(name)


FULL: dict[str, Any] = {
    "kind": Kind.RECEIPT,
    "payload": {"order": {"number": 5}, "name": "Ada", "done": True, "items": ["a", "b"]},
    "total": Decimal("12.5"),
    "weight": 0.25,
    "urgent": True,
    "day": date(2030, 12, 31),
    "at": datetime(2030, 12, 31, 8, 30, 15, 123456, tzinfo=UTC),
    "reference": uuid.UUID("12345678-1234-5678-1234-567812345678"),
    "blob": b"\x00\xff",
}
"""A value of each type."""


# -- reading -----------------------------------------------------------------------------------------------------------


def test_the_overview_shows_what_each_queue_does(place: Place) -> None:
    place.add(*(place.email(number) for number in range(1, 6)))
    place.settle(complete, 2)
    place.settle(fail, error="ValueError: no stock")
    text = place.text("/")
    for name in ("email", "letter", "page", "book"):
        assert f"queues/{name}" in text
    state = place.get("/api/queues/email").json()
    assert (state["pending"], state["due"], state["failed"], state["is_paused"]) == (2, 2, 1, False)
    assert state["finished_per_minute"] > 0


@pytest.mark.parametrize("span", ["hour", "6hours", "day", "week", "month"])
def test_the_page_of_a_queue_shows_its_past(place: Place, span: str) -> None:
    place.add(*(place.email(number) for number in range(1, 6)))
    place.settle(complete, 2)
    place.settle(fail, error="ValueError: no stock of item 7")
    text = place.text(f"/queues/email?span={span}")
    assert "no stock of item …" in text
    assert "othing has ended" not in text


def test_percentiles_are_those_of_the_times(place: Place) -> None:
    """Rows without a start are left out, and what two clocks make negative is zero."""
    now = datetime.now(UTC)
    place.add(*(place.email(number) for number in range(1, 8)))
    table = place.Email.__table__
    with place.engine.begin() as connection:
        for number, seconds in enumerate((-1, 1, 2, 3, 10), start=1):
            values = {"status": "completed", "finished_at": now, "started_at": now - timedelta(seconds=seconds)}
            connection.execute(sa.update(table).where(table.c.id == number).values(values))
    with Session(place.engine) as session:
        found = read_durations(QueueReader.begin(session, spec_of(place.Email))).runs
    assert isinstance(found, Percentiles)
    assert (found.number, found.p50, found.longest) == (5, pytest.approx(2), pytest.approx(10))
    assert found.p95 == pytest.approx(8.6)


def test_a_queue_with_a_history_shows_its_attempts(place: Place) -> None:
    place.add(*(place.Letter(id=number) for number in range(1, 4)))

    def handler(_: Session, letter: Any) -> None:
        if letter.id == 2:
            raise Fail("no such street")

    Consumer(place.Letter, handler, sessionmaker(place.engine)).drain()
    text = place.text("/queues/letter")
    assert "no such street" in text
    assert "othing has ended" not in text
    with Session(place.engine) as session:
        found = read_durations(QueueReader.begin(session, spec_of(place.Letter)))
    assert isinstance(found.waits, Percentiles)
    assert isinstance(found.runs, Percentiles)
    assert (found.waits.number, found.runs.number) == (3, 3)
    assert "no such street" in place.text("/queues/letter/job?key=2")
    assert [each["outcome"] for each in place.get("/api/queues/letter/job?key=2").json()["attempts"]] == ["failed"]


def test_a_list_shows_and_sorts_values_of_each_type(place: Place) -> None:
    place.add(place.email(1, **FULL), place.email(2))
    names = ",".join(["id", "recipient", *FULL])
    shown = place.get(f"/api/queues/email/jobs?columns={names}").json()
    columns = {job["key"]: job["columns"] for job in shown["jobs"]}
    full = columns["1"]
    assert (full["kind"], full["urgent"], full["day"]) == ("RECEIPT", True, "2030-12-31")
    assert datetime.fromisoformat(full["at"]) == FULL["at"]
    assert full["reference"] == str(FULL["reference"])
    assert full["payload"] == FULL["payload"]
    assert Decimal(full["total"]) == FULL["total"]
    assert float(full["weight"]) == FULL["weight"]
    assert full["blob"] == "\\x00ff"
    assert all(columns["2"][name] is None for name in FULL)
    place.text(f"/queues/email/jobs?columns={names}")


CONDITIONS = {
    "f.id": "1",
    "f.id.max": "1",
    "f.recipient": "ada1@example.com",
    "f.recipient.starts": "ada1",
    "f.subject.contains": "LO 1",
    "f.kind": "RECEIPT",
    "f.kind.null": "no",
    "f.payload.json.order.number": "5",
    "f.payload.json.name": "Ada",
    "f.payload.json.done": "true",
    "f.payload.json.items.1": "b",
    "f.total": "12.50",
    "f.total.min": "12.4",
    "f.weight.max": "0.25",
    "f.urgent": "true",
    "f.day": "2030-12-31",
    "f.at": "2030-12-31T09:30:15.123456+01:00",
    "f.at.min": "2030-12-31T08:30",
    "f.at.last": "1h",
    "f.reference": "12345678-1234-5678-1234-567812345678",
    "f.blob.null": "no",
    "error": "ValueError",
    "message": "no stock of item …",
    "job": "1",
}
"""Each condition with a value that the first of two jobs has, and the second has not."""


@pytest.mark.parametrize("name", CONDITIONS)
def test_each_condition_selects_the_jobs_that_meet_it(place: Place, name: str) -> None:
    place.add(place.email(1, **FULL), place.email(2, total=Decimal(1), weight=7.5, urgent=False, kind=None))
    place.settle(fail, error="ValueError: no stock of item 7")
    found = place.get("/api/queues/email/jobs", params={name: CONDITIONS[name]})
    assert [job["key"] for job in found.json()["jobs"]] == ["1"]
    place.text(f"/queues/email/jobs?{httpx.QueryParams({name: CONDITIONS[name]})}")


def test_what_the_database_has_no_value_for_is_refused_or_found_nowhere(place: Place) -> None:
    place.add(place.email(1, **FULL))
    for name, value in (("f.day", "2030-02-30"), ("f.reference", "x"), ("f.urgent", "maybe"), ("f.id", "1.5")):
        assert place.get("/queues/email/jobs", params={name: value}).status_code == 400
    assert place.get("/api/queues/email/jobs", params={"f.recipient": "'; DROP TABLE email; --"}).json()["jobs"] == []


@pytest.mark.parametrize("state", ["", "pending", "due", "processing", "expired", "completed", "failed", "cancelled"])
@pytest.mark.parametrize("size", [1, 2, 50])
def test_all_pages_of_a_list_have_each_job_once(place: Place, state: str, size: int) -> None:
    """By each order that is offered, forwards and backwards, with ties and NULLs in the sorted columns."""
    states = ("pending", "pending", "processing", "completed", "failed", "cancelled")
    now = datetime.now(UTC).replace(microsecond=0)
    jobs = []
    for number in range(1, 13):
        job = place.email(number, recipient=f"ada{number % 3}", priority=number % 2)
        job.status = states[number % len(states)]
        job.run_at = now - timedelta(minutes=number % 4)
        job.finished_at = now if number % 4 == 0 else None
        job.lease_expires_at = now - timedelta(minutes=1) if job.status == "processing" else None
        jobs.append(job)
    place.add(*jobs)
    with place.engine.connect() as connection:
        table = place.Email.__table__
        wanted = {"due": "pending", "expired": "processing"}.get(state, state)
        mine = sa.select(table.c.id).where(table.c.status == wanted) if state else sa.select(table.c.id)
        expected = {str(key) for key in connection.scalars(mine)}
    with Session(place.engine) as session:
        columns = columns_of(spec_of(place.Email), lambda *_: False)
        request = parse_request(columns, [("state", state)])
        for name in read_page(session, request).sorts:
            for sort in (name, f"-{name}"):
                ordered = [("state", state), ("sort", sort)]
                forwards = _walk(session, columns, ordered, size, "after")
                assert len(forwards) == len(set(forwards)), (sort, forwards)
                assert set(forwards) == expected, sort
                cursor = read_page(session, parse_request(columns, ordered), 50)
                last = cursor.cursor_of(cursor.jobs[-1]) if cursor.jobs else None
                if last is not None:
                    back = _walk(session, columns, ordered, size, "before", last)
                    assert back == forwards[:-1][::-1], sort


def _walk(
    session: Session, columns: Any, pairs: list[tuple[str, str]], size: int, side: str, cursor: str | None = None
) -> list[str]:
    found: list[str] = []
    while True:
        at = [] if cursor is None else [(side, cursor)]
        page = read_page(session, parse_request(columns, [*pairs, *at]), size)
        found += [job.key for job in (page.jobs if side == "after" else page.jobs[::-1])]
        cursor = page.next if side == "after" else page.previous
        if cursor is None:
            return found


def test_the_page_of_a_job_shows_all_that_it_has(place: Place) -> None:
    place.add(place.email(1, **FULL), place.email(2, subject="x" * 100))
    for key in ("1", "2"):
        text = place.text(f"/queues/email/job?key={key}")
        assert f"ada{key}@example.com" in text
    shown = place.get("/api/queues/email/job?key=1").json()["columns"]
    assert (shown["kind"], shown["urgent"], shown["payload"]) == ("RECEIPT", True, FULL["payload"])
    assert place.get("/queues/email/job?key=3").status_code == 404


def test_the_page_of_a_job_shows_what_it_waits_for(place: Place) -> None:
    book = place.Book(id=uuid.uuid4())
    page = place.Page(id=uuid.uuid4(), batch=book)
    place.add(book, page)
    assert str(page.id) in place.text(f"/queues/book/job?key={book.id}")
    assert str(book.id) in place.text(f"/queues/page/job?key={page.id}")
    assert place.get("/api/queues/page/jobs").json()["jobs"][0]["key"] == str(page.id)


def test_what_only_postgresql_can_tell_is_left_out_with_a_line(place: Place) -> None:
    title = {"sqlite": "SQLite", "mariadb": "MariaDB"}[place.name]
    text = place.text("/queues/email/claim")
    assert f"The claim is measured on PostgreSQL only. Health says what is wrong with the indexes on {title}." in text
    assert f"Sizes and dead rows are statistics of PostgreSQL, so there are none for {title}." in text
    assert f"This is read from the catalogs of PostgreSQL. Health says what is wrong with {title}." in text
    assert "Measure again" not in text


def test_no_statement_is_one_that_only_postgresql_has(place: Place) -> None:
    place.add(place.email(1, **FULL))
    with sent_statements(place.engine) as sent:
        for path in ("/", "/queues/email", "/queues/email/jobs", "/queues/email/job?key=1", "/queues/email/claim"):
            place.text(path)
    assert sent
    words = ("pg_", "set_config", "lateral", "to_json", "percentile_cont", "xmin")
    assert [text for text, _ in sent if any(word in text.lower() for word in words)] == []


# -- limits ------------------------------------------------------------------------------------------------------------

ENDLESS = {
    "sqlite": "WITH RECURSIVE x(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM x) SELECT count(*) FROM x",
    "mariadb": "SELECT count(*) FROM information_schema.columns a, information_schema.columns b, "
    "information_schema.columns c, information_schema.columns d",
}


@pytest.mark.parametrize("api", ["sync", "async"])
async def test_a_statement_that_takes_too_long_is_cancelled(place: Place, api: str) -> None:
    """The next user of its connection has no such limit, and may write."""
    async with databases(place, api) as (database, engine):

        def endless(session: Session) -> None:
            session.execute(sa.text(ENDLESS[place.name]), bind_arguments={"mapper": place.Email}).all()

        with pytest.raises(DBAPIError) as caught:
            await database.read(endless, statement_timeout=0.2)
        assert sqlstate(caught.value) == "57014"

        def write(session: Session) -> None:
            session.execute(sa.insert(place.Email.__table__).values(id=1, recipient="ada"))
            session.commit()

        with pytest.raises(DBAPIError) as caught:
            await database.read(write)
        assert sqlstate(caught.value) == "25006"
        await database.write(write, statement_timeout=0.2)
        assert await settings_of(place, engine) == {"sqlite": 0, "mariadb": 0}[place.name]
    assert place.states() == {1: "pending"}


def test_reading_waits_for_no_writer(place: Place) -> None:
    """The page of a job locks a row for a moment, where others could claim it."""
    place.add(place.email(1))
    with place.engine.connect() as connection:
        connection.execute(sa.insert(place.Email.__table__).values(id=9, recipient="ada"))
        for path in ("/", "/queues/email", "/queues/email/jobs", "/queues/email/job?key=1", "/search?q=1"):
            place.text(path)
        connection.rollback()


@asynccontextmanager
async def databases(place: Place, api: str) -> AsyncIterator[tuple[Database, Any]]:
    """Give the database of a dashboard with one connection, and its engine."""
    if api == "sync":
        engine: Any = prepare(sa.create_engine(place.url, pool_size=1, max_overflow=0))
        yield Database(sessionmaker(engine), "a test"), engine
        engine.dispose()
        return
    engine = prepare(create_async_engine(place.url.set(drivername=ASYNC[place.name]), pool_size=1, max_overflow=0))
    yield Database(async_sessionmaker(engine), "a test"), engine
    await engine.dispose()


async def settings_of(place: Place, engine: Any) -> float:
    """Return what limits the next statement of the only connection: whether it only reads, or how long it may take."""
    setting = sa.text("PRAGMA query_only" if place.name == "sqlite" else "SELECT @@SESSION.max_statement_time")
    if isinstance(engine, sa.Engine):
        with engine.connect() as connection:
            return float(connection.execute(setting).scalar_one())
    async with engine.connect() as connection:
        return float((await connection.execute(setting)).scalar_one())


async def test_the_pages_work_with_sessions_of_asyncio(place: Place) -> None:
    place.add(place.email(1, **FULL), place.email(2))
    place.settle(fail, error="ValueError: no stock")
    engine = prepare(create_async_engine(place.url.set(drivername=ASYNC[place.name])))
    async with client(Dashboard(place.models, async_sessionmaker(engine), access=everything)) as browser:
        for path in ("/", "/queues/email", "/queues/email/jobs", "/queues/email/job?key=1", "/health", "/workers"):
            response = await browser.get(path)
            assert response.status_code == 200, response.text
            assert "cannot be read" not in response.text
        await follow(browser, await browser.post("/queues/email/actions/requeue", data={"key": "1"}))
    await engine.dispose()
    assert place.states() == {1: "pending", 2: "pending"}


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


async def test_requeued_jobs_are_spread_over_some_time(place: Place) -> None:
    jobs = [place.email(number) for number in range(1, 4)]
    for job in jobs:
        job.status, job.finished_at = "failed", datetime.now(UTC) - timedelta(hours=1)
    place.add(*jobs)
    async with place.client() as browser:
        fields = {"key": ["1", "2", "3"], "spread": "10min"}
        await follow(browser, await browser.post("/queues/email/actions/requeue", data=fields))
    with place.engine.connect() as connection:
        times = connection.scalars(sa.select(place.Email.run_at).order_by(place.Email.id)).all()
    assert [round((each - times[0]).total_seconds()) for each in times] == [0, 200, 400]


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
    monkeypatch.setattr("sqlaqueue.web.dashboard.TIMER", 0.1)
    monkeypatch.setattr("sqlaqueue.web.dashboard.LIFETIME", 1.0)
    async with place.client() as browser:
        response = await browser.get("/events")
    assert response.text.count("data: ") >= 2


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
