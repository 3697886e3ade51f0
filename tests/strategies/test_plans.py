"""A claim costs the same however large the tables, with and without statistics; and which plans the server may keep."""

import itertools
import uuid
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue import claim, rescue
from sqlaqueue.consumer.executor import load_again
from sqlaqueue.consumer.maintenance import state
from sqlaqueue.consumer.maintenance.cleanup import reconcile_range
from sqlaqueue.consumer.maintenance.state import Retention
from sqlaqueue.consumer.outcomes import COMPLETED, FinishedRun
from sqlaqueue.consumer.statements import ANNOUNCEMENTS, EXCEPT, EXPECTED, KEYS, LIMIT, RUN_TOKEN
from sqlaqueue.mapping.mixin import spec_of
from sqlaqueue.postgresql.claim_scan import FEW
from sqlaqueue.queue.run import Run
from sqlaqueue.testing import QueueUnderTest
from tests.contexts import make_context
from tests.models import create, make_job
from tests.strategies.conftest import CUSTOM, GENERIC, QUEUES, buffers_of, explain, nodes_of

SMALL = 1_000
BATCHES = (1, 100)
TIMES = 1.3
A_FEW = 16
"""Blocks more that a claim may look at: trees are higher, and each priority on the way costs a look."""
JIT_ABOVE = 100_000
"""The cost above which the server compiles a query before it executes it, which takes longer than the claim."""
LATER = "now() + interval '1 day'"
N = 10
FEW_BLOCKS = 200
"""What a claim of N jobs may touch; the tables of the large queues have thousands."""


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
        with self.queue.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            for table in self.queue.models.base.metadata.sorted_tables:
                connection.exec_driver_sql(f"{verb} {table.name}")

    def parameters(self, n: int, mark: Mapping[str, Any] | None = None) -> dict[str, Any]:
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
def backlog(class_engine: sa.Engine, request: pytest.FixtureRequest) -> Iterator[Backlog]:
    strategy, columns, composite = QUEUES[request.param]
    with QueueUnderTest(class_engine, strategy, columns, composite=composite) as queue:
        yield Backlog(queue)


SIZES = {"empty": (0, 0), "small": (1_000, 0), "idle": (0, 100_000), "large": (100_000, 100_000)}
"""How many jobs wait and are finished."""


@pytest.mark.parametrize("backlog", QUEUES, indirect=True)
@pytest.mark.parametrize("size", SIZES)
class TestPlans:
    def test_a_claim_reads_only_the_rows_that_it_claims(self, backlog: Backlog, size: str) -> None:
        """With and without statistics, with a custom and a generic plan."""
        waiting, finished = SIZES[size]
        backlog.create()
        if backlog.queue.has_status:
            backlog.fill(finished, status="'completed'")
        backlog.fill(waiting, priority="i % 5")
        for analysed in (False, True):
            if analysed:
                backlog.tidy("ANALYZE")
            for cache in (CUSTOM, GENERIC):
                plan = explain(backlog.queue.engine, claim(backlog.queue.Job, N), {}, cache)
                circumstances = f"{cache}, {analysed=}"
                assert plan["Actual Rows"] == min(N, waiting)
                blocks = buffers_of(plan)
                assert blocks <= FEW_BLOCKS, f"{blocks} blocks with {circumstances}"
                if finished and waiting:
                    used = {node.get("Index Name", "") for node in nodes_of(plan)}
                    assert any(name.endswith("_claim") for name in used), f"{used} with {circumstances}"


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
    def test_rescue_skips_entries_of_finished_jobs(self, class_engine: sa.Engine, name: str) -> None:
        """An old snapshot keeps an index entry for each lease since, each with an end in the future."""
        strategy, columns, composite = QUEUES[name]
        with QueueUnderTest(class_engine, strategy, columns, composite=composite) as queue:
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


# -- which plans the server may keep: that of a claim of a few jobs, which halves its time, but not of many ------------

KEPT = sa.text("""SELECT generic_plans > 0 FROM pg_prepared_statements
                  WHERE statement LIKE '%SKIP LOCKED%' AND statement NOT LIKE '%pg_prepared%'
                  ORDER BY prepare_time DESC LIMIT 1""")


def test_a_large_limit_makes_a_claim_no_slower(engine: sa.Engine) -> None:
    model = create(engine, make_job("batch_select"))
    with Session(engine) as session:
        session.add_all([model(), model()])
        session.execute(sa.text("SET LOCAL statement_timeout = '5s'"))
        assert len(session.scalars(claim(model, 2**40)).all()) == 2


