"""Statements that a server repeats until they can have their locks: DO blocks.

The loop is part of the SQL, so that a script (``--sql``) contains it as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.schema import DDLElement
from sqlalchemy.sql.compiler import DDLCompiler

from sqlaqueue.postgresql.ddl import SqlTemplate

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
