"""For how long jobs waited, and for how long they ran: percentiles of the newest ones."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import sqlalchemy as sa

from sqlaqueue._typing import AnySelect
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.web.data.finished_jobs import FinishedJobs, due_at, find_finished_jobs
from sqlaqueue.web.data.queue_reader import QueueReader
from sqlaqueue.web.data.unavailable import Fix, Unavailable, attempt_history_fix

SAMPLE = 2_000
"""The number of runs from which percentiles are computed, the newest ones."""

JOINED = 1_000
"""The same where the row of each job has to be looked up."""

SPAN = timedelta(days=1)
"""How long ago a run may have ended."""

_SLACK = timedelta(seconds=1)
_SHARES = (0.5, 0.95, 0.99)
_RUNS = ("completed", "retried", "failed", "cancelled")
"""The outcomes whose end is that of the handler. A rescued attempt ends with its rescue."""
_LAST_RUNS = ("completed", "failed", "cancelled")


@dataclass(frozen=True, kw_only=True)
class Percentiles:
    """Durations in seconds."""

    p50: float
    p95: float
    p99: float
    longest: float
    number: int
    """Of how many runs."""


@dataclass(frozen=True, kw_only=True)
class Durations:
    """The result of :func:`read_durations`; None for times of which there are none within a day."""

    waits: Percentiles | Unavailable | None
    """From when a job was due, or was enqueued if that was later, until its last run began."""
    runs: Percentiles | Unavailable | None
    """From when its handler was called until it returned or raised; of the rows of a queue with leases, from the
    claim."""


def read_durations(reader: QueueReader, source: FinishedJobs | Unavailable | None = None) -> Durations:
    """Return the percentiles of wait and run times.

    :param source: where finished jobs are read, if that is known already.
    """
    found = source or find_finished_jobs(reader)
    if isinstance(found, Unavailable):
        return Durations(waits=found, runs=found)
    if not found.knows_starts:
        lacking = _without_starts(reader.spec)
        return Durations(waits=lacking, runs=lacking)
    jobs = found.newest(SPAN, SAMPLE).subquery("sqlaqueue_newest")
    ran = jobs.c.outcome.in_(_RUNS)
    runs = _read(reader, sa.select((_seconds(jobs.c.ended_at - jobs.c.started_at)).label("seconds")).where(ran))
    return Durations(waits=_waits(reader, found), runs=runs)


def _waits(reader: QueueReader, found: FinishedJobs) -> Percentiles | Unavailable | None:
    spec = reader.spec
    if not (spec.has("run_at") or spec.has("created_at")):
        reason = f"{spec.model.__name__} leaves out the queue attributes 'run_at' and 'created_at'."
        return Unavailable(reason=reason, fixes=(_add_role(spec, "created_at"),))
    if found.source == "jobs":
        jobs = found.newest(SPAN, SAMPLE).subquery("sqlaqueue_newest")
        return _read(reader, sa.select(_seconds(jobs.c.started_at - jobs.c.due_at).label("seconds")))
    if not spec.strategy.keeps_rows or spec.config.on_complete == "delete":
        reason = "The rows of completed jobs are deleted, and with them the time when they were enqueued."
        return Unavailable(reason=reason)
    if not spec.has("attempts"):
        reason = f"{spec.model.__name__} leaves out the queue attribute 'attempts', which tells the last attempt."
        return Unavailable(reason=reason, fixes=(_add_role(spec, "attempts"),))
    return _read(reader, _waits_of_attempts(spec, found))


def _waits_of_attempts(spec: QueueSpec, found: FinishedJobs) -> AnySelect:
    """Return the wait of the last attempts of jobs, whose rows still say when they were due."""
    newest = found.newest(SPAN, JOINED).subquery("sqlaqueue_newest")
    key: Any = newest.c.key
    same = [column == sa.cast(key[number].as_string(), column.type) for number, column in enumerate(spec.keys)]
    is_last = sa.func.coalesce(spec.columns["attempts"], 1) == newest.c.attempt
    # A LIMIT keeps the planner from a join that reads the whole table.
    row = sa.select(due_at(spec).label("due_at")).where(*same, is_last).limit(1).lateral("sqlaqueue_job")
    seconds = _seconds(newest.c.started_at - row.c.due_at).label("seconds")
    # A job that was requeued has had attempts of the same numbers before, when it was due at other times.
    is_of_this_time = newest.c.started_at >= row.c.due_at - _SLACK
    return (
        sa.select(seconds)
        .select_from(newest.join(row, sa.true()))
        .where(newest.c.outcome.in_(_LAST_RUNS), is_of_this_time)
    )


def _read(reader: QueueReader, durations: AnySelect) -> Percentiles | None:
    seconds = durations.subquery("sqlaqueue_durations").c.seconds
    # Two clocks, or two transactions, may differ by a moment.
    positive = sa.func.greatest(seconds, 0)
    shares = sa.literal(list(_SHARES), sa.ARRAY(sa.Float()))
    percentiles = sa.func.percentile_cont(shares).within_group(positive)
    query = sa.select(sa.func.count(seconds), sa.func.max(positive), sa.type_coerce(percentiles, sa.ARRAY(sa.Float())))
    number, longest, values = reader.execute(query.where(seconds.is_not(None))).one()
    if not number:
        return None
    p50, p95, p99 = values
    return Percentiles(p50=p50, p95=p95, p99=p99, longest=longest, number=number)


def _seconds(interval: sa.ColumnElement[Any]) -> sa.ColumnElement[float]:
    return sa.cast(sa.extract("epoch", interval), sa.Double())


def _without_starts(spec: QueueSpec) -> Unavailable:
    reason = f"{spec.model.__name__} does not store when a run began."
    return Unavailable(reason=reason, fixes=(attempt_history_fix(spec), _add_role(spec, "started_at")))


def _add_role(spec: QueueSpec, role: str) -> Fix:
    # A sentence that ends with the option, such as "add it with QueueConfig(columns=...)".
    code = spec.config.fix_for(role).partition(" with ")[2] or spec.config.fix_for(role)
    return Fix(what=f"Store {role!r} in the rows of {spec.model.__name__}, and migrate the database.", code=code)
