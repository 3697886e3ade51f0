"""What the table of schedules has on SQLite in the place of functions and spans of PostgreSQL."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

import sqlalchemy as sa

from sqlaqueue.engines.types import moment_text
from sqlaqueue.queue.names import SCHEDULE

_TIMING = ("cron", "every", "timezone", "paused_at")
_CHANGED = " OR ".join(f"OLD.{name} IS NOT NEW.{name}" for name in _TIMING)

NOW = "strftime('%Y-%m-%d %H:%M:%f000', 'now')"
"""The present moment without a function of the library, as another program may change the row."""

_SPAN = re.compile(r"'(\d+):(\d+):(\d+)'")
_SECONDS = re.compile(r"EXTRACT\(epoch FROM (\w+)\)")
_MOMENT = re.compile(r"to_timestamp\((\d+)\)")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def create_trigger(table: sa.Table, connection: sa.Connection) -> None:
    """Create the trigger that records when a definition was changed: no tick before it is fired by the new one."""
    if table.name != SCHEDULE:
        return
    name = connection.dialect.identifier_preparer.format_table(table)
    connection.exec_driver_sql(
        f"CREATE TRIGGER {SCHEDULE}_changed AFTER UPDATE ON {name} WHEN {_CHANGED} BEGIN UPDATE {SCHEDULE} "  # noqa: S608 - the name is quoted
        f"SET edited_at = {NOW}, next_tick = CASE WHEN NEW.paused_at IS NULL THEN next_tick END "
        "WHERE name = NEW.name; END"
    )


def span_in_seconds(default: str) -> str:
    """Return the default of a span in seconds."""
    found = _SPAN.fullmatch(default)
    if found is None:
        return default
    hours, minutes, seconds = map(int, found.groups())
    return str(hours * 3600 + minutes * 60 + seconds)


def translated_check(text: str) -> str:
    """Return the text of a check constraint, in which spans are seconds and moments are texts."""
    return _MOMENT.sub(_moment, _SECONDS.sub(r"\1", text))


def _moment(found: re.Match[str]) -> str:
    return f"'{moment_text(_EPOCH + timedelta(seconds=int(found[1])))}'"
