"""The queue under test: its models, its tables, and shorthands for sessions and statements.

Tests identify a job by its ``number``. The number is not its key: keys are made from it such that jobs share parts of a
composite key, and a statement that compares only one part selects the wrong job.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from types import TracebackType
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.orm import DeclarativeBase, Session, mapped_column, relationship, sessionmaker

from sqlaqueue import QueueConfig, QueueMixin, claim, purge
from sqlaqueue._typing import AnySelect
from sqlaqueue.mapping.mixin import spec_of
from sqlaqueue.queue.options import FINISHED
from sqlaqueue.strategies import ClaimStrategy

# -- engine under test -------------------------------------------------------------------------------------------------
# What the suite needs of an engine beside the statements of the library.


@dataclass(frozen=True)
class Reason:
    """Why tests cannot hold on an engine."""

    why: str
    """What the engine lacks, in one sentence."""
    feature: str | None = None
    """What users do without, for the table of engines; None if the tests concern only another engine."""
    tried: bool = True
    """Whether the tests run nevertheless, and have to fail. False for tests that could only time out, or whose first
    statement exists on another engine only."""


class EngineUnderTest:
    """One kind of database."""

    dialect: ClassVar[str]
    title: ClassVar[str]
    reasons: ClassVar[Mapping[str, Reason]] = {}
    """The tests that cannot hold: names of tests, or ``name[value]`` for one value of their parameters."""

    def reason(self, test: str, parameters: Mapping[str, Any]) -> Reason | None:
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


# -- sqlite ------------------------------------------------------------------------------------------------------------
# SQLite, prepared by ``sqlaqueue.sqlite.prepare(engine)``.


_ONE_WRITER = Reason(
    "SQLite has one write lock: a transaction that writes waits until the one before it has ended",
    feature="Transactions that write at the same time, and verbs that pass over locked rows instead of waiting",
)
_SQLITE_CHILD_ROWS = Reason(
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
    dialect = "sqlite"
    title = "SQLite"
    reasons = {  # noqa: RUF012 - declared by the base class
        "test_a_claim_passes_over_a_locked_job": _ONE_WRITER,
        "test_a_claim_takes_a_job_that_a_child_row_references": _SQLITE_CHILD_ROWS,
        "test_a_claim_does_not_lock_the_second_table_of_its_filter": _SECOND_TABLE,
        "test_a_claim_does_not_block_child_rows": _SQLITE_CHILD_ROWS,
        "test_settling_does_not_wait_for_child_rows": _SQLITE_CHILD_ROWS,
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
        return f"PRAGMA busy_timeout = {round(seconds * 1000)}"

    def end_transactions(self, engine: sa.Engine, tables: Sequence[sa.Table]) -> None:
        """Do nothing: the sessions of a failed test have ended with it."""

    def kill(self, session: Session, engine: sa.Engine) -> None:
        """Close the connection without a commit or a rollback by the pool."""
        driver: Any = session.connection().connection.driver_connection
        driver.close()
        session.invalidate()


# -- gate --------------------------------------------------------------------------------------------------------------
# Controlled concurrency: a gate that blocks statements, and waiting for a condition.


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
    changes that the scan does not see.
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


# -- mariadb -----------------------------------------------------------------------------------------------------------
# MariaDB, prepared by ``sqlaqueue.mariadb.prepare(engine)``.


_NO_GATE = Reason(
    "the test stops a claim between its snapshot and its lock; a locking read of InnoDB has no snapshot, but reads the "
    "latest version of each row",
    tried=False,
)
_MARIADB_CHILD_ROWS = Reason(
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
_MARIADB_ALIVE = sa.text("SELECT count(*) FROM information_schema.processlist WHERE id = :id")
_MARIADB_OTHERS = sa.text(
    "SELECT trx_mysql_thread_id FROM information_schema.innodb_trx WHERE trx_mysql_thread_id <> CONNECTION_ID()"
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
        "test_truncate": Reason("MariaDB has no TRUNCATE with CASCADE"),
        "test_copy": Reason("MariaDB has no COPY", feature="COPY, by SQL or by `copy_in()`", tried=False),
        "test_merge": Reason("MariaDB has no MERGE", feature="MERGE"),
    }

    def lock_timeout(self, seconds: float) -> str:
        return f"SET SESSION innodb_lock_wait_timeout = {max(1, round(seconds))}"

    def end_transactions(self, engine: sa.Engine, tables: Sequence[sa.Table]) -> None:
        with engine.connect() as connection:
            for number in connection.scalars(_MARIADB_OTHERS).all():
                connection.execute(sa.text(f"KILL {number}"))

    def kill(self, session: Session, engine: sa.Engine) -> None:
        number = session.scalar(sa.text("SELECT CONNECTION_ID()"))
        with engine.connect() as connection:
            connection.execute(sa.text(f"KILL {number}"))
            wait_for(lambda: connection.scalar(_MARIADB_ALIVE, {"id": number}) == 0, connection.commit)
        session.invalidate()


# -- postgresql --------------------------------------------------------------------------------------------------------
# PostgreSQL: all tests hold.


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


# -- engines -----------------------------------------------------------------------------------------------------------
# The engines of the suite: for each, what differs in the tests, and which tests cannot hold there, with the reason.


ENGINES: tuple[EngineUnderTest, ...] = (PostgreSQLUnderTest(), SQLiteUnderTest(), MariaDBUnderTest())


def engine_under_test(engine: sa.Engine) -> EngineUnderTest:
    """Return what the suite knows about the database of an engine.

    :raises LookupError: for a dialect that the suite does not know.
    """
    known = {each.dialect: each for each in ENGINES}
    if engine.dialect.name not in known:
        msg = f"the conformance suite knows {', '.join(known)}, not {engine.dialect.name}"
        raise LookupError(msg)
    return known[engine.dialect.name]


__all__ = ["ENGINES", "EngineUnderTest", "Reason", "engine_under_test"]


HOUR = 3600

ALL = 1000
"""More jobs than most tests enqueue."""

_NEEDS = "sqlaqueue_needs"
_BROKEN = DEADLINE / 3
"""Seconds that a statement waits for a lock before it is known not to get it."""

_IMPATIENT = 0.1
_NOW = sa.func.now(type_=sa.DateTime(timezone=True))


class Models(NamedTuple):
    """The mapped classes of one queue under test."""

    base: type[DeclarativeBase]
    job: Any
    owner: Any
    """A second table for filters: a job may have an owner."""
    note: Any
    """A child table, whose rows refer to a job."""


class Traits(NamedTuple):
    """The properties by which the contracts of strategies differ."""

    leases: bool
    """A claim takes effect with its commit; otherwise its transaction holds the jobs."""
    rows: bool
    """The row of a claimed job still exists."""
    status: bool
    """A row stores the state of its job."""


Test = TypeVar("Test", bound=Callable[..., None])


def needs(**traits: bool) -> Callable[[Test], Test]:
    """Mark a test that applies only to strategies with these :class:`Traits`."""

    def mark(test: Test) -> Test:
        setattr(test, _NEEDS, traits)
        return test

    return mark


def concerns(test: Any, traits: Traits) -> bool:
    """Return whether a test applies to strategies with these traits."""
    needed: dict[str, bool] = getattr(test, _NEEDS, {})
    return all(getattr(traits, name) is value for name, value in needed.items())


def traits_of(strategy: str | ClaimStrategy, columns: Mapping[str, str | None]) -> Traits:
    """Return the traits of a strategy for a model with these columns."""
    spec = spec_of(make_models(strategy, columns, composite=False).job)
    return Traits(
        leases=not spec.strategy.holds_transaction,
        rows=spec.strategy.keeps_rows,
        status=spec.has("status"),
    )


def make_models(strategy: str | ClaimStrategy, columns: Mapping[str, str | None], *, composite: bool) -> Models:
    """Return the classes of a queue: the same ones for the same arguments, for SQLAlchemy's caches."""
    return _make_models(strategy, tuple(sorted(columns.items())), composite=composite)


