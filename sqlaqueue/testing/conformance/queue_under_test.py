"""The queue under test: its models, its tables, and shorthands for sessions and statements.

Tests identify a job by its ``number``. The number is not its key: keys are made from it such that jobs share parts of a
composite key, and a statement that compares only one part selects the wrong job.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import datetime
from functools import lru_cache
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.orm import DeclarativeBase, Session, mapped_column, relationship, sessionmaker

from sqlaqueue import QueueConfig, QueueMixin, claim, purge
from sqlaqueue._typing import AnySelect
from sqlaqueue.mapping.mixin import spec_of
from sqlaqueue.queue.options import FINISHED
from sqlaqueue.strategies import ClaimStrategy
from sqlaqueue.testing.conformance.engines import DEADLINE, Gate, engine_under_test

HOUR = 3600

ALL = 1000
"""More jobs than most tests enqueue."""

_NEEDS = "sqlaqueue_needs"
_BROKEN = DEADLINE / 3
"""Seconds that a statement waits for a lock before it is known not to get it."""

_IMPATIENT = 0.1
_NOW = sa.func.now(type_=sa.DateTime(timezone=True))


class Models(NamedTuple):
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
    needed: dict[str, bool] = getattr(test, _NEEDS, {})
    return all(getattr(traits, name) is value for name, value in needed.items())


def traits_of(strategy: str | ClaimStrategy, columns: Mapping[str, str | None]) -> Traits:
    spec = spec_of(make_models(strategy, columns, composite=False).job)
    return Traits(leases=not spec.strategy.holds_transaction, rows=spec.strategy.keeps_rows, status=spec.has("status"))


def make_models(strategy: str | ClaimStrategy, columns: Mapping[str, str | None], *, composite: bool) -> Models:
    """Return the classes of a queue: for equal arguments identical ones, for SQLAlchemy's caches."""
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

    wanted: Any = strategy  # perhaps the name of another package's strategy

    class Job(QueueMixin, Keyed):
        __tablename__ = "conformance_job"
        __queue__ = QueueConfig(
            strategy=wanted,
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
    """The tables of one queue while its context is open, and shorthands to work on them.

    ::

        with QueueUnderTest(engine, "update_status") as queue:
            queue.enqueue(3)
            with queue.session() as session:
                assert len(queue.claim(session, 2)) == 2

    :param engine: of a database in which the tables may be created and dropped.
    :param strategy: the strategy as ``QueueConfig(strategy=...)`` takes it.
    :param columns: the value of ``QueueConfig(columns=...)``.
    :param composite: whether the key has two columns, ``tenant`` and ``id``.
    """

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
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
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

    def do(self, verb: Any) -> set[Any]:
        """Execute a verb in a session of its own, commit, and return the keys that it changed."""
        with self.session() as session:
            keys = session.scalars(verb).all()
            session.commit()
        assert len(keys) == len(set(keys)), "a key was returned twice"
        return set(keys)

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
    return sorted(job.number for job in jobs)
