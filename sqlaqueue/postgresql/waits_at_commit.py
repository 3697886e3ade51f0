"""The trigger that changes the counts of waiting jobs when a transaction commits: the text of its function.

:mod:`sqlaqueue.postgresql.waits` says how it works together with the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import sqlalchemy as sa

from sqlaqueue.postgresql.ddl import in_state, literal_sql, quoted, state_value
from sqlaqueue.postgresql.triggers import lock_numbers
from sqlaqueue.queue.spec import QueueSpec, WaitRelation
from sqlaqueue.sql.types import NEUTRAL, equals

LOST = " lost"
"""After the name of a relationship: the references that became NULL."""
FAILED, NOT_BEGUN = ("failed", "cancelled"), ("waiting", "pending")
_BUCKETS = 128
"""The advisory locks of a relationship. A transaction that ends many jobs takes no more of them."""


def role_of(spec: QueueSpec, role: str) -> str:
    return quoted(spec.columns[role])


def _type(column: sa.Column[Any]) -> str:
    return column.type.compile(NEUTRAL)


def joined_by_comma(parts: Iterable[str]) -> str:
    return ", ".join(parts)


def is_in(spec: QueueSpec, row: str, *states: str) -> str:
    """Return the condition that a job is in one of some states; states without a value are left out."""
    known = [each for each in states if getattr(spec.config.states, each) is not None]
    equal = equals(spec.columns["status"])
    return f"({' OR '.join(in_state(spec, row, each, equal=equal) for each in known)})"


def counts(wait: WaitRelation, row: str) -> str:
    """Return the condition that a job is waited for."""
    return f"({is_in(wait.awaited, row, *wait.satisfying)} IS NOT TRUE)"


def has_failed(wait: WaitRelation, row: str) -> str:
    return is_in(wait.awaited, row, *FAILED)


def _same(wait: WaitRelation, waiting: str, awaited: str) -> str:
    return " AND ".join(
        f"{awaited}{quoted(there)} {equals(there)} {waiting}{quoted(here)}" for here, there in wait.pairs
    )


def _part(entry: str, number: int, column: sa.Column[Any]) -> str:
    """Return a part of a key that is in a JSON array."""
    return f"({entry}->>{number})::{_type(column)}"


def key_columns(spec: QueueSpec, row: str) -> str:
    return joined_by_comma(f"{row}{quoted(key)}" for key in spec.keys)


def not_begun(spec: QueueSpec) -> tuple[str, ...]:
    """Return the states of jobs whose counts are kept.

    A pending job of a strategy that holds a transaction may be running, and its row be locked for as long.
    """
    return ("waiting",) if spec.strategy.holds_transaction else NOT_BEGUN


def strict_waits(spec: QueueSpec) -> list[tuple[int, WaitRelation]]:
    """Return the relationships without which a job must not run, unless the one that it refers to has completed."""
    return [(n, wait) for n, wait in enumerate(spec.waits) if wait.is_strict]


def has_key(wait: WaitRelation) -> str:
    return " AND ".join(f"w.{quoted(here)} {equals(here)} d.k{place}" for place, (here, _) in enumerate(wait.pairs))


def cancelled_values(spec: QueueSpec, **values: str) -> str:
    """Return the SET clause that cancels jobs."""
    given = {"status": state_value(spec, "cancelled"), "finished_at": "statement_timestamp()", **values}
    return joined_by_comma(f"{role_of(spec, role)} = {value}" for role, value in given.items() if spec.has(role))


def _cut(spec: QueueSpec, text: str) -> str:
    """Return a text that fits into ``last_error``."""
    length = getattr(spec.columns["last_error"].type, "length", None) if spec.has("last_error") else None
    return text if length is None else f"left({text}, {length})"


def refusal(wait: WaitRelation, added: str, has_key: str, begun: str) -> str:
    """Return the statements that refuse new members of a batch that has begun.

    :param added: selects their foreign keys, as ``d``.
    :param has_key: the condition that ``w`` is their batch.
    :param begun: the condition that it has begun.
    """
    spec = wait.waiting
    refused = f"{spec.model.__name__} % has started or ended: it takes no further {wait.awaited.model.__name__}"
    return f"""\
