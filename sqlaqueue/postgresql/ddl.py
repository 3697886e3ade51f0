"""Database objects for which SQLAlchemy has no construct: functions, triggers, storage parameters, tied to a table."""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.exc import InternalError
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.schema import DDLElement
from sqlalchemy.sql.compiler import DDLCompiler, IdentifierPreparer, SQLCompiler
from sqlalchemy.sql.elements import ClauseElement
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.sql.visitors import InternalTraversal
from sqlalchemy.types import TypeEngine

from sqlaqueue.exc import DatabaseNotReadyError
from sqlaqueue.queue.names import SCHEDULE
from sqlaqueue.queue.roles import literal_text
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.sql.engine import PREPARED, engine_of
from sqlaqueue.sql.types import NEUTRAL, check_dialect

UPDATE_COMMAND: str = "`alembic revision --autogenerate -m sqlaqueue && alembic upgrade head`"
"""The command that migrates a database, in a project whose ``env.py`` imports the plug-in."""

_VERSION = re.compile(r"sqlaqueue, version (\d+)")


def version_comment(version: int) -> str:
    return f"sqlaqueue, version {version}"


def version_in(comment: str | None) -> int:
    """Return the version in a function's comment; 0 without one."""
    found = _VERSION.fullmatch(comment or "")
    return int(found[1]) if found else 0


class QueueObject(DDLElement):
    """Base of the objects of a queue, which can be created and dropped."""

    inherit_cache = False
    table: sa.Table

    def created(self) -> Sequence[DDLElement]:
        """Return the statements that create the object, in order."""
        return [self]

    def dropped(self) -> DDLElement | None:
        """Return the statement that drops the object; None when PostgreSQL drops it with its table."""
        return None


@dataclass(eq=False)
class Function(QueueObject):
    """A function in PL/pgSQL that statements of a queue call, in the schema of its table.

    It runs with the caller's search path, by which the statement that calls it has found the same tables; to set
    another one takes as long as the whole call. A trigger function sets its own: under a writer's search path, the
    unqualified names in its body could mean other objects. Both disable sequential scans, because PL/pgSQL keeps a plan
    for as long as the connection lives while the table grows. A function that statements call keeps each of its plans.
    """

    kind: ClassVar[str] = "function"
    """What messages call it."""

    table: sa.Table
    name: str
    """Another one for other arguments or another result: CREATE OR REPLACE changes neither."""
    arguments: str
    """Names and types in SQL, without defaults. Migrations and checks compare them as text, so the types are built-in
    ones, and written as the server prints them: ``key bigint, since timestamp with time zone``.
    """
    returns: str
    """The type of the result, as the server prints it."""
    body: str
    """The source; ``{key}`` stands for the table under that key in ``tables``, whose schema may be translated."""
    tables: dict[str, sa.Table] = field(default_factory=dict)
    comment: str | None = None
    definer: bool = False
    """Whether it runs with its owner's privileges (``SECURITY DEFINER``), so that callers need none on ``tables``."""
    bare: bool = False
    """Whether it changes no setting, as that takes longer than a short trigger function: a call of one that enqueues
    took a third of the statement's time. It names PostgreSQL's own objects only, each with its schema."""

    @property
    def sets_search_path(self) -> bool:
        return self.definer or (self.returns == "trigger" and not self.bare)

    @property
    def signature(self) -> str:
        """The name, unquoted, and the arguments: the function of a schema is looked up by both."""
        return f"{self.name}({self.arguments})"

    def created(self) -> Sequence[DDLElement]:
        """Return CREATE FUNCTION, the statement that makes it SECURITY DEFINER, and COMMENT."""
        secure: list[DDLElement] = [SecureFunction(self)] if self.definer else []
        comment: list[DDLElement] = [] if self.comment is None else [CommentOnFunction(self)]
        return [self, *secure, *comment]

    def dropped(self) -> DDLElement:
        """Return DROP FUNCTION: dropping the table leaves the function behind."""
        return DropFunctionStatement(self)


@dataclass(eq=False)
class TriggerFunction(Function):
    kind: ClassVar[str] = "trigger function"

    arguments: str = field(default="", init=False)
    returns: str = field(default="trigger", init=False)


class _OfFunction(DDLElement):
    def __init__(self, function: Function) -> None:
        self.function = function


