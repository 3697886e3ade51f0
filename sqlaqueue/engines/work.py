"""What the steps of all verbs have in common: how they lock, find, read and change rows by their keys."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError

from sqlaqueue._typing import AnySelect
from sqlaqueue.queue.run import Key
from sqlaqueue.sql.engine import OtherEngine
from sqlaqueue.sql.types import as_library_statement, numbered_rows
from sqlaqueue.strategies.columns import by_index

KEYS = "sqlaqueue_step_keys"
"""The name of the parameter with the keys that a step before has returned."""

Given = Mapping[str, Any]
"""The parameters with which a program executes a verb."""


@dataclass(frozen=True)
class Work:
    """A statement that is carried out in steps."""

    engine: OtherEngine
    connection: sa.Connection
    shown: Callable[[AnySelect], Any] | None
    """Makes the statement that is executed at the end, where a verb is executed in steps as a whole."""
    given: Given
    criteria: Sequence[Any]
    """What a listener of the program has added to the statement by ``with_loader_criteria()``."""

    def lock(self, keys: Sequence[Any], rows: AnySelect, *, waits: bool, limited: bool = False) -> list[Key]:
        """Lock the rows that a SELECT finds; return the keys of those that are locked, and are still found.

        :param keys: the key of the table. The SELECT begins with it.
        :param limited: whether it has a limit, and is to find others for the rows that it passes over.
        """
        rows = self.limited(rows)
        self.engine.begin_steps(self.connection, rows)
        found = self.found(keys, rows)
        if self.engine.has_one_writer or not found:
            return found
        # By their keys: a scan would lock each row that it looks at.
        columns: list[Any] = [*rows.selected_columns][: len(keys)]
        mine = by_index(rows.where(among_keys(columns, found)), table_of(columns, keys), "PRIMARY")
        locked = self.found(keys, self.engine.locked(mine, waits=waits))
        if limited and len(locked) < len(found):
            return self.found(keys, self.engine.locked(rows, waits=waits))
        return locked

    def limited(self, rows: AnySelect) -> AnySelect:
        """Return a SELECT of jobs with the criteria of the program."""
        return rows.options(*self.criteria) if self.criteria else rows

    def found(self, keys: Sequence[Any], rows: AnySelect, given: Given | None = None) -> list[Key]:
        """Return the keys with which the rows of a SELECT begin.

        :param given: its parameters beside those of the program.
        """
        found = self.connection.execute(rows, {**self.given, **(given or {})})
        # A second table in the filter may match a job several times.
        return [*dict.fromkeys(tuple(row[: len(keys)]) for row in found)]

    def changed(self, keys: Sequence[Any], verb: sa.Update | sa.Delete) -> list[Key]:
        """Execute a change of rows that it finds by their keys; return the keys of those that it has changed."""
        # Marked, or the SELECT that MariaDB executes for RETURNING might look at other rows, and wait for their locks.
        marked = as_library_statement(verb.returning(*keys))
        return [tuple(row) for row in self.connection.execute(marked, self.given)]

    def read(
        self, columns: Sequence[Any], values: Mapping[sa.Column[Any], Any], keys: Sequence[Key]
    ) -> Mapping[sa.Column[Any], Any]:
        """Return the values for some rows, which are locked, with those that other columns or rows tell already read.

        An UPDATE of MariaDB assigns one column after another, and locks the rows that it reads for a value.
        """
        told = {
            column: value
            for column, value in values.items()
            if isinstance(value, sa.ClauseElement) and not isinstance(value, sa.BindParameter)
        }
        if self.engine.has_one_writer or not told or not keys:
            return values
        shown = [
            sa.type_coerce(value, column.type).label(f"value_{n}") for n, (column, value) in enumerate(told.items())
        ]
        rows = self.connection.execute(sa.select(*columns, *shown).where(among_keys(columns, keys)), self.given).all()
        read = dict(values)
        for number, column in enumerate(told, start=len(columns)):
            alike: dict[str, tuple[Any, list[Key]]] = {}
            for row in rows:
                alike.setdefault(repr(row[number]), (row[number], []))[1].append(tuple(row[: len(columns)]))
            whens = [(among_keys(columns, those), sa.literal(value, column.type)) for value, those in alike.values()]
            read[column] = whens[0][1] if len(whens) == 1 else sa.case(*whens, else_=column)
        return read

    @contextlib.contextmanager
    def all_or_none(self, rows: AnySelect) -> Iterator[None]:
        """Undo the changes of the block if one of them fails, as it is with those of one statement.

        :param rows: what is changed, for errors.
        """
        self.engine.begin_steps(self.connection, rows)
        savepoint = self.connection.begin_nested()
        try:
            yield
        except BaseException:
            # A deadlock ends the whole transaction of MariaDB, and there is no savepoint any more.
            with contextlib.suppress(DBAPIError):
                savepoint.rollback()
            raise
        savepoint.commit()

    def among(self, spec: Any, columns: Sequence[Any], keys: Sequence[Key]) -> sa.ColumnElement[bool]:
        """Return the condition that the key in some columns is one of these."""
        if len(columns) == 1:
            condition: sa.ColumnElement[bool] = spec.key_in(columns, keys)
            return condition
        if not keys or not self.engine.has_one_writer:
            return among_keys(columns, keys)
        # In arrays: SQLite takes 32,766 parameters.
        parts = {key.key: (key.type, part) for key, part in zip(spec.keys, zip(*keys, strict=True), strict=True)}
        rows = numbered_rows(parts, "sqlaqueue_number")
        return sa.tuple_(*columns).in_(sa.select(*(rows.c[name] for name in parts)))

    def returned(self, spec: Any, keys: Sequence[Key], *columns: Any) -> tuple[Any, Given]:
        """Return the statement that shows the keys of some rows, with further columns."""
        shown: Any = self.shown
        return shown(sa.select(*spec.keys, *columns).where(self.among(spec, spec.keys, keys))), {}

    def listed(self, spec: Any, keys: Sequence[Key]) -> tuple[Any, Given]:
        """Return the statement that shows keys whose rows may be gone."""
        shown: Any = self.shown
        columns = {column.key: (column.type, [key[n] for key in keys]) for n, column in enumerate(spec.keys)}
        rows = numbered_rows(columns, "sqlaqueue_number")
        return shown(sa.select(*(rows.c[name] for name in columns))), {}


def among_step(keys: Sequence[Any]) -> sa.ColumnElement[bool]:
    """Return the condition that a key is one of those that a step has returned."""
    return (keys[0] if len(keys) == 1 else sa.tuple_(*keys)).in_(sa.bindparam(KEYS, expanding=True))


def table_of(columns: Sequence[Any], keys: Sequence[Any]) -> Any:
    """Return the table, or the alias of it, of which a SELECT has these columns of the key."""
    # A label has none; an alias is that of the columns.
    return keys[0].table if columns[0].table is None else columns[0].table


def several(keys: Sequence[Key]) -> list[Key]:
    """Return keys of several columns, twice if there is one: MariaDB finds no single row of an UPDATE by its index."""
    return [*keys] if len(keys) != 1 else [*keys, *keys]


def among_keys(columns: Sequence[Any], keys: Sequence[Key]) -> sa.ColumnElement[bool]:
    among: sa.ColumnElement[bool] = (
        sa.tuple_(*columns).in_(several(keys)) if len(columns) > 1 else columns[0].in_([key[0] for key in keys])
    )
    return among
