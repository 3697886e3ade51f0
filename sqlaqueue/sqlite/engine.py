"""What SQLite gives, and what it cannot carry."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sqlalchemy as sa
from sqlalchemy.pool import SingletonThreadPool, StaticPool

from sqlaqueue.engines.notifications import subscribe
from sqlaqueue.exc import ConfigurationError
from sqlaqueue.queue.backend import Checks
from sqlaqueue.sqlite import checks, errors
from sqlaqueue.sqlite.schedules import create_trigger

PREPARE = "sqlaqueue.sqlite.prepare(engine)"


class SQLite:
    """The engine of :func:`sqlaqueue.sqlite.prepare`."""

    name = "sqlite"
    title = "SQLite"

    @property
    def checks(self) -> Checks:
        """The tables, columns and indexes that the file lacks."""
        return checks  # type: ignore[return-value] # a module that implements the part of the protocol in use

    sqlstate = staticmethod(errors.sqlstate)
    violated_constraint = staticmethod(errors.violated_constraint)
    violated_column = staticmethod(errors.violated_column)
    violated_table = staticmethod(errors.violated_table)

    def subscribe(self, engine: sa.Engine, deliver: Callable[[str, str], None]) -> Callable[[], None]:
        """Call ``deliver(channel, text)`` for notifications that are sent in this process."""
        return subscribe(engine, deliver)

    def check_supported(self, spec: Any) -> None:
        """Refuse a queue with options that SQLite cannot carry.

        :raises ConfigurationError: naming the class, the option and what to use instead.
        """
        name, config = spec.model.__name__, spec.config
        if spec.strategy.name != "update_status":
            msg = (
                f'{name}: strategy "{config.strategy}" is not available on SQLite, whose one write lock a held claim '
                'would keep until its transaction ends; use QueueConfig(strategy="update_status")'
            )
            raise ConfigurationError(msg)
        for option in ("limits", "rates", "order", "fair"):
            if getattr(config, option):
                msg = f"{name}: QueueConfig({option}=...) is not available on SQLite; leave it out, or use PostgreSQL"
                raise ConfigurationError(msg)

        if config.unique is not None and not config.unique.nulls_distinct:
            msg = (
                f"{name}: Unique(nulls_distinct=False) is not available on SQLite, whose unique indexes tell NULLs "
                "apart; leave it out and give the columns values"
            )
            raise ConfigurationError(msg)

    def created(self, table: sa.Table, connection: sa.Connection) -> None:
        """Create the trigger of the table of schedules."""
        create_trigger(table, connection)

    def check_pool(self, engine: sa.Engine, who: str) -> None:
        """Refuse an engine with one connection, such as one of a database in memory.

        :raises ConfigurationError: naming what to use instead.
        """
        if isinstance(engine.pool, SingletonThreadPool | StaticPool):
            msg = (
                f"{who}: the sessions of this engine share one connection, as of a database in memory; use a file, as "
                "in create_engine('sqlite:///jobs.db'), or run the jobs in the session that enqueued them, by "
                "sqlaqueue.testing: drain(session, Model, handler)"
            )
            raise ConfigurationError(msg)
