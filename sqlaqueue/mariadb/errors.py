"""The SQLSTATE that PostgreSQL would have raised for an error of MariaDB, by which the library classifies errors."""

from __future__ import annotations

import re
from typing import Any

from sqlalchemy.exc import DBAPIError

DUPLICATES = (1062, 1586)
_STATES = {
    "08006": (2006, 2013, 2055, 4031),  # the connection is lost
    "08001": (2002, 2003, 2005),  # it cannot be made
    "22001": (1406,),
    "22003": (1264, 1690),
    "23502": (1048, 1364),
    "23503": (1216, 1217, 1451, 1452),
    "23505": DUPLICATES,
    "23514": (4025, 3819),
    "25006": (1290, 1792, 1836),
    "25P03": (1967,),
    "28P01": (1045,),
    "3B001": (1305,),
    "3D000": (1049,),
    "40001": (1020,),
    "40P01": (1213,),
    "42501": (1044, 1142, 1143, 1227, 1370),
    "42703": (1054,),
    "42P10": (1176,),  # an index that a statement names does not exist
    "42P01": (1051, 1146),
    "53100": (1021, 1114, 3675),
    "53200": (1037, 1038, 1041),
    "53300": (1040, 1203, 1226),
    "55P03": (1205, 3572),
    "57014": (1317, 1969, 3024),
    "57P01": (1053, 1077, 1079, 1927),
    "58030": (3, 5, 28, 1026, 1030),
    "P0001": (1644,),  # SIGNAL in a trigger of the application
}
_BY_NUMBER = {number: state for state, numbers in _STATES.items() for number in numbers}
_DUPLICATE = re.compile(r"Duplicate entry '.*' for key '(?P<name>.*)'$", re.DOTALL)
_NOT_NULL = re.compile(r"(?:Column '(?P<column>[^']*)' cannot be null|Field '(?P<field>[^']*)' doesn't have a default)")
_CHECK = re.compile(r"CONSTRAINT `(?P<name>[^`]*)` failed for `[^`]*`\.`(?P<table>[^`]*)`")
_FOREIGN = re.compile(r"`[^`]*`\.`(?P<table>[^`]*)`, CONSTRAINT `(?P<name>[^`]*)`")


def number_of(error: Any) -> int | None:
    """Return the number of an error; None if it did not come from the driver."""
    arguments: Any = getattr(getattr(error, "orig", error), "args", ())
    return arguments[0] if arguments and isinstance(arguments[0], int) else None


def text_of(error: Any) -> str:
    """Return the text of an error."""
    arguments: Any = getattr(getattr(error, "orig", error), "args", ())
    return str(arguments[1]) if len(arguments) > 1 else str(error)


def sqlstate(error: DBAPIError) -> str | None:
    """Return the SQLSTATE; None for an error without a counterpart."""
    number = number_of(error)
    return None if number is None else _BY_NUMBER.get(number)


def violated_key(text: str) -> str | None:
    """Return the name of the unique index in the text of an error about a duplicate."""
    duplicate = _DUPLICATE.search(text)
    return None if duplicate is None else duplicate["name"]


def violated_constraint(error: DBAPIError) -> str | None:
    """Return the name of the violated index or constraint; None for other errors."""
    text = text_of(error)
    duplicate = violated_key(text)
    if duplicate is not None:
        return duplicate
    found = _FOREIGN.search(text) or _CHECK.search(text)
    return None if found is None else found["name"]


def violated_column(error: DBAPIError) -> str | None:
    """Return the name of the column that may not be NULL; None for other errors."""
    found = _NOT_NULL.search(text_of(error))
    return None if found is None else found["column"] or found["field"]


def violated_table(error: DBAPIError) -> str | None:
    """Return the table of a violated constraint, where the server names it; None otherwise."""
    text = text_of(error)
    found = _FOREIGN.search(text) or _CHECK.search(text)
    return None if found is None else found["table"]
