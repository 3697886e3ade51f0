"""Take an action on jobs back: what it has changed is recorded, and only jobs that are still as it left them change.

The values of the queue's own columns are read in the transaction of the action, before and after it, while the rows are
locked. To undo the action, the rows are locked again: a job whose values are those after the action gets back those
from before it. Any other one has run, or was changed, since; it is left alone and named. So is one that somebody has
locked, as a worker that runs it does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from sqlaqueue.admin.changes import savepoint, warn_of_refusal
from sqlaqueue.consumer.core.errors import may_be_of_a_row
from sqlaqueue.queue.run import key_text
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.sessions import routing_to_primary
from sqlaqueue.strategies.existing_messages import ExistingMessages
from sqlaqueue.web.data.engines import Pages, pages_of, text_of
from sqlaqueue.web.data.job import has_one_of, is_key
from sqlaqueue.web.data.job_columns import JobColumns, state_of, stored_type
from sqlaqueue.web.data.job_windows import exact_text

_ROLES = ("attempts", "finished_at", "run_at", "lease_token", "priority", "max_attempts")
"""The columns, beside the status, that actions change and undo."""

_BATCH = 500

Values = tuple[str | None, ...]
"""The state of a job, and the values of :func:`roles_of` its queue, as exact texts."""


@dataclass(frozen=True)
class Changed:
    """A job that an action has changed."""

    parts: tuple[str, ...]
    """Those of its key, as texts."""
    before: Values
    after: Values

    @property
    def key(self) -> str:
        return key_text(self.parts)


@dataclass(frozen=True)
class Changes:
    """What an action has changed, as it is stored in JSON."""

    roles: tuple[str, ...] = ()
    jobs: Sequence[Changed] = ()

    def as_json(self) -> dict[str, Any]:
        return {"roles": [*self.roles], "jobs": [[[*each.parts], [*each.before], [*each.after]] for each in self.jobs]}

    @classmethod
    def of_json(cls, stored: Mapping[str, Any]) -> Changes:
        """Return what :meth:`as_json` has returned."""
        jobs = [Changed(tuple(key), tuple(before), tuple(after)) for key, before, after in stored["jobs"]]
        return cls(tuple(stored["roles"]), jobs)


def why_not(spec: QueueSpec) -> str:
    """Return why no action on the jobs of a queue can be undone; an empty text if it can."""
    if not spec.has("status"):
        return "Claims of this queue delete its rows, and a requeue inserts them again."
    if spec.waits or spec.awaited_by:
        return "Jobs of this queue wait for each other, and further jobs may have changed with them."
    if isinstance(spec.strategy, ExistingMessages):
        return "The application fills the table of this queue's messages itself."
    return ""


def roles_of(spec: QueueSpec) -> tuple[str, ...]:
    return tuple(role for role in _ROLES if spec.has(role))


def _read(session: Session, columns: JobColumns, keys: Sequence[str], *, locks: bool) -> dict[tuple[str, ...], Values]:
    """Return the values of jobs that nobody else has locked, or of all; by the parts of their keys."""
    spec = columns.spec
    usable = [key for key in keys if is_key(columns, key)]
    if not usable:
        return {}
    parts = [text_of(each).label(f"key_{number}") for number, each in enumerate(spec.keys)]
    texts = [exact_text(spec.columns[role]).label(role) for role in roles_of(spec)]
    state = state_of(spec, spec.columns["status"]).label("state")
    rows: Any = sa.select(*parts, state, *texts).where(has_one_of(columns, usable)).order_by(*spec.keys)
    statement = spec.strategy.lock(spec, rows) if locks else rows
    with routing_to_primary(session):
        found = session.execute(statement, bind_arguments={"mapper": spec.mapper}).all()
    number = len(spec.keys)
    return {tuple(row[:number]): tuple(row[number:]) for row in found}


@contextmanager
def recorded(session: Session, columns: JobColumns, keys: Sequence[str], changed: list[Changed]) -> Iterator[None]:
    """Append to ``changed`` what the block changes of these jobs; the block commits once at most."""
    if why_not(columns.spec):
        yield
        return
    before = _read(session, columns, keys, locks=True)

    def at_commit(committing: Session) -> None:
        # Before the commit, when no worker can have claimed one yet.
        if not committing.in_nested_transaction() and before:
            after = _read(committing, columns, [*map(key_text, before)], locks=False)
            changed.extend(Changed(parts, before[parts], now) for parts, now in after.items() if now != before[parts])
            before.clear()

    event.listen(session, "before_commit", at_commit)
    try:
        yield
    finally:
        event.remove(session, "before_commit", at_commit)


@dataclass
class Undone:
    """What was undone, or would be."""

    jobs: list[str] = field(default_factory=list)
    """The keys of the jobs that are as they were before the action."""
    back: list[str] = field(default_factory=list)
    """Those that are so already, as the action was undone."""
    left: list[str] = field(default_factory=list)
    """Those that have run, or were changed, since, or that somebody has locked."""
    gone: list[str] = field(default_factory=list)
    """Those that do not exist any more."""
    refused: list[str] = field(default_factory=list)
    """Those that the database refuses to change, such as a job that has a duplicate by now."""


def look(session: Session, columns: JobColumns, changes: Changes) -> Undone:
    """Return what :func:`undo` would do now; what somebody has locked is not known before."""
    done = Undone()
    for some in _batches(changes.jobs):
        now = _read(session, columns, [each.key for each in some], locks=False)
        _sort(some, now, now, done)
    return done


def undo(session: Session, columns: JobColumns, changes: Changes) -> Undone:
    """Give jobs that are still as an action left them the values from before it, and commit each batch."""
    done = Undone()
    for some in _batches(changes.jobs):
        keys = [each.key for each in some]
        free = _read(session, columns, keys, locks=True)
        existing = free if len(free) == len(some) else _read(session, columns, keys, locks=False)
        unchanged = _sort(some, free, existing, done)
        refused = _give_back(session, columns, changes.roles, unchanged)
        session.commit()
        done.refused += refused
        done.jobs = [key for key in done.jobs if key not in {*refused}]
    return done


def _batches(jobs: Sequence[Changed]) -> Iterator[Sequence[Changed]]:
    for start in range(0, len(jobs), _BATCH):
        yield jobs[start : start + _BATCH]


def _sort(
    some: Sequence[Changed],
    free: Mapping[tuple[str, ...], Values],
    existing: Mapping[tuple[str, ...], Values],
    done: Undone,
) -> list[Changed]:
    unchanged = []
    for each in some:
        if free.get(each.parts) == each.after:
            done.jobs.append(each.key)
            unchanged.append(each)
        elif existing.get(each.parts) == each.before:
            done.back.append(each.key)
        else:
            (done.left if each.parts in existing else done.gone).append(each.key)
    return unchanged


def _give_back(session: Session, columns: JobColumns, roles: Sequence[str], jobs: Sequence[Changed]) -> list[str]:
    """Update locked rows, and return the keys of those that the database refuses to change."""
    spec = columns.spec
    try:
        with savepoint(session, spec.model):
            pages = pages_of(session, spec.mapper)
            for state in dict.fromkeys(str(each.before[0]) for each in jobs):
                update = _update(pages, spec, roles, state)
                parameters = [_parameters(pages, spec, roles, each) for each in jobs if each.before[0] == state]
                session.connection(bind_arguments={"mapper": spec.mapper}).execute(update, parameters)
    except DBAPIError as error:
        if not may_be_of_a_row(error):
            raise
        if len(jobs) == 1:
            warn_of_refusal(spec, jobs[0].parts, error)
            return [jobs[0].key]
        half = len(jobs) // 2
        return [key for part in (jobs[:half], jobs[half:]) for key in _give_back(session, columns, roles, part)]
    return []


def _update(pages: Pages, spec: QueueSpec, roles: Sequence[str], state: str) -> sa.Update:
    """Return the UPDATE of one row, whose values are parameters: there may be thousands."""
    is_mine: list[sa.ColumnElement[bool]] = []
    for number, key in enumerate(spec.keys):
        type_ = stored_type(key.type)
        is_mine.append(sa.type_coerce(key, type_) == pages.given_text(f"key_{number}", type_))
    columns = {role: spec.columns[role] for role in roles}
    values = {each: pages.given_text(f"before_{role}", stored_type(each.type)) for role, each in columns.items()}
    return sa.update(spec.table).where(*is_mine).values({spec.columns["status"]: spec.literal(state), **values})


def _parameters(pages: Pages, spec: QueueSpec, roles: Sequence[str], job: Changed) -> dict[str, Any]:
    given: dict[str, tuple[sa.Column[Any], str | None]] = {}
    given |= {f"key_{number}": (key, text) for number, (key, text) in enumerate(zip(spec.keys, job.parts, strict=True))}
    before = zip(roles, job.before[1:], strict=True)
    given |= {f"before_{role}": (spec.columns[role], text) for role, text in before}
    return {name: pages.given_value(text, stored_type(column.type)) for name, (column, text) in given.items()}
