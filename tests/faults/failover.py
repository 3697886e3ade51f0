"""The queue of a primary with a standby, and a producer that outlives a failover."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session

from tests.consumer.bench import Bench
from tests.consumer.models import models
from tests.faults.fork_server import ForkServer
from tests.faults.harness import MAX_ATTEMPTS, Harness, Process
from tests.faults.history import Recorder
from tests.faults.process_roles import end_enqueueing, enqueue
from tests.servers import Pair


@contextlib.contextmanager
def harness_on(
    pair: Pair, strategy: str, api: str, fork_server: ForkServer, directory: Path, rng: random.Random
) -> Iterator[Harness]:
    """Create the queue of a strategy, and return a harness whose processes know both servers."""
    bench = Bench(pair.database, strategy, api)
    bench.create()
    with Harness(bench, fork_server, directory, rng, timeout=60).running() as harness:
        yield harness


def start_producer(harness: Harness, n: int) -> Process:
    """Start a process that enqueues ``n`` jobs in transactions of a few, also while no server accepts writes."""
    first = 1 + max((key for key in (record.key for record in harness.records()) if key is not None), default=0)
    parameters = {
        "run": f"{__name__}:run_producer",
        "keys": [first, first + n],
        "max_attempts": MAX_ATTEMPTS,
        "url": harness.bench.database.url(),
    }
    return harness._start("producer", parameters)


def run_producer(parameters: Any) -> None:
    """Enqueue jobs; the outcome of a transaction that fails stays unknown, as an application would not know it."""
    recorder = Recorder(Path(parameters["directory"]), parameters["name"])
    rng, model = random.Random(parameters["seed"]), models(parameters["strategy"]).job
    engine = sa.create_engine(parameters["url"])
    keys = list(range(*parameters["keys"]))
    while keys:
        batch, keys = keys[:3], keys[3:]
        try:
            with Session(engine) as session:
                for key in batch:
                    enqueue(session, model, recorder, key, "work", rng, max_attempts=parameters["max_attempts"])
                end_enqueueing(session, recorder, batch, commit=True)
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
