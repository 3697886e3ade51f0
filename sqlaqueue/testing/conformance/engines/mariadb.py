"""MariaDB, prepared by ``sqlaqueue.mariadb.prepare(engine)``."""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue.testing.conformance.engines.engine_under_test import EngineUnderTest, Reason
from sqlaqueue.testing.conformance.gate import wait_for

_PLANS = Reason("the test reads the plans of PostgreSQL and switches its methods off", tried=False)
_ALIVE = sa.text("SELECT count(*) FROM information_schema.processlist WHERE id = :id")
_OTHERS = sa.text(
    "SELECT trx_mysql_thread_id FROM information_schema.innodb_trx WHERE trx_mysql_thread_id <> CONNECTION_ID()"
)


class MariaDBUnderTest(EngineUnderTest):
    """A server of MariaDB."""

    dialect = "mariadb"
    title = "MariaDB"
    reasons = {  # noqa: RUF012 - declared by the base class
        "test_a_claim_is_correct_under_every_plan": _PLANS,
        "test_a_claim_is_correct_without_statistics": _PLANS,
        "test_no_plan_of_a_small_table_is_reused": _PLANS,
        "test_copy": Reason("MariaDB has no COPY", feature="COPY, by SQL or by `copy_in()`", tried=False),
        "test_merge": Reason("MariaDB has no MERGE", feature="MERGE"),
    }

    def lock_timeout(self, seconds: float) -> str:
        """Return the setting of the connection, in whole seconds."""
        return f"SET SESSION innodb_lock_wait_timeout = {max(1, round(seconds))}"

    def end_transactions(self, engine: sa.Engine, tables: Sequence[sa.Table]) -> None:
        """Kill the connections that have a transaction."""
        with engine.connect() as connection:
            for number in connection.scalars(_OTHERS).all():
                connection.execute(sa.text(f"KILL {number}"))

    def kill(self, session: Session, engine: sa.Engine) -> None:
        """Kill the connection, and wait until it is gone."""
        number = session.scalar(sa.text("SELECT CONNECTION_ID()"))
        with engine.connect() as connection:
            connection.execute(sa.text(f"KILL {number}"))
            wait_for(lambda: connection.scalar(_ALIVE, {"id": number}) == 0, connection.commit)
        session.invalidate()
