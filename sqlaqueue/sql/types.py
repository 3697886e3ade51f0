"""PostgreSQL in SQL that is kept as text or compared: types, names, hashes, periods, arrays, INSERTs."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from datetime import timedelta
from math import isfinite
from typing import Any, TypeVar
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql
from sqlalchemy.dialects.postgresql import ARRAY, CITEXT, JSONB
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import WARN_LINTING
from sqlalchemy.sql.elements import Grouping
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.sql.selectable import HasPrefixes
from sqlalchemy.types import TypeDecorator, TypeEngine, UserDefinedType

from sqlaqueue._typing import AnySelect
from sqlaqueue.exc import ConfigurationError
from sqlaqueue.sql.engine import OURS, PREPARED, engine_of
from sqlaqueue.sql.portable import Called, KeyHash, greatest

_make_dialect: Any = postgresql.dialect
NEUTRAL: sa.Dialect = _make_dialect(paramstyle="named")
"""Renders SQL that is kept as text. It belongs to no driver, so it doubles no percent sign."""

DOCUMENT = JSONB(none_as_null=True).with_variant(sa.JSON(none_as_null=True), "sqlite", "mysql", "mariadb")
"""The type of a JSON document that queries and unique indexes can compare; None is NULL."""

_DEEPEST = 100
_NOT_STORABLE = re.compile("[\0\ud800-\udfff]")


def not_in_document(value: Any, what: str, depth: int = 0) -> str | None:
    """Return in words what of a value JSON cannot hold, or would change; None if it holds all of it."""
    if value is None or isinstance(value, int) or (isinstance(value, float) and isfinite(value)):
        return None
    if isinstance(value, str):
        return f"{what} has a NUL or the half of a character" if _NOT_STORABLE.search(value) else None
    if isinstance(value, list | tuple) and depth < _DEEPEST:
        parts: Any = enumerate(value)
    elif isinstance(value, dict) and depth < _DEEPEST:
        if wrong := [key for key in value if not isinstance(key, str) or _NOT_STORABLE.search(key)]:
            return f"{what} has the key {wrong[0]!r}, and JSON has only texts as keys"
        parts = value.items()
    else:
        return f"{what} is {value!r:.100}, which JSON cannot hold"
    return next(filter(None, (not_in_document(part, f"{what}[{key!r}]", depth + 1) for key, part in parts)), None)


def plain_type(column: sa.Column[Any]) -> Any:
    """Return the type that a column has in PostgreSQL, without an application's TypeDecorator."""
    plain = column.type.dialect_impl(NEUTRAL)
    return getattr(plain, "impl_instance", plain)


def equals(column: sa.Column[Any]) -> str:
    """Return the operator that compares a column, schema-qualified where it is one of PostgreSQL's own.

    The types of extensions have operators of their own, in the schema in which the extension is installed.
    """
    plain = plain_type(column)
    own = type(plain).__module__.startswith("sqlalchemy.") and not isinstance(plain, CITEXT | UserDefinedType)
    return "OPERATOR(pg_catalog.=)" if own else "="


# -- dialect check -----------------------------------------------------------------------------------------------------
# Refuses databases that the library does not support, and engines that are not prepared.
#
# SQLAlchemy omits SKIP LOCKED for a database that does not support it, and two workers would claim the same jobs.


Statement = TypeVar("Statement", bound=HasPrefixes)


class _Marker(FunctionElement[None]):
    """Renders as an empty text on PostgreSQL, and raises an error elsewhere.

    It is a function because SQLAlchemy has no cache key for a bare column element, and would compile each statement
    with one anew each time.
    """

    inherit_cache = True


@compiles(_Marker)
def _refuse(element: _Marker, compiler: Any, **_: Any) -> str:  # noqa: ARG001 - the hook's signature
    # A Connection sets this flag when it compiles a statement to execute it; printing a statement does not.
    if not compiler.linting & WARN_LINTING or engine_of(compiler.dialect) is not None:
        return ""
    msg = f"this session's engine is for {compiler.dialect.name}, {_fix(compiler.dialect)}"
    raise ConfigurationError(msg)


@compiles(_Marker, "postgresql")
def _accept(element: _Marker, compiler: Any, **_: Any) -> str:  # noqa: ARG001 - the hook's signature
    return ""


def as_library_statement(statement: Statement) -> Statement:
    """Return ``statement`` marked as the library's, and refused by databases that it does not support.

    Prepared engines carry out only marked statements. The marker refuses the execution on any other database while the
    statement is compiled, before anything is sent; it can be printed for any.
    """
    marked: Any = refused_elsewhere(statement)
    marked_as_ours: Statement = marked.execution_options(**{OURS: True})
    return marked_as_ours


