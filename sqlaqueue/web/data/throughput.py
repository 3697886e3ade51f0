"""How many jobs have finished in each minute, or a shorter or longer period, by outcome."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import sqlalchemy as sa

from sqlaqueue.sql.types import period
from sqlaqueue.web.data.finished_jobs import FinishedJobs, find_finished_jobs
from sqlaqueue.web.data.queue_reader import QueueReader
from sqlaqueue.web.data.unavailable import Unavailable

LIMIT = 20_000
"""The number of entries that are read at most, which takes about ten milliseconds."""

OUTCOMES = ("completed", "retried", "failed", "cancelled")
"""The outcomes that are counted, in the order in which they are drawn."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_COUNTED_AS = {"rescued": "retried"}
"""A rescued attempt is followed by another one, or by the failure of its job."""


@dataclass(frozen=True, kw_only=True)
class Span:
    """What a chart shows."""

    name: str
    length: timedelta
    buckets: Sequence[timedelta]
    """The periods by which it may be divided, each a multiple of the first one."""
    bars: int
    """How many of them there should be at most."""

    def bucket_for(self, covered: timedelta) -> timedelta:
        """Return the shortest period for a part of the span."""
        return next((each for each in self.buckets if covered / each <= self.bars), self.buckets[-1])


def _seconds(*numbers: int) -> tuple[timedelta, ...]:
    return tuple(timedelta(seconds=number) for number in numbers)


MINUTES = Span(name="minutes", length=timedelta(minutes=15), buckets=_seconds(5, 10, 15, 30), bars=30)
HOUR = Span(name="hour", length=timedelta(hours=1), buckets=_seconds(5, 10, 15, 30, 60), bars=60)
DAY = Span(name="day", length=timedelta(days=1), buckets=_seconds(300, 900), bars=96)


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """What has finished within one period."""

    begins: datetime
    counts: Mapping[str, int]
    """By outcome, without those that have none."""

    @property
    def total(self) -> int:
        """The number of all of them."""
        return sum(self.counts.values())


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """The result of :func:`read_throughput`."""

    span: Span
    counts_attempts: bool
    """Whether attempts were counted, from the attempt history; otherwise jobs."""
    begins: datetime
    """From when on everything was counted."""
    ends: datetime
    limit: int
    is_capped: bool
    """Whether there were more than ``limit``, so that the beginning of the span is missing."""
    bucket: timedelta
    """The period of each bucket: shorter ones if only a part of the span was read."""
    buckets: Sequence[Bucket]
    """Without gaps, the oldest first. Of the first and the last one only a part may have been counted."""
    outcomes: Sequence[str]
    """Those that the source has."""
    missing: Unavailable | None
    """The outcomes that it lacks; None for none."""

    @property
    def totals(self) -> dict[str, int]:
        """The number of each outcome."""
        return {each: sum(bucket.counts.get(each, 0) for bucket in self.buckets) for each in self.outcomes}

    @property
    def total(self) -> int:
        """The number of all of them."""
        return sum(bucket.total for bucket in self.buckets)

    @property
    def per_minute(self) -> float:
        """How many jobs have finished in a minute on average."""
        minutes = (self.ends - self.begins).total_seconds() / 60
        finished = self.total - self.totals.get("retried", 0)
        return finished / minutes if minutes > 0 else 0.0


def read_throughput(
    reader: QueueReader, span: Span = HOUR, *, limit: int = LIMIT, source: FinishedJobs | Unavailable | None = None
) -> Throughput | Unavailable:
    """Return what has finished in a span of time up to now.

    :param limit: the number of entries that are read at most, the newest first.
    :param source: where they are read, if that is known already.
    """
    found = source or find_finished_jobs(reader)
    if isinstance(found, Unavailable):
        return found
    jobs = found.newest(span.length, limit).subquery("sqlaqueue_newest")
    # The shortest ones, from which longer ones are made once it is known which part of the span was read.
    begins = period(span.buckets[0], jobs.c.ended_at).label("begins")
    first = sa.func.min(jobs.c.ended_at)
    counted = sa.select(begins, jobs.c.outcome, sa.func.count(), first).group_by(begins, jobs.c.outcome)
    rows = reader.execute(counted).all()
    is_capped = sum(row[2] for row in rows) >= limit
    since = min(row[3] for row in rows).astimezone(UTC) if is_capped else reader.now - span.length
    bucket = span.bucket_for(reader.now - since)
    counts: dict[datetime, dict[str, int]] = {}
    for moment, outcome, number, _ in rows:
        name = _COUNTED_AS.get(outcome, outcome)
        if name in OUTCOMES:
            of_bucket = counts.setdefault(_begin(moment.astimezone(UTC), bucket), {})
            of_bucket[name] = of_bucket.get(name, 0) + number
    return Throughput(
        span=span,
        counts_attempts=found.source == "attempts",
        begins=since,
        ends=reader.now,
        limit=limit,
        is_capped=is_capped,
        bucket=bucket,
        buckets=[Bucket(begins=each, counts=counts.get(each, {})) for each in _moments(since, reader.now, bucket)],
        outcomes=[each for each in OUTCOMES if each in found.states],
        missing=found.missing,
    )


def _begin(moment: datetime, bucket: timedelta) -> datetime:
    return _EPOCH + (moment - _EPOCH) // bucket * bucket


def _moments(since: datetime, until: datetime, bucket: timedelta) -> list[datetime]:
    first, last = _begin(since, bucket), _begin(until, bucket)
    return [first + number * bucket for number in range((last - first) // bucket + 1)]
