"""One queue."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

from markupsafe import Markup
from starlette.responses import Response

from sqlaqueue.admin.doctor.examination import target_of
from sqlaqueue.admin.state import KeyAtLimit
from sqlaqueue.web.concurrency import both
from sqlaqueue.web.context import Context
from sqlaqueue.web.data.durations import Durations, Percentiles
from sqlaqueue.web.data.overview import COUNT_LIMIT
from sqlaqueue.web.data.queue_page import QueuePast, QueuePresent, read_past, read_present
from sqlaqueue.web.data.throughput import DAY, HOUR, Span, Throughput
from sqlaqueue.web.errors import BadRequest
from sqlaqueue.web.pages.list_link import listed_url
from sqlaqueue.web.pages.overview import memory_of
from sqlaqueue.web.rendering.charts import Bar, Range, bar_chart, range_chart
from sqlaqueue.web.rendering.formats import duration, plain, short
from sqlaqueue.web.settings import Queue

_SPANS = {"hour": HOUR, "day": DAY}
_QUARTERS = 4


async def queue(context: Context) -> Response:
    """Show one queue."""
    shown, span = context.queue, _span(context)
    present, past = await _read(context, shown, span)
    consumers = present.state.consumers.value
    return context.render(
        "queue.html",
        queue=shown,
        schedules=present.schedules,
        past=past,
        state=present.state,
        running=None if consumers is None else sum(len(each.running) for each in consumers),
        span=span,
        spans=_SPANS,
        count_limit=COUNT_LIMIT,
        target=target_of(shown.spec),
        listed_url=lambda listed: listed_url(context, shown, listed),
        key_at_limit=lambda key: _key_at_limit(context, shown, key),
        throughput_chart=_throughput_chart,
        durations_chart=_durations_chart,
        percentile_rows=_percentile_rows,
        error_text=lambda schedule: None if context.settings.is_redacted(shown.spec, "last_error") else schedule,
    )


async def _read(context: Context, shown: Queue, span: Span) -> tuple[QueuePresent, QueuePast]:
    """Read both at the same time: one has many short statements, the other a few long ones."""
    database, spec, memory = context.database, shown.spec, memory_of(context)
    shows_errors = not context.settings.is_redacted(spec, "last_error")
    past = functools.partial(read_past, shows_errors=shows_errors)
    return await both(database.read(read_present, spec, memory), database.read(past, spec, span, memory))


def _span(context: Context) -> Span:
    name = context.request.query_params.get("span", HOUR.name)
    if name not in _SPANS:
        raise BadRequest(f"span={name[:100]}: there is no such span.", f"Use one of {', '.join(_SPANS)}.")
    return _SPANS[name]


def _throughput_chart(throughput: Throughput) -> Markup:
    what = "attempts" if throughput.counts_attempts else "jobs"
    period = duration(throughput.bucket)
    bars = [
        Bar(
            label=_clock(bucket.begins),
            parts=bucket.counts,
            is_partial=bucket is throughput.buckets[-1] and len(throughput.buckets) > 1,
        )
        for bucket in throughput.buckets
    ]
    totals = ", ".join(f"{number:,} {name}" for name, number in throughput.totals.items() if number)
    covered = throughput.ends - throughput.begins
    return bar_chart(
        "throughput-chart",
        bars,
        throughput.outcomes,
        title=f"Ended {what}, one bar for each {period}",
        description=f"Within {duration(covered)}: {totals or 'none'}.",
        ticks=_ticks(covered),
    )


def _ticks(covered: timedelta) -> Sequence[str]:
    ago = [f"{duration(covered * (_QUARTERS - quarter) / _QUARTERS)} ago" for quarter in range(_QUARTERS)]
    return [*ago, "now"]


def _clock(moment: datetime) -> str:
    return f"{moment:%H:%M} UTC" if moment.second == 0 else f"{moment:%H:%M:%S} UTC"


def _percentile_rows(durations: Durations) -> list[tuple[str, Any]]:
    """Return the rows of the table of durations, each with its percentiles, or why there are none."""
    return [("Wait", durations.waits), ("Run", durations.runs)]


def _durations_chart(durations: Durations) -> Markup | None:
    rows = [
        Range(label=label, p50=each.p50, p95=each.p95, p99=each.p99)
        for label, each in _percentile_rows(durations)
        if isinstance(each, Percentiles)
    ]
    if not rows:
        return None
    texts = [f"{row.label}: half within {duration(row.p50)}, 99 % within {duration(row.p99)}" for row in rows]
    return range_chart("durations-chart", rows, title="Wait and run times", description=f"{'. '.join(texts)}.")


def _key_at_limit(context: Context, shown: Queue, key: KeyAtLimit) -> str:
    """Return the values of a key, without those of redacted columns."""
    texts = []
    for name, value in key.key.items():
        is_redacted = context.settings.is_attribute_redacted(shown.spec, name)
        texts.append(f"{name} {'redacted' if is_redacted else short(plain(value), 60)}")
    return ", ".join(texts) or "The whole queue"