def refused_elsewhere(statement: Statement) -> Statement:
    """Return ``statement`` refused by databases that the library does not support, and by unprepared engines.

    Unlike one of :func:`as_library_statement`, it needs no steps, so a prepared engine executes it as it is.
    """
    # A prefix is compiled first, before any part for which the other compiler may raise an error of its own.
    return statement.prefix_with(_Marker())


def _fix(dialect: sa.Dialect) -> str:
    if dialect.name not in PREPARED:
        return 'which sqlaqueue does not support; use create_engine("postgresql+psycopg://...")'
    create = "create_async_engine" if dialect.is_async else "create_engine"
    return f"and is not prepared; use engine = sqlaqueue.prepare({create}(...))"


def check_dialect(dialect: sa.Dialect, what: str, engine: str = "its sessions' engine") -> None:
    """Raise an error for an engine of another database, and for one that is not prepared.

    :param what: the user of the engine, for the error's text.
    :param engine: how the error names the engine.
    :raises ConfigurationError: naming the engine's dialect, and the line that is missing.
    """
    if dialect.name != "postgresql" and engine_of(dialect) is None:
        msg = f"{what}: {engine} is for {dialect.name}, {_fix(dialect)}"
        raise ConfigurationError(msg)


class RowLocation(sa.types.UserDefinedType[str]):
    """The physical location of a row in its table (``ctid``)."""

    cache_ok = True

    def get_col_spec(self, **_: Any) -> str:
        return "tid"


# -- identifiers -------------------------------------------------------------------------------------------------------
# Names of tables, indexes and functions that fit into PostgreSQL's 63 bytes.


_LONGEST = 63
_DIGEST = 8
"""The length of the digest of a name that is too long."""


def object_name(*parts: str) -> str:
    """Return ``parts`` as one identifier; a name that is too long is cut, and ends in a digest of the whole."""
    name = "_".join(parts)
    if len(name.encode()) <= _LONGEST:
        return name
    return f"{_cut(name)}_{hashlib.sha256(name.encode()).hexdigest()[:_DIGEST]}"


def is_name_of(name: str, *parts: str) -> bool:
    """Return whether :func:`object_name` may have made a name from ``parts``, and perhaps more parts after them."""
    whole = "_".join(parts)
    return f"{name}_".startswith(f"{whole}_") or name[:-_DIGEST] == f"{_cut(whole)}_"


def _cut(name: str) -> str:
    return name.encode()[: _LONGEST - _DIGEST - 1].decode(errors="ignore")


# -- key arrays --------------------------------------------------------------------------------------------------------
# Arrays of keys as one parameter of a statement.


def key_array(element: TypeEngine[Any]) -> TypeEngine[Any]:
    """Return the type of an array of keys, for ``key = ANY(array)``; none of them is NULL."""
    return _array(element, nullable=False)


def nullable_array(element: TypeEngine[Any]) -> TypeEngine[Any]:
    """Return the type of an array of values, of which some may be NULL."""
    return _array(element, nullable=True)


def _array(element: TypeEngine[Any], *, nullable: bool) -> TypeEngine[Any]:
    if isinstance(element, sa.Integer) or (isinstance(element, sa.Uuid) and element.as_uuid):
        return TextArray(element, nullable=nullable)
    # Its elements may be lists, such as those of JSONB, which are no further dimension.
    return ARRAY(element, dimensions=1)


def numbered_rows(
    columns: Mapping[str, tuple[TypeEngine[Any], Sequence[Any] | None]], number: str, *, may_be_empty: bool = False
) -> sa.TableValuedAlias:
    """Return given values as a table, with the number of each row, from 1.

    One array for each column: a VALUES list would have a parameter for each value, and other SQL for each number of
    rows.

    :param may_be_empty: whether there may be no rows: printed with its values, an empty array needs a cast.
    """
    arrays: list[Any] = [
        sa.bindparam(name if values is None else None, list(values or ()), type_=_array(type_, nullable=True))
        for name, (type_, values) in columns.items()
    ]
    if may_be_empty:
        arrays = [one if isinstance(one.type, TextArray) else sa.cast(one, one.type) for one in arrays]
    names = [sa.column(name, type_) for name, (type_, _) in columns.items()]
    rows: sa.TableValuedAlias = sa.func.unnest(*arrays).table_valued(
        *names, with_ordinality=number, name="sqlaqueue_given"
    )
    given: Any = rows.render_derived("sqlaqueue_given")
    # table_valued() makes no other class.
    given.__class__ = GivenRows
    made: sa.TableValuedAlias = given
    return made


class GivenRows(sa.TableValuedAlias):
    """The rows of several arrays, with the number of each row behind them."""

    inherit_cache = True

    @property
    def arrays(self) -> Any:
        """The arrays."""
        function: Any = self.element
        return function.clauses


