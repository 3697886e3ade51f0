"""The functions and triggers of flow control.

A claim calls the functions, see :mod:`sqlaqueue.postgresql.flow_functions`. Each locks a key for the transaction and
reads what is there in a snapshot of its own. A key that another transaction has locked is passed over, and the setting
``sqlaqueue.contended`` then says so.

One trigger notifies Consumers that the end of a run may have made room for another job. With
``Order(on_failure="cancel")`` another one cancels the jobs behind a failed one.
"""

from __future__ import annotations

import hashlib

import sqlalchemy as sa

from sqlaqueue.flow_control.controls import FlowControl, JobKey, KeyLimit, KeyOrder
from sqlaqueue.notify_payloads import PENDING
from sqlaqueue.postgresql.ddl.attach import attach, objects_of
from sqlaqueue.postgresql.ddl.objects import Function, Trigger, TriggerFunction, version_comment
from sqlaqueue.postgresql.ddl.sql_template import literal_sql
from sqlaqueue.postgresql.flow_functions import CONTENDED, RATE_FUNCTION, RECORD, capacity_function, head_function
from sqlaqueue.postgresql.identifiers import object_name
from sqlaqueue.postgresql.notify import channel_of
from sqlaqueue.postgresql.types import NEUTRAL
from sqlaqueue.queue.roles import literal_text
from sqlaqueue.queue.spec import QueueSpec

VERSION = 1
"""Raise it whenever a text below changes: a running Consumer compares it with the version in the database."""

_COMMENT = version_comment(VERSION)

FREED_PREFIX = "sqlaqueue_freed_"
CANCEL_PREFIX = "sqlaqueue_order_"

_READ_COMMITTED = """
  IF pg_catalog.current_setting('transaction_isolation') <> 'read committed' THEN
    RAISE EXCEPTION 'sqlaqueue: a claim of a queue with limits, rates or an order needs READ COMMITTED; '
      'this transaction is %', pg_catalog.upper(pg_catalog.current_setting('transaction_isolation'))
      USING ERRCODE = 'feature_not_supported';
  END IF;"""


_DECLARED = f"""
  sqlaqueue_salted text := ',' || pg_catalog.hashint8extended(sqlaqueue_key, sqlaqueue_number) || ',';
  sqlaqueue_record text := pg_catalog.current_setting('{RECORD}', true);"""

_READ_RECORD = """
  IF pg_catalog.starts_with(sqlaqueue_record, sqlaqueue_claim) THEN
    IF pg_catalog.strpos(sqlaqueue_record, '!' || sqlaqueue_salted) > 0 THEN
      RETURN 0;
    END IF;
  ELSE
    sqlaqueue_record := sqlaqueue_claim;
  END IF;"""

# Without arrays: to parse hundreds of numbers for each job takes longer than to count what runs.
_RETURN_IF_FULL = f"""
    sqlaqueue_free := sqlaqueue_free - (pg_catalog.length(sqlaqueue_record) - pg_catalog.length(
      pg_catalog.replace(sqlaqueue_record, sqlaqueue_salted, ''))) / pg_catalog.length(sqlaqueue_salted);
    IF sqlaqueue_free <= 0 THEN
      PERFORM pg_catalog.set_config('{RECORD}', sqlaqueue_record || '!' || sqlaqueue_salted, true);
      RETURN 0;
    END IF;"""

_CLAIM, _LOCK = "sqlaqueue_claim text, sqlaqueue_number integer, ", ", sqlaqueue_lock boolean"
"""The first arguments of each function, and the last one."""


def _twice(look: str, lock: str, otherwise: str, result: str) -> str:
    """Return the end of a function that looks, locks the key, and looks again.

    A key without room is not locked: thousands of locks would fill the server's table of them. Without
    ``sqlaqueue_lock`` the function looks only once, which tells nothing certain.

    :param look: returns from the function if there is no room.
    :param lock: the text that the lock depends on, with the key and the table.
    :param otherwise: the result if another transaction has the lock.
    :param result: the result if there is room.
    """
    seed = f"pg_catalog.hashtextextended({lock}, $sqlaqueue_name${{table}}$sqlaqueue_name$::regclass::oid::bigint)"
    record = _READ_RECORD if otherwise == "0" else _READ_RECORD.replace("RETURN 0", f"RETURN {otherwise}")
    return f"""
BEGIN{_READ_COMMITTED}{record}
  FOR sqlaqueue_round IN 1 .. 2 LOOP{look}
    EXIT WHEN NOT sqlaqueue_lock OR sqlaqueue_round = 2;
    IF NOT pg_catalog.pg_try_advisory_xact_lock(pg_catalog.hashint8extended(sqlaqueue_key, {seed})) THEN
      PERFORM pg_catalog.set_config('{CONTENDED}', 'on', true);
      RETURN {otherwise};
    END IF;
  END LOOP;
  RETURN {result};
END
"""


