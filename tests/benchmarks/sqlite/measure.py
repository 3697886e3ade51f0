"""Drain, enqueue and latency, with and without the library, in turns."""

from __future__ import annotations

import contextlib
import multiprocessing
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.benchmarks.sqlite import library, raw

BATCH = 20
SIDES: tuple[ModuleType, ModuleType] = (raw, library)


def _drain(name: str, path: Path, synchronous: str, barrier: Any, results: Any) -> None:
    side = library if name == "library" else raw
    barrier.wait()
    began = time.monotonic()
    results.put((began, side.drain(path, synchronous, BATCH), time.monotonic()))


def drain(side: ModuleType, path: Path, synchronous: str, processes: int, jobs: int) -> float:
    """Return the jobs per second that some processes run."""
    _fill(side, path, jobs)
    spawn = multiprocessing.get_context("spawn")
    barrier, results, name = spawn.Barrier(processes), spawn.Queue(), side.__name__.rpartition(".")[2]
    workers = [spawn.Process(target=_drain, args=(name, path, synchronous, barrier, results)) for _ in range(processes)]
    for worker in workers:
        worker.start()
    found = [results.get(timeout=300) for _ in workers]
    for worker in workers:
        worker.join()
    assert sum(done for _, done, _ in found) == jobs
    return jobs / (max(end for _, _, end in found) - min(began for began, _, _ in found))


def _fill(side: ModuleType, path: Path, jobs: int) -> None:
    connection = side.connect(path, "OFF")
    side.enqueue(connection, jobs, 1000)
    _close(connection)


def _close(connection: Any) -> None:
    (connection.dispose if hasattr(connection, "dispose") else connection.close)()


def enqueue(side: ModuleType, path: Path, synchronous: str, batch: int, jobs: int) -> float:
    """Return the jobs per second that one thread inserts."""
    connection = side.connect(path, synchronous)
    side.enqueue(connection, 1, 1)
    began = time.monotonic()
    side.enqueue(connection, jobs, batch)
    taken = time.monotonic() - began
    _close(connection)
    return jobs / taken


def latency(side: ModuleType, path: Path, synchronous: str, jobs: int) -> float:
    """Return the median of the milliseconds from the insert of a job to its handler, in one process."""
    begun, times, ready = threading.Event(), list[float](), threading.Event()

    def note() -> None:
        times.append(time.monotonic())
        begun.set()

    with contextlib.ExitStack() as stack:
        if side is raw:
            thread = threading.Thread(target=raw.serve, args=(path, synchronous, ready, note, jobs))
            thread.start()
            stack.callback(thread.join)
        else:
            stack.enter_context(library.serving(path, synchronous, note))
        committed = _commit_one_by_one(side, path, synchronous, jobs, ready, begun)
    return 1000 * statistics.median(end - began for began, end in zip(committed, times, strict=True))


def _commit_one_by_one(
    side: ModuleType, path: Path, synchronous: str, jobs: int, ready: threading.Event, begun: threading.Event
) -> list[float]:
    time.sleep(0.5)
    connection, committed = side.connect(path, synchronous), list[float]()
    for _ in range(jobs):
        # Before the commit, in whose course the worker may begin.
        committed.append(time.monotonic())
        side.enqueue(connection, 1, 1)
        ready.set()
        assert begun.wait(30), "the job did not begin"
        begun.clear()
        # The settlement of this job is not a part of the next one's latency.
        time.sleep(0.02)
    _close(connection)
    return committed


def cases(jobs: int) -> Iterator[tuple[str, Callable[..., float]]]:
    """Return what is measured."""
    for processes in (1, 2, 4):
        name = f"drain, {processes} process{'es' * (processes > 1)}, jobs/s"
        yield name, lambda side, path, mode, processes=processes: drain(side, path, mode, processes, jobs)
    for batch in (1, 100):
        name = f"enqueue, {batch} job{'s' * (batch > 1)} a transaction, jobs/s"
        yield (
            name,
            lambda side, path, mode, batch=batch: enqueue(side, path, mode, batch, jobs // (10 if batch == 1 else 1)),
        )
    yield (
        "insert to handler in one process, median, ms",
        lambda side, path, mode: latency(side, path, mode, min(100, jobs // 10)),
    )


def measure(case: Callable[..., float], mode: str, repeat: int) -> list[float]:
    """Return the medians of both sides, measured in turns."""
    found: dict[ModuleType, list[float]] = {side: [] for side in SIDES}
    for _ in range(repeat):
        for side in SIDES:
            with tempfile.TemporaryDirectory() as directory:
                path = Path(directory) / "jobs.db"
                side.create(path)
                found[side].append(case(side, path, mode))
    return [statistics.median(found[side]) for side in SIDES]
