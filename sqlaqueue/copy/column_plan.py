"""Which columns a COPY fills, and what is done with each value: found out once, before the first row is sent."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from operator import itemgetter
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import ColumnProperty, Mapper, RelationshipProperty

from sqlaqueue.exc import StatementError
from sqlaqueue.queue.backend import backend
from sqlaqueue.queue.spec import QueueSpec

Row = Mapping[str, Any]
Process = Callable[[Any], Any]
"""Makes of a value what the driver takes, as the column's type does for any statement."""


@dataclass(frozen=True)
class Constant:
    """The same value in each row."""

    value: Any


@dataclass(frozen=True)
class Plan:
    """What one COPY fills: first what the rows give, then constants, then what is called for in each row."""

    what: str
    """Who copies, for the texts of errors: ``copy_in(Email)``."""
    attributes: tuple[str, ...]
    """One for each column."""
    columns: tuple[sa.Column[Any], ...]
    given: int
    """How many attributes each row gives."""
    take: Callable[[Row], tuple[Any, ...]]
    """Reads them off a row."""
    constants: tuple[Any, ...]
    scalars: Mapping[str, Any]
    """The same by the keys of their columns, as they were before their types saw them."""
    calls: tuple[Callable[[Any], Any], ...]
    """Defaults that are functions; each is handed what SQLAlchemy calls the context."""
    processors: tuple[tuple[int, Process], ...]
    """By position; most types need none."""

    @property
    def names(self) -> list[str]:
        """The names of the columns."""
        return [column.name for column in self.columns]


def make_plan(verb: str, spec: QueueSpec, mapper: Mapper[Any], first: Any, dialect: sa.Dialect) -> Plan:
    """Return what to copy for rows like ``first``.

    :raises StatementError: when a row cannot be written by COPY, or not like this.
    """
    what = f"{verb}({mapper.class_.__name__})"
    if len(mapper.tables) > 1:
        tables = " and ".join(str(table) for table in mapper.tables)
        msg = f"{what}: its rows are in {tables}, and COPY fills one table; use session.add_all()"
        raise StatementError(msg)
    check_mapping(what, mapper, first, 1)
    given = {key: _column(what, mapper, key) for key in first}
    constants, calls = _defaults(what, mapper, given)
    columns = {**given, **{key: column for key, (column, _) in (constants | calls).items()}}
    if not columns:
        msg = f"{what}: the rows are empty, and no column has a default in Python; give at least one attribute"
        raise StatementError(msg)
    processors = [
        (place, process)
        for place, (key, column) in enumerate(columns.items())
        if key not in constants and (process := _process(what, spec, key, column, dialect)) is not None
    ]
    return Plan(
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
    """Refuse a row that is none.

    :raises StatementError: saying what a row is.
    """
    if isinstance(row, Mapping):
        return
    if isinstance(row, mapper.class_):
        fix = "give dicts of its attributes, or session.add_all() the instances"
    else:
        fix = "give mappings from attribute names to values, such as dicts"
    msg = f"{what}: row {number} is {type(row).__name__}, no mapping; {fix}"
    raise StatementError(msg)


def _taker(keys: tuple[str, ...]) -> Callable[[Row], tuple[Any, ...]]:
    if len(keys) > 1:
        return itemgetter(*keys)
    # Of one key it would return the value itself.
    return lambda row: tuple(row[key] for key in keys)


def _column(what: str, mapper: Mapper[Any], key: Any) -> sa.Column[Any]:
    found = mapper.attrs.get(key) if isinstance(key, str) else None
    if isinstance(found, ColumnProperty) and isinstance(found.columns[0], sa.Column):
        return found.columns[0]
    name = f"{mapper.class_.__name__}.{key}" if isinstance(key, str) else repr(key)
    if isinstance(found, RelationshipProperty):
        names = sorted(mapper.get_property_by_column(column).key for column in found.local_columns)
        msg = f"{what}: {name} is a relationship, which COPY does not follow; give {', '.join(names)}"
    else:
        names = [each.key for each in mapper.column_attrs if isinstance(each.columns[0], sa.Column)]
        msg = f"{what}: {name} is no attribute that holds a column; those are {', '.join(names)}"
    raise StatementError(msg)


# -- what the rows leave out ---------------------------------------------------------------------------------------

_Constants = dict[str, tuple[sa.Column[Any], Any]]
_Calls = dict[str, tuple[sa.Column[Any], Callable[[Any], Any]]]


def _defaults(what: str, mapper: Mapper[Any], given: Collection[str]) -> tuple[_Constants, _Calls]:
    """Return the defaults that are Python's, by attribute: constants, and functions."""
    constants: _Constants = {}
    calls: _Calls = {}
    for prop in mapper.column_attrs:
        column = prop.columns[0]
        if not isinstance(column, sa.Column) or prop.key in given:
            continue
        default = _default(what, mapper, prop.key, column)
        if isinstance(default, Constant):
            constants[prop.key] = column, default.value
        elif default is not None:
            calls[prop.key] = column, default
    return constants, calls


def _default(
    what: str, mapper: Mapper[Any], key: str, column: sa.Column[Any]
) -> Constant | Callable[[Any], Any] | None:
    """Return what a row has that does not give this column, None where the database decides."""
    if column is mapper.polymorphic_on and mapper.polymorphic_identity is not None:
        return Constant(mapper.polymorphic_identity)
    if column is mapper.version_id_col and callable(generate := mapper.version_id_generator):
        return lambda context: generate(None)  # noqa: ARG005 - called like a default
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
        "give it as server_default=..., or give the attribute in each row"
    )
    raise StatementError(msg)


