"""The stream of events: what it says, who may read it, and that it leaves nothing behind."""

import asyncio
import contextlib
import json
import os
import re
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from fastapi import FastAPI
from litestar import Litestar, asgi
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import sessionmaker

from sqlaqueue.mapping.mixin import spec_of
from sqlaqueue.postgresql.triggers import channel_of, lock_numbers
from sqlaqueue.web import Access, Dashboard
from sqlaqueue.web import dashboard as dashboard_module
from sqlaqueue.web.security import SECURITY_HEADERS
from tests.models import add
from tests.programs import ROOT, Program
from tests.servers import PROGRAM, Database, Pooler
from tests.web.conftest import everything, serving
from tests.web.models import Queues

LISTENING = "SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'LISTEN%%' AND datname = current_database()"


class Stream:
    """An open stream, as a browser reads it."""

    def __init__(self, response: httpx.Response) -> None:
        self.response = response
        self._lines = response.aiter_lines()

    async def comment(self) -> str:
        return await anext(self._lines)

    async def event(self) -> Any:
        async with asyncio.timeout(30):
            async for line in self._lines:
                if line.startswith("data: "):
                    return json.loads(line.removeprefix("data: "))
        return None

    async def names(self, queue: str) -> None:
        while queue not in (await self.event())["queues"]:
            pass


@contextlib.asynccontextmanager
async def streaming(root: str, path: str = "events") -> AsyncIterator[Stream]:
    async with httpx.AsyncClient(timeout=30) as client, client.stream("GET", root + path) as response:
        yield Stream(response)


@pytest.fixture
def no_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dashboard_module, "TIMER", 1e6)


@pytest.fixture(params=["psycopg", "asyncpg", "psycopg async"])
def any_root(request: pytest.FixtureRequest, queues: Queues, engine: sa.Engine) -> Iterator[str]:
    """The URL of a dashboard with each kind of sessions."""
    driver, _, is_async = request.param.partition(" ")
    if driver == "psycopg" and not is_async:
        with serving(Dashboard(queues.all, sessionmaker(engine), access=everything)) as root:
            yield root
        return
    url = engine.url.set(drivername=f"postgresql+{driver}")
    other = create_async_engine(url, poolclass=sa.NullPool)
    with serving(Dashboard(queues.all, async_sessionmaker(other), access=everything)) as root:
        yield root


@pytest.fixture
def email(queues: Queues, engine: sa.Engine) -> Iterator[Callable[[], None]]:
    """Enqueue an email, of which a notification is sent: a Consumer that waits holds this lock."""

    def enqueue() -> None:
        add(engine, queues.Email(recipient="ada@example.com", subject="ten thousand"))

    with engine.connect() as waiting:
        lock = lock_numbers(channel_of(spec_of(queues.Email)))
        waiting.execute(sa.select(sa.func.pg_advisory_xact_lock(*lock)))
        yield enqueue


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(30):
        while not await asyncio.to_thread(condition):
            await asyncio.sleep(0.05)


def listening(engine: sa.Engine) -> int:
    with engine.connect() as connection:
        return int(connection.exec_driver_sql(LISTENING).scalar_one())


@pytest.mark.usefixtures("no_timer")
async def test_a_new_job_is_an_event_with_the_name_of_its_queue(any_root: str, email: Any, engine: sa.Engine) -> None:
    async with streaming(any_root) as stream:
        assert stream.response.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert [name for name in SECURITY_HEADERS if name not in stream.response.headers] == []
        assert stream.response.headers["cache-control"] == "no-store"
        assert await stream.comment() == ": connected"
        # Those before the subscription may have been missed.
        await until(lambda: listening(engine) == 1)
        email()
        queues: list[str] = []
        while "email" not in queues:
            event = await stream.event()
            assert [*event] == ["queues"]
            queues = event["queues"]
    # Nothing is left when nobody watches.
    await until(lambda: listening(engine) == 0)


