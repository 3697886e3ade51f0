"""What a job waits for, and what waits for it: numbers by state, the first jobs, and the chain to its end.

Jobs of queues that the user does not see, and of foreign keys that are redacted, are never read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue._typing import AnySelect
from sqlaqueue.queue.options import FINISHED, STATES
from sqlaqueue.queue.run import key_text
from sqlaqueue.queue.spec import QueueSpec, WaitRelation
from sqlaqueue.web.data.engines import shown_text, text_of
from sqlaqueue.web.data.job import StoredJob, has_key, is_key
from sqlaqueue.web.data.job_columns import OTHER, JobColumns, state_of
from sqlaqueue.web.data.job_filters import parameter_of, parse_filter
from sqlaqueue.web.data.job_pages import set_planner
from sqlaqueue.web.data.job_windows import SHOWN
from sqlaqueue.web.data.reader import ParameterError, Part, attempt_part

MOST_READ = 10_000
"""The number of members of a batch, or of jobs that wait for one job, that are read."""

MOST_SHOWN = 20
"""The number of them that are shown."""

_MOST_LOOKED_AT = 20
"""The number of waiting jobs of a chain of which it is read for what they wait."""

_MOST_OF_ONE = 3
"""The number of jobs of a chain that are shown of one relationship."""

Columns = Callable[[QueueSpec], JobColumns | None]
"""Returns the columns of a queue; None for one that the user does not see."""

_FAILED_FIRST = ("failed", "cancelled", "waiting", "processing", "pending", OTHER, "completed")
_BLOCKED_FIRST = ("waiting", "pending", "processing", OTHER, "cancelled", "failed", "completed")


@dataclass(frozen=True)
class RelatedJob:
    spec: QueueSpec
    key: str
    state: str
    error: str | None = None
    """The beginning of its last error; None if there is none, or it is redacted."""


@dataclass(frozen=True, eq=False)
class Relation:
    """A relationship of ``waits_for``, as it is followed from a job to the jobs at its other end."""

    wait: WaitRelation
    mine: JobColumns
    theirs: JobColumns
    is_awaited: bool
    """Whether the jobs at the other end are those that are waited for."""

    @property
    def pairs(self) -> list[tuple[sa.Column[Any], sa.Column[Any]]]:
        """The columns that have the same values: of the job, and of those at the other end."""
        return [(here, there) if self.is_awaited else (there, here) for here, there in self.wait.pairs]

    @property
    def is_redacted(self) -> bool:
        ends = [(self.mine.stored_as(mine.name), self.theirs.stored_as(its.name)) for mine, its in self.pairs]
        return any(each is not None and each.is_redacted for both in ends for each in both)

    def some(self, key: str) -> sa.Subquery:
        """Return the keys, the states and the errors of the jobs at the other end, up to a limit.

        The index of the foreign key has them, so that no more rows are read.
        """
        spec = self.theirs.spec
        other = spec.table.alias("sqlaqueue_other")
        columns: list[sa.ColumnElement[Any]] = [other.c[key.key].label(f"key_{n}") for n, key in enumerate(spec.keys)]
        columns.append(state_of(spec, other.c[spec.columns["status"].key]).label("state"))
        error = self.theirs.by_role.get("last_error")
        if error is not None and not error.is_redacted:
            columns.append(other.c[error.column.key].label("error"))
        joined = self.mine.spec.table.join(other, sa.and_(*(other.c[its.key] == mine for mine, its in self.pairs)))
        rows: AnySelect = sa.select(*columns).select_from(joined).where(has_key(self.mine, key)).limit(MOST_READ)
        return rows.subquery("sqlaqueue_some")


@dataclass(frozen=True, kw_only=True)
class Group:
    """The members of a batch, or the jobs that wait for a job."""

    relation: Relation
    counts: Mapping[str, int]
    """How many jobs there are by state, of those that were read; only states with jobs."""
    is_complete: bool
    """Whether all of them were read."""
    jobs: Sequence[RelatedJob]
    """The first ones: failed members first, and of those that wait the ones that still do."""
    conditions: Sequence[tuple[str, str]] | None
    """The parameters of a list of exactly these jobs; None if no list can be filtered by the foreign key."""

    @property
    def spec(self) -> QueueSpec:
        return self.relation.theirs.spec

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    @property
    def ended(self) -> int:
        return sum(self.counts.get(state, 0) for state in FINISHED)

    @property
    def failed(self) -> int:
        return self.counts.get("failed", 0)


@dataclass(frozen=True, kw_only=True)
class Step:
    """What one job waits for by one relationship."""

    job: RelatedJob | None = None
    """The job that waits; None for the one whose chain it is."""
    name: str = ""
    """The name of the relationship."""
    hidden: Literal["", "unseen", "redacted"] = ""
    """Why its jobs are not shown: the user does not see their queue, or the foreign key is redacted."""
    jobs: Sequence[RelatedJob] = ()
    left: int = 0
    """How many jobs it waits for, of those that were read."""
    is_complete: bool = True
    """Whether all of them were read."""

    @property
    def more(self) -> int:
        return max(0, self.left - len(self.jobs))


@dataclass(frozen=True, kw_only=True)
class Waits:
    steps: Part[Sequence[Step]]
    """What the job waits for, then what the waiting ones among these wait for, and so on."""
    is_cut: bool
    """Whether the chain is longer."""
    members: Sequence[tuple[str, Part[Group]]]
    """The members of the batch that the job is, by the names of the relationships."""
    dependents: Sequence[tuple[str, Part[Group]]]
    """The jobs that wait for it."""

    @property
    def is_miscounted(self) -> bool:
        """Whether the job has nothing to wait for: nothing was left out, and all of it has ended."""
        steps = self.steps.value
        return steps is not None and not any(each.hidden or each.left or not each.is_complete for each in steps)


def read_waits(session: Session, columns: JobColumns, key: str, job: StoredJob, seen: Columns) -> Waits:
    """Return what a job waits for, and what waits for it.

    It changes settings of the planner, until the transaction ends.
    """
    set_planner(session, columns)
    steps, is_cut = Part[Sequence[Step]](()), False
    members: list[tuple[str, Part[Group]]] = []
    if columns.spec.waits:
        chain = attempt_part(session, _chain, columns, key, job, seen)
        steps, is_cut = Part(chain.value and chain.value[0], chain.problem), bool(chain.value and chain.value[1])
        for wait in columns.spec.waits:
            relation = _follow(wait, seen, columns) if wait.to_many else None
            if relation is not None and not relation.is_redacted:
                members.append((wait.name, attempt_part(session, _group, relation, key, job)))
    dependents: list[tuple[str, Part[Group]]] = []
    for wait in columns.spec.awaited_by:
        theirs = seen(wait.waiting)
        back = None if theirs is None else Relation(wait, columns, theirs, is_awaited=False)
        if back is not None and not back.is_redacted:
            found = attempt_part(session, _group, back, key, job)
            if found.value is None or found.value.total:
                dependents.append((wait.full_name, found))
    return Waits(steps=steps, is_cut=is_cut, members=members, dependents=dependents)


def _follow(wait: WaitRelation, seen: Columns, mine: JobColumns) -> Relation | None:
    theirs = seen(wait.awaited)
    return None if theirs is None else Relation(wait, mine, theirs, is_awaited=True)


# -- members, and jobs that wait -------------------------------------------------------------------------------------


def _group(session: Session, relation: Relation, key: str, job: StoredJob) -> Group:
    some = relation.some(key)
    counts = _counts(session, relation, some)
    return Group(
        relation=relation,
        counts=counts,
        is_complete=sum(counts.values()) < MOST_READ,
        jobs=_first(session, relation, some, _FAILED_FIRST if relation.is_awaited else _BLOCKED_FIRST, MOST_SHOWN),
        conditions=_conditions(relation, job),
    )


def _counts(session: Session, relation: Relation, some: sa.Subquery) -> dict[str, int]:
    counting = sa.select(some.c.state, sa.func.count()).group_by(some.c.state)
    numbers = {row[0]: row[1] for row in _execute(session, relation, counting)}
    return {state: numbers[state] for state in (*STATES, OTHER) if state in numbers}


def _first(
    session: Session, relation: Relation, some: sa.Subquery, order: Sequence[str], limit: int
) -> list[RelatedJob]:
    """Return the first jobs: those in the first states, and only jobs in one of these states."""
    spec, keys = relation.theirs.spec, [column for column in some.c if column.name.startswith("key_")]
    place = sa.case({state: number for number, state in enumerate(order)}, value=some.c.state).label("place")
    first = sa.select(*some.c, place).where(some.c.state.in_(order)).order_by(place, *keys).limit(limit)
    # Errors are read of these only: the others may be long, and are not shown.
    rows = first.subquery("sqlaqueue_first")
    error = shown_text(rows.c.error, "text", SHOWN + 1) if "error" in rows.c else sa.cast(sa.null(), sa.Text())
    found = sa.select(rows.c.state, error, *(text_of(rows.c[key.name]) for key in keys))
    found = found.order_by(rows.c.place, *(rows.c[key.name] for key in keys))
    return [
        RelatedJob(spec, key_text(parts), state, _first_line(text))
        for state, text, *parts in _execute(session, relation, found)
    ]


def _first_line(text: str | None) -> str | None:
    line = next(iter((text or "").splitlines()), "")
    return f"{line[:SHOWN]}…" if len(line) > SHOWN else line or None


def _conditions(relation: Relation, job: StoredJob) -> Sequence[tuple[str, str]] | None:
    """Return the parameters of a filter by the foreign key, as the values of a job's row have it."""
    pairs: list[tuple[str, str]] = []
    for mine, its in relation.pairs:
        column, other = relation.mine.stored_as(mine.name), relation.theirs.stored_as(its.name)
        value = None if column is None else job.values[column.name]
        if other is None or value is None or value.text is None or value.size:
            return None
        pairs.append((parameter_of(other, ""), value.text))
    try:
        wanted = parse_filter(relation.theirs, pairs)
    except ParameterError:
        return None
    # An empty text is no condition: the list would have all jobs of the queue.
    return pairs if len(wanted.conditions) == len(pairs) else None