@pytest.mark.parametrize("strategy", ["update_status", "batch_select", "delete_returning"])
@pytest.mark.parametrize(
    ("limit", "from_mark", "kept"),
    [(1, False, True), (FEW, False, True), (2 * FEW + 2, False, False), (1, True, False)],
)
def test_a_claim_of_a_few_jobs_may_keep_its_plan(
    engine: sa.Engine, strategy: str, limit: int, *, from_mark: bool, kept: bool
) -> None:
    """After a claim that returned as many jobs as requested there may be many more."""
    model = create(engine, make_job(strategy))
    context = make_context(model)
    with Session(engine) as session:
        driver: Any = session.connection().connection.driver_connection
        driver.prepare_threshold = 0
        session.add_all(model() for _ in range(30 * FEW))
        session.commit()
        parameters: dict[str, Any] = {LIMIT: limit, EXCEPT: []}
        if from_mark:
            (job,) = session.execute(context.statements.claim, parameters).scalars()
            parameters |= context.claimer._cursor_after([job]) or {}
            session.commit()
        for _ in range(12):
            statements = context.statements
            statement = statements.claim_from_cursor if from_mark else statements.claim
            session.execute(statement, parameters).scalars().all()
            session.commit()
        assert session.scalar(KEPT) is kept
        driver.prepare_threshold = 5


@pytest.fixture
def session(engine: sa.Engine) -> Iterator[Session]:
    """Return a session that prepares each statement on first use."""
    with Session(engine) as session:
        driver: Any = session.connection().connection.driver_connection
        driver.prepare_threshold = 0
        yield session
        driver.prepare_threshold = 5


def kept_of(session: Session, beginning: str) -> int:
    """Return how often statements that begin with this text used a generic plan."""
    kept = "SELECT sum(generic_plans)::int FROM pg_prepared_statements WHERE starts_with(statement, :beginning)"
    times: int = session.scalar(sa.text(kept), {"beginning": beginning})
    return times


@pytest.mark.parametrize("strategy", ["update_status", "batch_select"])
def test_no_plan_is_kept_for_settling_many_runs(engine: sa.Engine, session: Session, strategy: str) -> None:
    model = create(engine, make_job(strategy))
    context = make_context(model)
    for number in range(12):
        bound = {KEYS: [number, number + 1], EXPECTED: 2, RUN_TOKEN: None}
        assert session.connection().execute(context.statements.complete(one=False), bound).all() == [(0, None)]
    assert kept_of(session, "WITH sqlaqueue_ended") == 0


@pytest.mark.parametrize("strategy", ["update_status", "batch_select"])
@pytest.mark.parametrize(("number", "beginning"), [(1, "UPDATE"), (50, "WITH sqlaqueue_ended")])
def test_the_plan_for_settling_runs_is_kept_once_the_table_is_large(
    engine: sa.Engine, strategy: str, number: int, beginning: str
) -> None:
    """Of a small table the plan would read all rows, and the server would keep it while the table grows."""
    model = create(engine, make_job(strategy))
    context, kept = make_context(model), []
    autocommit = engine.execution_options(isolation_level="AUTOCOMMIT")
    token = uuid.uuid4()
    runs = [FinishedRun(Run((key,), token, 1, 1), COMPLETED) for key in range(number)]
    with engine.connect() as mine, autocommit.connect() as other, Session(mine) as session:
        driver: Any = mine.connection.driver_connection
        driver.prepare_threshold = 0
        other.exec_driver_sql("ALTER TABLE job SET (fillfactor = 10)")
        for rows, tidy in ((10_000, "SELECT"), (0, "VACUUM ANALYZE job"), (0, "TRUNCATE job"), (10_000, "ANALYZE job")):
            if rows:
                other.execute(sa.insert(model), [{}] * rows)
            other.exec_driver_sql(tidy)
            context.settler._looked_at = 0.0
            context.settler.look_at_table(session)
            before = kept_of(session, beginning) or 0
            for _ in range(12):
                # At least one is lost, as there is no job 0; what counts is the plan.
                assert context.settler.settle(session, runs)
            session.commit()
            kept.append((kept_of(session, beginning) or 0) > before)
            session.commit()
        driver.prepare_threshold = 5
    assert kept == [False, True, False, True]


def test_no_plan_is_kept_for_loading_again(
    engine: sa.Engine, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    # At a rollback psycopg forgets what it has prepared. Not every driver does.
    monkeypatch.setattr(session, "rollback", session.commit)
    model = create(engine, make_job("update_status"))
    context = make_context(model)
    for _ in range(12):
        token = uuid.uuid4()
        assert load_again(session, context, [Run((number,), token, 1, 5) for number in range(30)]) == []
    assert kept_of(session, "SELECT job") == 0


def test_no_plan_is_kept_for_deleting_old_jobs(
    engine: sa.Engine, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The server ends a batch that is idle for that long, which a busy machine may be.
    monkeypatch.setattr(state, "_LONGEST", 60.0)
    model = create(engine, make_job("update_status", retention={"completed": timedelta(days=1)}))
    retention, context = Retention(spec_of(model)), make_context(model)
    (walk,) = retention.walks
    for _ in range(12):
        assert retention.delete_batch(session, context.settings, walk).number == 0
    assert kept_of(session, "WITH sqlaqueue_deleted") == 0


def test_no_plan_is_kept_for_reconciling_a_range(engine: sa.Engine, session: Session) -> None:
    model = create(engine, make_job("delete_returning"))
    context = make_context(model)
    for _ in range(12):
        assert reconcile_range(session, context, (0,)) == ([], None)
    assert kept_of(session, "SELECT job.id") == 0
