"""List the files, and compare the table with them after the run.

This module shares no code with the handler, as a common mistake would go unnoticed.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, NamedTuple

from sqlalchemy import select
from sqlalchemy.orm import Session

from sqlaqueue import texts
from sqlaqueue.demo.models import FileJob


class Content(NamedTuple):
    """The result of reading a file."""

    sha256: str
    size: int
    lines: int


@dataclass
class Findings:
    """The result of the check."""

    completed: int = 0
    unreadable: list[bytes] = field(default_factory=list)
    """Files that neither a worker nor the check could read; their jobs failed, as they should."""
    appeared: int = 0
    """The number of files created after the jobs were enqueued."""
    rerun: int = 0
    """The number of jobs of the killed worker that another worker has run."""
    problems: list[str] = field(default_factory=list)


def regular_files(root: Path, exclude: Collection[str] = ()) -> tuple[list[bytes], list[bytes]]:
    """Return the paths of all regular files below ``root``, and the paths that this process may not read.

    Links are not followed.

    :param exclude: names of directories to skip.
    """
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


def content(path: bytes) -> Content | None:
    """Read a file; return None if that fails."""
    try:
        with Path(os.fsdecode(path)).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            size = file.tell()
            file.seek(0)
            return Content(digest, size, sum(line.endswith(b"\n") for line in _pieces(file)))
    except OSError:
        return None


def _pieces(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of a file; very long lines in pieces."""
    while piece := file.readline(1 << 20):
        yield piece


def check(
    session: Session,
    model: type[FileJob],
    enqueued: Sequence[bytes],
    present: Collection[bytes],
    *,
    killed: int | None = None,
    held: Collection[int] = (),
) -> Findings:
    """Compare the table with the files.

    :param enqueued: the files for which jobs were enqueued.
    :param present: the files that exist now.
    :param killed: the process ID of the killed worker.
    :param held: the keys of the jobs that it held.
    """
    findings = Findings(appeared=len(set(present) - set(enqueued)))
    columns = (model.id, model.path, model.status, model.sha256, model.size, model.lines, model.runs, model.read_by)
    jobs = session.execute(select(*columns, model.last_error).order_by(model.id)).all()
    number = Counter(job.path for job in jobs)
    for path in enqueued:
        if number[path] != 1:
            findings.problems.append(f"{printable(path)}: {number[path]} jobs in the table instead of one")
    for path in number.keys() - set(enqueued):
        findings.problems.append(f"{printable(path)}: a job in the table that was not enqueued")
    for job in jobs:
        found = Content(job.sha256, job.size, job.lines) if job.sha256 is not None else None
        problem = _problem(job.status, job.runs, found, content(job.path))
        if job.path not in present:
            problem = f"deleted during the demo; its job is {job.status}"
        if problem:
            findings.problems.append(
                f"{printable(job.path)}: {problem}{f' ({job.last_error})' if job.last_error else ''}"
            )
        elif job.status == "completed":
            findings.completed += 1
        else:
            findings.unreadable.append(job.path)
        if job.id in held:
            if job.status not in {"completed", "failed"} or job.read_by == killed:
                findings.problems.append(f"{printable(job.path)}: held by the killed worker, not run by another")
            else:
                findings.rerun += 1
    return findings


def _problem(status: str, runs: int, found: Content | None, expected: Content | None) -> str | None:
    """Return the problem of one job, None if there is none."""
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


def printable(path: bytes) -> str:
    """Return a path with unprintable characters escaped."""
    return texts.printable(os.fsdecode(path))
