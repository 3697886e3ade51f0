"""The exporters of queues: the ASGI application, and the process that is ``sqlaqueue metrics``."""

import asyncio
import json
import re
import signal
import socket
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from click.testing import Result
from fastapi import FastAPI
from litestar import Litestar
from litestar.handlers import asgi
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import sessionmaker
from starlette.applications import Starlette
from starlette.routing import Mount, Route

from sqlaqueue.exc import ConfigurationError
from sqlaqueue.prometheus import MetricsApp, metrics_app
from tests.cli.conftest import MODELS, QUEUES, Shop, shop, shop_template
from tests.cli.shop.models import Email, Letter
from tests.models import execute
from tests.programs import Program
from tests.prometheus.conftest import STATEMENT_TIMEOUT, Values, parse, values


@pytest.fixture
async def async_engine(shared: Any) -> AsyncIterator[AsyncEngine]:
    engine = create_async_engine(shared.url("asyncpg"))
    yield engine
    await engine.dispose()


@pytest.fixture(params=["sync", "async"])
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
    mount: Callable[[Any], Any], path: str, two: tuple[Any, Any], sessions: Any
) -> None:
    async with client(mount(make_app(two, sessions))) as http:
        answer = await http.get(path)
        assert (answer.status_code, answer.headers["content-type"].split(";")[0]) == (200, "text/plain")
        found = parse(answer.text)
        assert found["jobs", "first", "pending"] == found["jobs", "second", "pending"] == 1
        assert (await http.get(f"{path}/other")).status_code == 404


async def test_methods(two: tuple[Any, Any], sessions: Any) -> None:
    async with client(make_app(two, sessions, max_age=60)) as http:
        answer, head = await http.get("/"), await http.head("/metrics")
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers == answer.headers
        refused = await http.post("/metrics")
        assert (refused.status_code, refused.headers["allow"]) == (405, "GET, HEAD")
        assert (await http.get("/other")).status_code == 404


async def test_the_format_is_negotiated(two: tuple[Any, Any], sessions: Any) -> None:
    async with client(make_app(two, sessions)) as http:
        answer = await http.get("/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})
    assert answer.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    assert values(text_string_to_metric_families(answer.text))["jobs", "first", "pending"] == 1


async def test_further_metrics_of_the_process(two: tuple[Any, Any], sessions: Any) -> None:
    registry = CollectorRegistry()
    Counter("requests", "Requests.", registry=registry).inc()
    async with client(make_app(two, sessions, registry=registry)) as http:
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
    engine: sa.Engine, two: tuple[Any, Any], sessions: Any
) -> None:
    """The requests wait for a lock that this test, in the same event loop, releases."""
    async with client(make_app(two, sessions, max_age=60)) as http:
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


async def test_a_sick_queue_does_not_hide_the_other(engine: sa.Engine, two: tuple[Any, Any], sessions: Any) -> None:
    execute(engine, "DROP TABLE first")
    async with client(make_app(two, sessions)) as http:
        found = parse((await http.get("/metrics")).text)
    assert (found["scrape_success", "first"], found["scrape_success", "second"]) == (0, 1)
    assert found["jobs", "second", "pending"] == 1


async def test_a_function_that_makes_async_sessions(two: tuple[Any, Any], async_engine: AsyncEngine) -> None:
    def make() -> Any:
        return AsyncSession(async_engine)

    async with client(make_app(two, make)) as http:
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


async def test_it_can_be_the_application_of_a_server(two: tuple[Any, Any], sessions: Any) -> None:
    app = make_app(two, sessions)
    events = ("lifespan.startup", "lifespan.shutdown")
    assert await exchange(app, {"type": "lifespan"}, *events) == [f"{event}.complete" for event in events]
    assert await exchange(app, {"type": "websocket", "path": "/metrics"}) == ["websocket.close"]


def test_two_event_loops_use_it(two: tuple[Any, Any], engine: sa.Engine) -> None:
    """Such as two tests, or a web server that is started twice in a process."""
    app = make_app(two, sessionmaker(engine), max_age=0)

    async def scrape() -> None:
        async with client(app) as http:
            # At once, so that all but the first one wait.
            answers = await asyncio.gather(*(http.get("/metrics") for _ in range(3)))
        assert [answer.status_code for answer in answers] == [200] * 3

    for _ in range(2):
        asyncio.run(scrape())


# -- ``sqlaqueue metrics``: the exporter as a process, and what it prints ------------------------------------------

__all__ = ["shop", "shop_template"]
EMAIL, LETTER = f"{MODELS}:Email", f"{MODELS}:Letter"
LONG = ("--statement-timeout", "30s")


