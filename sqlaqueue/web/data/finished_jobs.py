"""The newest finished jobs of a queue, from whatever has them in the order of time.

That is the attempt history, if the queue has one: it knows retries and run times, and its index begins with queue and
time. Otherwise it is an index of the live database that leads with ``finished_at``, or with ``status`` and then
``finished_at``, as that of ``QueueConfig(retention=...)`` does; the plan of the statement tells whether there is one.
A small table is read whole. In any other case nothing is read: counting what has finished within an hour would read
all jobs that were ever kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import sqlalchemy as sa

from sqlaqueue._typing import AnySelect
from sqlaqueue.queue.names import ATTEMPT
from sqlaqueue.queue.options import FINISHED
from sqlaqueue.queue.spec import QueueSpec, clock
from sqlaqueue.web.data.queue_reader import QueueReader
from sqlaqueue.web.data.unavailable import Unavailable, attempt_history_fix, finished_index_fix

_MOMENT = sa.DateTime(timezone=True)
_ANY_TIME = timedelta(hours=1)


@dataclass(frozen=True, kw_only=True)
class FinishedJobs:
    """Where the finished jobs of a queue are read."""

    spec: QueueSpec
    source: Literal["attempts", "jobs"]
    """The attempt history, or the rows of the jobs."""
    states: Sequence[str]
    """The states whose jobs it has."""
    by_state: bool = False
    """Whether the index begins with the state, so that each state is searched by itself."""
    missing: Unavailable | None = None
    """The states that it lacks; None if it has all."""

    @property
    def knows_starts(self) -> bool:
        """Whether it knows when a run began."""
        return self.source == "attempts" or self.spec.has("started_at")

    def newest(self, span: timedelta, limit: int) -> AnySelect:
        """Return the newest jobs that have finished within a span of time, at most ``limit`` of them.

        Its columns are ``outcome``, ``started_at`` and ``ended_at``; ``error``; of the attempt history ``key`` and
        ``attempt``; of jobs ``due_at``. Those that are not known are NULL.
        """
        if self.source == "attempts":
            return self._attempts(span, limit)
        if not self.by_state:
            return self._jobs(span).limit(limit)
        parts = [self._jobs(span, state).limit(limit).subquery() for state in self.states]
        if len(parts) == 1:
            return sa.select(*parts[0].c)
        both = sa.union_all(*(sa.select(*part.c) for part in parts)).subquery("sqlaqueue_finished")
        return sa.select(*both.c).order_by(both.c.ended_at.desc()).limit(limit)

    def _attempts(self, span: timedelta, limit: int) -> AnySelect:
        table = self.spec.side_tables[ATTEMPT]
        names = ("outcome", "started_at", "ended_at", "error", "key", "attempt")
        recent = sa.and_(table.c.queue == self.spec.name, table.c.ended_at >= clock() - span)
        found = sa.select(*(table.c[name] for name in names)).where(recent)
        return found.order_by(table.c.ended_at.desc()).limit(limit)

    def _jobs(self, span: timedelta, state: str | None = None) -> AnySelect:
        spec = self.spec
        finished, status = spec.columns["finished_at"], spec.columns["status"]
        outcome: sa.ColumnElement[Any] = sa.literal(state, sa.Text())
        conditions = [finished >= clock() - span]
        if state is None:
            pairs = [(status == spec.literal(each), sa.literal(each, sa.Text())) for each in self.states]
            outcome = sa.case(*pairs, else_=sa.null())
        else:
            # First, as the column comes first in the index.
            conditions.insert(0, spec.in_state(state))
        columns = [
            outcome.label("outcome"),
            _moment(spec, "started_at").label("started_at"),
            sa.cast(finished, _MOMENT).label("ended_at"),
            (spec.columns["last_error"] if spec.has("last_error") else sa.null()).label("error"),
            due_at(spec).label("due_at"),
        ]
        return sa.select(*columns).where(*conditions).order_by(finished.desc())


def find_finished_jobs(reader: QueueReader) -> FinishedJobs | Unavailable:
    """Return where the finished jobs of a queue can be read at a bounded cost."""
    spec = reader.spec
    if ATTEMPT in spec.side_tables:
        states = ("completed", "retried", "failed", "cancelled")
        return FinishedJobs(spec=spec, source="attempts", states=states)
    if not spec.has("status"):
        reason = "The claims of this queue delete the rows of jobs, so nothing is left of those that have completed."
        return Unavailable(reason=reason, fixes=(attempt_history_fix(spec),))
    if not spec.has("finished_at"):
        reason = f"{spec.model.__name__} leaves out the queue attribute 'finished_at'."
        return Unavailable(reason=reason, fixes=(attempt_history_fix(spec),))
    kept = [state for state in FINISHED if getattr(spec.config.states, state) is not None]
    if spec.config.on_complete == "delete" and "completed" in kept:
        kept.remove("completed")
    together = FinishedJobs(spec=spec, source="jobs", states=kept, missing=_deleted(reader))
    if reader.is_small or reader.is_bounded("finished", together.newest(_ANY_TIME, 1)):
        return together
    indexed = [
        state
        for state in kept
        if reader.is_bounded(
            state, FinishedJobs(spec=spec, source="jobs", states=[state], by_state=True).newest(_ANY_TIME, 1)
        )
    ]
    if not indexed:
        return Unavailable(
            reason="No index has the finished jobs by time, so this would read the whole table.",
            fixes=(attempt_history_fix(spec), finished_index_fix(reader)),
        )
    missing = [state for state in kept if state not in indexed]
    lacking = together.missing
    if missing:
        reason = f"No index has the {' and '.join(missing)} jobs by time."
        lacking = Unavailable(reason=reason, fixes=(attempt_history_fix(spec), finished_index_fix(reader)))
    return FinishedJobs(spec=spec, source="jobs", states=indexed, by_state=True, missing=lacking)


def due_at(spec: QueueSpec) -> sa.ColumnElement[Any]:
    """Return when a job that has not been retried since could run first: when it was enqueued, or was due."""
    moments = [_moment(spec, role) for role in ("created_at", "run_at") if spec.has(role)]
    # GREATEST leaves NULL out: a job without run_at is due at once.
    return sa.func.greatest(*moments) if moments else sa.cast(sa.null(), _MOMENT)


def _moment(spec: QueueSpec, role: str) -> sa.ColumnElement[Any]:
    return sa.cast(spec.columns[role] if spec.has(role) else sa.null(), _MOMENT)


def _deleted(reader: QueueReader) -> Unavailable | None:
    if reader.spec.config.on_complete != "delete":
        return None
    reason = 'Completed jobs are deleted (on_complete="delete"), so they are not counted.'
    return Unavailable(reason=reason, fixes=(attempt_history_fix(reader.spec),))