@lru_cache(maxsize=64)
def _make_models(
    strategy: str | ClaimStrategy, columns: tuple[tuple[str, str | None], ...], *, composite: bool
) -> Models:
    class Base(DeclarativeBase):
        pass

    class Owner(Base):
        __tablename__ = "conformance_owner"
        id = mapped_column(sa.Integer(), primary_key=True, autoincrement=False)
        vip = mapped_column(sa.Boolean(), nullable=False)

    class Keyed(Base):
        __abstract__ = True
        if composite:
            tenant = mapped_column(sa.String(10), primary_key=True)
        id = mapped_column(sa.Integer(), primary_key=True, autoincrement=False)

    class Job(QueueMixin, Keyed):
        __tablename__ = "conformance_job"
        __queue__ = QueueConfig(
            strategy=strategy,
            columns=dict(columns),
            rows_are_messages=("status", None) in columns,
            max_attempts=3,
            lease=HOUR,
        )
        number = mapped_column(sa.Integer(), nullable=False)
        payload = mapped_column(sa.Text())
        owner_id = mapped_column(sa.ForeignKey(Owner.id))
        owner = relationship(Owner)

    keys = [column.name for column in sa.inspect(Job).primary_key]

    class Note(Base):
        __table__ = sa.Table(
            "conformance_note",
            Base.metadata,
            sa.Column("note_id", sa.Integer(), primary_key=True),
            *(sa.Column(key, spec_of(Job).table.c[key].type, nullable=False) for key in keys),
            sa.ForeignKeyConstraint(keys, [f"conformance_job.{key}" for key in keys]),
        )

    return Models(Base, Job, Owner, Note)