# -- the chain -------------------------------------------------------------------------------------------------------


def _chain(
    session: Session, columns: JobColumns, key: str, job: StoredJob, seen: Columns
) -> tuple[Sequence[Step], bool]:
    """Return the steps of a chain, and whether it is longer."""
    first = RelatedJob(columns.spec, key, job.state)
    queue, known, steps = deque([(first, columns)]), {(columns.spec.name, key)}, list[Step]()
    for _ in range(_MOST_LOOKED_AT):
        if not queue:
            break
        waiting, mine = queue.popleft()
        for wait in waiting.spec.waits:
            relation, of = _follow(wait, seen, mine), None if waiting is first else waiting
            if relation is None:
                steps.append(Step(job=of, name=wait.name, hidden=_unseen(session, wait, mine, waiting.key)))
                continue
            step = _step(session, relation, waiting.key)
            steps.append(replace(step, job=of, name=wait.name))
            for each in step.jobs:
                # In a circle, which never runs, each job is looked at once.
                is_new = each.state == "waiting" and (each.spec.name, each.key) not in known
                if is_new and is_key(relation.theirs, each.key):
                    known.add((each.spec.name, each.key))
                    queue.append((each, relation.theirs))
    return [each for each in steps if each.hidden or each.jobs or each.left or not each.is_complete], bool(queue)


