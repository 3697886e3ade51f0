"""The life of one job: its row, its attempts, and what holds it back."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Literal

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from sqlaqueue import admin
from sqlaqueue.admin.explain_job import twin_of
from sqlaqueue.flow_control.keys import flow_control
from sqlaqueue.postgresql.side_tables import key_json
from sqlaqueue.queue.names import ATTEMPT, CONTROL
from sqlaqueue.queue.options import FINISHED
from sqlaqueue.queue.run import Key, key_text
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.schedules.schedule import Tick, tick_of_key
from sqlaqueue.sql.errors import sqlstate
from sqlaqueue.web.data.job_columns import JobColumns
from sqlaqueue.web.data.job_filters import JobsWanted
from sqlaqueue.web.data.parts import Part, attempt_part
from sqlaqueue.web.data.stored_job import ShownValue, StoredJob, read_job

DELETED = "deleted"
"""The state of a job whose row is gone, and of which the attempt history tells."""

_FUNCTION = re.compile(
    r"\b(call )?(requeue|rescue|resume)\(\)(?: or `sqlaqueue resume`)?"
    r"(?=, makes it pending|\.$| ends that| makes it pending again| does not make it pending again)"
)
"""A function in an explanation, which has a button: only where explanations have it, not in the text of an error."""

_MOST_ATTEMPTS = 50
_NOT_READ: Part[Any] = Part()


@dataclass(frozen=True, kw_only=True)
class Lease:
    """The lease of a running job."""

    expires_at: datetime
    seconds: float
    """The seconds until it expires; negative if it has expired."""
    token: str | None

    @property
    def has_expired(self) -> bool:
        """Whether its worker has died or lost the database."""
        return self.seconds <= 0


@dataclass(frozen=True, kw_only=True)
class Uniqueness:
    """By what a job is unique."""

    values: Sequence[ShownValue]
    twin: str | None
    """The key of the job that counts in its place; None if there is none."""


@dataclass(frozen=True, kw_only=True)
class JobLife:
    """All that is known about one job."""

    key: str
    state: str
    """The name of its state; ``other`` for a status that the queue does not use, and :data:`DELETED`."""
    row: StoredJob | None
    most_attempts: int
    attempts: Part[list[admin.Attempt] | None]
    """Its ended attempts, newest first; None without an attempt history."""
    reasons: Part[Sequence[admin.Reason]] = _NOT_READ
    """What holds it back, or what else there is to say about its state."""
    tick: Part[Tick] = _NOT_READ
    cancellation: Part[datetime | None] = _NOT_READ
    """When its cancellation was requested."""
    uniqueness: Part[Uniqueness] = _NOT_READ

    @property
    def lease(self) -> Lease | None:
        """Its lease, while it runs."""
        row = self.row
        expires = None if row is None or self.state != "processing" else row.roles["lease_expires_at"]
        if row is None or expires is None:
            return None
        left = (expires - row.now).total_seconds()
        return Lease(expires_at=expires, seconds=left, token=row.roles["lease_token"])

    @property
    def is_lost(self) -> bool:
        """Whether its lease has expired, so that it is to be rescued."""
        is_lost = any(reason.code == "lease_expired" for reason in self.reasons.value or ())
        return is_lost and self.state == "processing"

    @property
    def trace(self) -> str | None:
        """The id of its trace."""
        header = None if self.row is None else self.row.roles["traceparent"]
        parts = (header or "").split("-")
        return parts[1] if len(parts) == len(("version", "trace", "span", "flags")) else None


def read_life(session: Session, columns: JobColumns, key: str) -> JobLife | None:
    """Return all that is known about the job of a key; None if neither the tables nor the attempt history have it.

    :param key: as :func:`sqlaqueue.queue.run.key_text` writes it.
    :raises ParameterError: if it cannot be a key of this queue.
    """
    spec = columns.spec
    row = read_job(session, columns, key)
    parts = row.key if row is not None else _parts(session, columns, key)
    attempts = attempt_part(session, _attempts, columns, parts)
    if row is None and not attempts.value:
        return None
    most = spec.config.max_attempts if row is None else row.roles["max_attempts"] or spec.config.max_attempts
    state = DELETED if row is None else row.state
    shown = key if row is None else key_text(row.key)
    life = JobLife(key=shown, state=state, row=row, most_attempts=most, attempts=attempts)
    tick = attempt_part(session, _tick, spec, parts)
    life = replace(life, tick=tick.value or Part(problem=tick.problem))
    if row is None:
        return life
    life = replace(life, reasons=attempt_part(session, _reasons, columns, row.key))
    if CONTROL in spec.side_tables and state not in FINISHED:
        life = replace(life, cancellation=attempt_part(session, _cancellation, spec, row.key))
    if spec.config.unique is not None:
        life = replace(life, uniqueness=attempt_part(session, _uniqueness, columns, row))
    return life


def _parts(session: Session, columns: JobColumns, key: str) -> Key:
    """Return the parts of a key without a row, as values of their columns."""
    values = JobsWanted(columns, key=key).key_values()
    return tuple(session.execute(sa.select(*values), bind_arguments={"mapper": columns.spec.mapper}).one())


def _attempts(session: Session, columns: JobColumns, key: Key) -> list[admin.Attempt] | None:
    spec = columns.spec
    if ATTEMPT not in spec.side_tables:
        return None
    found = admin.attempts(session, spec.model, key, limit=_MOST_ATTEMPTS)
    if _hides(columns, "last_error"):
        found = [replace(each, error=None, traceback=None) for each in found]
    return [replace(each, worker=None) for each in found] if _hides(columns, "claimed_by") else found


def _hides(columns: JobColumns, role: str) -> bool:
    column = columns.by_role.get(role)
    return column is not None and column.is_redacted


def _tick(session: Session, spec: QueueSpec, key: Key) -> Part[Tick]:
    """Return the tick of a job; an application without schedules has no table of ticks."""
    try:
        with session.begin_nested():
            return Part(tick_of_key(session, spec, key))
    except DBAPIError as error:
        if sqlstate(error) == "42P01":
            return Part()
        raise


def _reasons(session: Session, columns: JobColumns, key: Key) -> Sequence[admin.Reason]:
    spec = columns.spec
    found = admin.explain_job(session, spec.model, key)
    hidden = _redacted_reasons(columns)
    instead = "A redacted value is part of this explanation, so it is not shown."
    return [replace(each, text=instead if each.code in hidden else _with_buttons(each.text)) for each in found.reasons]


def _with_buttons(text: str) -> str:
    """Return an explanation with the buttons of the dashboard in place of functions for programs."""
    return _FUNCTION.sub(lambda found: ("use " if found[1] else "") + found[2].capitalize(), text)


def _redacted_reasons(columns: JobColumns) -> set[str]:
    """Return the codes of reasons whose texts may contain redacted values."""
    spec = columns.spec
    redacted = {each.column for each in columns.values() if each.is_redacted}
    flow = flow_control(spec)
    held_back = () if flow is None else {column for key in flow.keys for column in key.columns}
    kind = spec.mapper.polymorphic_on
    of_role = spec.columns.get
    of_reasons: dict[str, Any] = {
        "finished": [of_role("last_error"), of_role("finished_at"), of_role("attempts")],
        "twin": [of_role("last_error")],
        "running": [of_role("claimed_by"), of_role("lease_expires_at"), of_role("started_at")],
        "lease_expired": [of_role("claimed_by"), of_role("lease_expires_at")],
        "not_due": [of_role("run_at"), of_role("attempts")],
        "unknown_status": [spec.columns.get("status")],
        "unknown_class": [kind],
        **dict.fromkeys(("limit", "rate", "order"), held_back),
    }
    return {code for code, needed in of_reasons.items() if any(each in redacted for each in needed)}


def _cancellation(session: Session, spec: QueueSpec, key: Key) -> datetime | None:
    control = spec.side_tables[CONTROL]
    parts = [sa.cast(sa.literal(part, column.type), column.type) for part, column in zip(key, spec.keys, strict=True)]
    same = control.c.key == key_json(parts)
    requested = sa.select(control.c.created_at).where(control.c.queue == spec.name, same)
    found: datetime | None = session.scalar(requested, bind_arguments={"mapper": spec.mapper})
    return found


def _uniqueness(session: Session, columns: JobColumns, row: StoredJob) -> Uniqueness:
    spec = columns.spec
    unique = spec.config.unique
    names = () if unique is None else unique.attributes
    twin = twin_of(session, spec, row.key) if spec.has("status") and not row.is_dead_letter else None
    values = [row.values[name] for name in names if name in row.values]
    return Uniqueness(values=values, twin=None if twin is None else key_text(twin.key))


Kind = Literal["enqueued", "due", "attempt", "running", "asked", "finished"]


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that has happened to a job, or will happen."""

    kind: Kind
    at: datetime | None
    text: str
    attempt: admin.Attempt | None = None
    error: str | None = None
    is_future: bool = False


