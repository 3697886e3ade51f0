"""Arguments that cannot be meant: refused when the Consumer is made, or when it begins."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from sqlaqueue import AsyncConsumer, Consumer
from sqlaqueue.exc import ConfigurationError, NotAQueueError
from tests.consumer.models import models
from tests.servers import Server

Job = models("update_status").job
sessions: Any = sessionmaker()
async_sessions: Any = async_sessionmaker()


def handler(session: Any, job: Any) -> None:
    """Handle a job."""


async def async_handler(session: Any, job: Any) -> None:
    """Handle a job in an event loop."""


class Callable:
    def __call__(self, session: Any, job: Any) -> None:
        """Handle a job."""


class AsyncCallable:
    async def __call__(self, session: Any, job: Any) -> None:
        """Handle a job in an event loop."""


@pytest.mark.parametrize("given", [async_handler, partial(async_handler), AsyncCallable(), AsyncCallable().__call__])
def test_a_consumer_refuses_coroutine_functions(given: Any) -> None:
    with pytest.raises(ConfigurationError, match="AsyncConsumer"):
        Consumer(Job, given, sessions)


@pytest.mark.parametrize("given", [handler, partial(handler), Callable(), Callable().__call__])
def test_an_async_consumer_refuses_other_functions(given: Any) -> None:
    with pytest.raises(ConfigurationError, match="async def"):
        AsyncConsumer(Job, given, async_sessions)


def generator(session: Any, job: Any) -> Any:
    yield


async def async_generator(session: Any, job: Any) -> Any:
    yield


class GeneratorCallable:
    def __call__(self, session: Any, job: Any) -> Any:
        yield


@pytest.mark.parametrize("given", [generator, async_generator, partial(async_generator), GeneratorCallable()])
@pytest.mark.parametrize("made", [Consumer, AsyncConsumer])
def test_generator_functions_are_refused(made: Any, given: Any) -> None:
    """A call of one runs nothing, and its job would count as completed."""
    with pytest.raises(ConfigurationError, match=r"is an? (async )?generator function"):
        made(Job, given, sessions if made is Consumer else async_sessions)
    with pytest.raises(ConfigurationError, match=r"is an? (async )?generator function"):
        made(Job, {Job: given}, sessions if made is Consumer else async_sessions)


@pytest.mark.parametrize("given", [async_handler, generator])
def test_listeners_that_nothing_would_run_are_refused(given: Any) -> None:
    consumer = Consumer(Job, handler, sessions)
    for event in ("completed", "polled"):
        with pytest.raises(ConfigurationError, match="a call of it runs nothing"):
            consumer.on(event, given)  # type: ignore[call-overload]  # the event is one of two kinds


@pytest.mark.parametrize("given", [handler, partial(handler), Callable(), Callable().__call__, print])
def test_a_consumer_accepts_callables(given: Any) -> None:
    Consumer(Job, given, sessions)


@pytest.mark.parametrize("given", [async_handler, partial(async_handler), AsyncCallable()])
def test_an_async_consumer_accepts_coroutine_functions(given: Any) -> None:
    AsyncConsumer(Job, given, async_sessions)


@pytest.mark.parametrize("kind", [Consumer, AsyncConsumer])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"concurrency": 0}, "concurrency=0"),
        ({"name": "a\0b"}, r"name='a\\x00b'\): no database stores a NUL"),
        ({"name": "a\ud800b"}, r"name='a\\ud800b'\): no database stores a NUL"),
        ({"concurrency": 1.5}, "concurrency=1.5"),
        ({"concurrency": True}, "concurrency=True"),
        ({"batch_size": -1}, "batch_size=-1"),
        ({"batch_size": "10"}, "batch_size='10'"),
        ({"poll_interval": 0}, "poll_interval=0"),
        ({"poll_interval": -1}, "poll_interval"),
        ({"poll_interval": float("nan")}, "poll_interval"),
        ({"timeout": 0}, "timeout=0"),
        ({"timeout": -1}, "timeout"),
        ({"grace": -1}, "grace"),
        ({"grace": float("inf")}, "grace"),
        ({"lease": 0.5}, "lease=0.5"),
        ({"retry": 5}, "retry=5"),
    ],
)
def test_invalid_numbers_are_refused(kind: Any, options: dict[str, Any], message: str) -> None:
    given: Any = (handler, sessions) if kind is Consumer else (async_handler, async_sessions)
    with pytest.raises(ConfigurationError, match=message):
        kind(Job, *given, **options)


@pytest.mark.parametrize(
    "given",
    [None, "handler", lambda: None, lambda session: None, lambda session, job, more: None, lambda *, session: None],
)
def test_callables_with_other_parameters_are_refused(given: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"\(session, job\)"):
        Consumer(Job, given, sessions)
    with pytest.raises(ConfigurationError, match=r"\(session, jobs\)"):
        Consumer(Job, given, sessions, batch=True)


def test_a_class_that_is_no_queue_is_refused() -> None:
    with pytest.raises(NotAQueueError, match="Owner"):
        Consumer(models("update_status").owner, handler, sessions)


def test_sessions_of_the_other_api_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="makes AsyncSession.*use AsyncConsumer"):
        Consumer(Job, handler, async_sessions)
    with pytest.raises(ConfigurationError, match="makes Session.*use Consumer"):
        AsyncConsumer(Job, async_handler, sessions)
    with pytest.raises(ConfigurationError, match="makes AsyncSession.*use AsyncConsumer"):
        Consumer(Job, handler, lambda: async_sessions()).run()
    # The way before SQLAlchemy had an async_sessionmaker.
    AsyncConsumer(Job, async_handler, sessionmaker(class_=AsyncSession))  # type: ignore[call-overload] # no Session


def test_objects_that_are_no_session_factory_are_refused() -> None:
    """Named with the fix when the Consumer is made, not by a TypeError in its first claim."""
    url = "postgresql+psycopg://ada:secret@localhost/app"
    engine, async_engine = sa.create_engine(url), create_async_engine(url)
    for given, sync_fix, async_fix in [
        (
            engine,
            r"Consumer: Engine\(.*\) is an Engine, where a session factory is needed; give sessionmaker\(engine\)$",
            r"give async_sessionmaker\(engine\) of an engine from create_async_engine\(\), or use Consumer$",
        ),
        (
            async_engine,
            r"give sessionmaker\(engine\) of an engine from create_engine\(\), or use AsyncConsumer$",
            r"AsyncEngine, where a session factory is needed; give async_sessionmaker\(engine\)$",
        ),
        (Session(engine), r"is a Session, .* give sessionmaker\(engine\)$", "or use Consumer$"),
        (AsyncSession(async_engine), "or use AsyncConsumer$", r"AsyncSession, .* give async_sessionmaker\(engine\)$"),
        (url, r"is a str, which is not callable; give sessionmaker\(engine\)$", "is a str, which is not callable"),
        (None, "is a NoneType", "is a NoneType"),
    ]:
        with pytest.raises(ConfigurationError, match=sync_fix) as refused:
            Consumer(Job, handler, given)
        assert "secret" not in str(refused.value)
        with pytest.raises(ConfigurationError, match=async_fix):
            AsyncConsumer(Job, async_handler, given)


def test_a_factory_that_gives_one_session_twice_is_refused(server: Server) -> None:
    """What one statement commits or closes would be another one's: a held batch would be handed out to others."""
    session = Session(sa.create_engine(server.url()))
    with pytest.raises(ConfigurationError, match="returns the same session each time; give a sessionmaker"):
        Consumer(Job, handler, lambda: session).run()

    async def run() -> None:
        async with AsyncSession(create_async_engine(server.url("asyncpg"))) as session:
            await AsyncConsumer(Job, async_handler, lambda: session).run()

    with pytest.raises(ConfigurationError, match="returns the same session each time; give a sessionmaker"):
        asyncio.run(run())


def test_a_factory_that_makes_no_session_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="makes int"):
        Consumer(Job, handler, lambda: 5).run()
