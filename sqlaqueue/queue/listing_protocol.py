"""What lists of jobs need from the database, a part of :mod:`sqlaqueue.queue.backend`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import sqlalchemy as sa

Form = Literal["short", "text", "bytes", "moment", "large"]
"""How a value becomes a text: ``short`` for values that are never long, ``moment`` for dates and times, ``large`` for
values that have to be read whole to be converted."""


@dataclass(frozen=True, kw_only=True)
class OrderedIndex:
    """A valid index whose entries are in order."""

    name: str
    columns: Sequence[str]
    """The names of its first columns, as far as these are columns in their default order, not expressions."""
    is_whole: bool
    """Whether these are all of its columns."""
    descending: Sequence[bool]
    """Whether each column is in descending order."""
    nulls_first: Sequence[bool]
    """Whether nulls come first in each column."""
    nullable: Sequence[bool]
    """Whether each column may be null."""
    is_unique: bool
    is_partial: bool


class Listing(Protocol):
    """How lists of jobs read a table at a bounded cost."""

    SETTINGS: dict[str, str]
    """The settings of a transaction in which lists are read in the order of an index."""

    def table_id(self, connection: sa.Connection, table: sa.Table) -> int | None:
        """Return a number that identifies a table of this database; None if the table does not exist."""
        ...

    def ordered_indexes(self, connection: sa.Connection, table_id: int) -> Sequence[OrderedIndex]:
        """Return the valid indexes of a table that give its rows in an order."""
        ...

    def shown_text(self, value: sa.ColumnElement[Any], form: Form, length: int) -> sa.ColumnElement[str]:
        """Return the first ``length`` characters of a value as a text; NULL for a value that is too large to read.

        Moments are in ISO 8601, whatever the settings of the session.
        """
        ...

    def can_be_converted(self, value: sa.ColumnElement[Any]) -> sa.ColumnElement[bool]:
        """Return whether a ``large`` value can be read whole for the page of one job.

        It is decided without reading it: a value of hundreds of megabytes would take seconds and gigabytes.
        """
        ...

    def stored_size(self, value: sa.ColumnElement[Any]) -> sa.ColumnElement[int]:
        """Return the number of bytes that a value takes in the table, without reading it."""
        ...
