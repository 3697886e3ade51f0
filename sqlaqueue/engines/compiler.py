"""What the compilers of all other engines translate in the same way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import sqlalchemy as sa
from sqlalchemy.sql import operators
from sqlalchemy.sql.elements import BinaryExpression, CollectionAggregate, Grouping, _truncated_label
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.sql.selectable import CTE
from sqlalchemy.util import memoized_property

from sqlaqueue.engines.shared import SpanInSeconds, has_zone, undecorated
from sqlaqueue.postgresql.ddl import queue_of
from sqlaqueue.sql.engine import plain_form
from sqlaqueue.sql.types import Span


def elements(statement: Any) -> Iterator[Any]:
    """Yield a statement and all elements in it."""
    seen, stack = set(), [statement]
    while stack:
        element = stack.pop()
        if id(element) in seen:
            continue
        seen.add(id(element))
        yield element
        stack.extend(element.get_children())
        # The tables of an UPDATE are known by its columns only.
        table = getattr(element, "table", None)
        if isinstance(table, CTE):
            stack.append(table)


# Only the library's statements and functions are translated. A program uses a prepared engine for its own tables as
# well, and what it writes for these keeps its meaning.

_PREFIX = "sqlaqueue_"
_CLOCKS = frozenset({"statement_timestamp", "clock_timestamp"})


def is_ours(table: Any) -> bool:
    """Return whether a table is one of a queue, or one of those that the library adds."""
    return isinstance(table, sa.Table) and (table.name.startswith(_PREFIX) or queue_of(table) is not None)


def is_translated(statement: Any) -> bool:
    """Return whether a statement is about such a table, or calls the clock of the library.

    A program does not call it, as the functions are PostgreSQL's. Nothing else decides: SQLAlchemy caches what a
    statement is compiled to by its structure.
    """
    return any(
        is_ours(getattr(each, "table", each)) or (isinstance(each, FunctionElement) and each.name in _CLOCKS)
        for each in elements(statement)
    )


def has_spans(column: Any) -> bool:
    """Return whether a column of a span is the library's own, which has a number of seconds.

    Interval columns of the application keep SQLAlchemy's encoding, a datetime after 1970.
    """
    return isinstance(getattr(column, "type", None), Span)


def uses_zones(statement: Any) -> bool:
    """Return whether a statement is about a moment with a time zone, which a prepared engine has in UTC."""
    for each in elements(statement):
        table = getattr(each, "table", each)
        columns = table.c if isinstance(table, sa.Table) else [each]
        if any(has_zone(getattr(column, "type", None)) for column in columns):
            return True
    return False


_IN_SPAN = "_sqlaqueue_in_span"

_MOMENTS = {sa.DateTime, sa.DATETIME, sa.TIMESTAMP}
_IN_UTC = sa.DateTime(timezone=True)

_Compiler: Any = object
"""Stands for the compiler of a dialect, whose methods a subclass inherits after those of this class."""


class TranslatingCompiler(_Compiler):
    """Compiles statements that are written for PostgreSQL. A subclass names the compiler of its dialect beside it.

    No method may choose what it renders by the value of a parameter: SQLAlchemy executes what was compiled once with
    other values as well.
    """

    @memoized_property
    def translates(self) -> bool:
        """Whether constructs that the dialect has as well are translated, see :func:`is_translated`."""
        # Without a statement it compiles parts of a table.
        return self.statement is not None and is_translated(self.statement)

    # -- what an engine has to give ------------------------------------------------------------------------

    def now(self, **options: Any) -> str:
        raise NotImplementedError

    def moved(self, moment: str, seconds: str) -> str:
        raise NotImplementedError

    def epoch(self, moment: str) -> str:
        raise NotImplementedError

    def each_value(self, array: str) -> str:
        """Return a SELECT of the values of a JSON array."""
        raise NotImplementedError

    def _plain_or(self, visit: Callable[..., Any], element: Any, *positional: Any, **options: Any) -> str:
        """Render the plain form of an element that has one; otherwise the element by ``visit``."""
        plain = plain_form(element)
        return str(visit(element, *positional, **options) if plain is None else self.process(plain, **options))

    def visit_select(self, select: Any, *positional: Any, **options: Any) -> str:
        return self._plain_or(super().visit_select, select, *positional, **options)

    def visit_compound_select(self, compound: Any, *positional: Any, **options: Any) -> str:
        return self._plain_or(super().visit_compound_select, compound, *positional, **options)

    def visit_function(self, func: Any, *positional: Any, **options: Any) -> str:
        return self._plain_or(super().visit_function, func, *positional, **options)

    def visit_cast(self, cast: Any, **options: Any) -> str:
        return self._plain_or(self.cast_to if self.translates else super().visit_cast, cast, **options)

    def cast_to(self, cast: Any, **options: Any) -> str:
        raise NotImplementedError

    def visit_textclause(self, textclause: Any, *positional: Any, **options: Any) -> str:
        return self._plain_or(super().visit_textclause, textclause, *positional, **options)

    def visit_case(self, clause: Any, **options: Any) -> str:
        return self._plain_or(super().visit_case, clause, **options)

    # -- expressions -----------------------------------------------------------------------------------------

    def visit_binary(self, binary: BinaryExpression[Any], *positional: Any, **options: Any) -> str:
        plain = plain_form(binary)
        if plain is not None:
            return str(self.process(plain, **options))
        if _is_any_of_array(binary):
            return self._any_of(binary, **options)
        is_moment = (
            binary.operator in {operators.add, operators.sub}
            and isinstance(undecorated(binary.left.type), sa.DateTime)
            and self.translates
        )
        if is_moment and isinstance(undecorated(binary.right.type), sa.Interval):
            moment, seconds = self.process(binary.left, **options), self._seconds(binary.right, **options)
            return self.moved(moment, seconds if binary.operator is operators.add else f"-({seconds})")
        if is_moment and binary.operator is operators.sub and isinstance(undecorated(binary.right.type), sa.DateTime):
            later, earlier = (self.epoch(self.process(part, **options)) for part in (binary.left, binary.right))
            return f"({later} - {earlier})"
        return str(super().visit_binary(binary, *positional, **options))

    def _seconds(self, span: Any, **options: Any) -> str:
        is_span = isinstance(undecorated(getattr(span, "type", None)), sa.Interval)
        if is_span and isinstance(span, sa.ColumnClause) and not has_spans(span):
            # A column of the program.
            return self.epoch(self.process(span, **options))
        before = self.__dict__.get(_IN_SPAN, False)
        self.__dict__[_IN_SPAN] = True
        try:
            return str(self.process(span, **options))
        finally:
            self.__dict__[_IN_SPAN] = before

    def visit_bindparam(self, bindparam: Any, *positional: Any, **options: Any) -> str:
        """Send a span as a number of seconds where it is added to a moment, or meets a column of the library.

        A moment is converted to UTC for a table of the library also where its column has no time zone: that may be the
        ``run_at`` of a queue, with which the clock in UTC is compared.
        """
        type_: Any = None
        if isinstance(bindparam.type, sa.Interval) and (self.__dict__.get(_IN_SPAN) or self._has_spans):
            type_ = SpanInSeconds()
        elif type(bindparam.type) in _MOMENTS and not bindparam.type.timezone and self.translates:
            type_ = _IN_UTC
        if type_ is not None:
            # SQLAlchemy finds the value of the original by the key.
            bindparam = bindparam._clone(maintain_key=True)  # noqa: SLF001 - not public
            bindparam.type = type_
        return str(super().visit_bindparam(bindparam, *positional, **options))

    def _add_to_result_map(self, keyname: Any, name: Any, objects: Any, type_: Any) -> None:
        if isinstance(type_, sa.Interval) and self.translates:
            type_ = SpanInSeconds()
        super()._add_to_result_map(keyname, name, objects, type_)

    @memoized_property
    def _has_spans(self) -> bool:
        """Whether the statement is about columns of spans that are the library's own."""
        parts = () if self.statement is None else elements(self.statement)
        tables = {getattr(each, "table", each) for each in parts}
        return any(has_spans(column) for table in tables if isinstance(table, sa.Table) for column in table.c)

    def _any_of(self, binary: BinaryExpression[Any], **options: Any) -> str:
        left, array = self.process(binary.left, **options), binary.right.element
        array = getattr(array, "element", array) if type(array).__name__ == "Grouping" else array
        if isinstance(array, FunctionElement) and array.name == "array":
            return self.among_rows(left, array.clauses.clauses[0], **options)
        return self.among_values(left, array, **options)

    def among_rows(self, left: str, rows: Any, **options: Any) -> str:
        # It is in parentheses.
        rendered = self.process(rows, **options)
        return f"{left} IN {rendered if rendered.startswith('(') else f'({rendered})'}"

    def among_values(self, left: str, array: Any, **options: Any) -> str:
        return f"{left} IN ({self.each_value(self.process(array, **options))})"

    def visit_extract(self, extract: Any, **options: Any) -> str:
        """Translate the seconds of a moment, and those between two."""
        if extract.field != "epoch" or not self.translates:
            return str(super().visit_extract(extract, **options))
        inner = extract.expr
        while type(inner).__name__ == "Grouping":
            inner = inner.element
        if isinstance(undecorated(inner.type), sa.Interval):
            return self._seconds(inner, **options)
        if isinstance(inner, BinaryExpression) and isinstance(undecorated(inner.right.type), sa.DateTime):
            # An interval is a number of seconds here.
            return str(self.process(inner, **options))
        return self.epoch(self.process(inner, **options))

    def visit_statement_timestamp_func(self, _: Any, **options: Any) -> str:
        return self.now(**options)

    visit_clock_timestamp_func = visit_statement_timestamp_func

    def visit_now_func(self, function: Any, **options: Any) -> str:
        """Translate the moment where it meets those in UTC; a program's others are the dialect's."""
        translates = self.translates or (self.statement is not None and uses_zones(self.statement))
        return self.now(**options) if translates else self._as_before(function, **options)

    def visit_to_timestamp_func(self, function: Any, **options: Any) -> str:
        return self.moved("'1970-01-01 00:00:00.000000'", self._arguments(function, **options)[0])

    def key_hash(self, values: list[str]) -> str:
        """Return the hash of some values, a number that is not negative; NULL is a value like any other."""
        raise NotImplementedError

    def visit_hash_record_extended_func(self, function: Any, **options: Any) -> str:
        """Render the hash of a key of limits, rates or turns."""
        row, *_ = function.clauses
        return self.key_hash(self._arguments(row, **options))

    def visit_set_config_func(self, function: Any, **options: Any) -> str:
        """Render NULL: the engine has no setting of this name, and each caller may do without it."""
        return "NULL"

    settings: ClassVar[Mapping[str, str]] = {
        "transaction_isolation": "'read committed'",
        "transaction_read_only": "'off'",
    }
    """The SQL of PostgreSQL's settings that have a counterpart, by their names."""

    def visit_current_setting_func(self, function: Any, **options: Any) -> str:
        """Render the counterpart of PostgreSQL's setting, and NULL for one without.

        The server compares the name, which is a parameter: statements that differ in it only are compiled once.
        """
        name = self._arguments(function, **options)[0]
        cases = " ".join(f"WHEN '{known}' THEN {rendered}" for known, rendered in self.settings.items())
        return f"CASE {name} {cases} END"

    def visit_lateral(self, lateral_: Any, **kw: Any) -> str:
        """Refuse what has no plain form: neither SQLite nor MariaDB 10.6 has LATERAL."""
        raise NotImplementedError(f"LATERAL {lateral_.name}")

    def visit_pg_is_in_recovery_func(self, _: Any, **__: Any) -> str:
        """Render false: no replica is known to be one."""
        return "0"

    def visit_jsonb_build_array_func(self, function: Any, **options: Any) -> str:
        return f"json_array({', '.join(self._arguments(function, **options))})"

    def alias_of(self, element: Any) -> str:
        name = element.name
        if isinstance(name, _truncated_label):
            name = self._truncated_identifier("alias", name)
        return str(self.preparer.quote(name))

    def _as_before(self, function: Any, **options: Any) -> str:
        visit = getattr(super(), f"visit_{function.name}_func", None)
        if visit is not None:
            return str(visit(function, **options))
        return f"{function.name}{self.function_argspec(function, **options)}"

    def _arguments(self, function: Any, **options: Any) -> list[str]:
        return [self.process(argument, **options) for argument in function.clauses]


def _is_any_of_array(binary: BinaryExpression[Any]) -> bool:
    """Return whether a value is compared with ``ANY`` of an array: one of ``array(SELECT ..)``, or a parameter.

    Any other comparison of the program with ANY or ALL is left to its dialect.
    """
    right = binary.right
    if not isinstance(right, CollectionAggregate) or binary.operator is not operators.eq:
        return False
    if right.operator is not operators.any_op:
        return False
    array: Any = right.element
    array = array.element if isinstance(array, Grouping) else array
    is_array = isinstance(array.type, sa.ARRAY) or hasattr(array.type, "element")
    return is_array or (isinstance(array, FunctionElement) and array.name == "array")
