"""One job: its stored row with values cut by the database, its attempts, and what holds it back."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Literal

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from sqlaqueue.admin.explain_job import duplicate_of, explain_job
from sqlaqueue.admin.job_reasons import Reason
from sqlaqueue.admin.jobs import Attempt
from sqlaqueue.admin.jobs import attempts as read_attempts
from sqlaqueue.flow_control.keys import flow_control
from sqlaqueue.postgresql.side_tables import key_json
from sqlaqueue.queue.names import ATTEMPT, CONTROL, DEAD_LETTER
from sqlaqueue.queue.options import FINISHED
from sqlaqueue.queue.run import Key, key_text
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.schedules.schedule import Tick, tick_of_key
from sqlaqueue.sql.engine import sqlstate
from sqlaqueue.sql.portable import clock, converted
from sqlaqueue.strategies.delete_row import letters
from sqlaqueue.texts import split_error
from sqlaqueue.web.data.engines import (
    beginning,
    can_be_converted,
    characters,
    octets,
    row_version,
    shown_text,
    stored_size,
    text_of,
)
from sqlaqueue.web.data.job_columns import JobColumn, JobColumns, state_of
from sqlaqueue.web.data.job_filters import JobsWanted
from sqlaqueue.web.data.reader import ParameterError, Part, attempt_part

LONGEST = 100_000
"""The number of characters of a value that are read; the database leaves out the rest."""

_COUNTED = 16 * 1024 * 1024
"""The bytes of a text up to which its characters are counted: for that the database reads all of it."""

_FIRST, _LAST = (sa.literal(datetime(year, 6, 1, tzinfo=UTC), sa.DateTime(timezone=True)) for year in (1, 9999))
"""Within these times a moment is one of Python."""

_MOMENTS = ("created_at", "run_at", "started_at", "finished_at", "lease_expires_at")
_NUMBERS = ("attempts", "max_attempts")
_TEXTS = ("claimed_by", "last_error", "lease_token", "traceparent")


@dataclass(frozen=True, kw_only=True)
class ShownValue:
    column: JobColumn
    text: str | None
    """The value as the database writes it, at most :data:`LONGEST` characters; None for NULL and redacted ones, and for
    one that is too large to be converted."""
    size: int = 0
    """The size of the whole value; 0 if all of it is here."""
    is_in_bytes: bool = False
    """Whether the size is in bytes, not in characters: of a binary value, and of one that is too large to be read."""
    moment: datetime | None = None


@dataclass(frozen=True, kw_only=True)
class StoredJob:
    key: Key
    state: str
    is_dead_letter: bool
    version: str
    """Changes whenever the row is written."""
    now: datetime
    """The time of the database."""
    values: Mapping[str, ShownValue]
    """By the names of the columns, those of the key first."""
    roles: Mapping[str, Any]
    """The values of the roles that tell a job's life; redacted ones, and those that the queue leaves out, are None."""


@dataclass(frozen=True)
class _Place:
    rows: sa.FromClause
    conditions: list[sa.ColumnElement[bool]]
    values: Mapping[str, sa.ColumnElement[Any]]
    instead: Mapping[str, sa.ColumnElement[Any]]
    """Roles whose values are not those of their columns."""
    state: sa.ColumnElement[str]
    version: sa.ColumnElement[str]


def read_job(session: Session, columns: JobColumns, key: str) -> StoredJob | None:
    """Return the job of a key; a row comes first, as the key of a dead letter may be used again."""
    found = _read(session, columns, _in_table(columns, key), is_dead_letter=False)
    if found is None and DEAD_LETTER in columns.spec.side_tables and not columns.spec.has("status"):
        return _read(session, columns, _in_dead_letters(columns, key), is_dead_letter=True)
    return found


def has_key(columns: JobColumns, key: str) -> sa.ColumnElement[bool]:
    values = JobsWanted(columns, key=key).key_values()
    pairs = zip(columns.of_key, values, strict=True)
    return sa.and_(*(sa.type_coerce(each.column, value.type) == value for each, value in pairs))


def is_key(columns: JobColumns, key: str) -> bool:
    """Return whether a key that a list shows is one that programs have: Python has no infinity, and not all years."""
    try:
        JobsWanted(columns, key=key).key_values()
    except ParameterError:
        return False
    return True