class DropFunctionStatement(_OfFunction):
    pass


class SecureFunction(_OfFunction):
    """Makes a :class:`Function` SECURITY DEFINER, and revokes EXECUTE from PUBLIC.

    A role with EXECUTE could attach a trigger function to a table of its own, and so change the messages with the
    owner's privileges. The temporary schema comes last in the search path; by default it is first, and a writer's
    temporary table with the name of the real one would run its own triggers with the owner's privileges.
    """


class CommentOnFunction(_OfFunction):
    pass


BEFORE_ROW, DEFERRED_INSERT = "BEFORE INSERT OR UPDATE", "DEFERRED INSERT"
"""The events of triggers that change a row, and of those that fire at the commit."""


@dataclass(eq=False)
class Trigger(QueueObject):
    """A trigger that fires after ``event``: INSERT, UPDATE, DELETE or TRUNCATE.

    It fires once for each statement, with transition tables, or with a condition once for each row that meets it. The
    event ``BEFORE INSERT OR UPDATE`` is for a row trigger that changes the row, and ``DEFERRED INSERT`` for one that
    fires for each row when the transaction commits.
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
    """Whether a trigger of this name may exist already."""


def conditional_trigger(table: sa.Table, name: str, event: str, function: TriggerFunction, when: str | None) -> Trigger:
    """Return a trigger with a condition, whose name ends with the digest of that.

    The server rewrites a condition when it stores it, so only the name tells whether it has changed.
    """
    digest = hashlib.sha256((when or "").encode()).hexdigest()[:8]
    return Trigger(table, f"{name}_{digest}", event, function, when=when)


QUEUE_VACUUM = {
    "autovacuum_vacuum_scale_factor": "0",
    "autovacuum_vacuum_threshold": "5000",
    "autovacuum_vacuum_cost_delay": "0",
}
"""The storage parameters of tables whose rows are inserted and deleted at a high rate.

