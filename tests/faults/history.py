"""The history of a test: what each process did, in one append-only file per process.

A record is one write(), so it is complete and survives a SIGKILL that follows it. Nothing is synced to the disk, as
these tests kill processes, not the machine.
"""

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlaqueue import JobEvent
from sqlaqueue.strategies.update_status import LEASE_EXPIRED


@dataclass(frozen=True, slots=True)
class Record:
    """One event in one process.

    A producer records for each job ``enqueueing`` before its commit, with the expected outcome, then ``enqueued`` or
    ``rolled back``; neither if it is killed during the commit. A worker records ``ready``, ``stopped``, ``idle`` before
    a long wait, the events of the Consumer, and for each call of the handler ``start``, ``return`` and ``raise`` with
    the id of the ``run``, and ``at gate`` before it waits for the gate. The test records each ``fault`` it injects,
    ``exited`` for each worker that a job has ended, ``observed`` for each change in the tables, ``requeued`` for each
    job that it requeues by plain SQL, and ``rescued``.
    """

    time_ns: int
    """Nanoseconds on the monotonic clock of the machine, which is the same for all processes."""
    process: str
    event: str
    key: int | None = None
    details: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        key = "" if self.key is None else f" {self.key}"
        details = "".join(f" {name}={value}" for name, value in self.details.items())
        return f"{self.time_ns / 1e9:.4f} {self.process}: {self.event}{key}{details}"


class Recorder:
    """Appends records to the file of one process. Its threads may share it."""

    def __init__(self, directory: Path, process: str) -> None:
        self._process = process
        self._file = os.open(directory / f"{process}.history", os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def record(self, event: str, key: int | None = None, **details: Any) -> None:
        line = json.dumps([time.monotonic_ns(), self._process, event, key, details])
        os.write(self._file, f"{line}\n".encode())

    def close(self) -> None:
        os.close(self._file)


def name_of(event: JobEvent) -> str:
    """Return the name of an event for a history.

    A job that fails by its rescue was run by another worker, and the one that reports it has not settled a run.
    """
    return "rescued" if event.name == "failed" and str(event.error) == LEASE_EXPIRED else event.name


class HistoryReader:
    """Reads the files of all processes while they grow."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._offsets: dict[Path, int] = {}
        self._records: list[Record] = []

    def records(self) -> list[Record]:
        """Return all records so far, sorted by time."""
        for path in self._directory.glob("*.history"):
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                # A process may be writing: an incomplete line is read by a later call.
                complete, newline, _ = file.read().rpartition(b"\n")
            self._offsets[path] = self._offsets.get(path, 0) + len(complete) + len(newline)
            self._records += map(parse_record, complete.splitlines())
        self._records.sort(key=lambda record: record.time_ns)
        return list(self._records)


def parse_record(line: bytes) -> Record:
    """Return the record that a process has written as one line."""
    return Record(*json.loads(line))


def with_event(records: Iterable[Record], *events: str, process: str | None = None) -> list[Record]:
    """Return the records with one of ``events``, of one process or of all."""
    return [record for record in records if record.event in events and process in {None, record.process}]


Violations = Iterator[str]


def violations_of(rules: Sequence[Callable[[Any], Violations]], history: Any) -> dict[str, list[str]]:
    """Return the violations of each rule by its name; empty if all hold."""
    found = {rule.__name__: list(rule(history)) for rule in rules}
    return {name: texts for name, texts in found.items() if texts}
