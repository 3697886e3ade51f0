"""The response that stays open: server-sent events that tell a window to read its page again.

An event names the queues that have changed, and contains nothing of their jobs: what the window may see is decided when
it reads its page.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import signal
import time
from collections.abc import Iterable

import anyio
from starlette.responses import Response

from sqlaqueue.asgi import Receive, Scope, Send
from sqlaqueue.web.live.broadcaster import Broadcaster, Reader, Viewer
from sqlaqueue.web.settings import Queue

SHORTEST = 1.0
"""Seconds between two events, at least."""

TIMER = 5.0
"""Seconds after which an event is sent although no notification has arrived: the end of a job sends none."""

LIFETIME = 300.0
"""Seconds after which the stream ends. The browser opens another one, for which access is checked again."""

_LOOK = 0.5
"""Seconds between two looks at whether the server stops."""


class EventStream(Response):
    """Events of some queues, for a window of a reader."""

    media_type = "text/event-stream"

    def __init__(self, broadcaster: Broadcaster, queues: Iterable[Queue], reader: Reader) -> None:
        # nginx would gather events until its buffer is full.
        super().__init__(headers={"X-Accel-Buffering": "no"}, media_type=self.media_type)
        del self.headers["content-length"]
        self._broadcaster, self._queues, self._reader = broadcaster, list(queues), reader

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until the browser leaves, the server stops or the time is over."""
        start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        if scope["method"] == "HEAD":
            await send(start)
            await send({"type": "http.response.body", "body": b""})
            return
        # The window counts before anything is waited for: of many requests at once, no more than the limits are served.
        watching = self._broadcaster.watch(self._queues, self._reader)
        async with watching as viewer, anyio.create_task_group() as tasks:
            await send(start)
            tasks.start_soon(_disconnected, receive, tasks.cancel_scope)
            with contextlib.suppress(OSError):  # the browser has left
                await self._send_events(viewer, send)
            tasks.cancel_scope.cancel()

    async def _send_events(self, viewer: Viewer, send: Send) -> None:
        # Not all at the same time again, after a server that had many windows was restarted.
        end = time.monotonic() + LIFETIME * random.uniform(0.8, 1)  # noqa: S311 - it guards nothing
        await _send(send, ": connected\n\n")
        last = time.monotonic()
        while (now := time.monotonic()) < end and not server_stops():
            until_timer = last + TIMER - now
            changed = await viewer.wait(min(_LOOK, max(until_timer, 0)))
            now = time.monotonic()
            if changed and now < last + SHORTEST:
                await asyncio.sleep(min(_LOOK, last + SHORTEST - now))
            elif changed or now >= last + TIMER:
                await _send(send, f"data: {json.dumps({'queues': viewer.take()})}\n\n")
                last = now
        await send({"type": "http.response.body", "body": b""})


async def _send(send: Send, text: str) -> None:
    await send({"type": "http.response.body", "body": text.encode(), "more_body": True})


async def _disconnected(receive: Receive, scope: anyio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()


def server_stops() -> bool:
    """Return whether the web server has been told to stop.

    It waits until all responses have ended, and tells them nothing. uvicorn, also under gunicorn, handles signals by a
    method of its server, which then sets ``should_exit``.
    """
    server = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
    return getattr(server, "should_exit", False) is True