def _unseen(session: Session, wait: WaitRelation, mine: JobColumns, key: str) -> Literal["", "unseen"]:
    """Return why a step to a queue that the user does not see is hidden; nothing if the foreign key is NULL."""
    refers = sa.true() if wait.to_many else sa.and_(*(here.is_not(None) for here, _ in wait.pairs))
    own = sa.select(refers).select_from(mine.spec.table).where(has_key(mine, key))
    return "unseen" if session.scalar(own, bind_arguments={"mapper": mine.spec.mapper}) else ""


def _step(session: Session, relation: Relation, key: str) -> Step:
    if relation.is_redacted:
        return Step(hidden="redacted")
    wait, some = relation.wait, relation.some(key)
    counts = _counts(session, relation, some)
    left = {state: number for state, number in counts.items() if state not in wait.satisfying}
    # Of the members of a batch those that it still waits for; one parent is shown in any state.
    order = [state for state in _FAILED_FIRST if state in (left if wait.to_many else counts)]
    jobs = _first(session, relation, some, order, _MOST_OF_ONE) if order else []
    return Step(jobs=jobs, left=sum(left.values()), is_complete=sum(counts.values()) < MOST_READ)


def _execute(session: Session, relation: Relation, statement: Any) -> Any:
    return session.execute(statement, bind_arguments={"mapper": relation.theirs.spec.mapper})