class _Array(ARRAY[Any]):
    """An array that can be printed for any dialect; for most of them SQLAlchemy would raise an error."""

    cache_ok = True


@compiles(_Array)
def _print_array(element: _Array, compiler: Any, **options: Any) -> str:
    return f"{compiler.process(element.item_type, **options)}[]"


@compiles(_Array, "postgresql")
def _render_array(element: _Array, compiler: Any, **options: Any) -> str:
    rendered: str = compiler.visit_ARRAY(element, **options)
    return rendered


_COMMA, _NULL = (sa.literal_column(text, sa.Text()) for text in ("','", "'NULL'"))


class TextArray(TypeDecorator[Sequence[Any]]):
    """An array of numbers or UUIDs that is sent as one text, and cast to an array by the server.

    psycopg adapts the elements of a list one by one; this takes a sixth of the time. The text is split before the cast,
    since a cast of a whole text to an array is no constant for the planner: a sequential scan would compare each row
    with all elements, one after the other, where it looks a constant up in a hash table.
    """

    impl = sa.Text
    cache_ok = True

    def __init__(self, element: TypeEngine[Any], *, nullable: bool) -> None:
        super().__init__()
        self.element, self.nullable = element, nullable

    def bind_expression(self, bindparam: sa.BindParameter[Any]) -> sa.ColumnElement[Any]:
        """Cast the text to an array."""
        return sa.cast(sa.func.string_to_array(bindparam, _COMMA, _NULL), _Array(self.element))

    def process_bind_param(self, value: Sequence[Any] | None, dialect: sa.Dialect) -> str | None:
        if value is None:
            return None
        # Written here and not by a function: there are many.
        if isinstance(self.element, sa.Integer):
            return ",".join(["NULL" if self.nullable and key is None else str(int(key)) for key in value])
        return ",".join(["NULL" if self.nullable and key is None else _uuid(key) for key in value])


def _uuid(key: Any) -> str:
    return (key if isinstance(key, UUID) else UUID(key)).hex


# -- key hash ----------------------------------------------------------------------------------------------------------
# The hash of a key of several columns.


_SEED = sa.literal_column("'0'::bigint", sa.BigInteger())
"""As the server prints it, so that Alembic finds an index unchanged."""


class _CaseAsPrinted(sa.Case[Any]):
    """A CASE of one condition with the line breaks that the server prints, so that Alembic finds an index unchanged."""

    inherit_cache = True


@compiles(_CaseAsPrinted)
def _render(element: _CaseAsPrinted, compiler: Any, **options: Any) -> str:
    ((condition, value),) = element.whens
    condition = getattr(condition, "element", condition)
    when, then = (compiler.process(each, **options) for each in (condition, value))
    return f"\nCASE\n    WHEN {when} THEN {then}\n    ELSE NULL::bigint\nEND"


@compiles(_CaseAsPrinted, "sqlite")
@compiles(_CaseAsPrinted, "mariadb")
@compiles(_CaseAsPrinted, "mysql")
def _render_as_case(element: _CaseAsPrinted, compiler: Any, **options: Any) -> str:
    rendered: str = compiler.visit_case(element, **options)
    return rendered


def key_hash(
    columns: Sequence[sa.ColumnElement[Any]], only: sa.ColumnElement[bool] | None = None
) -> sa.ColumnElement[int]:
    """Return a 64-bit hash of a key, for an index and for statements; NULL is a value like any other.

    PostgreSQL distributes the rows of hash partitions by the same functions, so their values never change.

    :param only: a condition; for rows that do not meet it the result is NULL.
    """
    hashed: sa.ColumnElement[int] = KeyHash("hash_record_extended", sa.func.row(*columns), _SEED, type_=sa.BigInteger())
    # CREATE INDEX requires the parentheses.
    return hashed if only is None else Grouping(_CaseAsPrinted((only, hashed)))


# -- periods -----------------------------------------------------------------------------------------------------------
# Periods of equal length, for jobs that are unique within one.


_MONDAY = 4 * 86400
"""Monday, 1970-01-05, 00:00 UTC, in seconds since 1970: days begin at midnight, and weeks on Monday."""


def period(length: timedelta, moment: sa.ColumnElement[Any]) -> sa.ColumnElement[Any]:
    """Return the beginning of the period to which ``moment`` belongs.

    The length and the origin are written as the server prints them by default, so that Alembic finds the index
    unchanged.
    """
    origin: sa.ColumnElement[Any] = sa.literal_column(f"to_timestamp({_MONDAY}::double precision)")
    if not getattr(moment.type, "timezone", False):
        origin = sa.literal_column("'1970-01-05 00:00:00'::timestamp without time zone")
    span: sa.ColumnElement[Any] = sa.literal_column(f"'{_clock_text(length)}'::interval")
    begin = Period("date_bin", span, moment, origin, type_=moment.type)
    begin.milliseconds = length // timedelta(milliseconds=1)
    return begin


