"""Names, statements and sessions as texts for operators, who may paste them into SQL."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import ARRAY, OID
from sqlalchemy.schema import DDLElement

from sqlaqueue.postgresql.catalog import TableId, system_table
from sqlaqueue.postgresql.ddl import QueueObject, SqlTemplate
from sqlaqueue.postgresql.facts import OpenTransaction
from sqlaqueue.sql.types import NEUTRAL

_PARTS = sa.text("""
    SELECT c.oid::bigint FROM pg_class AS c
    WHERE c.oid = ANY (CAST(CAST(:roots AS bigint[]) AS oid[])) AND c.relkind NOT IN ('p', 'I')
    UNION ALL
    SELECT p.relid::oid::bigint FROM pg_class AS c, pg_partition_tree(c.oid) AS p
    WHERE c.oid = ANY (CAST(CAST(:roots AS bigint[]) AS oid[])) AND c.relkind IN ('p', 'I') AND p.isleaf
""").bindparams(sa.bindparam("roots", type_=ARRAY(sa.BigInteger())))


_QUALIFIED = sa.text("""
    SELECT format('%I.%I', n.nspname, c.relname) FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
    WHERE c.oid = CAST(CAST(:oid AS bigint) AS oid)
""")


def _number(oid: sa.ColumnElement[Any]) -> sa.ColumnElement[int]:
    return sa.cast(sa.cast(oid, OID()), sa.BigInteger())


def table_oid(connection: sa.Connection, table: sa.Table) -> int | None:
    return connection.scalar(sa.select(_number(TableId(table))))


def table_name(connection: sa.Connection, table: sa.Table) -> str:
    """Return the name of a table with the schema in which it is found, quoted."""
    name: str | None = connection.scalar(_QUALIFIED, {"oid": table_oid(connection, table)})
    return name or table.fullname


def index_oids(connection: sa.Connection, table: sa.Table, names: Sequence[str]) -> Sequence[int]:
    found, relation = system_table("pg_index", "indexrelid", "indrelid"), system_table("pg_class", "oid", "relname")
    named = relation.c.relname == sa.any_(sa.literal([*names], ARRAY(sa.Text())))
    return connection.scalars(
        sa.select(_number(relation.c.oid))
        .join_from(found, relation, relation.c.oid == found.c.indexrelid)
        .where(found.c.indrelid == TableId(table), named)
    ).all()


def partitions(connection: sa.Connection, roots: Sequence[int]) -> Sequence[int]:
    """Return the OIDs of the partitions of tables or indexes; of those themselves that are not partitioned."""
    return connection.scalars(_PARTS, {"roots": [*roots]}).all() if roots else []


def quoted(name: str) -> str:
    return NEUTRAL.identifier_preparer.quote(name)


def literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


SESSION = """
    a.pid, a.usename::text AS role, coalesce(a.application_name, '') AS application, host(a.client_addr) AS client,
    a.state, a.xact_start AS since,
    extract(epoch FROM clock_timestamp() - a.xact_start)::float8 AS seconds,
    coalesce(greatest(age(a.backend_xid), age(a.backend_xmin)), 0) AS age,
    coalesce(a.query, '') AS query
