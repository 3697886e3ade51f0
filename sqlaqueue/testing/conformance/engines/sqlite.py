"""SQLite, prepared by ``sqlaqueue.sqlite.prepare(engine)``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue.testing.conformance.engines.engine_under_test import EngineUnderTest, Reason

_ONE_WRITER = Reason(
    "SQLite has one write lock: a transaction that writes waits until the one before it has ended",
    feature="Transactions that write at the same time, and verbs that pass over locked rows instead of waiting",
)
_CHILD_ROWS = Reason(
    _ONE_WRITER.why,
    feature="Claims and settlements of a job beside an open transaction that inserts a row referring to it",
)
_SECOND_TABLE = Reason(_ONE_WRITER.why, feature="Claims with a filter that joins a second table, and lock no row of it")
_NO_ROW_LOCKS = Reason("SQLite has no locks of rows, and no clause that asks for them", feature=_ONE_WRITER.feature)
_NO_CHANGE_BETWEEN = Reason(
    "SQLite has one write lock: nothing can change a job between the snapshot of a claim and its write", tried=False
)
_PLANS = Reason("the test reads the plans of PostgreSQL and switches its methods off", tried=False)
_OWN_CLOCK = Reason(
    "SQLite runs in the program, so that its clock is that of the machine",
    feature="Times from the clock of a server, whatever the clocks of the workers say",
    tried=False,
)


class SQLiteUnderTest(EngineUnderTest):
    """A file, in write-ahead logging."""

    dialect = "sqlite"
    title = "SQLite"
    reasons = {  # noqa: RUF012 - declared by the base class
        "test_a_claim_passes_over_a_locked_job": _ONE_WRITER,
        "test_a_claim_takes_a_job_that_a_child_row_references": _CHILD_ROWS,
        "test_a_claim_does_not_lock_the_second_table_of_its_filter": _SECOND_TABLE,
        "test_a_claim_does_not_block_child_rows": _CHILD_ROWS,
        "test_settling_does_not_wait_for_child_rows": _CHILD_ROWS,
        "test_cancel_does_not_wait": _ONE_WRITER,
        "test_purge_passes_over_a_locked_job": _ONE_WRITER,
        "test_extend_passes_over_a_locked_job": _ONE_WRITER,
        "test_rescue_passes_over_a_locked_job": _ONE_WRITER,
        "test_session_add": _ONE_WRITER,
        "test_reconcile_passes_over_a_locked_job": _NO_ROW_LOCKS,
        "test_reconcile_does_not_wait[FOR UPDATE]": _NO_ROW_LOCKS,
        "test_reconcile_does_not_wait[FOR NO KEY UPDATE]": _NO_ROW_LOCKS,
        "test_reconcile_does_not_wait[FOR SHARE]": _NO_ROW_LOCKS,
        "test_conditions_are_checked_again_when_a_job_is_locked": _NO_CHANGE_BETWEEN,
        "test_a_job_claimed_concurrently_is_not_claimed_again": _NO_CHANGE_BETWEEN,
        "test_a_job_retried_concurrently_is_not_lost": _NO_CHANGE_BETWEEN,
        "test_a_claim_is_correct_under_every_plan": _PLANS,
        "test_a_claim_is_correct_without_statistics": _PLANS,
        "test_no_plan_of_a_small_table_is_reused": _PLANS,
        "test_no_time_of_the_client_reaches_the_database": _OWN_CLOCK,
        "test_copy": Reason("SQLite has no COPY", feature="COPY, by SQL or by `copy_in()`", tried=False),
        "test_merge": Reason("SQLite has no MERGE", feature="MERGE"),
        "test_truncate": Reason("SQLite has no TRUNCATE; a DELETE without a condition is as fast", feature="TRUNCATE"),
    }

    def lock_timeout(self, seconds: float) -> str:
        """Return the setting of the connection."""
        return f"PRAGMA busy_timeout = {round(seconds * 1000)}"

    def end_transactions(self, engine: sa.Engine, tables: Sequence[sa.Table]) -> None:
        """Do nothing: the sessions of a failed test have ended with it."""

    def kill(self, session: Session, engine: sa.Engine) -> None:
        """Close the connection without a commit or a rollback by the pool."""
        driver: Any = session.connection().connection.driver_connection
        driver.close()
        session.invalidate()
