"""What the ASGI applications of the library share: the types of the protocol, and the answer to a lifespan."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeAlias

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
