"""Drain, enqueue and latency of one side, and the medians of several sides that are measured in turns."""

from __future__ import annotations

import contextlib
import multiprocessing
import queue
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from docs.benchmarks.beside_raw.sides import Side

Parts = Sequence[Side]
"""What the processes of one measurement serve: all the same side, or each its part of a queue."""

Case = Callable[[Parts], float]
Make = Callable[[], AbstractContextManager[Parts]]
"""Makes an empty queue."""

_SPAWN = multiprocessing.get_context("spawn")
SECONDS = 60
"""How long a job may take, until something must be wrong."""


def drain(parts: Parts, *, jobs: int, batch: int, processes: int = 1) -> float:
    """Return the jobs per second that some processes run."""
    served = [parts[number % len(parts)] for number in range(processes)]
    for side in served:
        connection = side.connect()
        side.enqueue(connection, jobs // processes, 1000)
        _close(connection)
    barrier, results = _SPAWN.Barrier(processes), _SPAWN.Queue()
    workers = [_SPAWN.Process(target=_drain, args=(side, batch, barrier, results)) for side in served]
    for worker in workers:
        worker.start()
    found = [results.get(timeout=300) for _ in workers]
    for worker in workers:
        worker.join()
    done = sum(number for _, number, _ in found)
    assert done == jobs // processes * processes, f"{done} of {jobs} jobs were done"
    return done / (max(end for _, _, end in found) - min(began for began, _, _ in found))


def _drain(side: Side, batch: int, barrier: Any, results: Any) -> None:
    barrier.wait()
    began = time.monotonic()
    results.put((began, side.drain(batch), time.monotonic()))


def _close(connection: Any) -> None:
    (connection.dispose if hasattr(connection, "dispose") else connection.close)()


def enqueue(parts: Parts, *, jobs: int, batch: int) -> float:
    """Return the jobs per second that one thread inserts."""
    side, connection = parts[0], parts[0].connect()
    side.enqueue(connection, 1, 1)
    began = time.monotonic()
    side.enqueue(connection, jobs, batch)
    taken = time.monotonic() - began
    _close(connection)
    return jobs / taken


def latency(parts: Parts, *, jobs: int, poll_interval: float | None = None, elsewhere: bool = False) -> float:
    """Return the median of the milliseconds from the COMMIT of a job's INSERT to the start of its handler.

    :param poll_interval: seconds; None if the handler begins by a notification only.
    :param elsewhere: the handler runs in another process.
    """
    side, found = parts[0], list[float]()
    with (_elsewhere if elsewhere else _here)(side, poll_interval) as (begun, wake):
        # Until idle.
        time.sleep(0.5)
        connection = side.connect()
        for _ in range(jobs):
            sent = side.enqueue_one(connection)
            wake()
            found.append(begun.get(timeout=SECONDS) - sent)
            # The settlement of this job is not a part of the next one's latency, and polls begin at any moment.
            time.sleep(0.02 + random.random() * (poll_interval or 0))
        _close(connection)
    return 1000 * statistics.median(found)


@contextlib.contextmanager
def _here(side: Side, poll_interval: float | None) -> Iterator[tuple[Any, Callable[[], None]]]:
    begun = queue.SimpleQueue[float]()
    with side.serving(lambda: begun.put(time.monotonic()), poll_interval) as wake:
        yield begun, wake


@contextlib.contextmanager
def _elsewhere(side: Side, poll_interval: float | None) -> Iterator[tuple[Any, Callable[[], None]]]:
    begun, started, ended = _SPAWN.Queue(), _SPAWN.Event(), _SPAWN.Event()
    process = _SPAWN.Process(target=_serve, args=(side, poll_interval, begun, started, ended))
    process.start()
    assert started.wait(SECONDS)
    yield begun, lambda: None
    ended.set()
    process.join()


def _serve(side: Side, poll_interval: float | None, begun: Any, started: Any, ended: Any) -> None:
    # The clock of all processes is the same.
    with side.serving(lambda: begun.put(time.monotonic()), poll_interval):
        started.set()
        ended.wait()


def drains(jobs: int, batch: int, processes: Sequence[int]) -> Iterator[tuple[str, Case]]:
    """Return measurements of drains, by name."""
    for number in processes:
        name = f"drain, {number} process{'es' * (number > 1)}, {batch} job{'s' * (batch > 1)} a claim, jobs/s"
        yield name, partial(drain, jobs=jobs, batch=batch, processes=number)


def enqueues(jobs: int) -> Iterator[tuple[str, Case]]:
    """Return measurements of enqueueing, by name."""
    yield "enqueue, 1 job a transaction, jobs/s", partial(enqueue, jobs=jobs // 10, batch=1)
    yield "enqueue, 100 jobs a transaction, jobs/s", partial(enqueue, jobs=jobs, batch=100)


def polled(jobs: int, milliseconds: int = 50) -> Iterator[tuple[str, Case]]:
    """Return a measurement of the latency with polls, by name."""
    name = f"commit to handler in another process that polls every {milliseconds} ms, median, ms"
    yield name, partial(latency, jobs=jobs, poll_interval=milliseconds / 1000, elsewhere=True)


def medians(case: Case, sides: Sequence[Make], repeat: int) -> list[float]:
    """Return the median of each side, measured in turns."""
    found = [list[float]() for _ in sides]
    for _ in range(repeat):
        for values, make in zip(found, sides, strict=True):
            with make() as parts:
                values.append(case(parts))
    return [statistics.median(values) for values in found]


def cell(name: str, value: float) -> str:
    """Return a number of a table, for a measurement of this name."""
    return f"{value:,.{2 if name.endswith('ms') else 0}f}"