def has_one_of(columns: JobColumns, keys: Sequence[str]) -> sa.ColumnElement[bool]:
    plain = [_plain_key(columns, key) for key in keys]
    values = [key for key in plain if key is not None]
    if len(values) == len(keys):
        # One parameter for all of them: to compile hundreds of conditions takes seconds.
        return columns.spec.key_in(columns.spec.keys, values)
    return sa.or_(sa.false(), *(has_key(columns, key) for key in keys))


def _plain_key(columns: JobColumns, key: str) -> Key | None:
    parts: list[Any] = []
    for each, value in zip(columns.of_key, JobsWanted(columns, key=key).key_values(), strict=True):
        part = value.value if isinstance(value, sa.BindParameter) else None
        is_text = each.kind == "text" and isinstance(each.column.type, sa.String)
        if not (is_text or (each.kind == "integer" and _fits(each.column.type, part))):
            return None
        parts.append(part)
    return tuple(parts)


def _fits(type_: Any, number: Any) -> bool:
    if isinstance(type_, sa.BigInteger):
        return True
    bits = 15 if isinstance(type_, sa.SmallInteger) else 31
    return isinstance(type_, sa.Integer) and -(2**bits) <= number < 2**bits


def letter_of(columns: JobColumns, key: str) -> sa.ColumnElement[bool]:
    dead = columns.spec.side_tables[DEAD_LETTER]
    key_values = JobsWanted(columns, key=key).key_values()
    return sa.and_(dead.c.queue == columns.spec.name, dead.c.key == key_json(key_values))


def _in_table(columns: JobColumns, key: str) -> _Place:
    spec, status = columns.spec, columns.spec.columns.get("status")
    state = sa.literal("pending", sa.Text()) if status is None else state_of(spec, status)
    values = {name: each.column for name, each in columns.items()}
    # Who knows all other values could guess a redacted one from a hash of it.
    seen = [each.column for each in columns.values() if not each.is_redacted]
    return _Place(spec.table, [has_key(columns, key)], values, {}, state, row_version(spec.table, seen))


def _in_dead_letters(columns: JobColumns, key: str) -> _Place:
    spec = columns.spec
    dead = spec.side_tables[DEAD_LETTER]
    # It is never updated. A hash of its row and its error would let redacted values be guessed.
    version = row_version(dead, [dead.c.key, dead.c.created_at]).label("sqlaqueue_letter_version")
    found = letters(spec, sa.select(spec.model), "show").where(letter_of(columns, key)).add_columns(version)
    letter = found.subquery("sqlaqueue_stored")
    values = {
        name: sa.cast(sa.null(), each.stored_type) if each.column.computed is not None else letter.c[each.column.key]
        for name, each in columns.items()
    }
    instead = {"last_error": letter.c.sqlaqueue_letter_error, "finished_at": letter.c.sqlaqueue_letter_time}
    values |= {columns.by_role[role].name: value for role, value in instead.items() if role in columns.by_role}
    return _Place(letter, [], values, instead, letter.c.sqlaqueue_letter_state, letter.c.sqlaqueue_letter_version)


def _read(session: Session, columns: JobColumns, place: _Place, *, is_dead_letter: bool) -> StoredJob | None:
    selected: dict[str, sa.ColumnElement[Any]] = {
        "state": place.state,
        "version": place.version,
        "now": clock(),
        **{f"key_{number}": place.values[each.name] for number, each in enumerate(columns.of_key)},
        **{f"role_{role}": value for role, value in _roles(columns, place).items()},
    }
    for number, (name, each) in enumerate(columns.items()):
        if not each.is_redacted:
            selected[f"text_{number}"] = _text(each, place.values[name])
            selected |= {f"{unit}_{number}": size for unit, size in _sizes(each, place.values[name]).items()}
    statement = sa.select(*(value.label(name) for name, value in selected.items())).select_from(place.rows)
    bind = {"mapper": columns.spec.mapper}
    row = session.execute(statement.where(*place.conditions), bind_arguments=bind).mappings().first()
    if row is None:
        return None
    return StoredJob(
        key=tuple(row[f"key_{number}"] for number in range(len(columns.of_key))),
        state=row["state"],
        is_dead_letter=is_dead_letter,
        version=row["version"],
        now=row["now"].astimezone(UTC),
        values={name: _shown(each, number, row) for number, (name, each) in enumerate(columns.items())},
        roles={role: _in_utc(row.get(f"role_{role}")) for role in (*_MOMENTS, *_NUMBERS, *_TEXTS)},
    )


