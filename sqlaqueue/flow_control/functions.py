"""The functions and triggers of flow control in the database, and the SQL that they share."""

from __future__ import annotations

from collections.abc import Iterator

import sqlalchemy as sa

from sqlaqueue.flow_control.keys import FlowControl, JobKey, KeyLimit, KeyOrder
from sqlaqueue.notify_payloads import PENDING
from sqlaqueue.postgresql.ddl import (
    Function,
    TriggerFunction,
    attach,
    conditional_trigger,
    in_state,
    literal_sql,
    objects_of,
    quoted,
    state_value,
    version_comment,
)
from sqlaqueue.postgresql.triggers import channel_of, return_if_unwatched
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.sql.types import object_name

# -- flow sql ----------------------------------------------------------------------------------------------------------
# SQL texts that the functions and triggers of flow control share.


READ_COMMITTED = """
  IF pg_catalog.current_setting('transaction_isolation') <> 'read committed' THEN
    RAISE EXCEPTION 'sqlaqueue: a claim of a queue with limits, rates or an order needs READ COMMITTED; '
      'this transaction is %', pg_catalog.upper(pg_catalog.current_setting('transaction_isolation'))
      USING ERRCODE = 'feature_not_supported';
  END IF;"""


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


# -- flow functions ----------------------------------------------------------------------------------------------------
# The names of the functions that a claim under flow control calls.
#
# Under READ COMMITTED the snapshot of a statement is older than the locks that it takes: a claim that locked a key
# and counted its running jobs in one statement would miss those of the claim that had the lock before. Each query
# inside a VOLATILE function has a snapshot of its own, so a function counts what is there once the key is locked.


CONTENDED = "sqlaqueue.contended"
"""The setting that is ``on`` for the rest of a transaction in which a claim has passed over a key that another
transaction has locked."""

ROOM = "sqlaqueue.room"
"""The setting with the token of the claim while the last key that it has locked had room for a job."""

RECORD = "sqlaqueue.claim_"
"""The beginning of the names of the settings with what a claim has admitted so far, see
:mod:`sqlaqueue.flow_control.checks`."""

RECORD_PARTS = 64
"""How many such settings there are: a power of two. Behind the name is the remainder of the hash of a key."""


def capacity_function(key: JobKey) -> str:
    """Return the name of the function that locks a key of a limit, and returns how many more jobs may run."""
    return object_name("sqlaqueue_capacity", key.spec.table.name, *key.names)


def head_function(key: JobKey) -> str:
    """Return the name of the function that locks a key of an order, and returns the primary key of its head."""
    return object_name("sqlaqueue_head", key.spec.table.name, *key.names)


SLOT_BITS = 20
"""So many bits of the key of a slot's lock are its number. A limit beyond that is none."""


def slot_text(key: JobKey) -> str:
    """Return the text that tells the slots of one limit, or order, of a table from those of another."""
    kind = "order" if isinstance(key, KeyOrder) else "limit"
    return f"{kind} {key.text}"


def hold_function(spec: QueueSpec) -> str:
    """Return the name of the function that locks a job with a slot of each of its keys, under a held strategy."""
    return object_name("sqlaqueue_hold", spec.table.name)


RATE_FUNCTION = "sqlaqueue_rate_capacity"
"""The name of the function that locks a key of a rate, and returns how many jobs may begin."""


# -- hold --------------------------------------------------------------------------------------------------------------
# The function by which a claim of a held strategy locks a job together with a slot of each of its keys.
#
# Such a claim writes nothing that others see, so what runs cannot be counted from the rows. A key with a limit of n
# has n slots instead: advisory locks of the transaction that runs the jobs. The server releases them when the
# transaction ends, however it ends. A slot belongs to the transaction, which may hold several jobs of a key.
#
# The key of the lock is the hash of the job's key without its last 20 bits, which are the number of the slot. A limit
# that was lowered has left slots with higher numbers, so where a limit may change, the slots that are held are
# counted.


_REFUSED = "SQ001"
"""The SQLSTATE with which the function leaves its subtransaction, which releases what it has locked there."""