By default autovacuum waits until a fifth of the rows is dead. A queue's table is nearly empty and rewritten all the
time, so a fixed number of dead rows is the better threshold."""


@dataclass(eq=False)
class StorageParameters(QueueObject):
    table: sa.Table
    parameters: dict[str, str] = field(default_factory=QUEUE_VACUUM.copy)


# -- attach ------------------------------------------------------------------------------------------------------------
# Ties database objects to a table: they are created after it and dropped with it.
#
# The events are those of all tables: a listener of one table would be lost when its MetaData is pickled.


_NO_TRIGGERS = "triggers are not supported on distributed tables"
"""The error of Citus, which has no SQLSTATE of its own."""

# Not in table.info, which Alembic writes into migrations as if it were source code.
_OBJECTS = "_sqlaqueue_objects"
_SPEC = "_sqlaqueue_spec"

_OURS = "sqlaqueue_"
"""The prefix of the tables that the library adds."""


class _Queue:
    """The queue of a table. It belongs to this process; a pickle of the table leaves it out."""

    def __init__(self, spec: QueueSpec | None = None) -> None:
        self.spec = spec

    def __reduce__(self) -> tuple[type[_Queue], tuple[()]]:
        return _Queue, ()


def set_queue(table: sa.Table, spec: QueueSpec) -> None:
    """Register the queue of a table, and detach the objects of a class that had the table before.

    A class is defined again when its module is reloaded and its table has ``extend_existing``.
    """
    before = queue_of(table)
    if before is not None:
        table.__dict__.pop(_OBJECTS, None)
        for purpose, side in before.side_tables.items():
            # Tables that the queues of a schema share are registered under their own names.
            if purpose != side.name:
                table.metadata.remove(side)
    table.__dict__[_SPEC] = _Queue(spec)


def queue_of(table: sa.Table) -> QueueSpec | None:
    """Return the queue whose jobs are the rows of a table; None when there is none."""
    found: _Queue | None = table.__dict__.get(_SPEC)
    return None if found is None else found.spec


def attach(table: sa.Table, element: QueueObject) -> None:
    """Create ``element`` after ``table`` and drop it with it, on PostgreSQL.

    It takes the place of one of the same class and name: the class of jobs that wait for others may be defined again.
    """
    known, name = table.__dict__.setdefault(_OBJECTS, []), getattr(element, "name", None)
    known[:] = [
        each for each in known if name is None or (type(each), getattr(each, "name", None)) != (type(element), name)
    ]
    known.append(element)


def objects_of(table: sa.Table) -> Sequence[QueueObject]:
    objects: Sequence[QueueObject] = table.__dict__.get(_OBJECTS, ())
    return objects


def functions_of(spec: QueueSpec) -> Sequence[Function]:
    """Return the functions that statements of a queue call, those of its side tables among them."""
    objects = (each for table in (spec.table, *spec.side_tables.values()) for each in objects_of(table))
    return [each for each in objects if isinstance(each, Function) and not isinstance(each, TriggerFunction)]


@event.listens_for(sa.Table, "before_create")
def _check_supported(table: sa.Table, connection: sa.Connection, **_: Any) -> None:
    other, spec = engine_of(connection.dialect), queue_of(table)
    if other is not None:
        if spec is not None:
            other.check_supported(spec)
    elif connection.dialect.name in PREPARED and (spec is not None or table.name.startswith(_OURS)):
        # Another compiler leaves out the conditions of indexes: a unique index without its condition would forbid a
        # job for ever, once it has had a duplicate. The table of schedules would have no trigger.
        who = table.name if spec is None else spec.model.__name__
        check_dialect(connection.dialect, who, "the engine that creates the table")


@event.listens_for(sa.Table, "after_create")
def _create_objects(table: sa.Table, connection: sa.Connection, **_: Any) -> None:
    other = engine_of(connection.dialect)
    if other is not None:
        other.created(table, connection)
        return
    for element in objects_of(table):
        for created in element.created():
            _execute(created, table, connection)


@event.listens_for(sa.Table, "after_drop")
def _drop_objects(table: sa.Table, connection: sa.Connection, **_: Any) -> None:
    for element in objects_of(table):
        dropped = element.dropped()
        if dropped is not None:
            _execute(dropped, table, connection)


@event.listens_for(sa.MetaData, "after_create")
def _create_beside(
    metadata: sa.MetaData,  # noqa: ARG001 - the event's signature
    connection: sa.Connection,
    tables: Sequence[sa.Table] | None = None,
    **options: Any,
) -> None:
    """Create the side tables of the queues among ``tables``, if only some tables were requested.

    Without them the first row would fail inside a trigger, naming a table that is in no model.
    """
    is_supported = connection.dialect.name == "postgresql" or engine_of(connection.dialect) is not None
    # Without checkfirst, and with Table.create(), the caller creates each table.
    requested = (tables or ()) if options.get("checkfirst") and is_supported else ()
    for table in requested:
        spec = queue_of(table)
        for side in () if spec is None else spec.side_tables.values():
            if side not in requested:
                side.create(connection, checkfirst=True)


def _execute(element: DDLElement, table: sa.Table, connection: sa.Connection) -> None:
    try:
        element.execute_if(dialect="postgresql")(table, connection)
    except InternalError as error:
        if _NO_TRIGGERS not in str(error.orig):
            raise
        spec = queue_of(table)
        if table.name == SCHEDULE:
            instead = (
                "so there are no schedules; declare them for a queue whose table is local or distributed by a column"
            )
        elif spec is not None and (spec.waits or spec.awaited_by):
            instead = "so its jobs wait for none, and none for them; leave out waits_for, or use a local one"
        elif spec is not None and spec.config.strategy != "update_status":
            instead = 'so use QueueConfig(strategy="update_status", notify=False), or a local table'
        else:
            instead = "so use QueueConfig(notify=False), or a local table"
        msg = f"{table.fullname}: Citus creates no triggers in a distributed schema, {instead}"
        raise DatabaseNotReadyError(msg) from error


def qualified_name(preparer: IdentifierPreparer, name: str, schema: str | None) -> str:
    """Return the name of a function, quoted, with its schema, which is translated as that of a table.

    ``schema_translate_map`` does not apply to ``sa.func.schema.name()``.
    """
    return preparer.format_table(_stand_in(name, schema))


@functools.lru_cache
def _stand_in(name: str, schema: str | None) -> sa.Table:
    """Return a table of this name, which the preparer qualifies, quotes and translates."""
    return sa.Table(name, sa.MetaData(), schema=schema)


class _FunctionCall(FunctionElement[Any]):
    inherit_cache = True
    # The name and the schema belong to the key of the cache of statements. A table in their place would be replaced
    # where a statement gets aliases.
    _traverse_internals = [  # noqa: RUF012 - as SQLAlchemy declares it
        *FunctionElement._traverse_internals,  # noqa: SLF001 - SQLAlchemy documents no other way to extend the key
        ("name", InternalTraversal.dp_string),
        ("schema", InternalTraversal.dp_string),
        ("type", InternalTraversal.dp_type),
    ]

    def __init__(self, name: str, schema: str | None, arguments: tuple[Any, ...], type_: TypeEngine[Any]) -> None:
        self.name = name
        self.schema = schema
        self.type = type_
        super().__init__(*arguments)


@compiles(_FunctionCall)
def _render_call(element: _FunctionCall, compiler: SQLCompiler, **options: Any) -> str:
    name = qualified_name(compiler.preparer, element.name, element.schema)
    return f"{name}{compiler.process(element.clause_expr, **options)}"


def call(function_name: str, table: sa.Table, *arguments: Any, type_: TypeEngine[Any]) -> sa.ColumnElement[Any]:
    """Return the call of a function in the schema of a table; ``type_`` is that of its result."""
    return _FunctionCall(function_name, table.schema, arguments, type_)


# -- rendering ---------------------------------------------------------------------------------------------------------
# The SQL of a queue's database objects.
#
# The dialect's own preparer writes the names, so that quoting and ``schema_translate_map`` work as for tables.


def escaped(compiler: DDLCompiler, text: str) -> str:
    """Return SQL with its percent signs doubled where the driver requires it."""
    return compiler.sql_compiler.process(sa.literal_column(text))


def _qualified(compiler: DDLCompiler, function: Function) -> str:
    return qualified_name(compiler.preparer, function.name, function.table.schema)


def _signature(compiler: DDLCompiler, function: Function) -> str:
    return f"{_qualified(compiler, function)}({function.arguments})"


@compiles(Function, "postgresql")
def _create_function(element: Function, compiler: DDLCompiler, **_: Any) -> str:
    body = escaped(compiler, element.body)
    for key, table in element.tables.items():
        body = body.replace(f"{{{key}}}", compiler.preparer.format_table(table))
    path = "SET search_path FROM CURRENT " if element.sets_search_path else ""
    scans = "" if element.bare else "SET enable_seqscan = off "
    # Each query of a function that claims call is planned once. Since the planner cannot know the value of a LIMIT, it
    # would find a plan for the values of each call cheaper, and plan each call, which takes longer than the query.
    plan = "" if element.returns == "trigger" else "SET plan_cache_mode = force_generic_plan "
    return (
        f"CREATE OR REPLACE FUNCTION {_signature(compiler, element)} RETURNS {element.returns}\n"
        f"LANGUAGE plpgsql {path}{scans}{plan}"
        f"AS $sqlaqueue$\n{body}$sqlaqueue$"
    )


@compiles(SecureFunction, "postgresql")
def _secure_function(element: SecureFunction, compiler: DDLCompiler, **_: Any) -> str:
    function = _signature(compiler, element.function)
    # Dollar-quoted: the name may contain a quote, and its schema is inserted later. PostgreSQL does not look up a
    # signature with the names of arguments.
    oid = f"to_regprocedure($name${function}$name$)"
    if element.function.arguments:
        oid = f"to_regproc($name${_qualified(compiler, element.function)}$name$)"
    in_schema = (
        "SELECT quote_ident(n.nspname) FROM pg_proc AS f JOIN pg_namespace AS n ON n.oid = f.pronamespace\n"  # noqa: S608 - the preparer has quoted it
        f"    WHERE f.oid = {oid}"
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
    return f"COMMENT ON FUNCTION {_signature(compiler, function)} IS {comment}"


@compiles(DropFunctionStatement, "postgresql")
def _drop_function(element: DropFunctionStatement, compiler: DDLCompiler, **_: Any) -> str:
    return f"DROP FUNCTION IF EXISTS {_signature(compiler, element.function)}"


@compiles(Trigger, "postgresql")
def _create_trigger(element: Trigger, compiler: DDLCompiler, **_: Any) -> str:
    rows = "".join(f"{which} TABLE AS {name} " for which, name in element.rows.items())
    create = "CREATE OR REPLACE TRIGGER" if element.replace else "CREATE TRIGGER"
    each = "STATEMENT" if element.when is None else f"ROW WHEN ({escaped(compiler, element.when)})"
    event = element.event if element.event.startswith("BEFORE ") else f"AFTER {element.event}"
    if element.event == DEFERRED_INSERT:
        # PostgreSQL replaces no constraint trigger.
        create, event, each = "CREATE CONSTRAINT TRIGGER", "AFTER INSERT", "ROW"
    deferred = "DEFERRABLE INITIALLY DEFERRED " if element.event == DEFERRED_INSERT else ""
    return (
        f"{create} {compiler.preparer.quote(element.name)} {event} "
        f"ON {compiler.preparer.format_table(element.table)} {f'REFERENCING {rows}' if rows else ''}{deferred}"
        f"FOR EACH {each} EXECUTE FUNCTION {_signature(compiler, element.function)}"
    )


@compiles(StorageParameters, "postgresql")
def _set_parameters(element: StorageParameters, compiler: DDLCompiler, **_: Any) -> str:
    settings = ", ".join(f"{name} = {value}" for name, value in element.parameters.items())
    return f"ALTER TABLE {compiler.preparer.format_table(element.table)} SET ({settings})"


_PLACEHOLDER = re.compile(r"\{(\w+)(:literal)?\}")


def bare_table(name: str, schema: str | None) -> sa.Table:
    return sa.Table(name, sa.MetaData(), schema=schema)


class SqlTemplate(DDLElement):
    """One statement as text, for which SQLAlchemy has no construct; a script (``--sql``) contains it as any other DDL.

    ``{key}`` is the name of a table, quoted and with its schema translated; ``{key:literal}`` the name as a string.
    """

    inherit_cache = False

    def __init__(self, text: str, **tables: sa.Table) -> None:
        self.text = text
        self.tables = tables


@compiles(SqlTemplate, "postgresql", "sqlite", "mariadb", "mysql")
def _render_template(element: SqlTemplate, compiler: DDLCompiler, **_: Any) -> str:
    def replacement(match: re.Match[str]) -> str:
        table = element.tables.get(match[1])
        if table is None:
            return match[0]
        name = compiler.preparer.format_table(table)
        # Dollar-quoted: schema_translate_map inserts the schema later, and its name may contain a quote.
        return f"$sqlaqueue_name${name}$sqlaqueue_name$" if match[2] else name

    return _PLACEHOLDER.sub(replacement, escaped(compiler, element.text))


def literal_sql(expression: Any) -> str:
    """Return an expression over the columns of one table as SQL text, with its values as literals."""
    element = expression if isinstance(expression, ClauseElement) else sa.text(str(expression))
    options = {"literal_binds": True, "include_table": False}
    return str(element.compile(dialect=NEUTRAL, compile_kwargs=options))


def quoted(column: sa.Column[Any]) -> str:
    return NEUTRAL.identifier_preparer.quote(column.name)


def state_value(spec: QueueSpec, state: str) -> str:
    """Return the status value of a state as a literal."""
    return literal_text(spec.status_value(state), spec.columns["status"].type)


def in_state(spec: QueueSpec, row: str, state: str, *, equal: str = "=") -> str:
    """Return the condition that a job is in a state.

    :param row: ``NEW.`` or ``OLD.``, the name of a table with its dot, or nothing.
    :param equal: the operator, see :func:`~sqlaqueue.sql.types.equals`.
    """
    return f"{row}{quoted(spec.columns['status'])} {equal} {state_value(spec, state)}"


def index_definition(index: sa.Index) -> str:
    """Return what follows the name of the table in CREATE INDEX."""
    create = str(sa.schema.CreateIndex(index).compile(dialect=NEUTRAL))
    table = NEUTRAL.identifier_preparer.format_table(index.table)  # type: ignore[arg-type] # every index of a model has a table
    return create.partition(f" ON {table} ")[2]


def server_default_sql(column: sa.Column[Any]) -> str | None:
    compiler = NEUTRAL.ddl_compiler(NEUTRAL, None)  # type: ignore[arg-type] # only a part of a statement is compiled
    return compiler.get_column_default_string(column)
