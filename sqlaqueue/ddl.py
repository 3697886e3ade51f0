"""Database objects that SQLAlchemy has no construct for: trigger functions, triggers, storage parameters.

Each is a :class:`~sqlalchemy.schema.DDLElement` rendered by the dialect's own preparer, so that quoting and
``schema_translate_map`` work as for tables. :func:`attach` ties one to a table: it is created after the table and
dropped with it, and ``table.info["sqlaqueue"]`` lists what belongs to a table, for migrations to compare.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.schema import DDLElement
from sqlalchemy.sql.compiler import DDLCompiler

Body = Callable[[DDLCompiler], str]
"""Writes the body of a function with names and literals as the dialect at hand has them."""


class QueueObject(DDLElement):
    """Base of the objects of a queue: each knows how to create and how to drop itself."""

    inherit_cache = False
    table: sa.Table

    def dropped(self) -> DDLElement | None:
        """Return what removes the object, None when it goes with its table."""
        return None


@dataclass(eq=False)
class TriggerFunction(QueueObject):
    """A trigger function in PL/pgSQL, in the schema of its table.

    It runs with the search path of its creation: the writer of a row may have set another one, under which the
    unqualified names in the body would mean something else.
    """

    table: sa.Table
    name: str
    body: Body

    def dropped(self) -> DDLElement:
        """Return the DROP FUNCTION, which a dropped table does not bring with it."""
        return DropFunction(self)


@dataclass(eq=False)
class DropFunction(DDLElement):
    """Drops a :class:`TriggerFunction`."""

    function: TriggerFunction


@dataclass(eq=False)
class Trigger(QueueObject):
    """A statement trigger: ``event`` is INSERT, UPDATE, DELETE or TRUNCATE; tables of rows are named by ``rows``."""

    table: sa.Table
    name: str
    event: str
    function: TriggerFunction
    rows: dict[str, str] = field(default_factory=dict)
    """``{"NEW": name, "OLD": name}`` of the transition tables."""


@dataclass(eq=False)
class StorageParameters(QueueObject):
    """Storage parameters of a table whose rows come and go at a high rate.

    The defaults of autovacuum wait for a fifth of the table to be dead; a queue's table is nearly empty and
    rewritten all the time, so a fixed number of dead rows is the better sign.
    """

    table: sa.Table
    parameters: dict[str, str] = field(
        default_factory=lambda: {
            "autovacuum_vacuum_scale_factor": "0",
            "autovacuum_vacuum_threshold": "5000",
            "autovacuum_vacuum_cost_delay": "0",
        }
    )


def _qualified(compiler: DDLCompiler, function: TriggerFunction) -> str:
    # A table of the function's name makes the preparer qualify, quote and translate it like any other.
    stand_in = sa.Table(function.name, sa.MetaData(), schema=function.table.schema)
    return compiler.preparer.format_table(stand_in)


@compiles(TriggerFunction, "postgresql")
def _create_function(element: TriggerFunction, compiler: DDLCompiler, **_: Any) -> str:
    return (
        f"CREATE OR REPLACE FUNCTION {_qualified(compiler, element)}() RETURNS trigger\n"
        f"LANGUAGE plpgsql SET search_path FROM CURRENT AS $sqlaqueue$\n{element.body(compiler)}$sqlaqueue$"
    )


@compiles(DropFunction, "postgresql")
def _drop_function(element: DropFunction, compiler: DDLCompiler, **_: Any) -> str:
    return f"DROP FUNCTION IF EXISTS {_qualified(compiler, element.function)}()"


@compiles(Trigger, "postgresql")
def _create_trigger(element: Trigger, compiler: DDLCompiler, **_: Any) -> str:
    rows = "".join(f"{which} TABLE AS {name} " for which, name in element.rows.items())
    return (
        f"CREATE TRIGGER {compiler.preparer.quote(element.name)} AFTER {element.event} "
        f"ON {compiler.preparer.format_table(element.table)} {f'REFERENCING {rows}' if rows else ''}"
        f"FOR EACH STATEMENT EXECUTE FUNCTION {_qualified(compiler, element.function)}()"
    )


@compiles(StorageParameters, "postgresql")
def _set_parameters(element: StorageParameters, compiler: DDLCompiler, **_: Any) -> str:
    settings = ", ".join(f"{name} = {value}" for name, value in element.parameters.items())
    return f"ALTER TABLE {compiler.preparer.format_table(element.table)} SET ({settings})"


def attach(table: sa.Table, element: QueueObject) -> None:
    """Create ``element`` after ``table`` and drop it with it, on PostgreSQL."""
    table.info.setdefault("sqlaqueue", []).append(element)
    event.listen(table, "after_create", element.execute_if(dialect="postgresql"))
    dropped = element.dropped()
    if dropped is not None:
        event.listen(table, "after_drop", dropped.execute_if(dialect="postgresql"))