def attach_admission(flow: FlowControl, rates: sa.Table | None) -> None:
    """Attach the functions and triggers to the queue's table.

    :param rates: the side table of rates; None for a queue without any.
    """
    table = flow.spec.table
    for name, limits in _by_name(flow).items():
        attach(table, _capacity(flow.spec, name, limits))
    if flow.order is not None:
        attach(table, _head(flow.order))
        if flow.order.config.on_failure == "cancel":
            _attach_cancel(flow.order)
    if flow.spec.config.notify:
        _attach_freed(flow)
    if rates is not None and not objects_of(rates):
        attach(rates, _rate_capacity(rates))


def _by_name(flow: FlowControl) -> dict[str, KeyLimit]:
    """Return the limits by the names of their functions; two limits of one key share a function."""
    return {capacity_function(limit): limit for limit in flow.limits}


def _name(column: sa.Column[object]) -> str:
    return NEUTRAL.identifier_preparer.quote(column.name)


def _state(spec: QueueSpec, row: str, state: str) -> str:
    status = spec.columns["status"]
    return f"{row}{_name(status)} = {literal_text(spec.status_value(state), status.type)}"


def _hash(key: JobKey) -> str:
    return literal_sql(key.hashed(key.spec.table))


def _running(key: JobKey) -> str:
    return literal_sql(key.running(key.spec.table))


def _lock_text(kind: str, key: JobKey) -> str:
    quoted = f"{kind} {key.text}".replace("'", "''")
    return f"'{quoted}'"


def _capacity(spec: QueueSpec, name: str, limit: KeyLimit) -> Function:
    running = f"{_running(limit)} = sqlaqueue_key" if limit.names else _state(spec, "", "processing")
    look = f"""
    SELECT sqlaqueue_most - pg_catalog.count(*) INTO sqlaqueue_free FROM (
      SELECT FROM {{table}} WHERE {running} LIMIT greatest(sqlaqueue_most, 0)
    ) AS sqlaqueue_counted;{_RETURN_IF_FULL}"""  # noqa: S608 - the names are quoted, and the values are literals
    body = f"""
DECLARE
  sqlaqueue_free integer;{_DECLARED}{_twice(look, _lock_text("limit", limit), "0", "sqlaqueue_free")}"""
    arguments = f"{_CLAIM}sqlaqueue_key bigint, sqlaqueue_most integer{_LOCK}"
    return Function(spec.table, name, arguments, "integer", body, {"table": spec.table}, comment=_COMMENT)


def _head(order: KeyOrder) -> Function:
    spec = order.spec
    unfinished = [_state(spec, "", "processing")]
    if order.config.on_failure == "block":
        unfinished.append(_state(spec, "", "failed"))
    begun = f"{_name(spec.columns['started_at'])} IS NOT NULL"
    run_at = spec.columns.get("run_at")
    due = (
        ""
        if run_at is None
        else f" AND ({begun} OR {_name(run_at)} IS NULL OR {_name(run_at)} <= statement_timestamp())"
    )
    unfinished.append(f"({_state(spec, '', 'pending')}{due})")
    keys = ", ".join(_name(key) for key in spec.keys)
    by = ", ".join(_name(column) for column in order.by)
    look = f"""
    IF pg_catalog.strpos(sqlaqueue_record, sqlaqueue_salted) > 0
      OR EXISTS (SELECT FROM {{table}} WHERE {_running(order)} = sqlaqueue_key) THEN
      RETURN NULL;
    END IF;
    SELECT CASE WHEN {_state(spec, "", "pending")} THEN pg_catalog.jsonb_build_array({keys})::text END
      INTO sqlaqueue_first
      FROM {{table}} WHERE {_hash(order)} = sqlaqueue_key AND ({" OR ".join(unfinished)})
      ORDER BY {by} LIMIT 1;
    IF sqlaqueue_first IS DISTINCT FROM sqlaqueue_job THEN
      RETURN NULL;
    END IF;"""  # noqa: S608 - as above
    body = f"""
DECLARE
  sqlaqueue_first text;{_DECLARED}{_twice(look, _lock_text("order", order), "NULL", "sqlaqueue_first")}"""
    arguments = f"{_CLAIM}sqlaqueue_key bigint, sqlaqueue_job text{_LOCK}"
    return Function(spec.table, head_function(order), arguments, "text", body, {"table": spec.table}, comment=_COMMENT)


