"""How operations execute their statements: with short waits for locks, in batches, outside of a transaction.

The loops are part of the SQL, in DO blocks, so that a script (``--sql``) contains them as well.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import sqlalchemy as sa
from alembic.ddl.base import AddColumn
from alembic.operations import Operations
from alembic.util import CommandError
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.schema import DDLElement
from sqlalchemy.sql.compiler import DDLCompiler
from sqlalchemy.sql.elements import ColumnElement

from sqlaqueue.engines.shared import is_of_library, on_prepared, stored_column, stored_index
from sqlaqueue.postgresql.catalog_schemas import PREFIX
from sqlaqueue.postgresql.ddl import SqlTemplate, queue_of
from sqlaqueue.sql.engine import INSUFFICIENT_PRIVILEGE, PLAIN, PREPARED, exists_on, sqlstate

LOCK_TIMEOUT = 0.5
"""How long one attempt to lock a table waits, in seconds."""

ATTEMPTS = 120

PAGES_PER_BATCH = 64
"""How many pages of a table one batch reads: few enough for a writer to wait for it."""

SECONDS_BETWEEN_NOTICES = 10
"""How often the server tells how far the batches are; they can take hours."""

alembic_logger = logging.getLogger("alembic.sqlaqueue")
"""Below the logger of Alembic, whose messages the files ``alembic.ini`` show."""


class RetryingTransaction(DDLElement):
    """Statements that need strong locks, in one transaction of the server.

    Each lock is waited for no longer than ``lock_timeout``, since all other statements on the table wait behind this
    one. If a lock is not free in time, all locks are released and the transaction is tried again, ``attempts`` times.

    :param table: the table that the error message names.
    """

    inherit_cache = False

    def __init__(
        self,
        table: sa.Table,
        statements: Sequence[DDLElement],
        *,
        lock_timeout: float = LOCK_TIMEOUT,
        attempts: int = ATTEMPTS,
    ) -> None:
        self.table = table
        self.statements = statements
        self.milliseconds = max(1, round(lock_timeout * 1000))
        self.attempts = attempts


@compiles(RetryingTransaction, "postgresql")
def _render(element: RetryingTransaction, compiler: DDLCompiler, **_: Any) -> str:
    statements = "\n".join(f"      {compiler.process(statement)};" for statement in element.statements)
    table = compiler.preparer.format_table(element.table)
    return f"""\
DO $sqlaqueue_do$
DECLARE
  sqlaqueue_before text := current_setting('lock_timeout');
BEGIN
  FOR sqlaqueue_attempt IN 1 .. {element.attempts} LOOP
    BEGIN
      PERFORM set_config('lock_timeout', '{element.milliseconds}ms', true);
{statements}
      PERFORM set_config('lock_timeout', sqlaqueue_before, true);
      RETURN;
    EXCEPTION WHEN lock_not_available THEN
      NULL;
    END;
    PERFORM pg_sleep(0.2 + random() * 0.3);
  END LOOP;
  RAISE lock_not_available USING
    MESSAGE = $sqlaqueue_text$table {table} was locked at each of {element.attempts} attempts$sqlaqueue_text$,
    HINT = 'pg_stat_activity shows the open transactions; run the migration again when they have ended';
END
$sqlaqueue_do$"""


def in_batches(work: str, remaining: str, **tables: sa.Table) -> SqlTemplate:
    """Return a DO block that executes ``work`` on a few pages of ``{table}`` at a time, and commits after each.

    It must run outside of a transaction.

    :param work: a statement that skips rows locked by others; ``{batch}`` in it is the condition that a row is in the
        pages of the current batch.
    :param remaining: the condition that work remains. While it is true, the block reads the whole table again.
    """
    batch = "ctid >= sqlaqueue_from AND ctid < sqlaqueue_to"
    text = f"""\
DO $sqlaqueue_do$
#variable_conflict use_column
DECLARE
  sqlaqueue_page bigint;
  sqlaqueue_pages bigint;
  sqlaqueue_from tid;
  sqlaqueue_to tid;
  sqlaqueue_told timestamptz := clock_timestamp();
