"""The history of a queue from the table of minutes of ``QueueConfig(statistics=True)``.

The database sums the minutes up to the points of charts, a hundred or so, and reads them by the primary key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue._typing import AnySelect
from sqlaqueue.admin.jobs import bind_arguments
from sqlaqueue.postgresql.side_tables import BOUNDS, COUNTED, ENDINGS, MEASURED, RUNS, WAITS
from sqlaqueue.queue.names import MINUTE
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.web.data.past import Bucket, ChartSpan, Throughput

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MINUTE = timedelta(minutes=1)
_WRITTEN_AFTER = timedelta(seconds=30)
"""How long after its end each minute is written, if a Consumer runs."""


@dataclass(frozen=True, kw_only=True)
class Latency:
    """Estimates from classes of times, in seconds: the true value is in the same class."""

    p50: float
    p95: float


@dataclass(frozen=True, kw_only=True)
class Point:
    """One period of a chart."""

    begins: datetime
    counts: Mapping[str, int]
    """The attempts that have ended, by outcome."""
    pending: int | None
    """The most pending jobs of a minute; None if it was not measured, as the next two."""
    due: int | None
    oldest_due: int | None
    """The highest age of the oldest due job, in seconds; None as well if no job was due."""
    waits: Latency | None
    """From when a job was due until its handler was called; None if none was called."""
    runs: Latency | None

    @property
    def failure_rate(self) -> float | None:
        """The part of the attempts that have failed, retried or for good; None if none has ended."""
        failed = self.counts.get("retried", 0) + self.counts.get("failed", 0)
        ended = failed + self.counts.get("completed", 0)
        return failed / ended if ended else None


@dataclass(frozen=True, kw_only=True)
class History:
    span: ChartSpan
    step: timedelta
    """The period of each point."""
    ends: datetime
    points: Sequence[Point | None]
    """One for each period, the oldest first; None for one in which no Consumer ran."""
    begins: Sequence[datetime]
    """When each period begins."""

    def throughput(self) -> Throughput:
        """Return what has ended, for the chart that is drawn from rows otherwise."""
        pairs = zip(self.begins, self.points, strict=True)
        return Throughput(
            span=self.span,
            counts_attempts=True,
            begins=self.ends - self.span.length,
            ends=self.ends,
            limit=0,
            is_capped=False,
            bucket=self.step,
            buckets=[Bucket(begins=at, counts={} if point is None else point.counts) for at, point in pairs],
            outcomes=ENDINGS,
            missing=None,
        )


def read_history(session: Session, spec: QueueSpec, span: ChartSpan, now: datetime) -> History | None:
    """Return the history of a span of time up to now; None if no Consumer has written any of it.

    :param now: the time of the database.
    """
    step = span.buckets[-1]
    width = step // _MINUTE
    last = (now - _EPOCH) // _MINUTE
    first = (now - span.length - _EPOCH) // _MINUTE
    found = session.execute(points(spec, first, last, width), bind_arguments=bind_arguments(spec.model)).mappings()
    rows = {int(row["period"]): row for row in found}
    if not rows:
        return None
    periods = [*range(first - first % width, last + 1, width)]
    while periods[-1] not in rows and _moment(periods[-1] + width) > now - _WRITTEN_AFTER:
        # No gap: Consumers have not written it yet.
        periods.pop()
    return History(
        span=span,
        step=step,
        ends=now,
        points=[None if each not in rows else _point(each, rows[each]) for each in periods],
        begins=[_moment(each) for each in periods],
    )


def points(spec: QueueSpec, first: int, last: int, width: int) -> AnySelect:
    """Return the SELECT of the points of some minutes, read by the primary key.

    :param width: how many minutes a point has.
    """
    table = spec.side_tables[MINUTE]
    period = (table.c.minute - table.c.minute % width).label("period")
    highest = [sa.func.max(table.c[name]).label(name) for name in MEASURED]
    sums = [sa.func.sum(table.c[name]).label(name) for name in COUNTED]
    mine = [table.c.queue == spec.name, table.c.minute.between(first, last)]
    return sa.select(period, *highest, *sums).where(*mine).group_by(period)


def newest_minute(spec: QueueSpec) -> AnySelect:
    """Return the SELECT of the last minute in which an attempt has ended, read by the primary key from its end."""
    table = spec.side_tables[MINUTE]
    has_ended = sa.func.coalesce(*(table.c[name] for name in ENDINGS)).is_not(None)
    return (
        sa.select(table.c.minute).where(table.c.queue == spec.name, has_ended).order_by(table.c.minute.desc()).limit(1)
    )


def has_statistics(spec: QueueSpec) -> bool:
    return MINUTE in spec.side_tables


def end_of(minute: int) -> datetime:
    """Return when a minute has ended."""
    return _moment(minute + 1)


def _moment(minute: int) -> datetime:
    return _EPOCH + minute * _MINUTE


def _point(minute: int, row: Mapping[Any, Any]) -> Point:
    return Point(
        begins=_moment(minute),
        counts={name: int(row[name]) for name in ENDINGS if row[name]},
        pending=row["pending"],
        due=row["due"],
        oldest_due=row["oldest_due"],
        waits=_latency([int(row[name] or 0) for name in WAITS]),
        runs=_latency([int(row[name] or 0) for name in RUNS]),
    )


def _latency(numbers: Sequence[int]) -> Latency | None:
    return Latency(p50=percentile(numbers, 0.5), p95=percentile(numbers, 0.95)) if any(numbers) else None


def percentile(numbers: Sequence[int], share: float) -> float:
    """Return the time below which a share of the times is, in seconds.

    :param numbers: how many times are in each class; at least one is in some.
    """
    wanted, below = share * sum(numbers), 0
    for place, number in enumerate(numbers):
        if number and below + number >= wanted:
            # Of the last class only the beginning is known.
            upper = BOUNDS[min(place, len(BOUNDS) - 1)]
            lower = BOUNDS[place - 1] if place else 0.0
            return lower + (upper - lower) * (wanted - below) / number
        below += number
    return float(BOUNDS[-1])
