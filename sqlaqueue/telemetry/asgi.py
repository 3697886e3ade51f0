"""ASGI: the types of the protocol, the answer to a lifespan, and the health of Consumers over HTTP.

The health, ``/live`` and ``/ready``, is an ASGI application or a plain response.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from dataclasses import asdict
from typing import Any, TypeAlias

from sqlaqueue.consumer.base import ConsumerBase
from sqlaqueue.consumer.context import Health
from sqlaqueue.exc import ConfigurationError

Message: TypeAlias = MutableMapping[str, Any]
"""What a server and an application send to each other."""

Scope: TypeAlias = MutableMapping[str, Any]
"""What a server knows about a connection."""

Receive: TypeAlias = Callable[[], Awaitable[Message]]
"""Returns the next message of the server."""

Send: TypeAlias = Callable[[Message], Awaitable[None]]
"""Sends a message to the server."""

AsgiApp: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]
"""An ASGI application."""


async def answer_lifespan(receive: Receive, send: Send) -> None:
    """Answer the lifespan of a server, for an application that has nothing to start or stop.

    Without an answer some servers do not start.
    """
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return


# -- health ------------------------------------------------------------------------------------------------------------

LIVE, READY = "/live", "/ready"


def health_app(*consumers: ConsumerBase) -> AsgiApp:
    """Return an ASGI application that reports whether Consumers of this process are alive and ready.

    ``GET /live`` and ``GET /ready`` are answered with 200 or 503, and with the problems of each Consumer as JSON. It
    reads no database, so a database that does not answer cannot make it hang.

    ::

        from starlette.applications import Starlette

        consumer = Consumer(Email, send, sessions)
        app = Starlette()
        app.mount("/health", health_app(consumer))

    :param consumers: those of this process, of either kind.
    :raises ConfigurationError: without Consumers, or for anything else.
    """
    given: tuple[object, ...] = consumers  # without a type checker, callers may pass any object
    if not given or not all(isinstance(each, ConsumerBase) for each in given):
        msg = f"health_app({', '.join(map(repr, given))}): give the Consumers of this process"
        raise ConfigurationError(msg)

    async def app(scope: Scope, _receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            # A server that asks for a lifespan goes on without it.
            msg = f"health_app() answers HTTP requests, not {scope['type']!r}"
            raise NotImplementedError(msg)
        # Mounted under a prefix, a server gives the path with or without it.
        path = str(scope["path"]).removeprefix(str(scope.get("root_path", "")))
        status, body = health_response(path, healths_of(consumers))
        if scope["method"] not in {"GET", "HEAD"}:
            status, body = 405, {"error": "use GET"}
        content = b"" if scope["method"] == "HEAD" else json.dumps(body).encode()
        headers = [(b"content-type", b"application/json"), (b"cache-control", b"no-store")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": content})

    return app


def healths_of(
    consumers: Iterable[ConsumerBase], health: Callable[[ConsumerBase], Health] = ConsumerBase.health
) -> dict[str, Health]:
    """Return the health of each Consumer by the name of its queue, with a number if several serve one queue."""
    healths: dict[str, Health] = {}
    for number, consumer in enumerate(consumers, start=1):
        name = consumer.queue if consumer.queue not in healths else f"{consumer.queue} {number}"
        healths[name] = health(consumer)
    return healths


def health_response(path: str, healths: Mapping[str, Health]) -> tuple[int, dict[str, Any]]:
    """Return the status and the content of a response about Consumers, or processes of workers, by name."""
    if path not in {LIVE, READY}:
        return 404, {"error": f"there is nothing here; ask for {LIVE} or {READY}"}
    alive = all(each.alive for each in healths.values())
    ready = all(each.ready for each in healths.values())
    fine = alive if path == LIVE else ready
    return 200 if fine else 503, {
        "alive": alive,
        "ready": ready,
        "queues": {name: asdict(each) for name, each in healths.items()},
    }
