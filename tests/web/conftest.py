"""Each test finds an empty database with the tables of ``queues``, and asks a dashboard by ``client_of``."""

import asyncio
import contextlib
import logging
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import unescape
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
import uvicorn
from sqlalchemy.orm import sessionmaker

from sqlaqueue.web import Access, Dashboard
from tests.shared_database import engine, shared
from tests.web.models import Queues

__all__ = ["engine", "shared"]

HERE = "http://localhost"
Fields = Mapping[str, str | Sequence[str]]


@pytest.fixture(scope="session")
def all_queues() -> Queues:
    """The same classes for all tests, so that their statements are compiled once."""
    return Queues()


@pytest.fixture
def queues(all_queues: Queues, engine: sa.Engine) -> Iterator[Queues]:
    metadata = all_queues.metadata
    own = set(metadata.tables)
    metadata.create_all(engine)
    yield all_queues
    # The tables of schedules, where a test has declared some.
    for name in set(metadata.tables) - own:
        metadata.remove(metadata.tables[name])


@pytest.fixture
def sessions(engine: sa.Engine) -> sessionmaker[Any]:
    return sessionmaker(engine)


def everything(_: Any) -> Access:
    return Access(read=True, act=True, user="ada")


def client(app: Any) -> httpx.AsyncClient:
    """Return a client that asks an ASGI application as a browser on this machine would."""
    transport = httpx.ASGITransport(app=app)
    return httpx.AsyncClient(
        transport=transport, base_url=HERE, headers={"Sec-Fetch-Site": "same-origin", "Origin": HERE}
    )


def ask(engine: sa.Engine, *models: Any, access: Any = everything, **options: Any) -> httpx.AsyncClient:
    return client(Dashboard(models, sessionmaker(engine), access=access, **options))


@pytest.fixture
def client_of(queues: Queues, sessions: Any) -> Callable[..., httpx.AsyncClient]:
    """Return a client of a dashboard of ``queues``; the arguments are those of the dashboard."""

    def make(*models: Any, factory: Any = sessions, access: Any = everything, **options: Any) -> httpx.AsyncClient:
        return client(Dashboard(models or queues.all, factory, access=access, **options))

    return make


async def post(client: Any, path: str, fields: Fields, **options: Any) -> httpx.Response:
    async with client as browser:
        response: httpx.Response = await browser.post(path, data=fields, **options)
        return response


async def act(client: Any, action: str, queue: str = "email", **fields: str | Sequence[str]) -> httpx.Response:
    return await post(client, f"/queues/{queue}/actions/{action}", fields)


async def follow(browser: httpx.AsyncClient, response: httpx.Response) -> httpx.Response:
    """Return the page to which an action leads."""
    assert response.status_code == 303, response.text
    return await browser.get(str(response.url.join(response.headers["location"])))


def hidden(text: str) -> list[tuple[str, str]]:
    found = re.findall(r'<input type="hidden" name="([^"]*)" value="([^"]*)">', text)
    return [(unescape(name), unescape(value)) for name, value in found]


@pytest.fixture
def no_examination(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the doctor examine nothing, which would take a second for each dashboard."""
    monkeypatch.setattr("sqlaqueue.web.queues.doctor", lambda *_, **__: [])


@pytest.fixture
def audit(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """A function that returns the lines of the audit so far."""
    caplog.set_level(logging.INFO, "sqlaqueue.audit")
    return lambda: [each.getMessage() for each in caplog.records if each.name == "sqlaqueue.audit"]


@contextlib.contextmanager
def serving(app: Any, **options: Any) -> Iterator[str]:
    """Serve an ASGI application on a free port, and give its URL."""
    with socket.create_server(("127.0.0.1", 0)) as bound:
        config = uvicorn.Config(app, log_level="warning", ws="none", timeout_graceful_shutdown=5, **options)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=asyncio.run, args=[_serve(server, bound)], name="uvicorn")
        thread.start()
        try:
            deadline = time.monotonic() + 30
            while not server.started:
                assert thread.is_alive(), "the server has ended"
                assert time.monotonic() < deadline, "the server does not start"
                time.sleep(0.01)
            yield f"http://127.0.0.1:{bound.getsockname()[1]}/"
        finally:
            server.should_exit = True
            thread.join(30)
            assert not thread.is_alive(), "the server does not end"


async def _serve(server: uvicorn.Server, bound: socket.socket) -> None:
    await server.serve(sockets=[bound])
    # A stream that had to be cancelled leaves its connection open, and the loop would end without closing it.
    for connection in [*server.server_state.connections]:
        transport: Any = getattr(connection, "transport", None)
        if transport is not None:
            transport.abort()
    await asyncio.sleep(0.1)


@pytest.fixture
def dashboard(queues: Queues, sessions: Any) -> Dashboard:
    return Dashboard(queues.all, sessions, access=everything)


@pytest.fixture
def root(dashboard: Dashboard) -> Iterator[str]:
    with serving(dashboard) as root:
        yield root
