"""Every page on SQLite and MariaDB, as a browser asks for it, and the limits of its statements."""

import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from sqlaqueue import (
    Consumer,
    Fail,
    complete,
    fail,
    prepare,
)
from sqlaqueue.mapping.mixin import spec_of
from sqlaqueue.sql.engine import sqlstate
from sqlaqueue.web import Dashboard
from sqlaqueue.web.data.job_columns import columns_of
from sqlaqueue.web.data.job_pages import parse_request, read_page
from sqlaqueue.web.data.past import Percentiles, read_durations
from sqlaqueue.web.data.reader import QueueReader
from sqlaqueue.web.database import Database
from tests.models import sent_statements
from tests.web.conftest import client, everything, follow
from tests.web.engines import ASYNC, FULL, Place, place

__all__ = ["place"]


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
        for number, seconds in enumerate((-4, -2, 1, 2), start=1):
            values = {"status": "completed", "finished_at": now, "started_at": now - timedelta(seconds=seconds)}
            connection.execute(sa.update(table).where(table.c.id == number).values(values))
    with Session(place.engine) as session:
        found = read_durations(QueueReader.begin(session, spec_of(place.Email))).runs
    assert isinstance(found, Percentiles)
    assert (found.number, found.p50, found.longest) == (4, pytest.approx(0.5), pytest.approx(2))
    assert found.p95 == pytest.approx(1.85)


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


@pytest.mark.few(8)
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


@pytest.mark.few(3)
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
        job.day = None if number % 3 == 0 else date(2030, 1, 1 + number % 2)
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


@pytest.mark.every_combination
def test_a_list_is_sorted_by_what_leads_an_index(place: Place) -> None:
    """Of a partial index, which SQLite has, only where the filter implies its condition."""
    with place.engine.begin() as connection:
        connection.exec_driver_sql("CREATE INDEX ix_other ON email (subject DESC, total)")
        if place.name == "mariadb":
            connection.exec_driver_sql("CREATE INDEX ix_prefix ON email (secret(5))")
        else:
            connection.exec_driver_sql("CREATE INDEX ix_collated ON email (secret COLLATE NOCASE)")
            connection.exec_driver_sql("CREATE INDEX ix_part ON email (weight) WHERE weight > 1")
    columns = columns_of(spec_of(place.Email), lambda *_: False)
    with Session(place.engine) as session:
        every = read_page(session, parse_request(columns, [])).sorts
        pending = read_page(session, parse_request(columns, [("state", "pending")])).sorts
    own = {"id", "recipient", "day", "subject"}
    # Without partial indexes those of claims begin with the status.
    assert {*every} == (own if place.name == "sqlite" else own | {"status"})
    assert {*pending} >= own | {"priority"}
    assert "weight" not in pending


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
    assert f"Sizes and dead rows are statistics of PostgreSQL, which {title} does not have." in text
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

_SOME = "(SELECT 1 FROM information_schema.columns LIMIT 400)"
LONG = {
    "sqlite": "WITH RECURSIVE x(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM x WHERE n < 20000000) "
    "SELECT count(*) FROM x",
    "mariadb": f"SELECT count(*) FROM {_SOME} AS a, {_SOME} AS b, {_SOME} AS c, (SELECT 1 UNION SELECT 2) AS d",
}
"""Statements that take some seconds, and then end without an error."""


@pytest.mark.every_combination
@pytest.mark.parametrize("api", ["sync", "async"])
async def test_a_statement_that_takes_too_long_is_cancelled(place: Place, api: str) -> None:
    """The next user of its connection has no such limit, and may write."""
    async with databases(place, api) as (database, engine):

        def read_long(session: Session) -> None:
            session.execute(sa.text(LONG[place.name]), bind_arguments={"mapper": place.Email}).all()

        with pytest.raises(DBAPIError) as caught:
            await database.read(read_long, statement_timeout=0.2)
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


@pytest.mark.every_combination
def test_reading_waits_for_no_writer(place: Place) -> None:
    """The page of a job locks a row for a moment, where others could claim it."""
    place.add(place.email(1))
    with place.engine.connect() as connection:
        connection.execute(sa.insert(place.Email.__table__).values(id=9, recipient="ada"))
        for path in ("/", "/queues/email", "/queues/email/jobs", "/queues/email/job?key=1", "/search?q=1"):
            place.text(path)
        connection.rollback()


@pytest.mark.parametrize("place", ["sqlite"], indirect=True)
async def test_an_action_keeps_the_write_lock_of_sqlite_from_its_first_read(place: Place) -> None:
    """Otherwise SQLite would refuse its write, if another transaction had committed since."""
    place.add(place.email(1))
    other = prepare(sa.create_engine(place.url), busy_timeout=0)

    def change(session: Session) -> None:
        session.get(place.Email, 1).subject = "changed"
        with pytest.raises(OperationalError, match="locked"), other.begin() as connection:
            connection.execute(sa.insert(place.Email.__table__).values(id=9, recipient="ada"))
        session.commit()

    await Database(sessionmaker(place.engine), "a test").write(change)
    other.dispose()


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


@pytest.mark.parametrize("api", ["sync", "async"])
async def test_sessions_that_commit_each_statement_are_refused(place: Place, api: str) -> None:
    """Limits and locks would end with the statement that has set them."""
    if api == "sync":
        engine: Any = prepare(sa.create_engine(place.url, isolation_level="AUTOCOMMIT"))
        factory: Any = sessionmaker(engine)
    else:
        url = place.url.set(drivername=ASYNC[place.name])
        engine = prepare(create_async_engine(url, isolation_level="AUTOCOMMIT"))
        factory = async_sessionmaker(engine)
    async with client(Dashboard(place.models, factory, access=everything)) as browser:
        response = await browser.get("/queues/email/jobs")
    assert response.status_code == 503
    assert "commit each statement by itself (AUTOCOMMIT)" in response.text
    if api == "sync":
        engine.dispose()
    else:
        await engine.dispose()


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
