"""A claim costs the same however many jobs are pending, postponed or finished, with and without statistics."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue import rescue
from sqlaqueue.consumer.statements import ANNOUNCEMENTS, EXCEPT, LIMIT
from sqlaqueue.testing import QueueUnderTest
from tests.contexts import make_context
from tests.strategies.explain import CUSTOM, GENERIC, QUEUES, buffers_of, explain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping


SMALL = 1_000
BATCHES = (1, 100)
TIMES = 1.3
A_FEW = 16
"""Blocks more that a claim may look at: trees are higher, and each priority on the way costs a look."""
JIT_ABOVE = 100_000
"""The cost above which the server compiles a query before it executes it, which takes longer than the claim."""

LATER = "now() + interval '1 day'"


def _sizes() -> Iterator[Any]:
    yield pytest.param(50_000, id="50k")
    yield pytest.param(1_000_000, id="1M", marks=pytest.mark.thorough)


def _queues() -> Iterator[Any]:
    for name in QUEUES:
        yield pytest.param(name, marks=pytest.mark.thorough if "composite" in name else ())


class Backlog:
    """A queue that is filled by plain SQL, and the statements of a Consumer."""

    def __init__(self, queue: QueueUnderTest) -> None:
        self.queue, self.filled = queue, 0
        self.context = make_context(queue.Job)

    def create(self) -> None:
        """Create empty tables without autovacuum."""
        self.queue.create()
        self.filled = 0
        for table in self.queue.models.base.metadata.sorted_tables:
            self.queue.execute(f"ALTER TABLE {table.name} SET (autovacuum_enabled = off)")

    def fill(self, jobs: int, **columns: str) -> None:
        """Insert jobs; the values are SQL expressions."""
        keys = {"tenant": "'a'", "id": "i"} if self.queue.composite else {"id": "i"}
        values = keys | {"number": "i"} | columns
        first, self.filled = self.filled, self.filled + jobs
        self.queue.execute(
            f"INSERT INTO conformance_job ({', '.join(values)}) SELECT {', '.join(values.values())}"
            f" FROM generate_series({first}, {self.filled} - 1) AS i"
        )

    def tidy(self, verb: str) -> None:
        """VACUUM or ANALYZE the tables."""
        with self.queue.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            for table in self.queue.models.base.metadata.sorted_tables:
                connection.exec_driver_sql(f"{verb} {table.name}")

    def parameters(self, n: int, mark: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the parameters of a claim of ``n`` jobs."""
        bound = {LIMIT: n, ANNOUNCEMENTS: "1", **(mark or {})}
        marks_rows = self.context.statements.marks_rows
        # As the text of an array, since EXPLAIN gets the values without what their types do with them.
        none: Any = [] if len(self.context.spec.keys) > 1 else ""
        return bound if marks_rows else bound | {EXCEPT: none}

    def claim(self, session: Session, n: int, mark: Mapping[str, Any] | None = None) -> list[Any]:
        """Claim as a Consumer does."""
        statement = self.context.statements.claim if mark is None else self.context.statements.claim_from_cursor
        parameters = {name: value for name, value in self.parameters(n, mark).items() if name != ANNOUNCEMENTS}
        return list(session.execute(statement, parameters).scalars())

    def cost(
        self, n: int, cache: str = GENERIC, mark: Mapping[str, Any] | None = None, claimed: int | None = None
    ) -> int:
        """Return how many blocks a claim of ``n`` jobs reads."""
        statement = self.context.statements.claim if mark is None else self.context.statements.claim_from_cursor
        explained = explain(self.queue.engine, statement, self.parameters(n, mark), cache)
        assert explained["Actual Rows"] == (n if claimed is None else claimed)
        assert explained["Total Cost"] < JIT_ABOVE
        return buffers_of(explained)

    def forget(self) -> None:
        """Delete the jobs of a claim that was rolled back: reading such a row again costs more."""
        self.queue.execute("DELETE FROM conformance_job WHERE xmax::text <> '0'")
        self.tidy("VACUUM (INDEX_CLEANUP ON)")

    def check(self, base: Mapping[int, int], circumstances: str) -> None:
        """Compare the cost with that of a claim of as many from a small table."""
        dear = {}
        for n, cache in itertools.product(BATCHES, (GENERIC, CUSTOM)):
            # The server analyses its own tables when it likes; as long as its snapshot is there, no VACUUM removes what
            # the last claim has touched. What is dear for another reason is so the second time as well.
            for _ in range(2):
                cost = self.cost(n, cache)
                self.forget()
                if cost <= TIMES * base[n] + A_FEW:
                    break
            else:
                dear[n, cache] = cost
        assert not dear, f"{dear} with {circumstances}, where a small table takes {base}"


