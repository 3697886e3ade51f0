"""Translates statements that are written for PostgreSQL."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import sqlalchemy as sa
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql import operators
from sqlalchemy.sql.selectable import CTE
from sqlalchemy.sql.visitors import replacement_traverse

from sqlaqueue.engines.compiler import TranslatingCompiler
from sqlaqueue.engines.shared import undecorated
from sqlaqueue.engines.verbs import among_step
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
from sqlaqueue.mariadb.changes import ReturningCompiler, as_rendered, inserted_place
from sqlaqueue.mariadb.tables import UniqueStatements
from sqlaqueue.postgresql.due_times import WRITTEN_ROWS
from sqlaqueue.postgresql.side_tables import HasName
from sqlaqueue.strategies.columns import AmongLocked

NOW = "UTC_TIMESTAMP(6)"
_ALL = 2**64 - 1
_LEFT = "/*left*/"
"""Stands for the SQL of a value that is searched for, until the condition around it is rendered."""
NOTIFICATIONS = "sqlaqueue_notifications"
"""The attribute of a compiled statement with the names of the parameters of what it sends when it is executed."""


class StatementCompiler(UniqueStatements, TranslatingCompiler, ReturningCompiler):
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

    # -- rows that are given to a change -----------------------------------------------------------------------

    def visit_cte(self, cte: CTE, asfrom: bool = False, **options: Any) -> Any:  # noqa: FBT002 - SQLAlchemy's signature
        """Render a CTE of an UPDATE or DELETE in the place where it is read: these cannot begin with WITH."""
        if not self.statement.is_dml or self.statement.is_insert:
            return super().visit_cte(cte, asfrom=asfrom, **options)
        if cte.recursive:
            msg = f"the recursive CTE {cte.name}: MariaDB has no UPDATE and no DELETE with a CTE; select the keys first"
            raise StatementError(msg)
        name = self.preparer.quote(str(cte.name))
        if not asfrom:
            return name
        linter = options.pop("from_linter", None)
        if linter is not None:
            linter.froms[cte._de_clone()] = cte.name  # noqa: SLF001 - the linter's key, as in SQLAlchemy's method
        for option in ("ashint", "fromhints", "cte_opts", "visiting_cte", "lateral", "iscrud"):
            options.pop(option, None)
        outer, self._cte = self._cte, cte
        rendered = self.process(cte.element, asfrom=True, **options)
        self._cte = outer
        return f"({rendered}) AS {name}"

    _cte: CTE | None = None
    """The CTE that is being rendered in its place."""

    def for_update_clause(self, select: Any, **options: Any) -> str:
        """Leave out the locks of a step that was executed before; refuse those of a program, as no row is locked."""
        if self._cte is None:
            return str(super().for_update_clause(select, **options))
        if not self._cte.name.startswith("sqlaqueue_"):
            msg = (
                f"the CTE {self._cte.name} locks rows, which MariaDB cannot do within another statement; execute it "
                "first, by itself, and give the keys to the statement"
            )
            raise StatementError(msg)
        return ""

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
        """Translate ``unnest()`` of several arrays, with the number of each row."""
        function = element.element
        if getattr(function, "name", None) != "unnest" or not options.get("asfrom"):
            return str(super().visit_table_valued_alias(element, **options))
        arguments = [self.process(argument) for argument in function.clause_expr.element.clauses]
        table = self.alias_of(element)
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
        return inserted_place(names, table.fullname)

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


@compiles(HasName, "mariadb", "mysql")
def _render_has_name(element: HasName, compiler: Any, **options: Any) -> str:
    names, name = (compiler.process(each, **options) for each in element.clauses)
    return f"JSON_CONTAINS({names}, JSON_QUOTE({name}))"


@compiles(AmongLocked, "mariadb", "mysql")
def _render_among_locked(element: AmongLocked, compiler: Any, **options: Any) -> str:
    """Render the keys of the rows that have been locked before."""
    key, _ = element.clauses
    return str(compiler.process(among_step([key]), **options))
