"""The filter of a list of jobs, as parsed from the parameters of a URL.

================================  ==================================================================
``state=failed``                  the state
``state=due``                     pending, and its time has come
``state=expired``                 processing, and its lease has expired
``error=ValueError``              the kind of the last error
``message=no stock``              the rest of its first line, with ``…`` for numbers, UUIDs and quoted texts
``job=5``                         the key, as :func:`sqlaqueue.queue.run.key_text` writes it
``f.customer_id=5``               a column equals a value
``f.total.min=10``                a number or a moment is not less; ``f.total.max=20``: not more
``f.created_at.last=1h``          a moment is within the last hour; units are ``min``, ``h`` and ``d``
``f.subject.starts=Re``           a text starts with another
``f.subject.contains=order``      a text contains another, in upper or lower case
``f.payload.json.a.b=5``          the value at a path in JSON is this text or number
``f.customer_id.null=yes``        a column is null; ``no``: it is not
================================  ==================================================================

A parameter with an empty value is no condition, as a form sends it for a field that was left empty.
"""

from __future__ import annotations

import csv
import re
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any, Literal, get_args

import sqlalchemy as sa

from sqlaqueue.admin.jobs import kind_of, message_of
from sqlaqueue.admin.state import has_leases
from sqlaqueue.sql.portable import clock, converted, earlier
from sqlaqueue.web.data.engines import contains, starts_with, text_at, typed_text, without_zone
from sqlaqueue.web.data.job_columns import JobColumn, JobColumns, Kind, choices_of, kind_of_type, states_of, stored_type
from sqlaqueue.web.data.reader import ParameterError

Only = Literal["due", "expired"]
"""Some of the jobs of a state: the pending ones that are due, or the processing ones whose lease has expired."""

OF_STATE: dict[Only, str] = {"due": "pending", "expired": "processing"}
"""Of which state they are."""

TOLD_BY: dict[Only, str] = {"due": "run_at", "expired": "lease_expires_at"}
"""The role that tells which they are."""

PREFIX = "f."

_OF_JOBS = ("state", "error", "message", "job")
"""The other parameters of a filter."""

OPERATORS: dict[Kind, tuple[str, ...]] = {
    "integer": ("", "min", "max", "null"),
    "number": ("", "min", "max", "null"),
    "moment": ("", "min", "max", "last", "null"),
    "naive_moment": ("", "min", "max", "last", "null"),
    "date": ("", "min", "max", "null"),
    "text": ("", "starts", "contains", "null"),
    "boolean": ("", "null"),
    "enum": ("", "null"),
    "uuid": ("", "null"),
    "bytes": ("null",),
    "other": ("null",),
    "state": (),
}
"""The conditions on a column, by its kind: the last part of the parameter's name, empty for equality."""

JSON = "json"
"""The operator of conditions on a value in JSON; the path follows."""

_DEEPEST = 10
"""The number of names in a path."""

_MOST = 50
"""The number of conditions. The page of a list has a link for each, with all others."""

_LONGEST = 1000
"""The number of characters that a value may have."""

_LONGEST_KEY = 8000
"""The number of characters of a key. An index has no longer values, unless they are compressed."""

_INTEGER = re.compile(r"[+-]?\d{1,19}", re.ASCII)
_NUMBER = re.compile(r"[+-]?(\d{1,100}(\.\d{0,100})?|\.\d{1,100})([eE][+-]?\d{1,3})?", re.ASCII)
_HEXADECIMAL = re.compile(r"\\x([0-9a-fA-F]{2})*", re.ASCII)
_NAME = re.compile(r"[\w-]{1,100}")
_SPAN = re.compile(r"(\d{1,5})(min|h|d)", re.ASCII)
_UNITS = {"min": timedelta(minutes=1), "h": timedelta(hours=1), "d": timedelta(days=1)}
_LONGEST_SPAN = timedelta(days=10_000)
YEARS = range(2, 9999)
"""Within these years a moment can be converted between time zones."""


