"""The triggers by which jobs wait for others: ``QueueConfig(waits_for=...)``.

A waiting job has a count of the jobs that it waits for. Counts follow from states, and never from events: a job counts
as long as it is in none of the states of ``WaitRelation.satisfying``. So retries, rescues, requeues, deletes, COPY and
plain SQL need no case of their own.

* **A statement** that changes awaited jobs records by how much the counts change, in a table of its transaction. It
  locks nothing. So does a statement that inserts waiting jobs: they are to be looked at.
* **At the commit** a deferred trigger takes what the transaction has recorded, locks the waiting jobs in the order of
  their keys, and changes their counts. So no transaction makes others wait for longer than its commit takes, and the
  cascades of a failure are a loop, not a recursion.
* **A trigger of the waiting row** makes ``waiting`` out of ``pending`` while the count is above zero, and the other way
  round. So no statement makes a job pending too early.

A waiting job that is not committed, or has not come back, is invisible to a transaction that ends what it waits for.
Both therefore take an advisory lock at their commit: those who end jobs share it, and one who looks at a waiting job
has it alone. Either the end is visible to the look, or the waiting job to the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import JSONB

from sqlaqueue._typing import AnySelect
from sqlaqueue.notify_payloads import Signal
from sqlaqueue.postgresql.ddl import (
    BEFORE_ROW,
    DEFERRED_INSERT,
    StorageParameters,
    Trigger,
    TriggerFunction,
    attach,
    conditional_trigger,
    literal_sql,
    quoted,
    state_value,
    version_comment,
)
from sqlaqueue.postgresql.side_tables import key_json
from sqlaqueue.postgresql.triggers import channel_of
from sqlaqueue.postgresql.waits_at_commit import (
    LOST,
    NOT_BEGUN,
    apply_body,
    cancelled_values,
    counts,
    has_failed,
    has_key,
    is_in,
    joined_by_comma,
    not_begun,
    refusal,
    role_of,
    strict_waits,
)
from sqlaqueue.queue.names import CONTROL, WAITS
from sqlaqueue.queue.spec import QueueSpec, WaitRelation
from sqlaqueue.queue.versions import table_comment
from sqlaqueue.sql.types import SqlText, equals, object_name

VERSION = 2
"""Raise it whenever a text below changes: a running Consumer compares it with the version in the database."""

AT_COMMIT = "sqlaqueue_waits_apply"
"""The name of the trigger that counts when a transaction commits."""

TRIGGER_PREFIX = "sqlaqueue_waits_"
"""The prefix of the names of these triggers."""

_CHUNK = 10_000
"""The keys in a row of the table of a transaction: a JSON array has a limit of 256 MB."""


def changes_table(spec: QueueSpec) -> sa.Table:
    """Return a new table for what a transaction has changed for the waiting jobs of a queue.

    It is empty for all other transactions: the trigger at the commit deletes the rows. On other engines it stays empty.
    """
    return sa.Table(
        object_name("sqlaqueue_waits", spec.table.name),
        spec.table.metadata,
        sa.Column("xact", sa.BigInteger(), primary_key=True, server_default=SqlText("txid_current()", others="NULL")),
        sa.Column("id", sa.BigInteger(), sa.Identity(), primary_key=True),
        sa.Column("relation", sa.Text(), nullable=False),
        sa.Column("keys", JSONB(), nullable=False),
        schema=spec.table.schema or sa.BLANK_SCHEMA,
        comment=table_comment(WAITS),
    )


def attach_waiting(spec: QueueSpec) -> None:
    """Add the triggers of the waiting jobs, once what they wait for is known, and of the table of their changes."""
    changes = spec.side_tables[WAITS]
    attach(changes, StorageParameters(changes))
    awaited = {f"t{number}": wait.awaited.table for number, wait in enumerate(spec.waits)}
    tables = {"w": spec.table, "changes": changes, **awaited}
    apply = _function(spec, changes, "apply", apply_body(spec), tables)
    attach(changes, apply)
    attach(changes, Trigger(changes, AT_COMMIT, DEFERRED_INSERT, apply))

    state = TriggerFunction(
        spec.table, _name(spec, "state"), _state_body(spec), comment=version_comment(VERSION), bare=True
    )
    attach(spec.table, state)
    when = _state_condition(spec)
    attach(spec.table, conditional_trigger(spec.table, f"{TRIGGER_PREFIX}state", BEFORE_ROW, state, when))

    look = _function(spec, spec.table, "look", _look_body(spec), {"changes": changes})
    attach(spec.table, look)
    attach(spec.table, Trigger(spec.table, f"{TRIGGER_PREFIX}insert", "INSERT", look, {"NEW": "new_rows"}))
    # Counts of jobs that have begun are not kept: one that comes back is looked at, and so is one with other keys.
    back = f"{is_in(spec, 'NEW.', *NOT_BEGUN)} AND ({is_in(spec, 'OLD.', *NOT_BEGUN)}) IS NOT TRUE"
    if "pending" not in not_begun(spec):
        back += f" OR {is_in(spec, 'NEW.', 'waiting')} AND ({is_in(spec, 'OLD.', 'waiting')}) IS NOT TRUE"
    used = dict.fromkeys([*spec.keys, *(here for wait in spec.waits for here, _ in wait.pairs)])
    when = " OR ".join([f"({back})", *(f"OLD.{quoted(each)} IS DISTINCT FROM NEW.{quoted(each)}" for each in used)])
    attach(spec.table, conditional_trigger(spec.table, f"{TRIGGER_PREFIX}update", "UPDATE", look, when))
    batches = [wait for wait in spec.waits if wait.to_many]
    if batches:
        members = {f"t{number}": wait.awaited.table for number, wait in enumerate(batches)}
        control = {f"c{number}": wait.awaited.side_tables[CONTROL] for number, wait in enumerate(batches)}
        cancel = _function(spec, spec.table, "cancel", _cancel_body(batches), members | control)
        attach(spec.table, cancel)
        when = f"{is_in(spec, 'NEW.', 'cancelled')} AND ({is_in(spec, 'OLD.', 'cancelled')}) IS NOT TRUE"
        if spec.has("cancelled_for"):
            when += f" AND NEW.{role_of(spec, 'cancelled_for')} IS NULL"
        attach(
            spec.table,
            conditional_trigger(spec.table, f"{TRIGGER_PREFIX}cancel", "UPDATE", cancel, when),
        )


def attach_awaited(wait: WaitRelation) -> None:
    """Add the triggers of the jobs that others wait for."""
    spec, changes = wait.awaited, wait.waiting.side_tables[WAITS]
    name = object_name("sqlaqueue_waits", wait.waiting.table.name, wait.name, "changed")
    function = TriggerFunction(
        spec.table,
        name,
        _record_body(wait),
        {"w": wait.waiting.table, "changes": changes},
        version_comment(VERSION),
        definer=True,
    )
    attach(spec.table, function)
    rows = {"UPDATE": {"OLD": "old_rows", "NEW": "new_rows"}, "DELETE": {"OLD": "old_rows"}}
    if wait.to_many:
        rows["INSERT"] = {"NEW": "new_rows"}
    for event, tables in rows.items():
        trigger = object_name("sqlaqueue_waits", wait.waiting.table.name, wait.name, event.lower())
        attach(spec.table, Trigger(spec.table, trigger, event, function, tables))


def _function(
    spec: QueueSpec, table: sa.Table, purpose: str, body: str, tables: dict[str, sa.Table]
) -> TriggerFunction:
    # With the privileges of its owner: who enqueues or settles needs none on the tables of other queues.
    return TriggerFunction(table, _name(spec, purpose), body, tables, version_comment(VERSION), definer=True)


def _name(spec: QueueSpec, purpose: str) -> str:
    return object_name("sqlaqueue_waits", spec.table.name, purpose)


def _chunks(relation: str, entries: str) -> str:
    """Return the statement that records JSON entries, if there are any; ``entries`` selects them as ``entry``."""
    return f"""\
