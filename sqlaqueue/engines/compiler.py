"""What SQLite and MariaDB write in the same way, and what their compilers keep for the statements of a program."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql import operators
from sqlalchemy.sql.elements import BinaryExpression
from sqlalchemy.sql.visitors import iterate
from sqlalchemy.util import memoized_property

from sqlaqueue.engines.shared import has_zone, undecorated
from sqlaqueue.postgresql.ddl import queue_of
from sqlaqueue.postgresql.side_tables import KeyInIndex
from sqlaqueue.sql.engine import PREPARED as OTHERS
from sqlaqueue.sql.engine import engine_of
from sqlaqueue.sql.portable import (
    AmongRows,
    ForEffect,
    InRecovery,
    JsonArray,
    MovedMoment,
    SecondsOf,
    ServerDefault,
    ServerSetting,
    clock,
)

# What a program writes for its own tables keeps its meaning.

_PREFIX = "sqlaqueue_"


def is_ours(table: Any) -> bool:
    """Return whether a table is one of a queue, or one of those that the library adds."""
    return isinstance(table, sa.Table) and (table.name.startswith(_PREFIX) or queue_of(table) is not None)


def tables_of(statement: Any) -> Iterator[Any]:
    """Yield the tables of a statement, among other parts of it."""
    parts: Any = iterate(statement)
    for each in parts:
        yield getattr(each, "table", each)


def uses_zones(statement: Any) -> bool:
    """Return whether a statement is about a moment with a time zone."""
    parts: Any = iterate(statement)
    columns = (column for table in tables_of(statement) if isinstance(table, sa.Table) for column in table.c)
    return any(has_zone(getattr(each, "type", None)) for each in (*parts, *columns))


_EPOCH = "'1970-01-01 00:00:00.000000'"
_MOMENTS = {sa.DateTime, sa.DATETIME, sa.TIMESTAMP}
_IN_UTC = sa.DateTime(timezone=True)

_Compiler: Any = object
"""Stands for the compiler of a dialect, whose methods a subclass inherits after those of this class."""


class ProgramsCompiler(_Compiler):
    """Keeps what the documentation promises to a program about moments. A subclass names the compiler of its dialect.

    No method may choose what it renders by the value of a parameter: SQLAlchemy executes what was compiled once with
    other values as well.
    """

    @memoized_property
    def is_about_library(self) -> bool:
        """Whether the statement is about a table of the library, which is one of a queue as well."""
        # Without a statement it compiles parts of a table.
        return self.statement is not None and any(is_ours(table) for table in tables_of(self.statement))

    @memoized_property
    def is_about_zones(self) -> bool:
        """Whether it is about such a table, or about a moment with a time zone, which is in UTC."""
        return self.is_about_library or (self.statement is not None and uses_zones(self.statement))

    # -- what an engine has to give ------------------------------------------------------------------------

    moved: Callable[[str, str], str]
    epoch: Callable[[str], str]

    # -- expressions -----------------------------------------------------------------------------------------

    def visit_binary(self, binary: BinaryExpression[Any], *positional: Any, **options: Any) -> str:
        written = self._calculation(binary, **options)
        return str(super().visit_binary(binary, *positional, **options)) if written is None else written

    def _calculation(self, binary: BinaryExpression[Any], **options: Any) -> str | None:
        """Write a calculation of a program with moments, whose spans are as SQLAlchemy stores them: after 1970."""
        left_type, right = undecorated(binary.left.type), undecorated(binary.right.type)
        if binary.operator not in {operators.add, operators.sub} or not isinstance(left_type, sa.DateTime):
            return None
        if not isinstance(right, sa.Interval | sa.DateTime) or not self.is_about_library:
            return None
        left, second = (self.process(part, **options) for part in (binary.left, binary.right))
        if isinstance(right, sa.Interval):
            seconds = self.epoch(second)
            return self.moved(left, seconds if binary.operator is operators.add else f"-({seconds})")
        return self.moved(_EPOCH, f"{self.epoch(left)} - {self.epoch(second)}")

    def visit_bindparam(self, bindparam: Any, *positional: Any, **options: Any) -> str:
        """Convert a moment to UTC for a table of the library also where its column has no time zone.

        That may be the ``run_at`` of a queue, with which the clock in UTC is compared.
        """
        if type(bindparam.type) in _MOMENTS and not bindparam.type.timezone and self.is_about_library:
            bindparam = sa.type_coerce(bindparam, _IN_UTC).typed_expression
        return str(super().visit_bindparam(bindparam, *positional, **options))

    def visit_now_func(self, function: Any, **options: Any) -> str:
        """Write the moment in UTC where it meets others in UTC; a program's others are the dialect's."""
        if self.is_about_zones:
            return str(self.process(clock(), **options))
        visit = getattr(super(), "visit_now_func", None)
        return str(f"now{self.function_argspec(function)}" if visit is None else visit(function, **options))


@compiles(SecondsOf, *OTHERS)
def _seconds_of(element: SecondsOf, compiler: Any, **options: Any) -> str:
    return str(compiler.process(element.expr, **options))


@compiles(JsonArray, *OTHERS)
def _json_array(element: JsonArray, compiler: Any, **options: Any) -> str:
    return f"json_array({', '.join(arguments(element, compiler, **options))})"


@compiles(ForEffect, *OTHERS)
def _effect(element: ForEffect, compiler: Any, **options: Any) -> str:
    # On an engine that is not prepared it may be the only part of a statement by which that is refused.
    is_prepared = engine_of(compiler.dialect) is not None
    return "1 = 1" if is_prepared else str(compiler.visit_binary(element, **options))


@compiles(ServerDefault, *OTHERS)
def _server_default(element: ServerDefault, compiler: Any, **options: Any) -> str:
    return arguments(element, compiler, **options)[0]


@compiles(KeyInIndex, *OTHERS)
def _key_in_index(element: KeyInIndex, compiler: Any, **options: Any) -> str:
    return str(compiler.process(element.else_, **options))


@compiles(InRecovery, *OTHERS)
def _in_recovery(*_: Any, **__: Any) -> str:
    return "0"


def setting_as(settings: Mapping[str, str], element: ServerSetting, compiler: Any, **options: Any) -> str:
    """Return the counterpart of a setting of PostgreSQL, and NULL for one without.

    The server compares the name, which is a parameter: statements that differ in it only are compiled once.

    :param settings: the SQL of the counterparts, by PostgreSQL's names.
    """
    name = arguments(element, compiler, **options)[0]
    cases = " ".join(f"WHEN '{known}' THEN {rendered}" for known, rendered in settings.items())
    return f"CASE {name} {cases} END"


def among_rows(element: AmongRows, compiler: Any, **options: Any) -> str:
    """Return the condition that a value is among the rows of a SELECT."""
    value, rows = (compiler.process(part, **options) for part in (element.left, element.rows))
    return f"{value} IN {rows}"


def moment_and_seconds(element: MovedMoment, compiler: Any, **options: Any) -> tuple[str, str]:
    """Return the SQL of a moment, and of the seconds by which it is moved."""
    moment, seconds = (compiler.process(part, **options) for part in (element.left, element.right))
    return moment, seconds if element.operator is operators.add else f"-({seconds})"


def arguments(function: Any, compiler: Any, **options: Any) -> list[str]:
    """Return the SQL of the arguments of a function."""
    return [compiler.process(argument, **options) for argument in function.clauses]
