"""COPY's text format, for a driver that does not write it: psycopg2.

A value is written as PostgreSQL reads it in a string, and then with a backslash before what separates values and
rows.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from itertools import islice
from typing import Any

Write = Callable[[Any], str]

_AT_ONCE = 100
"""Rows in one piece."""


class TextStream:
    """A file of rows that are written only when they are read."""

    def __init__(self, rows: Iterable[Sequence[Any]]) -> None:
        self.error: BaseException | None = None
        self._lines = _lines(rows)

    def read(self, size: int = -1) -> str:
        """Return the next rows, "" when there are no more; ``size`` is no more than a wish."""
        try:
            return "".join(islice(self._lines, _AT_ONCE))
        except BaseException as error:
            self.error = error
            raise


def _lines(rows: Iterable[Sequence[Any]]) -> Iterator[str]:
    writers: dict[type[Any], Write] = {str: escape}
    find = writers.get
    for row in rows:
        fields = []
        for value in row:
            if value is None:
                fields.append(r"\N")
                continue
            write = find(type(value))
            if write is None:
                write = writers[type(value)] = _escaped(writer_for(type(value)))
            fields.append(write(value))
        yield "\t".join(fields) + "\n"


def escape(text: str) -> str:
    """Return a value such that nothing in it ends it, or its row."""
    if "\\" in text:
        text = text.replace("\\", "\\\\")
    if "\n" in text or "\t" in text or "\r" in text:
        text = text.replace("\n", r"\n").replace("\t", r"\t").replace("\r", r"\r")
    return text


def _escaped(write: Write) -> Write:
    return write if write in _BARE else lambda value: escape(write(value))


def writer_for(kind: type[Any]) -> Write:
    """Return what writes values of a class as PostgreSQL reads them in a string.

    :raises TypeError: for a class of which that is not known.
    """
    for known, write in _WRITERS:
        if issubclass(kind, known):
            return write
    if hasattr(kind, "adapted"):
        # SQLAlchemy wraps bytes into psycopg2's Binary, which knows how to be a literal and no more.
        return lambda value: writer_for(type(value.adapted))(value.adapted)
    msg = f"psycopg2 has no COPY for {kind.__name__}; use psycopg 3, or session.execute(insert(...), rows)"
    raise TypeError(msg)


def _bool(value: Any) -> str:
    return "t" if value else "f"


def _timedelta(value: timedelta) -> str:
    return f"{value.days} days {value.seconds}.{value.microseconds:06} seconds"


def _bytes(value: Any) -> str:
    return "\\x" + bytes(value).hex()


def _array(value: Sequence[Any]) -> str:
    return "{" + ",".join(map(_element, value)) + "}"


def _element(value: Any) -> str:
    if value is None:
        return "NULL"
    text = writer_for(type(value))(value)
    if isinstance(value, list | tuple):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


# Of a subclass, such as an IntEnum, PostgreSQL wants the value that it is. A bool is an int, a datetime a date.
_WRITERS: tuple[tuple[Any, Write], ...] = (
    (str, str.__str__),
    (bool, _bool),
    (int, int.__repr__),
    (float, float.__repr__),
    (Decimal, Decimal.__str__),
    (datetime, datetime.isoformat),
    (date, date.isoformat),
    (time, time.isoformat),
    (timedelta, _timedelta),
    (uuid.UUID, uuid.UUID.__str__),
    ((bytes, bytearray, memoryview), _bytes),
    ((list, tuple), _array),
)
_BARE = (_bool, int.__repr__, float.__repr__, Decimal.__str__, uuid.UUID.__str__)
