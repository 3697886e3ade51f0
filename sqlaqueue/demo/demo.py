"""``sqlaqueue demo``: a job for every file of a directory, several worker processes, one of which is killed."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
import subprocess
import sys
import sysconfig
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import sqlalchemy as sa
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.text import Text
from sqlalchemy import select
from sqlalchemy.orm import Session

from sqlaqueue.demo.models import MODELS, PAUSE_AT, URL, CannotRunError, FileJob, demo_database
from sqlaqueue.sql.portable import filtered, ticking_clock
from sqlaqueue.texts import printable


class Content(NamedTuple):
    sha256: str
    size: int
    lines: int


@dataclass
class Findings:
    completed: int = 0
    unreadable: list[bytes] = field(default_factory=list)
    """Files that neither a worker nor the check could read; their jobs failed, as they should."""
    appeared: int = 0
    """The number of files created after the jobs were enqueued."""
    rerun: int = 0
    """The number of jobs of the killed worker that another worker has run."""
    problems: list[str] = field(default_factory=list)


def regular_files(root: Path, exclude: Collection[str] = ()) -> tuple[list[bytes], list[bytes]]:
    """Return the paths of all regular files below ``root``, without links, and those that may not be read."""
    excluded = {os.fsencode(name) for name in exclude}
    files: list[bytes] = []
    closed: list[bytes] = []

    def on_error(error: OSError) -> None:
        if error.errno != errno.ENOENT:  # else it was deleted after its directory was read
            closed.append(os.fsencode(error.filename))

    for directory, subdirectories, names in os.walk(os.fsencode(root), onerror=on_error):
        subdirectories[:] = sorted(name for name in subdirectories if name not in excluded)
        for name in sorted(names):
            path = os.path.join(directory, name)  # noqa: PTH118 - Path does not accept bytes
            try:
                if stat.S_ISREG(os.lstat(path).st_mode):
                    files.append(path)
            except OSError as error:
                on_error(error)
    return files, closed


# No code is shared with the handler, as a common mistake would go unnoticed.
def content(path: bytes) -> Content | None:
    try:
        with Path(os.fsdecode(path)).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            size = file.tell()
            file.seek(0)
            # Very long lines in pieces.
            pieces = iter(lambda: file.readline(1 << 20), b"")
            return Content(digest, size, sum(piece.endswith(b"\n") for piece in pieces))
    except OSError:
        return None


def check(
    session: Session,
    model: type[FileJob],
    enqueued: Sequence[bytes],
    present: Collection[bytes],
    *,
    killed: int | None = None,
    held: Collection[int] = (),
) -> Findings:
    """Compare the table with the files, without code of the handler: a common mistake would go unnoticed.

    ``held`` are the keys of the jobs that the ``killed`` worker held.
    """
    findings = Findings(appeared=len(set(present) - set(enqueued)))
    columns = (model.id, model.path, model.status, model.sha256, model.size, model.lines, model.runs, model.read_by)
    jobs = session.execute(select(*columns, model.last_error).order_by(model.id)).all()
    number = Counter(job.path for job in jobs)
    for path in enqueued:
        if number[path] != 1:
            findings.problems.append(f"{printable_path(path)}: {number[path]} jobs in the table instead of one")
    for path in number.keys() - set(enqueued):
        findings.problems.append(f"{printable_path(path)}: a job in the table that was not enqueued")
    for job in jobs:
        found = Content(job.sha256, job.size, job.lines) if job.sha256 is not None else None
        problem = _problem(job.status, job.runs, found, content(job.path))
        if job.path not in present:
            problem = f"deleted during the demo; its job is {job.status}"
        if problem:
            findings.problems.append(
                f"{printable_path(job.path)}: {problem}{f' ({job.last_error})' if job.last_error else ''}"
            )
        elif job.status == "completed":
            findings.completed += 1
        else:
            findings.unreadable.append(job.path)
        if job.id in held:
            if job.status not in {"completed", "failed"} or job.read_by == killed:
                findings.problems.append(f"{printable_path(job.path)}: held by the killed worker, not run by another")
            else:
                findings.rerun += 1
    return findings


def _problem(status: str, runs: int, found: Content | None, expected: Content | None) -> str | None:
    if status == "failed" and runs == 0:
        return None if expected is None else "its job failed, but the file can be read"
    if status != "completed":
        return f"its job is {status} instead of completed"
    if runs != 1:
        return f"read and stored {runs} times instead of once"
    if expected is None:
        return "read by a worker, but not readable now; its permissions have changed"
    if found != expected:
        return f"the table contains {found}, the file {expected}"
    return None


def printable_path(path: bytes) -> str:
    return printable(os.fsdecode(path))


_RATE_WINDOW = 2.0
"""Seconds over which the rate is measured."""

_LINE_INTERVAL = 1.0
"""Seconds between two lines of progress without a terminal."""

_MAX_LISTED = 20


class Display:
    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = console.is_terminal and not console.is_dumb_terminal
        self._progress: Progress | None = None
        self._task = TaskID(0)
        self._total = 0
        self._samples: deque[tuple[float, int]] = deque()
        self._printed_at = 0.0

    def print(self, text: str = "", style: str = "") -> None:
        """Print a line, above the progress bar if there is one."""
        console = self._console if self._progress is None else self._progress.console
        # Without markup, as a file name may look like it; without line breaks, so that lines can be searched.
        console.print(Text("\n".join(map(printable, text.split("\n"))), style), soft_wrap=True)

    def print_list(self, lines: Sequence[str]) -> None:
        for line in lines[:_MAX_LISTED]:
            self.print(f"    {line}")
        if len(lines) > _MAX_LISTED:
            self.print(f"    and {len(lines) - _MAX_LISTED} more")

    @contextlib.contextmanager
    def progress(self, title: str, total: int) -> Iterator[None]:
        self._total, self._printed_at = total, time.monotonic()
        self._samples.clear()
        if not self._live:
            yield
            return
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[counts]}"))
        with Progress(*columns, console=self._console) as progress:
            self._task = progress.add_task(title, total=total, counts="")
            self._progress = progress
            try:
                yield
            finally:
                self._progress = None

    def update(self, done: int, failed: int, running: int) -> None:
        now = time.monotonic()
        pending = max(0, self._total - done - failed - running)
        rate = self._rate(now, done + failed)
        counts = f"{pending} pending, {running} running, {done} done, {failed} failed, {rate:.0f} jobs/s"
        if self._progress is not None:
            self._progress.update(self._task, completed=done + failed, counts=counts)
        elif now - self._printed_at >= _LINE_INTERVAL:
            self._printed_at = now
            self.print(f"  {counts}")

    def _rate(self, now: float, ended: int) -> float:
        self._samples.append((now, ended))
        while now - self._samples[0][0] > _RATE_WINDOW and len(self._samples) > 2:  # noqa: PLR2004 - a rate needs two samples
            self._samples.popleft()
        (start, before), (end, after) = self._samples[0], self._samples[-1]
        return (after - before) / (end - start) if end > start else 0.0


class DemoWorker:
    def __init__(self, number: int, strategy: str, batch: int, environment: Mapping[str, str]) -> None:
        self.number = number
        self.holds: set[int] = set()
        """The keys of the jobs that it has claimed and not finished."""
        self.rescued: list[int] = []
        """The keys of the jobs that it rescued from a dead worker."""
        self.ready = self.paused = self.killed = False
        self.stderr_lines: list[str] = []
        """Its output on standard error, after it has ended."""
        # -P, or a file in the working directory could shadow a module of the library.
        command = [sys.executable, "-P", "-m", "sqlaqueue.demo.models", strategy, str(batch)]
        self._process = subprocess.Popen(  # noqa: S603 - a module of this package
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # Ctrl-C at the terminal must reach the demo only, which then stops its workers.
            start_new_session=True,
        )
        self.pid = self._process.pid
        stdin, stdout, stderr = self._process.stdin, self._process.stdout, self._process.stderr
        assert stdin is not None and stdout is not None and stderr is not None  # noqa: S101, PT018 - they are pipes
        self._stdin, self._stdout, self._stderr = stdin, stdout, stderr
        # Errors are read as they come, or a worker that writes many would wait for the pipe. A temporary file would
        # do as well, but stays behind when the demo is killed while it is made.
        self._readers = [threading.Thread(target=read, daemon=True) for read in (self._read_events, self._read_errors)]
        for reader in self._readers:
            reader.start()

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def _read_events(self) -> None:
        for line in self._stdout:
            match line.decode().split():
                case ["ready"]:
                    self.ready = True
                case ["paused"]:
                    self.paused = True
                case ["claimed", key]:
                    self.holds.add(int(key))
                case ["rescued", key]:
                    self.rescued.append(int(key))
                case [_, key]:
                    self.holds.discard(int(key))

    def _read_errors(self) -> None:
        self.stderr_lines = self._stderr.read().decode(errors="replace").splitlines()

    def resume(self) -> None:
        self.paused = False
        self._stdin.write(b"resume\n")
        self._stdin.flush()

    def kill(self) -> None:
        """Kill it by SIGKILL, and read its remaining events."""
        self._process.kill()
        self._end()
        self.killed, self.paused = True, False

    def stop(self) -> int:
        self._process.terminate()
        return self._end()

    def _end(self) -> int:
        code = self._process.wait()
        for reader in self._readers:
            reader.join()
        for file in (self._stdin, self._stdout, self._stderr):
            file.close()
        return code


_MAX_STDERR_LINES = 20


def report(
    display: Display,
    session: Session,
    model: type[FileJob],
    findings: Findings,
    *,
    started_at: datetime,
    workers: Sequence[DemoWorker],
) -> None:
    if not findings.problems:
        display.print(
            f"  {findings.completed} files: every one stored exactly once, none lost; "
            "SHA-256, size and lines as this program finds them"
        )
    if findings.unreadable:
        display.print(f"  {len(findings.unreadable)} files that cannot be read; their jobs failed, as they should:")
        display.print_list([printable_path(path) for path in findings.unreadable])
    if findings.appeared:
        display.print(f"  {findings.appeared} files created after the jobs were enqueued")
    leased = "lease_expires_at" in model.__table__.c
    held = {key for worker in workers if worker.killed for key in worker.holds}
    if held:
        rescued = {key for worker in workers for key in worker.rescued}
        ending = (
            f"{len(rescued)} rescued after their leases expired" if leased else "released by the database immediately"
        )
        display.print(
            f"  {len(held)} jobs were held by the killed worker: {ending}, {findings.rerun} run by other workers"
        )
    display.print(_rate(session, model, started_at, held if leased else set()))
    if findings.problems:
        display.print(f"  {len(findings.problems)} problems:", "bold red")
        display.print_list(findings.problems)
        for worker in workers:
            if worker.stderr_lines:
                display.print(f"  worker {worker.number} (process {worker.pid}) printed:")
                display.print_list(worker.stderr_lines[-_MAX_STDERR_LINES:])


def _rate(session: Session, model: type[FileJob], started_at: datetime, rescued: set[int]) -> str:
    count, last = sa.func.count(model.finished_at), sa.func.max(model.finished_at)
    number, until = session.execute(sa.select(count, last).where(model.id.not_in(rescued))).one()
    end = session.execute(sa.select(last)).scalar_one()
    text = "" if end is None else f", {(end - started_at).total_seconds():.1f} seconds in total"
    if until is not None:
        rate = number / max((until - started_at).total_seconds(), 0.001)
        text = f", {rate:.0f} jobs per second{' without these' if rescued else ''}{text}"
    return f"  {number + len(rescued)} jobs{text}"


# -- run ---------------------------------------------------------------------------------------------------------------

_CHECK_INTERVAL = 0.05
"""Minimum seconds between two checks of the workers and the table."""

_STALLED_AFTER = 60.0
"""Seconds without any progress after which the demo fails."""


@dataclass(frozen=True)
class Demo:
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
    """Run the demo with each strategy in turn and print the results; return whether all passed."""

    def list_files() -> tuple[list[bytes], list[bytes]]:
        if path is not None:
            return regular_files(path)
        # The interpreter writes to __pycache__ during the demo, and site-packages is not its library.
        return regular_files(Path(sysconfig.get_path("stdlib")), exclude=("__pycache__", "site-packages"))

    files, unreadable = list_files()
    if unreadable:
        display.print("skipped, as they cannot be read:")
        display.print_list([printable_path(directory) for directory in unreadable])
    if not files:
        raise CannotRunError(f"there are no files below {path}; choose another directory with --path")
    with demo_database(url, sqlite=sqlite) as engine:
        demo = Demo(engine, display, files, list_files, workers, batch)
        passed = [_run_strategy(demo, strategy) for strategy in strategies]
    return all(passed)


def _run_strategy(demo: Demo, strategy: str) -> bool:
    model, display = MODELS[strategy], demo.display
    display.print(f"{strategy}: {len(demo.files)} files, {demo.workers} worker processes", "bold")
    with _workers(demo, strategy) as workers, Session(demo.engine) as session:
        session.add_all(model(path=file) for file in demo.files)
        session.commit()
        now = sa.select(ticking_clock())
        started_at: datetime = session.execute(now).scalar_one()
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
def _workers(demo: Demo, strategy: str) -> Iterator[list[DemoWorker]]:
    environment = {
        **os.environ,
        URL: demo.engine.url.render_as_string(hide_password=False),
        PAUSE_AT: os.fsdecode(demo.files[len(demo.files) // 2]),
    }
    workers: list[DemoWorker] = []
    try:
        numbers = range(1, demo.workers + 1)
        workers.extend(DemoWorker(number, strategy, demo.batch, environment) for number in numbers)
        # The measured rate must not include the start of the processes.
        while not all(worker.ready or not worker.is_running for worker in workers):
            time.sleep(_CHECK_INTERVAL)
        yield workers
    finally:
        for worker in workers:
            if worker.is_running:
                worker.kill()


def _watch(
    session: Session, model: type[FileJob], workers: Sequence[DemoWorker], display: Display, total: int
) -> list[str]:
    """Wait for the end of all jobs; kill the first worker that pauses at the job in the middle; return the problems."""
    last, changed = (0, 0), time.monotonic()
    while True:
        checked = time.monotonic()
        count = sa.func.count()
        done, failed = session.execute(
            sa.select(
                filtered(count, model.status == "completed"), filtered(count, model.status.in_(["failed", "cancelled"]))
            )
        ).one()
        # An open transaction would keep VACUUM from removing dead rows.
        session.rollback()
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


def _check(session: Session, model: type[FileJob], demo: Demo, workers: Sequence[DemoWorker]) -> Findings:
    present = frozenset(demo.list_files()[0])
    for victim in workers:
        if victim.killed:
            return check(session, model, demo.files, present, killed=victim.pid, held=victim.holds)
    findings = check(session, model, demo.files, present)
    findings.problems.append("no worker was killed")
    return findings
