"""Call an ASGI application without a server."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any


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
