"""The demo's own look at the files, with nothing from the queue: what there is to do, and whether it was done.

Nothing here shares code with the handler, or a mistake would agree with itself.
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

from sqlaqueue.demo.models import FileJob


class Content(NamedTuple):
    """What a file holds."""

    sha256: str
    size: int
    lines: int


@dataclass
class Findings:
    """What the check found."""

    completed: int = 0
    unreadable: list[bytes] = field(default_factory=list)
    """Files that neither a worker nor the check could read: their jobs failed, as they should."""
    appeared: int = 0
    """How many files came only after the jobs were enqueued."""
    rerun: int = 0
    """How many jobs of the killed worker were run by another."""
    problems: list[str] = field(default_factory=list)


def regular_files(root: Path, leave_out: Collection[str] = ()) -> tuple[list[bytes], list[bytes]]:
    """Return the path of every regular file below ``root``, and the paths that are closed to this process.

    Links are not followed.

    :param leave_out: names of directories that are passed over.
    """
    skipped = {os.fsencode(name) for name in leave_out}
    files: list[bytes] = []
    closed: list[bytes] = []

    def note(error: OSError) -> None:
        if error.errno != errno.ENOENT:  # else it is gone since its directory was read
            closed.append(os.fsencode(error.filename))

    for directory, subdirectories, names in os.walk(os.fsencode(root), onerror=note):
        subdirectories[:] = sorted(name for name in subdirectories if name not in skipped)
        for name in sorted(names):
            path = os.path.join(directory, name)  # noqa: PTH118 - a Path cannot be made of bytes
            try:
                if stat.S_ISREG(os.lstat(path).st_mode):
                    files.append(path)
            except OSError as error:
                note(error)
    return files, closed


def content(path: bytes) -> Content | None:
    """Return what a file holds, None when it cannot be read."""
    try:
        with Path(os.fsdecode(path)).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            size = file.tell()
            file.seek(0)
            return Content(digest, size, sum(line.endswith(b"\n") for line in _pieces(file)))
    except OSError:
        return None


def _pieces(file: BinaryIO) -> Iterator[bytes]:
    """Yield a file line by line, lines that are very long in pieces."""
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

    :param enqueued: the files for which there has to be a job.
    :param present: the files that there are now.
    :param killed: the process id of the worker that was killed.
    :param held: the keys of the jobs that it held.
    """
    findings = Findings(appeared=len(set(present) - set(enqueued)))
    columns = (model.id, model.path, model.status, model.sha256, model.size, model.lines, model.runs, model.read_by)
    jobs = session.execute(select(*columns, model.last_error).order_by(model.id)).all()
    number = Counter(job.path for job in jobs)
    for path in enqueued:
        if number[path] != 1:
            findings.problems.append(f"{show(path)}: {number[path]} jobs in the table instead of one")
    for path in number.keys() - set(enqueued):
        findings.problems.append(f"{show(path)}: a job in the table that nobody enqueued")
    for job in jobs:
        found = Content(job.sha256, job.size, job.lines) if job.sha256 is not None else None
        problem = _problem(job.status, job.runs, found, content(job.path))
        if job.path not in present:
            problem = f"removed while the demo ran; its job is {job.status}"
        if problem:
            findings.problems.append(f"{show(job.path)}: {problem}{f' ({job.last_error})' if job.last_error else ''}")
        elif job.status == "completed":
            findings.completed += 1
        else:
            findings.unreadable.append(job.path)
        if job.id in held:
            if job.status not in {"completed", "failed"} or job.read_by == killed:
                findings.problems.append(f"{show(job.path)}: held by the killed worker, and run by no other")
            else:
                findings.rerun += 1
    return findings


def _problem(status: str, runs: int, found: Content | None, expected: Content | None) -> str | None:
    """Return what is wrong with one job, None when it is as it has to be."""
    if status == "failed" and runs == 0:
        return None if expected is None else "its job failed, though it can be read"
    if status != "completed":
        return f"its job is {status}, and not completed"
    if runs != 1:
        return f"read and stored {runs} times instead of once"
    if expected is None:
        return "read by a worker, and now it cannot be read: it was closed while the demo ran"
    if found != expected:
        return f"the table says {found}, but now it is {expected}"
    return None


def show(path: bytes) -> str:
    """Return a path as any terminal can show it."""
    name = os.fsdecode(path)
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in name)
