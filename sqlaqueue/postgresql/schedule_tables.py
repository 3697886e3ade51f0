"""The tables of schedules: ``sqlaqueue_schedule`` and ``sqlaqueue_tick``, and the trigger that announces changes.

They exist in each MetaData and schema for whose queues a schedule is declared. The trigger wakes the processes that
fire schedules when a definition is changed, by whatever means, and records when that was: no tick before it is fired
by the new definition.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime, timedelta

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.sql.elements import conv

from sqlaqueue.notify_payloads import Payload, Signal
from sqlaqueue.postgresql.ddl import Trigger, TriggerFunction, attach, conditional_trigger, version_comment
from sqlaqueue.queue.names import SCHEDULE, TICK
from sqlaqueue.queue.versions import table_comment
from sqlaqueue.sql.portable import MomentOfInsert, Span, notify
from sqlaqueue.sql.types import SqlText

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
_EPOCH = datetime(1970, 1, 1)  # noqa: DTZ001 - other databases have moments in UTC, without a time zone


def _conditions(seconds: Callable[[str], str], moment: Callable[[int], str]) -> dict[str, str]:
    """Return what is true for each schedule.

    A century, 1970 and the year 9000 are the limits: a driver cannot represent every value that a server has.

    :param seconds: returns the SQL of the seconds of a span, by the name of its column.
    :param moment: returns the SQL of a moment, by its seconds since 1970.
    """
    spans, earliest, latest = ("misfire_grace", "jitter"), moment(_EARLIEST), moment(_LATEST)
    return {
        "cron_or_every": "(cron IS NULL) <> (every IS NULL)",
        "every": f"{seconds('every')} BETWEEN 1 AND {_LONGEST}",
        "spans": " AND ".join(f"{seconds(name)} BETWEEN 0 AND {_LONGEST}" for name in spans),
        "catch_up": "catch_up BETWEEN 0 AND 1000",
        "moments": " AND ".join(f"({name} IS NULL OR {name} > {earliest} AND {name} < {latest})" for name in _MOMENTS),
    }


def _checks() -> Iterator[sa.CheckConstraint]:
    postgresql = _conditions(lambda name: f"EXTRACT(epoch FROM {name})", lambda number: f"to_timestamp({number})")
    others = _conditions(str, lambda number: f"'{(_EPOCH + timedelta(seconds=number)).isoformat(' ', 'microseconds')}'")
    for name, condition in postgresql.items():
        # Its name is not subject to a naming convention of the MetaData, so that migrations find it.
        yield sa.CheckConstraint(SqlText(condition, others[name]), name=conv(f"ck_{SCHEDULE}_{name}"))


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
    return notify(SCHEDULE_CHANNEL, str(payload))


def _schedules(metadata: sa.MetaData, schema: str | None) -> sa.Table:
    moment, span = sa.DateTime(timezone=True), Span()
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
        sa.Column("jitter", span, nullable=False, server_default=SqlText("'00:00:00'", "0")),
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
        sa.Column("created_at", moment, nullable=False, server_default=MomentOfInsert()),
        *_checks(),
        schema=schema or sa.BLANK_SCHEMA,
        comment=table_comment(SCHEDULE),
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
    attach(table, conditional_trigger(table, f"{SCHEDULE}_update", "UPDATE", function, _WHEN))
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
        sa.Column("fired_at", moment, nullable=False, server_default=MomentOfInsert()),
        sa.Index(conv(f"ix_{TICK}_job"), "queue", "key"),
        schema=schema or sa.BLANK_SCHEMA,
        comment=table_comment(TICK),
    )
