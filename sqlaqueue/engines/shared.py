"""What all engines but PostgreSQL give in the same way: types, compilers, and how they refuse what they lack."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql

from sqlaqueue.engines import checks, notifications
from sqlaqueue.exc import ConfigurationError
from sqlaqueue.sql.engine import PLAIN, OtherEngine, engine_of, mark_prepared
from sqlaqueue.sql.types import TextArray

TIMING = ("cron", "every", "timezone", "paused_at")
"""The columns of a schedule whose change is recorded: no tick before it is fired by the new definition."""

_SECONDS = re.compile(r"EXTRACT\(epoch FROM (\w+)\)")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MOMENT = re.compile(r"to_timestamp\((\d+)\)")


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
        for key in spec.keys:
            if isinstance(getattr(key.type, "impl_instance", key.type), sa.LargeBinary):
                msg = (
                    f"{name}.{key.key}: a key of bytes is not available on {self.title}, where keys are given to "
                    "statements as JSON; use a number, a text or a UUID"
                )
                raise ConfigurationError(msg)

    def check_storage(self, connection: sa.Connection, spec: Any) -> None:
        """Accept the tables as they are."""


def moment_text(moment: datetime) -> str:
    """Return a moment in UTC, as a text of one length, so that texts sort as moments do."""
    if moment.tzinfo is not None:
        moment = moment.astimezone(UTC)
    return moment.replace(tzinfo=None).isoformat(" ", "microseconds")


def translated_check(text: str, quote: Callable[[str], str] = str) -> str:
    """Return a condition of the table of schedules in which spans are seconds, and moments are texts.

    :param quote: quotes the name of a column.
    """
    text = _SECONDS.sub(lambda span: quote(span[1]), text)
    return _MOMENT.sub(lambda found: f"'{moment_text(_EPOCH + timedelta(seconds=int(found[1])))}'", text)


def plain_index(index: sa.Index) -> tuple[list[Any], Any]:
    """Return the columns of an index and its condition, None without one."""
    columns, where = index.info.get(PLAIN) or (index.expressions, index.dialect_options["postgresql"]["where"])
    return [*dict.fromkeys(columns)], where


def undecorated(type_: Any) -> Any:
    """Return the type that a TypeDecorator, or several, stand for; an Interval is returned as it is."""
    while isinstance(type_, sa.types.TypeDecorator) and not isinstance(type_, sa.Interval):
        type_ = type_.impl_instance
    return type_


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


def replace_compilers(
    engine: sa.Engine,
    other: OtherEngine,
    *,
    drivers: tuple[str, ...],
    compilers: tuple[type[Any], type[Any], type[Any]],
    types: Mapping[type[Any], type[Any]],
) -> None:
    """Let an engine compile the library's statements, tables and types.

    :param drivers: the modules whose errors are those of this database.
    :param compilers: of statements, of tables and of types.
    :param types: what stands for SQLAlchemy's types.
    """
    dialect: Any = engine.dialect
    mark_prepared(dialect, other, drivers)
    dialect.statement_compiler, dialect.ddl_compiler, type_compiler = compilers
    dialect.type_compiler_instance = dialect.type_compiler = type_compiler(dialect)
    shared = {TextArray: Array, sa.ARRAY: Array, postgresql.JSONB: sa.JSON}
    dialect.colspecs = {**dialect.colspecs, **shared, **types}
    dialect._type_memos.clear()  # noqa: SLF001 - types that were adapted before have the implementations of before
    engine.clear_compiled_cache()
