"""A worker node is killed under load and started again: no job is lost, and none has two effects."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import sessionmaker

from sqlaqueue import Consumer, Distribution
from tests.citus.cluster import CitusDatabase, Cluster, kill
from tests.citus.conftest import schema_in
from tests.citus.models import TENANTS, create, models_for
from tests.consumer.bench import Bench
from tests.faults.conftest import fork_server as fork_server  # noqa: PLC0414 - a fixture
from tests.faults.conftest import seed_of
from tests.faults.fork_server import ForkServer
from tests.faults.harness import Harness, Process
from tests.programs import wait_until
from tests.servers import Server

pytestmark = [pytest.mark.once, pytest.mark.thorough]

JOBS, KILLS = 300, 3

MakeCitusHarness = Callable[[str | None], AbstractContextManager[Harness]]


class CitusHarness(Harness):
    """A harness whose workers serve tables on shards."""

    placement = "schema"

    def _start(self, role: str, parameters: dict[str, Any]) -> Process:
        added = {"run": "tests.citus.fault_process:run", "placement": self.placement}
        return super()._start(role, parameters | added)


@contextlib.contextmanager
def harness_of(
    database: CitusDatabase, fork_server: ForkServer, path: Path, seed: str, placement: str, mutant: str | None
) -> Iterator[Harness]:
    with schema_in(database, sharded=placement == "schema") as own:
        bench: Any = Bench(own, "update_status", notify=False)  # type: ignore[arg-type] # it has url()
        create(bench.engine, placement)
        bench.models = models_for(placement)
        bench.Job, bench.Owner, bench.Effect = bench.models.job, bench.models.owner, bench.models.effect
        harness = CitusHarness(bench, fork_server, path, random.Random(seed), mutant=mutant, timeout=60)
        harness.placement = placement
        with harness.running():
            yield harness


def kill_and_restart(harness: Harness, servers: Sequence[Server]) -> None:
    """Kill all processes of some nodes, and start these nodes again after a moment."""
    for server in servers:
        harness.recorder.record("fault", kind="killed node", node=server.directory.name)
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
    request: pytest.FixtureRequest,
    pytestconfig: pytest.Config,
    citus_database: CitusDatabase,
    fork_server: ForkServer,
    tmp_path: Path,
    placement: str,
) -> MakeCitusHarness:
    """Return a function that makes a harness whose workers run a mutant, or the library itself."""
    seed = f"{seed_of(pytestconfig)} {request.node.name}"
    return lambda mutant: harness_of(citus_database, fork_server, tmp_path, seed, placement, mutant)


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