@dataclass(frozen=True)
class Condition:
    column: JobColumn
    operator: str
    text: str
    """Its value, as in the URL."""
    path: tuple[str, ...] = ()
    """Where the value is, in JSON."""

    @property
    def parameter(self) -> str:
        return ".".join((parameter_of(self.column, self.operator), *self.path))

    @property
    def is_equality(self) -> bool:
        """Whether it gives the column one value, so that an index is in the order of the columns that follow it."""
        return self.operator == "" or (self.operator == "null" and self.text == "yes")

    @property
    def is_range(self) -> bool:
        """Whether it selects one part of an index that begins with the column."""
        return self.operator in {"min", "max", "last"} or (self.operator == "null" and self.text == "no")

    def on(self, expression: sa.ColumnElement[Any]) -> sa.ColumnElement[bool]:
        if self.operator == "null":
            return expression.is_(None) if self.text == "yes" else expression.is_not(None)
        if self.operator == "last":
            return self._within(expression)
        if self.operator == JSON:
            return text_at(expression, self.path) == sa.literal(self.text, sa.Text())
        value = typed(self.column, self.text, self.parameter)
        plain = sa.type_coerce(expression, value.type)
        if self.operator in {"starts", "contains"}:
            holds = starts_with if self.operator == "starts" else contains
            return holds(converted(plain, sa.Text()), value)
        if self.operator == "min":
            return plain >= value
        return plain <= value if self.operator == "max" else plain == value

    def _within(self, expression: sa.ColumnElement[Any]) -> sa.ColumnElement[bool]:
        since = earlier(clock(), span_of(self.text, self.parameter))
        if self.column.kind == "naive_moment":
            # As what is typed into the other fields: such a column has times in UTC.
            since = without_zone(since)
        return sa.type_coerce(expression, since.type) >= since


def is_json(column: JobColumn) -> bool:
    return isinstance(column.stored_type, sa.JSON)


def span_of(text: str, parameter: str) -> timedelta:
    """Return a span of time that is written as ``15min``, ``6h`` or ``7d``."""
    found = _SPAN.fullmatch(text)
    span = timedelta(0) if found is None else int(found[1]) * _UNITS[found[2]]
    if not timedelta(0) < span <= _LONGEST_SPAN:
        raise ParameterError(parameter, "use a number of minutes, hours or days, such as 15min, 1h or 7d")
    return span


@dataclass(frozen=True)
class JobsWanted:
    columns: JobColumns
    conditions: tuple[Condition, ...] = ()
    state: str | None = None
    error: str | None = None
    """The kind of the last error, see :func:`sqlaqueue.admin.jobs.kind_of`."""
    message: str | None = None
    """Its message, see :func:`sqlaqueue.admin.jobs.message_of`."""
    key: str | None = None
    only: Only | None = None
    """Which jobs of the state; None for all of them."""
    at: datetime | None = None
    """The moment at which they are due, or their lease has expired; None for now."""

    @property
    def is_empty(self) -> bool:
        return not (self.conditions or self.error or self.message or self.key)

    @property
    def listed(self) -> str | None:
        """The jobs whose list this is, as the parameter ``state`` names them."""
        return self.only or self.state

    def of(self, listed: str | None) -> JobsWanted:
        only: Only | None = next((each for each in get_args(Only) if each == listed), None)
        return replace(self, state=listed if only is None else OF_STATE[only], only=only)

    @property
    def moment(self) -> sa.ColumnElement[Any]:
        return clock() if self.at is None else sa.literal(self.at, sa.DateTime(timezone=True))

    def parameters(self, *, without: Iterable[str] = ()) -> list[tuple[str, str]]:
        named = [("state", self.listed), ("error", self.error), ("message", self.message), ("job", self.key)]
        pairs = [*named, *((each.parameter, each.text) for each in self.conditions)]
        left_out = set(without)
        return [(name, value) for name, value in pairs if value is not None and name not in left_out]

    def key_values(self) -> list[sa.ColumnElement[Any]]:
        if self.key is None:
            return []
        keys = self.columns.of_key
        _check_text("job", self.key, _LONGEST_KEY)
        try:
            parts = [self.key] if len(keys) == 1 else next(csv.reader([self.key], strict=True), [])
        except csv.Error:  # a line break, or text behind a quote
            parts = []
        if len(parts) != len(keys):
            names = ",".join(each.name for each in keys)
            raise ParameterError("job", f"the key has {len(keys)} parts; write it as {names}")
        return [typed_as(each.column, part, "job") for each, part in zip(keys, parts, strict=True)]

    def has_error(self, values: Mapping[str, sa.ColumnElement[Any]]) -> sa.ColumnElement[bool]:
        return kind_of(values[self.columns.by_role["last_error"].name]) == self.error

    def has_message(self, values: Mapping[str, sa.ColumnElement[Any]]) -> sa.ColumnElement[bool]:
        return message_of(values[self.columns.by_role["last_error"].name]) == self.message


