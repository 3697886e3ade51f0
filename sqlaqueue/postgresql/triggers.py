"""The triggers that wake idle Consumers, those that keep a message table in step, and the notifications they send."""

from __future__ import annotations

import hashlib

import sqlalchemy as sa

from sqlaqueue.notify_payloads import PENDING, Payload, Signal
from sqlaqueue.postgresql.ddl import (
    StorageParameters,
    Trigger,
    TriggerFunction,
    attach,
    conditional_trigger,
    in_state,
    objects_of,
    quoted,
    version_comment,
)
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.sql.portable import notify
from sqlaqueue.sql.types import equals, object_name, plain_type

# -- message triggers --------------------------------------------------------------------------------------------------
# The triggers that keep a message table in step with its job table.
#
# They fire once a statement, with transition tables, so they see INSERT .. SELECT, ON CONFLICT, COPY, MERGE and plain
# UPDATE. PL/pgSQL keeps the plan of the first call, when there may have been one message; a join in that plan would
# be quadratic for ten thousand. So old and new rows are compared by EXCEPT, which hashes or sorts, and messages are
# looked up by an array of keys, in their index. Composite keys have no such array: they are joined, planned anew in
# each call.
#
# The function runs with its owner's privileges, so that a writer of jobs needs none on the messages. No name in it
# may depend on the search path, into which others may put objects: tables carry their schema, operators are
# PostgreSQL's.


MESSAGE_VERSION = 3
"""Raise it whenever the text below changes: a running Consumer compares it with the version in the database."""


def attach_message_triggers(spec: QueueSpec, messages: sa.Table) -> None:
    attach(messages, StorageParameters(messages))
    function = TriggerFunction(
        spec.table,
        object_name("sqlaqueue_message", spec.table.name, "sync"),
        _message_body(spec),
        {"messages": messages},
        version_comment(MESSAGE_VERSION),
        definer=True,
    )
    rows = {
        "INSERT": {"NEW": "new_rows"},
        "UPDATE": {"OLD": "old_rows", "NEW": "new_rows"},
        "DELETE": {"OLD": "old_rows"},
        "TRUNCATE": {},
    }
    attach(spec.table, function)
    for event, tables in rows.items():
        attach(spec.table, Trigger(spec.table, f"sqlaqueue_message_{event.lower()}", event, function, tables))


def _message_body(spec: QueueSpec) -> str:
    keys = [quoted(key) for key in spec.keys]
    order = [quoted(spec.columns[role]) for role in spec.order_roles]
    columns, key_list = ", ".join([*keys, *order]), ", ".join(keys)
    waiting = in_state(spec, "", "pending", equal=equals(spec.columns["status"]))
    update = f"DO UPDATE SET {', '.join(f'{name} = excluded.{name}' for name in order)}" if order else "DO NOTHING"
    gone = f"""\
SELECT {key_list} FROM old_rows WHERE {waiting}
           EXCEPT SELECT {key_list} FROM new_rows WHERE {waiting}"""  # noqa: S608 - its parts are constants
    # Without the first line a column called "found" would be ambiguous: PL/pgSQL has a variable of that name.
    return f"""\
#variable_conflict use_column
BEGIN
  IF TG_OP = 'TRUNCATE' THEN
    DELETE FROM {{messages}};
    RETURN NULL;
  END IF;
  IF TG_OP = 'INSERT' THEN
    INSERT INTO {{messages}} ({columns})
      SELECT {columns} FROM new_rows WHERE {waiting}
      ON CONFLICT ({key_list}) {update};
    RETURN NULL;
  END IF;
  IF TG_OP = 'DELETE' THEN
    {_delete(spec, f"SELECT {key_list} FROM old_rows")}
    RETURN NULL;
  END IF;
  {_delete(spec, gone)}
  INSERT INTO {{messages}} ({columns})
    SELECT {columns} FROM new_rows WHERE {waiting}
    EXCEPT SELECT {columns} FROM old_rows WHERE {waiting}
    ON CONFLICT ({key_list}) {update};
  RETURN NULL;
END
"""  # noqa: S608 - the names are quoted, and the one value is written as a literal


