"""Indexes in the catalog: their definitions, whether they are valid, and which give rows in an order."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import OID
from sqlalchemy.orm import Session

from sqlaqueue.postgresql.catalog import TableId, system_table
from sqlaqueue.postgresql.ddl import SqlTemplate
from sqlaqueue.postgresql.facts import Form, OrderedIndex

_INDEXES = sa.text("""
    SELECT c.oid::bigint AS table_id, i.relname::text AS name,
           x.indexrelid::regclass::text AS qualified, x.indisvalid AS valid, x.indisunique AS is_unique,
           pg_get_expr(x.indpred, x.indrelid) AS predicate, pg_get_indexdef(x.indexrelid) AS definition,
           m.amname::text AS method,
           ARRAY(SELECT pg_get_indexdef(x.indexrelid, k, true) FROM generate_series(1, x.indnkeyatts) AS k) AS elements,
           EXISTS (SELECT FROM unnest(x.indoption::int2[]) AS o WHERE o <> 0) AS is_reordered,
           EXISTS (SELECT FROM pg_stat_progress_create_index AS p WHERE p.index_relid = x.indexrelid) AS building
    FROM pg_index AS x
    JOIN pg_class AS c ON c.oid = x.indrelid
    JOIN pg_class AS i ON i.oid = x.indexrelid
    JOIN pg_am AS m ON m.oid = i.relam
    WHERE x.indrelid = ANY (CAST(:tables AS oid[]))
    ORDER BY i.relname
""").bindparams(sa.bindparam("tables", type_=sa.ARRAY(sa.BigInteger())))


@dataclass(frozen=True)
class StoredIndex:
    table: sa.Table
    name: str
    qualified_name: str
    """For SQL."""
    is_valid: bool
    is_unique: bool
    is_being_built: bool
    elements: Sequence[str]
    """Its columns and expressions."""
    predicate: str | None
    is_plain: bool
    """Whether it is a B-tree in ascending order."""
    definition: str


def stored_indexes(connection: sa.Connection | Session, tables: Sequence[sa.Table]) -> list[StoredIndex]:
    columns = [sa.cast(sa.cast(TableId(each), OID()), sa.BigInteger()) for each in tables]
    ids = connection.execute(sa.select(*columns)).one()
    by_id = dict(zip(ids, tables, strict=True))
    rows: Any = connection.execute(_INDEXES, {"tables": [*ids]})
    return [
        StoredIndex(
            by_id[row.table_id],
            row.name,
            row.qualified,
            row.valid,
            row.is_unique,
            row.building,
            row.elements,
            row.predicate,
            row.method == "btree" and not row.is_reordered,
            row.definition,
        )
        for row in rows
    ]


def partitioned_tables(connection: sa.Connection | Session, tables: Sequence[sa.Table]) -> set[sa.Table]:
    relation = system_table("pg_class", "oid", "relkind")
    is_partitioned = sa.cast(relation.c.relkind, sa.Text()) == sa.literal_column("'p'")
    flags = [sa.select(is_partitioned).where(relation.c.oid == TableId(each)).scalar_subquery() for each in tables]
    found = connection.execute(sa.select(*flags)).one()
    return {table for table, flag in zip(tables, found, strict=True) if flag}


def comparable(connection: sa.Connection | Session, table: sa.Table, expressions: Sequence[str]) -> list[str]:
    """Return expressions over the columns of a table as the server prints them in a plan; equal ones are equal texts.

    Migrations compare expressions by creating them. Here nothing may be created: the transaction is read-only.

    :param expressions: SQL of this library's models and of the catalog, no input of users.
    """
    if not expressions:
        return []
    listed = ", ".join(f"({each})" for each in expressions)
    explain = SqlTemplate(f"EXPLAIN (VERBOSE, COSTS OFF, FORMAT JSON) SELECT {listed} FROM {{table}}", table=table)  # noqa: S608 - as the parameter says
    plan: Any = connection.execute(explain).scalar_one()
    # Some drivers return a text.
    node: dict[str, Any] = (json.loads(plan) if isinstance(plan, str) else plan)[0]["Plan"]
    if "Distributed Query" in node:
        # What Citus prints of its own node are names of the results of its shards; these print the expressions.
        node = node["Distributed Query"]["Job"]["Tasks"][0]["Remote Plan"][0][0]["Plan"]
    # The plan of a table with several partitions begins with an Append, which has no output of its own.
    while "Output" not in node:
        node = node["Plans"][0]
    output: list[str] = node["Output"]
    return output


_INDEX = system_table("pg_index", "indexrelid", "indrelid", "indisvalid")
_RELATION = system_table("pg_class", "oid", "relname")


def index_validity(session: Session | sa.Connection, table: sa.Table, name: str) -> bool | None:
    """Return whether an index of a table is valid, None if the table has no index of this name."""
    found: sa.Select[Any] = (
        sa.select(_INDEX.c.indisvalid)
        .join_from(_INDEX, _RELATION, _RELATION.c.oid == _INDEX.c.indexrelid)
        .where(_INDEX.c.indrelid == TableId(table), _RELATION.c.relname == name)
    )
    valid: bool | None = session.scalar(found)
    return valid


# A column of another collation or operator class has an order of its own, for which ORDER BY does not ask.
_ORDERED_INDEXES = sa.text("""
    SELECT i.relname::text AS name, x.indisunique AS is_unique, x.indpred IS NOT NULL AS is_partial,
           ARRAY(SELECT CASE WHEN o.opcdefault AND x.indcollation[n.k] = a.attcollation THEN a.attname::text END
                 FROM generate_series(0, x.indnkeyatts - 1) AS n (k)
                 LEFT JOIN pg_attribute AS a ON a.attrelid = x.indrelid AND a.attnum = x.indkey[n.k] AND a.attnum > 0
                 LEFT JOIN pg_opclass AS o ON o.oid = x.indclass[n.k]
                 ORDER BY n.k) AS columns,
           ARRAY(SELECT NOT coalesce(a.attnotnull, false) FROM generate_series(0, x.indnkeyatts - 1) AS n (k)
                 LEFT JOIN pg_attribute AS a ON a.attrelid = x.indrelid AND a.attnum = x.indkey[n.k]
                 ORDER BY n.k) AS nullable,
           ARRAY(SELECT x.indoption[n.k]::int FROM generate_series(0, x.indnkeyatts - 1) AS n (k)
                 ORDER BY n.k) AS options
    FROM pg_index AS x
    JOIN pg_class AS i ON i.oid = x.indexrelid
    JOIN pg_am AS m ON m.oid = i.relam
    WHERE x.indrelid = CAST(CAST(:table AS bigint) AS oid) AND x.indisvalid AND x.indisready AND m.amname = 'btree'
    ORDER BY i.relname
