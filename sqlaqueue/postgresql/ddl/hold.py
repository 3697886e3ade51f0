"""The function by which a claim of a held strategy locks a job together with a slot of each of its keys.

Such a claim writes nothing that others see, so what runs cannot be counted from the rows. A key with a limit of n has n
slots instead: advisory locks of the transaction that runs the jobs. The server releases them when the transaction ends,
however it ends. A slot belongs to the transaction, which may hold several jobs of a key.

The key of the lock is the hash of the job's key without its last 20 bits, which are the number of the slot. A limit
that was lowered has left slots with higher numbers, so where a limit may change, the slots that are held are counted.
"""

from __future__ import annotations

import sqlalchemy as sa

from sqlaqueue.flow_control.controls import FlowControl
from sqlaqueue.postgresql.ddl.flow_sql import READ_COMMITTED, first_unfinished
from sqlaqueue.postgresql.ddl.objects import Function
from sqlaqueue.postgresql.flow_functions import CONTENDED, RECORD, RECORD_PARTS, SLOT_BITS, hold_function, slot_text

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
