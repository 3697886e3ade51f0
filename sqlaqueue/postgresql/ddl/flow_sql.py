"""SQL texts that the functions and triggers of flow control share."""

from __future__ import annotations

import sqlalchemy as sa

from sqlaqueue.flow_control.controls import JobKey, KeyOrder
from sqlaqueue.postgresql.ddl.sql_template import literal_sql
from sqlaqueue.postgresql.types import NEUTRAL
from sqlaqueue.queue.roles import literal_text
from sqlaqueue.queue.spec import QueueSpec

READ_COMMITTED = """
  IF pg_catalog.current_setting('transaction_isolation') <> 'read committed' THEN
    RAISE EXCEPTION 'sqlaqueue: a claim of a queue with limits, rates or an order needs READ COMMITTED; '
      'this transaction is %', pg_catalog.upper(pg_catalog.current_setting('transaction_isolation'))
      USING ERRCODE = 'feature_not_supported';
  END IF;"""


def quoted(column: sa.Column[object]) -> str:
    """Return the name of a column."""
    return NEUTRAL.identifier_preparer.quote(column.name)


def in_state(spec: QueueSpec, row: str, state: str) -> str:
    """Return the condition that a job is in a state.

    :param row: ``NEW.`` or ``OLD.``, or nothing.
    """
    status = spec.columns["status"]
    return f"{row}{quoted(status)} = {literal_text(spec.status_value(state), status.type)}"


def hash_sql(key: JobKey) -> str:
    """Return the hash of the key of a row."""
    return literal_sql(key.hashed(key.spec.table))


def first_unfinished(order: KeyOrder, key: str, *, into: str) -> str:
    """Return the statement that finds the first unfinished job of a key.

    :param key: the variable with the hash of the key.
    :param into: the variable that receives the job's primary key, as a JSON text; NULL if the job is not pending.
    """
    spec = order.spec
    begun = f"{quoted(spec.columns['started_at'])} IS NOT NULL"
    run_at = spec.columns.get("run_at")
    due = (
        []
        if run_at is None
        else [f"({begun} OR {quoted(run_at)} IS NULL OR {quoted(run_at)} <= statement_timestamp())"]
    )
    pending = [in_state(spec, "", "pending")] if spec.has("status") else []
    others = [] if spec.strategy.holds_transaction else [in_state(spec, "", "processing")]
    if spec.has("status") and order.config.on_failure == "block":
        others.append(in_state(spec, "", "failed"))
    waits = " AND ".join([*pending, *due])
    unfinished = [*others, *([f"({waits})"] if waits else [])]
    where = " AND ".join([f"{hash_sql(order)} = {key}", *([f"({' OR '.join(unfinished)})"] if unfinished else [])])
    keys = ", ".join(quoted(column) for column in spec.keys)
    by = ", ".join(quoted(column) for column in order.by)
    found = f"pg_catalog.jsonb_build_array({keys})::text"
    first = f"CASE WHEN {pending[0]} THEN {found} END" if others else found
    return f"SELECT {first} INTO {into} FROM {{table}} WHERE {where} ORDER BY {by} LIMIT 1;"  # noqa: S608 - the names are quoted, and the values are literals
