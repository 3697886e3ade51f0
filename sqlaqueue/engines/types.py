"""Types that other engines share: moments as texts, spans in seconds, arrays as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import sqlalchemy as sa


def moment_text(moment: datetime) -> str:
    """Return a moment in UTC, as a text of one length, so that texts sort as moments do."""
    if moment.tzinfo is not None:
        moment = moment.astimezone(UTC)
    return moment.replace(tzinfo=None).isoformat(" ", "microseconds")


def undecorated(type_: Any) -> Any:
    """Return the type that a TypeDecorator, or several, stand for; an Interval is returned as it is."""
    while isinstance(type_, sa.types.TypeDecorator) and not isinstance(type_, sa.Interval):
        type_ = type_.impl_instance
    return type_


class Span(sa.types.UserDefinedType[timedelta]):
    """A span of time, in seconds. The result may also be a moment after 1970, of a column of the program."""

    cache_ok = True

    def get_col_spec(self, **_: Any) -> str:  # noqa: D102 - the base class says it
        return "DOUBLE"

    def bind_processor(self, dialect: sa.Dialect) -> Any:  # noqa: D102 - as above
        return lambda value: value.total_seconds() if isinstance(value, timedelta) else value

    def result_processor(self, dialect: sa.Dialect, coltype: object) -> Any:  # noqa: D102 - as above
        interval: Any = sa.Interval().dialect_impl(dialect)
        read = interval.result_processor(dialect, coltype)

        def process(value: Any) -> timedelta | None:
            if value is None or isinstance(value, timedelta):
                return value
            if read is not None and issubclass(type(value), str | datetime):
                span: timedelta = read(value)
                return span
            return timedelta(seconds=float(value))

        return process


class Array(sa.types.UserDefinedType[Sequence[Any]]):
    """An array of values as JSON; a value is written as a column of its type has it."""

    cache_ok = True

    def __init__(self, element: Any = None, item_type: Any = None) -> None:
        self.element = item_type if element is None else element
        if isinstance(self.element, type):
            self.element = self.element()

    def get_col_spec(self, **_: Any) -> str:  # noqa: D102 - as above
        return "JSON"

    def bind_processor(self, dialect: sa.Dialect) -> Any:  # noqa: D102 - as above
        write = self.element.dialect_impl(dialect).bind_processor(dialect)

        def process(value: Any) -> Any:
            if value is None:
                return None
            return document([each if each is None or write is None else write(each) for each in value])

        return process

    def result_processor(self, dialect: sa.Dialect, coltype: object) -> Any:  # noqa: D102 - as above
        read = self.element.dialect_impl(dialect).result_processor(dialect, coltype)

        def process(value: Any) -> Any:
            if value is None:
                return None
            return [each if each is None or read is None else read(each) for each in json.loads(value)]

        return process


def document(value: Any) -> str:
    """Return values, as the driver has them, as a JSON document."""
    return json.dumps(value, default=plain, ensure_ascii=False)


def plain(value: Any) -> Any:
    """Return a value of the driver as JSON can represent it."""
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, datetime):
        return moment_text(value)
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value).hex()
    return value.hex if isinstance(value, UUID) else str(value)
