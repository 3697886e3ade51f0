"""Translates statements that are written for PostgreSQL."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import sqlalchemy as sa
from sqlalchemy.dialects.mysql.base import MySQLCompiler
from sqlalchemy.sql import operators
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.sql.selectable import CTE
from sqlalchemy.sql.visitors import replacement_traverse

from sqlaqueue.engines.compiler import TranslatingCompiler
from sqlaqueue.engines.shared import undecorated
from sqlaqueue.engines.steps import is_step, keys_in, rows_parameter
from sqlaqueue.exc import StatementError
from sqlaqueue.flow_control.functions import CONTENDED
from sqlaqueue.mariadb.base import (
    JSON_TEXT,
    LOCK_TIMEOUT,
    binary_collation,
    ignoring_duplicates,
    in_order_of_assignment,
    is_ignoring,
    json_type,
)
from sqlaqueue.mariadb.changes import NEW, as_rendered, divided, hint_of, index_to_lock_by, keys_place, step_and_numbers
from sqlaqueue.mariadb.tables import UniqueStatements, duplicates_table, index_name
from sqlaqueue.postgresql.due_times import WRITTEN_ROWS
from sqlaqueue.sql.engine import plain_form

NOW = "UTC_TIMESTAMP(6)"
_ALL = 2**64 - 1
_LEFT = "/*left*/"
"""Stands for the SQL of a value that is searched for, until the condition around it is rendered."""
NOTIFICATIONS = "sqlaqueue_notifications"
"""The attribute of a compiled statement with the names of the parameters of what it sends when it is executed."""


class _RowsOfStep(FunctionElement[Any]):
    """The rows of a CTE that was executed before, from the JSON in a parameter."""

    name = "sqlaqueue_rows"
    inherit_cache = True


_Compiler: Any = MySQLCompiler


class StatementCompiler(UniqueStatements, TranslatingCompiler, _Compiler):
    settings: ClassVar[Mapping[str, str]] = {
        "transaction_isolation": "LOWER(REPLACE(@@tx_isolation, '-', ' '))",
        CONTENDED: "CONVERT(@sqlaqueue_contended USING utf8mb4)",
        "transaction_read_only": "IF(@@tx_read_only OR @@read_only, 'on', 'off')",
    }

    # -- moments -------------------------------------------------------------------------------------------

    def now(self, **_: Any) -> str:
        """Return the clock in UTC, which is that of the beginning of the statement."""
        return NOW

    def moved(self, moment: str, seconds: str) -> str:
        """Return the sum, exact to the microsecond."""
        return f"({moment} + INTERVAL ROUND(({seconds}) * 1000000) MICROSECOND)"

    def epoch(self, moment: str) -> str:
        """Return the difference to the epoch, as a DOUBLE."""
        return f"(TIMESTAMPDIFF(MICROSECOND, TIMESTAMP '1970-01-01 00:00:00', {moment}) * 1e-6)"

    def key_hash(self, values: list[str]) -> str:
        """Return 60 bits of a digest."""
        return f"CAST(CONV(LEFT(SHA2(JSON_ARRAY({', '.join(values)}), 256), 15), 16, 10) AS SIGNED)"

    def visit_to_timestamp_func(self, function: Any, **options: Any) -> str:
        """Return the moment some seconds after the epoch."""
        return self.moved("TIMESTAMP '1970-01-01 00:00:00.000000'", self._arguments(function, **options)[0])

    # -- rows of steps -----------------------------------------------------------------------------------------

    def visit_cte(self, cte: CTE, asfrom: bool = False, **options: Any) -> Any:  # noqa: FBT002 - SQLAlchemy's signature
        """Render a CTE in the place where it is read: an UPDATE or DELETE cannot begin with WITH."""
        divides = self.statement.is_dml and self.statement.is_update and self.statement._returning  # noqa: SLF001 - not public
        if cte.recursive and divides:
            msg = (
                f"the recursive CTE {cte.name}: MariaDB has no UPDATE .. RETURNING, and none with a CTE; select the "
                "keys first, and give them to the UPDATE"
            )
            raise StatementError(msg)
        if cte.recursive or not (self.translates or divides):
            return super().visit_cte(cte, asfrom=asfrom, **options)
        name = self.preparer.quote(str(cte.name))
        if not asfrom:
            return name
        linter = options.pop("from_linter", None)
        if linter is not None:
            linter.froms[cte._de_clone()] = cte.name  # noqa: SLF001 - the linter's key, as in SQLAlchemy's method
        for option in ("ashint", "fromhints", "cte_opts", "visiting_cte", "lateral", "iscrud"):
            options.pop(option, None)
        rows: Any = self._substitute(cte)
        return f"({self.process(getattr(rows, 'element', rows), asfrom=True, **options)}) AS {name}"

    def _substitute(self, cte: CTE) -> Any:
        if not self.translates or not is_step(cte, locks_apart=True):
            return super()._substitute(cte)
        element: Any = cte.element
        if element.is_dml and element.is_update and len(keys_in(cte)) < len(cte.c):
            return self._read_again(cte, element.table)
        columns = [sa.column(f"c{number}", column.type) for number, column in enumerate(cte.c)]
        rows = _RowsOfStep(rows_parameter(cte)).table_valued(*(columns or [sa.column("c0")]), name=f"{cte.name}_rows")
        values = [self._value(rows.c[number], column) for number, column in enumerate(cte.c)]
        return sa.select(*(values or [sa.literal_column("1")])).select_from(rows)

    def _read_again(self, cte: CTE, table: sa.Table) -> Any:
        """Return a SELECT of the rows that an UPDATE has changed: not by way of JSON, which rounds numbers."""
        columns = [next(its for its in table.c if column.shares_lineage(its)).label(column.name) for column in cte.c]
        names = [self.process(key) for key in table.primary_key]
        changed = keys_place(names, str(cte.name), range(len(names)))
        read = sa.select(*columns).select_from(table).where(as_rendered(changed))
        return read.with_hint(table, "FORCE INDEX (PRIMARY)")

    def _value(self, value: Any, column: Any) -> Any:
        type_ = undecorated(column.type)
        if isinstance(type_, sa.LargeBinary):
            return sa.func.unhex(value, type_=column.type).label(column.name)
        if isinstance(type_, sa.String) and not isinstance(type_, sa.Enum):
            return sa.collate(value, binary_collation(self.dialect)).label(column.name)
        return value.label(column.name)

    def among_rows(self, left: str, rows: Any, **options: Any) -> str:
        """Return the condition on keys of a step, which are written into the statement when it is executed."""
        step = step_and_numbers(rows)
        return super().among_rows(left, rows, **options) if step is None else keys_place([left], *step)

    def among_values(self, left: str, array: Any, **options: Any) -> str:
        """Return the condition with each value, since the server would not look up those in a JSON array by index."""
        if not isinstance(array, sa.BindParameter):
            return super().among_values(left, array, **options)
        values: Any = array._clone(maintain_key=True)  # noqa: SLF001 - so that it still has the value of the original
        array_type: Any = array.type
        values.type = array_type.element if hasattr(array_type, "element") else array_type.item_type
        values.expanding = True
        rendered = str(self.process(sa.literal_column(_LEFT, values.type).in_(values), **options))
        # Not a part of what was rendered, which would double each percent sign in it.
        return rendered.replace(_LEFT, left, 1)

    def each_value(self, array: str) -> str:
        values = f"JSON_TABLE({array}, '$[*]' COLUMNS (value {JSON_TEXT} PATH '$')) AS each_value"
        return f"SELECT value FROM {values}"  # noqa: S608 - the array is a parameter

    def visit_table_valued_alias(self, element: Any, **options: Any) -> str:
        """Translate the rows of a step, and ``unnest()`` of several arrays with the number of each row."""
        function = element.element
        name = getattr(function, "name", None)
        if name not in {"unnest", _RowsOfStep.name} or not options.get("asfrom"):
            return str(super().visit_table_valued_alias(element, **options))
        arguments = [self.process(argument) for argument in function.clause_expr.element.clauses]
        table = self.alias_of(element)
        if name == _RowsOfStep.name:
            columns = ", ".join(
                f"{column.name} {json_type(column.type)} PATH '$[{number}]'" for number, column in enumerate(element.c)
            )
            return f"JSON_TABLE({arguments[0]}, '$[*]' COLUMNS ({columns})) AS {table}"
        names = [self.preparer.quote(column.name) for column in element.c]
        types = [json_type(column.type) for column in element.c]
        numbered = "number FOR ORDINALITY, value"
        arrays = [
            f"JSON_TABLE({array}, '$[*]' COLUMNS ({numbered} {types[number]} PATH '$'))"
            for number, array in enumerate(arguments)
        ]
        collations = [f" COLLATE {binary_collation(self.dialect)}" if each == JSON_TEXT else "" for each in types]
        shown = [
            f"array_{number}.value{collations[number]} AS {each}" for number, each in enumerate(names[: len(arguments)])
        ]
        shown += [f"array_0.number AS {each}" for each in names[len(arguments) :]]
        # Because of the limit the server stores the rows, and gives them an index: otherwise each would meet each. It
        # takes the arrays in this order: to compare all orders of ten takes it seconds.
        joins = "".join(
            f" STRAIGHT_JOIN (SELECT number, value FROM {array} AS array_of LIMIT {_ALL}) AS array_{number} "  # noqa: S608 - its parts are constants
            f"ON array_{number}.number = array_0.number"
            for number, array in enumerate(arrays[1:], start=1)
        )
        return f"(SELECT {', '.join(shown)} FROM {arrays[0]} AS array_0{joins}) AS {table}"  # noqa: S608 - the names are quoted

    # -- locks and changes ---------------------------------------------------------------------------------------

    def visit_select(self, select: Any, *positional: Any, **options: Any) -> str:
        """Lock rows by the index that finds them, as a scan locks every row that it looks at."""
        if getattr(select, "_for_update_arg", None) is not None and plain_form(select) is None:
            hint = index_to_lock_by(self, select)
            if hint is not None:
                select = select.with_hint(*hint)
        searched = None if plain_form(select) is not None else duplicates_table(select)
        if searched is not None:
            # A search without this index raises an error, as jobs are not unique then.
            index = index_name(getattr(searched, "element", searched))
            select = select.with_hint(searched, hint_of(self, index))
        return str(super().visit_select(select, *positional, **options))

    def visit_update(self, update_stmt: Any, visiting_cte: Any = None, **options: Any) -> str:
        return self._divided(super().visit_update, update_stmt, visiting_cte, **options)

    def visit_delete(self, delete_stmt: Any, visiting_cte: Any = None, **options: Any) -> str:
        return self._divided(super().visit_delete, delete_stmt, visiting_cte, **options)

    def _divided(self, visit: Any, statement: Any, visiting_cte: Any, **options: Any) -> str:
        # The whole statement is rendered even if it is divided: that tells the result which columns it has.
        before = self.__dict__.get("_sqlaqueue_parts")
        self._sqlaqueue_parts: str | None = None
        rendered: str = visit(statement, visiting_cte, **options)
        parts, self._sqlaqueue_parts = self.__dict__["_sqlaqueue_parts"], before
        return rendered if parts is None else str(parts)

    def returning_clause(self, stmt: Any, returning_cols: Any, **options: Any) -> str:
        """Render the parts of a change while its statement, after the ORM has translated it, is known."""
        rendered: str = super().returning_clause(stmt, returning_cols, **options)
        if stmt.is_update or (stmt.is_delete and (self.translates or not self.dialect.is_mariadb)):
            self._sqlaqueue_parts = divided(self, stmt, returning_cols, rendered.removeprefix("RETURNING "))
        return rendered

    # -- inserts ---------------------------------------------------------------------------------------------------

    def visit_insert(self, insert_stmt: Any, visited_bindparam: Any = None, visiting_cte: Any = None, **kw: Any) -> str:
        """Render an INSERT that leaves existing rows; some as INSERT IGNORE, see :mod:`sqlaqueue.mariadb.base`."""
        clause = insert_stmt._post_values_clause  # noqa: SLF001 - not public
        ignores = getattr(clause, "__visit_name__", "") == "on_conflict_do_nothing" and is_ignoring(insert_stmt)
        if ignores:
            insert_stmt = insert_stmt.prefix_with("IGNORE")
        rendered: str = super().visit_insert(insert_stmt, visited_bindparam, visiting_cte, **kw)
        return ignoring_duplicates(rendered, clause, insert_stmt.table) if ignores else rendered

    def visit_on_conflict_do_nothing(self, _: Any, **__: Any) -> str:
        """Render a change that changes nothing. It ignores no other error, but it counts the existing rows."""
        statement: Any = self.stack[-1]["selectable"]
        if is_ignoring(statement):
            return ""
        table = statement.table
        first = self.preparer.format_column(next(iter(table.primary_key or table.c)))
        return f"ON DUPLICATE KEY UPDATE {first} = {self.preparer.format_table(table)}.{first}"

    def visit_on_conflict_do_update(self, clause: Any, **options: Any) -> str:
        statement: Any = self.stack[-1]["selectable"]

        def proposed(element: Any, **_: Any) -> Any:
            if isinstance(getattr(element, "table", None), sa.Alias) and element.table.name == "excluded":
                return as_rendered(f"VALUES({self.preparer.quote(element.name)})", element.type)
            return None

        condition = clause.update_whereclause
        values: dict[Any, Any] = {}
        for name, given in dict(clause.update_values_to_set).items():
            column = statement.table.c[name] if isinstance(name, str) else name
            value: Any = given if isinstance(given, sa.ClauseElement) else sa.literal(given, column.type)
            if isinstance(value, sa.BindParameter) and value.type._isnull:  # noqa: SLF001 - not public
                value = value._with_binary_element_type(column.type)  # noqa: SLF001 - SQLAlchemy has no public name for it
            if condition is not None:
                value = sa.case((condition, value), else_=column)
            values[column] = replacement_traverse(value, {}, proposed)
        assignments = [
            f"{self.preparer.quote(column.name)} = {self.process(values[column].self_group(), **options)}"
            for column in in_order_of_assignment(values, statement.table)
        ]
        return f"ON DUPLICATE KEY UPDATE {', '.join(assignments)}"

    # -- functions -----------------------------------------------------------------------------------------------

    def cast_to(self, cast: Any, **options: Any) -> str:
        """Leave out the casts to types that the server does not have."""
        target, inner = undecorated(cast.type.dialect_impl(self.dialect)), cast.clause
        plain = undecorated(cast.type)
        text = str(self.process(inner, **options))
        if isinstance(undecorated(inner.type), sa.Uuid) and isinstance(target, sa.String):
            text = f"REPLACE({text}, '-', '')"
            for place in (9, 14, 19, 24):
                text = f"INSERT({text}, {place}, 0, '-')"
            return text
        if isinstance(target, sa.String) and not isinstance(target, sa.Enum):
            length, binary = getattr(target, "length", None), binary_collation(self.dialect)
            return (
                f"LEFT({text}, {length})" if length else f"CAST({text} AS CHAR CHARACTER SET utf8mb4) COLLATE {binary}"
            )
        if isinstance(plain, sa.Integer):
            return f"CAST({text} AS SIGNED)"
        if isinstance(plain, sa.Float):
            return f"CAST({text} AS DOUBLE)"
        return text

    def visit_greatest_func(self, function: Any, **options: Any) -> str:
        """Render the greatest value; PostgreSQL passes over NULL, MariaDB returns it."""
        return self._extreme("GREATEST", function, **options)

    def visit_least_func(self, function: Any, **options: Any) -> str:
        return self._extreme("LEAST", function, **options)

    def _extreme(self, name: str, function: Any, **options: Any) -> str:
        if not self.translates:
            return self._as_before(function, **options)
        first, *others = self._arguments(function, **options)
        for other in others:
            first = f"COALESCE({name}({first}, {other}), {first}, {other})"
        return first

    def visit_concat_func(self, function: Any, **options: Any) -> str:
        if not self.translates:
            return self._as_before(function, **options)
        given = [f"COALESCE({each}, '')" for each in self._arguments(function, **options)]
        return f"CONCAT({', '.join(given)})"

    def visit_array_agg_func(self, function: Any, **options: Any) -> str:
        return f"JSON_ARRAYAGG({', '.join(self._arguments(function, **options))})"

    def visit_funcfilter(self, funcfilter: Any, **options: Any) -> str:
        """Render an aggregate of some rows: NULL, which aggregates pass over, stands for the others."""
        condition = self.process(funcfilter.criterion, **options)
        arguments = self._arguments(funcfilter.func, **options)
        if funcfilter.func.name == "array_agg":
            # JSON_ARRAYAGG() does not pass over NULL.
            each = f"CASE WHEN {condition} THEN JSON_EXTRACT(JSON_ARRAY({arguments[0]}), '$[0]') END"
            return f"CONCAT('[', GROUP_CONCAT({each} SEPARATOR ', '), ']')"
        counted = "1" if arguments in ([], ["*"]) else arguments[0]
        return f"{funcfilter.func.name}(CASE WHEN {condition} THEN {counted} END)"

    def visit_nulls_first_op_unary_modifier(self, unary: Any, _: Any, **options: Any) -> str:
        """Order NULL before other values, where it is in an ascending order anyway."""
        return self._with_nulls("IS NOT NULL", unary.element, in_place=operators.asc_op, **options)

    def visit_nulls_last_op_unary_modifier(self, unary: Any, _: Any, **options: Any) -> str:
        """Order NULL behind other values, where it is in a descending order anyway."""
        return self._with_nulls("IS NULL", unary.element, in_place=operators.desc_op, **options)

    def _with_nulls(self, condition: str, ordered: Any, *, in_place: Any, **options: Any) -> str:
        direction = getattr(ordered, "modifier", None)
        text = str(self.process(ordered, **options))
        if (direction or operators.asc_op) is in_place:
            return text
        value = ordered.element if direction is not None else ordered
        return f"{self.process(value, **options)} {condition}, {text}"

    def visit_set_config_func(self, function: Any, **options: Any) -> str:
        """Render the value, and note the names of the parameters, see :mod:`sqlaqueue.mariadb.base`."""
        name, value, *_ = function.clauses
        # An INSERT restores a limit, which is in force until the end of its transaction.
        if self.isinsert or not all(isinstance(each, sa.BindParameter) for each in (name, value)):
            return "NULL"
        self.process(name, **options)
        rendered: str = self.process(value, **options)
        self.__dict__[LOCK_TIMEOUT] = self.bind_names[name], self.bind_names[value]
        return rendered

    def visit_txid_current_func(self, _: Any, **__: Any) -> str:
        """Render a number that is the same within a transaction, and another one for each statement outside of any."""
        return "IF(@@autocommit, UUID_SHORT(), CONNECTION_ID())"

    def visit_sqlaqueue_written_here_func(self, function: Any, **_: Any) -> str:
        """Render the condition that a row is none of those before, see :mod:`sqlaqueue.mariadb.prepare`."""
        rows = function.__dict__[WRITTEN_ROWS]
        table = getattr(rows, "element", rows)
        names = [self.process(rows.c[key.key]) for key in table.primary_key]
        return keys_place(names, f"{NEW}{table.fullname}", range(len(names)))

    def visit_sqlaqueue_digest_func(self, function: Any, **options: Any) -> str:
        """Render a text that differs for rows that differ."""
        return f"SHA2(JSON_ARRAY({', '.join(self._arguments(function, **options))}), 256)"

    def visit_pg_notify_func(self, function: Any, **options: Any) -> str:
        """Render NULL, as the server sends no notifications, and note the parameters of what this process sends."""
        sent = [*function.clauses]
        if all(isinstance(argument, sa.BindParameter) for argument in sent):
            for argument in sent:
                self.process(argument, **options)
            names = tuple(self.bind_names[argument] for argument in sent)
            self.__dict__.setdefault(NOTIFICATIONS, []).append(names)
        return "NULL"
