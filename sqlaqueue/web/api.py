"""What the dashboard tells programs: a JSON API that only reads, and the export of a list as CSV or JSON.

It has the rights, the redaction and the limits of the pages, of which it is another form.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, replace
from datetime import datetime, timedelta
from typing import Any

import anyio
import sqlalchemy as sa
from starlette.responses import Response, StreamingResponse

from sqlaqueue.admin.schedules import ScheduleInfo
from sqlaqueue.telemetry.asgi import Receive, Scope, Send
from sqlaqueue.web.context import PageContext
from sqlaqueue.web.data.failures import CappedCount
from sqlaqueue.web.data.job import ShownValue, read_life
from sqlaqueue.web.data.job_columns import JobColumn, parse_exact
from sqlaqueue.web.data.job_pages import PAGE, JobPage, ListRequest, parse_request, read_page
from sqlaqueue.web.data.job_windows import JobRow
from sqlaqueue.web.data.past import Throughput
from sqlaqueue.web.database import Places
from sqlaqueue.web.errors import BadRequest, NotFound
from sqlaqueue.web.jobs import MOST_EXPORTED, no_job
from sqlaqueue.web.links import bad_parameters, columns_in, filter_text, key_in
from sqlaqueue.web.queues import Row, Worker, examined, rows_of, schedule_texts, schedules_of, shown_finding, workers_of
from sqlaqueue.web.rendering import visible_json

_MOST_OF_A_PAGE = 500
"""How many jobs an answer has at most."""

_LONGEST = 32_000
"""The characters of a value that an export has at most; a cell of a spreadsheet holds hardly more."""


def _answer(content: Mapping[str, Any]) -> Response:
    text = visible_json(json.dumps(content, ensure_ascii=False, indent=2, default=_text))
    return Response(text, media_type="application/json")


def _text(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.isoformat()
    return value.total_seconds() if isinstance(value, timedelta) else str(value)


def error_answer(status: int, text: str, advice: str) -> Response:
    """Return the answer to a request of the API that cannot be served."""
    response = _answer({"error": text, "advice": advice})
    response.status_code = status
    return response


# -- queues ------------------------------------------------------------------------------------------------------------


async def queues(context: PageContext) -> Response:
    return _answer({"queues": [_queue(row) for row in await rows_of(context, context.queues)]})


async def one_queue(context: PageContext) -> Response:
    (row,) = await rows_of(context, [context.queue])
    return _answer(_queue(row))


def _queue(row: Row) -> dict[str, Any]:
    found: dict[str, Any] = {"name": row.queue.name, "problem": row.part.problem or None}
    if row.part.value is None:
        return found
    state, throughput = row.part.value.state, row.part.value.throughput.value
    found["problem"] = state.depth.problem or None
    depth, failed, consumers = state.depth.value, state.failed.value, state.consumers.value
    found |= {} if depth is None else asdict(depth)
    return found | {
        "running": row.running,
        "failed": failed.number if isinstance(failed, CappedCount) else None,
        "is_paused": state.paused.value,
        "consumers": None if consumers is None else len(consumers),
        "finished_per_minute": throughput.per_minute if isinstance(throughput, Throughput) else None,
        "is_blocked": bool(row.blockers),
    }


async def consumers(context: PageContext) -> Response:
    found, problems = await workers_of(context)
    return _answer({"consumers": [_consumer(each) for each in found], "problems": problems})


def _consumer(worker: Worker) -> dict[str, Any]:
    row, about = worker.row, worker.about
    return {
        "queue": worker.queue.name,
        "name": worker.name,
        "host": row.host,
        "pid": row.pid,
        "version": row.version,
        "handlers": about.handlers,
        "is_alive": row.is_alive,
        "is_quiet": about.quiet,
        "is_failing": worker.is_failing,
        "is_listening": row.listening,
        "running": worker.running,
        "left_behind": worker.left,
        "started_at": row.created_at,
        "heartbeat_at": row.heartbeat_at,
    }


async def schedules(context: PageContext) -> Response:
    found, problems = await schedules_of(context)
    return _answer({"schedules": [_schedule(context, each) for each in found], "problems": problems})


def _schedule(context: PageContext, schedule: ScheduleInfo) -> dict[str, Any]:
    names = ("name", "queue", "cron", "every", "timezone", "words", "paused_at", "last_tick", "next_tick", "late")
    values, error = schedule_texts(context, schedule)
    return {name: getattr(schedule, name) for name in names} | {"values": values, "last_error": error or None}


async def findings(context: PageContext) -> Response:
    found = await examined(context)
    shown = [shown_finding(context, each) for each in found.value]
    return _answer({"findings": [asdict(each) for each in shown], "examined_at": found.made_at})


# -- jobs --------------------------------------------------------------------------------------------------------------


async def jobs(context: PageContext) -> Response:
    """Return one page of a list: with the parameters of the page of jobs, and ``size``."""
    pairs = context.request.query_params.multi_items()
    size = _size([value for name, value in pairs if name == "size"])
    with bad_parameters("See the page of the jobs for the parameters."):
        request = parse_request(columns_in(context), [pair for pair in pairs if pair[0] != "size"])
        page = await context.database.read(read_page, request, size)
    return _answer(
        {
            "queue": context.queue.name,
            "state": request.wanted.listed,
            "sort": page.sort,
            "jobs": [_job(each) for each in page.jobs],
            "redacted": [each.name for each in page.columns if each.is_redacted],
            "next": page.next,
            "previous": page.previous,
        }
    )


def _size(given: Sequence[str]) -> int:
    if not given:
        return PAGE
    text = given[-1]
    is_number = text.isascii() and text.isdigit() and len(text) <= len(str(_MOST_OF_A_PAGE))
    if not is_number or not 0 < int(text) <= _MOST_OF_A_PAGE:
        raise BadRequest(f"size={text[:100]}: use a number from 1 to {_MOST_OF_A_PAGE}.")
    return int(text)


def _job(row: JobRow) -> dict[str, Any]:
    shown = [cell for cell in row.cells if not cell.is_redacted]
    return {
        "key": row.key,
        "state": row.state,
        "columns": {cell.column.name: _value(cell.column, cell.text, is_whole=not cell.is_cut) for cell in shown},
        "cut": [cell.column.name for cell in shown if cell.is_cut],
    }


async def job(context: PageContext) -> Response:
    """Return what the page of a job shows."""
    key = key_in(context, context.request.query_params.get("key"))
    with bad_parameters():
        life = await context.database.read(read_life, columns_in(context), key, read_only=False)
    if life is None:
        raise no_job(context, key)
    values: list[ShownValue] = [] if life.row is None else [*life.row.values.values()]
    shown = [each for each in values if not each.column.is_redacted]
    return _answer(
        {
            "queue": context.queue.name,
            "key": life.key,
            "state": life.state,
            "columns": {each.column.name: _value(each.column, each.text, is_whole=not each.size) for each in shown},
            "redacted": [each.column.name for each in values if each.column.is_redacted],
            "cut": [each.column.name for each in shown if each.size],
            "attempts": [asdict(each) for each in life.attempts.value or ()],
        }
    )


def _value(column: JobColumn, text: str | None, *, is_whole: bool) -> Any:
    """Return a value as JSON has it; as its text where JSON has no such value, or where it is cut."""
    if text is None:
        return None
    if column.kind == "integer":
        return int(text)
    if column.kind == "boolean" and text in {"true", "false"}:
        return text == "true"
    if isinstance(column.stored_type, sa.JSON) and is_whole:
        try:
            return parse_exact(text)
        except (ValueError, RecursionError):
            return text
    return text


# -- exports -----------------------------------------------------------------------------------------------------------

_PLACES = Places("exports", 4, 2, "Other exports are being made at the moment.")

_EXPORTED_AT_ONCE = 100
"""How many jobs of an export are in memory. Nobody else is served while they are written, some milliseconds."""

_LONGEST_EXPORT = 300.0
"""Seconds after which an export is broken off, whose browser would keep the place of others."""

_FORMS = {"csv": "text/csv; charset=utf-8", "json": "application/json"}


async def export(context: PageContext) -> Response:
    """Send the jobs of a list, from the page on that is open, as a file."""
    form = context.request.path_params["form"]
    if form not in _FORMS:
        raise NotFound("There is no such page.", "A list of jobs is exported as jobs.csv or jobs.json.")
    with bad_parameters("Change it, or start from the list of all jobs."):
        request = parse_request(columns_in(context), context.request.query_params.multi_items())
        if request.before is not None:
            raise BadRequest("before: an export continues after a job.", "Open the first page of the list.")
        # The answer has it until its end.
        place = AsyncExitStack()
        await place.enter_async_context(_PLACES.one())
        try:
            # What is wrong with the parameters is found by the first page, when the answer can still say so.
            first = await _read(context, request)
        except BaseException:
            await place.aclose()
            raise
    return _Export(context, form, first, place)


class _Export(StreamingResponse):
    """The pages of a list as a file. While a browser takes its time, a page of them is in memory."""

    def __init__(self, context: PageContext, form: str, first: JobPage, place: AsyncExitStack) -> None:
        write = _as_csv if form == "csv" else _as_json
        name = f"{context.queue.slug}-{first.request.wanted.listed or 'jobs'}.{form}"
        headers = {"Content-Disposition": f'attachment; filename="{name}"', "X-Accel-Buffering": "no"}
        super().__init__(write(_pages(context, first)), media_type=_FORMS[form], headers=headers)
        self._place = place

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the pages within some minutes; after that the answer is broken off."""
        async with self._place:
            with anyio.move_on_after(_LONGEST_EXPORT):
                await super().__call__(scope, receive, send)


