"""What MariaDB gives, and what it cannot carry."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sqlalchemy as sa
from sqlalchemy.pool import AssertionPool, SingletonThreadPool, StaticPool

from sqlaqueue.engines.notifications import subscribe
from sqlaqueue.exc import ConfigurationError
from sqlaqueue.mariadb import checks, errors
from sqlaqueue.mariadb.schedules import create_trigger
from sqlaqueue.queue.backend import Checks

_REASONS = {
    "unique": "which has no partial index",
    "limits": "where a claim cannot count the running jobs of a key",
    "rates": "where a claim cannot reserve the begin of a job",
    "order": "where a claim cannot wait for the job before",
    "fair": "where a claim cannot let keys take turns",
}


class MariaDB:
    """The engine of :func:`sqlaqueue.mariadb.prepare`.

    :param name: the name of SQLAlchemy's dialect, mariadb or mysql.
    """

    title = "MariaDB"

    def __init__(self, name: str) -> None:
        self.name = name

    @property
    def checks(self) -> Checks:
        """The tables, columns and indexes that the database lacks."""
        return checks  # type: ignore[return-value] # a module that implements the part of the protocol in use

    sqlstate = staticmethod(errors.sqlstate)
    violated_constraint = staticmethod(errors.violated_constraint)
    violated_column = staticmethod(errors.violated_column)
    violated_table = staticmethod(errors.violated_table)

    def subscribe(self, engine: sa.Engine, deliver: Callable[[str, str], None]) -> Callable[[], None]:
        """Call ``deliver(channel, text)`` for notifications that are sent in this process."""
        return subscribe(engine, deliver)

    def check_supported(self, spec: Any) -> None:
        """Refuse a queue with options that MariaDB cannot carry.

        :raises ConfigurationError: naming the class, the option and what to use instead.
        """
        name, config = spec.model.__name__, spec.config
        if spec.strategy.name != "update_status":
            msg = (
                f'{name}: strategy "{config.strategy}" is not available on MariaDB, where there are no triggers for '
                'messages, and held claims have not been tested; use QueueConfig(strategy="update_status")'
            )
            raise ConfigurationError(msg)
        for option, reason in _REASONS.items():
            if getattr(config, option):
                msg = (
                    f"{name}: QueueConfig({option}=...) is not available on MariaDB, {reason}; leave it out, or use "
                    "PostgreSQL"
                )
                raise ConfigurationError(msg)

    def created(self, table: sa.Table, connection: sa.Connection) -> None:
        """Create the trigger of the table of schedules."""
        create_trigger(table, connection)

    def check_pool(self, engine: sa.Engine, who: str) -> None:
        """Refuse a pool with one connection for all sessions.

        :raises ConfigurationError: naming what to use instead.
        """
        if isinstance(engine.pool, SingletonThreadPool | StaticPool | AssertionPool):
            msg = (
                f"{who}: the engine's {type(engine.pool).__name__} does not give each session a connection of its own, "
                "so handlers would commit and roll back each other's work; make the engine without poolclass="
            )
            raise ConfigurationError(msg)