def _roles(columns: JobColumns, place: _Place) -> dict[str, sa.ColumnElement[Any]]:
    found: dict[str, sa.ColumnElement[Any]] = {}
    for role in (*_MOMENTS, *_NUMBERS, *_TEXTS):
        column = columns.by_role.get(role)
        if column is not None and column.is_redacted:
            continue
        value = place.instead.get(role, None if column is None else place.values[column.name])
        if value is None:
            continue
        if role in _MOMENTS:
            # The column may have no time zone; the server then takes it as claims do.
            moment = converted(value, sa.DateTime(timezone=True))
            # Python has no infinity, and not all years; as a text the value is shown nevertheless.
            found[role] = sa.case((moment.between(_FIRST, _LAST), moment))
        elif role in _TEXTS:
            found[role] = beginning(text_of(value), LONGEST)
        else:
            found[role] = sa.type_coerce(value, sa.Integer())
    return found


def _text(column: JobColumn, value: sa.ColumnElement[Any]) -> sa.ColumnElement[str]:
    if column.form == "large":
        text = beginning(text_of(value), LONGEST)
        return sa.case((can_be_converted(value), text))
    return shown_text(value, column.form, LONGEST)


def _sizes(column: JobColumn, value: sa.ColumnElement[Any]) -> dict[str, sa.ColumnElement[int]]:
    """Return the size of a value in characters, NULL if it is too large to be read, and in bytes."""
    text = text_of(value)
    number = characters(text)
    if column.form == "large":
        return {"size": sa.case((can_be_converted(value), number)), "bytes": stored_size(value)}
    if column.form == "text":
        stored = octets(text)
        return {"size": sa.case((stored <= _COUNTED, number)), "bytes": stored}
    return {"bytes": octets(value)} if column.form == "bytes" else {}


def _shown(column: JobColumn, number: int, row: Mapping[Any, Any]) -> ShownValue:
    text, size, stored = (row.get(f"{name}_{number}") for name in ("text", "size", "bytes"))
    is_in_bytes = size is None and stored is not None
    most = LONGEST if not is_in_bytes else LONGEST // 2 - 1 if column.form == "bytes" else 0
    size = (stored if is_in_bytes else size) or 0
    is_cut = size > most
    moment = None
    if column.kind == "moment" and text is not None:
        try:
            moment = datetime.fromisoformat(text).astimezone(UTC)
        except (ValueError, OverflowError):
            moment = None  # infinity, or a year that Python does not know
    return ShownValue(
        column=column, text=text, size=size if is_cut else 0, is_in_bytes=is_cut and is_in_bytes, moment=moment
    )


def _in_utc(value: Any) -> Any:
    return value.astimezone(UTC) if isinstance(value, datetime) else value


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
    expires_at: datetime
    seconds: float
    """The seconds until it expires; negative if it has expired."""
    token: str | None

    @property
    def has_expired(self) -> bool:
        return self.seconds <= 0


@dataclass(frozen=True, kw_only=True)
class Uniqueness:
    values: Sequence[ShownValue]
    duplicate: str | None
    """The key of the job that counts in its place; None without an error."""


