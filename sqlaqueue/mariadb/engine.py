"""What MariaDB gives, and what it cannot carry."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import sqlalchemy as sa
from sqlalchemy.dialects import mysql
from sqlalchemy.pool import AssertionPool, SingletonThreadPool, StaticPool

from sqlaqueue.engines.checks import schema_of
from sqlaqueue.engines.engine import SharedEngine
from sqlaqueue.exc import ConfigurationError, DatabaseNotReadyError
from sqlaqueue.mariadb import errors
from sqlaqueue.mariadb.schedules import create_trigger
from sqlaqueue.mariadb.unique import check_comparable

_DIALECT = mysql.dialect()
"""By which the types of columns are told apart."""

_STORAGE_ENGINE = sa.text(
    "SELECT engine FROM information_schema.tables "
    "WHERE table_schema = COALESCE(:schema, DATABASE()) AND table_name = :table"
)
_CHARACTER_SET = sa.text(
    "SELECT character_set_name FROM information_schema.columns "
    "WHERE table_schema = COALESCE(:schema, DATABASE()) AND table_name = :table AND column_name = :name"
)


class MariaDB(SharedEngine):
    """The engine of :func:`sqlaqueue.mariadb.prepare`.

    :param name: the name of SQLAlchemy's dialect, mariadb or mysql.
    """

    title = "MariaDB"
    inserts_all_or_none = True
    no_strategy = "where there are no triggers for messages, and held claims have not been tested"
    migrating = (
        "add what an existing table lacks by ALTER TABLE, as sqlalchemy.schema.CreateTable(Model.__table__)"
        ".compile(engine) prints it, and its indexes by index.create(engine, checkfirst=True) for those of "
        "Model.__table__.indexes"
    )
    needs_indexes = True
    no_option: ClassVar[Mapping[str, str]] = {
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

    def check_supported(self, spec: Any) -> None:
        """Refuse a queue with options that MariaDB cannot carry.

        :raises ConfigurationError: naming the class, the option and what to use instead.
        """
        super().check_supported(spec)
        if spec.config.unique is not None:
            check_comparable(spec, _DIALECT)

    def check_storage(self, connection: sa.Connection, spec: Any) -> None:
        """Refuse tables without transactions, and a key of texts in another character set than that of the statements.

        The server converts such a column before it compares it, and uses no index: a settlement would read all rows,
        and wait for the locks of other workers.

        :raises DatabaseNotReadyError: naming the table or column and the fix.
        """
        for table in (spec.table, *spec.side_tables.values()):
            engine = connection.execute(_STORAGE_ENGINE, _place(connection, table)).scalar()
            # None for a view, and for a table that this user may not see there.
            if engine not in {None, "InnoDB"}:
                msg = (
                    f"{spec.model.__name__}: the storage engine of the table {table.name} is {engine}, which has no "
                    f"transactions and no locks of rows; change it by `ALTER TABLE {table.name} ENGINE = InnoDB`"
                )
                raise DatabaseNotReadyError(msg)
        for key in spec.keys:
            found = connection.execute(_CHARACTER_SET, _place(connection, spec.table, key.name)).scalar()
            if found not in {None, "utf8mb4"}:
                msg = (
                    f"{spec.model.__name__}.{key.key}: the character set of the column {spec.table.name}.{key.name} is "
                    f"{found}, for which statements with several keys use no index; change it by `ALTER TABLE "
                    f"{spec.table.name} CONVERT TO CHARACTER SET utf8mb4`"
                )
                raise DatabaseNotReadyError(msg)

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


def _place(connection: sa.Connection, table: sa.Table, column: str | None = None) -> dict[str, str | None]:
    """Return the parameters of a query about a table or a column."""
    place = {"schema": schema_of(connection, table), "table": table.name}
    return place if column is None else {**place, "name": column}