def hold(flow: FlowControl, comment: str) -> Function:
    """Return the function of a queue. Its result: whether the job and the slots are locked.

    The limits are arguments, so that it serves two versions of a program with different ones. Element 1 of each array
    is the order's.
    """
    spec = flow.spec
    text, look, refuse_later = "", "", ""
    if flow.order is not None:
        text = slot_text(flow.order).replace("'", "''")
        behind = f"""
  IF sqlaqueue_order IS NOT NULL THEN
    {first_unfinished(flow.order, "sqlaqueue_order", into="sqlaqueue_first")}
    IF sqlaqueue_first IS DISTINCT FROM sqlaqueue_job THEN
      {{instead}};
    END IF;
  END IF;"""
        look = behind.replace("{instead}", "RETURN false")
        refuse_later = behind.replace("{instead}", f"RAISE SQLSTATE '{_REFUSED}'")
    tables: dict[str, sa.Table] = dict(zip(("table", "messages"), spec.strategy.locked_tables(spec), strict=False))
    messages = "messages" in tables
    rows = "{table} AS j, {messages} AS m" if messages else "{table} AS j"
    also = " AND m.ctid = sqlaqueue_message" if messages else ""
    # A claim that deletes the row needs the full lock. With a weaker one here it would pass over the row afterwards.
    strength = "FOR NO KEY UPDATE" if spec.strategy.keeps_rows else "FOR UPDATE"
    without_number = f"-(1::bigint << {SLOT_BITS})"
    # What the claim has admitted so far is in one of several settings, by the remainder of the key.
    read = f"""sqlaqueue_name := '{RECORD}' || (sqlaqueue_keys[i] & {RECORD_PARTS - 1});
    sqlaqueue_record := pg_catalog.current_setting(sqlaqueue_name, true);
    IF pg_catalog.starts_with(sqlaqueue_record, sqlaqueue_claim) IS NOT TRUE THEN
      sqlaqueue_record := sqlaqueue_claim;
    END IF;
    sqlaqueue_salted := ',' || pg_catalog.hashint8extended(
      sqlaqueue_keys[i], CASE i WHEN 1 THEN 0 ELSE sqlaqueue_number + i - 2 END) || ',';
    -- Jobs of a key may have different limits.
    sqlaqueue_full := '!' || sqlaqueue_most[i] || ' ' || pg_catalog.btrim(sqlaqueue_salted, ',') || '!';"""
    newline = "\n"
    body = f"""
DECLARE
  sqlaqueue_name text;
  sqlaqueue_record text;
  sqlaqueue_salted text;
  sqlaqueue_first text;
  sqlaqueue_slot bigint;
  sqlaqueue_taken boolean;
  sqlaqueue_full text;
  sqlaqueue_with_full text;
  sqlaqueue_contended boolean := false;
BEGIN{READ_COMMITTED}
  sqlaqueue_limits := ARRAY['{text}'] || sqlaqueue_limits;
  sqlaqueue_keys := ARRAY[sqlaqueue_order] || sqlaqueue_keys;
  sqlaqueue_most := ARRAY[1] || sqlaqueue_most;
  sqlaqueue_changing := ARRAY[false] || sqlaqueue_changing;
  FOR i IN 1 .. pg_catalog.cardinality(sqlaqueue_keys) LOOP
    CONTINUE WHEN sqlaqueue_keys[i] IS NULL;
    {read}
    -- One job of an order for each claim: the next one may begin when this one has ended.
    IF pg_catalog.strpos(sqlaqueue_record, sqlaqueue_full) > 0
      OR i = 1 AND pg_catalog.strpos(sqlaqueue_record, sqlaqueue_salted) > 0 THEN
      RETURN false;
    END IF;
  END LOOP;{look}
  BEGIN
    FOR i IN 1 .. pg_catalog.cardinality(sqlaqueue_keys) LOOP
      CONTINUE WHEN sqlaqueue_keys[i] IS NULL OR sqlaqueue_most[i] IS NULL;
      {read.replace(newline, newline + "  ")}
      sqlaqueue_taken := pg_catalog.strpos(sqlaqueue_record, sqlaqueue_salted) > 0;
      CONTINUE WHEN sqlaqueue_taken AND NOT sqlaqueue_changing[i];
      sqlaqueue_slot := pg_catalog.hashint8extended(sqlaqueue_keys[i], pg_catalog.hashtextextended(
        sqlaqueue_limits[i], $sqlaqueue_name${{table}}$sqlaqueue_name$::regclass::oid::bigint)) & {without_number};
      FOR sqlaqueue_try IN 0 .. least(sqlaqueue_most[i], 1 << {SLOT_BITS}) - 1 LOOP
        EXIT WHEN sqlaqueue_taken;
        sqlaqueue_taken := pg_catalog.pg_try_advisory_xact_lock(sqlaqueue_slot | sqlaqueue_try);
      END LOOP;
      IF sqlaqueue_taken AND sqlaqueue_changing[i] THEN
        SELECT pg_catalog.count(DISTINCT l.virtualtransaction) <= sqlaqueue_most[i] INTO sqlaqueue_taken
          FROM pg_catalog.pg_locks AS l
          WHERE l.locktype = 'advisory' AND l.objsubid = 1 AND l.granted
            AND l.database = (SELECT d.oid FROM pg_catalog.pg_database AS d
              WHERE d.datname = pg_catalog.current_database())
            AND (l.classid::bigint << 32 | l.objid::bigint) & {without_number} = sqlaqueue_slot;
        -- Two claims may have counted each other's slot.
        sqlaqueue_contended := NOT sqlaqueue_taken;
      END IF;
      IF NOT sqlaqueue_taken THEN
        sqlaqueue_with_full := sqlaqueue_record || sqlaqueue_full;
        RAISE SQLSTATE '{_REFUSED}';
      END IF;
    END LOOP;{refuse_later}
    -- The version of the row that the claim has read: if there is a newer one, the next claim reads it.
    PERFORM FROM {rows} WHERE j.ctid = sqlaqueue_row AND j.tableoid = sqlaqueue_part{also} {strength} SKIP LOCKED;
    IF NOT FOUND THEN
      RAISE SQLSTATE '{_REFUSED}';
    END IF;
    RETURN true;
  EXCEPTION WHEN SQLSTATE '{_REFUSED}' THEN
    -- The slots are released.
  END;
  IF sqlaqueue_contended THEN
    PERFORM pg_catalog.set_config('{CONTENDED}', 'on', true);
  END IF;
  IF sqlaqueue_with_full IS NOT NULL THEN
    PERFORM pg_catalog.set_config(sqlaqueue_name, sqlaqueue_with_full, true);
  END IF;
  RETURN false;
END
"""  # noqa: S608 - the names are quoted, and the texts are the library's own
    arguments = (
        f"sqlaqueue_claim text, sqlaqueue_row tid, sqlaqueue_part oid{', sqlaqueue_message tid' if messages else ''}, "
        "sqlaqueue_job text, sqlaqueue_order bigint, sqlaqueue_number integer, sqlaqueue_limits text[], "
        "sqlaqueue_keys bigint[], sqlaqueue_most integer[], sqlaqueue_changing boolean[]"
    )
    return Function(spec.table, hold_function(spec), arguments, "boolean", body, tables, comment=comment)


