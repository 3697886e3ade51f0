"""Replaces the compilers and types of one engine's dialect."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql

from sqlaqueue.engines.types import Array
from sqlaqueue.exc import ConfigurationError
from sqlaqueue.sql.engine import PREPARED_BY, OtherEngine, engine_of, mark_prepared
from sqlaqueue.sql.types import TextArray


def whole_engine(engine: Any) -> sa.Engine:
    """Return the Engine of an AsyncEngine, and that from which ``execution_options()`` has made another one.

    These share dialect and pool, so one of them cannot be prepared without the others.
    """
    found = getattr(engine, "sync_engine", engine)
    while (before := getattr(found, "_proxied", None)) is not None:
        found = before
    whole: sa.Engine = found
    return whole


def is_prepared(engine: sa.Engine) -> bool:
    """Return whether an engine has been prepared before; refuse one that has connected without it.

    :raises ConfigurationError: naming the call that comes too late.
    """
    if engine_of(engine.dialect) is not None:
        return True
    pool: Any = engine.pool
    if hasattr(pool, "checkedin") and pool.checkedin() + pool.checkedout():
        call = PREPARED_BY[engine.dialect.name].replace("engine", repr(engine))
        msg = f"{call}: the engine has connections already, which are not prepared; call it right after create_engine()"
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
