"""How long a transaction waits for locks, where the library sets ``lock_timeout`` on PostgreSQL.

The setting of MariaDB belongs to the session and counts whole seconds. It is set before the statement that names it,
and restored when the transaction ends.
"""

from __future__ import annotations

import contextlib
import math
import re
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event

LOCK_TIMEOUT = "sqlaqueue_lock_timeout"
"""The attribute of a compiled statement with the names of the parameters that hold a setting's name and its value."""
_FORMER = "sqlaqueue_former_lock_timeout"
"""The entry in the ``info`` of a connection with the setting of the program."""
_TIME = re.compile(r"(?P<number>\d+)(?P<unit>ms|s|)$")
_AT_ONCE = 0.1
"""The seconds below which a statement does not wait at all."""


def seconds_of(time: str | None) -> int | None:
    """Return a time of PostgreSQL in whole seconds; None for no limit."""
    found = _TIME.match(time or "")
    if found is None or int(found["number"]) == 0:
        return None
    seconds = int(found["number"]) / (1 if found["unit"] == "s" else 1000)
    return 0 if seconds < _AT_ONCE else math.ceil(seconds)


def limit_lock_waits(engine: sa.Engine) -> None:
    """Set the session's setting before a statement that names ``lock_timeout``."""

    @event.listens_for(engine, "before_cursor_execute")
    def limit(
        connection: sa.Connection, cursor: Any, statement: str, parameters: Any, context: Any, executemany: bool
    ) -> None:
        names = getattr(getattr(context, "compiled", None), LOCK_TIMEOUT, None)
        if names is None:
            return
        setting, time = (context.compiled_parameters[0].get(name) for name in names)
        if setting != "lock_timeout":
            return
        info, wanted = connection.connection.info, seconds_of(time)
        # By the connection, which knows the errors of the driver.
        if _FORMER not in info:
            info[_FORMER] = connection.exec_driver_sql("SELECT @@innodb_lock_wait_timeout").scalar()
        former = info[_FORMER]
        seconds = former if wanted is None else min(wanted, former)
        connection.exec_driver_sql(f"SET SESSION innodb_lock_wait_timeout = {seconds}")

    @event.listens_for(engine, "commit")
    @event.listens_for(engine, "rollback")
    # Once a transaction is prepared, the server accepts no other statement.
    @event.listens_for(engine, "prepare_twophase")
    @event.listens_for(engine, "rollback_twophase")
    def restore(connection: sa.Connection, *_: Any) -> None:
        former = None if connection.invalidated else connection.connection.info.pop(_FORMER, None)
        if former is None:
            return
        # If the connection is lost, so is the setting; the statement that follows finds out.
        with contextlib.suppress(Exception):
            own: Any = connection.connection.cursor()
            own.execute(f"SET SESSION innodb_lock_wait_timeout = {former}")
            own.close()
