"""The show: enqueue a job for every file, start workers, kill one of them in the middle, check what came of it."""

from __future__ import annotations

import contextlib
import os
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue.demo.check import Findings, check, regular_files, show
from sqlaqueue.demo.database import demo_database
from sqlaqueue.demo.display import Display
from sqlaqueue.demo.errors import CannotRunError
from sqlaqueue.demo.models import MODELS, FileJob
from sqlaqueue.demo.processes import WorkerProcess
from sqlaqueue.demo.report import report
from sqlaqueue.demo.worker import PAUSE_AT, URL

_TICK = 0.05
"""Seconds between two looks at the workers and the table."""

_STANDSTILL = 60.0
"""Seconds without any change after which the show is given up."""


@dataclass(frozen=True)
class Demo:
    """What is the same for every strategy."""

    engine: sa.Engine
    display: Display
    files: Sequence[bytes]
    list_files: Callable[[], tuple[list[bytes], list[bytes]]]
    workers: int
    batch: int


def run(
    strategies: Sequence[str], path: Path | None, url: str | None, *, workers: int, batch: int, display: Display
) -> bool:
    """Run the demo with each strategy in turn and print what was found; return whether all of it held.

    :param path: the directory to read; the interpreter's standard library by default.
    :param url: the database to use; an embedded one by default.
    :raises CannotRunError: when the demo cannot begin.
    """

    def list_files() -> tuple[list[bytes], list[bytes]]:
        if path is not None:
            return regular_files(path)
        # The interpreter itself writes to the one while the demo runs, and the other is not its library.
        return regular_files(Path(sysconfig.get_path("stdlib")), leave_out=("__pycache__", "site-packages"))

    files, unreadable = list_files()
    if unreadable:
        display.say("left out, since they cannot be read:")
        display.say_list([show(directory) for directory in unreadable])
    if not files:
        msg = f"there is no file to read below {path}; name another directory with --path"
        raise CannotRunError(msg)
    with demo_database(url) as engine:
        demo = Demo(engine, display, files, list_files, workers, batch)
        held = [_perform(demo, strategy) for strategy in strategies]
    return all(held)


def _perform(demo: Demo, strategy: str) -> bool:
    model, display = MODELS[strategy], demo.display
    display.say(f"{strategy}: {len(demo.files)} files, {demo.workers} worker processes", "bold")
    with _workers(demo, strategy) as workers, Session(demo.engine) as session:
        began = _enqueue(session, model, demo.files)
        with display.progress(strategy, len(demo.files)):
            trouble = _watch(session, model, workers, display, len(demo.files))
        for worker in workers:
            if not worker.killed and (code := worker.stop()) != 0:
                trouble.append(f"worker {worker.number} ended with exit code {code}")
        findings = _check(session, model, demo, workers)
        findings.problems = trouble + findings.problems
        report(display, session, model, findings, began=began, workers=workers)
    return not findings.problems


@contextlib.contextmanager
def _workers(demo: Demo, strategy: str) -> Iterator[list[WorkerProcess]]:
    """Start the worker processes, and see to it that none is left."""
    environment = {
        **os.environ,
        URL: demo.engine.url.render_as_string(hide_password=False),
        PAUSE_AT: os.fsdecode(demo.files[len(demo.files) // 2]),
    }
    workers: list[WorkerProcess] = []
    try:
        numbers = range(1, demo.workers + 1)
        workers.extend(WorkerProcess(number, strategy, demo.batch, environment) for number in numbers)
        # The rate is to be that of the queue, and not of processes that start.
        while not all(worker.ready or not worker.lives for worker in workers):
            time.sleep(_TICK)
        yield workers
    finally:
        for worker in workers:
            if worker.lives:
                worker.kill()


def _enqueue(session: Session, model: type[FileJob], files: Sequence[bytes]) -> datetime:
    """Enqueue a job for each file, in one transaction; return the database's time."""
    session.add_all(model(path=file) for file in files)
    session.commit()
    now: datetime = session.execute(sa.select(sa.func.clock_timestamp())).scalar_one()
    return now


def _watch(
    session: Session, model: type[FileJob], workers: Sequence[WorkerProcess], display: Display, total: int
) -> list[str]:
    """Wait until all jobs are finished; kill the first worker that comes to the job in the middle.

    :return: what went wrong.
    """
    last, changed = (0, 0), time.monotonic()
    while True:
        looked = time.monotonic()
        done, failed = _finished(session, model)
        display.update(done, failed, sum(len(worker.holds) for worker in workers if worker.lives))
        if done + failed >= total:
            return []
        for worker in workers:
            if worker.paused and not any(other.killed for other in workers):
                worker.kill()
                display.say(
                    f"  worker {worker.number} (process {worker.pid}) was killed with SIGKILL while it held "
                    f"{len(worker.holds)} jobs"
                )
            elif worker.paused:
                worker.go_on()
        now = time.monotonic()
        if (done, failed) != last:
            last, changed = (done, failed), now
        if not any(worker.lives for worker in workers):
            return ["no worker is left"]
        if now - changed > _STANDSTILL and not any(worker.holds for worker in workers if worker.lives):
            return [f"nothing has happened for {_STANDSTILL:.0f} seconds"]
        # Counting a large table takes its time, which the workers should have.
        time.sleep(max(_TICK, 3 * (now - looked)))


def _finished(session: Session, model: type[FileJob]) -> tuple[int, int]:
    """Return how many jobs are completed, and how many have ended otherwise."""
    count = sa.func.count()
    completed, failed = session.execute(
        sa.select(count.filter(model.status == "completed"), count.filter(model.status.in_(["failed", "cancelled"])))
    ).one()
    # An open transaction would keep the dead rows of the workers from being cleaned up.
    session.rollback()
    return completed, failed


def _check(session: Session, model: type[FileJob], demo: Demo, workers: Sequence[WorkerProcess]) -> Findings:
    present = frozenset(demo.list_files()[0])
    for victim in workers:
        if victim.killed:
            return check(session, model, demo.files, present, killed=victim.pid, held=victim.holds)
    findings = check(session, model, demo.files, present)
    findings.problems.append("no worker was killed")
    return findings