@pytest.fixture(scope="class", params=[*_queues()])
def backlog(engine: sa.Engine, request: pytest.FixtureRequest) -> Iterator[Backlog]:
    strategy, columns, composite = QUEUES[request.param]
    with QueueUnderTest(engine, strategy, columns, composite=composite) as queue:
        yield Backlog(queue)


@pytest.fixture(scope="class")
def base(backlog: Backlog) -> dict[int, int]:
    """The cost of claims from a small analysed table."""
    backlog.create()
    backlog.fill(SMALL)
    backlog.tidy("ANALYZE")
    costs = {}
    for n in BATCHES:
        costs[n] = backlog.cost(n)
        backlog.forget()
    return costs


def ready(backlog: Backlog, size: int) -> None:
    backlog.fill(size)


def more_urgent_ones_later(backlog: Backlog, size: int) -> None:
    backlog.fill(SMALL)
    backlog.fill(size, priority="-1 - i % 2", run_at=LATER)


def all_urgencies_later(backlog: Backlog, size: int) -> None:
    backlog.fill(SMALL)
    backlog.fill(size, run_at=LATER)


def over(backlog: Backlog, size: int) -> None:
    if backlog.queue.has_status:
        backlog.fill(size, status="'completed'")
        backlog.tidy("ANALYZE")
    backlog.fill(SMALL)


def many_priorities(backlog: Backlog, size: int) -> None:
    # The jobs of each side by side, as in the small table: a page for each of them would cost more in any table.
    backlog.fill(size, priority=f"i / {size // 1000}")


