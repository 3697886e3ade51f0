"""Rows of pg_stat_activity as facts, without the text of statements: it may contain passwords and personal data."""

from __future__ import annotations

import re
from typing import Any

from sqlaqueue.queue.server_facts import OpenTransaction

SESSION = """
    a.pid, a.usename::text AS role, coalesce(a.application_name, '') AS application, host(a.client_addr) AS client,
    a.state, a.xact_start AS since,
    extract(epoch FROM clock_timestamp() - a.xact_start)::float8 AS seconds,
    coalesce(greatest(age(a.backend_xid), age(a.backend_xmin)), 0) AS age,
    coalesce(a.query, '') AS query
"""
"""The columns that :func:`open_transaction` reads, of ``pg_stat_activity AS a``."""

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
    """Return the fact of a row with the columns :data:`SESSION`."""
    return OpenTransaction(
        pid=row.pid,
        role=row.role,
        application=row.application,
        client=row.client,
        state=row.state,
        since=row.since,
        seconds=row.seconds,
        age=row.age,
        statement=statement_kind(row.query),
    )


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
