"""The trigger of the table of schedules."""

from __future__ import annotations

import sqlalchemy as sa

from sqlaqueue.queue.names import SCHEDULE

_TIMING = ("cron", "every", "timezone", "paused_at")
_CHANGED = " OR ".join(f"NOT (OLD.{name} <=> NEW.{name})" for name in _TIMING)


def create_trigger(table: sa.Table, connection: sa.Connection) -> None:
    """Create the trigger that records when a definition was changed: no tick before it is fired by the new one."""
    if table.name != SCHEDULE:
        return
    preparer = connection.dialect.identifier_preparer
    prefix = f"{preparer.quote_schema(table.schema)}." if table.schema else ""
    connection.exec_driver_sql(
        f"CREATE TRIGGER {prefix}{SCHEDULE}_changed BEFORE UPDATE ON {preparer.format_table(table)} FOR EACH ROW "  # noqa: S608 - the names are quoted
        f"SET NEW.edited_at = IF({_CHANGED}, UTC_TIMESTAMP(6), NEW.edited_at), "
        f"NEW.next_tick = IF(({_CHANGED}) AND NEW.paused_at IS NOT NULL, NULL, NEW.next_tick)"
    )
