"""How lists of jobs read a table at a bounded cost: in the order of an index, with values cut by the server."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from sqlaqueue.postgresql.catalog.ordered_indexes import ordered_indexes, table_id
from sqlaqueue.queue.listing_protocol import Form

__all__ = ["SETTINGS", "can_be_converted", "ordered_indexes", "shown_text", "stored_size", "table_id"]

SETTINGS: dict[str, str] = {
    "enable_bitmapscan": "off",
    "enable_seqscan": "off",
    "enable_sort": "off",
    "enable_incremental_sort": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
    "max_parallel_workers_per_gather": "0",
    "jit": "off",
    "plan_cache_mode": "force_custom_plan",
}
"""Without statistics the server expects few rows, and would read and sort all of them to find the first ones. A generic
plan does not know how many rows are wanted. The other side of a join is looked up by its key, not read whole."""

_READ_WHOLE = 8192
"""The stored bytes up to which a value is read whole to be shown; compressed, they may be a hundred times as many."""

_COMPRESSED, _AS_IT_IS = 256 * 1024, 16 * 1024 * 1024
"""The stored bytes up to which a value is read whole for the page of one job, compressed and not compressed."""


def shown_text(value: sa.ColumnElement[Any], form: Form, length: int) -> sa.ColumnElement[str]:
    """Return the beginning of a value as a text; NULL for a value that is too large to read."""
    text = sa.cast(value, sa.Text())
    if form == "text":
        # left() of a text reads no more of a stored value than it returns.
        return sa.func.left(text, length, type_=sa.Text())
    if form == "bytes":
        beginning = sa.func.encode(sa.func.substring(value, 1, length // 2 + 1), sa.literal_column("'hex'"))
        return sa.func.left(sa.func.concat(sa.literal_column(r"E'\\x'"), beginning), length, type_=sa.Text())
    if form == "moment":
        # JSON has one format of moments, while that of a cast depends on DateStyle.
        return sa.cast(sa.func.to_json(value).op("#>>")(sa.literal_column("'{}'")), sa.Text())
    if form == "short":
        return sa.func.left(text, length, type_=sa.Text())
    small = stored_size(value) <= _literal(_READ_WHOLE)
    return sa.case((small, sa.func.left(text, length, type_=sa.Text())), else_=sa.cast(sa.null(), sa.Text()))


def can_be_converted(value: sa.ColumnElement[Any]) -> sa.ColumnElement[bool]:
    """Return whether a large value can be read whole for the page of one job, without reading it."""
    is_compressed: sa.ColumnElement[Any] = sa.func.pg_column_compression(value).is_not(None)
    most = sa.case((is_compressed, _literal(_COMPRESSED)), else_=_literal(_AS_IT_IS))
    return stored_size(value) <= most


def _literal(number: int) -> sa.ColumnElement[int]:
    return sa.literal_column(str(number), sa.Integer())


def stored_size(value: sa.ColumnElement[Any]) -> sa.ColumnElement[int]:
    """Return the number of bytes that a value takes in the table, without reading it."""
    return sa.func.pg_column_size(value, type_=sa.Integer())
