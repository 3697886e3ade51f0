"""A primary is killed under load, its standby is promoted, and all processes go on there by themselves."""

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from tests.consumer.bench import Bench
from tests.consumer.models import models
from tests.faults.checker import violations
from tests.faults.harness import MAX_ATTEMPTS, Harness
from tests.faults.history import with_event
from tests.faults.processes import Actor, Process
from tests.faults.roles import end_enqueueing, enqueue
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
def make_harness(pair: Pair, tmp_path: Path, rng: random.Random) -> Callable[[str, str], Harness]:
    """Return a function that creates the queue of a strategy, with processes that know both servers."""

    def make(strategy: str, api: str) -> Harness:
        bench = Bench(pair.database, strategy, api)
        bench.create()
        return Harness(bench, tmp_path, rng, timeout=60)

    return make


def start_producer(harness: Harness, n: int) -> Process:
    """Start a process that enqueues ``n`` jobs in transactions of a few, also while no server accepts writes."""
    own = {"strategy": harness.bench.strategy, "url": harness.bench.database.url()}
    return harness.start(run_producer, "producer", **own, keys=list(range(1, 1 + n)))


def run_producer(actor: Actor, *, strategy: str, url: str, keys: list[int]) -> None:
    """Enqueue jobs; the outcome of a transaction that fails stays unknown, as an application would not know it."""
    model, engine = models(strategy).job, sa.create_engine(url)
    while keys:
        batch, keys = keys[:3], keys[3:]
        try:
            with Session(engine) as session:
                for key in batch:
                    enqueue(session, model, actor.recorder, key, "work", actor.rng, max_attempts=MAX_ATTEMPTS)
                end_enqueueing(session, actor.recorder, batch, commit=True)
        except sa.exc.DBAPIError:
            time.sleep(0.1)
        time.sleep(0.005)
    engine.dispose()


def committed_and_missing(harness: Harness) -> set[int]:
    """Return the keys of the jobs whose commit was acknowledged and which the database lacks."""
    enqueued = {record.key for record in harness.records() if record.event == "enqueued" and record.key is not None}
    return enqueued - harness.read_tables().rows.keys()


def completed_twice(harness: Harness) -> set[int]:
    """Return the keys of the jobs that workers have recorded as completed more than once."""
    completed = [record.key for record in harness.records() if record.event == "completed" and record.key is not None]
    return {key for key in completed if completed.count(key) > 1}


def fail_over(harness: Harness, pair: Pair) -> None:
    """Kill the primary while jobs are enqueued and run, and promote the standby a moment later."""
    harness.wait_until(lambda: len(with_event(harness.records(), "completed")) > harness.rng.randint(5, 40), "load")
    harness.record_fault("failover")
    pair.kill_primary()
    pair.promote()


@pytest.mark.parametrize(("strategy", "api"), COMBINATIONS)
def test_synchronous_standby_loses_nothing(
    pair: Pair, make_harness: Callable[[str, str], Harness], strategy: str, api: str
) -> None:
    with make_harness(strategy, api) as harness:
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
    pair: Pair, make_harness: Callable[[str, str], Harness]
) -> None:
    """A job is lost whose enqueueing was committed; a job that was completed runs once more."""
    with make_harness("update_status", "sync") as harness:
        [received] = harness.enqueue("work")
        pair.wait_for_standby()
        pair.stop_replication()
        [lost] = harness.enqueue("work")
        harness.start_worker()
        harness.wait_until_finished()
        harness.record_fault("failover")
        pair.kill_primary()
        pair.promote()
        harness.wait_until(lambda: received in completed_twice(harness), "the completed job runs once more")
        harness.stop()
        assert committed_and_missing(harness) == {lost}
        found: dict[str, Any] = violations(harness.records(), harness.read_tables())
        assert f"job {lost} was committed and is missing" in found["no_committed_job_is_lost"]
        # The effect that the first run committed is lost as well, so that there is one.
        assert harness.bench.effects() == {received: 1}


def test_what_a_synchronous_standby_did_not_receive_was_not_acknowledged(
    pair: Pair, make_harness: Callable[[str, str], Harness]
) -> None:
    """While the standby is cut off, commits wait. A failover then loses them, and nothing has relied on them."""
    with make_harness("update_status", "sync") as harness:
        harness.enqueue("gated", "work", priority=0)
        pair.make_synchronous()
        worker = harness.start_worker(batch_size=1)
        harness.wait_until(lambda: worker.records("at gate"), "the handler is at the gate")
        pair.stop_replication()
        harness.open_gate()
        harness.wait_until(pair.waiting_commits, "a commit waits for the standby")
        # If it were cancelled, it would succeed.
        harness.wait_until(lambda: "giving up" in worker.output, "the worker gives a connection up")
        assert not worker.records("completed")
        harness.record_fault("failover")
        pair.kill_primary()
        pair.promote()
        harness.finish()
        assert not completed_twice(harness)
