"""Two transactions that work on jobs with the same unique values, driven statement by statement.

The first transaction executes its operation and stays open. The second executes its own: at once, or it waits, which
``pg_blocking_pids()`` shows. Then the first commits or is rolled back. In a third run the second transaction has taken
its snapshot before the first commits, and executes its operation afterwards.

    python -m tests.unique.test_interleavings

writes docs/evidence/unique-jobs.md, with which the tests compare.
"""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.orm import Session

from sqlaqueue import Unique, cancel, claim, complete, enqueue, extend, fail, purge, requeue, rescue, retry
from tests.unique.models import create, make_job

Isolation = Literal["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"]
ISOLATIONS: tuple[Isolation, ...] = ("READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE")
KEY = "a"
FAILED, RUNNING, EXPIRED, PENDING, NEW, OTHER_NEW = 1, 2, 3, 4, 5, 6


@dataclass(frozen=True)
class Operation:
    name: str
    needs: int | None
    """The job that must be there."""
    execute: Callable[[Session, Any, dict[int, Any], int], str]
    """Executes it with the session, the class, the claimed jobs and the key of a new job; returns the outcome."""


def _enqueue(session: Session, job: Any, _: Any, new: int) -> str:
    [(_, created)] = enqueue(session, job(id=new, key=KEY))
    return "created" if created else "duplicate"


def _insert(session: Session, job: Any, _: Any, new: int) -> str:
    session.add(job(id=new, key=KEY))
    session.flush()
    return "inserted"


def _keys(session: Session, verb: Any, done: str) -> str:
    rows = session.execute(verb).all()
    named = rows[0]._asdict() if rows else {}
    if named.get("duplicate") is not None or named.get("came_back") is False:
        return "duplicate"
    return done if rows else "nothing"


def _claim(session: Session, job: Any, *_: Any) -> str:
    return "claimed" if session.scalars(claim(sa.select(job).where(job.id == PENDING), 1)).all() else "nothing"


def _held(verb: Callable[[Any], Any], done: str) -> Callable[[Session, Any, dict[int, Any], int], str]:
    """Return a settlement: of a run that was claimed before, or of one that the same transaction claims."""

    def settle(session: Session, job: Any, claimed: dict[int, Any], _: int) -> str:
        if RUNNING in claimed:
            return _keys(session, verb(session.merge(claimed[RUNNING], load=False)), done)
        jobs = session.scalars(claim(sa.select(job).where(job.id == PENDING), 1)).all()
        return _keys(session, verb(jobs), done) if jobs else "nothing"

    return settle


def _selected(verb: Any, done: str, key: int) -> Callable[[Session, Any, dict[int, Any], int], str]:
    return lambda session, job, *_: _keys(session, verb(sa.select(job).where(job.id == key)), done)


def _rescue(session: Session, job: Any, *_: Any) -> str:
    return _keys(session, rescue(job), "rescued")


def _update(session: Session, job: Any, *_: Any) -> str:
    changed: Any = session.execute(sa.update(job.__table__).where(job.id == PENDING).values(note="changed"))
    return "updated" if changed.rowcount else "nothing"


def _delete(session: Session, job: Any, *_: Any) -> str:
    deleted: Any = session.execute(sa.delete(job.__table__).where(job.id == PENDING))
    return "deleted" if deleted.rowcount else "nothing"


OPERATIONS = (
    Operation("enqueue", None, _enqueue),
    Operation("insert", None, _insert),
    Operation("claim", PENDING, _claim),
    Operation("complete", RUNNING, _held(complete, "completed")),
    Operation("retry", RUNNING, _held(lambda jobs: retry(jobs, delay=60), "back")),
    Operation("rescue", EXPIRED, _rescue),
    Operation("requeue", FAILED, _selected(requeue, "back", FAILED)),
    Operation("cancel", PENDING, _selected(cancel, "cancelled", PENDING)),
    Operation("purge", FAILED, _selected(purge, "purged", FAILED)),
    Operation("update", PENDING, _update),
    Operation("delete", PENDING, _delete),
)


