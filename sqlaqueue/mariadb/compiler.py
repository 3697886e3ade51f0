"""Writes statements for MariaDB: the constructs of the library, changes that return rows, and INSERT .. ON CONFLICT."""

from __future__ import annotations

import json
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql import operators
from sqlalchemy.sql.selectable import CTE
from sqlalchemy.sql.visitors import replacement_traverse

from sqlaqueue.engines.compiler import ProgramsCompiler, among_rows, arguments, moment_and_seconds, setting_as
from sqlaqueue.engines.shared import undecorated
from sqlaqueue.engines.work import among_step
from sqlaqueue.exc import StatementError
from sqlaqueue.flow_control.functions import CONTENDED
from sqlaqueue.mariadb.base import (
    BYTES_IN_JSON,
    JSON_TEXT,
    LOCK_TIMEOUT,
    UNSIGNED,
    binary_collation,
    ignoring_duplicates,
    in_order_of_assignment,
    is_ignoring,
    json_type,
    letter_type,
)
from sqlaqueue.mariadb.changes import ReturningCompiler, as_rendered, inserted_place
from sqlaqueue.mariadb.tables import UniqueStatements
from sqlaqueue.postgresql.due_times import WrittenHere
from sqlaqueue.postgresql.side_tables import HasName, RowJson, StoredRows
from sqlaqueue.sql.portable import (
    AfterEpoch,
    Among,
    AmongRows,
    Clock,
    Collected,
    Converted,
    Elapsed,
    Epoch,
    Extreme,
    Filtered,
    Joined,
    KeyHash,
    MovedMoment,
    Notification,
    NullsPlaced,
    ServerSetting,
    SetSetting,
    TransactionNumber,
)
from sqlaqueue.sql.types import GivenRows
from sqlaqueue.strategies.columns import AmongLocked

NOW = "UTC_TIMESTAMP(6)"
_ALL = 2**64 - 1
NOTIFICATIONS = "sqlaqueue_notifications"
"""The attribute of a compiled statement with the names of the parameters of what it sends when it is executed."""


# -- expressions -------------------------------------------------------------------------------------------------------


@compiles(Clock, "mariadb", "mysql")
def _clock(*_: Any, **__: Any) -> str:
    """Return the clock in UTC, which is that of the beginning of the statement."""
    return NOW


def moved(moment: str, seconds: str) -> str:
    """Return the sum, exact to the microsecond."""
    return f"({moment} + INTERVAL ROUND(({seconds}) * 1000000) MICROSECOND)"


@compiles(MovedMoment, "mariadb", "mysql")
def _moved(element: MovedMoment, compiler: Any, **options: Any) -> str:
    return moved(*moment_and_seconds(element, compiler, **options))


@compiles(AfterEpoch, "mariadb", "mysql")
def _after_epoch(element: AfterEpoch, compiler: Any, **options: Any) -> str:
    return moved("TIMESTAMP '1970-01-01 00:00:00.000000'", *arguments(element, compiler, **options))


def epoch(moment: str) -> str:
    """Return the difference to the epoch, as a DOUBLE."""
    return f"(TIMESTAMPDIFF(MICROSECOND, TIMESTAMP '1970-01-01 00:00:00', {moment}) * 1e-6)"


@compiles(Epoch, "mariadb", "mysql")
def _epoch(element: Epoch, compiler: Any, **options: Any) -> str:
    return epoch(compiler.process(element.expr, **options))


@compiles(Elapsed, "mariadb", "mysql")
def _elapsed(element: Elapsed, compiler: Any, **options: Any) -> str:
    until, since = (epoch(compiler.process(part, **options)) for part in (element.left, element.right))
    return f"({until} - {since})"


@compiles(Among, "mariadb", "mysql")
def _among(element: Among, compiler: Any, **options: Any) -> str:
    """Return the condition with each value, since the server would not look up those in a JSON array by index."""
    type_: Any = element.array.type
    condition: Any = element.left.in_(element.array)
    # Of the copy of the parameter that in_() has made.
    condition.right.type = type_.element if hasattr(type_, "element") else type_.item_type
    return str(compiler.process(condition, **options))