def events_of(life: JobLife) -> list[Event]:
    """Return the events of a job's life in the order of time, as far as the database knows them."""
    row = life.row
    found: list[Event] = []
    roles = {} if row is None else row.roles
    if roles.get("created_at") is not None:
        late = "" if life.tick.value is None else f" by the schedule {life.tick.value.schedule}"
        found.append(Event(kind="enqueued", at=roles["created_at"], text=f"Enqueued{late}"))
    found += [_of_attempt(each) for each in reversed(life.attempts.value or ())]
    if row is not None:
        found += _of_row(life, row)
    # An event without a time stays behind the one that is known to be before it. Nothing is before the job's beginning:
    # the job of a missed tick, for instance, is due since before it was enqueued. Nothing is after its end: an attempt
    # is written after the job, its beginning counted back from then, and a short one would seem to begin later.
    times: list[datetime] = []
    for event in found:
        at = event.at or (times[-1] if times else _EARLIEST)
        if times and event.kind in ("due", "finished"):
            at = max(at, times[0]) if event.kind == "due" else max(at, *times)
        times.append(at)
    order = sorted(range(len(found)), key=lambda number: (times[number], found[number].kind == "finished"))
    return [found[number] for number in order]


def _of_attempt(attempt: admin.Attempt) -> Event:
    text = f"Attempt {attempt.attempt} {_OUTCOMES[attempt.outcome]}"
    at = attempt.started_at or attempt.ended_at
    return Event(kind="attempt", at=at, text=text, attempt=attempt, error=attempt.error)


