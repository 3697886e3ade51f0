"""The columns of a COPY and the conversion of their values, determined once from the first row."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from operator import itemgetter
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import ColumnProperty, Mapper, RelationshipProperty

from sqlaqueue.exc import StatementError
from sqlaqueue.queue.roles import current_traceparent, is_filled_here
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.sql.types import NEUTRAL

Row = Mapping[str, Any]
Process = Callable[[Any], Any]
"""Converts a value for the driver: the bind processor of the column's type."""


@dataclass(frozen=True)
class Constant:
    """A default that is the same for each row."""

    value: Any


@dataclass(frozen=True)
class ColumnPlan:
    """The columns of one COPY, in this order: attributes of the rows, constant defaults, defaults that are called."""

    what: str
    """The call, for errors: ``copy_in(Email)``."""
    attributes: tuple[str, ...]
    """The attribute of each column."""
    columns: tuple[sa.Column[Any], ...]
    given: int
    """The number of attributes of each row."""
    take: Callable[[Row], tuple[Any, ...]]
    """Returns the values of a row."""
    constants: tuple[Any, ...]
    """The constant defaults, converted for the driver."""
    scalars: Mapping[str, Any]
    """The constant defaults by column key, not converted."""
    calls: tuple[Callable[[Any], Any], ...]
    """The defaults that are functions of the context, see :class:`Context`."""
    processors: tuple[tuple[int, Process], ...]
    """The conversions, with the positions of their columns; most types need none."""

    @property
    def names(self) -> list[str]:
        """The names of the columns."""
        return [column.name for column in self.columns]


def make_column_plan(verb: str, spec: QueueSpec, mapper: Mapper[Any], first: Any, dialect: sa.Dialect) -> ColumnPlan:
    """Return the plan for rows with the attributes of ``first``.

    :raises StatementError: if COPY cannot write such rows.
    """
    what = f"{verb}({mapper.class_.__name__})"
    if len(mapper.tables) > 1:
        tables = " and ".join(str(table) for table in mapper.tables)
        msg = f"{what}: its rows are in {tables}, but COPY writes to one table; use session.add_all()"
        raise StatementError(msg)
    check_mapping(what, mapper, first, 1)
    given = {key: _column(what, mapper, key) for key in first}
    constants, calls = _defaults(what, spec, mapper, given)
    columns = {**given, **{key: column for key, (column, _) in (constants | calls).items()}}
    if not columns:
        msg = f"{what}: the rows are empty, and no column has a default in Python; set at least one attribute"
        raise StatementError(msg)
    processors = [
        (place, process)
        for place, (key, column) in enumerate(columns.items())
        if key not in constants and (process := _process(what, spec, key, column, dialect)) is not None
    ]
    return ColumnPlan(
        what=what,
        attributes=tuple(columns),
        columns=tuple(columns.values()),
        given=len(given),
        take=_taker(tuple(given)),
        constants=tuple(
            _processed(value, _type_process(what, key, column, dialect)) for key, (column, value) in constants.items()
        ),
        scalars={column.key: value for column, value in constants.values()},
        calls=tuple(call for _, call in calls.values()),
        processors=tuple(processors),
    )


def check_mapping(what: str, mapper: Mapper[Any], row: Any, number: int) -> None:
    """Refuse a row that is not a mapping.

    :raises StatementError: with the number of the row.
    """
    if isinstance(row, Mapping):
        return
    if isinstance(row, mapper.class_):
        fix = "use dicts of its attributes, or session.add_all() for instances"
    else:
        fix = "use mappings from attribute names to values, such as dicts"
    msg = f"{what}: row {number} is {type(row).__name__}, not a mapping; {fix}"
    raise StatementError(msg)


def _taker(keys: tuple[str, ...]) -> Callable[[Row], tuple[Any, ...]]:
    if len(keys) > 1:
        return itemgetter(*keys)
    # itemgetter() of one key returns the value, not a tuple.
    return lambda row: tuple(row[key] for key in keys)


def _column(what: str, mapper: Mapper[Any], key: Any) -> sa.Column[Any]:
    found = mapper.attrs.get(key) if isinstance(key, str) else None
    if isinstance(found, ColumnProperty) and isinstance(found.columns[0], sa.Column):
        return found.columns[0]
    name = f"{mapper.class_.__name__}.{key}" if isinstance(key, str) else repr(key)
    if isinstance(found, RelationshipProperty):
        names = sorted(mapper.get_property_by_column(column).key for column in found.local_columns)
        msg = f"{what}: {name} is a relationship, which COPY does not follow; set {', '.join(names)}"
    else:
        names = [each.key for each in mapper.column_attrs if isinstance(each.columns[0], sa.Column)]
        msg = f"{what}: {name} is not an attribute of a column; those are {', '.join(names)}"
    raise StatementError(msg)


# -- defaults of attributes that the rows leave out ----------------------------------------------------------------

