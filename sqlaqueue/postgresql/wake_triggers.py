"""The triggers that tell idle consumers of new jobs, by NOTIFY.

One statement of INSERT sends one notification, however many rows it writes; an UPDATE sends one for a transaction,
since PostgreSQL sends equal ones once, and only for rows that begin to wait: the condition is part of the trigger, so
that a claim or a settlement never calls the function.

A notification is a hint. It names how many jobs wait, when the first is due, and the transaction, by which consumers
agree on who looks first (:mod:`sqlaqueue.consumer.notifications.poll_schedule`); a consumer that misses it finds the
jobs at the next poll.
"""

from __future__ import annotations

import hashlib

from sqlaqueue.payloads import PENDING, Signal
from sqlaqueue.postgresql.ddl import NEUTRAL, QueueObject, Trigger, TriggerFunction, equals, objects_of, version_comment
from sqlaqueue.postgresql.identifiers import object_name
from sqlaqueue.queue.roles import literal_text
from sqlaqueue.queue.spec import QueueSpec

VERSION = 4
"""To be raised whenever the text below changes: running consumers tell an older function by it."""

PREFIX = "sqlaqueue_wake_"
"""How the names of the triggers begin."""

_STEP = 0.05
"""Seconds to which the times of updated rows are rounded up, so that many retries make few notifications."""


def channel_of(spec: QueueSpec) -> str:
    """Return the channel on which consumers of a queue hear of it."""
    return object_name("sqlaqueue", spec.table.fullname, spec.name)


def wakes(spec: QueueSpec) -> bool:
    """Return whether a queue's table tells idle consumers of new jobs."""
    return any(isinstance(each, Trigger) and each.name.startswith(PREFIX) for each in objects_of(spec.table))


def wake_up_triggers(spec: QueueSpec) -> list[QueueObject]:
    """Return the trigger function and its triggers, in the order of their creation."""
    function = TriggerFunction(
        spec.table,
        object_name("sqlaqueue_wake", spec.table.name),
        _body(spec),
        comment=version_comment(VERSION),
    )
    objects: list[QueueObject] = [
        function,
        Trigger(spec.table, f"{PREFIX}insert", "INSERT", function, {"NEW": "new_rows"}),
    ]
    begins = _begins_to_wait(spec)
    if begins is not None:
        # The server rewrites a condition as it stores it; by the digest in its name one tells that it is another.
        digest = hashlib.sha256(begins.encode()).hexdigest()[:8]
        objects.append(Trigger(spec.table, f"{PREFIX}update_{digest}", "UPDATE", function, when=begins))
    return objects


def _waits(spec: QueueSpec, row: str = "", *, equal: str = "=") -> str:
    if not spec.has("status"):
        return "TRUE"
    status = spec.columns["status"]
    name = NEUTRAL.identifier_preparer.quote(status.name)
    return f"{row}{name} {equal} {literal_text(spec.status_value('pending'), status.type)}"


def _begins_to_wait(spec: QueueSpec) -> str | None:
    changes = []
    if spec.has("status"):
        changes.append(f"({_waits(spec, 'OLD.')}) IS NOT TRUE")
    if spec.has("run_at"):
        run_at = NEUTRAL.identifier_preparer.quote(spec.columns["run_at"].name)
        changes.append(f"OLD.{run_at} IS DISTINCT FROM NEW.{run_at}")
    return f"{_waits(spec, 'NEW.')} AND ({' OR '.join(changes)})" if changes else None


def _suspicion(spec: QueueSpec, channel: str) -> str:
    """Tell, before the job is called out, that it has been taken from a worker that died; its token says so."""
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
    # It runs as whoever writes the rows, and others may have put operators and functions of theirs in its search path.
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
    sqlaqueue_last := sqlaqueue_first;{_suspicion(spec, channel)}
  ELSE
    SELECT count(*), {first}, {last} INTO sqlaqueue_jobs, sqlaqueue_first, sqlaqueue_last
      FROM new_rows
      WHERE {_waits(spec, equal=equal)};
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