def parse_filter(columns: JobColumns, parameters: Iterable[tuple[str, str]]) -> JobsWanted:
    """Return the filter in the parameters of a URL; names that are none of the filter are ignored."""
    given: dict[str, str] = {}
    for name, value in parameters:
        if name.startswith(PREFIX) or name in _OF_JOBS:
            if name in given:
                raise ParameterError(name[:100], "it is given twice")
            given[name] = value
    for name, value in given.items():
        _check_text(name[:100], value, _LONGEST_KEY if name == "job" else _LONGEST)
    values = {name: value for name, value in given.items() if value != ""}
    if len(values) > _MOST:
        raise ParameterError("conditions", f"use at most {_MOST}")
    wanted = JobsWanted(
        columns,
        tuple(_conditions(columns, {name for name in given if name.startswith(PREFIX)}, values)),
        error=values.get("error"),
        message=values.get("message"),
        key=values.get("job"),
    ).of(values.get("state"))
    if wanted.listed is not None and wanted.listed not in lists_of(columns):
        raise ParameterError("state", f"use one of {', '.join(lists_of(columns))}")
    error = columns.by_role.get("last_error")
    for name in ("error", "message"):
        if name in values and (error is None or error.is_redacted):
            raise ParameterError(name, "this queue does not show errors")
    wanted.key_values()
    return wanted


def lists_of(columns: JobColumns) -> list[str]:
    """Return the lists that a queue has: one for each state, and after it that of some of its jobs."""
    found: list[str] = []
    for state in states_of(columns.spec):
        found += [state, *(each for each in get_args(Only) if OF_STATE[each] == state and _can_tell(columns, each))]
    return found


def _can_tell(columns: JobColumns, only: Only) -> bool:
    told_by = columns.by_role.get(TOLD_BY[only])
    # What is listed would tell a redacted value.
    if told_by is None or told_by.is_redacted:
        return False
    return only == "due" or has_leases(columns.spec)


def filterable(columns: JobColumns) -> list[JobColumn]:
    return [each for each in columns.values() if OPERATORS[each.kind] and not each.is_redacted]


def parameter_of(column: JobColumn, operator: str) -> str:
    return f"{PREFIX}{column.name}.{operator}" if operator else f"{PREFIX}{column.name}"


def _conditions(columns: JobColumns, names: set[str], values: Mapping[str, str]) -> Iterable[Condition]:
    known = {
        parameter_of(column, operator): (column, operator)
        for column in filterable(columns)
        for operator in OPERATORS[column.kind]
    }
    paths = {name: found for name in sorted(names - known.keys()) if (found := _in_json(columns, name)) is not None}
    unknown = min(names - known.keys() - paths.keys(), default=None)
    if unknown is not None:
        raise ParameterError(unknown[:100], "there is no such condition")
    # In the order of the columns, so that one filter has one URL.
    for name, (column, operator) in known.items():
        if name not in values:
            continue
        text = values[name]
        if operator == "null" and text not in {"yes", "no"}:
            raise ParameterError(name, "use yes or no")
        if operator == "last":
            span_of(text, name)
        elif operator != "null":
            typed(column, text, name)
        yield Condition(column, operator, text)
    for name, (column, path) in paths.items():
        if name in values:
            yield Condition(column, JSON, values[name], path)