def known_in_another_state(backlog: Backlog, size: int) -> None:
    """The statistics are from when no job was pending."""
    if backlog.queue.has_status:
        backlog.fill(size // 2, status="'completed'")
    backlog.tidy("ANALYZE")
    backlog.fill(size)


SCENES = [ready, more_urgent_ones_later, all_urgencies_later, over, many_priorities, known_in_another_state]


@pytest.mark.parametrize("size", [*_sizes()])
@pytest.mark.parametrize("scene", SCENES)
class TestBacklog:
    @pytest.mark.each_value
    def test_a_claim_costs_the_same_as_in_a_small_table(
        self, backlog: Backlog, base: dict[int, int], scene: Callable[[Backlog, int], None], size: int
    ) -> None:
        """With a custom and a generic plan, before and after ANALYZE."""
        backlog.create()
        scene(backlog, size)
        backlog.check(base, "statistics of before")
        backlog.tidy("ANALYZE")
        backlog.check(base, "statistics of today")


class TestHead:
    def test_a_locked_row_costs_one_lookup(self, backlog: Backlog) -> None:
        """The first jobs are locked by others."""
        backlog.create()
        backlog.fill(20_000)
        two_tables = "messages" in backlog.context.spec.side_tables
        with backlog.queue.engine.connect() as holder:
            for n in BATCHES:
                free = backlog.cost(n)
                backlog.forget()
                keys = "(SELECT id FROM conformance_job ORDER BY id LIMIT 1000)"
                held = f"SELECT FROM conformance_job WHERE id IN {keys} FOR UPDATE"
                assert len(holder.exec_driver_sql(held).all()) == 1000
                more = backlog.cost(n) - free
                holder.rollback()
                backlog.forget()
                # Besides the rows there are the pages of the index that names them.
                assert more <= (6 if two_tables else 2) * 1000 + 60

    def test_a_claim_without_due_jobs_is_cheap(self, backlog: Backlog) -> None:
        """All pending jobs will be due later."""
        backlog.create()
        backlog.fill(100_000, priority="i % 3", run_at=LATER)
        for _ in range(2):
            for cache in (GENERIC, CUSTOM):
                assert backlog.cost(100, cache, claimed=0) <= 25
            backlog.tidy("ANALYZE")

    def test_one_claim_takes_jobs_of_many_priorities(self, backlog: Backlog) -> None:
        """Many priorities have one due job each, among many that have none."""
        backlog.create()
        backlog.fill(1_000, priority="i", run_at=f"CASE WHEN i % 10 = 0 THEN now() ELSE {LATER} END")
        with Session(backlog.queue.engine) as session:
            assert [job.number for job in backlog.claim(session, 70)] == list(range(0, 700, 10))


class TestCursor:
    def test_a_claim_from_a_cursor_skips_entries_of_finished_jobs(self, backlog: Backlog, base: dict[int, int]) -> None:
        """An old snapshot keeps the index entries of all jobs that finished since."""
        backlog.create()
        backlog.fill(20_000)
        with backlog.queue.engine.connect() as watcher:
            watcher.exec_driver_sql("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            watcher.exec_driver_sql("SELECT count(*) FROM conformance_job")
            backlog.queue.execute("DELETE FROM conformance_job WHERE id < 10000")
            with Session(backlog.queue.engine) as session:
                mark = backlog.context.claimer._cursor_after(backlog.claim(session, 10))
            assert backlog.cost(1) > 100, "there is nothing to pass over"
            for n in BATCHES:
                assert backlog.cost(n, mark=mark) <= TIMES * base[n] + A_FEW + n

    def test_a_claim_from_a_cursor_stays_in_its_priority(self, backlog: Backlog) -> None:
        """It returns the due jobs of the same priority that come after the cursor."""
        backlog.create()
        backlog.fill(300, priority="i / 100", run_at=f"CASE WHEN i % 2 = 0 THEN now() ELSE {LATER} END")
        with Session(backlog.queue.engine) as session:
            jobs = backlog.claim(session, 70)
            assert [job.number for job in jobs] == list(range(0, 140, 2))
            mark = backlog.context.claimer._cursor_after(jobs)
        with Session(backlog.queue.engine) as session:
            assert [job.number for job in backlog.claim(session, 100, mark)] == list(range(138, 200, 2))


class TestLeases:
    @pytest.mark.parametrize("name", ["update_status", "update_status-composite"])
    def test_rescue_skips_entries_of_finished_jobs(self, engine: sa.Engine, name: str) -> None:
        """An old snapshot keeps an index entry for each lease since, each with an end in the future."""
        strategy, columns, composite = QUEUES[name]
        with QueueUnderTest(engine, strategy, columns, composite=composite) as queue:
            backlog = Backlog(queue)
            backlog.create()
            # As far as the server knows, nothing ever runs.
            backlog.fill(SMALL)
            backlog.tidy("VACUUM ANALYZE")
            held = {"status": "'processing'", "lease_expires_at": LATER, "lease_token": "gen_random_uuid()"}
            backlog.fill(10_000, **held)
            with queue.engine.connect() as watcher:
                watcher.exec_driver_sql("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
                watcher.exec_driver_sql("SELECT count(*) FROM conformance_job")
                queue.execute("DELETE FROM conformance_job")
                backlog.fill(100, **held)
                for cache in (GENERIC, CUSTOM):
                    explained = explain(queue.engine, rescue(queue.Job), {}, cache)
                    assert explained["Actual Rows"] == 0
                    assert buffers_of(explained) <= A_FEW