SELECT concat_ws(', ', {key_columns(spec, "w.")}) INTO sqlaqueue_begun
      FROM {added} AS d JOIN {{w}} AS w ON {has_key} WHERE {begun} LIMIT 1;
    IF FOUND THEN
      RAISE EXCEPTION '{refused}', sqlaqueue_begun USING ERRCODE = 'check_violation',
        HINT = 'Add jobs while the batch waits, for example from one of its jobs, or start a new batch.';
    END IF;"""


# -- the function ------------------------------------------------------------------------------------------------------


def apply_body(spec: QueueSpec) -> str:
    waits = list(enumerate(spec.waits))
    relations = [(f"sqlaqueue_{number}", wait.name) for number, wait in waits]
    relations += [(f"sqlaqueue_lost_{number}", f"{wait.name}{LOST}") for number, wait in strict_waits(spec)]
    declared = "".join(f"\n  {name} jsonb;" for name, _ in relations)
    found = joined_by_comma(f"jsonb_agg(e.entry) FILTER (WHERE e.relation = '{relation}')" for _, relation in relations)
    into = joined_by_comma(name for name, _ in relations)
    refusals = "".join(_refuse_late(wait, number) for number, wait in waits if wait.to_many)
    changes = "".join(_change(wait, number) for number, wait in waits)
    cancels = "".join(_cancel_and_return(wait, number) for number, wait in waits if wait.on_failure == "cancel")
    return f"""\
#variable_conflict use_column
DECLARE
  sqlaqueue_looks jsonb;{declared}
  sqlaqueue_free jsonb;
  sqlaqueue_begun text;
  sqlaqueue_lock record;
BEGIN
  -- The first call takes all that this transaction has recorded. The index still has the deleted rows, so the others
  -- look for their own row only, and none searches before it.
  PERFORM 1 FROM {{changes}} WHERE xact = NEW.xact AND id = NEW.id;
  IF NOT FOUND THEN
    RETURN NULL;
  END IF;
  WITH gone AS (DELETE FROM {{changes}} WHERE xact = NEW.xact AND id >= NEW.id RETURNING relation, keys),
    e AS (SELECT gone.relation, jsonb_array_elements(gone.keys) AS entry FROM gone)
  SELECT jsonb_agg(e.entry) FILTER (WHERE e.relation = ''), {found}
    INTO sqlaqueue_looks, {into} FROM e;{_locks(spec)}{refusals}
  IF sqlaqueue_free IS NULL THEN
    RETURN NULL;
  END IF;{changes}
  IF sqlaqueue_looks IS NOT NULL THEN{_look(spec)}
  END IF;{cancels}
  RETURN NULL;
