"""How many jobs have finished in each minute, by outcome."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import sqlalchemy as sa

from sqlaqueue.queue.backend import backend
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
    bucket: timedelta


MINUTES = Span(name="minutes", length=timedelta(minutes=15), bucket=timedelta(minutes=1))
HOUR = Span(name="hour", length=timedelta(hours=1), bucket=timedelta(minutes=1))
DAY = Span(name="day", length=timedelta(days=1), bucket=timedelta(minutes=15))


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
    jobs = found.newest(span.length, limit).subquery("newest")
    begins = backend().period(span.bucket, jobs.c.ended_at).label("begins")
    first = sa.func.min(jobs.c.ended_at)
    counted = sa.select(begins, jobs.c.outcome, sa.func.count(), first).group_by(begins, jobs.c.outcome)
    counts: dict[datetime, dict[str, int]] = {}
    read, oldest = 0, reader.now
    for moment, outcome, number, since in reader.execute(counted):
        read, oldest = read + number, min(oldest, since.astimezone(UTC))
        name = _COUNTED_AS.get(outcome, outcome)
        if name in OUTCOMES:
            of_bucket = counts.setdefault(moment.astimezone(UTC), {})
            of_bucket[name] = of_bucket.get(name, 0) + number
    is_capped = read >= limit
    since = oldest if is_capped else reader.now - span.length
    moments = _moments(since, reader.now, span.bucket)
    return Throughput(
        span=span,
        counts_attempts=found.source == "attempts",
        begins=since,
        ends=reader.now,
        limit=limit,
        is_capped=is_capped,
        buckets=[Bucket(begins=each, counts=counts.get(each, {})) for each in moments],
        outcomes=[each for each in OUTCOMES if each in found.states],
        missing=found.missing,
    )


def _moments(since: datetime, until: datetime, bucket: timedelta) -> list[datetime]:
    """Return the beginning of each period, in the way of ``backend().period()``."""
    first = (since - _EPOCH) // bucket
    last = (until - _EPOCH) // bucket
    return [_EPOCH + number * bucket for number in range(first, last + 1)]