INSERT INTO {{changes}} (relation, keys)
    SELECT '{relation}', jsonb_agg(e.entry)
      FROM (SELECT c.entry, row_number() OVER () / {_CHUNK} AS chunk FROM ({entries}) AS c) AS e
      GROUP BY e.chunk;"""


def _state_condition(spec: QueueSpec) -> str:
    count = role_of(spec, "waits_for_count")
    waits = f"coalesce(NEW.{count}, 0) > 0"
    if spec.has("is_open"):
        waits = f"({waits} OR coalesce(NEW.{role_of(spec, 'is_open')}, false))"
    differs = f"({is_in(spec, 'NEW.', 'waiting')} IS DISTINCT FROM ({waits}))"
    if spec.has("cancelled_for"):
        differs = f"({differs} OR NEW.{role_of(spec, 'cancelled_for')} IS NOT NULL)"
    return f"{is_in(spec, 'NEW.', 'waiting', 'pending')} AND {differs}"


def _state_body(spec: QueueSpec) -> str:
    status, count = role_of(spec, "status"), role_of(spec, "waits_for_count")
    above = "OPERATOR(pg_catalog.>)"
    is_open = f" OR NEW.{role_of(spec, 'is_open')}" if spec.has("is_open") else ""
    due = ""
    if spec.has("run_at"):
        run_at = role_of(spec, "run_at")
        # A job that has waited, or is back, is not late: it is due from now on.
        due = f"""
    NEW.{run_at} := greatest(NEW.{run_at}, pg_catalog.statement_timestamp());"""
    back = f"\n  NEW.{role_of(spec, 'cancelled_for')} := NULL;" if spec.has("cancelled_for") else ""
    return f"""