def _rate_capacity(rates: sa.Table) -> Function:
    look = f"""
    SELECT r.next_at, r.throttled_until INTO sqlaqueue_next, sqlaqueue_until FROM {{table}} AS r
      WHERE r.queue = sqlaqueue_queue AND r.rate = sqlaqueue_rate AND r.key = sqlaqueue_key;
    sqlaqueue_now := pg_catalog.clock_timestamp();
    IF sqlaqueue_until > sqlaqueue_now THEN
      RETURN 0;
    END IF;
    IF sqlaqueue_next > sqlaqueue_now + sqlaqueue_burst * sqlaqueue_step THEN
      -- The clock was set back. It must not hold the key back for longer than a whole burst.
      sqlaqueue_next := sqlaqueue_now + sqlaqueue_burst * sqlaqueue_step;
      UPDATE {{table}} AS r SET next_at = sqlaqueue_next
        WHERE r.queue = sqlaqueue_queue AND r.rate = sqlaqueue_rate AND r.key = sqlaqueue_key;
    END IF;
    sqlaqueue_next := greatest(sqlaqueue_next, sqlaqueue_now);
    sqlaqueue_free := sqlaqueue_burst - pg_catalog.ceil(
      extract(epoch FROM sqlaqueue_next - sqlaqueue_now)::float8 / sqlaqueue_seconds)::integer;{_RETURN_IF_FULL}"""  # noqa: S608 - the texts are the library's own
    body = f"""
DECLARE
  sqlaqueue_free integer;
  sqlaqueue_now timestamptz;
  sqlaqueue_next timestamptz;
  sqlaqueue_until timestamptz;
  sqlaqueue_step interval := pg_catalog.make_interval(secs => sqlaqueue_seconds);{_DECLARED}{
        _twice(look, "sqlaqueue_queue || ' ' || sqlaqueue_rate", "0", "sqlaqueue_free")
    }"""
    arguments = (
        f"{_CLAIM}sqlaqueue_queue text, sqlaqueue_rate text, sqlaqueue_key bigint, "
        f"sqlaqueue_seconds double precision, sqlaqueue_burst integer{_LOCK}"
    )
    return Function(rates, RATE_FUNCTION, arguments, "integer", body, {"table": rates}, comment=_COMMENT)


def _digest(text: str) -> str:
    # The server rewrites a condition when it stores it, so its digest in the name tells whether it has changed.
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _attach_freed(flow: FlowControl) -> None:
    """Attach the triggers that notify idle Consumers when the end of a run makes room, or that of a head."""
    spec, table = flow.spec, flow.spec.table
    states = ["processing"] if flow.order is None else ["pending", "processing", "failed"]
    held = " OR ".join(_state(spec, "OLD.", state) for state in states)
    status = _name(spec.columns["status"])
    left = f"({held}) AND OLD.{status} IS DISTINCT FROM NEW.{status}"
    body = f"""
BEGIN
  PERFORM pg_catalog.pg_notify('{channel_of(spec).replace("'", "''")}',
    pg_catalog.concat_ws(' ', '{PENDING}', pg_current_xact_id(), 1, 0));
  RETURN NULL;
END
"""
    name = object_name("sqlaqueue_freed", table.name)
    function = TriggerFunction(table, name, body, comment=_COMMENT)
    attach(table, function)
    for event, when in (("UPDATE", left), ("DELETE", held)):
        attach(table, Trigger(table, f"{FREED_PREFIX}{event.lower()}_{_digest(when)}", event, function, when=when))


def _attach_cancel(order: KeyOrder) -> None:
    """Attach the trigger that cancels the waiting jobs behind a failed one."""
    spec, table = order.spec, order.spec.table
    values = {"status": literal_text(spec.status_value("cancelled"), spec.columns["status"].type)}
    values |= {"finished_at": "statement_timestamp()", "lease_token": "NULL"}
    changed = ", ".join(f"{_name(spec.columns[role])} = {value}" for role, value in values.items() if spec.has(role))
    names = [_name(column) for column in order.by]
    behind = f"({', '.join(names)}) > ({', '.join(f'NEW.{name}' for name in names)})"
    key = _hash(order)
    new = ", ".join(f"NEW.{_name(column)}" for column in order.columns)
    body = f"""
BEGIN
  UPDATE {{table}} SET {changed}
    WHERE {key} = hash_record_extended(ROW({new}), 0) AND {_state(spec, "", "pending")} AND {behind};
  RETURN NULL;
END
"""  # noqa: S608 - as above
    name = object_name("sqlaqueue_order", table.name)
    function = TriggerFunction(table, name, body, {"table": table}, _COMMENT)
    attach(table, function)
    failed = f"{_state(spec, 'NEW.', 'failed')} AND ({_state(spec, 'OLD.', 'failed')}) IS NOT TRUE"
    attach(table, Trigger(table, f"{CANCEL_PREFIX}{_digest(failed)}", "UPDATE", function, when=failed))