compiles(AmongRows, "mariadb", "mysql")(among_rows)


@compiles(Converted, "mariadb", "mysql")
def _converted(element: Converted, compiler: Any, **options: Any) -> str:
    """Leave out the casts to types that the server does not have."""
    text, target = compiler.process(element.clause, **options), undecorated(element.type.dialect_impl(compiler.dialect))
    if isinstance(undecorated(element.clause.type), sa.Uuid) and isinstance(target, sa.String):
        text = f"REPLACE({text}, '-', '')"
        for place in (9, 14, 19, 24):
            text = f"INSERT({text}, {place}, 0, '-')"
        return text
    if isinstance(target, sa.String) and not isinstance(target, sa.Enum):
        length, binary = getattr(target, "length", None), binary_collation(compiler.dialect)
        return f"LEFT({text}, {length})" if length else f"CAST({text} AS CHAR CHARACTER SET utf8mb4) COLLATE {binary}"
    plain = undecorated(element.type)
    signed = "UNSIGNED" if getattr(target, "unsigned", False) else "SIGNED"
    kind = signed if isinstance(plain, sa.Integer) else "DOUBLE" if isinstance(plain, sa.Float) else None
    return str(text) if kind is None else f"CAST({text} AS {kind})"


@compiles(Extreme, "mariadb", "mysql")
def _extreme(element: Extreme, compiler: Any, **options: Any) -> str:
    """Render the function, which returns NULL where one of its arguments is."""
    first, *others = arguments(element, compiler, **options)
    for other in others:
        first = f"COALESCE({element.name.upper()}({first}, {other}), {first}, {other})"
    return first


@compiles(Joined, "mariadb", "mysql")
def _joined(element: Joined, compiler: Any, **options: Any) -> str:
    parts = [f"COALESCE({each}, '')" for each in arguments(element, compiler, **options)]
    return f"CONCAT({', '.join(parts)})"


@compiles(Collected, "mariadb", "mysql")
def _collected(element: Collected, compiler: Any, **options: Any) -> str:
    return f"JSON_ARRAYAGG({', '.join(arguments(element, compiler, **options))})"


@compiles(Filtered, "mariadb", "mysql")
def _filtered(element: Filtered, compiler: Any, **options: Any) -> str:
    """Render an aggregate of some rows: NULL, which aggregates pass over, stands for the others."""
    function: Any = element.func
    condition, given = compiler.process(element.criterion, **options), arguments(function, compiler, **options)
    if isinstance(function, Collected):
        # JSON_ARRAYAGG() does not pass over NULL.
        each = f"CASE WHEN {condition} THEN JSON_EXTRACT(JSON_ARRAY({given[0]}), '$[0]') END"
        return f"CONCAT('[', GROUP_CONCAT({each} SEPARATOR ', '), ']')"
    return f"{function.name}(CASE WHEN {condition} THEN {'1' if given in ([], ['*']) else given[0]} END)"


@compiles(NullsPlaced, "mariadb", "mysql")
def _nulls_placed(element: NullsPlaced, compiler: Any, **options: Any) -> str:
    """Order by the value, where NULL is first in an ascending order anyway, or by whether it is NULL before it."""
    ordered, is_first = element.element, element.modifier is operators.nulls_first_op
    direction = getattr(ordered, "modifier", None)
    text = str(compiler.process(ordered, **options))
    if (direction or operators.asc_op) is (operators.asc_op if is_first else operators.desc_op):
        return text
    value: Any = ordered if direction is None else ordered.element
    return f"{compiler.process(value, **options)} {'IS NOT NULL' if is_first else 'IS NULL'}, {text}"


@compiles(KeyHash, "mariadb", "mysql")
def _key_hash(element: KeyHash, compiler: Any, **options: Any) -> str:
    """Return 60 bits of a digest."""
    values = ", ".join(compiler.process(each, **options) for each in element.values)
    return f"CAST(CONV(LEFT(SHA2(JSON_ARRAY({values}), 256), 15), 16, 10) AS SIGNED)"


