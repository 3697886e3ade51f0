"""A worker node is killed under load and started again: no job is lost, and none has two effects."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import sessionmaker

from sqlaqueue import Consumer, Distribution
from sqlaqueue.consumer import pace
from tests.citus.cluster import CitusDatabase, Cluster, kill
from tests.citus.conftest import schema_in
from tests.citus.models import TENANTS, create, models_for
from tests.consumer.bench import Bench
from tests.consumer.models import for_sync
from tests.faults.conftest import rng as rng  # noqa: PLC0414 - a fixture
from tests.faults.harness import Harness
from tests.faults.mutants import lose
from tests.faults.processes import Actor
from tests.faults.roles import PayloadHandler, pool_size_of, record_events
from tests.programs import wait_until
from tests.servers import Server

pytestmark = [pytest.mark.once, pytest.mark.thorough]

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


def test_no_job_is_lost_when_nodes_are_killed(own_cluster: Cluster, make_citus_harness: MakeCitusHarness) -> None:
    with make_citus_harness(None) as harness:
        work_while_nodes_are_killed(harness, own_cluster)


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


def test_the_history_shows_effects_that_are_not_committed_with_the_outcome(
    own_cluster: Cluster, make_citus_harness: MakeCitusHarness
) -> None:
    """It tests the test above: a Consumer without this safeguard does not pass it."""
    with make_citus_harness("commits_effects_before_the_outcome") as harness:
        with pytest.raises(AssertionError, match="effects_are_committed_exactly_once"):
            work_while_nodes_are_killed(harness, own_cluster)
        harness.assert_no_programming_errors()
