"""Queues on shards and on the coordinator: Consumers, verbs, killed nodes, and the conformance suite."""

import contextlib
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import NotSupportedError
from sqlalchemy.orm import Mapped, Session, mapped_column, sessionmaker

from sqlaqueue import (
    Consumer,
    QueueConfig,
    QueueMixin,
    cancel,
    claim,
    complete,
    extend,
    fail,
    pause,
    purge,
    release,
    requeue,
    rescue,
    resume,
    retry,
)
from sqlaqueue.citus import Distribution
from sqlaqueue.consumer import pace
from sqlaqueue.testing import StrategyConformance
from tests.citus.cluster import CitusDatabase, Cluster, kill
from tests.citus.conftest import engine_of, schema_in
from tests.citus.models import TENANTS, create, models_for
from tests.consumer.bench import Bench
from tests.consumer.models import Models, for_sync, models
from tests.faults.conftest import rng as rng  # noqa: PLC0414 - a fixture
from tests.faults.harness import Harness
from tests.faults.mutants import lose
from tests.faults.processes import Actor
from tests.faults.roles import PayloadHandler, pool_size_of, record_events
from tests.models import add, new_base
from tests.programs import wait_until
from tests.servers import Server

pytestmark = pytest.mark.once

SHARDS = Distribution("tenant", range(TENANTS))


class Queue:
    """A queue on shards, with what its Consumers need besides."""

    def __init__(self, engine: sa.Engine, placement: str, schema: str) -> None:
        self.schema = schema
        self.engine, self.sessions = engine, sessionmaker(engine)
        self.Job: Any = create(engine, placement).job
        self.options: dict[str, Any] = {"poll_interval": 0.05}
        if placement == "distributed":
            self.options["distribution"] = SHARDS
        # A tenant of which the jobs of a verb are: a statement locks rows on one shard.
        self.some = sa.select(self.Job)
        if placement == "distributed":
            self.some = self.some.where(self.Job.tenant == 1)

    def enqueue(self, keys: range, **values: Any) -> None:
        add(self.sessions, *(self.Job(id=key, **values) for key in keys))

    def states(self) -> Counter[str]:
        with self.sessions() as session:
            return Counter(session.scalars(sa.select(self.Job.status)))

    def consumer(self, handler: Any = lambda session, job: None, **options: Any) -> Consumer[Any]:
        return Consumer(self.Job, handler, self.sessions, **(self.options | options))


@pytest.fixture
def queue(citus_database: CitusDatabase, placement: str) -> Iterator[Queue]:
    with schema_in(citus_database, sharded=placement == "schema") as own, engine_of(own) as engine:
        yield Queue(engine, placement, own.schema)


def test_a_consumer_runs_all_jobs(queue: Queue, caplog: pytest.LogCaptureFixture) -> None:
    queue.enqueue(range(20))
    ran: list[int] = []
    assert queue.consumer(lambda session, job: ran.append(job.id), concurrency=3).drain() == 20
    assert sorted(ran) == [*range(20)]
    assert queue.states() == {"completed": 20}
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_a_failing_job_is_tried_again_and_fails(queue: Queue) -> None:
    queue.enqueue(range(1))

    def fail(session: Session, job: Any) -> None:
        raise RuntimeError("no")

    assert queue.consumer(fail).drain() == 3
    assert queue.states() == {"failed": 1}


def test_verbs_that_name_one_shard(queue: Queue) -> None:
    queue.enqueue(range(1, 12, TENANTS))
    with queue.sessions() as session:
        jobs = session.scalars(claim(queue.some, 2)).all()
        session.commit()
        session.execute(complete(jobs[:1]))
        session.commit()
        assert len(session.execute(cancel(queue.some)).all()) == 1
        session.commit()
        assert queue.states() == {"completed": 1, "processing": 1, "cancelled": 1}
        assert len(session.execute(requeue(queue.some)).all()) == 2
        session.execute(pause(queue.Job))
        session.commit()
        assert not session.scalars(claim(queue.some, 2)).all()
        session.execute(resume(queue.Job))
        session.commit()
    queue.consumer().drain()
    with queue.sessions() as session:
        assert len(session.execute(purge(queue.some)).all()) == 2


