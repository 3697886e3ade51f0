"""The stored row of one job: in the queue's table, or in the table of dead letters, with values cut by the database."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue.postgresql.catalog_indexes import can_be_converted, shown_text, stored_size
from sqlaqueue.postgresql.due_times import row_version
from sqlaqueue.postgresql.side_tables import key_json
from sqlaqueue.queue.names import DEAD_LETTER
from sqlaqueue.queue.run import Key
from sqlaqueue.queue.spec import clock
from sqlaqueue.strategies.delete_row import letters
from sqlaqueue.web.data.job_columns import JobColumn, JobColumns, state_of
from sqlaqueue.web.data.job_filters import JobsWanted
from sqlaqueue.web.data.parameters import ParameterError

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
    """The value of one column."""

    column: JobColumn
    text: str | None
    """The value as the database writes it, at most :data:`LONGEST` characters; None for NULL and redacted ones, and for
    one that is too large to be converted."""
    size: int = 0
    """The size of the whole value; 0 if all of it is here."""
    is_in_bytes: bool = False
    """Whether the size is in bytes, not in characters: of a binary value, and of one that is too large to be read."""
    moment: datetime | None = None
    """The value of a moment with a time zone."""


@dataclass(frozen=True, kw_only=True)
class StoredJob:
    """One job, as it is stored."""

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
    """A stored job as expressions of a statement."""

    rows: sa.FromClause
    conditions: list[sa.ColumnElement[bool]]
    values: Mapping[str, sa.ColumnElement[Any]]
    instead: Mapping[str, sa.ColumnElement[Any]]
    """Roles whose values are not those of their columns."""
    state: sa.ColumnElement[str]
    version: sa.ColumnElement[str]


def read_job(session: Session, columns: JobColumns, key: str) -> StoredJob | None:
    """Return the job of a key; None if neither a row nor a dead letter has it.

    A key may be used again after a job with it has failed and its row was deleted: the row comes first.

    :param key: as :func:`sqlaqueue.queue.run.key_text` writes it.
    :raises ParameterError: if it cannot be a key of this queue.
    """
    found = _read(session, columns, _in_table(columns, key), is_dead_letter=False)
    if found is None and DEAD_LETTER in columns.spec.side_tables and not columns.spec.has("status"):
        return _read(session, columns, _in_dead_letters(columns, key), is_dead_letter=True)
    return found


def has_key(columns: JobColumns, key: str) -> sa.ColumnElement[bool]:
    """Return the condition that a row of the queue's table has a key.

    :raises ParameterError: if the text cannot be a key of this queue.
    """
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
    """Return the condition that a row of the queue's table has one of several keys.

    :raises ParameterError: if a text cannot be a key of this queue.
    """
    plain = [_plain_key(columns, key) for key in keys]
    values = [key for key in plain if key is not None]
    if len(values) == len(keys):
        # One parameter for all of them: to compile hundreds of conditions takes seconds.
        return columns.spec.key_in(columns.spec.keys, values)
    return sa.or_(sa.false(), *(has_key(columns, key) for key in keys))


def _plain_key(columns: JobColumns, key: str) -> Key | None:
    """Return a key as Python values; None if its types convert them, or cannot store them."""
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
    """Return the condition that a dead letter has a key.

    :raises ParameterError: if the text cannot be a key of this queue.
    """
    values = JobsWanted(columns, key=key).key_values()
    dead = columns.spec.side_tables[DEAD_LETTER]
    same: sa.ColumnElement[bool] = dead.c.key == key_json(values)
    return sa.and_(dead.c.queue == columns.spec.name, same)


def _in_table(columns: JobColumns, key: str) -> _Place:
    spec = columns.spec
    status = spec.columns.get("status")
    pending: sa.ColumnElement[Any] = sa.literal("pending", sa.Text())
    return _Place(
        spec.table,
        [has_key(columns, key)],
        {name: each.column for name, each in columns.items()},
        {},
        pending if status is None else state_of(spec, status),
        row_version(spec.table),
    )


def _in_dead_letters(columns: JobColumns, key: str) -> _Place:
    spec = columns.spec
    dead = spec.side_tables[DEAD_LETTER]
    version = row_version(dead).label("sqlaqueue_letter_version")
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
    spec = columns.spec
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
    row = session.execute(statement.where(*place.conditions), bind_arguments={"mapper": spec.mapper}).mappings().first()
    if row is None:
        return None
    shown = {name: _shown(each, number, row) for number, (name, each) in enumerate(columns.items())}
    return StoredJob(
        key=tuple(row[f"key_{number}"] for number in range(len(columns.of_key))),
        state=row["state"],
        is_dead_letter=is_dead_letter,
        version=row["version"],
        now=row["now"].astimezone(UTC),
        values=shown,
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
            moment = sa.cast(value, sa.DateTime(timezone=True))
            # Python has no infinity, and not all years; as a text the value is shown nevertheless.
            found[role] = sa.case((moment.between(_FIRST, _LAST), moment))
        elif role in _TEXTS:
            found[role] = sa.func.left(sa.cast(value, sa.Text()), LONGEST, type_=sa.Text())
        else:
            found[role] = sa.type_coerce(value, sa.Integer())
    return found


def _text(column: JobColumn, value: sa.ColumnElement[Any]) -> sa.ColumnElement[str]:
    if column.form == "large":
        text = sa.func.left(sa.cast(value, sa.Text()), LONGEST, type_=sa.Text())
        return sa.case((can_be_converted(value), text))
    return shown_text(value, column.form, LONGEST)


def _sizes(column: JobColumn, value: sa.ColumnElement[Any]) -> dict[str, sa.ColumnElement[int]]:
    """Return the size of a value in characters, NULL if it is too large to be read, and in bytes."""
    text = sa.cast(value, sa.Text())
    characters = sa.func.length(text, type_=sa.Integer())
    if column.form == "large":
        return {"size": sa.case((can_be_converted(value), characters)), "bytes": stored_size(value)}
    if column.form == "text":
        stored = sa.func.octet_length(text, type_=sa.Integer())
        return {"size": sa.case((stored <= _COUNTED, characters)), "bytes": stored}
    return {"bytes": sa.func.octet_length(value, type_=sa.Integer())} if column.form == "bytes" else {}


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
