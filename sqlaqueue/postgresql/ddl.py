"""Database objects that SQLAlchemy has no construct for: trigger functions, triggers, storage parameters.

Each is a :class:`~sqlalchemy.schema.DDLElement` rendered by the dialect's own preparer, so that quoting and
``schema_translate_map`` work as for tables. :func:`attach` ties one to a table: it is created after the table and
dropped with it, and :func:`objects_of` lists what belongs to a table, for migrations to compare.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.dialects import postgresql
from sqlalchemy.dialects.postgresql import CITEXT
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.schema import DDLElement
from sqlalchemy.sql.compiler import DDLCompiler, SQLCompiler
from sqlalchemy.sql.elements import ColumnElement
from sqlalchemy.types import UserDefinedType

from sqlaqueue.queue.spec import QueueSpec

_make_dialect: Any = postgresql.dialect
NEUTRAL: sa.Dialect = _make_dialect(paramstyle="named")
"""Writes SQL that is kept as text, and belongs to no driver: no percent sign is doubled."""

# Not in table.info, which Alembic writes into migrations as if it were source code.
_OBJECTS = "_sqlaqueue_objects"
_SPEC = "_sqlaqueue_spec"

_VERSION = re.compile(r"sqlaqueue, version (\d+)")


def version_comment(version: int) -> str:
    """Return the comment that says in the database which version of a trigger function it is."""
    return f"sqlaqueue, version {version}"


def version_in(comment: str | None) -> int:
    """Return the version that a function's comment names; 0 for a function from before there were any."""
    found = _VERSION.fullmatch(comment or "")
    return int(found[1]) if found else 0


class QueueObject(DDLElement):
    """Base of the objects of a queue: each knows how to create and how to drop itself."""

    inherit_cache = False
    table: sa.Table

    def created(self) -> Sequence[DDLElement]:
        """Return what creates the object, in order."""
        return [self]

    def dropped(self) -> DDLElement | None:
        """Return what removes the object, None when it goes with its table."""
        return None


@dataclass(eq=False)
class TriggerFunction(QueueObject):
    """A trigger function in PL/pgSQL, in the schema of its table.

    It runs with a search path of its own: the writer of a row may have set another one, under which the unqualified
    names in the body would mean something else. And it finds rows by an index, even where reading the table seems to
    cost less: the plan is kept for as long as the connection is, and the table may grow meanwhile.
    """

    table: sa.Table
    name: str
    body: str
    """Its text; ``{key}`` stands for the table of that key in ``tables``, whose schema may be translated."""
    tables: dict[str, sa.Table] = field(default_factory=dict)
    comment: str | None = None
    definer: bool = False
    """Whether it runs with the rights of its owner (``SECURITY DEFINER``), so that writers need none on ``tables``."""

    def created(self) -> Sequence[DDLElement]:
        """Return the CREATE FUNCTION, what gives it its owner's rights, and the COMMENT that tells its version."""
        entrust: list[DDLElement] = [EntrustFunction(self)] if self.definer else []
        comment: list[DDLElement] = [] if self.comment is None else [CommentOnFunction(self)]
        return [self, *entrust, *comment]

    def dropped(self) -> DDLElement:
        """Return the DROP FUNCTION, which a dropped table does not bring with it."""
        return DropFunction(self)


@dataclass(eq=False)
class DropFunction(DDLElement):
    """Drops a :class:`TriggerFunction`."""

    function: TriggerFunction


@dataclass(eq=False)
class EntrustFunction(DDLElement):
    """Lets a :class:`TriggerFunction` run with the rights of its owner, for its own triggers and nobody else.

    Whoever may execute a trigger function may tie it to a table of their own, and have it do to the messages what they
    write there: so the right is taken from PUBLIC. The temporary schema comes last, where by default it would come
    first: a writer's temporary table in the place of the real one would run its triggers with the owner's rights.
    """

    function: TriggerFunction


@dataclass(eq=False)
class CommentOnFunction(DDLElement):
    """Writes the comment of a :class:`TriggerFunction`."""

    function: TriggerFunction


@dataclass(eq=False)
class Trigger(QueueObject):
    """A trigger that fires after ``event``, which is INSERT, UPDATE, DELETE or TRUNCATE.

    Once a statement, with transition tables; or, with a condition, once for each row that meets it.
    """

    table: sa.Table
    name: str
    event: str
    function: TriggerFunction
    rows: dict[str, str] = field(default_factory=dict)
    """``{"NEW": name, "OLD": name}`` of the transition tables."""
    when: str | None = None
    """The condition on the rows ``NEW`` and ``OLD``, as SQL."""
    replace: bool = False
    """Whether a trigger of the name may be there already."""


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