@dataclass(frozen=True, kw_only=True)
class JobLife:
    key: str
    state: str
    """The name of its state; ``other`` for a status that the queue does not use, and :data:`DELETED`."""
    row: StoredJob | None
    most_attempts: int
    attempts: Part[list[Attempt] | None]
    """Its ended attempts, newest first; None without an attempt history."""
    reasons: Part[Sequence[Reason]] = _NOT_READ
    """What holds it back, or what else there is to say about its state."""
    tick: Part[Tick] = _NOT_READ
    cancellation: Part[datetime | None] = _NOT_READ
    uniqueness: Part[Uniqueness] = _NOT_READ

    @property
    def lease(self) -> Lease | None:
        row = self.row
        expires = None if row is None or self.state != "processing" else row.roles["lease_expires_at"]
        if row is None or expires is None:
            return None
        left = (expires - row.now).total_seconds()
        return Lease(expires_at=expires, seconds=left, token=row.roles["lease_token"])

    @property
    def due_since(self) -> datetime | None:
        """Since when a pending job has been due; None if its time has not come."""
        since = None if self.row is None or self.state != "pending" else self.row.roles["run_at"]
        return since if self.row is not None and since is not None and since <= self.row.now else None

    @property
    def error(self) -> tuple[str, str | None]:
        """The last error and its traceback; of a job whose row was deleted, those of its last attempt."""
        if self.row is not None:
            return split_error(self.row.roles["last_error"])
        last = next((each for each in self.attempts.value or () if each.error), None)
        return ("", None) if last is None or last.error is None else (last.error, last.traceback)

    @property
    def is_lost(self) -> bool:
        is_lost = any(reason.code == "lease_expired" for reason in self.reasons.value or ())
        return is_lost and self.state == "processing"

    @property
    def trace(self) -> str | None:
        header = None if self.row is None else self.row.roles["traceparent"]
        parts = (header or "").split("-")
        return parts[1] if len(parts) == len(("version", "trace", "span", "flags")) else None


def read_life(session: Session, columns: JobColumns, key: str) -> JobLife | None:
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
    life = replace(life, reasons=attempt_part(session, _reasons, columns, row))
    if CONTROL in spec.side_tables and state not in FINISHED:
        life = replace(life, cancellation=attempt_part(session, _cancellation, spec, row.key))
    if spec.config.unique is not None:
        life = replace(life, uniqueness=attempt_part(session, _uniqueness, columns, row))
    return life


def _parts(session: Session, columns: JobColumns, key: str) -> Key:
    values = JobsWanted(columns, key=key).key_values()
    return tuple(session.execute(sa.select(*values), bind_arguments={"mapper": columns.spec.mapper}).one())


def _attempts(session: Session, columns: JobColumns, key: Key) -> list[Attempt] | None:
    spec = columns.spec
    if ATTEMPT not in spec.side_tables:
        return None
    found = read_attempts(session, spec.model, key, limit=_MOST_ATTEMPTS)
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


def _reasons(session: Session, columns: JobColumns, row: StoredJob) -> Sequence[Reason]:
    spec = columns.spec
    # What a waiting job waits for may be in a queue that the user does not see.
    found = explain_job(session, spec.model, row.key, reads_chain=False)
    # The page shows the error by itself.
    said = f" with the last error {(row.roles['last_error'] or chr(10)).splitlines()[0]!r};"
    hidden = _redacted_reasons(columns)
    instead = "A redacted value is part of this explanation, so it is not shown."

    def with_buttons(text: str) -> str:
        """Return an explanation with the buttons of the dashboard in place of functions for programs."""
        text = text.replace(said, ";", 1)
        return _FUNCTION.sub(lambda function: ("use " if function[1] else "") + function[2].capitalize(), text)

    return [replace(each, text=instead if each.code in hidden else with_buttons(each.text)) for each in found.reasons]


def _redacted_reasons(columns: JobColumns) -> set[str]:
    spec, of_role = columns.spec, columns.spec.columns.get
    redacted = {each.column for each in columns.values() if each.is_redacted}
    flow = flow_control(spec)
    held_back = () if flow is None else {column for key in flow.keys for column in key.columns}
    of_reasons: dict[str, Any] = {
        "finished": [of_role("last_error"), of_role("finished_at"), of_role("attempts")],
        "duplicate": [of_role("last_error")],
        # Heartbeats have the texts of errors.
        "unclaimable": [of_role("last_error")],
        "claims_fail": [of_role("last_error")],
        "running": [of_role("claimed_by"), of_role("lease_expires_at"), of_role("started_at")],
        "lease_expired": [of_role("claimed_by"), of_role("lease_expires_at")],
        "not_due": [of_role("run_at"), of_role("attempts")],
        "unknown_status": [of_role("status")],
        "waits_for": [of_role("waits_for_count")],
        "unknown_class": [spec.mapper.polymorphic_on],
        **dict.fromkeys(("limit", "rate", "order"), held_back),
    }
    return {code for code, needed in of_reasons.items() if any(each in redacted for each in needed)}