def _delete(spec: QueueSpec, gone: str) -> str:
    keys = [(quoted(key), key) for key in spec.keys]
    name, key = keys[0]
    if len(keys) == 1 and not isinstance(plain_type(key), sa.ARRAY):
        return f"DELETE FROM {{messages}} WHERE {name} {equals(key)} ANY (ARRAY({gone}));"  # noqa: S608 - the names are quoted
    same_key = " AND ".join(f"m.{name} {equals(key)} gone.{name}" for name, key in keys)
    return (
        f"EXECUTE $delete$DELETE FROM {{messages}} AS m\n"  # noqa: S608 - the names are quoted
        f"    USING ({gone}) AS gone WHERE {same_key}$delete$;"
    )


def channel_of(spec: QueueSpec) -> str:
    return object_name("sqlaqueue", spec.table.fullname, spec.name)


def lock_numbers(name: str) -> tuple[int, int]:
    """Return the numbers of an advisory lock; that of a channel tells whether enqueueing notifies."""
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:4], signed=True), int.from_bytes(digest[4:8], signed=True)


def notification(spec: QueueSpec, payload: Payload | sa.ColumnElement[str]) -> sa.ColumnElement[str]:
    text = payload if isinstance(payload, sa.ColumnElement) else str(payload)
    return notify(channel_of(spec), text)


# -- wake triggers -----------------------------------------------------------------------------------------------------
# The triggers that send NOTIFY when jobs become pending, so that idle Consumers wake up.
#
# An INSERT sends one notification for the statement, however many rows it writes. An UPDATE sends one for each row
# that becomes pending, and PostgreSQL sends equal notifications of a transaction once. The condition is part of the
# trigger, so a claim or a settlement never calls the function.
#
# It sends none while nobody waits for one, which it learns by an advisory lock
# (:mod:`sqlaqueue.consumer.notifications.watch`): commits that notify go one after the other.
#
# A notification is a hint. It carries the number of jobs, when the first is due, and the transaction, by which
# Consumers agree on who polls first (:mod:`sqlaqueue.consumer.notifications.polls`). A Consumer that misses
# it finds the jobs at its next poll.


WAKE_VERSION = 5
"""Raise it whenever the text below changes: a running Consumer compares it with the version in the database."""

PREFIX = "sqlaqueue_wake_"
"""The prefix of the triggers' names."""

_STEP = 0.05
"""The due times of updated rows are rounded up to this many seconds, so that many retries send few notifications."""


def wakes(spec: QueueSpec) -> bool:
    """Return whether a queue's table has the triggers that wake idle Consumers."""
    return any(isinstance(each, Trigger) and each.name.startswith(PREFIX) for each in objects_of(spec.table))


def attach_wake_triggers(spec: QueueSpec) -> None:
    name = object_name("sqlaqueue_wake", spec.table.name)
    # The operators of a type that is not PostgreSQL's own are found by the search path.
    bare = not spec.has("status") or equals(spec.columns["status"]) != "="
    function = TriggerFunction(spec.table, name, _wake_body(spec), comment=version_comment(WAKE_VERSION), bare=bare)
    attach(spec.table, function)
    attach(spec.table, Trigger(spec.table, f"{PREFIX}insert", "INSERT", function, {"NEW": "new_rows"}))
    begins = _becomes_pending(spec)
    if begins is not None:
        attach(spec.table, conditional_trigger(spec.table, f"{PREFIX}update", "UPDATE", function, begins))


def _is_pending(spec: QueueSpec, row: str = "", *, equal: str = "=") -> str:
    return in_state(spec, row, "pending", equal=equal) if spec.has("status") else "TRUE"