def _in_json(columns: JobColumns, name: str) -> tuple[JobColumn, tuple[str, ...]] | None:
    """Return the column and the path that a parameter means; None if it means none."""
    for column in filterable(columns):
        begin = f"{parameter_of(column, JSON)}."
        if is_json(column) and name.startswith(begin):
            path = tuple(name.removeprefix(begin).split("."))
            if len(path) > _DEEPEST or not all(map(_NAME.fullmatch, path)):
                problem = f"write up to {_DEEPEST} names of letters, digits, _ and -, with a dot between them"
                raise ParameterError(name[:100], problem)
            return column, path
    return None


def typed(column: JobColumn, text: str, parameter: str) -> sa.ColumnElement[Any]:
    """Return a text as a value of a column, to be compared with it; ``parameter`` is named in errors."""
    _check_text(parameter, text)
    return typed_as(column.column, text, parameter)


def typed_as(  # noqa: C901, PLR0911, PLR0912 - one for each kind
    column: sa.Column[Any], text: str, parameter: str
) -> sa.ColumnElement[Any]:
    stored = stored_type(column.type)
    match kind_of_type(stored):
        case "integer":
            return sa.literal(_integer(text, parameter), sa.BigInteger())
        case "number":
            # The text itself, as a float would not be exact. A number of another type is no value of a float column.
            number = str(_number(text, parameter))
            return typed_text(number, stored if isinstance(stored, sa.Float) else sa.Numeric())
        case "boolean":
            if text not in {"true", "false"}:
                raise ParameterError(parameter, "use true or false")
            return sa.literal(text == "true", sa.Boolean())
        case "enum":
            choices = choices_of(stored)
            if text not in choices:
                raise ParameterError(parameter, f"use one of {', '.join(choices)}"[:500])
            return typed_text(text, stored)
        case "uuid":
            return typed_text(str(_uuid(text, parameter)), sa.Uuid())
        case "moment":
            return sa.literal(_moment(text, parameter), sa.DateTime(timezone=True))
        case "naive_moment":
            return sa.literal(_moment(text, parameter).replace(tzinfo=None), sa.DateTime())
        case "date":
            return sa.literal(_date(text, parameter), sa.Date())
        case "text":
            return sa.literal(text, sa.Text())
        case "bytes":
            return sa.literal(_bytes(text, parameter), sa.LargeBinary())
        case _:
            # The database converts it, or refuses it.
            return typed_text(text, stored)


def _check_text(parameter: str, text: str, longest: int = _LONGEST) -> None:
    if len(text) > longest:
        raise ParameterError(parameter, f"use at most {longest} characters")
    if "\0" in text or any("\ud800" <= character <= "\udfff" for character in text):
        raise ParameterError(parameter, "it has a character that the database cannot store")


def _integer(text: str, parameter: str) -> int:
    number = int(text) if _INTEGER.fullmatch(text) else None
    if number is None or not -(2**63) <= number < 2**63:
        raise ParameterError(parameter, "use an integer of 64 bits")
    return number


def _number(text: str, parameter: str) -> Decimal:
    if not _NUMBER.fullmatch(text):
        raise ParameterError(parameter, "use a number, such as 12.50")
    return Decimal(text)


def _uuid(text: str, parameter: str) -> uuid.UUID:
    try:
        return uuid.UUID(text)
    except ValueError:
        raise ParameterError(parameter, "use a UUID") from None


def _bytes(text: str, parameter: str) -> bytes:
    if not _HEXADECIMAL.fullmatch(text):
        raise ParameterError(parameter, "use hexadecimal digits, such as \\x00ff")
    return bytes.fromhex(text[2:])


def _moment(text: str, parameter: str) -> datetime:
    try:
        # A plus sign in a URL is a space.
        moment = datetime.fromisoformat(re.sub(r" (\d\d:\d\d)$", r"+\1", text) if text.count(":") > 1 else text)
    except ValueError:
        moment = None
    if moment is None or moment.year not in YEARS:
        raise ParameterError(parameter, "use a date and a time, such as 2030-12-31T08:00; without a zone it is UTC")
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)


def _date(text: str, parameter: str) -> date:
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise ParameterError(parameter, "use a date, such as 2030-12-31") from None
