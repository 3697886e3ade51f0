"""A page that shows what ``dashboard.js`` does, whose content and events are in the hands of a test."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, Response, StreamingResponse
from starlette.routing import Route

import sqlaqueue.web
from sqlaqueue.web.security import SECURITY_HEADERS

SCRIPT = Path(sqlaqueue.web.__file__).parent / "static" / "dashboard.js"

PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Script</title>
<script src="dashboard.js" defer></script></head>
<body data-events="events"><header><span id="live-status" role="status" aria-live="polite"></span>
<a href="./?page=overview" data-go="o">Overview</a></header><main>
<form role="search"><input type="search" name="q" data-filter aria-label="Filter"></form>
<section data-live id="numbers" class="{classes}"><p>Number <b id="number">{number}</b></p>
<time datetime="2026-05-01T10:00:00+00:00">2026-05-01 10:00 UTC</time>
<time datetime="2026-05-01T10:00:00+00:00" data-relative>2026-05-01 10:00 UTC</time>
<details><summary>More</summary>text {number}</details>
<input name="note" aria-label="Note"><button type="button" id="push">Push</button></section>
<section data-live id="rows"><div class="wide"><table>
<thead><tr><th><input type="checkbox" data-select-all hidden aria-label="All"></th><th>Key</th></tr></thead>
<tbody>{rows}</tbody></table></div><p data-selected></p></section>
<section><div><code>VACUUM email</code><button type="button" data-copy hidden>Copy</button></div></section>
<section id="still">Still {number}</section>
</main></body></html>"""

ROW = """<tr><td><input type="checkbox" name="key" value="{0}" aria-label="{0}"></td>
<td><a href="./?page={0}">Job {0}</a></td></tr>"""


class ScriptPage:
    """The page, its stream of events, and what the browser has asked for."""

    def __init__(self) -> None:
        self.number, self.rows, self.classes = 1, [1, 2, 3, 4], ""
        self.status, self.stream_status = 200, 200
        self.pages = self.streams = self.open_streams = 0
        self._events: list[asyncio.Event] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ends = False
        self.app = Starlette(
            routes=[
                Route("/", self._page),
                Route("/dashboard.js", self._script),
                Route("/events", self._stream),
                Route("/favicon.ico", self._icon),
            ]
        )

    def change(self, **values: object) -> None:
        """Change what the page shows, and send an event."""
        for name, value in values.items():
            setattr(self, name, value)
        self.send()

    def send(self) -> None:
        """Send an event to each open stream."""
        assert self._loop is not None
        for event in [*self._events]:
            self._loop.call_soon_threadsafe(event.set)

    def end_streams(self) -> None:
        """End all open streams."""
        self._ends = True
        self.send()

    async def _page(self, _: Request) -> Response:
        self.pages += 1
        rows = "".join(map(ROW.format, self.rows))
        html = PAGE.format(number=self.number, rows=rows, classes=self.classes)
        return HTMLResponse(html, status_code=self.status, headers=SECURITY_HEADERS)

    async def _script(self, _: Request) -> Response:
        return FileResponse(SCRIPT, headers=SECURITY_HEADERS)

    async def _icon(self, _: Request) -> Response:
        return Response(status_code=204)

    async def _stream(self, _: Request) -> Response:
        self.streams += 1
        self._loop = asyncio.get_running_loop()
        if self.stream_status != 200:
            return Response(status_code=self.stream_status)
        self._ends = False
        return StreamingResponse(self._lines(), media_type="text/event-stream", headers=SECURITY_HEADERS)

    async def _lines(self):  # type: ignore[no-untyped-def]  # noqa: ANN202 - an asynchronous generator of texts
        event = asyncio.Event()
        self._events.append(event)
        self.open_streams += 1
        try:
            yield ": connected\n\n"
            while not self._ends:
                await event.wait()
                event.clear()
                yield f"data: {json.dumps({'queues': []})}\n\n"
        finally:
            self._events.remove(event)
            self.open_streams -= 1
