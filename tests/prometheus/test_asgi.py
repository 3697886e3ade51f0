"""The ASGI application: where it is mounted, what it answers, and that the event loop does not wait."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from fastapi import FastAPI
from litestar import Litestar
from litestar.handlers import asgi
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker
from starlette.applications import Starlette
from starlette.routing import Mount, Route

from sqlaqueue.exc import ConfigurationError
from sqlaqueue.prometheus import MetricsApp, metrics_app
from tests.prometheus.test_gauges import make_two
from tests.prometheus.values import STATEMENT_TIMEOUT, parse, values
from tests.unique.models import create

KINDS = ("sync", "async")


@pytest.fixture
def models(engine: sa.Engine) -> Any:
    models = make_two()
    create(engine, models[0])
    with Session(engine) as session:
        session.add_all([models[0](), models[1]()])
        session.commit()
    return models


@pytest.fixture
async def async_engine(shared: Any) -> AsyncIterator[AsyncEngine]:
    engine = create_async_engine(shared.url("asyncpg"))
    yield engine
    await engine.dispose()


@pytest.fixture(params=KINDS)
def sessions(request: pytest.FixtureRequest, engine: sa.Engine, async_engine: AsyncEngine) -> Any:
    return sessionmaker(engine) if request.param == "sync" else async_sessionmaker(async_engine)


def make_app(models: Any, sessions: Any, **options: Any) -> MetricsApp:
    return metrics_app(models, sessions, **{"statement_timeout": STATEMENT_TIMEOUT, **options})


def client(app: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test", follow_redirects=True)


def fastapi(app: Any) -> Any:
    made = FastAPI()
    made.mount("/metrics", app)
    return made


def starlette(app: Any) -> Any:
    return Starlette(routes=[Mount("/internal/metrics", app)])


def starlette_route(app: Any) -> Any:
    return Starlette(routes=[Route("/metrics", app)])


def litestar(app: Any) -> Any:
    return Litestar(route_handlers=[asgi("/metrics", is_mount=True, copy_scope=True)(app)])


@pytest.mark.parametrize(
    ("mount", "path"),
    [
        (fastapi, "/metrics"),
        (starlette, "/internal/metrics"),
        (starlette_route, "/metrics"),
        (litestar, "/metrics"),
        (lambda app: app, "/metrics"),
    ],
)
async def test_it_serves_where_it_is_mounted(
    mount: Callable[[Any], Any], path: str, models: Any, sessions: Any
) -> None:
    async with client(mount(make_app(models, sessions))) as http:
        answer = await http.get(path)
        assert (answer.status_code, answer.headers["content-type"].split(";")[0]) == (200, "text/plain")
        found = parse(answer.text)
        assert found["jobs", "first", "pending"] == found["jobs", "second", "pending"] == 1
        assert (await http.get(f"{path}/other")).status_code == 404


async def test_methods(models: Any, sessions: Any) -> None:
    async with client(make_app(models, sessions, max_age=60)) as http:
        answer, head = await http.get("/"), await http.head("/metrics")
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers == answer.headers
        refused = await http.post("/metrics")
        assert (refused.status_code, refused.headers["allow"]) == (405, "GET, HEAD")
        assert (await http.get("/other")).status_code == 404


async def test_the_format_is_negotiated(models: Any, sessions: Any) -> None:
    async with client(make_app(models, sessions)) as http:
        answer = await http.get("/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})
    assert answer.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    assert values(text_string_to_metric_families(answer.text))["jobs", "first", "pending"] == 1


async def test_further_metrics_of_the_process(models: Any, sessions: Any) -> None:
    registry = CollectorRegistry()
    Counter("requests", "Requests.", registry=registry).inc()
    async with client(make_app(models, sessions, registry=registry)) as http:
        for accept in ("text/plain", "application/openmetrics-text; version=1.0.0"):
            text = (await http.get("/metrics", headers={"accept": accept})).text
            assert "\nrequests_total 1.0\n" in text
            assert '\nsqlaqueue_due_jobs{queue="first"} 1.0\n' in text


@contextmanager
def locked(engine: sa.Engine) -> Iterator[None]:
    with engine.connect() as connection:
        connection.exec_driver_sql("LOCK TABLE first")
        yield
        connection.rollback()


async def test_the_event_loop_does_not_wait_and_one_scrape_serves_all(
    engine: sa.Engine, models: Any, sessions: Any
) -> None:
    """The requests wait for a lock that this test, in the same event loop, releases."""
    async with client(make_app(models, sessions, max_age=60)) as http:
        with locked(engine):
            requests = [asyncio.create_task(http.get("/metrics")) for _ in range(20)]
            while not await asyncio.to_thread(count_waiting, engine):
                await asyncio.sleep(0.01)
            assert await asyncio.to_thread(count_waiting, engine) == 1
        answers = await asyncio.gather(*requests)
    assert {(answer.status_code, answer.text) for answer in answers} == {(200, answers[0].text)}


def count_waiting(engine: sa.Engine) -> int:
    query = "SELECT count(*) FROM pg_locks JOIN pg_database d ON d.oid = database WHERE NOT granted AND datname = %s"
    with engine.connect() as connection:
        number: int = connection.exec_driver_sql(query, (engine.url.database,)).scalar_one()
        return number


async def test_a_sick_queue_does_not_hide_the_other(engine: sa.Engine, models: Any, sessions: Any) -> None:
    with engine.begin() as connection:
        connection.exec_driver_sql("DROP TABLE first")
    async with client(make_app(models, sessions)) as http:
        found = parse((await http.get("/metrics")).text)
    assert (found["scrape_success", "first"], found["scrape_success", "second"]) == (0, 1)
    assert found["jobs", "second", "pending"] == 1


async def test_a_function_that_makes_async_sessions(models: Any, async_engine: AsyncEngine) -> None:
    def make() -> Any:
        return AsyncSession(async_engine)

    async with client(make_app(models, make)) as http:
        with pytest.raises(ConfigurationError, match="makes AsyncSession; give"):
            await http.get("/metrics")


async def exchange(app: Any, scope: dict[str, Any], *messages: str) -> list[str]:
    received, sent = iter(messages), list[str]()

    async def receive() -> Any:
        return {"type": next(received)}

    async def send(message: Any) -> None:
        sent.append(message["type"])

    await app(scope, receive, send)
    return sent


async def test_it_can_be_the_application_of_a_server(models: Any, sessions: Any) -> None:
    app = make_app(models, sessions)
    events = ("lifespan.startup", "lifespan.shutdown")
    assert await exchange(app, {"type": "lifespan"}, *events) == [f"{event}.complete" for event in events]
    assert await exchange(app, {"type": "websocket", "path": "/metrics"}) == ["websocket.close"]


def test_two_event_loops_use_it(models: Any, engine: sa.Engine) -> None:
    """Such as two tests, or a web server that is started twice in a process."""
    app = make_app(models, sessionmaker(engine), max_age=0)

    async def scrape() -> None:
        async with client(app) as http:
            # At once, so that all but the first one wait.
            answers = await asyncio.gather(*(http.get("/metrics") for _ in range(3)))
        assert [answer.status_code for answer in answers] == [200] * 3

    for _ in range(2):
        asyncio.run(scrape())