class Context:
    """What a default that takes a context may ask for: the values that its row gives, and constant defaults."""

    def __init__(self, plan: Plan) -> None:
        self._scalars = plan.scalars
        self._keys = [column.key for column in plan.columns[: plan.given]]
        self._take = plan.take
        self.row: Row = {}

    @property
    def current_parameters(self) -> dict[str, Any]:
        """The values of the row, by the keys of its columns."""
        return {**self._scalars, **dict(zip(self._keys, self._take(self.row), strict=True))}

    def get_current_parameters(self, isolate_multiinsert_groups: bool = True) -> dict[str, Any]:  # noqa: FBT001, FBT002 - SQLAlchemy's signature
        """Return the values of the row, by the keys of its columns."""
        return self.current_parameters


# -- what types do with values -------------------------------------------------------------------------------------


def _process(what: str, spec: QueueSpec, key: str, column: sa.Column[Any], dialect: sa.Dialect) -> Process | None:
    process = _type_process(what, key, column, dialect)
    if column is not spec.columns.get("run_at") or not getattr(column.type, "timezone", False):
        return process

    def check(value: Any) -> Any:
        # The server would read it in the zone of its session, whichever that is.
        if isinstance(value, datetime) and value.tzinfo is None:
            msg = "the column has a time zone; give a datetime with tzinfo, as datetime.now(UTC)"
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


def place_of(table: sa.Table, connection: sa.Connection) -> tuple[str | None, str]:
    """Return schema and name of a table, as the connection's ``schema_translate_map`` has it."""
    translated = connection.get_execution_options().get("schema_translate_map") or {}
    schema: str | None = translated.get(table.schema, table.schema)
    return schema, table.name


def copy_command(place: tuple[str | None, str], columns: Sequence[sa.Column[Any]]) -> str:
    """Return the COPY statement, in which no percent sign is doubled: no driver looks for parameters there."""
    quote: Any = backend().dialect.identifier_preparer
    schema, name = place
    target = quote.quote(name) if schema is None else f"{quote.quote_schema(schema)}.{quote.quote(name)}"
    return f"COPY {target} ({', '.join(quote.quote(column.name) for column in columns)}) FROM STDIN"
