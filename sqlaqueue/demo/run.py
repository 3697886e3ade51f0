"""Enqueue a job for every file, start workers, kill one of them in the middle, and check the result."""

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

from sqlaqueue.demo.check import Findings, check, printable, regular_files
from sqlaqueue.demo.database import demo_database
from sqlaqueue.demo.display import Display
from sqlaqueue.demo.errors import CannotRunError
from sqlaqueue.demo.models import MODELS, FileJob
from sqlaqueue.demo.processes import WorkerProcess
from sqlaqueue.demo.report import report
from sqlaqueue.demo.worker import PAUSE_AT, URL

_CHECK_INTERVAL = 0.05
"""Minimum seconds between two checks of the workers and the table."""

_STALLED_AFTER = 60.0
"""Seconds without any progress after which the demo fails."""


@dataclass(frozen=True)
class Demo:
    """The arguments that are the same for every strategy."""

    engine: sa.Engine
    display: Display
    files: Sequence[bytes]
    list_files: Callable[[], tuple[list[bytes], list[bytes]]]
    workers: int
    batch: int


def run(
    strategies: Sequence[str],
    path: Path | None,
    url: str | None,
    *,
    workers: int,
    batch: int,
    display: Display,
    sqlite: bool = False,
) -> bool:
    """Run the demo with each strategy in turn and print the results; return whether all passed.

    :param path: the directory to read; None for the interpreter's standard library.
    :param url: the database; None for an embedded server.
    :param sqlite: whether to use a file of SQLite instead.
    :raises CannotRunError: if the demo cannot start.
    """

    def list_files() -> tuple[list[bytes], list[bytes]]:
        if path is not None:
            return regular_files(path)
        # The interpreter writes to __pycache__ during the demo, and site-packages is not its library.
        return regular_files(Path(sysconfig.get_path("stdlib")), exclude=("__pycache__", "site-packages"))

    files, unreadable = list_files()
    if unreadable:
        display.print("skipped, as they cannot be read:")
        display.print_list([printable(directory) for directory in unreadable])
    if not files:
        msg = f"there are no files below {path}; choose another directory with --path"
        raise CannotRunError(msg)
    with demo_database(url, sqlite=sqlite) as engine:
        demo = Demo(engine, display, files, list_files, workers, batch)
        passed = [_run_strategy(demo, strategy) for strategy in strategies]
    return all(passed)


def _run_strategy(demo: Demo, strategy: str) -> bool:
    model, display = MODELS[strategy], demo.display
    display.print(f"{strategy}: {len(demo.files)} files, {demo.workers} worker processes", "bold")
    with _workers(demo, strategy) as workers, Session(demo.engine) as session:
        started_at = _enqueue(session, model, demo.files)
        with display.progress(strategy, len(demo.files)):
            problems = _watch(session, model, workers, display, len(demo.files))
        for worker in workers:
            if not worker.killed and (code := worker.stop()) != 0:
                problems.append(f"worker {worker.number} ended with exit code {code}")
        findings = _check(session, model, demo, workers)
        findings.problems = problems + findings.problems
        report(display, session, model, findings, started_at=started_at, workers=workers)
    return not findings.problems


@contextlib.contextmanager
def _workers(demo: Demo, strategy: str) -> Iterator[list[WorkerProcess]]:
    """Start the worker processes, and kill those that are left at the end."""
    environment = {
        **os.environ,
        URL: demo.engine.url.render_as_string(hide_password=False),
        PAUSE_AT: os.fsdecode(demo.files[len(demo.files) // 2]),
    }
    workers: list[WorkerProcess] = []
    try:
        numbers = range(1, demo.workers + 1)
        workers.extend(WorkerProcess(number, strategy, demo.batch, environment) for number in numbers)
        # The measured rate must not include the start of the processes.
        while not all(worker.ready or not worker.is_running for worker in workers):
            time.sleep(_CHECK_INTERVAL)
        yield workers
    finally:
        for worker in workers:
            if worker.is_running:
                worker.kill()


def _enqueue(session: Session, model: type[FileJob], files: Sequence[bytes]) -> datetime:
    """Enqueue a job for each file, in one transaction; return the time by the database's clock."""
    session.add_all(model(path=file) for file in files)
    session.commit()
    now: datetime = session.execute(sa.select(sa.func.clock_timestamp(type_=sa.DateTime(timezone=True)))).scalar_one()
    return now


def _watch(
    session: Session, model: type[FileJob], workers: Sequence[WorkerProcess], display: Display, total: int
) -> list[str]:
    """Wait until all jobs are finished; kill the first worker that pauses at the job in the middle.

    :return: the problems.
    """
    last, changed = (0, 0), time.monotonic()
    while True:
        checked = time.monotonic()
        done, failed = _finished(session, model)
        display.update(done, failed, sum(len(worker.holds) for worker in workers if worker.is_running))
        if done + failed >= total:
            return []
        for worker in workers:
            if worker.paused and not any(other.killed for other in workers):
                worker.kill()
                display.print(
                    f"  worker {worker.number} (process {worker.pid}) was killed with SIGKILL while it held "
                    f"{len(worker.holds)} jobs"
                )
            elif worker.paused:
                worker.resume()
        now = time.monotonic()
        if (done, failed) != last:
            last, changed = (done, failed), now
        if not any(worker.is_running for worker in workers):
            return ["no worker is left"]
        if now - changed > _STALLED_AFTER and not any(worker.holds for worker in workers if worker.is_running):
            return [f"no progress for {_STALLED_AFTER:.0f} seconds"]
        # Counting the jobs of a large table must not slow the workers down.
        time.sleep(max(_CHECK_INTERVAL, 3 * (now - checked)))


def _finished(session: Session, model: type[FileJob]) -> tuple[int, int]:
    """Return the number of completed jobs, and that of failed and cancelled ones."""
    count = sa.func.count()
    completed, failed = session.execute(
        sa.select(count.filter(model.status == "completed"), count.filter(model.status.in_(["failed", "cancelled"])))
    ).one()
    # An open transaction would keep VACUUM from removing dead rows.
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