_EARLIEST = datetime.min.replace(tzinfo=UTC)

_OUTCOMES = {
    "completed": "completed the job",
    "retried": "failed, and the job was to be tried again",
    "failed": "failed for good",
    "cancelled": "was cancelled",
    "released": "was released, and does not count",
    "rescued": "ended with its lease: the worker died or lost the database",
}


def _of_row(life: JobLife, row: StoredJob) -> list[Event]:
    roles, found = row.roles, []
    run_at, started, finished = (roles[role] for role in ("run_at", "started_at", "finished_at"))
    by = f" by {roles['claimed_by']}" if roles["claimed_by"] else ""
    if life.state == "processing":
        number = f", attempt {roles['attempts']}" if roles["attempts"] else ""
        found.append(Event(kind="running", at=started, text=f"Processing{by}{number}"))
    elif life.attempts.value is None and (started is not None or roles["last_error"]):
        text = f"Last run{by}" + (f", attempt {roles['attempts']}" if roles["attempts"] else "")
        found.append(Event(kind="attempt", at=started, text=text, error=roles["last_error"]))
    if life.cancellation.value is not None:
        asked = life.cancellation.value
        found.append(Event(kind="asked", at=asked, text="Its cancellation was requested"))
    if life.state == "pending" and run_at is not None:
        is_future = run_at > row.now
        found.append(Event(kind="due", at=run_at, text="Due" if not is_future else "Will be due", is_future=is_future))
    if life.state in FINISHED:
        # Without an attempt that tells it, the error is here.
        error = None if any(event.error for event in found) or life.attempts.value else roles["last_error"]
        found.append(Event(kind="finished", at=finished, text=life.state.capitalize(), error=error))
    return found