class Period(Called):
    """The beginning of a period; other engines, which have no function for it, write its number."""

    inherit_cache = True
    origin = _MONDAY * 1000
    """Where periods begin, in milliseconds since 1970."""
    milliseconds: int
    """Their length, which is in the span as well, by which SQLAlchemy distinguishes statements."""

    @property
    def moment(self) -> Any:
        _, moment, _ = self.clauses
        return moment


def _clock_text(length: timedelta) -> str:
    """Return a length in hours, minutes and seconds: PostgreSQL would keep days apart from hours."""
    minutes, rest = divmod(length, timedelta(minutes=1))
    fraction = f".{rest.microseconds:06}".rstrip("0").rstrip(".")
    return f"{minutes // 60:02}:{minutes % 60:02}:{rest.seconds:02}{fraction}"


# -- parts of tables ---------------------------------------------------------------------------------------------------
# Defaults, conditions and types of the library's tables, which databases other than PostgreSQL have in another form.


class SqlText(FunctionElement[Any]):
    """SQL that is one text for PostgreSQL, and another one for all other databases."""

    name = "sqlaqueue_sql"
    inherit_cache = True

    def __init__(self, postgresql: str, others: str) -> None:
        super().__init__(sa.text(postgresql), sa.text(others))
        self.others = others


@compiles(SqlText)
def _render_text(element: SqlText, compiler: Any, **_: Any) -> str:
    postgresql, _others = element.clauses
    return str(compiler.process(postgresql))


@compiles(SqlText, *PREPARED)
def _render_other_text(element: SqlText, compiler: Any, **_: Any) -> str:
    _postgresql, others = element.clauses
    return str(compiler.process(others))


# -- session settings --------------------------------------------------------------------------------------------------
# Settings that transactions give to the statements in them, by ``SET LOCAL``.


def session_setting(name: str) -> sa.ColumnElement[Any]:
    """Return a setting as a text, NULL if it is not set; other databases have no setting of this name.

    After a transaction with ``SET LOCAL`` the setting of the session is an empty text, not NULL.
    """
    # As the server prints it: Alembic compares defaults as texts, as the comparison of their values would be NULL.
    return SqlText(f"NULLIF(current_setting('{name}'::text, true), ''::text)", "NULL")


# -- inserts -----------------------------------------------------------------------------------------------------------
# INSERT .. ON CONFLICT on the primary key of a table.


Rows = Mapping[str, Any] | tuple[Sequence[str], AnySelect]
"""The values of one row, or the names of columns with a SELECT of their values."""


def insert_or_ignore(table: sa.Table, rows: Rows) -> sa.Insert:
    """Return an INSERT that leaves existing rows as they are."""
    return _insert(table, rows).on_conflict_do_nothing()


def insert_or_replace(
    table: sa.Table,
    rows: Rows,
    *,
    replaced: Sequence[str] = (),
    raised: Sequence[str] = (),
    added: Sequence[str] = (),
) -> sa.Insert:
    """Return an INSERT that writes the columns ``replaced`` of existing rows, and ``raised`` where they are smaller.

    It adds to the columns ``added``, where NULL is nothing.
    """
    insert = _insert(table, rows)
    values: dict[str, Any] = {name: insert.excluded[name] for name in replaced}
    values |= {name: greatest(table.c[name], insert.excluded[name]) for name in raised}
    for name in added:
        old, new = table.c[name], insert.excluded[name]
        values[name] = sa.func.coalesce(old + new, old, new)
    return insert.on_conflict_do_update(index_elements=list(table.primary_key), set_=values)


def insert_unless(
    table: sa.Table,
    rows: Rows | None,
    *,
    unique: Sequence[sa.ColumnElement[Any]],
    where: sa.ColumnElement[bool] | None,
) -> sa.Insert:
    """Return an INSERT that inserts no row whose values in a unique index exist already.

    It names the index, so that a violation of another constraint is an error.
    """
    insert = postgresql.insert(table) if rows is None else _insert(table, rows)
    return insert.on_conflict_do_nothing(index_elements=list(unique), index_where=where)


def _insert(table: sa.Table, rows: Rows) -> postgresql.Insert:
    insert = postgresql.insert(table)
    if not isinstance(rows, tuple):
        return insert.values(**rows)
    names, selected = rows
    if selected.whereclause is None:
        # Without a WHERE, SQLite takes ON CONFLICT for the condition of a join.
        selected = selected.with_statement_hint("WHERE 1 = 1", "sqlite")
    return insert.from_select(names, selected)
