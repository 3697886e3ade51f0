"""The shape of a queue: its columns and configuration, without the objects that they refer to."""

from __future__ import annotations

import datetime as dt
import decimal
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import registry
from sqlalchemy.types import TypeEngine

from sqlaqueue.exc import ConfigurationError
from sqlaqueue.mapping.mixin import QueueMixin, spec_of
from sqlaqueue.queue.config import ROLES, QueueConfig
from sqlaqueue.queue.options import States

_MAX_TEXT = 20
"""Maximum number of characters of the texts in a copy."""


@dataclass(frozen=True)
class Field:
    """A column of a model that is not a queue attribute.

    :param value: its value in all rows; None for a key, which is numbered.
    """

    name: str
    type: TypeEngine[Any]
    nullable: bool
    is_key: bool
    value: Any


@dataclass(frozen=True)
class Shape:
    """The columns and the configuration of a copy."""

    fields: tuple[Field, ...]
    config: QueueConfig

    def model(self, schema: str) -> type[Any]:
        """Return a mapped class of this shape, with its tables in ``schema``."""
        metadata = sa.MetaData(schema=schema)
        columns = [
            sa.Column(
                field.name, field.type, primary_key=field.is_key, nullable=field.nullable, autoincrement=is_serial
            )
            for field, is_serial in self._fields_with_serial()
        ]
        table = sa.Table("job", metadata, *columns)
        # The name of the channel depends on it: Consumers of the original must not be notified of these jobs.
        config = replace(self.config, name=f"{schema}.job")
        model = type("Job", (QueueMixin,), {"__queue__": config})
        registry(metadata=metadata).map_imperatively(model, table)
        return model

    def rows(self, number: int, first: int = 1) -> Iterator[dict[str, Any]]:
        """Yield the values of ``number`` rows.

        :param first: the number of the first row, for its key.
        """
        fixed = {field.name: field.value for field in self.fields if not field.is_key and field.value is not None}
        numbered = [field for field, is_serial in self._fields_with_serial() if field.is_key and not is_serial]
        for count in range(first, first + number):
            yield fixed | {field.name: _key(field, count) for field in numbered}

    def _fields_with_serial(self) -> Iterator[tuple[Field, bool]]:
        """Yield each field, and whether the database numbers it."""
        keys = [field for field in self.fields if field.is_key]
        for field in self.fields:
            yield field, field.is_key and len(keys) == 1 and _kind(field.type) is int


PLAIN = Shape(
    (
        Field("id", sa.BigInteger(), nullable=False, is_key=True, value=None),
        Field("payload", sa.String(), nullable=False, is_key=False, value="x" * _MAX_TEXT),
    ),
    QueueConfig(),
)
"""A table with a key and a text."""


def shape_of(model: type[Any]) -> Shape:
    """Return the shape of a queue class.

    It has the same queue attributes. The other columns keep their types, sizes and nullability, but not defaults,
    foreign keys, sequences and enums, which would refer to objects of the original.

    :raises NotAQueueError: if ``model`` is not a queue.
    :raises ConfigurationError: if a column cannot be copied; the error names it.
    """
    spec = spec_of(model)
    config = spec.config
    if not isinstance(config.strategy, str):
        msg = (
            f"{model.__name__}: its strategy {config.strategy!r} is an object, which may have tables of its own; the "
            "benchmark supports strategies that are given by name"
        )
        raise ConfigurationError(msg)
    roles = {column for column in spec.columns.values() if not column.primary_key}
    fields = tuple(
        _field(model, number, column) for number, column in enumerate(spec.table.columns, 1) if column not in roles
    )
    named = ROLES if config.adopt is not None else config.columns
    left_out: Mapping[str, str | None] = {role: None for role in ROLES if role not in spec.columns and role in named}
    return Shape(fields, replace(config, columns=left_out, adopt=None, states=States()))


def _field(model: type[Any], number: int, column: sa.Column[Any]) -> Field:
    kind = _plain(column.type)
    value = None if column.primary_key else _value(kind)
    if column.primary_key and _kind(kind) not in {int, str, uuid.UUID}:
        msg = f"{model.__name__}: cannot make values for the key {column.name} of type {column.type!r}"
        raise ConfigurationError(msg)
    if value is None and not column.nullable and not column.primary_key:
        msg = (
            f"{model.__name__}: the column {column.name} is not nullable, and the benchmark cannot make a value of "
            f"type {column.type!r}"
        )
        raise ConfigurationError(msg)
    # Not the original name, which may be that of a queue attribute.
    return Field(f"column_{number}", kind, bool(column.nullable), column.primary_key, value)


def _plain(kind: TypeEngine[Any]) -> TypeEngine[Any]:
    """Return a built-in type: enums and domains are objects of the database, and decorators run the user's code."""
    if isinstance(kind, sa.types.TypeDecorator):
        return _plain(kind.impl_instance)
    if isinstance(kind, sa.Enum):
        return sa.String(kind.length)
    if kind.__visit_name__ == "DOMAIN":
        domain: Any = kind
        return _plain(sa.types.to_instance(domain.data_type))
    if isinstance(kind, sa.ARRAY):
        return sa.ARRAY(_plain(kind.item_type), dimensions=kind.dimensions)
    return kind


def _kind(kind: TypeEngine[Any]) -> type[Any] | None:
    try:
        return kind.python_type
    except NotImplementedError:
        return None


_VALUES: dict[type[Any], Any] = {
    int: 1,
    bool: False,
    float: 0.5,
    bytes: b"x" * _MAX_TEXT,
    list: [],
    decimal.Decimal: decimal.Decimal(1),
    uuid.UUID: uuid.UUID(int=1),
    dt.datetime: dt.datetime(2000, 1, 1, tzinfo=dt.UTC),
    dt.date: dt.date(2000, 1, 1),
    dt.time: dt.time(12),
    dt.timedelta: dt.timedelta(hours=1),
}


def _value(kind: TypeEngine[Any]) -> Any:
    if isinstance(kind, sa.JSON):
        return {}  # its python_type differs between versions of SQLAlchemy
    python = _kind(kind)
    if python is str:
        return "x" * min(getattr(kind, "length", None) or _MAX_TEXT, _MAX_TEXT)
    if python is dt.datetime and not getattr(kind, "timezone", False):
        return dt.datetime(2000, 1, 1)  # noqa: DTZ001 - the column has no zone
    return None if python is None else _VALUES.get(python)


def _key(field: Field, count: int) -> Any:
    match _kind(field.type):
        case kind if kind is int:
            return count
        case kind if kind is uuid.UUID:
            return uuid.UUID(int=count)
        case _:
            return str(count)