@pytest.mark.usefixtures("no_timer")
async def test_windows_share_a_connection(root: str, email: Any, engine: sa.Engine) -> None:
    async with streaming(root) as one:
        async with streaming(root) as another, streaming(root, "events?queue=email"):
            await until(lambda: listening(engine) == 1)
            email()
            for each in (one, another):
                await each.names("email")
        email()
        await one.names("email")
    await until(lambda: listening(engine) == 0)


def in_fastapi(dashboard: Dashboard) -> Any:
    app = FastAPI()

    @app.middleware("http")
    async def pass_on(request: Any, call_next: Any) -> Any:
        return await call_next(request)

    app.mount("/queues", dashboard)
    return app


def in_litestar(dashboard: Dashboard) -> Any:
    return Litestar([asgi("/queues", is_mount=True, copy_scope=True)(dashboard)])


@pytest.mark.usefixtures("no_timer")
@pytest.mark.parametrize("mounted", [in_fastapi, in_litestar])
async def test_in_an_application(dashboard: Any, engine: sa.Engine, email: Any, mounted: Any) -> None:
    with serving(mounted(dashboard)) as root:
        async with streaming(root, "queues/events") as stream:
            await until(lambda: listening(engine) == 1)
            email()
            await stream.names("email")
        await until(lambda: listening(engine) == 0)


async def test_the_timer_sends_an_event_without_a_notification(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dashboard_module, "TIMER", 0.1)
    async with streaming(root) as stream:
        while await stream.event() != {"queues": []}:
            pass


@pytest.mark.skipif(PROGRAM is None, reason="needs PgBouncer: apt-get install pgbouncer")
async def test_behind_a_pooler_the_timer_is_left(
    shared: Database, queues: Queues, engine: sa.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dashboard_module, "TIMER", 0.1)
    with Pooler(shared, "transaction") as pooler:
        behind = sa.create_engine(
            pooler.url("psycopg"), poolclass=sa.NullPool, connect_args={"prepare_threshold": None}
        )
        with serving(Dashboard(queues.all, sessionmaker(behind), access=everything)) as root:
            async with streaming(root) as stream:
                for _ in range(3):
                    assert await stream.event() is not None


@pytest.mark.usefixtures("no_timer")
async def test_only_queues_that_the_user_sees(queues: Queues, sessions: Any, engine: sa.Engine, email: Any) -> None:
    dashboard = Dashboard(queues.all, sessions, access=lambda _: Access(read=[queues.Email]))
    with serving(dashboard) as root:
        async with streaming(root, "events?queue=invoice") as refused, streaming(root, "events?queue=none") as unknown:
            assert refused.response.status_code == unknown.response.status_code == 404
            assert await refused.response.aread() == await unknown.response.aread()
        async with streaming(root) as stream:
            await until(lambda: listening(engine) == 1)
            add(engine, queues.Invoice())
            email()
            assert (await stream.event())["queues"] == ["email"]


@pytest.mark.usefixtures("no_timer")
@pytest.mark.parametrize(("shortest", "sends"), [(0.0, True), (1e6, False)])
async def test_events_are_not_sent_too_often(
    root: str, email: Any, engine: sa.Engine, monkeypatch: pytest.MonkeyPatch, shortest: float, *, sends: bool
) -> None:
    monkeypatch.setattr(dashboard_module, "SHORTEST", shortest)
    monkeypatch.setattr(dashboard_module, "LIFETIME", 60 if sends else 1.5)
    async with streaming(root) as stream:
        await until(lambda: listening(engine) == 1)
        email()
        assert (await stream.event() is not None) is sends


async def test_a_stream_ends_after_some_time(root: str, engine: sa.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dashboard_module, "LIFETIME", 0.2)
    async with streaming(root) as stream:
        while await stream.event() is not None:
            pass
    await until(lambda: listening(engine) == 0)


