"""The first page: all queues."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import anyio
from sqlalchemy.exc import SQLAlchemyError
from starlette.background import BackgroundTask
from starlette.responses import Response

from sqlaqueue.admin.doctor.examination import target_of
from sqlaqueue.web.attention import needs_examination, needs_schedules
from sqlaqueue.web.context import Context
from sqlaqueue.web.data.overview import COUNT_LIMIT, QueueOverview, read_overview
from sqlaqueue.web.data.parts import Part, problem_text
from sqlaqueue.web.data.queue_reader import Memory
from sqlaqueue.web.data.throughput import MINUTES, Throughput
from sqlaqueue.web.errors import PageError
from sqlaqueue.web.pages.health import examined
from sqlaqueue.web.pages.list_link import listed_url
from sqlaqueue.web.pages.schedules import schedules_of
from sqlaqueue.web.rendering.charts import sparkline
from sqlaqueue.web.settings import Queue

_MEMORY = "queue_memory"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One queue of the list; without an overview if nothing of it can be read."""

    queue: Queue
    part: Part[QueueOverview]
    running: int | None
    """The number of running jobs; under a strategy that holds a transaction, those of the last heartbeats."""


async def overview(context: Context) -> Response:
    """Show all queues that the user sees."""
    found: dict[str, Part[QueueOverview]] = {}
    # Each in a session of its own: a queue that waits for a lock does not delay the others.
    async with anyio.create_task_group() as group:
        if needs_schedules(context.state, context.queues):
            group.start_soon(_read_schedules, context)
        for queue in context.queues:
            group.start_soon(_read, context, queue, found)
    rows = [
        Row(queue=queue, part=found[queue.name], running=_running(found[queue.name].value)) for queue in context.queues
    ]
    response = context.render(
        "overview.html",
        rows=rows,
        totals=_totals(rows),
        count_limit=COUNT_LIMIT,
        spark=_spark,
        listed_url=lambda queue, listed: listed_url(context, queue, listed),
        target_of=target_of,
        minutes=round(MINUTES.length.total_seconds() / 60),
    )
    if context.queues and needs_examination(context.state, context.queues):
        # After the page was sent: it takes longer than the page, which shows the last result.
        response.background = BackgroundTask(_examine, context)
    return response


def memory_of(context: Context) -> Memory:
    """Return what is remembered of the queues from one page to the next."""
    memory: Memory = context.state.setdefault(_MEMORY, {})
    return memory


async def _read_schedules(context: Context) -> None:
    # What cannot be read is said on the page of schedules.
    with contextlib.suppress(PageError, SQLAlchemyError):
        await schedules_of(context)


async def _examine(context: Context) -> None:
    # A server that stops cancels what runs after a response, and would log a traceback of that.
    with contextlib.suppress(PageError, SQLAlchemyError, asyncio.CancelledError):
        await examined(context)


async def _read(context: Context, queue: Queue, found: dict[str, Part[QueueOverview]]) -> None:
    try:
        found[queue.name] = Part(await context.database.read(read_overview, queue.spec, memory_of(context)))
    except PageError as error:
        found[queue.name] = Part(problem=f"{error.text} {error.advice}".strip())
    except SQLAlchemyError as error:
        found[queue.name] = Part(problem=problem_text(error))


def _spark(throughput: Throughput, name: str) -> object:
    title = f"{name}: {throughput.total:,} finished within {round(MINUTES.length.total_seconds() / 60)} minutes"
    return sparkline([bucket.total for bucket in throughput.buckets], title=title)


def _running(overview: QueueOverview | None) -> int | None:
    if overview is None:
        return None
    depth, consumers = overview.state.depth.value, overview.state.consumers.value
    if depth is not None and depth.running is not None:
        return depth.running
    return None if depth is None or consumers is None else sum(len(each.running) for each in consumers)


def _totals(rows: Sequence[Row]) -> dict[str, str]:
    """Return the sums over all queues that could be read; a plus means that there are more."""
    states = [row.part.value.state for row in rows if row.part.value is not None]
    depths = [state.depth.value for state in states if state.depth.value is not None]
    finished = [row.part.value.throughput.value for row in rows if row.part.value is not None]
    rates = [each.per_minute for each in finished if isinstance(each, Throughput)]
    return {
        "Due": _sum(depth.due for depth in depths),
        "Pending": _sum(depth.pending for depth in depths),
        "Processing": _sum(row.running or 0 for row in rows),
        "Finished per minute": f"{sum(rates):,.0f}" if rates else "",
        "Consumers": _sum(len(state.consumers.value or ()) for state in states),
    }


def _sum(numbers: Iterable[int]) -> str:
    listed = [*numbers]
    return f"{sum(listed):,}" + ("+" if any(each >= COUNT_LIMIT for each in listed) else "")
