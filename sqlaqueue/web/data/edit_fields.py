"""The columns of a job that can be edited: their values as texts of a form and back, and the constraints on them."""

from __future__ import annotations

import math
import re
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal, InvalidOperation
from typing import Any, Literal, TypeVar, get_args

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Mapper

from sqlaqueue.consumer.core.errors import is_duplicate
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.sql.engine import violated_column, violated_constraint, violated_table
from sqlaqueue.sql.types import NEUTRAL
from sqlaqueue.web.data.job import ShownValue
from sqlaqueue.web.data.job_columns import JobColumn, JobColumns, indented, parse_exact

Element = sa.Constraint | sa.Index


def violation_of(error: DBAPIError, spec: QueueSpec) -> tuple[Sequence[sa.Column[Any]], str] | None:
    """Return the columns of a violated constraint, and what it says about their values; None if that is not known.

    The database's own text is not used: it repeats values, which may be redacted.
    """
    if violated_table(error) != spec.table.name:
        return None
    column = violated_column(error)
    if column is not None:
        return [each for each in spec.table.c if each.name == column], "A value is required."
    name = violated_constraint(error) or ""
    if is_duplicate(error, spec) and spec.config.unique is not None:
        names = spec.config.unique.attributes
        columns = [spec.mapper.columns[each] for each in names if each in spec.mapper.columns]
        return columns, "It would have a duplicate: another job has the same values of the unique columns."
    indexes = [index for index in spec.table.indexes if index.unique]
    elements: list[Element] = [*spec.table.constraints, *indexes]
    found = next((each for each in elements if name in _names(each, spec.table)), None)
    return None if found is None else (_columns(found, spec.table), _text(found, name))


def _columns(element: Element, table: sa.Table) -> list[sa.Column[Any]]:
    if isinstance(element, sa.CheckConstraint):
        words = {*re.findall(r"\w+", re.sub(r"'[^']*'", "", str(element.sqltext)))}
        return [*element.columns] or [column for column in table.c if column.name in words]
    if isinstance(element, sa.Index | sa.UniqueConstraint | sa.PrimaryKeyConstraint | sa.ForeignKeyConstraint):
        return [table.c[each.key] for each in element.columns if each.key in table.c]
    return []


def _names(element: Element, table: sa.Table) -> Iterable[str]:
    """Return the name of a constraint; for one without a name, those that the database may have given it."""
    if isinstance(element.name, str):
        return [str(element.name)]
    columns = [column.name for column in _columns(element, table)]
    joined = "_".join([table.name, *columns])
    if isinstance(element, sa.ForeignKeyConstraint):
        return [f"{joined}_fkey"]
    if isinstance(element, sa.UniqueConstraint):
        return [f"{joined}_key"]
    if isinstance(element, sa.CheckConstraint):
        return [f"{joined}_check"] if len(columns) == 1 else [f"{table.name}_check"]
    return [f"{table.name}_pkey"]


def _text(element: Element, name: str) -> str:
    if isinstance(element, sa.ForeignKeyConstraint):
        return f"No row of {element.referred_table.name} has this value ({name})."
    if isinstance(element, sa.CheckConstraint):
        return f"The check {name} does not allow this value."
    several = len(list(element.columns)) > 1 if isinstance(element, sa.Index | sa.UniqueConstraint) else False
    return f"Another row has {'these values together' if several else 'this value'} already ({name})."


FieldKind = Literal["text", "integer", "number", "boolean", "moment", "naive_moment", "date", "enum", "uuid", "json"]

EDITABLE_ROLES = ("priority", "run_at", "max_attempts")
"""The roles that an operator may change; the others tell what has happened."""

_PYTHON: dict[FieldKind, tuple[type[Any], ...]] = {
    "text": (str,),
    "integer": (int,),
    "number": (Decimal, float),
    "boolean": (bool,),
    "moment": (datetime,),
    "naive_moment": (datetime,),
    "date": (date,),
    "uuid": (uuid.UUID, str),
    "json": (dict, list, str, int, float, bool),
}
"""The types of the values of each kind."""