_Constants = dict[str, tuple[sa.Column[Any], Any]]
_Calls = dict[str, tuple[sa.Column[Any], Callable[[Any], Any]]]


def _defaults(what: str, spec: QueueSpec, mapper: Mapper[Any], given: Collection[str]) -> tuple[_Constants, _Calls]:
    """Return the Python-side defaults by attribute: constants and functions."""
    constants: _Constants = {}
    calls: _Calls = {}
    for prop in mapper.column_attrs:
        column = prop.columns[0]
        if not isinstance(column, sa.Column) or prop.key in given:
            continue
        if column is spec.columns.get("traceparent") and is_filled_here(column):
            current = current_traceparent()
            # Without a span the column is left to its server default, which may be set in the transaction.
            default: Constant | Callable[[Any], Any] | None = None if current is None else Constant(current)
        else:
            default = _default(what, mapper, prop.key, column)
        if isinstance(default, Constant):
            constants[prop.key] = column, default.value
        elif default is not None:
            calls[prop.key] = column, default
    return constants, calls


def _default(
    what: str, mapper: Mapper[Any], key: str, column: sa.Column[Any]
) -> Constant | Callable[[Any], Any] | None:
    """Return the default of a column, None if the database sets it."""
    if column is mapper.polymorphic_on and mapper.polymorphic_identity is not None:
        return Constant(mapper.polymorphic_identity)
    if column is mapper.version_id_col and callable(generate := mapper.version_id_generator):
        return lambda context: generate(None)  # noqa: ARG005 - has the signature of a default
    default: Any = column.default
    if default is None:
        return None
    if default.is_scalar:
        return Constant(default.arg)
    if default.is_callable:
        call: Callable[[Any], Any] = default.arg
        return call
    kind = "a sequence" if default.is_sequence else "an SQL expression"
    msg = (
        f"{what}: the default of {mapper.class_.__name__}.{key} is {kind}, which COPY does not evaluate; "
        "use server_default=..., or set the attribute in each row"
    )
    raise StatementError(msg)


class Context:
    """The context of a default function: the values of its row and the constant defaults."""

    def __init__(self, plan: ColumnPlan) -> None:
        self._scalars = plan.scalars
        self._keys = [column.key for column in plan.columns[: plan.given]]
        self._take = plan.take
        self.row: Row = {}

    @property
    def current_parameters(self) -> dict[str, Any]:
        """The values of the row, by column key."""
        return {**self._scalars, **dict(zip(self._keys, self._take(self.row), strict=True))}

    def get_current_parameters(self, isolate_multiinsert_groups: bool = True) -> dict[str, Any]:  # noqa: FBT001, FBT002 - the signature in SQLAlchemy
        """Return the values of the row, by column key."""
        return self.current_parameters


# -- conversion of values ------------------------------------------------------------------------------------------


def _process(what: str, spec: QueueSpec, key: str, column: sa.Column[Any], dialect: sa.Dialect) -> Process | None:
    process = _type_process(what, key, column, dialect)
    if column is not spec.columns.get("run_at") or not getattr(column.type, "timezone", False):
        return process

    def check(value: Any) -> Any:
        # The server would interpret it in the time zone of its session.
        if isinstance(value, datetime) and value.tzinfo is None:
            msg = "the column has a time zone; use a datetime with tzinfo, e.g. datetime.now(UTC)"
            raise ValueError(msg)
        return _processed(value, process)

    return check


def _type_process(what: str, key: str, column: sa.Column[Any], dialect: sa.Dialect) -> Process | None:
    type_ = column.type.dialect_impl(dialect)
    if type_.bind_expression(sa.bindparam(None, type_=column.type)) is not None:
        msg = (
            f"{what}: {column.type!r}, the type of {key}, wraps its values in SQL, which COPY does not evaluate; "
            "use session.execute(insert(...), rows)"
        )
        raise StatementError(msg)
    return type_.bind_processor(dialect)


def _processed(value: Any, process: Process | None) -> Any:
    return value if process is None else process(value)


# -- the table -----------------------------------------------------------------------------------------------------


def translated_name(table: sa.Table, connection: sa.Connection) -> tuple[str | None, str]:
    """Return schema and name of a table, with the ``schema_translate_map`` of the connection."""
    translated = connection.get_execution_options().get("schema_translate_map") or {}
    schema: str | None = translated.get(table.schema, table.schema)
    return schema, table.name


def copy_command(table: tuple[str | None, str], columns: Sequence[sa.Column[Any]]) -> str:
    """Return the COPY statement, without doubled percent signs, as drivers do not look for parameters in it."""
    quote: Any = NEUTRAL.identifier_preparer
    schema, name = table
    target = quote.quote(name) if schema is None else f"{quote.quote_schema(schema)}.{quote.quote(name)}"
    return f"COPY {target} ({', '.join(quote.quote(column.name) for column in columns)}) FROM STDIN"
