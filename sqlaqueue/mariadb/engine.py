"""What MariaDB gives, and what it cannot carry."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import sqlalchemy as sa
from sqlalchemy.pool import AssertionPool, SingletonThreadPool, StaticPool

from sqlaqueue.engines.engine import SharedEngine
from sqlaqueue.exc import ConfigurationError
from sqlaqueue.mariadb import errors
from sqlaqueue.mariadb.schedules import create_trigger


class MariaDB(SharedEngine):
    """The engine of :func:`sqlaqueue.mariadb.prepare`.

    :param name: the name of SQLAlchemy's dialect, mariadb or mysql.
    """

    title = "MariaDB"
    no_strategy = "where there are no triggers for messages, and held claims have not been tested"
    migrating = (
        "add what an existing table lacks by ALTER TABLE, as sqlalchemy.schema.CreateTable(Model.__table__)"
        ".compile(engine) prints it, and its indexes by index.create(engine, checkfirst=True) for those of "
        "Model.__table__.indexes"
    )
    needs_indexes = True
    no_option: ClassVar[Mapping[str, str]] = {
        "unique": "which has no partial index",
        "limits": "where a claim cannot count the running jobs of a key",
        "rates": "where a claim cannot reserve the begin of a job",
        "order": "where a claim cannot wait for the job before",
        "fair": "where a claim cannot let keys take turns",
    }

    def __init__(self, name: str) -> None:
        self.name = name

    sqlstate = staticmethod(errors.sqlstate)
    violated_constraint = staticmethod(errors.violated_constraint)
    violated_column = staticmethod(errors.violated_column)
    violated_table = staticmethod(errors.violated_table)

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
