"""An UPDATE that returns something: MariaDB has no RETURNING there, so it is executed as three statements.

A DELETE of the library that returns at least the keys is executed as a SELECT of what it returns, and one DELETE for
each key: MariaDB has no hint for a DELETE, which in a small table would look at each row, and wait for its lock. Many
of them are sent as one block, which is no transaction of its own.

The compiler writes them into one text, which a listener executes one after another on the same cursor, in the
transaction of the statement: a SELECT that locks the rows and returns their keys, the UPDATE of the rows with these
keys, and a SELECT of what is returned. The last one is left out where only the keys are returned.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.mysql.base import MySQLCompiler
from sqlalchemy.engine.cursor import FullyBufferedCursorFetchStrategy

from sqlaqueue.exc import StatementError
from sqlaqueue.mariadb.base import errors_of_ignored_rows, refuse_autocommit
from sqlaqueue.sql.engine import OURS

# -- what is written into a text --------------------------------------------------------------------------------------


MARK = "/*sqlaqueue"
"""The beginning of every text below."""
EARLIER = "sqlaqueue_earlier_rows"
"""The entry in the ``info`` of a connection with the keys that were there before, by the name of their table."""

_THEN = f"\n{MARK} then*/\n"
_BY_KEY = " FORCE INDEX (PRIMARY)"
_DELETE = "DELETE FROM "
_PLACE = re.compile(
    rf"{re.escape(MARK)} keys (?:(?P<numbers>[\d,]+)|not of (?P<table>[^|]*))\|(?P<columns>.*?)\*/"
    r"|%%|%(?:\((?P<name>.*?)\))?s",
    re.DOTALL,
)

_IN_BLOCK = 100
"""How many DELETEs are sent together."""

Row = Sequence[Any]


def _keys_place(columns: Sequence[str], numbers: Sequence[int] | None = None) -> str:
    """Return the text of a condition on the keys of the rows that are locked.

    :param columns: the SQL of columns of the key.
    :param numbers: which columns of the key they are; None for all.
    """
    chosen = range(len(columns)) if numbers is None else numbers
    return f"{MARK} keys {','.join(map(str, chosen))}|{_written(columns)}*/"


def inserted_place(columns: Sequence[str], table: str) -> str:
    """Return the text of the condition that a row was not there before the transaction has inserted the first one.

    :param columns: the SQL of the columns of the key.
    """
    return f"{MARK} keys not of {_written([table])}|{_written(columns)}*/"


def _written(names: Sequence[str]) -> str:
    """Write names so that none of them ends the comment or the name, as JSON Pointer (RFC 6901) escapes them."""
    return "|".join(name.replace("~", "~0").replace("*", "~1").replace("|", "~2") for name in names)


def _read(names: str) -> list[str]:
    return [name.replace("~2", "|").replace("~1", "*").replace("~0", "~") for name in names.split("|")]


def as_rendered(text: str, type_: Any = None) -> Any:
    """Return what the compiler has rendered as an expression, whose percent signs it would double again."""
    return sa.literal_column(text.replace("%%", "%"), type_)


_Compiler: Any = MySQLCompiler


class ReturningCompiler(_Compiler):
    """Compiles an UPDATE that returns something, and a DELETE of the library."""

    _around: tuple[str, str | None] | None = None
    """The SELECT before the change that is being rendered, and the one behind it."""

    def visit_update(self, update_stmt: Any, visiting_cte: Any = None, **options: Any) -> str:
        keys = [*update_stmt.table.primary_key]
        if visiting_cte is not None or self.stack or not keys:
            return str(super().visit_update(update_stmt, visiting_cte, **options))
        place = _keys_place([self.process(key) for key in keys])
        self._around = None
        rendered: str = super().visit_update(update_stmt.where(as_rendered(place)), visiting_cte, **options)
        # Only now it is known whether something is returned: the ORM may have asked for it.
        around: Any = self._around
        if around is None:
            return re.sub(rf"\s(?:AND|WHERE)\s{re.escape(place)}", "", rendered, count=1)
        table = self.process(update_stmt.table, asfrom=True)
        rendered = rendered.replace(f"UPDATE {table} SET", f"UPDATE {table}{_BY_KEY} SET", 1)
        return _THEN.join(part for part in (around[0], rendered, around[1]) if part is not None)

    def visit_delete(self, delete_stmt: Any, visiting_cte: Any = None, **options: Any) -> str:
        self._around = None
        rendered: str = super().visit_delete(delete_stmt, visiting_cte, **options)
        around: Any = self._around
        return rendered if around is None else _THEN.join(around)

    def returning_clause(self, stmt: Any, returning_cols: Any, **options: Any) -> str:
        """Render the statements around a change when it is known as the ORM has translated it."""
        rendered: str = super().returning_clause(stmt, returning_cols, **options)
        is_ours = stmt.get_execution_options().get(OURS)
        keys = [*stmt.table.primary_key]
        shown: list[Any] = [getattr(column, "key", None) for column in returning_cols]
        if not stmt.is_update and not (stmt.is_delete and is_ours and {*shown} >= {key.key for key in keys}):
            return rendered
        if not keys:
            msg = (
                f"{stmt.table.name}: MariaDB has no UPDATE .. RETURNING, and what is done instead finds the changed "
                "rows by the primary key, which this table does not have; leave out returning(), and select the rows"
            )
            raise StatementError(msg)
        found = sa.select(*(returning_cols if stmt.is_delete else keys)).where(stmt.whereclause)
        found = found.limit(self._limit_of(stmt)).with_for_update().correlate(None)
        if is_ours:
            # The library names the keys. In a small table the server would look at each row, and wait for its lock.
            found = found.with_hint(stmt.table, _BY_KEY.strip())
            # The rows of a claim are returned in its order.
            found = found.order_by(*getattr(is_ours, "claim_order", keys))
        names = [self.process(key) for key in keys]
        if stmt.is_delete:
            table = self.process(stmt.table, asfrom=True)
            place = _keys_place(names, [shown.index(key.key) for key in keys])
            self._around = self.process(found), f"{_DELETE}{table} WHERE {place}"
            return ""
        new, only_keys = self._new_values(stmt, keys), shown == [key.key for key in keys]
        read = None
        if new or not only_keys:
            # With a lock, which the transaction has already: at REPEATABLE READ another SELECT would not find the
            # present version of a row that the UPDATE has left as it was.
            table, kept = self.process(stmt.table, asfrom=True), [n for n in range(len(keys)) if n not in new]
            where = [f"{names[number]} = {value}" for number, value in new.items()]
            where += [_keys_place([names[number] for number in kept], kept)] if kept else []
            columns = rendered.removeprefix("RETURNING ")
            read = (
                f"SELECT {columns} FROM {table}{_BY_KEY} WHERE {' AND '.join(where)} "  # noqa: S608 - SQL of the compiler
                f"ORDER BY {', '.join(names)} FOR UPDATE"
            )
        self._around = self.process(found), read
        return ""

    def _new_values(self, stmt: Any, keys: Sequence[Any]) -> dict[int, str]:
        """Return the SQL of what an UPDATE sets columns of the key to, by their numbers."""
        given = dict(getattr(stmt, "_ordered_values", None) or stmt._values or {})  # noqa: SLF001 - SQLAlchemy 2.0 and 2.1 have no public access to them
        values = {getattr(column, "key", column): value for column, value in given.items()}
        new: dict[int, str] = {}
        for number, key in enumerate(keys):
            bound = self.binds.get(key.key)
            if key.key not in values and not getattr(bound, "_is_crud", False):
                continue
            value = values.get(key.key, bound)
            if isinstance(value, sa.ClauseElement) and not isinstance(value, sa.BindParameter):
                msg = (
                    f"{stmt.table.name}: this UPDATE computes {key.key}, which is in the primary key, and MariaDB has "
                    "no UPDATE .. RETURNING; give the new key as a value, or leave out returning()"
                )
                raise StatementError(msg)
            given_by = value if isinstance(value, sa.BindParameter) and value in self.bind_names else bound
            new[number] = self.bindparam_string(self.bind_names[given_by])
        return new

    def _limit_of(self, stmt: Any) -> Any:
        """Return the number of rows to which a program has limited an UPDATE, by ``mysql.limit()``."""
        # SQLAlchemy 2.0 has the second name.
        names = ("update_post_criteria_clause", "update_limit_clause")
        render: Any = next((getattr(self, name) for name in names if hasattr(self, name)), None)
        rendered = (None if render is None else render(stmt)) or ""
        number = rendered.removeprefix("LIMIT ")
        return None if number == rendered else sa.literal_column(number, sa.Integer)


# -- how it is executed ------------------------------------------------------------------------------------------------


def execute(cursor: Any, statement: str, parameters: Any, context: Any) -> bool | None:
    """Execute such a text, or one with places for keys; return None for any other.

    It is a listener of the event ``do_execute``.
    """
    if MARK not in statement:
        return None
    with errors_of_ignored_rows(cursor, statement, context):
        _Execution(cursor, context, parameters).run(statement.split(_THEN))
    return True


def execute_each(cursor: Any, statement: str, parameters: Any, context: Any) -> bool | None:
    """Execute such a text with each of several sets of parameters; return None for any other.

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

    def run(self, parts: Sequence[str]) -> None:
        if len(parts) == 1:
            self.send(self.cursor, parts[0])
            return
        locking, change, *read = parts
        refuse_autocommit(self.context.root_connection, self.context.compiled.statement)
        self.send(self.cursor, locking)
        keys = [*self.cursor.fetchall()]
        # By a cursor of its own: the other one keeps the description of the keys, which SQLAlchemy reads.
        own = self.context.root_connection.connection.cursor()
        try:
            if not change.startswith(_DELETE):
                self.send(own, change, keys)
            for first in range(0, len(keys), _IN_BLOCK) if change.startswith(_DELETE) else ():
                deletes = [self.filled(change, [key]) for key in keys[first : first + _IN_BLOCK]]
                block = f"BEGIN NOT ATOMIC {'; '.join(text for text, _ in deletes)}; END"
                own.execute(block, tuple(value for _, sent in deletes for value in sent))
        finally:
            own.close()
        if read:
            self.send(self.cursor, read[0], keys)
        else:
            strategy = FullyBufferedCursorFetchStrategy(self.cursor, self.cursor.description, keys)
            self.context.cursor_fetch_strategy = strategy

    def send(self, cursor: Any, text: str, keys: Sequence[Row] | None = None) -> None:
        """Execute a text.

        :param keys: those of the rows that are locked; None while they are not known.
        """
        filled, sent = self.filled(text, keys)
        cursor.execute(filled, tuple(sent))

    def filled(self, text: str, keys: Sequence[Row] | None) -> tuple[str, list[Any]]:
        """Return a text with its parameters."""
        sent: list[Any] = []

        def fill(place: re.Match[str]) -> str:
            if place["name"] is not None:
                sent.append(self.named[place["name"]])
                return "%s"
            if place[0] == "%s":
                sent.append(next(self.positional))
            elif place["table"] is not None:
                return self._is_new(_read(place["table"])[0], _read(place["columns"]), sent)
            elif place["numbers"] is not None:
                numbers = [int(number) for number in place["numbers"].split(",")]
                chosen = None if keys is None else [[key[number] for number in numbers] for key in keys]
                return "1 = 1" if chosen is None else _among(_read(place["columns"]), chosen, sent)
            return place[0]

        return _PLACE.sub(fill, text), sent

    def _is_new(self, table: str, columns: list[str], sent: list[Any]) -> str:
        earlier = self.context.root_connection.connection.info.get(EARLIER, {}).get(table)
        return "1 = 0" if earlier is None else f"(NOT ({_among(columns, earlier, sent)}))"


def _among(columns: Sequence[str], keys: Sequence[Row], sent: list[Any]) -> str:
    """Return the condition that the key in some columns is one of some keys, which are added to the parameters."""
    if not keys:
        return "1 = 0"
    sent.extend(value for key in keys for value in key)
    if len(columns) == 1:
        return f"{columns[0]} IN ({', '.join(['%s'] * len(keys))})"
    if len(keys) == 1:
        # The server finds no single row of an UPDATE or DELETE by a comparison of rows.
        return f"({' AND '.join(f'{column} = %s' for column in columns)})"
    # Not `a = 1 AND b = 2 OR ..`, which the server would compare with each row from the beginning.
    row = f"({', '.join(['%s'] * len(columns))})"
    return f"({', '.join(columns)}) IN ({', '.join([row] * len(keys))})"
