"""How the indexes of some tables are defined, and expressions in the form in which they can be compared.

:mod:`.normalize` creates what it compares. Here nothing may be created: the transaction is read-only. So both forms of
an expression are planned as columns of a SELECT, whose plan prints them in the same way.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import OID
from sqlalchemy.orm import Session

from sqlaqueue.postgresql.catalog.table_id import TableId, system_table
from sqlaqueue.postgresql.ddl.sql_template import SqlTemplate

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
    """An index of the database."""

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
    """Return the indexes of existing tables."""
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
    """Return those of some existing tables that are partitioned."""
    relation = system_table("pg_class", "oid", "relkind")
    is_partitioned = sa.cast(relation.c.relkind, sa.Text()) == sa.literal_column("'p'")
    flags = [sa.select(is_partitioned).where(relation.c.oid == TableId(each)).scalar_subquery() for each in tables]
    found = connection.execute(sa.select(*flags)).one()
    return {table for table, flag in zip(tables, found, strict=True) if flag}


def comparable(connection: sa.Connection | Session, table: sa.Table, expressions: Sequence[str]) -> list[str]:
    """Return expressions over the columns of a table as the server prints them in a plan; equal ones are equal texts.

    :param expressions: SQL of this library's models and of the catalog, no input of users.
    """
    if not expressions:
        return []
    listed = ", ".join(f"({each})" for each in expressions)
    explain = SqlTemplate(f"EXPLAIN (VERBOSE, COSTS OFF, FORMAT JSON) SELECT {listed} FROM {{table}}", table=table)  # noqa: S608 - as the parameter says
    plan: Any = connection.execute(explain).scalar_one()
    node = plan_of(plan)
    if "Distributed Query" in node:
        # What Citus prints of its own node are names of the results of its shards; these print the expressions.
        node = node["Distributed Query"]["Job"]["Tasks"][0]["Remote Plan"][0][0]["Plan"]
    # The plan of a table with several partitions begins with an Append, which has no output of its own.
    while "Output" not in node:
        node = node["Plans"][0]
    output: list[str] = node["Output"]
    return output


def plan_of(explained: Any) -> dict[str, Any]:
    """Return the plan in the result of EXPLAIN (FORMAT JSON), which some drivers return as a text."""
    found: list[dict[str, Any]] = json.loads(explained) if isinstance(explained, str) else explained
    plan: dict[str, Any] = found[0]["Plan"]
    return plan
