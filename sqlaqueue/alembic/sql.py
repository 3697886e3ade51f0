"""SQL of migrations that SQLAlchemy has no construct for.

Everything is a :class:`~sqlalchemy.schema.DDLElement`, so that it runs and is written to a script (``--sql``) by the
same door, with names quoted and schemas translated. What has to be tried again is a DO block: the server repeats it,
also where a script is all there is.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.schema import DDLElement
from sqlalchemy.sql.compiler import DDLCompiler

from sqlaqueue.postgresql.ddl import NEUTRAL, escaped

_NAMED = re.compile(r"\{(\w+)(:literal)?\}")


def stand_in(name: str, schema: str | None) -> sa.Table:
    """Return a table that has nothing but its name."""
    return sa.Table(name, sa.MetaData(), schema=schema)


def default_of(column: sa.Column[Any]) -> str | None:
    """Return the default of a column as SQL."""
    compiler = NEUTRAL.ddl_compiler(NEUTRAL, None)  # type: ignore[arg-type] # it is used for a part of a statement
    return compiler.get_column_default_string(column)


class Statement(DDLElement):
    """One statement as text, in which ``{key}`` stands for a table, ``{key:literal}`` for its name as a string."""

    inherit_cache = False

    def __init__(self, text: str, **tables: sa.Table) -> None:
        self.text = text
        self.tables = tables


class Patient(DDLElement):
    """Statements that need strong locks, in one transaction of the server.

    None of their locks is waited for longer than ``lock_timeout``, since everybody else queues up behind the one who
    waits. If one is not free, all are let go and asked for again, ``attempts`` times.
    """

    inherit_cache = False

    def __init__(
        self, table: sa.Table, statements: Sequence[DDLElement], *, lock_timeout: float, attempts: int
    ) -> None:
        self.table = table
        self.statements = statements
        self.milliseconds = max(1, round(lock_timeout * 1000))
        self.attempts = attempts


@compiles(Statement, "postgresql")
def _statement(element: Statement, compiler: DDLCompiler, **_: Any) -> str:
    def named(match: re.Match[str]) -> str:
        table = element.tables.get(match[1])
        if table is None:
            return match[0]
        name = compiler.preparer.format_table(table)
        # In dollars: a schema that is put in later may have a quote in its name.
        return f"$sqlaqueue_name${name}$sqlaqueue_name$" if match[2] else name

    return _NAMED.sub(named, escaped(compiler, element.text))


@compiles(Patient, "postgresql")
def _patient(element: Patient, compiler: DDLCompiler, **_: Any) -> str:
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
    HINT = 'pg_stat_activity shows who holds a transaction open; run the migration again when it is over';
END
$sqlaqueue_do$"""


def in_batches(work: str, left: str, *, pages: int, **tables: sa.Table) -> Statement:
    """Return a DO block that does ``work`` on a few pages of ``{table}`` at a time, committing after each.

    It goes over the table again as long as ``left`` is true, since it passes over rows that others have locked. In
    ``work``, ``{batch}`` is the condition that a row is in the pages whose turn it is.

    It has to run outside of a transaction.
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
  WHILE {left} LOOP
    SELECT coalesce(max(pg_relation_size(relid)), pg_relation_size({{table:literal}}))
        / current_setting('block_size')::bigint
      INTO sqlaqueue_pages FROM pg_partition_tree({{table:literal}});
    sqlaqueue_page := 0;
    WHILE sqlaqueue_page <= sqlaqueue_pages LOOP
      sqlaqueue_from := '(' || sqlaqueue_page || ',0)';
      sqlaqueue_page := sqlaqueue_page + {pages};
      sqlaqueue_to := '(' || sqlaqueue_page || ',0)';
      {work.replace("{batch}", batch)};
      COMMIT;
    END LOOP;
    PERFORM pg_sleep(0.1);
  END LOOP;
END
$sqlaqueue_do$"""  # noqa: S608 - it is made of the migration's own words
    return Statement(text, **tables)