_HINTS: dict[FieldKind, str] = {
    "moment": "with its zone, such as 2030-12-31T08:00:00+01:00 or 2030-12-31T08:00Z",
    "naive_moment": "without a zone, such as 2030-12-31T08:00:00",
    "date": "such as 2030-12-31",
    "number": "such as 12.50",
    "uuid": "32 hexadecimal digits",
    "json": "JSON",
}

T = TypeVar("T")

_INTEGER = re.compile(r"[+-]?\d{1,30}", re.ASCII)


class WrongValue(ValueError):
    """A text that is no value of its field; the message says what to write."""


@dataclass(frozen=True, kw_only=True, eq=False)
class EditableField:
    column: JobColumn
    attribute: str
    kind: FieldKind
    is_nullable: bool

    @property
    def name(self) -> str:
        return self.column.name

    @property
    def hint(self) -> str:
        return _HINTS.get(self.kind, "")

    @property
    def is_long(self) -> bool:
        stored = self.column.stored_type
        return self.kind == "json" or (self.kind == "text" and getattr(stored, "length", None) is None)


def fields_of(columns: JobColumns, mapper: Mapper[Any]) -> list[EditableField]:
    fixed = {mapper.version_id_col, mapper.polymorphic_on}
    found: list[EditableField] = []
    for each in columns.values():
        column, kind = each.column, _kind(each)
        is_own = each.role is None or each.role in EDITABLE_ROLES
        if each.is_key or each.is_redacted or not is_own or kind is None or column in fixed:
            continue
        made_by_server = column.computed is not None or column.identity is not None or column.server_onupdate
        if made_by_server or not mapper.columns.contains_column(column):
            continue
        attribute = mapper.get_property_by_column(column).key
        found.append(EditableField(column=each, attribute=attribute, kind=kind, is_nullable=bool(column.nullable)))
    places = list(columns.spec.table.c)
    return sorted(found, key=lambda field: (field.column.role is not None, places.index(field.column.column)))


def _kind(column: JobColumn) -> FieldKind | None:
    if isinstance(column.stored_type, sa.JSON):
        return "json"
    kinds: dict[str, FieldKind] = {kind: kind for kind in get_args(FieldKind)}
    return kinds.get(column.kind)


def field_text(field: EditableField, value: ShownValue) -> str | None:
    """Return a stored value as the text of a form; None for NULL.

    :raises WrongValue: if it cannot be edited: it is too large, or its type converts it to another kind of value.
    """
    if value.size:
        raise WrongValue("It is too large to be edited here.")
    if value.text is None:
        return None
    text = value.text
    if field.kind == "json":
        text = indented(text)
    elif field.kind == "moment":
        if value.moment is None:
            raise WrongValue("It is no moment that can be edited here.")
        text = value.moment.isoformat()
    converted = field.column.column.type
    if not isinstance(converted, sa.types.TypeDecorator) or field.kind == "enum":
        return text
    shown = _converted(converted.process_result_value, _stored_value(field, text))
    if type(shown) not in _PYTHON[field.kind]:
        raise WrongValue("Its type makes another kind of value of it; change it in a program.")
    return shown if isinstance(shown, str) and field.kind == "text" else text


def field_value(field: EditableField, text: str | None) -> Any:
    type_ = field.column.column.type
    if text is None:
        if not field.is_nullable:
            raise WrongValue("It must have a value.")
        # As None an attribute of JSON would be the null of JSON.
        return sa.null() if field.kind == "json" else None
    value = _stored_value(field, text)
    if value is None:
        return sa.JSON.NULL  # the null of JSON
    if not isinstance(type_, sa.types.TypeDecorator) or field.kind == "enum":
        return value
    stored = _converted(type_.process_bind_param, value)
    if _converted(type_.process_result_value, stored) != value:
        raise WrongValue("Its type does not store this value as it is.")
    return value


def _converted(convert: Callable[[Any, Any], Any], value: Any) -> Any:
    try:
        return convert(value, NEUTRAL)
    except NotImplementedError:
        return value  # the type converts in one direction only
    except Exception as error:
        raise WrongValue(f"Its type refuses it: {error}") from error


