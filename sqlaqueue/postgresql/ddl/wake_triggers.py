"""The triggers that send NOTIFY when jobs become pending, so that idle Consumers wake up.

An INSERT sends one notification for the statement, however many rows it writes. An UPDATE sends one for each row that
becomes pending, and PostgreSQL sends equal notifications of a transaction once. The condition is part of the trigger,
so a claim or a settlement never calls the function.

A notification is a hint. It carries the number of jobs, when the first is due, and the transaction, by which Consumers
agree on who polls first (:mod:`sqlaqueue.consumer.notifications.poll_schedule`). A Consumer that misses it finds the
jobs at its next poll.
"""

from __future__ import annotations

import hashlib

from sqlaqueue.notify_payloads import PENDING, Signal
from sqlaqueue.postgresql.ddl.attach import attach, objects_of
from sqlaqueue.postgresql.ddl.objects import Trigger, TriggerFunction, version_comment
from sqlaqueue.postgresql.identifiers import object_name
from sqlaqueue.postgresql.notify import channel_of
from sqlaqueue.postgresql.types import NEUTRAL, equals
from sqlaqueue.queue.roles import literal_text
from sqlaqueue.queue.spec import QueueSpec

VERSION = 4
"""Raise it whenever the text below changes: a running Consumer compares it with the version in the database."""

PREFIX = "sqlaqueue_wake_"
"""The prefix of the triggers' names."""

_STEP = 0.05
"""The due times of updated rows are rounded up to this many seconds, so that many retries send few notifications."""


def wakes(spec: QueueSpec) -> bool:
    """Return whether a queue's table has the triggers that wake idle Consumers."""
    return any(isinstance(each, Trigger) and each.name.startswith(PREFIX) for each in objects_of(spec.table))


def attach_wake_triggers(spec: QueueSpec) -> None:
    """Attach the trigger function and its triggers to the queue's table."""
    function = TriggerFunction(
        spec.table,
        object_name("sqlaqueue_wake", spec.table.name),
        _body(spec),
        comment=version_comment(VERSION),
    )
    attach(spec.table, function)
    attach(spec.table, Trigger(spec.table, f"{PREFIX}insert", "INSERT", function, {"NEW": "new_rows"}))
    begins = _becomes_pending(spec)
    if begins is not None:
        # The server rewrites a condition when it stores it, so its digest in the name tells whether it has changed.
        digest = hashlib.sha256(begins.encode()).hexdigest()[:8]
        attach(spec.table, Trigger(spec.table, f"{PREFIX}update_{digest}", "UPDATE", function, when=begins))


def _is_pending(spec: QueueSpec, row: str = "", *, equal: str = "=") -> str:
    if not spec.has("status"):
        return "TRUE"
    status = spec.columns["status"]
    name = NEUTRAL.identifier_preparer.quote(status.name)
    return f"{row}{name} {equal} {literal_text(spec.status_value('pending'), status.type)}"


def _becomes_pending(spec: QueueSpec) -> str | None:
    changes = []
    if spec.has("status"):
        changes.append(f"({_is_pending(spec, 'OLD.')}) IS NOT TRUE")
    if spec.has("run_at"):
        run_at = NEUTRAL.identifier_preparer.quote(spec.columns["run_at"].name)
        changes.append(f"OLD.{run_at} IS DISTINCT FROM NEW.{run_at}")
    return f"{_is_pending(spec, 'NEW.')} AND ({' OR '.join(changes)})" if changes else None


def _quarantine(spec: QueueSpec, channel: str) -> str:
    """Announce first that the row is quarantined, which its token shows: it has been rescued from a dead worker."""
    if not spec.has("lease_token") or spec.strategy.quarantined(spec) is None:
        return ""
    token = NEUTRAL.identifier_preparer.quote(spec.columns["lease_token"].name)
    return f"""
    IF NEW.{token} IS NOT NULL THEN
      PERFORM pg_notify('{channel}', '{Signal.QUARANTINED}');
    END IF;"""


def _body(spec: QueueSpec) -> str:
    channel = channel_of(spec).replace("'", "''")
    run_at = NEUTRAL.identifier_preparer.quote(spec.columns["run_at"].name) if spec.has("run_at") else None
    # The function runs as the writer of the rows, whose search path may lead to operators and functions of others.
    equal = equals(spec.columns["status"]) if spec.has("status") else "="
    first = last = own = "NULL"
    if run_at is not None:
        first, last = f"min({run_at})::timestamptz", f"max({run_at})::timestamptz"
        own = f"NEW.{run_at}::timestamptz"
    return f"""\
#variable_conflict use_column
DECLARE
  sqlaqueue_jobs bigint := 1;
  sqlaqueue_first timestamptz;
  sqlaqueue_last timestamptz;
  sqlaqueue_due double precision;
BEGIN
  IF TG_LEVEL = 'ROW' THEN
    sqlaqueue_first := {own};
    sqlaqueue_last := sqlaqueue_first;{_quarantine(spec, channel)}
  ELSE
    SELECT count(*), {first}, {last} INTO sqlaqueue_jobs, sqlaqueue_first, sqlaqueue_last
      FROM new_rows
      WHERE {_is_pending(spec, equal=equal)};
  END IF;
  IF sqlaqueue_jobs = 0 THEN
    RETURN NULL;
  END IF;
  IF sqlaqueue_last > statement_timestamp() THEN
    sqlaqueue_due := extract(epoch FROM greatest(sqlaqueue_first, statement_timestamp()));
    IF TG_LEVEL = 'ROW' THEN
      sqlaqueue_due := ceil(sqlaqueue_due / {_STEP}::float8) * {_STEP}::float8;
    END IF;
  END IF;
  PERFORM pg_catalog.pg_notify('{channel}', pg_catalog.concat_ws(' ', '{PENDING}', pg_current_xact_id(), sqlaqueue_jobs,
    coalesce(sqlaqueue_due, 0), CASE WHEN sqlaqueue_last > sqlaqueue_first THEN 'more' END));
  RETURN NULL;
END
"""  # noqa: S608 - the names are quoted, and the values are written as literals