END
"""


def _locks(spec: QueueSpec) -> str:
    """Return the statements that take the locks, in order: of the keys, and then of the waiting jobs.

    Only jobs that have not begun are changed, and those that come back: those that are looked at, and those that were
    cancelled for a job that is requeued.
    """
    keys, waits = key_columns(spec, "w."), list(enumerate(spec.waits))
    bucket = f"hashtext(jsonb_build_array({{}})::text) % {_BUCKETS}"
    # What a look reads depends on transactions that do not see the job that waits.
    wanted = []
    for number, wait in waits:
        parts = joined_by_comma(f"c->{place}" for place, _ in enumerate(wait.pairs))
        wanted.append(
            f"SELECT {_class(wait)}, {bucket.format(parts)}, false\n"
            f"        FROM jsonb_array_elements(sqlaqueue_{number}) AS c"
        )
    for number, wait in waits:
        # By those that it waited for before its count is kept.
        looks = (
            f"SELECT {_class(wait)}, {bucket.format(_columns_of(wait))}, true\n"
            f"        FROM jsonb_array_elements(sqlaqueue_looks) AS l JOIN {{w}} AS w ON {_is_looked_at(spec)}\n"
            f"        WHERE (l->>{len(spec.keys)})::integer & {1 << number} <> 0"
        )
        if not wait.to_many:
            # Nobody else can change a job that this transaction has written.
            looks += f" AND {' AND '.join(f'w.{quoted(here)} IS NOT NULL' for here, _ in wait.pairs)}"
            own = f"{_same(wait, 'w.', 't.')} AND t.xmin = pg_current_xact_id()::xid"
            looks += f"\n          AND NOT EXISTS (SELECT 1 FROM {{t{number}}} AS t WHERE {own})"
        wanted.append(looks)
    changed = [
        f"SELECT {key_columns(spec, 'o.')} FROM jsonb_array_elements(sqlaqueue_{number}) AS c JOIN {{w}} AS o ON "
        + " AND ".join(
            f"o.{quoted(here)} {equals(here)} {_part('c', place, here)}" for place, (here, _) in enumerate(wait.pairs)
        )
        for number, wait in waits
    ]
    among = "\n      UNION ".join([_looked(spec), *changed])
    mine = is_in(spec, "w.", *not_begun(spec))
    if "pending" not in not_begun(spec):
        mine += f" OR {is_in(spec, 'w.', 'pending')} AND {_is_among(spec, _looked(spec))}"
    mended = [_changed(wait, number, "d.mended") for number, wait in waits if wait.on_failure == "cancel"]
    if mended:
        back = " UNION ".join([_looked(spec), *mended])
        mine += f"\n      OR w.{role_of(spec, 'cancelled_for')} IS NOT NULL AND {_is_among(spec, back)}"
    union = "\n      UNION ALL ".join(wanted)
    return f"""
  FOR sqlaqueue_lock IN
    SELECT k.class, k.bucket, bool_or(k.alone) AS alone FROM (
      {union}
    ) AS k (class, bucket, alone) GROUP BY 1, 2 ORDER BY 1, 2
  LOOP
    IF sqlaqueue_lock.alone THEN
      PERFORM pg_advisory_xact_lock(sqlaqueue_lock.class, sqlaqueue_lock.bucket);
    ELSE
      PERFORM pg_advisory_xact_lock_shared(sqlaqueue_lock.class, sqlaqueue_lock.bucket);
    END IF;
  END LOOP;
  SELECT jsonb_agg(jsonb_build_array({key_columns(spec, "f.")})) INTO sqlaqueue_free FROM (
    SELECT {keys} FROM {{w}} AS w WHERE {_is_among(spec, among)}
      AND ({mine})
    ORDER BY {keys} FOR NO KEY UPDATE OF w
  ) AS f;"""


def _class(wait: WaitRelation) -> int:
    return lock_numbers(f"{wait.waiting.table.fullname} {wait.name}")[0]


def _columns_of(wait: WaitRelation) -> str:
    return joined_by_comma(f"w.{quoted(here)}" for here, _ in wait.pairs)


def _keys_in(spec: QueueSpec, entries: str) -> str:
    """Select the keys of waiting jobs from the beginnings of JSON arrays."""
    parts = joined_by_comma(_part("l", number, key) for number, key in enumerate(spec.keys))
    return f"SELECT {parts} FROM jsonb_array_elements({entries}) AS l"


def _looked(spec: QueueSpec) -> str:
    return _keys_in(spec, "sqlaqueue_looks")


def _is_among(spec: QueueSpec, keys: str) -> str:
    """Return the condition that the key of ``w`` is among those that a SELECT returns.

    It is no IN, whose operator would be looked up by the search path: the function has the rights of its owner.
    """
    own = "OPERATOR(pg_catalog.=)"
    operator = own if all(equals(key) == own for key in spec.keys) else "="
    return f"({key_columns(spec, 'w.')}) {operator} ANY ({keys})"


def _is_free(spec: QueueSpec) -> str:
    """Return the condition that a row is locked and to be changed.

    In a CASE it is looked up in a hash table. The planner expects few keys in a JSON array, and would compare each row
    with each of them.
    """
    return f"CASE WHEN {_is_among(spec, _keys_in(spec, 'sqlaqueue_free'))} THEN true END"


def _is_looked_at(spec: QueueSpec) -> str:
    return " AND ".join(
        f"w.{quoted(key)} {equals(key)} {_part('l', number, key)}" for number, key in enumerate(spec.keys)
    )


def _changed(wait: WaitRelation, number: int, condition: str) -> str:
    """Select the keys of the jobs that wait for what a transaction has changed."""
    columns = key_columns(wait.waiting, "w.")
    return f"SELECT {columns} FROM {_sums(wait, number)} AS d JOIN {{w}} AS w ON {has_key(wait)} WHERE {condition}"


def _sums(wait: WaitRelation, number: int) -> str:
    """Select the recorded changes of a relationship by key, ``k0`` and so on."""
    size = len(wait.pairs)
    parts = joined_by_comma(f"{_part('c', place, here)} AS k{place}" for place, (here, _) in enumerate(wait.pairs))
    n, f, a = (f"(c->>{size + place})::bigint" for place in range(3))
    sums = f"sum({n})::bigint AS n, bool_or({f} > 0) AS failed, bool_or({f} < 0 AND {a} >= 0) AS mended"
    sums += f", bool_or({n} > 0 AND {a} > 0) AS added"
    keys = joined_by_comma(str(place + 1) for place in range(size))
    return f"(SELECT {parts}, {sums} FROM jsonb_array_elements(sqlaqueue_{number}) AS c GROUP BY {keys})"


def _refuse_late(wait: WaitRelation, number: int) -> str:
    spec = wait.waiting
    fresh = f"{_looked(spec)} WHERE (l->>{len(spec.keys) + 1})::boolean"
    begun = f"coalesce({_is_free(spec)}, false) = false"
    begun += f" AND (sqlaqueue_looks IS NULL OR NOT {_is_among(spec, fresh)})"
    added = f"(SELECT * FROM {_sums(wait, number)} AS s WHERE s.added)"
    return f"""
  IF sqlaqueue_{number} IS NOT NULL THEN
    {refusal(wait, added, has_key(wait), begun)}
  END IF;"""


def _change(wait: WaitRelation, number: int) -> str:
    spec, count = wait.waiting, role_of(wait.waiting, "waits_for_count")
    return f"""
  IF sqlaqueue_{number} IS NOT NULL THEN
    UPDATE {{w}} AS w SET {count} = greatest(w.{count} + d.n, 0)
      FROM {_sums(wait, number)} AS d
      WHERE {has_key(wait)} AND d.n <> 0 AND {_is_free(spec)}
        AND (sqlaqueue_looks IS NULL OR NOT {_is_among(spec, _looked(spec))});
  END IF;"""


def _look(spec: QueueSpec) -> str:
    """Return the statements that count for the jobs that are looked at, from the states of those that they wait for."""
    count = role_of(spec, "waits_for_count")
    strict = "".join(
        f"""
      PERFORM 1 FROM jsonb_array_elements(sqlaqueue_looks) AS l JOIN {{w}} AS w ON {_is_looked_at(spec)}
        JOIN {{t{number}}} AS t ON {_same(wait, "w.", "t.")} FOR SHARE OF t SKIP LOCKED;"""
        for number, wait in enumerate(spec.waits)
        if not wait.to_many
    )
    if strict:
        strict = f"""
    IF current_setting('transaction_isolation') <> 'read committed' THEN
      -- The snapshot may be older than the end of a job. The server then refuses to lock that.{strict}
    END IF;"""
    level = " + ".join(
        f"(SELECT count(*) FROM {{t{number}}} AS t WHERE {_same(wait, 'w.', 't.')} AND {counts(wait, 't.')})"
        for number, wait in enumerate(spec.waits)
    )
    has_lost = _has_lost(spec)
    lost = has_lost and f"{is_in(spec, 'w.', *NOT_BEGUN)} AND {has_lost}"
    values = {"waits_for_count": "d.sqlaqueue_n"}
    if lost:
        why = _cut(spec, "'the job that it waited for was deleted, or its reference to it'")
        ended = {"status": state_value(spec, "cancelled"), "finished_at": "statement_timestamp()", "last_error": why}
        for role, value in ended.items():
            if spec.has(role):
                values[role] = f"CASE WHEN d.sqlaqueue_lost THEN {value} ELSE w.{role_of(spec, role)} END"
    wrong = f"d.sqlaqueue_n IS DISTINCT FROM w.{count} OR d.sqlaqueue_n > 0 AND {is_in(spec, 'w.', 'pending')}"
    if has_lost and spec.has("cancelled_for"):
        # A failed job that is deleted, as retention does, leaves nothing that could complete.
        strict += f"""
    UPDATE {{w}} AS w SET {role_of(spec, "cancelled_for")} = NULL
      WHERE {_is_among(spec, _keys_in(spec, "sqlaqueue_free"))}
        AND w.{role_of(spec, "cancelled_for")} IS NOT NULL AND CASE WHEN {has_lost} THEN true END;"""
    # One statement: a count may depend on a job that is cancelled here, and what waits for that is told of it.
    same = " AND ".join(f"w.{quoted(key)} {equals(key)} d.{quoted(key)}" for key in spec.keys)
    return f"""{strict}
    UPDATE {{w}} AS w SET {joined_by_comma(f"{role_of(spec, role)} = {value}" for role, value in values.items())}
      FROM (SELECT {key_columns(spec, "w.")}, {level} AS sqlaqueue_n, {lost or "false"} AS sqlaqueue_lost
        FROM {{w}} AS w WHERE {_is_among(spec, _looked(spec))}) AS d
      WHERE {same} AND {_is_free(spec)}
        AND ({wrong} OR d.sqlaqueue_lost);"""


def _has_lost(spec: QueueSpec) -> str:
    """Return the condition that a job has lost one that it waits for, and that has not completed."""
    conditions = []
    for number, wait in strict_waits(spec):
        size, awaited = len(spec.keys), len(wait.pairs)
        old = [_part("l", size + place, here) for place, (here, _) in enumerate(wait.pairs)]
        there = " AND ".join(
            f"t.{quoted(column)} {equals(column)} {value}" for (_, column), value in zip(wait.pairs, old, strict=True)
        )
        deleted = " AND ".join(f"c->{place} = l->{size + place}" for place in range(awaited))
        none = " OR ".join(f"w.{quoted(here)} IS NULL" for here, _ in wait.pairs)
        lost = (
            f"{_keys_in(spec, f'sqlaqueue_lost_{number}')}\n"
            f"          WHERE EXISTS (SELECT 1 FROM {{t{number}}} AS t WHERE {there} AND {counts(wait, 't.')})\n"
            f"            OR EXISTS (SELECT 1 FROM jsonb_array_elements(sqlaqueue_{number}) AS c\n"
            f"              WHERE {deleted} AND (c->>{awaited + 2})::bigint < 0)"
        )
        conditions.append(f"({none}) AND {_is_among(spec, lost)}")
    return f"({' OR '.join(f'({each})' for each in conditions)})" if conditions else ""


def _cancel_and_return(wait: WaitRelation, number: int) -> str:
    """Return the statements that cancel jobs because of failed ones, and bring back those for which none is left."""
    spec = wait.waiting
    name = literal_sql(sa.literal(wait.name, sa.Text()))
    failed = [
        f"EXISTS (SELECT 1 FROM {{t{place}}} AS t WHERE {_same(other, 'w.', 't.')} AND {has_failed(other, 't.')})"
        for place, other in enumerate(spec.waits)
        if other.on_failure == "cancel"
    ]
    first = key_columns(wait.awaited, "t.")
    why = f"""'{wait.awaited.model.__name__} ' || (SELECT concat_ws(', ', {first}) FROM {{t{number}}} AS t
          WHERE {_same(wait, "w.", "t.")} AND {has_failed(wait, "t.")} ORDER BY {first} LIMIT 1)
        || ' has failed or was cancelled'"""
    mine = failed[[each for each in spec.waits if each.on_failure == "cancel"].index(wait)]
    cleared = {"status": state_value(spec, "pending"), "finished_at": "NULL", "last_error": "NULL"}
    back = joined_by_comma(f"{role_of(spec, role)} = {value}" for role, value in cleared.items() if spec.has(role))
    # The cancelled ones that are free are looked at, or what they were cancelled for is mended.
    return f"""
  UPDATE {{w}} AS w SET {cancelled_values(spec, last_error=_cut(spec, why), cancelled_for=name)}
    WHERE {_is_among(spec, _keys_in(spec, "sqlaqueue_free"))} AND {is_in(spec, "w.", "waiting")}
      AND CASE WHEN {_is_among(spec, f"{_changed(wait, number, 'd.failed')} UNION {_looked(spec)}")}
        THEN {mine} END;{_bring_back(spec, back, failed)}"""


def _bring_back(spec: QueueSpec, values: str, failed: Sequence[str]) -> str:
    where = f"""{_is_among(spec, _keys_in(spec, "sqlaqueue_free"))}
      AND {is_in(spec, "w.", "cancelled")} AND w.{role_of(spec, "cancelled_for")} IS NOT NULL
      AND NOT ({" OR ".join(failed)})"""
    if spec.config.unique is None:
        return f"""
  UPDATE {{w}} AS w SET {values}
    WHERE {where};"""
    same = " AND ".join(f"w.{quoted(key)} {equals(key)} sqlaqueue_lock.{quoted(key)}" for key in spec.keys)
    # A job whose place a duplicate has taken stays cancelled. The requeue of the one that it waited for must not fail.
    return f"""
  FOR sqlaqueue_lock IN SELECT {key_columns(spec, "w.")} FROM {{w}} AS w WHERE {where} LOOP
    BEGIN
      UPDATE {{w}} AS w SET {values} WHERE {same};
    EXCEPTION WHEN unique_violation THEN
      NULL;
    END;
  END LOOP;"""