async def _read(context: PageContext, request: ListRequest) -> JobPage:
    return await context.database.read(read_page, request, _EXPORTED_AT_ONCE, _LONGEST)


async def _pages(context: PageContext, page: JobPage) -> AsyncIterator[JobPage]:
    """Yield the pages of an export. An error breaks the answer off, so that a part is not taken for the whole."""
    number = 0
    try:
        while True:
            left = MOST_EXPORTED - number
            page = replace(page, jobs=page.jobs[:left])
            number += len(page.jobs)
            yield page
            if page.next is None or number >= MOST_EXPORTED:
                return
            page = await _read(context, replace(page.request, after=page.next))
    finally:
        context.audit("export", context.queue, count=number, filter=filter_text(page.request.wanted))


async def _as_json(pages: AsyncIterator[JobPage]) -> AsyncIterator[str]:
    separator = "[\n"
    async for page in pages:
        for row in page.jobs:
            yield separator + visible_json(json.dumps(_job(row), ensure_ascii=False, default=_text))
            separator = ",\n"
    yield "\n]\n" if separator.startswith(",") else "[]\n"


async def _as_csv(pages: AsyncIterator[JobPage]) -> AsyncIterator[str]:
    buffer, is_first = io.StringIO(), True
    writer = csv.writer(buffer)
    async for page in pages:
        names = [each.name for each in page.columns if not each.is_redacted and not each.is_key]
        if is_first:
            writer.writerow([*(_cell(name) for name in ("key", *names))])
            is_first = False
        for row in page.jobs:
            cells = [cell for cell in row.cells if cell.column.name in names]
            writer.writerow([_cell(row.key), *(_cell(each.text or "", each.column) for each in cells)])
        yield buffer.getvalue()
        buffer.seek(0)
        buffer.truncate()


_SIGNS = ("=", "+", "-", "@", "\t", "\r", "\uff1d", "\uff0b", "\uff0d", "\uff20")
"""With what a cell starts that a spreadsheet executes; the last ones are of full width."""

_INSIDE = re.compile(rf"[;\t\r\n](?=[{re.escape(''.join(_SIGNS))}])")
"""Where a cell may start inside of a text: behind a line break, and behind what separates cells in some countries."""


def _cell(text: str, column: JobColumn | None = None) -> str:
    """Return a value for a cell, with an apostrophe before what a spreadsheet would execute."""
    if column is not None and column.kind in {"integer", "number"}:
        return text
    text = _INSIDE.sub(lambda found: f"{found[0]}'", text)
    return f"'{text}" if text.startswith(_SIGNS) else text