def escaped(compiler: DDLCompiler, text: str) -> str:
    """Return SQL with its percent signs doubled where the driver at hand wants that."""
    return compiler.sql_compiler.process(sa.literal_column(text))


@compiles(TriggerFunction, "postgresql")
def _create_function(element: TriggerFunction, compiler: DDLCompiler, **_: Any) -> str:
    body = escaped(compiler, element.body)
    for key, table in element.tables.items():
        body = body.replace(f"{{{key}}}", compiler.preparer.format_table(table))
    return (
        f"CREATE OR REPLACE FUNCTION {_qualified(compiler, element)}() RETURNS trigger\n"
        "LANGUAGE plpgsql SET search_path FROM CURRENT SET enable_seqscan = off "
        f"AS $sqlaqueue$\n{body}$sqlaqueue$"
    )


@compiles(EntrustFunction, "postgresql")
def _entrust_function(element: EntrustFunction, compiler: DDLCompiler, **_: Any) -> str:
    function = f"{_qualified(compiler, element.function)}()"
    # In dollars: the name may have a quote in it, and its schema is put in later.
    in_schema = (
        "SELECT quote_ident(n.nspname) FROM pg_proc AS f JOIN pg_namespace AS n ON n.oid = f.pronamespace\n"  # noqa: S608 - the preparer has quoted it
        f"    WHERE f.oid = to_regprocedure($name${function}$name$)"
    )
    return (
        f"DO $sqlaqueue$\nBEGIN\n  REVOKE ALL ON FUNCTION {function} FROM PUBLIC;\n"
        f"  EXECUTE $alter$ALTER FUNCTION {function} SECURITY DEFINER SET search_path = pg_catalog, $alter$ ||\n"
        f"    ({in_schema}) || ', pg_temp';\nEND\n$sqlaqueue$"
    )


@compiles(CommentOnFunction, "postgresql")
def _comment_on_function(element: CommentOnFunction, compiler: DDLCompiler, **_: Any) -> str:
    function, comment = element.function, "NULL"
    if function.comment is not None:
        comment = compiler.sql_compiler.process(sa.literal(function.comment, sa.Text()), literal_binds=True)
    return f"COMMENT ON FUNCTION {_qualified(compiler, function)}() IS {comment}"


@compiles(DropFunction, "postgresql")
def _drop_function(element: DropFunction, compiler: DDLCompiler, **_: Any) -> str:
    return f"DROP FUNCTION IF EXISTS {_qualified(compiler, element.function)}()"


@compiles(Trigger, "postgresql")
def _create_trigger(element: Trigger, compiler: DDLCompiler, **_: Any) -> str:
    rows = "".join(f"{which} TABLE AS {name} " for which, name in element.rows.items())
    create = "CREATE OR REPLACE TRIGGER" if element.replace else "CREATE TRIGGER"
    each = "STATEMENT" if element.when is None else f"ROW WHEN ({escaped(compiler, element.when)})"
    return (
        f"{create} {compiler.preparer.quote(element.name)} AFTER {element.event} "
        f"ON {compiler.preparer.format_table(element.table)} {f'REFERENCING {rows}' if rows else ''}"
        f"FOR EACH {each} EXECUTE FUNCTION {_qualified(compiler, element.function)}()"
    )


@compiles(StorageParameters, "postgresql")
def _set_parameters(element: StorageParameters, compiler: DDLCompiler, **_: Any) -> str:
    settings = ", ".join(f"{name} = {value}" for name, value in element.parameters.items())
    return f"ALTER TABLE {compiler.preparer.format_table(element.table)} SET ({settings})"


class NameOf(ColumnElement[str]):
    """The name of a table as SQL has it, as a text; its schema is translated like any other."""

    inherit_cache = False

    def __init__(self, table: sa.Table) -> None:
        self.table = table


@compiles(NameOf)
def _name_of(element: NameOf, compiler: SQLCompiler, **_: Any) -> str:
    # In dollars: a schema that is put in later may have a quote in its name.
    return f"$sqlaqueue${compiler.preparer.format_table(element.table)}$sqlaqueue$"


class TableId(ColumnElement[Any]):
    """The identity of a table in the database, null when there is none of the name."""

    inherit_cache = False

    def __init__(self, table: sa.Table) -> None:
        self.table_name = NameOf(table)