def test_verbs_with_instances_of_several_shards(distributed: Queue) -> None:
    """Only those that lock rows before they write need a statement for each shard."""
    distributed.enqueue(range(3 * TENANTS))
    job = distributed.Job
    with distributed.sessions() as session:

        def claimed() -> list[Any]:
            tenants = [claim(sa.select(job).where(job.tenant == tenant), 1) for tenant in (2, 3)]
            found = [each for tenant in tenants for each in session.scalars(tenant)]
            session.commit()
            return found

        for verb in (release, lambda jobs: retry(jobs, delay=0), complete, lambda jobs: fail(jobs, error="wrong")):
            assert len(session.scalars(verb(claimed())).all()) == 2
            session.commit()
        assert distributed.states() == {"pending": 3 * TENANTS - 4, "completed": 2, "failed": 2}
        every = session.scalars(sa.select(job)).all()
        for locking in (extend(claimed()), cancel(every), requeue(every)):
            with pytest.raises(NotSupportedError) as caught:
                session.execute(locking)
            session.rollback()
            assert "of the column that distributes the table" in caught.value.__notes__[0]


@pytest.mark.parametrize("verb", [lambda job: claim(job, 1), cancel, requeue, purge, rescue])
def test_the_error_of_a_verb_without_a_shard_has_the_fix(distributed: Queue, verb: Any) -> None:
    with distributed.sessions() as session:
        with pytest.raises(NotSupportedError) as caught:
            session.execute(verb(distributed.Job))
        assert "select(Task).where(Task.tenant == 1)" in caught.value.__notes__[0]


def test_a_running_job_is_cancelled(
    queue: Queue, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pace, "RESCUE", 0.1)
    queue.enqueue(range(1, 2))
    began, may_end = threading.Event(), threading.Event()

    def work(session: Session, job: Any) -> None:
        began.set()
        may_end.wait(30)
        # A success would count, as a thread cannot be stopped.
        raise ValueError

    cancelled: list[Any] = []
    consumer = queue.consumer(work)
    consumer.on("cancelled", cancelled.append)
    with consumer:
        assert began.wait(30)
        with queue.sessions() as session:
            assert not session.execute(cancel(queue.some)).all(), "it is running"
            session.commit()
        with queue.sessions() as session:
            control = sa.text("SELECT count(*) FROM sqlaqueue_control")
            wait_until(lambda: session.scalar(control) == 0)
        may_end.set()
        wait_until(lambda: cancelled)
    assert queue.states() == {"cancelled": 1}
    assert "maintenance" not in caplog.text


def test_the_lease_of_a_running_job_is_extended(queue: Queue) -> None:
    queue.enqueue(range(3))
    claims: list[Any] = []
    until = threading.Event()
    consumer = queue.consumer(lambda session, job: until.wait(2.5), concurrency=3, lease=1)
    consumer.on("claimed", claims.append)
    with consumer:
        wait_until(lambda: queue.states() == {"completed": 3})
    assert len(claims) == 3, "a lease has expired"


def test_the_jobs_of_a_dead_worker_are_rescued(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "RESCUE", 0.1)
    queue.enqueue(range(1, 12, TENANTS))
    with queue.sessions() as session:
        assert len(session.scalars(claim(queue.some, 3)).all()) == 3
        session.execute(sa.update(queue.Job).values(lease_expires_at=sa.func.now()))
        session.commit()
    with queue.consumer():
        wait_until(lambda: queue.states() == {"completed": 3})


# -- the turns of a Consumer on a distributed table ----------------------------------------------------------------


@pytest.fixture
def distributed(schema: CitusDatabase, engine: sa.Engine) -> Queue:
    return Queue(engine, "distributed", schema.schema)


def test_no_shard_starves(distributed: Queue) -> None:
    """Each claim serves the next value that has jobs, however many the one before has left."""
    claimed = 2
    distributed.enqueue(range(0, 40, TENANTS))
    distributed.enqueue(range(1, TENANTS))
    ran: list[int] = []
    distributed.consumer(lambda session, job: ran.append(job.tenant), batch_size=claimed).drain()
    assert len(ran) == 13
    assert max(ran.index(tenant) for tenant in range(1, TENANTS)) < claimed + TENANTS - 1


def test_a_shard_that_is_never_empty_does_not_starve_others(distributed: Queue) -> None:
    distributed.enqueue(range(0, 8, TENANTS))
    key, others = iter(range(100, 10_000, TENANTS)), Counter[int]()

    def add_another(session: Session, job: Any) -> None:
        others[job.tenant] += 1
        if job.tenant == 0:
            session.add(distributed.Job(id=next(key)))

    with distributed.consumer(add_another, batch_size=2):
        wait_until(lambda: others[0] > 5)
        distributed.enqueue(range(1, TENANTS))
        wait_until(lambda: len(others) == TENANTS)
    assert all(others[tenant] == 1 for tenant in range(1, TENANTS))


def test_values_may_change_while_it_runs(distributed: Queue) -> None:
    distributed.enqueue(range(4))
    values, ran = [0], list[int]()
    options = {"distribution": Distribution("tenant", lambda: values)}
    with distributed.consumer(lambda session, job: ran.append(job.tenant), **options):
        wait_until(lambda: ran == [0])
        values[:] = [2, 3]
        wait_until(lambda: sorted(ran) == [0, 2, 3])
    assert distributed.states() == {"completed": 3, "pending": 1}