_SETTINGS = {
    "transaction_isolation": "LOWER(REPLACE(@@tx_isolation, '-', ' '))",
    CONTENDED: "CONVERT(@sqlaqueue_contended USING utf8mb4)",
    "transaction_read_only": "IF(@@tx_read_only OR @@read_only, 'on', 'off')",
}


@compiles(ServerSetting, "mariadb", "mysql")
def _setting(element: ServerSetting, compiler: Any, **options: Any) -> str:
    return setting_as(_SETTINGS, element, compiler, **options)


@compiles(SetSetting, "mariadb", "mysql")
def _set_setting(element: SetSetting, compiler: Any, **options: Any) -> str:
    """Render the value, and note the names of the parameters, see :mod:`sqlaqueue.mariadb.base`."""
    name, value, *_ = element.clauses
    # An INSERT restores a limit, which is in force until the end of its transaction.
    if compiler.isinsert or not all(isinstance(each, sa.BindParameter) for each in (name, value)):
        return "NULL"
    compiler.process(name, **options)
    rendered: str = compiler.process(value, **options)
    compiler.__dict__[LOCK_TIMEOUT] = compiler.bind_names[name], compiler.bind_names[value]
    return rendered


@compiles(TransactionNumber, "mariadb", "mysql")
def _transaction_number(*_: Any, **__: Any) -> str:
    return "IF(@@autocommit, UUID_SHORT(), CONNECTION_ID())"


@compiles(Notification, "mariadb", "mysql")
def _notification(element: Notification, compiler: Any, **options: Any) -> str:
    """Render NULL, as the server sends no notifications, and note the parameters of what this process sends."""
    sent = [*element.clauses]
    if all(isinstance(argument, sa.BindParameter) for argument in sent):
        arguments(element, compiler, **options)
        names = tuple(compiler.bind_names[argument] for argument in sent)
        compiler.__dict__.setdefault(NOTIFICATIONS, []).append(names)
    return "NULL"


@compiles(GivenRows, "mariadb", "mysql")
def _given_rows(element: GivenRows, compiler: Any, **options: Any) -> str:
    if not options.get("asfrom"):
        return str(compiler.visit_table_valued_alias(element, **options))
    names = [compiler.preparer.quote(column.name) for column in element.c]
    types = [json_type(column.type) for column in element.c]
    arrays = [
        f"JSON_TABLE({compiler.process(array)}, '$[*]' COLUMNS (number FOR ORDINALITY, value {type_} PATH '$'))"
        for array, type_ in zip(element.arrays, types, strict=False)
    ]
    collations = [f" COLLATE {binary_collation(compiler.dialect)}" if each == JSON_TEXT else "" for each in types]
    shown = [f"array_{number}.value{collations[number]} AS {each}" for number, each in enumerate(names[: len(arrays)])]
    shown += [f"array_0.number AS {each}" for each in names[len(arrays) :]]
    # Because of the limit the server stores the rows, and gives them an index: otherwise each would meet each. It
    # takes the arrays in this order: to compare all orders of ten takes it seconds.
    joins = "".join(
        f" STRAIGHT_JOIN (SELECT number, value FROM {array} AS array_of LIMIT {_ALL}) AS array_{number} "  # noqa: S608 - its parts are constants
        f"ON array_{number}.number = array_0.number"
        for number, array in enumerate(arrays[1:], start=1)
    )
    table = compiler.preparer.quote(element.name)
    return f"(SELECT {', '.join(shown)} FROM {arrays[0]} AS array_0{joins}) AS {table}"  # noqa: S608 - the names are quoted


@compiles(RowJson, "mariadb", "mysql")
def _row_json(element: RowJson, compiler: Any, **options: Any) -> str:
    parts = []
    for column in element.columns:
        text, type_ = compiler.process(column, **options), letter_type(column.type, compiler.dialect)
        if type_ == UNSIGNED:
            # The values of a BIT column are bytes.
            text = f"CAST({text} AS UNSIGNED)"
        if type_ == BYTES_IN_JSON:
            text = f"CONVERT({text} USING latin1)"
        if type_ in {BYTES_IN_JSON, JSON_TEXT}:
            # Texts of several collations cannot be mixed. JSON becomes a text: JSON_TABLE() returns no objects.
            text = f"CONVERT({text} USING utf8mb4) COLLATE {binary_collation(compiler.dialect)}"
        parts += [compiler.render_literal_value(column.name, sa.String()), text]
    return f"JSON_OBJECT({', '.join(parts)})"