BEGIN
  IF NEW.{count} {above} 0{is_open} THEN
    NEW.{status} := {state_value(spec, "waiting")};
  ELSE{due}
    NEW.{status} := {state_value(spec, "pending")};
  END IF;{back}
  RETURN NEW;
END
"""


def _look_body(spec: QueueSpec) -> str:
    keys, single = [quoted(key) for key in spec.keys], [wait for wait in spec.waits if not wait.to_many]
    # Of a job: by which relationships it did not wait for others before, a bit for each, and whether its batch is new.
    inserted = sum(1 << spec.waits.index(wait) for wait in single)
    entry = f"jsonb_build_array({joined_by_comma(f'n.{key}' for key in keys)}, {inserted}, true)"
    every = _chunks("", f"SELECT {entry} AS entry FROM new_rows AS n")

    def changed(wait: WaitRelation) -> str:
        # As JSON: the operator of another type would be looked up by the search path.
        names = [quoted(here) for here, _ in wait.pairs]
        return " OR ".join(f"to_jsonb(OLD.{name}) IS DISTINCT FROM to_jsonb(NEW.{name})" for name in names)

    back = f"({is_in(spec, 'OLD.', *not_begun(spec))}) IS NOT TRUE"
    news = " | ".join(
        f"CASE WHEN {back}{'' if wait.to_many else f' OR {changed(wait)}'} THEN {1 << number} ELSE 0 END"
        for number, wait in enumerate(spec.waits)
    )
    fresh = " OR ".join(changed(wait) for wait in spec.waits if wait.to_many) or "false"
    entry = f"jsonb_build_array({joined_by_comma(f'NEW.{key}' for key in keys)}, {news}, {fresh})"
    return f"""
BEGIN
  IF TG_LEVEL = 'ROW' THEN
    INSERT INTO {{changes}} (relation, keys)
      SELECT '', jsonb_build_array({entry}){_lost(spec)};
    RETURN NULL;
  END IF;
  {every}
  RETURN NULL;
END
"""


def _lost(spec: QueueSpec) -> str:
    """Return what records a reference that became NULL, as ON DELETE SET NULL and programs do.

    In the statement that records the look: it is taken into account even if constraints are immediate.
    """
    text, keys = "", joined_by_comma(f"NEW.{quoted(key)}" for key in spec.keys)
    for _, wait in strict_waits(spec):
        there = " AND ".join(f"OLD.{quoted(here)} IS NOT NULL" for here, _ in wait.pairs)
        none = " OR ".join(f"NEW.{quoted(here)} IS NULL" for here, _ in wait.pairs)
        old = joined_by_comma(f"OLD.{quoted(here)}" for here, _ in wait.pairs)
        text += f"""
      UNION ALL SELECT '{wait.name}{LOST}', jsonb_build_array(jsonb_build_array({keys}, {old}))
        WHERE {there} AND ({none})"""
    return text


def _record_body(wait: WaitRelation) -> str:
    there = [quoted(column) for _, column in wait.pairs]
    given = " AND ".join(f"r.{name} IS NOT NULL" for name in there)
    # Of a key: how many more jobs count, how many more have failed, and how many more there are.
    failed = f"{has_failed(wait, 'r.')}::int" if wait.on_failure == "cancel" else "0"

    def rows(table: str, sign: str) -> str:
        columns = f"{sign}{counts(wait, 'r.')}::int AS n, {sign}{failed} AS f, {sign}1 AS a"
        return f"SELECT {joined_by_comma(f'r.{name}' for name in there)}, {columns} FROM {table} AS r WHERE {given}"

    def record(source: str) -> str:
        sums = "sum(d.n), sum(d.f), sum(d.a)"
        grouped = f"""\
SELECT jsonb_build_array({joined_by_comma(f"d.{name}" for name in there)}, {sums}) AS entry
          FROM ({source}) AS d
          GROUP BY {joined_by_comma(f"d.{name}" for name in there)}
          HAVING sum(d.n) <> 0 OR sum(d.f) <> 0"""
        return _chunks(wait.name, grouped)

    new, old = rows("new_rows", ""), rows("old_rows", "-")
    declared = inserted = ""
    if wait.to_many:
        keys = joined_by_comma(f"r.{name} AS k{place}" for place, name in enumerate(there))
        added = f"(SELECT DISTINCT {keys} FROM new_rows AS r WHERE {given} AND {counts(wait, 'r.')})"
        begun = f"{is_in(wait.waiting, 'w.', *not_begun(wait.waiting))} IS NOT TRUE"
        declared = "DECLARE\n  sqlaqueue_begun text;\n"
        inserted = f"""\
