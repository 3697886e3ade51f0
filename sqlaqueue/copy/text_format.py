"""The text format of COPY, for psycopg2, which does not write it.

A value is written as PostgreSQL reads it in a string; separators in it are then escaped with a backslash.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from itertools import islice
from typing import Any

Write = Callable[[Any], str]

_ROWS_PER_READ = 100
"""Rows per read."""


class TextStream:
    """A file object that formats rows when they are read."""

    def __init__(self, rows: Iterable[Sequence[Any]]) -> None:
        self.error: BaseException | None = None
        self._lines = _lines(rows)

    def read(self, size: int = -1) -> str:
        """Return the next rows, "" after the last; ``size`` is ignored."""
        try:
            return "".join(islice(self._lines, _ROWS_PER_READ))
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
    """Escape the separators of values and rows in a value."""
    if "\\" in text:
        text = text.replace("\\", "\\\\")
    if "\n" in text or "\t" in text or "\r" in text:
        text = text.replace("\n", r"\n").replace("\t", r"\t").replace("\r", r"\r")
    return text


def _escaped(write: Write) -> Write:
    return write if write in _BARE else lambda value: escape(write(value))


def writer_for(kind: type[Any]) -> Write:
    """Return the function that formats values of a class.

    :raises TypeError: if the class is not supported.
    """
    for known, write in _WRITERS:
        if issubclass(kind, known):
            return write
    if hasattr(kind, "adapted"):
        # SQLAlchemy wraps bytes in psycopg2.Binary, which can only be formatted as a literal.
        return lambda value: writer_for(type(value.adapted))(value.adapted)
    msg = (
        f"values of {kind.__name__} cannot be copied by psycopg2; use psycopg 3, or session.execute(insert(...), rows)"
    )
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


# Subclasses such as IntEnum are formatted like their base. bool is a subclass of int, and datetime of date.
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