# -- admission ---------------------------------------------------------------------------------------------------------
# The functions and triggers of flow control.
#
# A claim calls the functions, see :mod:`sqlaqueue.flow_control.functions`. Each locks a key for the transaction and
# reads what is there in a snapshot of its own. A key that another transaction has locked is passed over, and the
# setting ``sqlaqueue.contended`` then says so.
#
# One trigger notifies Consumers that the end of a run may have made room for another job. With
# ``InOrder(on_failure="cancel")`` another one cancels the jobs behind a failed one.


VERSION = 2
"""Raise it whenever a text below changes: a running Consumer compares it with the version in the database."""

_COMMENT = version_comment(VERSION)

_DECLARED = f"""
  sqlaqueue_salted text := ',' || pg_catalog.hashint8extended(sqlaqueue_key, sqlaqueue_number) || ',';
  sqlaqueue_name text := '{RECORD}' || (sqlaqueue_key & {RECORD_PARTS - 1});
  sqlaqueue_record text := pg_catalog.current_setting(sqlaqueue_name, true);
  sqlaqueue_room boolean;"""

# A job is refused without a look if another one of its key was refused by the same limit: jobs may have different ones.
_DECLARED_FULL = """
  sqlaqueue_full text := '!' || {most} || ' ' || pg_catalog.btrim(sqlaqueue_salted, ',') || '!';"""