BEGIN
  WHILE {remaining} LOOP
    SELECT coalesce(max(pg_relation_size(relid)), pg_relation_size({{table:literal}}))
        / current_setting('block_size')::bigint
      INTO sqlaqueue_pages FROM pg_partition_tree({{table:literal}});
    sqlaqueue_page := 0;
    WHILE sqlaqueue_page <= sqlaqueue_pages LOOP
      sqlaqueue_from := '(' || sqlaqueue_page || ',0)';
      sqlaqueue_page := sqlaqueue_page + {PAGES_PER_BATCH};
      sqlaqueue_to := '(' || sqlaqueue_page || ',0)';
      {work.replace("{batch}", batch)};
      COMMIT;
      IF clock_timestamp() >= sqlaqueue_told + interval '{SECONDS_BETWEEN_NOTICES} seconds' THEN
        RAISE NOTICE USING MESSAGE = {{table:literal}} || ': ' || least(sqlaqueue_page, sqlaqueue_pages) || ' of '
          || sqlaqueue_pages || ' pages are done';
        sqlaqueue_told := clock_timestamp();
      END IF;
    END LOOP;
    PERFORM pg_sleep(0.1);
  END LOOP;
END
$sqlaqueue_do$"""  # noqa: S608 - all parts come from the migration itself
    return SqlTemplate(text, **tables)


_TIMEOUTS = ("statement_timeout", "lock_timeout")


@contextlib.contextmanager
def autocommit(op: Operations) -> Iterator[None]:
    """Commit the migration's transaction, and run the block in autocommit mode.

    :raises CommandError: when the transaction was not begun by Alembic.
    """
    context = op.get_context()
    connection = connection_of(op)
    if connection is not None and connection.get_isolation_level() == "AUTOCOMMIT":
        with _notices_logged(connection):
            yield
        return
    begun = context._transaction  # noqa: SLF001 - autocommit_block() fails with a bare assertion without it
    if connection is not None and connection.in_transaction() and begun is None:
        raise CommandError(
            "an operation with live=True commits by itself, but env.py runs the migrations in a transaction of its "
            "own; start it with context.begin_transaction() instead of connection.begin()"
        )
    with context.autocommit_block():
        # All batches are one long statement, and CREATE INDEX CONCURRENTLY waits for others without blocking them.
        for setting in _TIMEOUTS:
            op.execute(SqlTemplate(f"SET {setting} = 0"))
        try:
            with _notices_logged(connection_of(op)):
                yield
        finally:
            for setting in _TIMEOUTS:
                op.execute(SqlTemplate(f"RESET {setting}"))


@contextlib.contextmanager
def _notices_logged(connection: sa.Connection | None) -> Iterator[None]:
    """Log the server's notices when they arrive. psycopg can; psycopg2 has them only after the statement."""
    driver: Any = None if connection is None else connection.connection.driver_connection
    if not hasattr(driver, "add_notice_handler"):
        yield
        return

    def log(notice: Any) -> None:
        alembic_logger.info("%s", notice.message_primary)

    driver.add_notice_handler(log)
    try:
        yield
    finally:
        driver.remove_notice_handler(log)


def execute(op: Operations, elements: Sequence[DDLElement], *, grant: str | None = None) -> None:
    """Execute statements.

    :param grant: the statement that grants the required privilege.
    :raises CommandError: when the role lacks a privilege, with the SQL for an administrator.
    """
    try:
        for element in elements:
            op.execute(element)
    except DBAPIError as error:
        if sqlstate(error) != INSUFFICIENT_PRIVILEGE:
            raise
        raise CommandError(_missing_privilege(op, elements, grant, error)) from error


def _missing_privilege(op: Operations, elements: Sequence[DDLElement], grant: str | None, error: DBAPIError) -> str:
    make_dialect: Any = type(op.get_context().dialect)
    # With this paramstyle no percent sign is doubled.
    plain = make_dialect(paramstyle="named")
    statements = "\n".join(f"{str(element.compile(dialect=plain)).strip()};" for element in elements)
    first = f"Grant the privilege, and run the migration again:\n\n{grant}\n\nOr let" if grant else "Let"
    return (
        f"{str(error.orig).strip()}\nThe role of this migration lacks a privilege. {first} a role with the privilege "
        "execute the whole migration, as `alembic upgrade <from>:<to> --sql` writes it. The refused statements are:\n\n"
        f"{statements}"
    )