""")
_DESCENDING, _NULLS_FIRST = 1, 2


def ordered_indexes(connection: sa.Connection, table_id: int) -> Sequence[OrderedIndex]:
    found: list[OrderedIndex] = []
    for row in connection.execute(_ORDERED_INDEXES, {"table": table_id}):
        number = next((place for place, name in enumerate(row.columns) if name is None), len(row.columns))
        options: list[int] = row.options[:number]
        found.append(
            OrderedIndex(
                name=row.name,
                columns=tuple(row.columns[:number]),
                is_whole=number == len(row.columns),
                descending=tuple(bool(option & _DESCENDING) for option in options),
                nulls_first=tuple(bool(option & _NULLS_FIRST) for option in options),
                nullable=tuple(row.nullable[:number]),
                is_unique=row.is_unique,
                is_partial=row.is_partial,
            )
        )
    return found


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
    beginning = sa.func.left(text, length, type_=sa.Text())
    if form in {"text", "short"}:
        # left() of a text reads no more of a stored value than it returns.
        return beginning
    if form == "bytes":
        digits = sa.func.encode(sa.func.substring(value, 1, length // 2 + 1), sa.literal_column("'hex'"))
        return sa.func.left(sa.func.concat(sa.literal_column(r"E'\\x'"), digits), length, type_=sa.Text())
    if form == "moment":
        # JSON has one format of moments, while that of a cast depends on DateStyle.
        return sa.cast(sa.func.to_json(value).op("#>>")(sa.literal_column("'{}'")), sa.Text())
    small = stored_size(value) <= _literal(_READ_WHOLE)
    return sa.case((small, beginning), else_=sa.cast(sa.null(), sa.Text()))


def can_be_converted(value: sa.ColumnElement[Any]) -> sa.ColumnElement[bool]:
    """Return whether a large value can be read whole for the page of one job.

    It is decided without reading it: a value of hundreds of megabytes would take seconds and gigabytes.
    """
    is_compressed: sa.ColumnElement[Any] = sa.func.pg_column_compression(value).is_not(None)
    most = sa.case((is_compressed, _literal(_COMPRESSED)), else_=_literal(_AS_IT_IS))
    return stored_size(value) <= most


def _literal(number: int) -> sa.ColumnElement[int]:
    return sa.literal_column(str(number), sa.Integer())


def stored_size(value: sa.ColumnElement[Any]) -> sa.ColumnElement[int]:
    """Return the number of bytes that a value takes in the table, without reading it."""
    return sa.func.pg_column_size(value, type_=sa.Integer())
