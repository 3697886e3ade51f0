"""Executes a change of rows that returns something, in the parts of which the compiler has made it.

MariaDB has no UPDATE .. RETURNING, and no LIMIT in a subquery of IN. So the compiler writes several statements into one
text: those that lock rows and select their keys, the change of the rows with these keys, and a SELECT of what is
returned. They are executed one after another on the same cursor, in the transaction in which the statement is executed.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import sqlalchemy as sa
from sqlalchemy.engine.cursor import FullyBufferedCursorFetchStrategy
from sqlalchemy.sql.selectable import CTE

from sqlaqueue.engines.shared import plain
from sqlaqueue.engines.steps import refuse_without_step
from sqlaqueue.mariadb.base import errors_of_ignored_rows, refuse_autocommit
from sqlaqueue.sql.engine import plain_form

MARK = "/*sqlaqueue"
"""The beginning of every text below."""
NEW = "!"
"""The beginning of the name of a table, in the place of a step: for the rows that were not there before."""
EARLIER = "sqlaqueue_earlier_rows"
"""The entry in the ``info`` of a connection with the keys that were there before, by the name of their table."""
ROWS = "sqlaqueue_rows"
"""The entry in the ``info`` of a connection with the rows of steps, by the name of their CTE."""

_THEN = f"\n{MARK} then*/\n"
_PLACE = re.compile(
    rf"{re.escape(MARK)} (?:keys(?: of (?P<step>[^|]*):(?P<numbers>[\d,]+))?\|(?P<columns>.*?)|value (?P<value>\d+))\*/"
    r"|%%|%(?:\((?P<name>.*?)\))?s",
    re.DOTALL,
)
_HEAD = re.compile(
    rf"{re.escape(MARK)} parts (?P<kinds>[a-z,]+) returns (?P<returns>keys|rest|read) names (?P<names>.*?)"
    r" at (?P<places>[\d,]+)(?: given (?P<step>.*?):(?P<numbers>[\d,]+))?\*/ ",
    re.DOTALL,
)
_NO_ROWS = "1 = 0"
_SAVEPOINT = "sqlaqueue_change"

Row = Sequence[Any]


def keys_place(columns: Sequence[str], step: str | None = None, numbers: Sequence[int] = ()) -> str:
    """Return the text of a condition on keys that are known when it is executed.

    :param columns: the SQL of the columns of the key.
    :param step: the name of a CTE that was executed before; None for the rows of the part before.
    :param numbers: the columns of that CTE with the key.
    """
    of = "" if step is None else f" of {step}:{','.join(map(str, numbers))}"
    return f"{MARK} keys{of}|{'|'.join(columns)}*/"


def value_place(number: int) -> str:
    """Return the text of a value that the part before has selected.

    :param number: its column, counted from 0.
    """
    return f"{MARK} value {number}*/"


class Divided(NamedTuple):
    parts: list[tuple[str, str]]
    """Kinds and texts. ``lock`` and ``select`` return rows that begin with the key, ``change`` changes the rows with
    these keys, and ``read`` selects what is returned."""
    returns: str
    """What is returned: the ``keys``, the ``rest`` of the rows that the last select has returned, or what was
    ``read``."""
    names: list[str]
    """The names of the columns of the key."""
    places: list[int]
    """Where the key after the change is in a row of the last select."""
    given: tuple[str, Sequence[int]] | None = None
    """The name of a CTE that was executed before, and its columns with the key, if the keys come from there."""

    def text(self) -> str:
        kinds = ",".join(kind for kind, _ in self.parts)
        given = "" if self.given is None else f" given {self.given[0]}:{','.join(map(str, self.given[1]))}"
        places = ",".join(map(str, self.places))
        head = f"{MARK} parts {kinds} returns {self.returns} names {'|'.join(self.names)} at {places}{given}*/ "
        return head + _THEN.join(text for _, text in self.parts)


def execute(cursor: Any, statement: str, parameters: Any, context: Any) -> bool | None:
    """Execute a statement that the compiler has divided, or that has places for keys; None for any other.

    It is a listener of the event ``do_execute``.
    """
    if MARK not in statement:
        return None
    with errors_of_ignored_rows(cursor, statement, context):
        _Execution(cursor, context, parameters).run(statement)
    return True


def execute_each(cursor: Any, statement: str, parameters: Any, context: Any) -> bool | None:
    """Execute such a statement with each of several sets of parameters; None for any other.

    It is a listener of the event ``do_executemany``.
    """
    if MARK not in statement:
        return None
    number = 0
    for each in parameters:
        execute(cursor, statement, each, context)
        number += cursor.rowcount
    cursor.rowcount = number
    return True


class _Execution:
    def __init__(self, cursor: Any, context: Any, parameters: Any) -> None:
        # Parameters have names or positions, as the dialect likes it.
        self.cursor, self.context = cursor, context
        self.named: Mapping[str, Any] = parameters if isinstance(parameters, Mapping) else {}
        self.positional = iter(() if self.named else parameters)
        self.steps: dict[str, list[Row]] = context.root_connection.connection.info.get(ROWS, {})

    def run(self, statement: str) -> None:
        head = _HEAD.match(statement)
        if head is None:
            self.send(statement, None)
            return
        refuse_autocommit(self.context.root_connection, self.context.compiled.statement)
        kinds, texts = head["kinds"].split(","), statement[head.end() :].split(_THEN)
        names = head["names"].split("|")
        width, places = len(names), [int(place) for place in head["places"].split(",")]
        rows: list[Row] | None = None if head["step"] is None else self.rows_of(head["step"], head["numbers"])
        returned: list[Row] = rows or []
        description: Any = [(name, *[None] * 6) for name in names]
        for kind, text in zip(kinds, texts, strict=True):
            if kind == "change":
                self.change(text, rows or [], width)
                if rows and places != [*range(width)]:
                    rows = [tuple(row[place] for place in places) for row in rows]
                    returned = rows if head["returns"] == "keys" else returned
                continue
            self.send(text, rows)
            found = [*self.cursor.fetchall()]
            if kind == "read":
                returned, description = found, self.cursor.description
                continue
            rows = found
            if head["returns"] == "rest":
                returned, description = [row[width:] for row in rows], self.cursor.description[width:]
            else:
                returned = [row[:width] for row in rows]
        self.context.cursor_fetch_strategy = FullyBufferedCursorFetchStrategy(self.cursor, description, returned)

    def rows_of(self, step: str, numbers: str) -> list[Row]:
        """Return the keys among the rows of a step."""
        if step not in self.steps:
            # With no rows the statement would do nothing, and say so.
            raise refuse_without_step(step, "MariaDB")
        places = [int(number) for number in numbers.split(",")]
        return [tuple(row[place] for place in places) for row in self.steps[step]]

    def is_new(self, table: str, columns: list[str], sent: list[Any]) -> str:
        """Return the condition that a row was not there before the transaction has inserted the first one."""
        earlier = self.context.root_connection.connection.info.get(EARLIER, {}).get(table)
        return _NO_ROWS if earlier is None else f"(NOT ({_among(columns, earlier, sent)}))"

    def change(self, text: str, rows: list[Row], width: int) -> None:
        if f"{MARK} value" not in text:
            groups = [rows] if rows else []
        else:
            by_values: dict[str, list[Row]] = {}
            for row in rows:
                by_values.setdefault(repr(row[width:]), []).append(row)
            groups = [*by_values.values()]
        positional = [*self.positional_of(text)]
        # By a cursor of its own: the other one keeps the description of what it has selected, which SQLAlchemy reads.
        cursor = self.context.root_connection.connection.cursor()
        try:
            with _all_or_none(cursor) if len(groups) > 1 else contextlib.nullcontext():
                for group in groups:
                    self.send(text, group, positional, cursor)
        finally:
            cursor.close()

    def positional_of(self, text: str) -> Iterator[Any]:
        """Return the parameters of a part that have positions."""
        for place in _PLACE.finditer(text):
            if place[0] == "%s":
                yield next(self.positional)

    def send(
        self, text: str, rows: list[Row] | None, positional: Sequence[Any] | None = None, cursor: Any = None
    ) -> None:
        given = iter([*self.positional_of(text)] if positional is None else positional)
        sent: list[Any] = []

        def fill(place: re.Match[str]) -> str:
            if place["name"] is not None:
                sent.append(self.named[place["name"]])
                return "%s"
            if place[0] == "%s":
                sent.append(next(given))
            elif place["value"] is not None:
                sent.append(rows[0][int(place["value"])] if rows else None)
                return "%s"
            elif place["columns"] is not None:
                if (place["step"] or "").startswith(NEW):
                    return self.is_new(place["step"][len(NEW) :], place["columns"].split("|"), sent)
                keys = (rows or []) if place["step"] is None else self.rows_of(place["step"], place["numbers"])
                return _among(place["columns"].split("|"), keys, sent)
            return place[0]

        filled = _PLACE.sub(fill, text)
        (self.cursor if cursor is None else cursor).execute(filled, tuple(sent))


@contextlib.contextmanager
def _all_or_none(cursor: Any) -> Iterator[None]:
    """Undo all statements of the block if one of them fails: an error of MariaDB undoes the statement only."""
    cursor.execute(f"SAVEPOINT {_SAVEPOINT}")
    try:
        yield
    except Exception:
        # After a deadlock, the server has rolled back the transaction, and its savepoints with it.
        with contextlib.suppress(Exception):
            cursor.execute(f"ROLLBACK TO SAVEPOINT {_SAVEPOINT}")
        raise


def _among(columns: list[str], keys: list[Row], sent: list[Any]) -> str:
    """Return the condition that the key in some columns is one of some keys, which are added to the parameters."""
    if not keys:
        return _NO_ROWS
    for key in keys:
        sent.extend(key[: len(columns)])
    if len(columns) == 1:
        return f"{columns[0]} IN ({', '.join(['%s'] * len(keys))})"
    # Not a comparison of rows, for which the server would not use the index.
    same = " AND ".join(f"{column} = %s" for column in columns)
    return f"({' OR '.join([f'({same})'] * len(keys))})"


_statements: WeakKeyDictionary[CTE, Any] = WeakKeyDictionary()


def run_step(connection: sa.Connection, cte: CTE, parameters: Mapping[str, Any]) -> list[list[Any]]:
    """Execute a step and return its rows, each value as JSON can represent it."""
    refuse_autocommit(connection, cte.element)
    statement = _statements.get(cte)
    if statement is None:
        inner = plain_form(cte)
        statement = _statements[cte] = _with_keys_only(cte if inner is None else inner)
    result = connection.execute(statement, parameters)
    rows: list[Any] = []
    if result.returns_rows:
        # As the driver has them: the following statements give them back to it.
        cursor: Any = result.cursor
        rows = [*result.cursor_strategy.fetchall(result, cursor)]
        result.close()
    connection.connection.info.setdefault(ROWS, {})[str(cte.name)] = rows
    return [[plain(value) for value in row] for row in rows]


def forget_rows(connection: sa.Connection) -> None:
    """Drop the rows of the steps of a statement that has ended."""
    # A connection that was lost has its info no more, and one that is closed has none.
    if not (connection.invalidated or connection.closed):
        connection.connection.info.pop(ROWS, None)


def _with_keys_only(cte: Any) -> Any:
    """Return the statement of a step; an UPDATE returns keys only, by which the rows are read again."""
    statement: Any = cte.element
    if not (statement.is_dml and statement.is_update):
        return statement
    keys = [*statement.table.primary_key]
    if not statement._returning:  # noqa: SLF001 - not public
        # So that it is divided: an UPDATE of joined tables might lock every row, and computes one value after another.
        return statement.returning(*keys)
    if len(keys) >= len(cte.c) or not all(any(column.shares_lineage(key) for column in cte.c) for key in keys):
        return statement
    reduced = statement._clone()  # noqa: SLF001 - returning() only adds columns
    reduced._returning = ()  # noqa: SLF001 - SQLAlchemy has no public name for it
    return reduced.returning(*keys)
