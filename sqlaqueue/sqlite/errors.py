"""The SQLSTATE that PostgreSQL would have raised for an error of SQLite, by which the library classifies errors."""

from __future__ import annotations

import re
from typing import Any

from sqlalchemy.exc import DBAPIError

_CODES = {
    2067: "23505",  # SQLITE_CONSTRAINT_UNIQUE
    1555: "23505",  # SQLITE_CONSTRAINT_PRIMARYKEY
    1299: "23502",  # SQLITE_CONSTRAINT_NOTNULL
    787: "23503",  # SQLITE_CONSTRAINT_FOREIGNKEY
    275: "23514",  # SQLITE_CONSTRAINT_CHECK
}
_TRIGGER = 1811  # SQLITE_CONSTRAINT_TRIGGER: RAISE() in a trigger, or a foreign key with RESTRICT
_PRIMARY_CODES = {
    5: "40001",  # SQLITE_BUSY
    6: "40001",  # SQLITE_LOCKED
    7: "53200",  # SQLITE_NOMEM
    8: "25006",  # SQLITE_READONLY
    9: "57014",  # SQLITE_INTERRUPT
    10: "58030",  # SQLITE_IOERR
    13: "53100",  # SQLITE_FULL
    14: "58P01",  # SQLITE_CANTOPEN
    19: "23000",  # SQLITE_CONSTRAINT
}
_TEXTS = {
    "no such table": "42P01",
    "no such column": "42703",
    "has no column named": "42703",
    "no such savepoint": "3B001",
    "no transaction is active": "25P01",
}
_UNIQUE = re.compile(r"UNIQUE constraint failed: (?:index '(?P<index>.*)'|(?P<columns>.*))$")
_NOT_NULL = re.compile(r"NOT NULL constraint failed: (?P<table>.*)\.(?P<column>.*)$")


def sqlstate(error: DBAPIError) -> str | None:
    """Return the SQLSTATE; None for an error without a counterpart."""
    code = getattr(error.orig, "sqlite_errorcode", None)
    if code is None:
        return None
    if code == _TRIGGER and "FOREIGN KEY" in str(error.orig):
        return "23503"
    found = _CODES.get(code) or _PRIMARY_CODES.get(code & 0xFF)
    if found is None:
        text = str(error.orig)
        found = next((state for part, state in _TEXTS.items() if part in text), None)
    return found


def violated_constraint(error: DBAPIError) -> str | None:
    """Return the name of the violated index of expressions, or the columns of another one; None for other errors."""
    found = _UNIQUE.match(str(error.orig))
    if found is not None:
        return found["index"] or found["columns"]
    state: Any = sqlstate(error)
    return "" if state in {"23503", "23514"} else None


def violated_column(error: DBAPIError) -> str | None:
    """Return the name of the column that may not be NULL; None for other errors."""
    found = _NOT_NULL.match(str(error.orig))
    return None if found is None else found["column"]


def violated_table(error: DBAPIError) -> str | None:
    """Return the table of a violated constraint, where SQLite names it; None otherwise."""
    found = _NOT_NULL.match(str(error.orig))
    if found is not None:
        return found["table"]
    unique = _UNIQUE.match(str(error.orig))
    return unique["columns"].partition(".")[0] if unique is not None and unique["columns"] else None