class QueueUnderTest:
    """The tables of one queue while its context is open, and shorthands to work on them."""

    def __init__(
        self,
        engine: sa.Engine,
        strategy: str | ClaimStrategy,
        columns: Mapping[str, str | None] | None = None,
        *,
        composite: bool = False,
    ) -> None:
        self.engine = engine
        self.under_test = engine_under_test(engine)
        self.lock_timeout = _BROKEN
        """Seconds that a session waits for a lock; shorter in a test that has to fail for want of one."""
        self.composite = composite
        self.models = make_models(strategy, columns or {}, composite=composite)
        self.Job, self.Owner, self.Note = self.models[1:]
        self.leased, self.keeps_rows, self.has_status = traits_of(strategy, columns or {})
        self._sessions = sessionmaker(engine)

    def __enter__(self) -> Self:
        """Create the tables."""
        self.create()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Drop the tables."""
        self.drop()

    def create(self) -> None:
        """Create the tables anew, without statistics."""
        self.drop()  # an interrupted run may have left tables
        self.models.base.metadata.create_all(self.engine)
        self._add_owners()

    def drop(self) -> None:
        """Drop the tables and everything that belongs to them."""
        self._disconnect()
        self.models.base.metadata.drop_all(self.engine)

    def clear(self) -> None:
        """Empty the tables."""
        self._disconnect()
        with self.engine.begin() as connection:
            for table in reversed(self.models.base.metadata.sorted_tables):
                connection.execute(sa.delete(table))
        self._add_owners()

    def _add_owners(self) -> None:
        with self._sessions.begin() as session:
            session.add_all([self.Owner(id=1, vip=True), self.Owner(id=2, vip=False)])

    def _disconnect(self) -> None:
        """End the transactions on the tables that a failed test has left open."""
        self.under_test.end_transactions(self.engine, self.models.base.metadata.sorted_tables)

    # -- sessions ------------------------------------------------------------------------------------

    @contextmanager
    def session(self, *, lock_timeout: float | None = None, on: sa.Connection | None = None) -> Iterator[Session]:
        """Open a session on a connection of its own; uncommitted changes are rolled back at the end.

        A lock timeout keeps a strategy that waits for a lock from blocking the suite.

        :param on: a connection for all of its transactions; without it each may have another one.
        """
        first = self.under_test.lock_timeout(self.lock_timeout if lock_timeout is None else lock_timeout)
        with self._sessions(bind=on or self.engine) as session:

            def after_begin(_: Session, __: Any, connection: sa.Connection) -> None:
                connection.exec_driver_sql(first)

            event.listen(session, "after_begin", after_begin)
            yield session

    @contextmanager
    def impatient(self) -> Iterator[Session]:
        """Open a session with a lock timeout of 100 ms."""
        with self.session(lock_timeout=_IMPATIENT) as session:
            yield session

    # -- jobs ----------------------------------------------------------------------------------------

    def key(self, number: int) -> Any:
        """Return the key of a job, as the verbs return it."""
        return tuple(self.key_values(number).values()) if self.composite else number

    def keys(self, *numbers: int) -> set[Any]:
        """Return the keys of some jobs."""
        return {self.key(number) for number in numbers}

    def key_values(self, number: int) -> dict[str, Any]:
        """Return the columns of a job's key."""
        if self.composite:
            return {"tenant": "ab"[number % 2], "id": number // 2}
        return {"id": number}

    def values(self, number: int, **values: Any) -> dict[str, Any]:
        """Return the column values of a new job."""
        return {**self.key_values(number), "number": number, **values}

    def enqueue(self, numbers: int | Iterable[int], **values: Any) -> None:
        """Insert jobs and commit: as many as a number says, or those with the given numbers."""
        if isinstance(numbers, int):
            numbers = range(numbers)
        with self._sessions.begin() as session:
            session.add_all([self.Job(**self.values(number, **values)) for number in numbers])

    def only(self, *numbers: int) -> AnySelect:
        """Return the select of the jobs with these numbers."""
        return sa.select(self.Job).where(self.Job.number.in_(numbers))

    def of_vips(self) -> AnySelect:
        """Return the select of the jobs whose owner is a VIP: a condition on a second table."""
        return sa.select(self.Job).join(self.Job.owner).where(self.Owner.vip)

    def claim(self, session: Session, n: int = ALL, of: AnySelect | None = None) -> list[Any]:
        """Claim jobs, and commit if leases take effect with the commit."""
        jobs = list(session.execute(claim(self.Job if of is None else of, n)).scalars())
        if self.leased:
            session.commit()
        return jobs

    def run(self, verb: Callable[[list[Any]], Any], *numbers: int) -> None:
        """Claim these jobs, settle them with ``verb``, and commit."""
        with self.session() as session:
            jobs = self.claim(session, of=self.only(*numbers))
            assert numbers_of(jobs) == sorted(numbers), "the jobs were not there to be claimed"
            assert len(session.scalars(verb(jobs)).all()) == len(numbers)
            session.commit()

    def execute(self, statement: str | sa.Executable, **parameters: Any) -> Any:
        """Execute a statement in a transaction of its own."""
        with self.engine.begin() as connection:
            if isinstance(statement, str):
                statement = sa.text(statement)
            result: sa.CursorResult[Any] = connection.execute(statement, parameters)
            return result.scalar() if result.returns_rows else None

    # -- what can be seen ----------------------------------------------------------------------------

    def row(self, number: int) -> sa.RowMapping | None:
        """Return the committed row of a job; None if it has none."""
        table = self.Job.__table__
        with self.engine.connect() as connection:
            found = connection.execute(sa.select(table).where(table.c.number == number))
            return found.mappings().one_or_none()

    def stored(self, number: int) -> sa.RowMapping:
        """Return the committed row of a job that has one."""
        row = self.row(number)
        assert row is not None, f"job {number} has no row"
        return row

    def state(self, number: int) -> str | None:
        """Return the committed state of a job; None if it has neither a row nor a dead letter.

        Rows without a status are pending; for dead letters ``purge()`` shows the state.
        """
        row = self.row(number)
        if row is not None:
            return str(row["status"]) if self.has_status else "pending"
        for state in FINISHED:
            with self.session() as session:
                if self.key(number) in session.scalars(purge(self.Job, states=[state])).all():
                    return state
        return None

    def attempts(self, number: int) -> int | None:
        """Return the committed number of a job's attempts."""
        row = self.row(number)
        return None if row is None else row["attempts"]

    def claimable(self) -> list[int]:
        """Return the numbers of the jobs that a claim would return now, in claim order."""
        with self.session() as session:
            return [job.number for job in session.scalars(claim(self.Job, ALL))]

    def order(self) -> list[int]:
        """Return the numbers of the claimable jobs in the order in which claims of one job return them.

        One claim of all jobs would show how it sorts them, not which it selects first.
        """
        taken: list[int] = []
        with ExitStack() as workers:
            session = workers.enter_context(self.session())
            while jobs := session.scalars(claim(self.Job, 1)).all():
                taken += [job.number for job in jobs]
                if not self.leased:
                    # A transaction would claim again what it holds.
                    session = workers.enter_context(self.session())
        return taken

    def now(self) -> datetime:
        """Return the time of the database."""
        moment: datetime = self.execute(sa.select(_NOW))
        return moment

    @staticmethod
    def open_for(seconds: float, session: Session) -> datetime:
        """Begin a transaction, and return after some seconds when it began."""
        began: datetime = session.scalars(sa.select(_NOW)).one()
        time.sleep(seconds)
        return began

    def without_triggers(self, session: Session) -> AbstractContextManager[None]:
        """Write to the table of jobs in a way that its triggers do not see."""
        return self.under_test.without_triggers(session, self.Job.__table__)

    def kill(self, session: Session) -> None:
        """End the connection of a session, as the death of its process would."""
        self.under_test.kill(session, self.engine)

    @property
    def completed(self) -> str | None:
        """The state of a completed job; None where the claim deletes its row."""
        return "completed" if self.keeps_rows else None

    # -- races ---------------------------------------------------------------------------------------

    @contextmanager
    def gate(self) -> Iterator[Gate]:
        """A closed gate for statements on this database; it opens when the context ends."""
        with self.engine.connect() as connection:
            gate = Gate(connection)
            gate.close()
            try:
                yield gate
            finally:
                gate.open()


def numbers_of(jobs: Iterable[Any]) -> list[int]:
    """Return the numbers of some jobs, sorted."""
    return sorted(job.number for job in jobs)
