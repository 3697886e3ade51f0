"""A change of rows that returns something: how it is divided into parts, and how these are executed."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy.engine.cursor import FullyBufferedCursorFetchStrategy
from sqlalchemy.sql import operators
from sqlalchemy.sql.elements import BinaryExpression, BooleanClauseList, Grouping, True_, Tuple
from sqlalchemy.sql.selectable import CTE, SelectBase
from sqlalchemy.sql.visitors import iterate

from sqlaqueue.exc import StatementError
from sqlaqueue.mariadb.base import errors_of_ignored_rows, refuse_autocommit
from sqlaqueue.sql.engine import plain_form
from sqlaqueue.strategies.columns import AmongLocked

# -- how its parts are executed ----------------------------------------------------------------------------------------
# Executes a change of rows that returns something, in the parts of which the compiler has made it.
#
# MariaDB has no UPDATE .. RETURNING, and no LIMIT in a subquery of IN. So the compiler writes several statements into
# one text: those that lock rows and select their keys, the change of the rows with these keys, and a SELECT of what is
# returned. They are executed one after another on the same cursor, in the transaction of the statement.


MARK = "/*sqlaqueue"
"""The beginning of every text below."""
EARLIER = "sqlaqueue_earlier_rows"
"""The entry in the ``info`` of a connection with the keys that were there before, by the name of their table."""
_THEN = f"\n{MARK} then*/\n"
_PLACE = re.compile(
    rf"{re.escape(MARK)} (?:keys(?: not of (?P<table>[^|]*))?\|(?P<columns>.*?)|value (?P<value>\d+))\*/"
    r"|%%|%(?:\((?P<name>.*?)\))?s",
    re.DOTALL,
)
_HEAD = re.compile(
    rf"{re.escape(MARK)} parts (?P<kinds>[a-z,]+) returns (?P<returns>keys|rest|read) names (?P<names>.*?)"
    r" at (?P<places>[\d,]+)\*/ ",
    re.DOTALL,
)
_NO_ROWS = "1 = 0"
_SAVEPOINT = "sqlaqueue_change"

Row = Sequence[Any]


def keys_place(columns: Sequence[str], *, not_of: str | None = None) -> str:
    """Return the text of a condition on keys that are known when it is executed: those of the part before.

    :param columns: the SQL of the columns of the key.
    :param not_of: a table; the condition is then that a row was not there before the transaction has inserted one.
    """
    return f"{MARK} keys{'' if not_of is None else f' not of {not_of}'}|{'|'.join(columns)}*/"


def value_place(number: int) -> str:
    """Return the text of a value that the part before has selected.

    :param number: its column, counted from 0.
    """
    return f"{MARK} value {number}*/"


class Divided(NamedTuple):
    parts: list[tuple[str, str]]
    """Kinds and texts. ``select`` locks rows, and returns them with the key first; ``change`` changes the rows with
    these keys, and ``read`` selects what is returned."""
    returns: str
    """What is returned: the ``keys``, the ``rest`` of the rows that the last select has returned, or what was
    ``read``."""
    names: list[str]
    """The names of the columns of the key."""
    places: list[int]
    """Where the key after the change is in a row of the last select."""

    def text(self) -> str:
        kinds, places = ",".join(kind for kind, _ in self.parts), ",".join(map(str, self.places))
        head = f"{MARK} parts {kinds} returns {self.returns} names {'|'.join(self.names)} at {places}*/ "
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

    def run(self, statement: str) -> None:
        head = _HEAD.match(statement)
        if head is None:
            self.send(statement, None)
            return
        refuse_autocommit(self.context.root_connection, self.context.compiled.statement)
        kinds, texts = head["kinds"].split(","), statement[head.end() :].split(_THEN)
        names = head["names"].split("|")
        width, places = len(names), [int(place) for place in head["places"].split(",")]
        rows: list[Row] = []
        returned: list[Row] = []
        description: Any = [(name, *[None] * 6) for name in names]
        for kind, text in zip(kinds, texts, strict=True):
            if kind == "change":
                self.change(text, rows, width)
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
            elif place["table"] is not None:
                return self.is_new(place["table"], place["columns"].split("|"), sent)
            elif place["columns"] is not None:
                return _among(place["columns"].split("|"), rows or [], sent)
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


# -- how it is divided -------------------------------------------------------------------------------------------------
# Divides an UPDATE or DELETE that returns something, and chooses the index by which rows are locked.
#
# A scan locks every row that it looks at, and a sort looks at all of them. So the rows of a claim are found by the
# index of the claim order, and those of a key by the primary key.


BY_KEY = "FORCE INDEX (PRIMARY)"
_RETURNED = f"{MARK} returned*/"
"""Stands for the SQL of what is returned, until the SELECT around it is rendered."""


def divided(compiler: Any, statement: Any, columns: Sequence[Any], returned: str) -> str:
    """Return the parts of a change as one text.

    :param statement: an UPDATE or DELETE of one table by its primary key.
    :param columns: what it returns.
    :param returned: the SQL of it.
    """
    table: sa.Table = statement.table
    keys = [*table.primary_key]
    if not keys:
        msg = (
            f"{table.name}: MariaDB has no UPDATE .. RETURNING, and what is done instead finds the changed rows by the "
            "primary key, which this table does not have; leave out returning(), and select the rows"
        )
        raise StatementError(msg)
    names = [compiler.process(key) for key in keys]
    where = [] if statement.whereclause is None else [statement.whereclause]
    values: dict[Any, Any] = _values_of(compiler, statement) if statement.is_update else {}
    # What a key gets is selected as well: by it the row is found after the change.
    computed = {
        column: value
        for column, value in values.items()
        if column.primary_key or not _is_in_place(value, column, table)
    }
    limit = _limit_of(compiler, statement)
    returns_keys = [getattr(column, "key", None) for column in columns] == [key.key for key in keys]
    reads_first = statement.is_delete and not returns_keys
    computed_values = [_as_expression(compiler, value, column) for column, value in computed.items()]
    shown = [Grouping(value).label(f"sqlaqueue_value_{number}") for number, value in enumerate(computed_values)]
    selected = _select(compiler, table, keys, where, returned if reads_first else None, shown, limit=limit)
    parts = [("select", selected)]
    for number, column in enumerate(computed):
        values[column] = sa.literal_column(value_place(len(keys) + number), column.type)
    changed = keys_place(names)
    if statement.is_update:
        target = f"{compiler.process(table, asfrom=True)} {BY_KEY}"
        change = f"UPDATE {target} SET {_assignments(compiler, values)} WHERE {changed}"  # noqa: S608 - SQL of the compiler
    else:
        change = compiler.process(sa.delete(table).where(as_rendered(changed)))
    parts.append(("change", change))
    if returns_keys or statement.is_delete:
        returns = "rest" if reads_first else "keys"
    else:
        source = f"{compiler.process(table, asfrom=True)} {BY_KEY}"
        # With a lock, which the transaction has already: at REPEATABLE READ another SELECT would not find the present
        # version of a row that the UPDATE has left as it was. The order lets the server look the keys up.
        read = f"SELECT {returned} FROM {source} WHERE {keys_place(names)} ORDER BY {', '.join(names)}"  # noqa: S608 - SQL of the compiler
        parts.append(("read", f"{read} FOR UPDATE SKIP LOCKED"))
        returns = "read"
    places = [len(keys) + [*computed].index(key) if key in computed else number for number, key in enumerate(keys)]
    return Divided(parts, returns, [key.name for key in keys], places).text()


def as_rendered(text: str, type_: Any = None) -> Any:
    """Return what the compiler has rendered as an expression, whose percent signs it would double again."""
    return sa.literal_column(text.replace("%%", "%"), type_)


def _select(
    compiler: Any,
    table: sa.Table,
    keys: Sequence[Any],
    where: Sequence[Any],
    returned: str | None,
    shown: Sequence[Any] = (),
    *,
    limit: str | None = None,
) -> str:
    """Return the SELECT that locks the rows of a change, in the order of their keys."""
    columns = [*keys, *shown] if returned is None else [*keys, sa.literal_column(_RETURNED)]
    found = sa.select(*columns).where(*where).limit(None if limit is None else sa.literal_column(limit, sa.Integer))
    others = [each for each in found.get_final_froms() if each is not table]
    # The rows of steps are few, and each finds its row by the key.
    found = found.select_from(*others, table) if others else found.select_from(table)
    if others:
        found = found.prefix_with("STRAIGHT_JOIN")
    if any(_is_about_key(each, keys) for each in conjuncts(where)):
        found = found.with_hint(table, BY_KEY)
        if not others:
            found = found.order_by(*keys)
    rendered = str(compiler.process(found.with_for_update().correlate(None)))
    # Not a part of what was rendered, which would double each percent sign in it.
    return rendered if returned is None else rendered.replace(_RETURNED, returned)


def _limit_of(compiler: Any, statement: Any) -> str | None:
    """Return the SQL of the number of rows to which a program has limited a change, by ``mysql.limit()``."""
    kind = "update" if statement.is_update else "delete"
    # SQLAlchemy 2.0 has the second name, and its first versions limit no DELETE.
    names = (f"{kind}_post_criteria_clause", f"{kind}_limit_clause")
    render = next((getattr(compiler, name) for name in names if hasattr(compiler, name)), None)
    rendered = (None if render is None else render(statement)) or ""
    return rendered.removeprefix("LIMIT ") if rendered.startswith("LIMIT ") else None


def conjuncts(criteria: Sequence[Any]) -> Iterator[Any]:
    """Return the conditions that are all to be met, without those that are always true."""
    for each in criteria:
        plain: Any = plain_form(each)
        condition = each if plain is None else plain
        if isinstance(condition, BooleanClauseList) and condition.operator is operators.and_:
            yield from conjuncts([*condition.clauses])
        elif isinstance(condition, Grouping):
            yield from conjuncts([condition.element])
        elif not isinstance(condition, True_):
            yield condition


def _values_of(compiler: Any, statement: Any) -> dict[Any, Any]:
    """Return the columns that an UPDATE sets, those that it does not name included, and their values."""
    table, ordered = statement.table, getattr(statement, "_ordered_values", None)
    given = dict(ordered) if ordered else dict(statement._values or {})  # noqa: SLF001 - not public
    values = {table.c[getattr(column, "key", column)]: value for column, value in given.items()}
    for column in table.c:
        if column in values:
            continue
        parameter, default = compiler.binds.get(column.key), column.onupdate
        if getattr(parameter, "_is_crud", False):
            # It gets its value when the statement is executed: from the caller, or from a function of the column.
            values[column] = parameter
        elif default is not None and default.is_clause_element:
            values[column] = default.arg
    return values


def _assignments(compiler: Any, values: Mapping[Any, Any]) -> str:
    assignments = []
    for column, given in values.items():
        value = _as_expression(compiler, given, column)
        assignments.append(f"{compiler.preparer.format_column(column)}={compiler.process(value.self_group())}")
    return ", ".join(assignments)


def _as_expression(compiler: Any, given: Any, column: Any) -> Any:
    value = given if isinstance(given, sa.ClauseElement) else sa.literal(given, column.type)
    if isinstance(value, sa.BindParameter) and compiler.binds.get(value.key) is not value:
        # Not a plain parameter: it would be named after its column, as that of the whole statement is.
        return sa.type_coerce(value, column.type)
    return value


def _is_in_place(value: Any, column: Any, table: sa.Table) -> bool:
    """Return whether an UPDATE computes a value as PostgreSQL does.

    MariaDB assigns one column after another, so an expression sees the new values of the columns before it.
    """
    if not isinstance(value, sa.ClauseElement):
        return True
    for part in iterate(value):
        # What a text of the program reads is not known.
        if isinstance(part, SelectBase | CTE | sa.TextClause) or getattr(part, "is_literal", False):
            return False
        if isinstance(part, sa.ColumnClause) and part.table is not None and not _is_one_of(part, [column]):
            return False
    return True


def _is_one_of(column: Any, columns: Sequence[Any]) -> bool:
    return any(getattr(column, "key", None) == each.key and column.shares_lineage(each) for each in columns)


def _is_about_key(condition: Any, keys: Sequence[Any]) -> bool:
    """Return whether a condition, or each of its alternatives, names a value of the first column of the key."""
    if isinstance(condition, Grouping):
        return _is_about_key(condition.element, keys)
    if isinstance(condition, AmongLocked):
        return True
    if isinstance(condition, BooleanClauseList):
        about = [_is_about_key(each, keys) for each in condition.clauses]
        return any(about) if condition.operator is operators.and_ else all(about)
    if isinstance(condition, sa.ColumnClause) and condition.is_literal:
        return condition.name.startswith(f"{MARK} keys")
    if not isinstance(condition, BinaryExpression) or condition.operator not in {operators.eq, operators.in_op}:
        return False
    left = condition.left.element if isinstance(condition.left, Grouping) else condition.left
    sides = [*(left.clauses if isinstance(left, Tuple) else [left]), condition.right]
    return any(isinstance(side, sa.ColumnClause) and _is_one_of(side, keys[:1]) for side in sides)
