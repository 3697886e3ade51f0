"""What processes did, in their own words: append-only files beside the database, one a process.

A line is one write(), so it is whole, and it survives the SIGKILL that comes right after it. Nothing is synced to the
disk: it is processes that die in these tests, not the machine.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Line:
    """One thing that one process did.

    Of a producer, about one job each: ``enqueueing`` before its commit, with what is expected of the job, then
    ``enqueued`` or ``rolled back``; neither when it is not known. Of a worker: ``ready``, ``stopped``, ``idle`` when it
    is so for long, the names of the Consumer's events, and of its handlers ``start``, ``end`` and ``raise``, each with
    the id of its ``run``, and ``waits`` before the gate. Of the test: ``fault`` for each that it causes, ``died`` for
    each worker that a job has killed, ``seen`` for each change that it sees in the tables, ``requeued`` for each job
    that it makes wait again by plain SQL, ``rescued``.
    """

    at: int
    """Nanoseconds on the machine's monotonic clock, which is the same for all processes."""
    process: str
    what: str
    key: int | None = None
    more: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        about = "" if self.key is None else f" {self.key}"
        more = "".join(f" {name}={value}" for name, value in self.more.items())
        return f"{self.at / 1e9:.4f} {self.process}: {self.what}{about}{more}"


class Log:
    """The file of one process; its threads may share it."""

    def __init__(self, directory: Path, process: str) -> None:
        self._process = process
        self._file = os.open(directory / f"{process}.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def write(self, what: str, key: int | None = None, **more: Any) -> None:
        """Append a line."""
        line = json.dumps([time.monotonic_ns(), self._process, what, key, more])
        os.write(self._file, f"{line}\n".encode())

    def close(self) -> None:
        os.close(self._file)


class Reader:
    """Reads the files of a directory as they grow."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._read: dict[Path, int] = {}
        self._lines: list[Line] = []

    def lines(self) -> list[Line]:
        """Return all lines so far, in the order of time."""
        for path in self._directory.glob("*.log"):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                # Somebody may be writing: what has no end yet is left for the next time.
                whole, newline, _ = file.read().rpartition(b"\n")
            self._read[path] = self._read.get(path, 0) + len(whole) + len(newline)
            self._lines += map(parse, whole.splitlines())
        self._lines.sort(key=lambda line: line.at)
        return list(self._lines)


def parse(text: bytes) -> Line:
    """Return the line that a process wrote."""
    return Line(*json.loads(text))


def of(lines: Iterable[Line], *what: str, process: str | None = None) -> list[Line]:
    """Return those of ``lines`` that say one of ``what``, of one process or of all."""
    return [line for line in lines if line.what in what and process in {None, line.process}]