TG_OP = 'INSERT' THEN
    {refusal(wait, added, has_key(wait), begun)}
    {record(new)}
  ELSIF """
    return f"""\
#variable_conflict use_column
{declared}BEGIN
  IF {inserted}TG_OP = 'DELETE' THEN
    {record(old)}
  ELSE
    {record(f"{new} UNION ALL {old}")}
  END IF;
  RETURN NULL;
END
"""


def _cancel_body(batches: Sequence[WaitRelation]) -> str:
    steps = []
    for number, wait in enumerate(batches):
        spec = wait.awaited
        mine = " AND ".join(f"t.{quoted(there)} {equals(there)} NEW.{quoted(here)}" for here, there in wait.pairs)
        keys = joined_by_comma(f"t.{quoted(key)}" for key in spec.keys)
        same = " AND ".join(f"t.{quoted(key)} {equals(key)} free.{quoted(key)}" for key in spec.keys)
        token = {"lease_token": "NULL"} if spec.has("lease_token") else {}
        job = literal_sql(key_json(spec.keys))
        channel = channel_of(spec).replace("'", "''")
        lock = ""
        if spec.config.waits:
            # Nobody runs a waiting job, so a request would be forgotten; its row is locked for a commit only.
            lock = f"""
  PERFORM 1 FROM {{t{number}}} AS t WHERE {mine} AND {is_in(spec, "t.", "waiting")}
    ORDER BY {keys} FOR NO KEY UPDATE;"""
        # A job whose row is locked may run in a held transaction: waiting for it could take as long as its handler.
        steps.append(f"""{lock}
  WITH free AS (SELECT {keys} FROM {{t{number}}} AS t WHERE {mine} AND {is_in(spec, "t.", "waiting", "pending")}
      FOR NO KEY UPDATE SKIP LOCKED)
    UPDATE {{t{number}}} AS t SET {cancelled_values(spec, **token)} FROM free WHERE {same};
  INSERT INTO {{c{number}}} (queue, key, created_at)
    SELECT {literal_sql(sa.literal(spec.name, sa.Text()))}, {job}, statement_timestamp() FROM {{t{number}}} AS t
      WHERE {mine} AND {is_in(spec, "t.", "waiting", "pending", "processing")}
    ON CONFLICT (queue, key) DO UPDATE SET created_at = excluded.created_at;
  IF FOUND THEN
    PERFORM pg_notify('{channel}', '{Signal.CANCEL_REQUESTED}');
  END IF;""")
    return f"#variable_conflict use_column\nBEGIN{''.join(steps)}\n  RETURN NULL;\nEND\n"


# -- expressions -------------------------------------------------------------------------------------------------------


def awaited_jobs(wait: WaitRelation) -> tuple[sa.FromClause, list[sa.ColumnElement[bool]]]:
    """Return the table of awaited jobs under another name, and the conditions that a waiting job waits for them."""
    spec, other = wait.awaited, wait.awaited_rows
    status = other.c[spec.columns["status"].key]
    ended = [status == spec.literal(each) for each in wait.satisfying if getattr(spec.config.states, each) is not None]
    counts = ~sa.func.coalesce(sa.or_(*ended), sa.false())
    return other, [*(other.c[there.key] == here for here, there in wait.pairs), counts]


def behind_failed(wait: WaitRelation) -> AnySelect:
    """Return a SELECT of the keys of jobs that wait for one that has failed or was cancelled."""
    other, spec = wait.awaited_rows, wait.awaited
    status = other.c[spec.columns["status"].key]
    failed = [each for each in ("failed", "cancelled") if getattr(spec.config.states, each) is not None]
    conditions = [*(other.c[there.key] == here for here, there in wait.pairs), status.in_(map(spec.literal, failed))]
    return sa.select(*wait.waiting.keys).where(wait.waiting.in_state("waiting"), sa.exists().where(*conditions))


def counted(wait: WaitRelation) -> sa.ColumnElement[Any]:
    """Return how many jobs a job waits for by a relationship, read from their states."""
    other, conditions = awaited_jobs(wait)
    rows = sa.select(sa.func.count()).select_from(other).where(*conditions)
    return rows.correlate(wait.waiting.table).scalar_subquery()


def miscounted(spec: QueueSpec) -> AnySelect:
    """Return a SELECT of the keys of jobs that have not begun, and whose count is wrong."""
    level: sa.ColumnElement[Any] = sum((counted(wait) for wait in spec.waits), sa.literal(0))
    is_wrong = sa.or_(spec.columns["waits_for_count"] != level, sa.and_(spec.in_state("pending"), level > 0))
    return sa.select(*spec.keys).where(spec.in_state(*not_begun(spec)), is_wrong)