_READ_RECORD = """
  IF pg_catalog.starts_with(sqlaqueue_record, sqlaqueue_claim) IS NOT TRUE THEN
    sqlaqueue_record := sqlaqueue_claim;
  END IF;"""

_RETURN_IF_KNOWN = """
  IF pg_catalog.strpos(sqlaqueue_record, sqlaqueue_full) > 0 THEN
    RETURN 0;
  END IF;"""

# Without arrays: to parse hundreds of numbers for each job takes longer than to count what runs.
_RETURN_IF_FULL = """
    sqlaqueue_free := sqlaqueue_free - (pg_catalog.length(sqlaqueue_record) - pg_catalog.length(
      pg_catalog.replace(sqlaqueue_record, sqlaqueue_salted, ''))) / pg_catalog.length(sqlaqueue_salted);
    IF sqlaqueue_free <= 0 THEN
      PERFORM pg_catalog.set_config(sqlaqueue_name, sqlaqueue_record || sqlaqueue_full, true);
      {refuse};
    END IF;"""

_CLAIM, _LOCK = "sqlaqueue_claim text, sqlaqueue_number integer, ", ", sqlaqueue_lock boolean"
"""The first arguments of each function, and the last one."""


def _twice(look: str, lock: str, otherwise: str, result: str, *, guess: str, known: str = "") -> str:
    """Return the end of a function that looks, locks the key, and looks again.

    A key without room is not locked: thousands of locks would fill the server's table of them, and claims that find
    nothing would be in each other's way. Without ``sqlaqueue_lock`` the function looks only once, which tells nothing
    certain. While each key that a claim locks has room, the next one probably has room too, and the first look is left
    out.

    :param look: refuses the job if there is no room.
    :param lock: the text that the lock depends on, with the key and the table.
    :param otherwise: the result if the job is refused, or another transaction has the lock.
    :param result: the result if there is room.
    :param guess: the result instead of a look.
    :param known: returns from the function if there was no room before.
    """
    seed = f"pg_catalog.hashtextextended({lock}, $sqlaqueue_name${{table}}$sqlaqueue_name$::regclass::oid::bigint)"
    refuse = f"""IF sqlaqueue_round = 2 THEN
        PERFORM pg_catalog.set_config('{ROOM}', '', true);
      END IF;
      RETURN {otherwise}"""
    return f"""
BEGIN{READ_COMMITTED}{_READ_RECORD}{known}
  sqlaqueue_room := pg_catalog.current_setting('{ROOM}', true) IS NOT DISTINCT FROM sqlaqueue_claim;
  IF sqlaqueue_room AND NOT sqlaqueue_lock THEN
    RETURN {guess};
  END IF;
  FOR sqlaqueue_round IN 1 .. 2 LOOP
    IF NOT sqlaqueue_room OR sqlaqueue_round = 2 THEN{look.replace("{refuse}", refuse)}
    END IF;
    EXIT WHEN NOT sqlaqueue_lock OR sqlaqueue_round = 2;
    IF NOT pg_catalog.pg_try_advisory_xact_lock(pg_catalog.hashint8extended(sqlaqueue_key, {seed})) THEN
      PERFORM pg_catalog.set_config('{CONTENDED}', 'on', true);
      RETURN {otherwise};
    END IF;
  END LOOP;
  IF sqlaqueue_lock AND NOT sqlaqueue_room THEN
    PERFORM pg_catalog.set_config('{ROOM}', sqlaqueue_claim, true);
  END IF;
  RETURN {result};
END
"""


def attach_admission(flow: FlowControl, rates: sa.Table | None) -> None:
    """Attach the functions and triggers to the queue's table.

    :param rates: the side table of rates; None for a queue without any.
    """
    table = flow.spec.table
    if flow.spec.strategy.holds_transaction:
        if flow.limits or flow.order is not None:
            attach(table, hold(flow, comment=_COMMENT))
    else:
        for name, limits in _by_name(flow).items():
            attach(table, _capacity(flow.spec, name, limits))
        if flow.order is not None:
            attach(table, _head(flow.order))
    if flow.order is not None and flow.order.config.on_failure == "cancel":
        _attach_cancel(flow.order)
    if flow.spec.config.notify:
        _attach_freed(flow)
    if rates is not None and not objects_of(rates):
        attach(rates, _rate_capacity(rates))


