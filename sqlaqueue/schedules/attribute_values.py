"""The attribute values of scheduled jobs as JSON, in which form they are stored."""

from __future__ import annotations

import enum
import json
from collections.abc import Callable, Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.orm import Mapper

from sqlaqueue.exc import ConfigurationError
from sqlaqueue.queue.spec import QueueSpec

_SETTABLE = ("priority", "max_attempts")
"""The roles that a schedule may give a value; the others are the queue's."""

_LARGEST_EXACT = 2.0**53
"""From here on not every integer has a floating-point number."""

_READERS: dict[type[Any], Callable[[Any], Any]] = {
    datetime: datetime.fromisoformat,
    date: date.fromisoformat,
    time: time.fromisoformat,
    timedelta: lambda seconds: timedelta(seconds=seconds),
    Decimal: Decimal,
    UUID: UUID,
}


def to_json(spec: QueueSpec, mapper: Mapper[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return attribute values as JSON.

    :raises ConfigurationError: for a value that is no attribute's, or that would not be the same when it is read.
    """
    name = mapper.class_.__name__
    written = {}
    for attribute, value in values.items():
        column = _column(spec, mapper, attribute)
        try:
            text = json.dumps(_written(value), allow_nan=False)
            written[attribute] = json.loads(text, parse_float=_stored_float)
            same = ... if "\\u0000" in text else _read(mapper, column, written[attribute])
            json.dumps(written[attribute], ensure_ascii=False).encode()
        except (TypeError, ValueError):
            same = ...
        if type(same) is not type(value) or same != value:
            msg = (
                f"values={{{attribute!r}: ...}}: {value!r} cannot be stored as JSON and read again for "
                f"{name}.{attribute}; set it in make=, a function that returns the {name} of a tick"
            )
            raise ConfigurationError(msg)
    return written


def from_json(spec: QueueSpec, mapper: Mapper[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attribute values that :func:`to_json` has written, or that were written by SQL.

    :raises ConfigurationError: for an attribute that does not exist or that a schedule cannot set, and for a value that
        is none of its column's type.
    """
    return {attribute: _read(mapper, _column(spec, mapper, attribute), value) for attribute, value in values.items()}


def missing_values(spec: QueueSpec, mapper: Mapper[Any], values: Mapping[str, Any]) -> list[str]:
    """Return the attributes that have neither a value nor a default, and cannot be NULL."""
    generated = set(spec.attributes.values())
    return [
        attribute
        for attribute, column in mapper.columns.items()
        if not getattr(column, "nullable", True)  # a column_property() has an expression
        and column.default is None
        and column.server_default is None
        and column is not mapper.polymorphic_on
        and not column.foreign_keys & _keys_of_inheritance(mapper)
        and not (column.primary_key and column.table.autoincrement_column is column)
        and attribute not in {*values, *generated}
    ]


def _keys_of_inheritance(mapper: Mapper[Any]) -> set[Any]:
    """Return the foreign keys that join the tables of a class, which the ORM sets."""
    tables = set(mapper.tables)
    return {
        key
        for table in tables
        if isinstance(table, sa.Table)
        for key in table.foreign_keys
        if key.column.table is not table and key.column.table in tables
    }


def _column(spec: QueueSpec, mapper: Mapper[Any], attribute: str) -> Any:
    name = mapper.class_.__name__
    column = mapper.columns.get(attribute)
    if column is None:
        known = ", ".join(each for each in mapper.columns.keys() if each not in spec.attributes.values())  # noqa: SIM118 - no dict
        msg = f"values={{{attribute!r}: ...}}: {name} has no column attribute {attribute!r}; it has {known}"
        raise ConfigurationError(msg)
    roles = [role for role, each in spec.attributes.items() if each == attribute and role not in _SETTABLE]
    if roles:
        msg = f"values={{{attribute!r}: ...}}: {name}.{attribute} belongs to the queue; a schedule cannot set it"
        raise ConfigurationError(msg)
    return column


def _written(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    return str(value) if isinstance(value, Decimal | UUID) else value


def _stored_float(text: str) -> float:
    """Return a number of JSON as it is after it was stored: JSONB keeps whole numbers as such.

    :raises ValueError: for a number that would come back as an integer of another value.
    """
    number = float(text)
    if abs(number) >= _LARGEST_EXACT:
        raise ValueError(text)
    return number


def _read(mapper: Mapper[Any], column: Any, value: Any) -> Any:
    if value is None:
        return None
    members = getattr(column.type, "enum_class", None)
    try:
        if members is not None:
            return members[value]
        reader = _READERS.get(column.type.python_type)
        return value if reader is None else reader(value)
    except NotImplementedError:
        return value
    except (ValueError, KeyError, TypeError, ArithmeticError):
        attribute = mapper.get_property_by_column(column).key
        msg = f"values={{{attribute!r}: {value!r}}}: this is no value of {mapper.class_.__name__}.{attribute}"
        raise ConfigurationError(msg) from None