def _cancellation(session: Session, spec: QueueSpec, key: Key) -> datetime | None:
    control = spec.side_tables[CONTROL]
    parts = [converted(sa.literal(part, column.type), column.type) for part, column in zip(key, spec.keys, strict=True)]
    same = control.c.key == key_json(parts)
    requested = sa.select(control.c.created_at).where(control.c.queue == spec.name, same)
    found: datetime | None = session.scalar(requested, bind_arguments={"mapper": spec.mapper})
    return found


def _uniqueness(session: Session, columns: JobColumns, row: StoredJob) -> Uniqueness:
    spec = columns.spec
    unique = spec.config.unique
    names = () if unique is None else unique.attributes
    duplicate = duplicate_of(session, spec, row.key) if spec.has("status") and not row.is_dead_letter else None
    values = [row.values[name] for name in names if name in row.values]
    return Uniqueness(values=values, duplicate=None if duplicate is None else key_text(duplicate.key))


Kind = Literal["enqueued", "due", "attempt", "running", "asked", "finished"]


@dataclass(frozen=True, kw_only=True)
class Event:
    kind: Kind
    at: datetime | None
    text: str
    attempt: Attempt | None = None
    error: str | None = None
    traceback: str | None = None
    is_future: bool = False


def events_of(life: JobLife) -> list[Event]:
    """Return the events of a job's life in the order of time, as far as the database knows them."""
    row = life.row
    found: list[Event] = []
    roles = {} if row is None else row.roles
    if roles.get("created_at") is not None:
        late = "" if life.tick.value is None else f" by the schedule {life.tick.value.schedule}"
        found.append(Event(kind="enqueued", at=roles["created_at"], text=f"Enqueued{late}"))
    for each in reversed(life.attempts.value or ()):
        text, at = f"Attempt {each.attempt} {_OUTCOMES[each.outcome]}", each.started_at or each.ended_at
        found.append(Event(kind="attempt", at=at, text=text, attempt=each, error=each.error))
    if row is not None:
        found += _of_row(life, row)
    # An event without a time stays behind the one that is known to be before it. Nothing is before the job's beginning:
    # the job of a missed tick, for instance, is due since before it was enqueued. Nothing is after its end: an attempt
    # is written after the job, its beginning counted back from then, and a short one would seem to begin later.
    times: list[datetime] = []
    for event in found:
        at = event.at or (times[-1] if times else datetime.min.replace(tzinfo=UTC))
        if times and event.kind in ("due", "finished"):
            at = max(at, times[0]) if event.kind == "due" else max(at, *times)
        times.append(at)
    order = sorted(range(len(found)), key=lambda number: (times[number], found[number].kind == "finished"))
    return [found[number] for number in order]


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
    said, traceback = split_error(roles["last_error"])
    run_at, started, finished = (roles[role] for role in ("run_at", "started_at", "finished_at"))
    by = f" by {roles['claimed_by']}" if roles["claimed_by"] else ""
    if life.state == "processing":
        number = f", attempt {roles['attempts']}" if roles["attempts"] else ""
        found.append(Event(kind="running", at=started, text=f"Processing{by}{number}"))
    elif life.attempts.value is None and (started is not None or roles["last_error"]):
        text = f"Last run{by}" + (f", attempt {roles['attempts']}" if roles["attempts"] else "")
        found.append(Event(kind="attempt", at=started, text=text, error=said or None, traceback=traceback))
    if life.cancellation.value is not None:
        asked = life.cancellation.value
        found.append(Event(kind="asked", at=asked, text="Its cancellation was requested"))
    if life.state == "pending" and run_at is not None:
        is_future = run_at > row.now
        found.append(Event(kind="due", at=run_at, text="Due" if not is_future else "Will be due", is_future=is_future))
    if life.state in FINISHED:
        # Without an attempt that tells it, the error is here.
        told = bool(any(event.error for event in found) or life.attempts.value)
        error, traceback = (None, None) if told else (said or None, traceback)
        text = life.state.capitalize()
        found.append(Event(kind="finished", at=finished, text=text, error=error, traceback=traceback))
    return found