@compiles(TableId)
def _table_id(element: TableId, compiler: SQLCompiler, **_: Any) -> str:
    return f"to_regclass({compiler.process(element.table_name)})"


def plain_type(column: sa.Column[Any]) -> Any:
    """Return the type that a column has in PostgreSQL, without what an application makes of it."""
    plain = column.type.dialect_impl(NEUTRAL)
    return getattr(plain, "impl_instance", plain)


def equals(column: sa.Column[Any]) -> str:
    """Return the operator that compares a column, by a name that only PostgreSQL's own answers to.

    A type of an extension brings its operators along, in whatever schema they are.
    """
    plain = plain_type(column)
    own = type(plain).__module__.startswith("sqlalchemy.") and not isinstance(plain, CITEXT | UserDefinedType)
    return "OPERATOR(pg_catalog.=)" if own else "="


def sees_all(table: sa.Table) -> sa.ColumnElement[bool]:
    """Return the condition that no row of a table is hidden from the role: row-level security does not apply to it."""
    hidden: sa.ColumnElement[bool] = sa.func.row_security_active(NameOf(table), type_=sa.Boolean())
    return ~hidden


def objects_of(table: sa.Table) -> Sequence[QueueObject]:
    """Return what has been attached to a table."""
    objects: Sequence[QueueObject] = table.__dict__.get(_OBJECTS, ())
    return objects


class _Queue:
    """The queue of a table, which belongs to this process: a pickle of the table leaves it behind."""

    def __init__(self, spec: QueueSpec | None = None) -> None:
        self.spec = spec

    def __reduce__(self) -> tuple[type[_Queue], tuple[()]]:
        return _Queue, ()


def set_queue(table: sa.Table, spec: QueueSpec) -> None:
    """Note that a table is the one of a queue, and forget what was attached for a class that had it before.

    A class is defined again where its module is reloaded, and its table says ``extend_existing``.
    """
    before = queue_of(table)
    if before is not None:
        table.__dict__.pop(_OBJECTS, None)
        for purpose, side in before.side_tables.items():
            # Tables that all queues of a schema share are known by their names.
            if purpose != side.name:
                table.metadata.remove(side)
    table.__dict__[_SPEC] = _Queue(spec)


def queue_of(table: sa.Table) -> QueueSpec | None:
    """Return the queue whose jobs are the rows of a table, None when there is none."""
    found: _Queue | None = table.__dict__.get(_SPEC)
    return None if found is None else found.spec


def attach(table: sa.Table, element: QueueObject) -> None:
    """Create ``element`` after ``table`` and drop it with it, on PostgreSQL."""
    table.__dict__.setdefault(_OBJECTS, []).append(element)


# Of all tables: what is listened for by one of them would not come along when its MetaData is pickled.


@event.listens_for(sa.Table, "after_create")
def _create_objects(table: sa.Table, connection: sa.Connection, **_: Any) -> None:
    for element in objects_of(table):
        for created in element.created():
            _execute(created, table, connection)


@event.listens_for(sa.Table, "after_drop")
def _drop_objects(table: sa.Table, connection: sa.Connection, **_: Any) -> None:
    for element in objects_of(table):
        dropped = element.dropped()
        if dropped is not None:
            _execute(dropped, table, connection)


# -- the tables that a queue needs beside its own ----------------------------------------------------------------------


@event.listens_for(sa.MetaData, "after_create")
def _create_beside(
    metadata: sa.MetaData,  # noqa: ARG001 - the event's signature
    connection: sa.Connection,
    tables: Sequence[sa.Table] | None = None,
    **options: Any,
) -> None:
    # Where nothing is looked for first, and with Table.create(), each table is made by its caller.
    if options.get("checkfirst"):
        _create_side_tables(tables or (), connection)


def _create_side_tables(tables: Sequence[sa.Table], connection: sa.Connection) -> None:
    """Create what queues among these tables need, if only some tables were asked for.

    The first row would fail inside a trigger, or the first claim, naming a table that is in no model.
    """
    if connection.dialect.name != "postgresql":
        return
    for table in tables:
        spec = queue_of(table)
        for side in () if spec is None else spec.side_tables.values():
            if side not in tables:
                side.create(connection, checkfirst=True)


def _execute(element: DDLElement, table: sa.Table, connection: sa.Connection) -> None:
    element.execute_if(dialect="postgresql")(table, connection)
