"""A part of a queue's jobs, by their keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from sqlaqueue.keys import Key


@dataclass(frozen=True)
class KeyRange:
    """The keys behind one and up to another: all of them, unless either is given."""

    after: Key | None = None
    upto: Key | None = None

    def holds(self, columns: Sequence[sa.ColumnElement[Any]]) -> sa.ColumnElement[bool]:
        """Return the condition that the key in ``columns``, those of a job or of its message, is one of these."""
        key = _row(columns)
        bounds = [] if self.after is None else [key > _row_of(self.after, columns)]
        if self.upto is not None:
            bounds.append(key <= _row_of(self.upto, columns))
        return sa.and_(sa.true(), *bounds)


def _row(columns: Sequence[sa.ColumnElement[Any]]) -> sa.ColumnElement[Any]:
    return columns[0] if len(columns) == 1 else sa.tuple_(*columns)


def _row_of(key: Key, columns: Sequence[sa.ColumnElement[Any]]) -> sa.ColumnElement[Any]:
    return _row([sa.literal(value, column.type) for value, column in zip(key, columns, strict=True)])