@compiles(StoredRows, "mariadb", "mysql")
def _stored_rows(element: StoredRows, compiler: Any, **options: Any) -> str:
    if not options.get("asfrom"):
        return str(compiler.visit_table_valued_alias(element, **options))
    columns = []
    for column in element.c:
        path = compiler.render_literal_value(f"$.{json.dumps(column.name, ensure_ascii=False)}", sa.String())
        name, type_ = compiler.preparer.quote(column.name), letter_type(column.type, compiler.dialect)
        columns.append(f"{name} {type_} PATH {path}")
    row, name = compiler.process(element.row), compiler.preparer.quote(element.name)
    return f"JSON_TABLE({row}, '$' COLUMNS ({', '.join(columns)})) AS {name}"


class StatementCompiler(UniqueStatements, ProgramsCompiler, ReturningCompiler):
    moved, epoch = staticmethod(moved), staticmethod(epoch)

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
        # The linter looks for tables that nothing joins, and this one is joined.
        for option in ("from_linter", "ashint", "fromhints", "cte_opts", "visiting_cte", "lateral", "iscrud"):
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

    # -- inserts ---------------------------------------------------------------------------------------------------

    def visit_insert(self, insert_stmt: Any, visited_bindparam: Any = None, visiting_cte: Any = None, **kw: Any) -> str:
        """Render an INSERT that leaves existing rows; some as INSERT IGNORE, see :mod:`sqlaqueue.mariadb.base`."""
        self._ignored = None
        rendered: str = super().visit_insert(insert_stmt, visited_bindparam, visiting_cte, **kw)
        clause: Any = self._ignored
        if clause is None:
            return rendered
        ignoring = rendered.replace("INSERT INTO", "INSERT IGNORE INTO", 1)
        return ignoring_duplicates(ignoring, clause, insert_stmt.table)

    _ignored: Any = None
    """The ON CONFLICT DO NOTHING of the INSERT that is being rendered, if it becomes an INSERT IGNORE."""

    def visit_on_conflict_do_nothing(self, clause: Any, **__: Any) -> str:
        """Render a change that changes nothing. It ignores no other error, but it counts the existing rows."""
        statement: Any = self.stack[-1]["selectable"]
        if is_ignoring(statement):
            self._ignored = clause
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
            if isinstance(value, sa.BindParameter) and isinstance(value.type, sa.types.NullType):
                value = sa.type_coerce(value, column.type)
            if condition is not None:
                value = sa.case((condition, value), else_=column)
            values[column] = replacement_traverse(value, {}, proposed)
        assignments = [
            f"{self.preparer.quote(column.name)} = {self.process(values[column].self_group(), **options)}"
            for column in in_order_of_assignment(values, statement.table)
        ]
        return f"ON DUPLICATE KEY UPDATE {', '.join(assignments)}"


@compiles(WrittenHere, "mariadb", "mysql")
def _written_here(element: WrittenHere, compiler: Any, **_: Any) -> str:
    """Render the condition that a row is none of those before, see :mod:`sqlaqueue.mariadb.prepare`."""
    names = [compiler.process(element.rows.c[key.key]) for key in element.table.primary_key]
    return f"({inserted_place(names, element.table.fullname)})"


@compiles(HasName, "mariadb", "mysql")
def _render_has_name(element: HasName, compiler: Any, **options: Any) -> str:
    names, name = (compiler.process(each, **options) for each in element.clauses)
    return f"JSON_CONTAINS({names}, JSON_QUOTE({name}))"


@compiles(AmongLocked, "mariadb", "mysql")
def _render_among_locked(element: AmongLocked, compiler: Any, **options: Any) -> str:
    """Render the keys of the rows that have been locked before."""
    key, _ = element.clauses
    return str(compiler.process(among_step([key]), **options))