def connection_of(op: Operations) -> sa.Connection | None:
    context = op.get_context()
    return None if context.as_sql else context.connection


def drop_concurrently(op: Operations, index: str, table: sa.Table) -> None:
    op.drop_index(index, table.name, schema=table.schema, if_exists=True, postgresql_concurrently=True)


# -- tables of SQLite and MariaDB --------------------------------------------------------------------------------------
# What a prepared engine makes of the library's columns and indexes, as a table that needs no translation.


class VerbatimSql(ColumnElement[Any]):
    """SQL text that Alembic renders as an ``sa.text()`` with the same meaning.

    In ``sa.text("status = ...")``, which Alembic writes for a predicate or a default, ``:name`` would be a parameter,
    and a percent sign that was doubled for a driver would be doubled again.
    """

    inherit_cache = False

    def __init__(self, text: str) -> None:
        self.text = text


@compiles(VerbatimSql)
def _render_verbatim(element: VerbatimSql, *_: Any, **__: Any) -> str:
    return element.text.replace(":", "\\:")


def stored_table(table: sa.Table, metadata: sa.MetaData, dialect: Any) -> sa.Table:
    """Return a copy of a table with the types, defaults, conditions and indexes that a prepared engine gives it.

    :param metadata: gets the copy.
    """
    copied, is_ours = table.to_metadata(metadata), table.name.startswith(PREFIX)
    if not is_ours and queue_of(table) is None:
        return copied
    for column in filter(is_of_library, table.columns):
        stored = stored_column(column, dialect)
        copied.c[column.name].type = stored.type
        copied.c[column.name].server_default = _stored_default(stored, dialect)
    for check in [each for each in copied.constraints if isinstance(each, sa.CheckConstraint)]:
        if is_ours:
            copied.constraints.discard(check)
            copied.append_constraint(sa.CheckConstraint(_verbatim(check.sqltext, dialect), name=check.name))
    for index in table.indexes:
        _store_index(index, copied, dialect)
    return copied


@on_prepared(AddColumn, *PREPARED)
def _add_column(add: AddColumn, compiler: Any, as_before: Any) -> Any:
    """Add a column as CREATE TABLE has it."""
    added = copy.copy(add)
    added.column = stored_column(add.column, compiler.dialect)
    return as_before(added)


def ddl_text(element: DDLElement, dialect: Any) -> str:
    """Return a statement as the server gets it."""
    text = str(element.compile(dialect=dialect))
    # The compiler doubles percent signs for a driver to which they announce parameters.
    return text.replace("%%", "%") if dialect.paramstyle in {"format", "pyformat"} else text


def _verbatim(expression: Any, dialect: Any) -> VerbatimSql:
    options = {"literal_binds": True, "include_table": False}
    return VerbatimSql(str(expression.compile(dialect=dialect, compile_kwargs=options)))


def _stored_default(stored: sa.Column[Any], dialect: Any) -> Any:
    if isinstance(stored.server_default, sa.Identity):
        # Both generate the key of such a column without it.
        return None
    if not isinstance(stored.server_default, sa.DefaultClause):
        return stored.server_default
    return sa.DefaultClause(VerbatimSql(dialect.ddl_compiler(dialect, None).get_column_default_string(stored)))


def _store_index(index: sa.Index, copied: sa.Table, dialect: Any) -> None:
    """Replace the index of a copied table by the one that the engine creates; MariaDB has unique ones elsewhere."""
    if index.info.get(PLAIN) is not None:
        stored = stored_index(index, copied, dialect)
        where = stored.dialect_kwargs.get("sqlite_where")
        if where is not None:
            stored.dialect_kwargs["sqlite_where"] = _verbatim(where, dialect)
    if not exists_on(index, dialect) or (dialect.name != "sqlite" and _is_of_unique_column(index)):
        copied.indexes.discard(next(each for each in copied.indexes if each.name == index.name))


def _is_of_unique_column(index: sa.Index) -> bool:
    from sqlaqueue.mariadb import tables  # noqa: PLC0415 - other databases do not need it

    return tables.is_unique_index(index)