def _by_name(flow: FlowControl) -> dict[str, KeyLimit]:
    """Return the limits by the names of their functions; two limits of one key share a function."""
    return {capacity_function(limit): limit for limit in flow.limits}


def _running(key: JobKey) -> str:
    return literal_sql(key.running(key.spec.table))


def _lock_text(kind: str, key: JobKey) -> str:
    text = f"{kind} {key.text}".replace("'", "''")
    return f"'{text}'"


def _capacity(spec: QueueSpec, name: str, limit: KeyLimit) -> Function:
    running = f"{_running(limit)} = sqlaqueue_key" if limit.names else in_state(spec, "", "processing")
    look = f"""
    SELECT sqlaqueue_most - pg_catalog.count(*) INTO sqlaqueue_free FROM (
      SELECT FROM {{table}} WHERE {running} LIMIT greatest(sqlaqueue_most, 0)
    ) AS sqlaqueue_counted;{_RETURN_IF_FULL}"""  # noqa: S608 - the names are quoted, and the values are literals
    body = f"""
DECLARE
  sqlaqueue_free integer;{_DECLARED}{_DECLARED_FULL.format(most="sqlaqueue_most")}{
        _twice(look, _lock_text("limit", limit), "0", "sqlaqueue_free", guess="1", known=_RETURN_IF_KNOWN)
    }"""
    arguments = f"{_CLAIM}sqlaqueue_key bigint, sqlaqueue_most integer{_LOCK}"
    return Function(spec.table, name, arguments, "integer", body, {"table": spec.table}, comment=_COMMENT)


def _head(order: KeyOrder) -> Function:
    spec = order.spec
    look = f"""
    IF pg_catalog.strpos(sqlaqueue_record, sqlaqueue_salted) > 0
      OR EXISTS (SELECT FROM {{table}} WHERE {_running(order)} = sqlaqueue_key) THEN
      {{refuse}};
    END IF;
    {first_unfinished(order, "sqlaqueue_key", into="sqlaqueue_first")}
    IF sqlaqueue_first IS DISTINCT FROM sqlaqueue_job THEN
      {{refuse}};
    END IF;"""  # noqa: S608 - the names are quoted, and the values are literals
    checked = _twice(look, _lock_text("order", order), "NULL", "sqlaqueue_first", guess="sqlaqueue_job")
    body = f"""
DECLARE
  sqlaqueue_first text;{_DECLARED}{checked}"""
    arguments = f"{_CLAIM}sqlaqueue_key bigint, sqlaqueue_job text{_LOCK}"
    return Function(spec.table, head_function(order), arguments, "text", body, {"table": spec.table}, comment=_COMMENT)


def _rate_capacity(rates: sa.Table) -> Function:
    mine = "r.queue = sqlaqueue_queue AND r.rate = sqlaqueue_rate AND r.key = sqlaqueue_key"
    look = f"""
    IF sqlaqueue_round = 1 THEN
      SELECT r.next_at, r.throttled_until INTO sqlaqueue_next, sqlaqueue_until FROM {{table}} AS r WHERE {mine};
    ELSE
      -- A transaction that holds the key back may have locked the row. The claim must not wait for it.
      SELECT r.next_at, r.throttled_until INTO sqlaqueue_next, sqlaqueue_until FROM {{table}} AS r WHERE {mine}
        FOR NO KEY UPDATE SKIP LOCKED;
      IF NOT FOUND AND EXISTS (SELECT FROM {{table}} AS r WHERE {mine}) THEN
        PERFORM pg_catalog.set_config('{CONTENDED}', 'on', true);
        RETURN 0;
      END IF;
    END IF;
    sqlaqueue_now := pg_catalog.clock_timestamp();
    IF sqlaqueue_until > sqlaqueue_now THEN
      {{refuse}};
    END IF;
    IF sqlaqueue_next > sqlaqueue_now + sqlaqueue_burst * sqlaqueue_step THEN
      -- The clock was set back. It must not hold the key back for longer than a whole burst. The key is locked first.
      sqlaqueue_next := sqlaqueue_now;
      IF sqlaqueue_round = 2 THEN
        sqlaqueue_next := sqlaqueue_now + sqlaqueue_burst * sqlaqueue_step;
        UPDATE {{table}} AS r SET next_at = sqlaqueue_next WHERE {mine};
      END IF;
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
        _DECLARED_FULL.format(most="sqlaqueue_burst")
    }{
        _twice(
            look, "sqlaqueue_queue || ' ' || sqlaqueue_rate", "0", "sqlaqueue_free", guess="1", known=_RETURN_IF_KNOWN
        )
    }"""
    arguments = (
        f"{_CLAIM}sqlaqueue_queue text, sqlaqueue_rate text, sqlaqueue_key bigint, "
        f"sqlaqueue_seconds double precision, sqlaqueue_burst integer{_LOCK}"
    )
    return Function(rates, RATE_FUNCTION, arguments, "integer", body, {"table": rates}, comment=_COMMENT)