@dataclass(frozen=True)
class Outcome:
    waited: bool
    """It waited for the end of the first one."""
    result: str

    def __str__(self) -> str:
        return f"waits, {self.result}" if self.waited else self.result


@dataclass(frozen=True)
class Outcomes:
    """The outcomes of one pair of operations."""

    open_then_commit: Outcome
    open_then_rollback: Outcome
    after_commit: Outcome
    alone: str


class Driver:
    def __init__(self, engine: sa.Engine, kind: str, unique: Unique) -> None:
        self.engine, self.kind, self.unique = engine, kind, unique
        self.job = make_job(kind, unique)
        create(engine, self.job)
        # Quicker than TRUNCATE for a few rows.
        self.clear = "; ".join(f"DELETE FROM {table.name}" for table in reversed(self.job.metadata.sorted_tables))
        self.with_leases = kind == "update_status"
        self.observer = engine.connect().execution_options(isolation_level="AUTOCOMMIT")
        self.pool = ThreadPoolExecutor(1)

    def close(self) -> None:
        self.pool.shutdown()
        self.observer.close()

    def pairs(self) -> Iterator[tuple[Operation, Operation]]:
        """Return the pairs that are possible: only one of the jobs of a pair can count at a time."""
        operations = [one for one in OPERATIONS if self.with_leases or one.needs != EXPIRED]
        for first in operations:
            for second in operations:
                active = {self._job_of(one) for one in (first, second)} & {RUNNING, EXPIRED, PENDING}
                if len(active) < 2 or "processing" not in self.unique.states:
                    yield first, second

    def _job_of(self, operation: Operation) -> int | None:
        return PENDING if operation.needs == RUNNING and not self.with_leases else operation.needs

    def run(self, first: Operation, second: Operation, isolation: Isolation) -> Outcomes:
        """Drive a pair of operations in all ways."""
        return Outcomes(
            self._open(first, second, isolation, commit=True),
            self._open(first, second, isolation, commit=False),
            self._after_commit(first, second, isolation),
            self._alone(first, second, isolation),
        )

    def _prepare(self, *operations: Operation) -> dict[int, Any]:
        """Create the jobs that operations need, and return the claimed ones."""
        needed = {self._job_of(one) for one in operations}
        claimed: dict[int, Any] = {}
        self.observer.exec_driver_sql(self.clear)
        with Session(self.engine, expire_on_commit=False) as session:
            for key in (FAILED, RUNNING, EXPIRED):
                if key in needed:
                    self._add(session, key)
                    (job,) = session.scalars(claim(self.job, 1)).all()
                    if key == FAILED:
                        session.execute(fail(job, error="failed"))
                    elif key == EXPIRED:
                        session.execute(extend(job, lease=0))
                    session.commit()
                    claimed[key] = job
            session.expunge_all()
            if PENDING in needed:
                self._add(session, PENDING)
        claimed.pop(FAILED, None)
        return claimed

    def _add(self, session: Session, key: int) -> None:
        session.add(self.job(id=key, key=KEY))
        session.flush()
        if "message" in self.job.metadata.tables:
            session.execute(self.job.metadata.tables["message"].insert().values(job_id=key))
        session.commit()

    def _session(self, isolation: Isolation) -> Session:
        session = Session(self.engine)
        session.connection(execution_options={"isolation_level": isolation})
        return session

    def _execute(self, session: Session, operation: Operation, claimed: dict[int, Any], new: int) -> str:
        try:
            result = operation.execute(session, self.job, claimed, new)
            session.commit()
        except DBAPIError as error:
            session.rollback()
            state = getattr(error.orig, "sqlstate", None)
            return {"23505": "IntegrityError"}.get(state or "", state or "error")
        return result

    def _alone(self, first: Operation, second: Operation, isolation: Isolation) -> str:
        claimed = self._prepare(first, second)
        with self._session(isolation) as session:
            return self._execute(session, second, claimed, OTHER_NEW)

    def _after_commit(self, first: Operation, second: Operation, isolation: Isolation) -> Outcome:
        claimed = self._prepare(first, second)
        with self._session(isolation) as one, self._session(isolation) as other:
            other.execute(sa.text("SELECT 1"))
            self._execute(one, first, claimed, NEW)
            outcome = Outcome(waited=False, result=self._execute(other, second, claimed, OTHER_NEW))
        self._check()
        return outcome

    def _open(self, first: Operation, second: Operation, isolation: Isolation, *, commit: bool) -> Outcome:
        claimed = self._prepare(first, second)
        with self._session(isolation) as one, self._session(isolation) as other:
            pid = other.connection().connection.dbapi_connection.info.backend_pid  # type: ignore[union-attr] # psycopg's
            try:
                first.execute(one, self.job, claimed, NEW)
            except IntegrityError:
                one.rollback()
            result = self.pool.submit(self._execute, other, second, claimed, OTHER_NEW)
            waited = self._waits(pid, result)
            first_too = ""
            try:
                one.commit() if commit else one.rollback()
            except DBAPIError as error:
                first_too = f" (the first: {getattr(error.orig, 'sqlstate', None)})"
            outcome = Outcome(waited, result.result(20) + first_too)
        self._check()
        return outcome

    def _waits(self, pid: int, result: Future[str]) -> bool:
        """Return whether a backend waits for another one, as soon as it does or its operation has ended."""
        blocked = sa.text("SELECT cardinality(pg_blocking_pids(:pid)) > 0")
        until = time.monotonic() + 20
        while time.monotonic() < until:
            if result.done():
                return False
            if self.observer.scalar(blocked, {"pid": pid}):
                return True
            time.sleep(0.001)
        raise TimeoutError

    def _check(self) -> None:
        """Check that no two jobs that count are duplicates, and that no job is lost."""
        table = self.job.__table__
        if self.kind == "rows_are_messages":
            counting = sa.select(sa.func.count()).select_from(table)
        else:
            counting = sa.select(sa.func.count()).where(table.c.status.in_(self.unique.states))
        number = self.observer.scalar(counting)
        assert number is not None
        assert number <= 1, "two duplicates count"