def test_a_claim_is_one_task_on_one_shard(distributed: Queue) -> None:
    distributed.enqueue(range(8))
    sent: list[tuple[str, Any]] = []
    sa.event.listen(
        distributed.engine, "before_cursor_execute", lambda _, __, sql, values, *___: sent.append((sql, values))
    )
    distributed.consumer().drain()
    claims = [(sql, values) for sql, values in sent if "AS claimed" in sql or "claimed AS" in sql]
    assert claims
    with distributed.engine.connect() as connection:
        for sql, values in claims:
            plan = "\n".join(connection.exec_driver_sql(f"EXPLAIN (COSTS OFF) {sql}", values).scalars())
            assert "Task Count: 1" in plan, plan
            assert "Subplan" not in plan.split("->  Task")[0], plan


# -- Consumers of several schemas ------------------------------------------------------------------------------------


def test_one_consumer_for_each_schema(citus_database: CitusDatabase) -> None:
    found: Models = models("update_status", notify=False)
    with (
        schema_in(citus_database, sharded=True) as one,
        schema_in(citus_database, sharded=True) as other,
        engine_of(citus_database) as engine,
    ):
        ran: Counter[str] = Counter()
        consumers = []
        for own in (one, other):
            name = own.schema
            mapped = engine.execution_options(schema_translate_map={None: name})
            found.base.metadata.create_all(mapped)
            sessions = sessionmaker(mapped)
            add(sessions, *(found.job() for _ in range(5)))

            def run(session: Session, job: Any, name: str = name) -> None:
                ran[name] += 1
                if sum(ran.values()) == 10:
                    for each in consumers:
                        each.stop()

            consumers.append(Consumer(found.job, run, sessions, poll_interval=0.05))
        Consumer.run_all(*consumers)
        assert ran == {one.schema: 5, other.schema: 5}


def test_a_consumer_connected_to_a_worker(queue: Queue, citus_database: CitusDatabase) -> None:
    """Each worker knows where the tables are, so a Consumer can leave out the coordinator."""
    nodes, ran = citus_database.nodes(), Counter[int]()
    for number, node in enumerate(nodes):
        queue.enqueue(range(number * 10, number * 10 + 5))
        own = node.in_schema(queue.schema)
        with engine_of(own) as direct:
            sessions = sessionmaker(direct)
            Consumer(queue.Job, lambda session, job: ran.update([job.id]), sessions, **queue.options).drain()
    assert len(ran) == 5 * len(nodes)
    assert queue.states() == {"completed": 5 * len(nodes)}


