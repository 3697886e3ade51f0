"""PostgreSQL: all tests hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue.testing.conformance.engines.engine_under_test import EngineUnderTest
from sqlaqueue.testing.conformance.gate import wait_for

_OTHERS = sa.text(
    "SELECT count(pg_terminate_backend(pid)) FROM pg_locks JOIN pg_stat_activity USING (pid)"
    " JOIN pg_class ON pg_class.oid = relation"
    " WHERE datname = current_database() AND backend_type = 'client backend'"
    " AND pid <> pg_backend_pid() AND relname = ANY(:names)"
)
_ALIVE = sa.text("SELECT count(*) FROM pg_stat_activity WHERE pid = :pid")


class PostgreSQLUnderTest(EngineUnderTest):
    """A server of PostgreSQL."""

    dialect = "postgresql"
    title = "PostgreSQL"

    def lock_timeout(self, seconds: float) -> str:
        """Return the setting of the transaction."""
        return f"SET LOCAL lock_timeout = '{round(seconds * 1000)}ms'"

    def end_transactions(self, engine: sa.Engine, tables: Sequence[sa.Table]) -> None:
        """Terminate the connections that have locks on the tables."""
        with engine.begin() as connection:
            connection.execute(_OTHERS, {"names": [table.name for table in tables]})

    def kill(self, session: Session, engine: sa.Engine) -> None:
        """Terminate the server process, and wait until it is gone."""
        pid = session.scalar(sa.select(sa.func.pg_backend_pid()))
        with engine.connect() as connection:
            connection.execute(sa.select(sa.func.pg_terminate_backend(pid)))
            wait_for(lambda: connection.scalar(_ALIVE, {"pid": pid}) == 0, connection.commit)
        session.invalidate()

    @contextmanager
    def without_triggers(self, session: Session, table: sa.Table) -> Iterator[None]:
        """Disable the triggers of users on the table, within the transaction."""
        session.execute(sa.text(f"ALTER TABLE {table.name} DISABLE TRIGGER USER"))
        yield
        session.execute(sa.text(f"ALTER TABLE {table.name} ENABLE TRIGGER USER"))