CONFIGURATIONS = {
    "Jobs that count while they wait and run, under update_status": ("update_status", Unique("key")),
    "Jobs that count while they wait, under update_status": ("update_status", Unique("key", states=("pending",))),
    "Jobs under batch_select": ("batch_select", Unique("key")),
    "Jobs under delete_returning": ("delete_returning", Unique("key")),
    "Jobs whose rows the claim deletes": ("rows_are_messages", Unique("key")),
}
PAGE = Path(__file__).parents[2] / "docs" / "evidence" / "unique-jobs.md"
_PASSING_OVER = {"claim", "rescue", "cancel", "purge"}
"""Operations that pass over rows which another transaction has locked."""
_INTRODUCTION = """# Outcomes of concurrent transactions on unique jobs

Two transactions work on jobs with the same unique values. The column names the operation of the first transaction,
which stays open; the row names that of the second, which starts meanwhile. The tests execute each pair statement by
statement, and compare the outcome with these tables.

Each cell shows what the second transaction does:

| in a cell | what happens |
| --- | --- |
| duplicate | It finds the duplicate: `enqueue()` returns it, or the job that was to be pending again is cancelled. |
| nothing | It changes no job. |
| created, claimed, back (pending again) .. | It does its work. |
| waits: A | It waits for the end of the first transaction, and does A when that commits. |
| meanwhile: A | It does A, and does not wait. |
| later: B | It does B if it is executed after the first transaction has committed. |
| empty | The pair cannot occur, as both operations need a job that counts. |

If the first transaction is rolled back, the second one does its work as if it were alone. Operations that skip locked
rows have found nothing.

Under `SERIALIZABLE` the outcomes are those of `REPEATABLE READ`, or one of the two transactions fails with 40001. Which
one fails depends on the plans of the statements.

*IntegrityError* is the error of a violated unique index, and 40001 the SQLSTATE of a failed serialization. Roll back
and repeat the transaction. A Consumer repeats its own transactions.
"""