def _attach_freed(flow: FlowControl) -> None:
    """Attach the triggers that notify idle Consumers when the end of a run makes room, or that of a head."""
    spec, table = flow.spec, flow.spec.table
    body = f"""
BEGIN
{return_if_unwatched(spec)}  PERFORM pg_catalog.pg_notify('{channel_of(spec).replace("'", "''")}',
    pg_catalog.concat_ws(' ', '{PENDING}', pg_catalog.pg_current_xact_id(), 1, 0));
  RETURN NULL;
END
"""
    name = object_name("sqlaqueue_freed", table.name)
    function = TriggerFunction(table, name, body, comment=_COMMENT, bare=True)
    attach(table, function)
    for event, when in _frees(flow):
        attach(table, conditional_trigger(table, f"sqlaqueue_freed_{event.lower()}", event, function, when))


def _frees(flow: FlowControl) -> Iterator[tuple[str, str | None]]:
    """Yield the events that may make room, each with its condition on the rows."""
    spec, holds = flow.spec, flow.spec.strategy.holds_transaction
    if not spec.has("status"):
        # A claim deletes the row; the notification is sent when its transaction is committed.
        yield "DELETE", None
        return
    states = ["pending"] if holds else ["processing"]
    if flow.order is not None:
        states = [state for state in ("pending", "processing", "failed") if not holds or state != "processing"]
    left = " OR ".join(in_state(spec, "OLD.", state) for state in states)
    # Under a held strategy a job that is to run again stays pending, and another column changes.
    roles = ["status", *(role for role in ("attempts", "run_at", "started_at") if holds and spec.has(role))]
    names = [quoted(spec.columns[role]) for role in roles]
    changed = " OR ".join(f"OLD.{name} IS DISTINCT FROM NEW.{name}" for name in names)
    yield "UPDATE", f"({left}) AND ({changed})" if len(names) > 1 else f"({left}) AND {changed}"
    yield "DELETE", left


def _attach_cancel(order: KeyOrder) -> None:
    """Attach the trigger that cancels the waiting jobs behind a failed one."""
    spec, table = order.spec, order.spec.table
    values = {"status": state_value(spec, "cancelled")}
    values |= {"finished_at": "statement_timestamp()", "lease_token": "NULL"}
    changed = ", ".join(f"{quoted(spec.columns[role])} = {value}" for role, value in values.items() if spec.has(role))
    names = [quoted(column) for column in order.by]
    behind = f"({', '.join(names)}) > ({', '.join(f'NEW.{name}' for name in names)})"
    key = hash_sql(order)
    new = ", ".join(f"NEW.{quoted(column)}" for column in order.columns)
    body = f"""
BEGIN
  UPDATE {{table}} SET {changed}
    WHERE {key} = hash_record_extended(ROW({new}), 0) AND {in_state(spec, "", "pending")} AND {behind};
  RETURN NULL;
END
"""  # noqa: S608 - the texts are the library's own
    name = object_name("sqlaqueue_order", table.name)
    function = TriggerFunction(table, name, body, {"table": table}, _COMMENT)
    attach(table, function)
    failed = f"{in_state(spec, 'NEW.', 'failed')} AND ({in_state(spec, 'OLD.', 'failed')}) IS NOT TRUE"
    # A job without a value of the key is in no order.
    failed += "".join(f" AND NEW.{quoted(column)} IS NOT NULL" for column in order.columns if column.nullable)
    attach(table, conditional_trigger(table, "sqlaqueue_order", "UPDATE", function, failed))