def _becomes_pending(spec: QueueSpec) -> str | None:
    changes = []
    if spec.has("status"):
        changes.append(f"({_is_pending(spec, 'OLD.')}) IS NOT TRUE")
    if spec.has("run_at"):
        run_at = quoted(spec.columns["run_at"])
        changes.append(f"OLD.{run_at} IS DISTINCT FROM NEW.{run_at}")
    return f"{_is_pending(spec, 'NEW.')} AND ({' OR '.join(changes)})" if changes else None


def _quarantine(spec: QueueSpec, channel: str) -> str:
    """Announce first that the row is quarantined, which its token shows: it has been rescued from a dead worker."""
    if not spec.has("lease_token") or spec.strategy.quarantined(spec) is None:
        return ""
    token = quoted(spec.columns["lease_token"])
    return f"""
    IF NEW.{token} IS NOT NULL THEN
      PERFORM pg_catalog.pg_notify('{channel}', '{Signal.QUARANTINED}');
    END IF;"""


def return_if_unwatched(spec: QueueSpec) -> str:
    """Return the text of a trigger function that ends it while nobody waits for notifications of the queue."""
    high, low = lock_numbers(channel_of(spec))
    return f"""\
  -- An error, as of a server that has no room for another lock, must not fail the statement.
  BEGIN
    IF pg_catalog.pg_try_advisory_xact_lock_shared({high}, {low}) THEN
      RETURN NULL;
    END IF;
  EXCEPTION WHEN OTHERS THEN
  END;
"""


def _wake_body(spec: QueueSpec) -> str:
    channel = channel_of(spec).replace("'", "''")
    run_at = quoted(spec.columns["run_at"]) if spec.has("run_at") else None
    equal = equals(spec.columns["status"]) if spec.has("status") else "="
    first = last = own = "NULL"
    if run_at is not None:
        first, last = (f"pg_catalog.{each}({run_at})::timestamp with time zone" for each in ("min", "max"))
        own = f"NEW.{run_at}::timestamp with time zone"
    # The function runs as the writer of the rows, whose search path may lead to operators and functions of others.
    same, later = "OPERATOR(pg_catalog.=)", "OPERATOR(pg_catalog.>)"
    return f"""\
#variable_conflict use_column
DECLARE
  sqlaqueue_jobs bigint := 1;
  sqlaqueue_first timestamp with time zone;
  sqlaqueue_last timestamp with time zone;
  sqlaqueue_due double precision;
BEGIN
  IF TG_LEVEL {same} 'ROW' THEN
    sqlaqueue_first := {own};
    sqlaqueue_last := sqlaqueue_first;{_quarantine(spec, channel)}
  END IF;
{return_if_unwatched(spec)}  IF TG_LEVEL {same} 'STATEMENT' THEN
    SELECT pg_catalog.count(*), {first}, {last} INTO sqlaqueue_jobs, sqlaqueue_first, sqlaqueue_last
      FROM new_rows
      WHERE {_is_pending(spec, equal=equal)};
  END IF;
  IF sqlaqueue_jobs {same} 0 THEN
    RETURN NULL;
  END IF;
  IF sqlaqueue_last {later} pg_catalog.statement_timestamp() THEN
    sqlaqueue_due := extract(epoch FROM greatest(sqlaqueue_first, pg_catalog.statement_timestamp()));
    IF TG_LEVEL {same} 'ROW' THEN
      sqlaqueue_due := {_STEP}::double precision OPERATOR(pg_catalog.*)
        pg_catalog.ceil(sqlaqueue_due OPERATOR(pg_catalog./) {_STEP}::double precision);
    END IF;
  END IF;
  PERFORM pg_catalog.pg_notify('{channel}', pg_catalog.concat_ws(' ', '{PENDING}', pg_catalog.pg_current_xact_id(),
    sqlaqueue_jobs, coalesce(sqlaqueue_due, 0), CASE WHEN sqlaqueue_last {later} sqlaqueue_first THEN 'more' END));
  RETURN NULL;
END
"""  # noqa: S608 - the names are quoted, and the values are written as literals