def cell(outcomes: Outcomes) -> str:
    if not outcomes.open_then_commit.waited and outcomes.open_then_commit.result == outcomes.after_commit.result:
        return outcomes.after_commit.result
    word = "waits: " if outcomes.open_then_commit.waited else "meanwhile: "
    if outcomes.open_then_commit.result == outcomes.after_commit.result:
        return f"{word}{outcomes.after_commit.result}"
    return f"{word}{outcomes.open_then_commit.result}; later: {outcomes.after_commit.result}"


def check_rollback(driver: Driver, first: Operation, second: Operation, outcomes: Outcomes) -> None:
    """Check that a transaction which is rolled back has changed nothing for the other one."""
    claims = second.needs == RUNNING and not driver.with_leases
    # Dead letters are skipped as well.
    claims |= second.name == "requeue" and driver.kind == "rows_are_messages"
    expected = {outcomes.alone} | ({"nothing"} if claims or second.name in _PASSING_OVER else set())
    assert outcomes.open_then_rollback.result in expected, (first.name, second.name, outcomes)


def grid(driver: Driver, isolation: Isolation) -> str:
    cells: dict[tuple[str, str], str] = {}
    for first, second in driver.pairs():
        outcomes = driver.run(first, second, isolation)
        check_rollback(driver, first, second, outcomes)
        cells[first.name, second.name] = cell(outcomes)
    names = [one.name for one in OPERATIONS if any(one.name in pair for pair in cells)]
    lines = [f"| | {' | '.join(names)} |", f"|---|{'---|' * len(names)}"]
    lines += [f"| **{second}** | {' | '.join(cells.get((first, second), '') for first in names)} |" for second in names]
    return "\n".join(lines)


def heading(name: str, isolation: str) -> str:
    return f"## {name}: {isolation}"


def write() -> None:
    from tests.servers import find_installations, running  # noqa: PLC0415 - only this function starts a server

    version, sections = max(find_installations()), [_INTRODUCTION]
    with running([version]) as servers:
        for name, (kind, unique) in CONFIGURATIONS.items():
            with servers.shared(version).database() as database:
                engine = sa.create_engine(database.url())
                driver = Driver(engine, kind, unique)
                sections += [f"{heading(name, each)}\n\n{grid(driver, each)}\n" for each in ISOLATIONS[:2]]
                driver.close()
                engine.dispose()
    PAGE.write_text("\n".join(sections))


if __name__ == "__main__":
    write()


# -- pairs of transactions on duplicates have the outcomes that the documentation has tables of ------------------------

NAMES = list(CONFIGURATIONS)
USUAL = [(NAMES[1], "READ COMMITTED")]
"""The combination of the default session: in it the most operations meet."""


@pytest.mark.parametrize(
    ("name", "isolation"),
    [
        pytest.param(name, isolation, marks=[] if (name, isolation) in USUAL else pytest.mark.thorough)
        for name in NAMES
        for isolation in ISOLATIONS
    ],
)
def test_the_outcomes_are_those_of_the_page(engine: sa.Engine, name: str, isolation: Any) -> None:
    driver = Driver(engine, *CONFIGURATIONS[name])
    try:
        found = grid(driver, isolation)
    finally:
        driver.close()
    in_page = "REPEATABLE READ" if isolation == "SERIALIZABLE" else isolation
    section = PAGE.read_text().partition(f"{heading(name, in_page)}\n")[2].partition("\n## ")[0]
    expected = section.strip().splitlines()
    if isolation == "SERIALIZABLE":
        # A transaction may fail for reasons that depend on the plans.
        lines = zip(found.splitlines(), expected, strict=True)
        found = "\n".join(without_failures(line, wanted) for line, wanted in lines)
    assert found.splitlines() == expected


def without_failures(line: str, expected: str) -> str:
    """Return a row of the table, with the expected cells in place of those of transactions that have failed."""
    pairs = zip(line.split("|"), expected.split("|"), strict=True)
    return "|".join(wanted if "40001" in cell or "40001" in wanted else cell for cell, wanted in pairs)
