"""A primary is killed under load, its standby is promoted, and all processes go on there by themselves."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.checker import violations
from tests.faults.conftest import seed_of
from tests.faults.failover import committed_and_missing, completed_twice, harness_on, start_producer
from tests.faults.fork_server import ForkServer
from tests.faults.harness import Harness
from tests.faults.history import with_event
from tests.servers import Pair, Server, pair_of

pytestmark = pytest.mark.once

COMBINATIONS = [
    ("update_status", "sync"),
    ("delete_returning", "async"),
    pytest.param("update_status", "async", marks=pytest.mark.thorough),
    pytest.param("delete_returning", "sync", marks=pytest.mark.thorough),
    pytest.param("batch_select", "sync", marks=pytest.mark.thorough),
    pytest.param("batch_select", "async", marks=pytest.mark.thorough),
]


@pytest.fixture
def pair(postgres_server: Server) -> Iterator[Pair]:
    with pair_of(postgres_server) as pair:
        yield pair


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> random.Random:
    return random.Random(f"{seed_of(request.config)} {request.node.name}")


def fail_over(harness: Harness, pair: Pair) -> None:
    """Kill the primary while jobs are enqueued and run, and promote the standby a moment later."""
    harness.wait_until(lambda: len(with_event(harness.records(), "completed")) > harness.rng.randint(5, 40), "load")
    harness.recorder.record("fault", kind="failover")
    pair.kill_primary()
    pair.promote()


@pytest.mark.parametrize(("strategy", "api"), COMBINATIONS)
def test_synchronous_standby_loses_nothing(
    pair: Pair, strategy: str, api: str, fork_server: ForkServer, tmp_path: Path, rng: random.Random
) -> None:
    with harness_on(pair, strategy, api, fork_server, tmp_path, rng) as harness:
        pair.make_synchronous()
        workers = [harness.start_worker(concurrency=2) for _ in range(2)]
        producer = start_producer(harness, 200)
        fail_over(harness, pair)
        assert producer.wait() == 0
        harness.finish()
        assert not committed_and_missing(harness)
        assert not completed_twice(harness)
        later = next(each for each in harness.records() if each.event == "fault").time_ns
        for one in workers:
            assert any(each.time_ns > later for each in one.records("completed")), f"{one.name} did not go on"


def test_asynchronous_standby_loses_what_it_did_not_receive(
    pair: Pair, fork_server: ForkServer, tmp_path: Path, rng: random.Random
) -> None:
    """A job is lost whose enqueueing was committed; a job that was completed runs once more."""
    with harness_on(pair, "update_status", "sync", fork_server, tmp_path, rng) as harness:
        [received] = harness.enqueue("work")
        pair.wait_for_standby()
        pair.stop_replication()
        [lost] = harness.enqueue("work")
        harness.start_worker()
        harness.wait_until_finished()
        harness.recorder.record("fault", kind="failover")
        pair.kill_primary()
        pair.promote()
        harness.wait_until(lambda: received in completed_twice(harness), "the completed job runs once more")
        harness.stop_processes()
        assert committed_and_missing(harness) == {lost}
        found: dict[str, Any] = violations(harness.records(), harness.read_tables())
        assert f"job {lost} was committed and is missing" in found["no_committed_job_is_lost"]
        # The effect that the first run committed is lost as well, so that there is one.
        assert harness.bench.effects() == {received: 1}


def test_what_a_synchronous_standby_did_not_receive_was_not_acknowledged(
    pair: Pair, fork_server: ForkServer, tmp_path: Path, rng: random.Random
) -> None:
    """While the standby is cut off, commits wait. A failover then loses them, and nothing has relied on them."""
    with harness_on(pair, "update_status", "sync", fork_server, tmp_path, rng) as harness:
        harness.enqueue("gated", "work", priority=0)
        pair.make_synchronous()
        worker = harness.start_worker(batch_size=1)
        harness.wait_until(lambda: worker.records("at gate"), "the handler is at the gate")
        pair.stop_replication()
        harness.open_gate()
        harness.wait_until(pair.waiting_commits, "a commit waits for the standby")
        # If it were cancelled, it would succeed.
        harness.wait_until(
            lambda: "giving up" in (tmp_path / f"{worker.name}.out").read_text(), "the worker gives a connection up"
        )
        assert not worker.records("completed")
        harness.recorder.record("fault", kind="failover")
        pair.kill_primary()
        pair.promote()
        harness.finish()
        assert not completed_twice(harness)
