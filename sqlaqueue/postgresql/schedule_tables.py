"""The tables of schedules: ``sqlaqueue_schedule`` and ``sqlaqueue_tick``, and the trigger that announces changes.

They exist in each MetaData and schema for whose queues a schedule is declared. The trigger wakes the processes that
fire schedules when a definition is changed, by whatever means, and records when that was: no tick before it is fired
by the new definition.
"""

from __future__ import annotations

import hashlib

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.sql.elements import conv

from sqlaqueue.notify_payloads import Payload, Signal
from sqlaqueue.postgresql.ddl import Trigger, TriggerFunction, attach, version_comment
from sqlaqueue.queue.names import SCHEDULE, TICK

SCHEDULE_CHANNEL: str = "sqlaqueue_schedule"
"""The channel on which changes of schedules are announced."""

_VERSION = 1
"""Raise it whenever the text of the trigger function changes."""

_EDITED = ("queue", "model", "cron", "every", "timezone", "values", "factory", "paused_at")
_OLD, _NEW = (f"ROW({', '.join(f'{row}.{name}' for name in _EDITED)})" for row in ("OLD", "NEW"))
_TIMING = " OR ".join(f"OLD.{name} IS DISTINCT FROM NEW.{name}" for name in ("cron", "every", "timezone", "paused_at"))
_WHEN = (
    f"{_OLD} IS DISTINCT FROM {_NEW}"
    " OR (NEW.run_requested_at IS NOT NULL AND OLD.run_requested_at IS DISTINCT FROM NEW.run_requested_at)"
    # A firing moves both.
    " OR (NEW.next_tick IS DISTINCT FROM OLD.next_tick AND NEW.last_tick IS NOT DISTINCT FROM OLD.last_tick)"
)
# The server writes numbers in one way only, whatever the settings of a session are, so that migrations find no change.
_LONGEST, _EARLIEST, _LATEST = 3_155_760_000, 0, 221_845_392_000
_MOMENTS = ("created_at", "paused_at", "run_requested_at", "last_tick", "next_tick", "edited_at")
_CHECKS = {
    "cron_or_every": "(cron IS NULL) <> (every IS NULL)",
    "every": f"EXTRACT(epoch FROM every) BETWEEN 1 AND {_LONGEST}",
    "spans": " AND ".join(
        f"EXTRACT(epoch FROM {name}) BETWEEN 0 AND {_LONGEST}" for name in ("misfire_grace", "jitter")
    ),
    "catch_up": "catch_up BETWEEN 0 AND 1000",
    "moments": " AND ".join(
        f"({name} IS NULL OR {name} > to_timestamp({_EARLIEST}) AND {name} < to_timestamp({_LATEST}))"
        for name in _MOMENTS
    ),
}
"""A century, 1970 and the year 9000 are the limits: a driver cannot represent every value that the server has."""

_BODY = f"""\
BEGIN
  IF TG_LEVEL = 'ROW' THEN
    IF {_TIMING} THEN
      UPDATE {{schedules}} SET edited_at = pg_catalog.clock_timestamp(),
        next_tick = CASE WHEN NEW.paused_at IS NULL THEN next_tick END WHERE name = NEW.name;
    END IF;
  END IF;
  PERFORM pg_catalog.pg_notify('{SCHEDULE_CHANNEL}', '{Signal.POLL}');
  RETURN NULL;
END
"""  # noqa: S608 - its parts are constants of this module


def schedule_tables(metadata: sa.MetaData, schema: str | None) -> tuple[sa.Table, sa.Table]:
    """Return the tables of schedules and of ticks, which are defined once in each MetaData and schema."""
    prefix = f"{schema}." if schema else ""
    schedules, ticks = (metadata.tables.get(f"{prefix}{name}") for name in (SCHEDULE, TICK))
    return (
        _schedules(metadata, schema) if schedules is None else schedules,
        _ticks(metadata, schema) if ticks is None else ticks,
    )


def schedule_notification(payload: Payload) -> sa.ColumnElement[str]:
    """Return the call that sends ``payload`` to the processes that fire schedules."""
    sent: sa.ColumnElement[str] = sa.func.pg_notify(SCHEDULE_CHANNEL, str(payload), type_=sa.Text())
    return sent


def _schedules(metadata: sa.MetaData, schema: str | None) -> sa.Table:
    moment, span = sa.DateTime(timezone=True), sa.Interval()
    table = sa.Table(
        SCHEDULE,
        metadata,
        sa.Column("name", sa.Text(), primary_key=True),
        sa.Column("queue", sa.Text(), nullable=False),
        sa.Column("model", sa.Text()),
        sa.Column("cron", sa.Text()),
        sa.Column("every", span),
        sa.Column("timezone", sa.Text(), nullable=False, server_default=sa.text("'UTC'")),
        sa.Column("values", JSONB(), nullable=False, server_default=sa.text("'{}'")),
        sa.Column("factory", sa.Text()),
        sa.Column("jitter", span, nullable=False, server_default=sa.text("'00:00:00'")),
        sa.Column("catch_up", sa.Integer(), nullable=False, server_default=sa.text("1")),
        sa.Column("misfire_grace", span),
        sa.Column("skip_unfinished", sa.Boolean(), nullable=False, server_default=sa.false()),
        sa.Column("paused_at", moment),
        sa.Column("run_requested_at", moment),
        sa.Column("last_tick", moment),
        sa.Column("next_tick", moment),
        sa.Column("last_job", JSONB(none_as_null=True)),
        sa.Column("edited_at", moment),
        sa.Column("planned_for", sa.Text()),
        sa.Column("planned_at", moment),
        sa.Column("rules", sa.Text()),
        sa.Column("code", JSONB(none_as_null=True)),
        sa.Column("last_error", sa.Text()),
        sa.Column("created_at", moment, nullable=False, server_default=sa.func.now()),
        # Their names are not subject to a naming convention of the MetaData, so that migrations find them.
        *(sa.CheckConstraint(condition, name=conv(f"ck_{SCHEDULE}_{name}")) for name, condition in _CHECKS.items()),
        schema=schema or sa.BLANK_SCHEMA,
    )
    function = TriggerFunction(
        table,
        f"{SCHEDULE}_changed",
        _BODY,
        tables={"schedules": table},
        comment=version_comment(_VERSION),
        definer=True,
    )
    attach(table, function)
    attach(table, Trigger(table, f"{SCHEDULE}_insert", "INSERT", function))
    # The server rewrites a condition when it stores it, so its digest in the name tells whether it has changed.
    digest = hashlib.sha256(_WHEN.encode()).hexdigest()[:8]
    attach(table, Trigger(table, f"{SCHEDULE}_update_{digest}", "UPDATE", function, when=_WHEN))
    return table


def _ticks(metadata: sa.MetaData, schema: str | None) -> sa.Table:
    moment = sa.DateTime(timezone=True)
    return sa.Table(
        TICK,
        metadata,
        sa.Column("schedule", sa.Text(), primary_key=True),
        sa.Column("tick", moment, primary_key=True),
        sa.Column("queue", sa.Text(), nullable=False),
        sa.Column("key", JSONB(none_as_null=True)),
        sa.Column("fired_at", moment, nullable=False, server_default=sa.func.now()),
        sa.Index(conv(f"ix_{TICK}_job"), "queue", "key"),
        schema=schema or sa.BLANK_SCHEMA,
    )