"""
"""The columns that :func:`open_transaction` reads, of ``pg_stat_activity AS a``. Facts have no text of statements, as
that may contain passwords and personal data."""

_KEYWORDS = frozenset(
    """
    ABORT ALTER ANALYZE BEGIN CALL CHECKPOINT CLOSE CLUSTER COMMENT COMMIT COPY CREATE DEALLOCATE DECLARE DELETE
    DISCARD DO DROP END EXECUTE EXPLAIN FETCH GRANT INSERT LISTEN LOCK MERGE MOVE NOTIFY PREPARE REFRESH REINDEX
    RELEASE RESET REVOKE ROLLBACK SAVEPOINT SELECT SET SHOW START TABLE TRUNCATE UNLISTEN UPDATE VACUUM VALUES
    WITH
    """.split()  # noqa: SIM905 - one line for each word would be longer than the module
)
_LEADING_COMMENTS = re.compile(r"(?:\s|--[^\n]*(?:\n|\Z)|/\*.*?\*/)*", re.DOTALL)
# What follows may be a value: a literal, or a comment that an application has added.
_VALUE = re.compile(r"'|\$(?!\d)|--|/\*")
_PARENTHESES = re.compile(r"\([^()]*\)")
_VERB = re.compile(r"\b(?:SELECT|INSERT|UPDATE|DELETE|MERGE)\b.*", re.IGNORECASE)
_NAME = r'(?:"[^"]+"|\w+)(?:\.(?:"[^"]+"|\w+))?'
_TABLES = {
    verb: re.compile(rf"{before}({_NAME})", re.IGNORECASE)
    for verb, before in {
        "ALTER": r"^ALTER\s+TABLE\s+(?:IF\s+EXISTS\s+)?(?:ONLY\s+)?",
        "COPY": r"^COPY\s+",
        "CREATE": r"^CREATE\s+(?:UNIQUE\s+)?INDEX\b.*?\sON\s+(?:ONLY\s+)?",
        "DELETE": r"^DELETE\s+FROM\s+(?:ONLY\s+)?",
        "INSERT": r"^INSERT\s+INTO\s+",
        "LOCK": r"^LOCK\s+(?:TABLE\s+)?(?:ONLY\s+)?",
        "MERGE": r"^MERGE\s+INTO\s+(?:ONLY\s+)?",
        "SELECT": r"^SELECT\b.*?\sFROM\s+(?:ONLY\s+)?",
        "TRUNCATE": r"^TRUNCATE\s+(?:TABLE\s+)?(?:ONLY\s+)?",
        "UPDATE": r"^UPDATE\s+(?:ONLY\s+)?",
    }.items()
}


def open_transaction(row: Any) -> OpenTransaction:
    names = (field.name for field in fields(OpenTransaction) if field.name != "statement")
    return OpenTransaction(**{name: getattr(row, name) for name in names}, statement=statement_kind(row.query))


def describe_session(session: OpenTransaction) -> str:
    """Return the pid of a session, its role, its application and where it comes from."""
    details = [f"role {session.role}"]
    if session.application:
        details.append(f"application {session.application!r}")
    details.append("local connection" if session.client is None else f"client {session.client}")
    if session.hidden:
        details.pop()
    return f"Session {session.pid} ({', '.join(details)})"


def last_statement(session: OpenTransaction) -> str:
    """Return what the last statement of a session does, as the end of a sentence; empty if it is not known."""
    return f"; its last statement: {session.statement}" if session.statement else ""


def statement_kind(text: str) -> str:
    """Return the keyword of a statement and its table, such as ``UPDATE email``; empty if it has no known keyword."""
    begin = _VALUE.split(text[_LEADING_COMMENTS.match(text).end() :], maxsplit=1)[0]  # type: ignore[union-attr] # it matches any text
    flat = " ".join(begin.split())
    while (shorter := _PARENTHESES.sub("", flat)) != flat:
        flat = shorter
    # The rest of a parenthesis that was cut off is a part of another statement or expression.
    flat = flat.partition("(")[0]
    if flat[:4].upper() == "WITH" and (verb := _VERB.search(flat)) is not None:
        flat = verb[0]
    keyword = flat.split(" ", 1)[0].rstrip(";").upper()
    if keyword not in _KEYWORDS:
        return ""
    table = _TABLES[keyword].search(flat) if keyword in _TABLES else None
    return keyword if table is None else f"{keyword} {table[1]}"


_PARAMETER = re.compile(r"(?<![:\w]):(\w+)")


def sql_text(connection: sa.Connection, statement: Any) -> str:
    options = {} if isinstance(statement, DDLElement) else {"compile_kwargs": {"literal_binds": True}}
    return f"{_compiled(connection, statement, **options)};"


def name_of(connection: sa.Connection, table: sa.Table) -> str:
    """Return the name of a table for SQL, whether it exists or not."""
    return _compiled(connection, SqlTemplate("{table}", table=table))


def sql_texts(connection: sa.Connection, statements: Iterable[Any]) -> str:
    return "\n".join(sql_text(connection, each) for each in statements)


def creation(table: sa.Table, objects: Iterable[QueueObject]) -> list[Any]:
    indexes = sorted(table.indexes, key=lambda index: str(index.name))
    return [
        sa.schema.CreateTable(table),
        *map(sa.schema.CreateIndex, indexes),
        *(created for each in objects for created in each.created()),
    ]


def _compiled(connection: sa.Connection, statement: Any, **options: Any) -> str:
    names = connection.get_execution_options().get("schema_translate_map")
    if names is not None:
        options |= {"schema_translate_map": names, "render_schema_translate": True}
    compiled: Any = statement.compile(dialect=NEUTRAL, **options)
    binds: dict[str, Any] = getattr(compiled, "binds", {})

    def literal(found: re.Match[str]) -> str:
        bind = binds.get(found[1])
        return found[0] if bind is None else str(compiled.render_literal_value(bind.effective_value, bind.type))

    # SQLAlchemy 2.0 keeps parameters in ON CONFLICT DO UPDATE, whatever `literal_binds` says.
    return _PARAMETER.sub(literal, str(compiled)).strip()
