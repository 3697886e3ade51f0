"""Failed jobs: how many there are, and their kinds of errors, at a bounded cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa

from sqlaqueue._typing import AnySelect
from sqlaqueue.admin.jobs import kind_of
from sqlaqueue.queue.names import DEAD_LETTER
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.web.data.finished_jobs import FinishedJobs, find_finished_jobs
from sqlaqueue.web.data.queue_reader import QueueReader
from sqlaqueue.web.data.throughput import DAY, LIMIT
from sqlaqueue.web.data.unavailable import Unavailable, attempt_history_fix, finished_index_fix

COUNTED = 10_000
"""The number up to which failed jobs are counted."""

GROUPED = 2_000
"""The number of failed jobs whose errors are grouped; the pattern of a kind is matched with each text."""

_SHOWN = 300
"""Characters of an error; a kind that is longer is not recognized."""


@dataclass(frozen=True, kw_only=True)
class CappedCount:
    """A number that was counted up to a limit."""

    number: int
    is_capped: bool
    """Whether there may be more."""


@dataclass(frozen=True, kw_only=True)
class FailureKind:
    """The failed jobs with one kind of error."""

    kind: str
    """As in :class:`~sqlaqueue.admin.FailureGroup`."""
    number: int
    newest: datetime | None
    error: str
    """The beginning of the text of the newest one."""


@dataclass(frozen=True, kw_only=True)
class FailureKinds:
    """The result of :func:`read_failure_kinds`."""

    kinds: Sequence[FailureKind]
    """The most frequent first."""
    number: int
    """How many failures were grouped."""
    is_capped: bool
    """Whether there are more, older ones."""
    of_attempts: bool
    """Whether these are attempts of the last day from the attempt history, whose jobs may have been requeued since."""


def count_failed(reader: QueueReader) -> CappedCount | Unavailable:
    """Return the number of failed jobs, counted up to a limit."""
    spec = reader.spec
    if not spec.has("status"):
        letters = _letters(spec, COUNTED + 1).subquery("sqlaqueue_letters")
        failed = sa.func.count().filter(letters.c.state == "failed")
        read, number = reader.execute(sa.select(sa.func.count(), failed).select_from(letters)).one()
        return CappedCount(number=min(number, COUNTED), is_capped=read > COUNTED)
    if spec.config.states.failed is None:
        return CappedCount(number=0, is_capped=False)
    first = sa.select(sa.literal(1)).select_from(spec.table).where(spec.in_state("failed")).limit(COUNTED + 1)
    if not (reader.is_small or reader.is_bounded("count of failed", first)):
        return _unindexed(reader)
    number = reader.execute(sa.select(sa.func.count()).select_from(first.subquery("sqlaqueue_failed"))).scalar_one()
    return CappedCount(number=min(number, COUNTED), is_capped=number > COUNTED)


def read_failure_kinds(
    reader: QueueReader, source: FinishedJobs | Unavailable | None = None
) -> FailureKinds | Unavailable:
    """Return the kinds of errors of the newest failed jobs.

    :param source: where finished jobs are read, if that is known already.
    """
    spec = reader.spec
    if not spec.has("status"):
        return _grouped(reader, _failed_letters(spec))
    if not spec.has("last_error"):
        return Unavailable(reason=f"{spec.model.__name__} leaves out the queue attribute 'last_error'.")
    if spec.config.states.failed is None:
        return FailureKinds(kinds=(), number=0, is_capped=False, of_attempts=False)
    newest = _failed_rows(spec)
    if reader.is_small or (spec.has("finished_at") and reader.is_bounded("newest failed", newest)):
        return _grouped(reader, newest)
    found = source or find_finished_jobs(reader)
    if isinstance(found, Unavailable):
        return found
    recent = found.newest(DAY.length, LIMIT).subquery("sqlaqueue_recent")
    failed = sa.select(recent.c.error, recent.c.ended_at).where(recent.c.outcome == "failed").limit(GROUPED)
    return _grouped(reader, failed, of_attempts=found.source == "attempts")


def _failed_rows(spec: QueueSpec) -> AnySelect:
    moment = spec.columns.get("finished_at")
    ended = sa.null() if moment is None else sa.cast(moment, sa.DateTime(timezone=True))
    failed = sa.select(spec.columns["last_error"].label("error"), ended.label("ended_at"))
    order = [] if moment is None else [moment.desc()]
    return failed.where(spec.in_state("failed")).order_by(*order).limit(GROUPED)


def _letters(spec: QueueSpec, limit: int) -> AnySelect:
    """Return dead letters of a queue, failed and cancelled ones: the index of their keys does not tell them apart."""
    dead = spec.side_tables[DEAD_LETTER]
    letters = sa.select(dead.c.state, dead.c.error, dead.c.created_at.label("ended_at"))
    return letters.where(dead.c.queue == spec.name).limit(limit)


def _failed_letters(spec: QueueSpec) -> AnySelect:
    letters = _letters(spec, GROUPED).subquery("sqlaqueue_letters")
    return sa.select(letters.c.error, letters.c.ended_at).where(letters.c.state == "failed")


def _grouped(reader: QueueReader, failed: AnySelect, *, of_attempts: bool = False) -> FailureKinds:
    rows = failed.subquery("sqlaqueue_failed")
    text: Any = sa.func.left(rows.c.error, _SHOWN, type_=sa.Text())
    kinds = sa.select(kind_of(text).label("kind"), text.label("error"), rows.c.ended_at).subquery("sqlaqueue_kinds")
    newest_first = kinds.c.ended_at.desc().nulls_last()
    ranked = sa.select(
        *kinds.c,
        sa.func.count().over(partition_by=kinds.c.kind).label("number"),
        sa.func.row_number().over(partition_by=kinds.c.kind, order_by=newest_first).label("rank"),
    ).subquery("sqlaqueue_ranked")
    newest = sa.select(ranked).where(ranked.c.rank == 1).order_by(ranked.c.number.desc(), ranked.c.kind)
    found = [
        FailureKind(
            kind=row.kind,
            number=row.number,
            newest=None if row.ended_at is None else row.ended_at.astimezone(UTC),
            error=row.error or "",
        )
        for row in reader.execute(newest)
    ]
    number = sum(each.number for each in found)
    return FailureKinds(kinds=found, number=number, is_capped=number >= GROUPED, of_attempts=of_attempts)


def _unindexed(reader: QueueReader) -> Unavailable:
    fixes = (attempt_history_fix(reader.spec),) if not reader.spec.has("finished_at") else (finished_index_fix(reader),)
    return Unavailable(reason="No index has the failed jobs, so counting them would read the whole table.", fixes=fixes)
