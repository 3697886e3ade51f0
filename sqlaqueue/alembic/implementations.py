"""How operations execute their statements: with short waits for locks, in batches, outside of a transaction.

The loops are part of the SQL, in DO blocks, so that a script (``--sql``) contains them as well.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import sqlalchemy as sa
from alembic.operations import Operations
from alembic.util import CommandError
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.schema import DDLElement
from sqlalchemy.sql.compiler import DDLCompiler

from sqlaqueue.postgresql.ddl import SqlTemplate
from sqlaqueue.sql.engine import INSUFFICIENT_PRIVILEGE, sqlstate

LOCK_TIMEOUT = 0.5
"""How long one attempt to lock a table waits, in seconds."""

ATTEMPTS = 120

PAGES_PER_BATCH = 64
"""How many pages of a table one batch reads: few enough for a writer to wait for it."""


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
    MESSAGE = $sqlaqueue_text$table {table} was locked by others at each of {element.attempts} attempts$sqlaqueue_text$,
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
        yield
        return
    begun = context._transaction  # noqa: SLF001 - autocommit_block() fails with a bare assertion without it
    if connection is not None and connection.in_transaction() and begun is None:
        raise CommandError(
            "an operation with live=True commits by itself, but env.py runs the migrations in a transaction of its "
            "own; begin it with context.begin_transaction() instead of connection.begin()"
        )
    with context.autocommit_block():
        # All batches are one long statement, and CREATE INDEX CONCURRENTLY waits for others without blocking them.
        for setting in _TIMEOUTS:
            op.execute(SqlTemplate(f"SET {setting} = 0"))
        try:
            yield
        finally:
            for setting in _TIMEOUTS:
                op.execute(SqlTemplate(f"RESET {setting}"))


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