def _stored_value(field: EditableField, text: str) -> Any:
    stored = field.column.stored_type
    if field.kind == "text":
        length = getattr(stored, "length", None)
        if length is not None and len(text) > length:
            raise WrongValue(f"Use at most {length} characters.")
        return text
    if field.kind == "json":
        try:
            return parse_exact(text)
        except (ValueError, RecursionError) as error:
            raise WrongValue(f"This is no JSON that can be stored: {error}.") from None
    return _READERS[field.kind](stored, text.strip())


def _integer(type_: Any, text: str) -> int:
    bits = 16 if isinstance(type_, sa.SmallInteger) else 64 if isinstance(type_, sa.BigInteger) else 32
    number = int(text) if _INTEGER.fullmatch(text) else None
    if number is None or not -(2 ** (bits - 1)) <= number < 2 ** (bits - 1):
        raise WrongValue(f"Write an integer from {-(2 ** (bits - 1))} to {2 ** (bits - 1) - 1}.")
    return number


_MOST_DIGITS = 1000
"""More digits than a form needs."""


def _number(type_: Any, text: str) -> Decimal | float:
    try:
        number = Decimal(text)
    except InvalidOperation:
        number = Decimal("NaN")
    # A large exponent stands for as many digits.
    is_long = len(text) > _MOST_DIGITS or (number.is_finite() and abs(number.adjusted()) > _MOST_DIGITS)
    if not number.is_finite() or "_" in text or is_long:
        raise WrongValue("Write a number, such as 12.50.")
    if isinstance(type_, sa.Float) or not type_.asdecimal:
        return _float(number)
    decimals = -int(number.normalize().as_tuple().exponent)
    if type_.precision is not None:
        scale = type_.scale or 0
        if decimals > scale:
            raise WrongValue(f"Use at most {scale} decimals.")
        if number and number.adjusted() >= type_.precision - scale:
            raise WrongValue(f"Use at most {type_.precision - scale} digits before the point.")
    return number


def _float(number: Decimal) -> float:
    value = float(number)
    if math.isinf(value):
        raise WrongValue("This number is too large for the column.")
    return value


def _boolean(_: Any, text: str) -> bool:
    if text not in {"true", "false"}:
        raise WrongValue("Choose true or false.")
    return text == "true"


def _moment(_: Any, text: str) -> datetime:
    moment = _parsed(datetime.fromisoformat, text, "Write a date and a time with its zone, such as 2030-12-31T08:00Z.")
    if moment.tzinfo is None:
        raise WrongValue("Add the zone, such as Z for UTC or +01:00.")
    try:
        return moment.astimezone(UTC)
    except OverflowError:
        raise WrongValue("This year is too far away.") from None


def _naive_moment(_: Any, text: str) -> datetime:
    moment = _parsed(datetime.fromisoformat, text, "Write a date and a time, such as 2030-12-31T08:00.")
    if moment.tzinfo is not None:
        raise WrongValue("Leave out the zone: the column stores no zone.")
    return moment


def _date(_: Any, text: str) -> date:
    return _parsed(date.fromisoformat, text, "Write a date, such as 2030-12-31.")


def _uuid(type_: Any, text: str) -> uuid.UUID | str:
    value = _parsed(uuid.UUID, text, "Write a UUID.")
    return value if getattr(type_, "as_uuid", True) else str(value)


def _enum(type_: Any, text: str) -> Any:
    if text not in type_.enums:
        raise WrongValue("Choose one of the values.")
    convert = type_.dialect_impl(NEUTRAL).result_processor(NEUTRAL, None)
    return text if convert is None else convert(text)


def _parsed(parse: Callable[[str], T], text: str, otherwise: str) -> T:
    try:
        return parse(text)
    except ValueError:
        raise WrongValue(otherwise) from None


_READERS: dict[FieldKind, Callable[[Any, str], Any]] = {
    "integer": _integer,
    "number": _number,
    "boolean": _boolean,
    "moment": _moment,
    "naive_moment": _naive_moment,
    "date": _date,
    "uuid": _uuid,
    "enum": _enum,
}
