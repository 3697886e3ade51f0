"""Where a page of a list of jobs begins: the position of a job in the order, as a text in a URL.

The text is opaque, and it is no secret: whoever changes it gets another part of the same list, or an error. Its values
are checked by the kind of their columns, and reach the database as parameters.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from datetime import date, datetime
from typing import Any

from sqlaqueue.web.data.job_columns import kind_of_type
from sqlaqueue.web.data.job_filters import typed_as
from sqlaqueue.web.data.job_orders import Order, OrderColumn
from sqlaqueue.web.data.job_windows import Texts
from sqlaqueue.web.data.parameters import ParameterError

LONGEST = 8000
"""The number of characters of a cursor. An index has no longer values."""

_ALPHABET = re.compile(r"[A-Za-z0-9_-]*")
_SPECIAL_MOMENTS = re.compile(
    r"-?infinity|\d{4,6}-\d\d-\d\d(T\d\d:\d\d:\d\d(\.\d{1,6})?([+-]\d\d(:\d\d){0,2})?)?( BC)?"
)


def cursor_text(order: Order, position: Texts) -> str:
    """Return a position as a cursor."""
    content = json.dumps([_signature(order), *position], ensure_ascii=False, separators=(",", ":"))
    return base64.urlsafe_b64encode(content.encode()).decode().rstrip("=")


def position_of(order: Order, cursor: str, parameter: str) -> Texts:
    """Return the position in a cursor: values of all columns of the order, or of those of its index only.

    :raises ParameterError: if the cursor is malformed, or was made for another order.
    """
    content = _decoded(cursor, parameter)
    if not content or not all(value is None or isinstance(value, str) for value in content):
        raise ParameterError(parameter, "it is no position in a list")
    signature, *position = content
    if signature != _signature(order):
        raise ParameterError(parameter, "it belongs to a list in another order; start from the first page")
    if len(position) not in {len(order.all), len(order.columns)}:
        raise ParameterError(parameter, "it is no position in this list")
    for each, text in zip(order.all, position, strict=False):
        _check(each, text, parameter)
    return position


def _decoded(cursor: str, parameter: str) -> list[Any]:
    if len(cursor) > LONGEST or not _ALPHABET.fullmatch(cursor):
        raise ParameterError(parameter, "it is no position in a list")
    try:
        content = json.loads(base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
    except (binascii.Error, ValueError, RecursionError):
        raise ParameterError(parameter, "it is no position in a list") from None
    return content if isinstance(content, list) else []


def _signature(order: Order) -> str:
    """Return what a cursor has to have been made for: the columns, and where nulls come."""
    columns = (f"{each.column.name}{'<' if each.nulls_first else '>'}" for each in order.all)
    return f"{order.sort} {' '.join(columns)}"


def _check(by: OrderColumn, text: str | None, parameter: str) -> None:
    if text is None:
        if not by.is_nullable:
            raise ParameterError(parameter, "it is no position in this list")
        return
    kind = kind_of_type(by.column.type)
    if kind in {"moment", "naive_moment", "date"}:
        if not _SPECIAL_MOMENTS.fullmatch(text):
            raise ParameterError(parameter, "it is no position in this list")
        _check_moment(text, parameter)
    elif kind in {"integer", "boolean", "enum", "uuid"}:
        typed_as(by.column, text, parameter)
    elif "\0" in text or any("\ud800" <= character <= "\udfff" for character in text):
        raise ParameterError(parameter, "it is no position in this list")


def _check_moment(text: str, parameter: str) -> None:
    """Refuse a day that no month has, unless it is in a year that Python does not have."""
    try:
        datetime.fromisoformat(text) if "T" in text else date.fromisoformat(text)
    except ValueError:
        if text.endswith(("infinity", " BC")) or not re.match(r"\d{4}-", text):
            return
        raise ParameterError(parameter, "it is no position in this list") from None
