"""What SQLite gives, and what it cannot carry."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import sqlalchemy as sa
from sqlalchemy.pool import SingletonThreadPool, StaticPool

from sqlaqueue.engines.engine import SharedEngine
from sqlaqueue.exc import ConfigurationError
from sqlaqueue.sqlite import errors
from sqlaqueue.sqlite.schedules import create_trigger


class SQLite(SharedEngine):
    """The engine of :func:`sqlaqueue.sqlite.prepare`."""

    name = "sqlite"
    title = "SQLite"
    no_strategy = "whose one write lock a held claim would keep until its transaction ends"
    no_option: ClassVar[Mapping[str, str]] = {
        "limits": "which has no LATERAL, by which a claim counts the running jobs of each key",
        "rates": "which has no LATERAL, by which a claim reserves the begin of a job for each key",
        "order": "which has no LATERAL, by which a claim looks for the job before in each key",
        "fair": "which has no LATERAL, by which a claim lets keys take turns",
    }

    def __init__(self, busy_timeout: float = 30) -> None:
        self.busy_timeout = busy_timeout
        """How many seconds a transaction waits for that of another connection."""

    sqlstate = staticmethod(errors.sqlstate)
    violated_constraint = staticmethod(errors.violated_constraint)
    violated_column = staticmethod(errors.violated_column)
    violated_table = staticmethod(errors.violated_table)

    def check_supported(self, spec: Any) -> None:
        """Refuse a queue with options that SQLite cannot carry.

        :raises ConfigurationError: naming the class, the option and what to use instead.
        """
        super().check_supported(spec)
        unique = spec.config.unique
        if unique is not None and not unique.nulls_distinct:
            msg = (
                f"{spec.model.__name__}: Unique(nulls_distinct=False) is not available on SQLite, whose unique indexes "
                "tell NULLs apart; leave it out and give the columns values"
            )
            raise ConfigurationError(msg)

    def created(self, table: sa.Table, connection: sa.Connection) -> None:
        """Create the trigger of the table of schedules."""
        create_trigger(table, connection)

    def check_pool(self, engine: sa.Engine, who: str) -> None:
        """Refuse an engine with one connection, and one of a database in memory.

        Several connections share one in memory by ``cache=shared``, and do not wait there for the locks of each other.

        :raises ConfigurationError: naming what to use instead.
        """
        in_memory = ":memory:" in (engine.url.database or "") or "mode=memory" in str(engine.url)
        if in_memory or isinstance(engine.pool, SingletonThreadPool | StaticPool):
            msg = (
                f"{who}: the engine's database is in memory, or its sessions share one connection; use a file, as in "
                "create_engine('sqlite:///jobs.db'), or run the jobs in the session that enqueued them, by "
                "sqlaqueue.testing: drain(session, Model, handler)"
            )
            raise ConfigurationError(msg)
