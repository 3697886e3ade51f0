"""Whether Consumers are alive and ready: ``health()``, and the same over HTTP as an ASGI application."""

import asyncio
import json
import re
import threading
from dataclasses import dataclass
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker
from starlette.applications import Starlette
from starlette.routing import Mount

from sqlaqueue import AsyncConsumer, Consumer
from sqlaqueue.consumer import context, pace
from sqlaqueue.exc import ConfigurationError
from sqlaqueue.telemetry import health_app
from tests.programs import wait_until
from tests.servers import Database, Server
from tests.telemetry.conftest import Base, Held, Leased, Sessions


@dataclass(frozen=True)
class Response:
    status: int
    content: bytes

    def json(self) -> Any:
        return json.loads(self.content)


def call(app: Any, path: str, method: str = "GET") -> Response:
    """Send a request to an application and return its response."""
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": method, "path": path, "root_path": "", "headers": [], "query_string": b""}
    asyncio.run(app(scope, receive, send))
    return Response(sent[0]["status"], b"".join(each.get("body", b"") for each in sent[1:]))


def nothing(session: Session, job: Any) -> None:
    pass


@pytest.mark.parametrize("model", [Leased, Held])
def test_a_running_consumer_is_alive_and_ready(sessions: Sessions, model: Any) -> None:
    consumer = Consumer(model, nothing, sessions)
    assert consumer.health() == context.Health(alive=False, ready=False, problems=("it is not running",))
    with consumer:
        assert consumer.health() == context.Health(alive=True, ready=True)
    assert not consumer.health().alive


async def test_an_async_consumer(database: Database, sessions: Sessions) -> None:
    async def handler(session: Any, job: Any) -> None:
        pass

    engine = create_async_engine(database.url("asyncpg"))
    async with AsyncConsumer(Leased, handler, async_sessionmaker(engine)) as consumer:
        assert consumer.health() == context.Health(alive=True, ready=True)
    await engine.dispose()


def test_without_its_database_it_is_alive_and_not_ready(postgres_server: Server) -> None:
    """A restart of the worker would not help. It is ready again when the database is back."""
    with postgres_server.database() as database:
        engine = sa.create_engine(database.url("psycopg"))
        Base.metadata.create_all(engine)
        consumer = Consumer(Leased, nothing, sessionmaker(engine), poll_interval=0.1)
        with consumer:
            postgres_server.stop("immediate")
            wait_until(lambda: not consumer.health().ready)
            assert consumer.health().alive
            (problem,) = consumer.health().problems
            assert re.fullmatch("the last (claim has|([2-9]|..+) claims have) failed", problem)
            postgres_server.start()
            wait_until(lambda: consumer.health().ready)
        engine.dispose()


def test_while_the_database_does_not_answer_it_is_alive_and_not_ready(
    sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lock makes its heartbeat wait, without any error."""
    monkeypatch.setattr(pace, "HEARTBEAT", 0.1)
    with Consumer(Leased, nothing, sessions) as consumer:
        wait_until(lambda: consumer.health().ready)
        with sessions() as session:
            session.execute(sa.text("LOCK TABLE sqlaqueue_consumer"))
            monkeypatch.setattr(context, "UNANSWERED_AFTER", 0.5)
            monkeypatch.setattr(context, "STUCK_AFTER", 0.5)
            wait_until(lambda: "waited for the database" in "".join(consumer.health().problems))
            assert (consumer.health().alive, consumer.health().ready) == (True, False)
            monkeypatch.undo()
        wait_until(lambda: consumer.health().ready)


def test_a_stopping_consumer_is_not_ready(sessions: Sessions) -> None:
    began, release = threading.Event(), threading.Event()

    def handler(session: Session, job: Any) -> None:
        began.set()
        release.wait(60)

    with sessions.begin() as session:
        session.add(Leased())
    consumer = Consumer(Leased, handler, sessions)
    with consumer:
        assert began.wait(60)
        consumer.stop()
        assert consumer.health() == context.Health(alive=True, ready=False, problems=("it is stopping",))
        release.set()


def test_a_consumer_whose_maintenance_does_not_go_on_is_not_alive(
    sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Consumer(Leased, nothing, sessions) as consumer:
        # For a moment it may wait for the database, which does not count.
        monkeypatch.setattr(context, "STUCK_AFTER", -1.0)
        wait_until(lambda: not consumer.health().alive)
        stuck = consumer.health()
    assert (stuck.alive, stuck.ready) == (False, False)
    assert "its maintenance loop has not run for" in stuck.problems[0]


def test_the_application(sessions: Sessions) -> None:
    """It is served at the root and under a prefix."""
    consumers = [Consumer(model, nothing, sessions) for model in (Leased, Held)]
    app = health_app(*consumers)
    mounted = Starlette(routes=[Mount("/health", app=app)])
    down = call(mounted, "/health/ready")
    assert (down.status, call(mounted, "/health/live").status) == (503, 503)
    assert down.json()["queues"]["held"]["problems"] == ["it is not running"]
    with consumers[0], consumers[1]:
        for each in (call(mounted, "/health/ready"), call(mounted, "/health/live"), call(app, "/ready")):
            assert each.status == 200
            assert each.json()["queues"] == {
                "leased": {"alive": True, "ready": True, "problems": []},
                "held": {"alive": True, "ready": True, "problems": []},
            }
        head = call(app, "/ready", "HEAD")
        assert (head.status, head.content) == (200, b"")
    assert call(mounted, "/health/elsewhere").status == 404
    assert call(mounted, "/health/ready", "POST").status == 405


def test_each_of_two_consumers_of_a_queue_counts(sessions: Sessions) -> None:
    first, second = (Consumer(Leased, nothing, sessions) for _ in range(2))
    with first:
        for consumers in ((first, second), (second, first)):
            answer = call(health_app(*consumers), "/live")
            assert answer.status == 503
            assert sorted(answer.json()["queues"]) == ["leased", "leased 2"]


def test_it_needs_consumers() -> None:
    with pytest.raises(ConfigurationError, match=r"health_app\(\): give the Consumers of this process"):
        health_app()
    with pytest.raises(ConfigurationError, match="give the Consumers"):
        health_app(Leased)  # type: ignore[arg-type] # a class is no Consumer