def once(shop: Shop, *arguments: str) -> Values:
    return parse(shop.ok("metrics", *arguments, *LONG, "--once"))


def scrape(process: Program) -> Values:
    """Wait until an exporter has started, and scrape it."""
    process.wait_for("metrics: serving ")
    address = re.findall(r"serving (http://\S+)", process.output)[0]
    with urllib.request.urlopen(address, timeout=60) as answer:  # noqa: S310 - the exporter's own address
        return parse(answer.read().decode())


@pytest.mark.once
def test_it_prints_the_metrics_of_several_queues(shop: Shop) -> None:
    shop.add(Email(), Email(), Letter())
    found = once(shop, EMAIL, LETTER)
    assert (found["jobs", "email", "pending"], found["jobs", "letter", "pending"]) == (2, 1)
    assert once(shop, f"{MODELS}:Newsletter")["jobs", "email", "pending"] == 2  # those of the whole queue
    assert once(shop, EMAIL, "--count-limit", "1")["jobs", "email", "pending"] == 1


@pytest.mark.once
def test_finished_jobs_are_counted_if_asked_for(shop: Shop) -> None:
    shop.add(Email(status="failed"), Email())
    assert ("jobs", "email", "failed") not in once(shop, EMAIL)
    assert once(shop, EMAIL, "--finished")["jobs", "email", "failed"] == 1


@pytest.mark.once
def test_the_exit_code_tells_that_something_cannot_be_read(shop: Shop) -> None:
    shop.execute("DROP TABLE email")
    result = shop.invoke("metrics", EMAIL, LETTER, "--once")
    assert result.exit_code == 1
    found = parse(result.stdout)
    assert (found["scrape_success", "email"], found["scrape_success", "letter"]) == (0, 1)


@pytest.mark.once
@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
def test_an_exporter_serves_until_it_is_stopped(shop: Shop, driver: str) -> None:
    shop.add(Email(), Letter())
    url = shop.database.url(driver)  # type: ignore[arg-type] # one of the drivers
    process = shop.start("metrics", EMAIL, LETTER, "--port", "0", "--max-age", "0", *LONG, SQLAQUEUE_URL=url)
    assert scrape(process)["jobs", "letter", "pending"] == 1
    shop.add(Letter())
    assert scrape(process)["jobs", "letter", "pending"] == 2
    process.signal(signal.SIGTERM)
    assert process.end() == 0
    assert "metrics: stopped" in process.output
    assert "Traceback" not in process.output


@pytest.mark.once
def test_a_function_that_returns_consumers_of_both_kinds_brings_their_databases(shop: Shop) -> None:
    shop.add(Email(), Letter())
    process = shop.start("metrics", f"{QUEUES}:both", "--port", "0", *LONG, SQLAQUEUE_URL=None)
    found = scrape(process)
    assert (found["jobs", "email", "pending"], found["jobs", "letter", "pending"]) == (1, 1)
    assert found["scrape_success", "email"] == found["scrape_success", "letter"] == 1
    process.signal(signal.SIGINT)
    assert process.end() == 0
    assert "Traceback" not in process.output


def refused(result: Result, code: int, words: str) -> None:
    assert result.exit_code == code, result.output
    assert words in result.stderr
    assert len(result.stderr.splitlines()) == 1 or "Usage" in result.stderr


@pytest.mark.once
def test_wrong_input(shop: Shop) -> None:
    refused(shop.invoke("metrics"), 2, "name a queue")
    refused(shop.invoke("metrics", EMAIL, SQLAQUEUE_URL=None), 2, "the database is missing")
    refused(shop.invoke("metrics", f"{MODELS}:NoQueue"), 2, "NoQueue is not a queue")
    refused(shop.invoke("metrics", f"{QUEUES}:make_async"), 2, "coroutine function")
    refused(shop.invoke("metrics", EMAIL, "--statement-timeout", "0", "--once"), 2, "give more than zero")
    refused(shop.invoke("metrics", EMAIL, "--port", "70000"), 2, "70000")


@pytest.mark.once
def test_a_database_that_does_not_answer_and_a_port_that_is_taken(shop: Shop) -> None:
    url = "postgresql+psycopg://nobody@127.0.0.1:1/none"
    refused(shop.invoke("metrics", EMAIL, "--url", url), 3, "does not answer")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        refused(shop.invoke("metrics", EMAIL, "--port", port), 1, f"--host 127.0.0.1 --port {port}: Address already")


@pytest.mark.once
def test_it_prints_the_dashboard_and_the_alerts(shop: Shop) -> None:
    assert json.loads(shop.ok("metrics", "--dashboard"))["uid"] == "sqlaqueue"
    assert shop.ok("metrics", "--alerts").startswith("# Alert rules")
