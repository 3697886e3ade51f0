"""The engines of the suite: for each, what differs in the tests, and which tests cannot hold there, with the reason."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, ClassVar

import sqlalchemy as sa
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session


@dataclass(frozen=True)
class Exemption:
    """Why tests cannot hold on an engine."""

    why: str
    """What the engine lacks, in one sentence."""
    feature: str | None = None
    """What users do without, for the table of engines; None if the tests concern only another engine."""
    tried: bool = True
    """Whether the tests run nevertheless, and have to fail. False for tests that could only time out, or whose first
    statement exists on another engine only."""


class EngineUnderTest:
    dialect: ClassVar[str]
    title: ClassVar[str]
    reasons: ClassVar[Mapping[str, Exemption]] = {}
    """The tests that cannot hold: names of tests, or ``name[value]`` for one value of their parameters."""

    def reason(self, test: str, parameters: Mapping[str, Any]) -> Exemption | None:
        """Return why a test cannot hold; None for a test that has to."""
        names = [test, *(f"{test}[{value}]" for value in parameters.values())]
        return next((self.reasons[name] for name in names if name in self.reasons), None)

    def lock_timeout(self, seconds: float) -> str:
        """Return the statement after which a transaction waits so long for locks."""
        raise NotImplementedError

    def end_transactions(self, engine: sa.Engine, tables: Sequence[sa.Table]) -> None:
        """End the transactions on some tables that a failed test has left open."""

    def kill(self, session: Session, engine: sa.Engine) -> None:
        """End the connection of a session, as the death of its process would."""
        raise NotImplementedError

    @contextmanager
    def without_triggers(self, session: Session, table: sa.Table) -> Iterator[None]:
        """Write to a table as a program does that bypasses its triggers."""
        yield


_ONE_WRITER = Exemption(
    "SQLite has one write lock: a transaction that writes waits until the one before it has ended",
    feature="Transactions that write at the same time, and statements that skip locked rows",
)
_SQLITE_CHILD_ROWS = Exemption(
    _ONE_WRITER.why,
    feature="Claim and end a job while an open transaction inserts a row that refers to it",
)
_SECOND_TABLE = Exemption(
    _ONE_WRITER.why, feature="Claim with a filter that joins a second table, without locking its rows"
)
_NO_ROW_LOCKS = Exemption("SQLite has no locks of rows, and no clause that asks for them", feature=_ONE_WRITER.feature)
_NO_CHANGE_BETWEEN = Exemption(
    "SQLite has one write lock: nothing can change a job between the snapshot of a claim and its write", tried=False
)
_PLANS = Exemption("the test reads the plans of PostgreSQL and switches its methods off", tried=False)
_OWN_CLOCK = Exemption(
    "SQLite runs in the program, and has the clock of the machine",
    feature="Times from the server's clock, regardless of the workers' clocks",
    tried=False,
)


class SQLiteUnderTest(EngineUnderTest):
    dialect = "sqlite"
    title = "SQLite"
    reasons = {  # noqa: RUF012 - declared by the base class
        "test_a_claim_passes_over_a_locked_job": _ONE_WRITER,
        "test_a_claim_takes_a_job_that_a_child_row_references": _SQLITE_CHILD_ROWS,
        "test_a_claim_does_not_lock_the_second_table_of_its_filter": _SECOND_TABLE,
        "test_a_claim_does_not_block_child_rows": _SQLITE_CHILD_ROWS,
        "test_settling_does_not_wait_for_child_rows": _SQLITE_CHILD_ROWS,
        "test_settlements_do_not_wait_for_each_other": _ONE_WRITER,
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
        "test_copy": Exemption("SQLite has no COPY", feature="COPY, by SQL or by `copy_in()`", tried=False),
        "test_merge": Exemption("SQLite has no MERGE", feature="MERGE"),
        "test_truncate": Exemption(
            "SQLite has no TRUNCATE; a DELETE without a condition is as fast", feature="TRUNCATE"
        ),
    }

    def lock_timeout(self, seconds: float) -> str:
        return f"PRAGMA busy_timeout = {round(seconds * 1000)}"

    def end_transactions(self, engine: sa.Engine, tables: Sequence[sa.Table]) -> None:
        """Do nothing: the sessions of a failed test have ended with it."""

    def kill(self, session: Session, engine: sa.Engine) -> None:
        """Close the connection without a commit or a rollback by the pool."""
        driver: Any = session.connection().connection.driver_connection
        driver.close()
        session.invalidate()


DEADLINE = 60
"""Seconds until the suite stops waiting for a condition that must become true."""

_GATE = 7_219_402
_ARRIVED = sa.text(
    "SELECT count(*) FROM pg_locks JOIN pg_stat_activity USING (pid)"
    " WHERE datname = current_database() AND locktype = 'advisory' AND objid = :gate AND NOT granted"
)


class Gate:
    """Blocks a statement after its snapshot and before it locks a row.

    A condition that waits for an advisory lock is evaluated while rows are scanned, so other transactions can commit
    changes that the scan does not see::

        with engine.connect() as connection:
            gate = Gate(connection)
            gate.close()
            # Another connection begins: select(Email).where(gate.passed).with_for_update()
            gate.open()
    """

    passed: sa.ColumnElement[bool] = sa.func.pg_advisory_xact_lock_shared(_GATE).is_not(None)
    """The condition that is true for a row once the gate is open."""

    def __init__(self, connection: sa.Connection) -> None:
        self._connection = connection
        self._closed = False

    def close(self) -> None:
        """Block statements that arrive from now on."""
        self._connection.execute(sa.select(sa.func.pg_advisory_lock(_GATE)))
        self._connection.commit()
        self._closed = True

    def open(self) -> None:
        """Let all statements pass."""
        if self._closed:
            self._connection.execute(sa.select(sa.func.pg_advisory_unlock(_GATE)))
            self._connection.commit()
            self._closed = False

    def await_arrival(self) -> None:
        """Wait until a statement is blocked."""
        wait_for(lambda: bool(self._connection.scalar(_ARRIVED, {"gate": _GATE})), self._connection.commit)


def wait_for(condition: Callable[[], bool], between: Callable[[], Any] = lambda: None) -> None:
    """Wait until ``condition`` is true; fail after :data:`DEADLINE` seconds."""
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true"
        between()
        time.sleep(0.01)


_NO_GATE = Exemption(
    "the test stops a claim between its snapshot and its lock; a locking read of InnoDB has no snapshot, but reads the "
    "latest version of each row",
    tried=False,
)
_MARIADB_CHILD_ROWS = Exemption(
    "InnoDB has one kind of lock for changes, with which the shared lock of a foreign key conflicts",
    feature="Claim and end a job while an open transaction inserts a row that refers to it",
    tried=False,
)
_ONE_TABLE = Exemption(
    "FOR UPDATE has no OF in MariaDB: a claim locks the rows of all tables in its filter",
    feature="Claim with a filter that joins a second table, without locking its rows",
    tried=False,
)
_KINDS = Exemption("MariaDB has FOR UPDATE and LOCK IN SHARE MODE only")
_MARIADB_ALIVE = sa.text("SELECT count(*) FROM information_schema.processlist WHERE id = :id")
_MARIADB_OTHERS = sa.text(
    # The server's own transactions have no thread.
    "SELECT trx_mysql_thread_id FROM information_schema.innodb_trx "
    "WHERE trx_mysql_thread_id NOT IN (0, CONNECTION_ID())"
)


class MariaDBUnderTest(EngineUnderTest):
    dialect = "mariadb"
    title = "MariaDB"
    reasons = {  # noqa: RUF012 - declared by the base class
        "test_a_claim_is_correct_under_every_plan": _PLANS,
        "test_a_claim_is_correct_without_statistics": _PLANS,
        "test_no_plan_of_a_small_table_is_reused": _PLANS,
        "test_conditions_are_checked_again_when_a_job_is_locked": _NO_GATE,
        "test_a_job_claimed_concurrently_is_not_claimed_again": _NO_GATE,
        "test_a_job_retried_concurrently_is_not_lost": _NO_GATE,
        "test_a_claim_takes_a_job_that_a_child_row_references": _MARIADB_CHILD_ROWS,
        "test_a_claim_does_not_block_child_rows": _MARIADB_CHILD_ROWS,
        "test_settling_does_not_wait_for_child_rows": _MARIADB_CHILD_ROWS,
        "test_a_claim_does_not_wait_for_the_second_table_of_its_filter": _ONE_TABLE,
        "test_a_claim_does_not_lock_the_second_table_of_its_filter": _ONE_TABLE,
        "test_a_claim_passes_over_a_locked_job[FOR NO KEY UPDATE]": _KINDS,
        "test_a_claim_passes_over_a_locked_job[FOR SHARE]": _KINDS,
        "test_cancel_does_not_wait[FOR NO KEY UPDATE]": _KINDS,
        "test_cancel_does_not_wait[FOR SHARE]": _KINDS,
        "test_reconcile_does_not_wait[FOR NO KEY UPDATE]": _KINDS,
        "test_reconcile_does_not_wait[FOR SHARE]": _KINDS,
        "test_truncate": Exemption("MariaDB has no TRUNCATE with CASCADE"),
        "test_copy": Exemption("MariaDB has no COPY", feature="COPY, by SQL or by `copy_in()`", tried=False),
        "test_merge": Exemption("MariaDB has no MERGE", feature="MERGE"),
    }

    def lock_timeout(self, seconds: float) -> str:
        return f"SET SESSION innodb_lock_wait_timeout = {max(1, round(seconds))}"

    def end_transactions(self, engine: sa.Engine, tables: Sequence[sa.Table]) -> None:
        with engine.connect() as connection:
            for number in connection.scalars(_MARIADB_OTHERS).all():
                # It may have ended since it was listed.
                with suppress(OperationalError):
                    connection.execute(sa.text(f"KILL {number}"))

    def kill(self, session: Session, engine: sa.Engine) -> None:
        number = session.scalar(sa.text("SELECT CONNECTION_ID()"))
        with engine.connect() as connection:
            connection.execute(sa.text(f"KILL {number}"))
            wait_for(lambda: connection.scalar(_MARIADB_ALIVE, {"id": number}) == 0, connection.commit)
        session.invalidate()


_OTHERS = sa.text(
    "SELECT count(pg_terminate_backend(pid)) FROM pg_locks JOIN pg_stat_activity USING (pid)"
    " JOIN pg_class ON pg_class.oid = relation"
    " WHERE datname = current_database() AND backend_type = 'client backend'"
    " AND pid <> pg_backend_pid() AND relname = ANY(:names)"
)
_ALIVE = sa.text("SELECT count(*) FROM pg_stat_activity WHERE pid = :pid")


class PostgreSQLUnderTest(EngineUnderTest):
    dialect = "postgresql"
    title = "PostgreSQL"

    def lock_timeout(self, seconds: float) -> str:
        return f"SET LOCAL lock_timeout = '{round(seconds * 1000)}ms'"

    def end_transactions(self, engine: sa.Engine, tables: Sequence[sa.Table]) -> None:
        with engine.begin() as connection:
            connection.execute(_OTHERS, {"names": [table.name for table in tables]})

    def kill(self, session: Session, engine: sa.Engine) -> None:
        pid = session.scalar(sa.select(sa.func.pg_backend_pid()))
        with engine.connect() as connection:
            connection.execute(sa.select(sa.func.pg_terminate_backend(pid)))
            wait_for(lambda: connection.scalar(_ALIVE, {"pid": pid}) == 0, connection.commit)
        session.invalidate()

    @contextmanager
    def without_triggers(self, session: Session, table: sa.Table) -> Iterator[None]:
        session.execute(sa.text(f"ALTER TABLE {table.name} DISABLE TRIGGER USER"))
        yield
        session.execute(sa.text(f"ALTER TABLE {table.name} ENABLE TRIGGER USER"))


ENGINES: tuple[EngineUnderTest, ...] = (PostgreSQLUnderTest(), SQLiteUnderTest(), MariaDBUnderTest())


def engine_under_test(engine: sa.Engine) -> EngineUnderTest:
    known = {each.dialect: each for each in ENGINES}
    if engine.dialect.name not in known:
        raise LookupError(f"the conformance suite knows {', '.join(known)}, not {engine.dialect.name}")
    return known[engine.dialect.name]


__all__ = ["ENGINES", "EngineUnderTest", "Exemption", "engine_under_test"]
