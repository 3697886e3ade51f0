"""An ASGI application that serves metrics, beside the routes of a web application."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from datetime import timedelta
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from sqlaqueue.admin.state import DEFAULT_LIMIT
from sqlaqueue.asgi import Receive, Scope, Send, answer_lifespan
from sqlaqueue.consumer.core.driver import adrive
from sqlaqueue.prometheus.queues import (
    DEFAULT_MAX_AGE,
    DEFAULT_TIMEOUT,
    GaugeReader,
    Reading,
    Scrape,
    ScrapeCollector,
    read_in_thread,
)
from sqlaqueue.session_types import makes_async, resolve_factory
from sqlaqueue.write_routing import execute, open_session

_PLAIN = "text/plain; charset=utf-8"


def metrics_app(
    models: Iterable[type[Any]],
    session_factory: Callable[[], Any],
    *,
    registry: CollectorRegistry | None = None,
    statement_timeout: float | timedelta = DEFAULT_TIMEOUT,
    max_age: float | timedelta = DEFAULT_MAX_AGE,
    count_limit: int = DEFAULT_LIMIT,
    finished: bool = False,
) -> MetricsApp:
    """Return an ASGI application that serves the gauges of queues.

    It answers where it is mounted, and at any path that ends with ``/metrics``. It runs on asyncio, and its event loop
    does not wait for the database: an ``async_sessionmaker`` is used in the loop, a ``sessionmaker`` in a thread.

    :param session_factory: creates sessions, such as a ``sessionmaker(engine)`` or an ``async_sessionmaker(engine)``.
    :param registry: further metrics to serve, such as ``prometheus_client.REGISTRY``.

    The other arguments are those of :class:`~sqlaqueue.prometheus.QueueCollector`, and so are the errors raised.
    """
    what = metrics_app.__name__
    scrape = Scrape(
        models, what, statement_timeout=statement_timeout, max_age=max_age, count_limit=count_limit, finished=finished
    )
    if makes_async(session_factory):
        factory = resolve_factory(session_factory, what, is_async=True)
        return MetricsApp(_collect_in_loop(scrape, factory), registry)
    collector = ScrapeCollector(scrape, read_in_thread(session_factory, what))
    return MetricsApp(lambda: asyncio.to_thread(collector.collect), registry)


class MetricsApp:
    """The ASGI application that :func:`metrics_app` returns.

    :param collect: returns the metrics of the queues; in an event loop it is not called while a call is running.
    :param registry: further metrics.
    """

    def __init__(self, collect: Callable[[], Awaitable[Iterable[Metric]]], registry: CollectorRegistry | None) -> None:
        self._collect, self._registry = collect, registry
        # One thread or connection at most, however many requests wait for a slow database. A lock belongs to the event
        # loop in which it was used first, and a program may have several, one after the other or in threads.
        self._locks: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        if scope["type"] == "lifespan":
            await answer_lifespan(receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1000})
        elif not _is_served(scope):
            await _respond(scope, send, 404, b"Not found: the metrics are at /metrics\n")
        elif scope["method"] not in {"GET", "HEAD"}:
            await _respond(scope, send, 405, b"Method not allowed\n", allow=b"GET, HEAD")
        else:
            body, content_type = await self._encoded(_accept(scope))
            await _respond(scope, send, 200, body, content_type)

    async def _encoded(self, accept: str) -> tuple[bytes, str]:
        encode, content_type = choose_encoder(accept)
        async with self._locks.setdefault(asyncio.get_running_loop(), asyncio.Lock()):
            metrics = await self._collect()
        if self._registry is None:
            return encode(_registry_of(metrics)), content_type
        # Its collectors may read files or a database.
        both = _registry_of(metrics, self._registry)
        return await asyncio.to_thread(encode, both), content_type


class _Collected(Collector):
    def __init__(self, metrics: Iterable[Metric], *registries: CollectorRegistry) -> None:
        self._metrics, self._registries = metrics, registries

    def collect(self) -> Iterable[Metric]:
        return chain(self._metrics, *(each.collect() for each in self._registries))


def _registry_of(metrics: Iterable[Metric], *registries: CollectorRegistry) -> CollectorRegistry:
    made = CollectorRegistry(auto_describe=False)
    made.register(_Collected(metrics, *registries))
    return made


def _collect_in_loop(scrape: Scrape, factory: Any) -> Callable[[], Awaitable[Iterable[Metric]]]:
    async def read(reader: GaugeReader) -> Reading:
        session = open_session(factory)
        async with session:
            result: Reading = await session.run_sync(execute, reader.read)
        return result

    async def collect() -> Iterable[Metric]:
        cached = scrape.cached
        return await adrive(scrape.routine(), read) if cached is None else cached

    return collect


def _is_served(scope: Scope) -> bool:
    path: str = scope["path"]
    # Some frameworks leave the path as it is where they mount an application, others cut it.
    below = path.removeprefix(scope.get("root_path", "")).rstrip("/")
    return not below or below.endswith("/metrics")


def _accept(scope: Scope) -> str:
    return ",".join(value.decode("latin-1") for name, value in scope["headers"] if name.lower() == b"accept")


async def _respond(
    scope: Scope, send: Send, status: int, body: bytes, content_type: str = _PLAIN, *, allow: bytes | None = None
) -> None:
    headers = [(b"content-type", content_type.encode()), (b"content-length", str(len(body)).encode())]
    if allow is not None:
        headers.append((b"allow", allow))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})