def test_old_jobs_of_a_schema_are_deleted(
    sharded_engine: sa.Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    base = new_base()

    class Job(QueueMixin, base):
        __tablename__ = "job"
        __queue__ = QueueConfig(strategy="update_status", notify=False, retention={"completed": 1})
        id: Mapped[int] = mapped_column(primary_key=True)

    monkeypatch.setattr(pace, "RETENTION", 0.1)
    base.metadata.create_all(sharded_engine)
    sessions = sessionmaker(sharded_engine)
    add(sessions, *(Job() for _ in range(3)))
    count = sa.select(sa.func.count()).select_from(Job)
    with Consumer(Job, lambda session, job: None, sessions, poll_interval=0.05), sessions() as session:
        wait_until(lambda: session.scalar(count) == 0)
    assert "maintenance" not in caplog.text


# -- worker nodes are killed under load and started again: no job is lost, and none has two effects --------------------


JOBS, KILLS = 300, 3
MakeCitusHarness = Callable[[str | None], AbstractContextManager[Harness]]


def run_worker(
    actor: Actor, *, placement: str, strategy: str, api: str, mutant: str | None, url: str, options: dict[str, Any]
) -> None:
    """Run a Consumer of tables on shards until a signal stops it."""
    pace.RESCUE = 0.2
    lose(mutant)
    engine = sa.create_engine(url, pool_size=pool_size_of(options))
    if placement == "distributed":
        options["distribution"] = Distribution("tenant", range(TENANTS))
    handler = for_sync(PayloadHandler(actor))
    consumer = Consumer(models_for(placement).job, handler, sessionmaker(engine), **options)
    record_events(consumer, actor.recorder, options)
    consumer.run()
    engine.dispose()


@contextlib.contextmanager
def harness_of(
    database: CitusDatabase, path: Path, rng: random.Random, placement: str, mutant: str | None
) -> Iterator[Harness]:
    with schema_in(database, sharded=placement == "schema") as own:
        bench: Any = Bench(own, "update_status", notify=False)  # type: ignore[arg-type] # it has url()
        create(bench.engine, placement)
        bench.models = models_for(placement)
        bench.Job, bench.Owner, bench.Effect = bench.models.job, bench.models.owner, bench.models.effect
        with Harness(bench, path, rng, mutant=mutant, timeout=60) as harness:
            harness.worker_role = partial(run_worker, placement=placement)
            yield harness


def kill_and_restart(harness: Harness, servers: Sequence[Server]) -> None:
    """Kill all processes of some nodes, and start these nodes again after a moment."""
    for server in servers:
        harness.record_fault("killed node", node=server.directory.name)
        kill(server)
    time.sleep(harness.rng.random())
    for server in servers:
        restart(server)


def restart(server: Server) -> None:
    """Start a killed server, as soon as no process of it holds its shared memory any more."""
    for left in reversed(range(50)):
        try:
            server.start()
        except RuntimeError:
            if not left:
                raise
            time.sleep(0.1)
        else:
            return


def work_while_nodes_are_killed(harness: Harness, cluster: Cluster) -> None:
    for _ in range(2):
        harness.start_worker(concurrency=3)
    for _ in range(KILLS):
        harness.enqueue_random(JOBS // KILLS)
        harness.wait_for_records(100)
        # All of them, as the schema is on one.
        kill_and_restart(harness, cluster.workers)
    tables = harness.finish()
    assert len(tables.rows) == JOBS


@pytest.fixture
def make_citus_harness(
    citus_database: CitusDatabase, tmp_path: Path, rng: random.Random, placement: str
) -> MakeCitusHarness:
    """Return a function that makes a harness whose workers run a mutant, or the library itself."""
    return lambda mutant: harness_of(citus_database, tmp_path, rng, placement, mutant)


@pytest.mark.thorough
def test_no_job_is_lost_when_nodes_are_killed(own_cluster: Cluster, make_citus_harness: MakeCitusHarness) -> None:
    with make_citus_harness(None) as harness:
        work_while_nodes_are_killed(harness, own_cluster)


@pytest.mark.thorough
def test_shards_on_other_nodes_are_served_while_a_node_is_away(
    own_cluster: Cluster, schema: CitusDatabase, engine: sa.Engine
) -> None:
    job, sessions = create(engine, "distributed").job, sessionmaker(engine)
    with sessions() as session:
        session.add_all(job(id=key) for key in range(10 * TENANTS))
        session.commit()
        place = sa.text(
            "SELECT nodename FROM citus_shards WHERE shardid = get_shard_id_for_distribution_column('job', :tenant)"
        )
        nodes = [session.scalar(place, {"tenant": tenant}) for tenant in range(TENANTS)]
    away = own_cluster.workers[0]
    others = {tenant for tenant, node in enumerate(nodes) if node != str(away.directory)}
    assert 0 < len(others) < TENANTS, "the values are on both workers"
    ran: list[int] = []
    consumer = Consumer(
        job,
        lambda session, job: ran.append(job.tenant),
        sessions,
        batch_size=2,
        poll_interval=0.05,
        distribution=Distribution("tenant", range(TENANTS)),
    )
    kill(away)
    try:
        with consumer:
            wait_until(lambda: len(ran) >= 10 * len(others))
            assert set(ran) == others
            restart(away)
            wait_until(lambda: len(ran) == 10 * TENANTS)
    except BaseException:
        with contextlib.suppress(RuntimeError):
            restart(away)
        raise


@pytest.mark.thorough
def test_the_history_shows_effects_that_are_not_committed_with_the_outcome(
    own_cluster: Cluster, make_citus_harness: MakeCitusHarness
) -> None:
    """It tests the test above: a Consumer without this safeguard does not pass it."""
    with make_citus_harness("commits_effects_before_the_outcome") as harness:
        with pytest.raises(AssertionError, match="effects_are_committed_exactly_once"):
            work_while_nodes_are_killed(harness, own_cluster)
        harness.assert_no_programming_errors()


# -- local tables on the coordinator: the conformance suite holds for every strategy -----------------------------------


class OnTheCoordinator(StrategyConformance):
    """Local tables."""

    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls, citus_database: CitusDatabase) -> Iterator[sa.Engine]:
        with schema_in(citus_database, sharded=False) as own, engine_of(own) as engine:
            yield engine


@pytest.mark.thorough
class TestUpdateStatusOnTheCoordinator(OnTheCoordinator):
    strategy = "update_status"


@pytest.mark.thorough
class TestDeleteReturningOnTheCoordinator(OnTheCoordinator):
    strategy = "delete_returning"


@pytest.mark.thorough
class TestBatchSelectOnTheCoordinator(OnTheCoordinator):
    strategy = "batch_select"
