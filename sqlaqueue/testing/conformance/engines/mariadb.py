"""MariaDB, prepared by ``sqlaqueue.mariadb.prepare(engine)``."""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue.testing.conformance.engines.engine_under_test import EngineUnderTest, Reason
from sqlaqueue.testing.conformance.gate import wait_for

_PLANS = Reason("the test reads the plans of PostgreSQL and switches its methods off", tried=False)
_GATE = Reason(
    "the test stops a claim between its snapshot and its lock; a locking read of InnoDB has no snapshot, but reads the "
    "latest version of each row",
    tried=False,
)
_CHILD_ROWS = Reason(
    "InnoDB has one kind of lock for changes, with which the shared lock of a foreign key conflicts",
    feature="Claims and settlements of a job beside an open transaction that inserts a row referring to it",
    tried=False,
)
_ONE_TABLE = Reason(
    "FOR UPDATE has no OF in MariaDB: a claim locks the rows of all tables in its filter",
    feature="Claims with a filter that joins a second table, and lock no row of it",
    tried=False,
)
_KINDS = Reason("MariaDB has FOR UPDATE and LOCK IN SHARE MODE only")
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
        "test_conditions_are_checked_again_when_a_job_is_locked": _GATE,
        "test_a_job_claimed_concurrently_is_not_claimed_again": _GATE,
        "test_a_job_retried_concurrently_is_not_lost": _GATE,
        "test_a_claim_takes_a_job_that_a_child_row_references": _CHILD_ROWS,
        "test_a_claim_does_not_block_child_rows": _CHILD_ROWS,
        "test_settling_does_not_wait_for_child_rows": _CHILD_ROWS,
        "test_a_claim_does_not_wait_for_the_second_table_of_its_filter": _ONE_TABLE,
        "test_a_claim_does_not_lock_the_second_table_of_its_filter": _ONE_TABLE,
        "test_a_claim_passes_over_a_locked_job[FOR NO KEY UPDATE]": _KINDS,
        "test_a_claim_passes_over_a_locked_job[FOR SHARE]": _KINDS,
        "test_cancel_does_not_wait[FOR NO KEY UPDATE]": _KINDS,
        "test_cancel_does_not_wait[FOR SHARE]": _KINDS,
        "test_reconcile_does_not_wait[FOR NO KEY UPDATE]": _KINDS,
        "test_reconcile_does_not_wait[FOR SHARE]": _KINDS,
        "test_truncate": Reason("MariaDB has no TRUNCATE with CASCADE"),
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
