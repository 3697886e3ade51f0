"""What all engines but PostgreSQL give in the same way: types, compilers, and how they refuse what they lack."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar, TypeVar
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.schema import CreateColumn, CreateIndex
from sqlalchemy.sql.elements import conv
from sqlalchemy.sql.functions import now

from sqlaqueue.engines import checks, notifications
from sqlaqueue.engines.waits import check_waits, triggers_of
from sqlaqueue.exc import ConfigurationError
from sqlaqueue.postgresql.ddl import queue_of
from sqlaqueue.queue.names import SCHEDULE
from sqlaqueue.sql.engine import PLAIN, PREPARED, OtherEngine, PlainIndex, engine_of, mark_prepared
from sqlaqueue.sql.portable import MomentOfInsert, Span
from sqlaqueue.sql.types import SqlText, TextArray, object_name

TIMING = ("cron", "every", "timezone", "paused_at")
"""The columns of a schedule whose change is recorded: no tick before it is fired by the new definition."""


Render = TypeVar("Render", bound=Callable[[Any, Any, Callable[[Any], Any]], Any])


class SharedEngine:
    """The base of an :class:`~sqlaqueue.sql.engine.OtherEngine`."""

    title: str
    """The name for people."""
    needs_indexes: ClassVar[bool] = False
    """Whether a claim names its index, and so raises an error without it."""
    migrating: str = "migrate with `alembic revision --autogenerate` and `alembic upgrade head`"
    """How an existing table gets what it lacks, as an advice to people."""
    subscribe = staticmethod(notifications.subscribe)

    @property
    def checks(self) -> Any:
        """The tables, columns and indexes that are missing."""
        return checks

    def why_no_strategy(self, strategy: Any) -> str | None:
        """Return why a strategy is not available, as it follows the name of the database; None if it is."""
        # A strategy of the program has no claim in steps.
        return None if strategy.name == "update_status" else "which needs a claim in steps"

    def check_supported(self, spec: Any) -> None:
        """Refuse a queue with options that the database cannot carry."""
        name, config = spec.model.__name__, spec.config
        why = self.why_no_strategy(spec.strategy)
        if why is not None:
            msg = (
                f'{name}: strategy "{config.strategy}" is not available on {self.title}, {why}; use '
                'QueueConfig(strategy="update_status")'
            )
            raise ConfigurationError(msg)
        check_waits(spec, self.title)
        for key in spec.keys:
            if isinstance(getattr(key.type, "impl_instance", key.type), sa.LargeBinary):
                msg = (
                    f"{name}.{key.key}: a key of bytes is not available on {self.title}, where keys are given to "
                    "statements as JSON; use a number, a text or a UUID"
                )
                raise ConfigurationError(msg)

    def check_storage(self, connection: sa.Connection, spec: Any) -> None:
        """Accept the tables as they are."""

    now: ClassVar[str]
    """The present moment in SQL, in UTC."""

    def schedule_trigger(self, table: sa.Table, dialect: sa.Dialect, name: str) -> str:
        """Return the statement that creates the trigger which records when a definition was changed."""
        raise NotImplementedError

    def triggers(self, table: sa.Table, connection: sa.Connection) -> Mapping[str, str]:
        """Return the statements that create the triggers of a table, by the names of the triggers."""
        if table.name == SCHEDULE:
            name = object_name(SCHEDULE, "changed")
            return {name: self.schedule_trigger(table, connection.dialect, name)}
        spec = queue_of(table)
        return {} if spec is None else triggers_of(spec, connection, self.now)

    def created(self, table: sa.Table, connection: sa.Connection) -> None:
        """Create the triggers of a table that has just been created."""
        for create in self.triggers(table, connection).values():
            connection.exec_driver_sql(create)


def moment_text(moment: datetime) -> str:
    """Return a moment in UTC, as a text of one length, so that texts sort as moments do."""
    if moment.tzinfo is not None:
        moment = moment.astimezone(UTC)
    return moment.replace(tzinfo=None).isoformat(" ", "microseconds")


def undecorated(type_: Any) -> Any:
    """Return the type that a TypeDecorator, or several, stand for; an Interval is returned as it is."""
    while isinstance(type_, sa.types.TypeDecorator) and not isinstance(type_, sa.Interval):
        type_ = type_.impl_instance
    return type_


def has_zone(type_: Any) -> bool:
    inner = undecorated(type_)
    return isinstance(inner, sa.DateTime) and inner.timezone


class SpanInSeconds(sa.types.UserDefinedType[timedelta]):
    """A span of time, in seconds. The result may also be a moment after 1970, of a column of the program."""

    cache_ok = True

    def get_col_spec(self, **_: Any) -> str:
        return "DOUBLE"

    def bind_processor(self, dialect: sa.Dialect) -> Any:
        return lambda value: value.total_seconds() if isinstance(value, timedelta) else value

    def result_processor(self, dialect: sa.Dialect, coltype: object) -> Any:
        interval: Any = sa.Interval().dialect_impl(dialect)
        read = interval.result_processor(dialect, coltype)

        def process(value: Any) -> timedelta | None:
            if value is None or isinstance(value, timedelta):
                return value
            if read is not None and issubclass(type(value), str | datetime):
                span: timedelta = read(value)
                return span
            return timedelta(seconds=float(value))

        return process


class Array(sa.types.UserDefinedType[Sequence[Any]]):
    """An array of values as JSON; a value is written as a column of its type has it."""

    cache_ok = True

    def __init__(self, element: Any = None, item_type: Any = None) -> None:
        self.element = item_type if element is None else element
        if isinstance(self.element, type):
            self.element = self.element()

    def get_col_spec(self, **_: Any) -> str:
        return "JSON"

    def bind_processor(self, dialect: sa.Dialect) -> Any:
        write = self.element.dialect_impl(dialect).bind_processor(dialect)

        def process(value: Any) -> Any:
            if value is None:
                return None
            return document([each if each is None or write is None else write(each) for each in value])

        return process

    def result_processor(self, dialect: sa.Dialect, coltype: object) -> Any:
        read = self.element.dialect_impl(dialect).result_processor(dialect, coltype)

        def process(value: Any) -> Any:
            if value is None:
                return None
            return [each if each is None or read is None else read(each) for each in json.loads(value)]

        return process


def document(value: Any) -> str:
    """Return values, as the driver has them, as a JSON document."""
    return json.dumps(value, default=plain, ensure_ascii=False)


def plain(value: Any) -> Any:
    """Return a value of the driver as JSON can represent it."""
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, datetime):
        return moment_text(value)
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value).hex()
    return value.hex if isinstance(value, UUID) else str(value)


def is_prepared(engine: sa.Engine) -> bool:
    """Return whether an engine has been prepared before; refuse one that has connected without it."""
    if engine_of(engine.dialect) is not None:
        return True
    pool: Any = engine.pool
    if hasattr(pool, "checkedin") and pool.checkedin() + pool.checkedout():
        msg = (
            f"prepare({engine!r}): the engine has connections already, which are not prepared; call it right after "
            "create_engine()"
        )
        raise ConfigurationError(msg)
    return False


def replace_compiler(
    engine: sa.Engine,
    other: OtherEngine,
    *,
    drivers: tuple[str, ...],
    compiler: type[Any],
    types: Mapping[type[Any], type[Any]],
) -> None:
    """Let an engine compile the library's statements and types.

    :param drivers: the modules whose errors are those of this database.
    :param compiler: of statements.
    :param types: what stands for SQLAlchemy's types.
    """
    dialect: Any = engine.dialect
    mark_prepared(dialect, other, drivers)
    dialect.statement_compiler = compiler
    shared = {Span: SpanInSeconds, TextArray: Array, sa.ARRAY: Array, postgresql.JSONB: sa.JSON}
    dialect.colspecs = {**dialect.colspecs, **shared, **types}
    dialect._type_memos.clear()  # noqa: SLF001 - types that were adapted before have the implementations of before
    engine.clear_compiled_cache()


# -- tables ------------------------------------------------------------------------------------------------------------
# What CREATE TABLE and CREATE INDEX of a prepared engine have in another form than those of any other engine.

_PREFIX = "sqlaqueue_"
_HOOKS = "_compiler_dispatcher"
"""Where SQLAlchemy 2.0 and 2.1 keep the functions of ``@compiles``, by the names of dialects and by "default"."""


def on_prepared(construct: type[Any], *names: str) -> Callable[[Render], Render]:
    """Let a function render a construct or a type of SQLAlchemy on prepared engines.

    It gets the element, the compiler and a function that renders an element as any other engine does: as SQLAlchemy, or
    as a function that the program has registered by ``@compiles`` for these dialects before, or for all of them.
    """
    known = construct.__dict__.get(_HOOKS)
    before = {} if known is None else {name: known.specs.get(name) for name in names}

    def register(render: Render) -> Render:
        def hook(element: Any, compiler: Any, **options: Any) -> Any:
            def as_before(element: Any) -> Any:
                found = before.get(compiler.dialect.name) or construct.__dict__[_HOOKS].specs["default"]
                return found(element, compiler, **options)

            if engine_of(compiler.dialect) is None:
                return as_before(element)
            return render(element, compiler, as_before)

        compiles(construct, *names)(hook)
        return render

    return register


@on_prepared(postgresql.JSONB, *PREPARED)
@on_prepared(sa.ARRAY, *PREPARED)
def _render_as_json(_: Any, compiler: Any, __: Any) -> Any:
    return compiler.process(sa.JSON())


@on_prepared(CreateColumn, *PREPARED)
def _create_column(create: CreateColumn, compiler: Any, as_before: Any) -> Any:
    return as_before(CreateColumn(stored_column(create.element, compiler.dialect)))


def is_of_library(column: sa.Column[Any]) -> bool:
    """Return whether the library has added a column: to the table of a queue, or in a table of its own."""
    return "sqlaqueue" in column.info or column.table.name.startswith(_PREFIX)


def stored_column(column: sa.Column[Any], dialect: sa.Dialect) -> sa.Column[Any]:
    """Return a column as a prepared engine creates it.

    The ``now()`` of a program is replaced where its column has a time zone, so that it is the moment in UTC.
    """
    engine: Any = engine_of(dialect)
    type_ = engine.stored_type(column, dialect) if is_of_library(column) else column.type
    default = column.server_default
    value = getattr(default, "arg", None)
    if isinstance(value, now) and has_zone(column.type):
        default = sa.DefaultClause(MomentOfInsert())
    elif isinstance(value, SqlText) and value.others == "NULL":
        default = None
    if type_ is column.type and default is column.server_default:
        return column
    stored = copy.copy(column)
    stored.type, stored.server_default = type_, default
    return stored


@on_prepared(CreateIndex, *PREPARED)
def _create_index(create: CreateIndex, compiler: Any, as_before: Any) -> Any:
    index: Any = create.element
    if index.info.get(PLAIN) is None:
        return as_before(create)
    stored = stored_index(index, index.table.to_metadata(sa.MetaData()), compiler.dialect)
    return as_before(CreateIndex(stored, if_not_exists=create.if_not_exists))


def stored_index(index: sa.Index, table: sa.Table, dialect: sa.Dialect) -> sa.Index:
    """Replace an index in a copy of its table by the one that is created.

    Without partial indexes it begins with the columns of its condition.
    """
    plain: PlainIndex = index.info[PLAIN]
    (copied,) = (each for each in table.indexes if each.name == index.name)
    table.indexes.discard(copied)
    of_copy: Any = copied.expressions if plain.columns is None else (table.c[each.key] for each in plain.columns)
    columns: list[Any] = [*of_copy]
    options = {}
    if dialect.name == "sqlite":
        options["sqlite_where"] = plain.where
    else:
        columns[:0] = [table.c[each.key] for each in plain.leading]
    return sa.Index(conv(str(index.name)), *dict.fromkeys(columns), unique=index.unique, **options)
