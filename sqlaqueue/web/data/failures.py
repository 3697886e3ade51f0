"""The failed jobs of a queue: how many there are, and in which groups, at a bounded cost.

The jobs of a group have the same kind of error and the same message, but for what differs from job to job: numbers,
UUIDs and quoted texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue._typing import AnySelect
from sqlaqueue.admin.jobs import kind_of, message_of
from sqlaqueue.queue.names import DEAD_LETTER
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.sql.portable import converted, filtered, greatest, nulls_last, seconds_between
from sqlaqueue.web.data.engines import beginning, whole_number
from sqlaqueue.web.data.past import DAY, HOUR, LIMIT, FinishedJobs, find_finished_jobs
from sqlaqueue.web.data.reader import QueueReader, Unavailable, attempt_history_fix, finished_index_fix

COUNTED = 10_000
"""The number up to which failed jobs are counted."""

GROUPED = 2_000
"""The number of failed jobs whose errors are grouped: matching patterns with 2,000 texts takes some 30 milliseconds."""

HOURS = 24
"""The number of hours of the trend of a group."""

_SHOWN = 300
"""Characters of an error; a kind that is longer is not recognized."""


@dataclass(frozen=True, kw_only=True)
class CappedCount:
    number: int
    is_capped: bool
    """Whether there may be more."""


@dataclass(frozen=True, kw_only=True)
class ErrorGroup:
    """The failed jobs with one kind of error and one message."""

    kind: str
    """As in :class:`~sqlaqueue.admin.FailureGroup`."""
    message: str
    """See :func:`sqlaqueue.admin.jobs.message_of`."""
    number: int
    first: datetime | None
    """When the oldest of those that were read has failed; None if the queue stores no such times."""
    newest: datetime | None
    error: str
    """The beginning of the text of the newest one."""
    hours: Sequence[int]
    """How many have failed in each hour of the last day, the oldest first."""

    @property
    def last_hour(self) -> int:
        return self.hours[-1]


@dataclass(frozen=True, kw_only=True)
class Failures:
    groups: Sequence[ErrorGroup]
    """The largest first."""
    is_capped: bool
    """Whether there are more failures, older ones."""
    of_attempts: bool
    """Whether these are attempts of the last day from the attempt history, whose jobs may have been requeued since."""

    @property
    def number(self) -> int:
        """How many failures were grouped."""
        return sum(group.number for group in self.groups)

    @property
    def last_hour(self) -> int:
        return sum(group.last_hour for group in self.groups)

    @property
    def kinds(self) -> Sequence[tuple[str, int]]:
        """The kinds of errors, each with its number; the most frequent first."""
        found: dict[str, int] = {}
        for group in self.groups:
            found[group.kind] = found.get(group.kind, 0) + group.number
        return sorted(found.items(), key=lambda each: (-each[1], each[0]))


def group_of(session: Session, spec: QueueSpec, error: str) -> tuple[str, str]:
    """Return the kind and the message of the group to which an error belongs."""
    text: Any = sa.literal(error[:_SHOWN], sa.Text())
    found = sa.select(kind_of(text), message_of(text))
    kind, message = session.execute(found, bind_arguments={"mapper": spec.mapper}).one()
    return kind, message


def group_filter(kind: str, message: str, state: str = "failed") -> list[tuple[str, str]]:
    """Return the filter that selects the jobs of a group."""
    return [("state", state), *([("error", kind)] if kind else []), ("message", message)]


def count_failed(reader: QueueReader) -> CappedCount | Unavailable:
    spec = reader.spec
    if not spec.has("status"):
        letters = _letters(spec, COUNTED + 1).subquery("sqlaqueue_letters")
        failed = filtered(sa.func.count(), letters.c.state == "failed")
        read, number = reader.execute(sa.select(sa.func.count(), failed).select_from(letters)).one()
        return CappedCount(number=min(number, COUNTED), is_capped=read > COUNTED)
    if spec.config.states.failed is None:
        return CappedCount(number=0, is_capped=False)
    first = sa.select(sa.literal(1)).select_from(spec.table).where(spec.in_state("failed")).limit(COUNTED + 1)
    if not (reader.is_small or reader.is_bounded("count of failed", first)):
        reason = "No index has the failed jobs, so counting them would read the whole table."
        fix = finished_index_fix(reader) if spec.has("finished_at") else attempt_history_fix(spec)
        return Unavailable(reason=reason, fixes=(fix,))
    number = reader.execute(sa.select(sa.func.count()).select_from(first.subquery("sqlaqueue_failed"))).scalar_one()
    return CappedCount(number=min(number, COUNTED), is_capped=number > COUNTED)


def read_failures(
    reader: QueueReader, source: FinishedJobs | Unavailable | None = None, *, within: timedelta | None = None
) -> Failures | Unavailable:
    """Return the newest failures by kind and message.

    :param within: how old they may be; None for all that are read.
    """
    spec = reader.spec
    if not spec.has("status"):
        letters = _letters(spec, GROUPED).subquery("sqlaqueue_letters")
        failed_letters = sa.select(letters.c.error, letters.c.ended_at).where(letters.c.state == "failed")
        found = _grouped(reader, failed_letters, within=within)
        number: int = reader.execute(sa.select(sa.func.count()).select_from(letters)).scalar_one()
        return replace(found, is_capped=number >= GROUPED)
    if not spec.has("last_error"):
        return Unavailable(reason=f"{spec.model.__name__} leaves out the queue attribute 'last_error'.")
    if spec.config.states.failed is None:
        return Failures(groups=(), is_capped=False, of_attempts=False)
    newest = _failed_rows(spec)
    if reader.is_small or (spec.has("finished_at") and reader.is_bounded("newest failed", newest)):
        return _grouped(reader, newest, within=within)
    finished = source or find_finished_jobs(reader)
    if isinstance(finished, Unavailable):
        return finished
    recent = finished.newest(DAY.length, LIMIT).subquery("sqlaqueue_recent")
    failed = sa.select(recent.c.error, recent.c.ended_at).where(recent.c.outcome == "failed").limit(GROUPED)
    return _grouped(reader, failed, of_attempts=finished.source == "attempts", within=within)


def _failed_rows(spec: QueueSpec) -> AnySelect:
    moment = spec.columns.get("finished_at")
    ended = sa.null() if moment is None else converted(moment, sa.DateTime(timezone=True))
    failed = sa.select(spec.columns["last_error"].label("error"), ended.label("ended_at"))
    order = [] if moment is None else [moment.desc()]
    return failed.where(spec.in_state("failed")).order_by(*order).limit(GROUPED)


def _letters(spec: QueueSpec, limit: int) -> AnySelect:
    """Return dead letters of a queue, failed and cancelled ones: the index of their keys does not tell them apart."""
    dead = spec.side_tables[DEAD_LETTER]
    letters = sa.select(dead.c.state, dead.c.error, dead.c.created_at.label("ended_at"))
    return letters.where(dead.c.queue == spec.name).limit(limit)


def _grouped(
    reader: QueueReader, failed: AnySelect, *, of_attempts: bool = False, within: timedelta | None = None
) -> Failures:
    rows = failed.subquery("sqlaqueue_failed")
    recent = [] if within is None else [rows.c.ended_at > reader.now - within]
    text: Any = beginning(rows.c.error, _SHOWN)
    ended: Any = rows.c.ended_at
    ago = whole_number(seconds_between(ended, reader.now) / HOUR.length.total_seconds())
    # Two clocks may differ by a moment.
    hour = sa.case((ended > reader.now - DAY.length, greatest(ago, 0)))
    read = sa.select(
        kind_of(text).label("kind"), message_of(text).label("message"), text.label("error"), ended, hour.label("hour")
    )
    texts = read.where(*recent).subquery("sqlaqueue_texts")
    newest_first = nulls_last(texts.c.ended_at.desc())
    rank = sa.func.row_number().over(partition_by=[texts.c.kind, texts.c.message], order_by=newest_first)
    ranked = sa.select(*texts.c, rank.label("rank")).subquery("sqlaqueue_ranked")
    of_group = [ranked.c.kind, ranked.c.message, ranked.c.hour]
    grouped = sa.select(
        *of_group,
        sa.func.count().label("number"),
        sa.func.min(ranked.c.ended_at).label("first"),
        sa.func.max(ranked.c.ended_at).label("newest"),
        sa.func.max(sa.case((ranked.c.rank == 1, ranked.c.error))).label("error"),
    ).group_by(*of_group)
    found: dict[tuple[str, str], list[Any]] = {}
    for row in reader.execute(grouped):
        found.setdefault((row.kind, row.message), []).append(row)
    groups = [_group(kind, message, parts) for (kind, message), parts in found.items()]
    number = sum(group.number for group in groups)
    return Failures(
        groups=sorted(groups, key=lambda group: (-group.number, group.kind, group.message)),
        is_capped=number >= GROUPED,
        of_attempts=of_attempts,
    )


def _group(kind: str, message: str, parts: Sequence[Any]) -> ErrorGroup:
    """Return a group from its rows, one for each hour in which jobs have failed."""
    hours = [0] * HOURS
    for row in parts:
        if row.hour is not None:
            hours[HOURS - 1 - min(row.hour, HOURS - 1)] += row.number
    moments = [moment.astimezone(UTC) for row in parts for moment in (row.first, row.newest) if moment is not None]
    return ErrorGroup(
        kind=kind,
        message=message,
        number=sum(row.number for row in parts),
        first=min(moments, default=None),
        newest=max(moments, default=None),
        error=next((row.error for row in parts if row.error), "").partition("\n")[0],
        hours=hours,
    )