async def test_so_many_windows_and_no_more(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dashboard_module, "MOST_VIEWERS", 2)
    async with streaming(root) as one, contextlib.AsyncExitStack() as stack:
        another = await stack.enter_async_context(streaming(root))
        assert await one.comment() == await another.comment() == ": connected"
        async with streaming(root) as refused:
            assert refused.response.status_code == 429
            assert int(refused.response.headers["retry-after"]) > 0
        await stack.aclose()
        status = 429
        async with asyncio.timeout(30):
            while status != 200:
                async with streaming(root) as again:
                    status = again.response.status_code


def named(request: Any) -> Access:
    return Access(read=True, user=request.headers.get("x-user", ""))


async def test_one_reader_does_not_take_all_windows(
    queues: Queues, sessions: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dashboard_module, "MOST_OF_A_READER", 2)
    with serving(Dashboard(queues.all, sessions, access=named)) as root:
        async with httpx.AsyncClient(timeout=30) as browser, contextlib.AsyncExitStack() as stack:

            async def opened(user: str) -> httpx.Response:
                headers = {"X-User": user} if user else {}
                return await stack.enter_async_context(browser.stream("GET", root + "events", headers=headers))

            assert [(await opened("ada")).status_code for _ in range(2)] == [200, 200]
            refused = await opened("ada")
            assert refused.status_code == 429
            assert int(refused.headers["retry-after"]) > 0
            assert "of your windows" in (await refused.aread()).decode()
            # Users have windows of their own, and so have those of an address without a name.
            assert [(await opened(user)).status_code for user in ("eve", "", "")] == [200, 200, 200]
            assert (await opened("")).status_code == 429
            await stack.aclose()
            status = 429
            async with asyncio.timeout(30):
                while status != 200:
                    status = (await opened("ada")).status_code


async def test_many_requests_at_once_get_no_more_windows(
    queues: Queues, sessions: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dashboard_module, "MOST_OF_A_READER", 3)
    with serving(in_fastapi(Dashboard(queues.all, sessions, access=named))) as root:
        async with contextlib.AsyncExitStack() as stack, httpx.AsyncClient(timeout=30) as browser:
            opening = [stack.enter_async_context(browser.stream("GET", root + "queues/events")) for _ in range(12)]
            statuses = [response.status_code for response in await asyncio.gather(*opening)]
            await stack.aclose()
    assert sorted(statuses) == [200] * 3 + [429] * 9


async def test_access_is_checked_for_each_stream(
    queues: Queues, sessions: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dashboard_module, "LIFETIME", 0.1)
    answers: list[Access | None] = [Access(read=True), None]
    with serving(Dashboard(queues.all, sessions, access=lambda _: answers.pop(0))) as root:
        async with streaming(root) as stream:
            assert stream.response.status_code == 200
        async with streaming(root) as stream:
            assert stream.response.status_code == 403


async def test_the_head_of_a_stream_has_no_end_to_wait_for(root: str) -> None:
    async with httpx.AsyncClient(timeout=30) as client:
        response = await client.head(root + "events")
    assert response.headers["content-type"].startswith("text/event-stream")


APP = """
import sqlalchemy as sa
from sqlalchemy.orm import sessionmaker
from sqlaqueue.web import Access, Dashboard
from tests.web.browser.example import QUEUES

app = Dashboard(QUEUES, sessionmaker(sa.create_engine({url!r})), access=lambda _: Access(read=True))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_server_stops_with_open_streams(shared: Database, tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "app.py").write_text(APP.format(url=shared.url()))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    program = Program("uvicorn", "app:app", "--port=0", environment=environment, directory=tmp_path)
    try:
        await asyncio.to_thread(program.wait_for, "running on http")
        (root,) = re.findall(r"running on (http\S+)", program.output)
        async with streaming(f"{root}/") as stream:
            assert await stream.comment() == ": connected"
            program.signal(number)
            async with asyncio.timeout(60):
                while await stream.event() is not None:
                    pass
        await asyncio.to_thread(program.end)
    finally:
        program.clear()
    assert "Finished server process" in program.output
    assert "Traceback" not in program.output
