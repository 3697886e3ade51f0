"""A system under test: one queue with its schema in an empty database, and its processes."""

from __future__ import annotations

import contextlib
import json
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Self

import psycopg

from docs.benchmarks.installations import ROOT, command_of
from docs.benchmarks.server import BenchServer
from docs.benchmarks.systems import System

_TIMEOUT = 120.0


class SystemFailedError(RuntimeError):
    """A program of a system has ended, or does not reply."""


class Program:
    """A process of a system, and the events that it prints."""

    def __init__(self, system: System, verb: str, options: dict[str, Any]) -> None:
        self._name = f"{system.name}: {verb}"
        self.jobs = 0
        """The number of jobs that it has handled."""
        self.stamps: list[tuple[float, float]] = []
        """The times at which jobs were enqueued and handled."""
        self.claims: list[dict[str, Any]] = []
        """The costs of claims, if the system reports them."""
        self._events: dict[str, dict[str, Any]] = {}
        self._changed = threading.Condition()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(
            [*command_of(system), verb, json.dumps(options)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read_events, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """Its process ID."""
        return self._process.pid

    def wait_for(self, event: str, seconds: float = _TIMEOUT) -> dict[str, Any]:
        """Wait for an event, remove it, and return its values."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while event not in self._events:
                if not self._reader.is_alive():
                    raise SystemFailedError(f"{self._name} ended without {event!r}:\n{self._stderr()}")
                if time.monotonic() > deadline:
                    raise SystemFailedError(
                        f"{self._name} has not sent {event!r} within {seconds:g} s:\n{self._stderr()}"
                    )
                self._changed.wait(0.1)
            return self._events.pop(event)

    def has_event(self, event: str) -> bool:
        """Return whether it has sent an event that has not been waited for."""
        with self._changed:
            return event in self._events

    def take_stamps(self) -> list[tuple[float, float]]:
        """Return the stamps so far, and forget them."""
        with self._changed:
            taken, self.stamps = self.stamps, []
            return taken

    def send(self, line: str) -> None:
        """Write a line to its standard input."""
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode() + b"\n")
        self._process.stdin.flush()

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended."""
        return self._process.poll() is not None

    def last_error(self) -> str:
        """Return the last line that it has written to its standard error; empty without one."""
        return (self._stderr().splitlines() or [""])[-1]

    def check(self) -> None:
        """Raise SystemFailedError if it has ended."""
        if self.has_ended:
            raise SystemFailedError(f"{self._name} ended:\n{self._stderr()}")

    def end(self) -> None:
        """Kill it."""
        self._process.kill()
        self._process.wait()
        self._reader.join()
        for file in (self._process.stdin, self._process.stdout, self._errors):
            if file is not None:
                # The pipe of a dead process may still hold a line.
                with contextlib.suppress(BrokenPipeError):
                    file.close()

    def _read_events(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if not line.startswith(b"{"):
                continue  # output of a library
            values = json.loads(line)
            with self._changed:
                event = values.pop("event", "")
                if event == "claim":
                    self.claims.append(values)
                    continue
                if event in {"count", "end"}:
                    self.jobs = values["jobs"]
                    self.stamps += [(sent, at) for sent, at in values["stamps"]]
                self._events[event] = values
                self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()

    def _stderr(self) -> str:
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace")[-3000:]


class Workers:
    """Worker processes that are ready to start together."""

    def __init__(self, programs: list[Program]) -> None:
        self.programs = programs

    @property
    def jobs(self) -> int:
        """The number of jobs that they have handled."""
        return sum(program.jobs for program in self.programs)

    @property
    def stamps(self) -> list[tuple[float, float]]:
        """The times at which jobs were enqueued and handled."""
        return [stamp for program in self.programs for stamp in program.stamps]

    def take_stamps(self) -> list[tuple[float, float]]:
        """Return the times so far, and forget them."""
        return [stamp for program in self.programs for stamp in program.take_stamps()]

    def go(self) -> None:
        """Start them."""
        for program in self.programs:
            program.send("go")

    def stop(self) -> list[dict[str, Any]]:
        """Stop them; return for each the event ``end``, with its CPU seconds and peak memory."""
        for program in self.programs:
            program.send("stop")
        return [program.wait_for("end") for program in self.programs]

    def check(self) -> None:
        """Raise if one has ended by itself."""
        for program in self.programs:
            program.check()

    def wait_until(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Wait until ``condition`` is true; return whether it was within ``seconds``."""
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                return False
            self.check()
            time.sleep(0.002)
        return True

    def wait_for_jobs(self, jobs: int, seconds: float) -> bool:
        """Wait until a number of jobs has been handled; return whether it was within ``seconds``."""
        return self.wait_until(lambda: self.jobs >= jobs, seconds)


class SystemUnderTest:
    """A system with its schema in an empty database."""

    def __init__(self, system: System, server: BenchServer, url: str) -> None:
        self.system, self.server, self.url = system, server, url
        self._enqueuer: Program | None = None
        self._admin = psycopg.connect(url, autocommit=True)
        preparing = self._program("prepare")
        values = preparing.wait_for("prepared")
        preparing.end()
        self.remaining: str = values["remaining"]
        self.versions: dict[str, str] = values["versions"]
        self.statements: dict[str, str | None] = values
        """The optional statements of the system: ``finish``, ``lock`` and ``due``."""

    @classmethod
    @contextlib.contextmanager
    def on(cls, server: BenchServer, system: System, name: str = "bench") -> Iterator[Self]:
        """Create a database with a system in it; drop the database afterwards."""
        with server.database(name) as url:
            sut = cls(system, server, url)
            try:
                yield sut
            finally:
                sut.close()

    def close(self) -> None:
        """End all processes and connections."""
        self.end_enqueueing()
        self._admin.close()

    def _program(self, verb: str, **options: Any) -> Program:
        return Program(self.system, verb, {**self.system.options, "url": self.url, **options})

    # -- enqueueing ---------------------------------------------------------------------------------------------------

    def request_enqueue(self, jobs: int, *, chunk: int = 1000, way: str = "bulk", **more: Any) -> Program:
        """Send a request to the enqueueing process, which replies with the event ``enqueued``."""
        if self._enqueuer is None:
            self._enqueuer = self._program("enqueue")
            self._enqueuer.wait_for("ready")
        self._enqueuer.send(json.dumps({"jobs": jobs, "chunk": chunk, "way": way, **more}))
        return self._enqueuer

    def enqueue(self, jobs: int, *, chunk: int = 1000, way: str = "bulk", seconds: float = 7200, **more: Any) -> float:
        """Enqueue a number of jobs, and return the seconds that it took."""
        enqueued = self.request_enqueue(jobs, chunk=chunk, way=way, **more).wait_for("enqueued", seconds)
        return float(enqueued["seconds"])

    def end_enqueueing(self) -> None:
        """End the enqueueing process and its connections; the next request starts another one."""
        if self._enqueuer is not None:
            self._enqueuer.end()
            self._enqueuer = None

    # -- the database --------------------------------------------------------------------------------------------------

    def execute(self, statement: str) -> Any:
        """Execute a statement; return the first value of its first row, if it has one."""
        cursor = self._admin.execute(statement.encode())
        row = cursor.fetchone() if cursor.description else None
        return row[0] if row else None

    def row(self, query: str) -> tuple[Any, ...]:
        """Return the only row of a query."""
        [row] = self._admin.execute(query.encode()).fetchall()
        return row

    def has_jobs(self) -> bool:
        """Return whether there is an unfinished job."""
        return bool(self.execute(f"SELECT EXISTS ({self.remaining})"))

    def checkpoint(self, *, analyze: bool = True) -> None:
        """Run VACUUM ANALYZE and CHECKPOINT after loading jobs."""
        if analyze:
            self.execute("VACUUM ANALYZE")
        self.server.checkpoint()

    def reconnect(self) -> None:
        """Connect again after a restart of the server."""
        self._admin.close()
        self._admin = psycopg.connect(self.url, autocommit=True)

    def wal_bytes(self) -> int:
        """Return how many bytes of WAL the server has written."""
        return int(self.execute("SELECT pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')"))

    def connections(self) -> int:
        """Return the number of connections of the workers."""
        others = """
            SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()
            AND backend_type = 'client backend' AND pid <> pg_backend_pid()
        """
        return int(self.execute(others))

    # -- workers ------------------------------------------------------------------------------------------------------

    def worker(self, **options: Any) -> Program:
        """Start one worker process; the caller waits for ``ready``, sends ``go``, and ends it."""
        return self._program("work", **options)

    @contextlib.contextmanager
    def workers(self, number: int = 1, handler: str = "read", **options: Any) -> Iterator[Workers]:
        """Start worker processes, and wait until all of them are ready."""
        programs = [self.worker(handler=handler, processes=number, **options) for _ in range(number)]
        try:
            for program in programs:
                program.wait_for("ready")
            yield Workers(programs)
        finally:
            for program in programs:
                program.end()

    def drain(self, jobs: int, *, processes: int = 1, limit: float = 60.0, **options: Any) -> dict[str, float]:
        """Drain a number of jobs, for up to ``limit`` seconds, and return the figures."""
        self.end_enqueueing()
        with self.workers(processes, **options) as workers:
            server_cpu, wal_bytes, start = self.server.cpu(), self.wal_bytes(), time.perf_counter()
            workers.go()
            ended = workers.wait_until(lambda: workers.jobs >= jobs, limit)
            connections = self.connections()
            if ended:
                # The last batch of handled jobs may not have been settled yet.
                workers.wait_until(lambda: not self.has_jobs(), limit)
            handled, took = workers.jobs, time.perf_counter() - start
            server_cpu, wal_bytes = self.server.cpu() - server_cpu, self.wal_bytes() - wal_bytes
            ends = workers.stop()
        return {
            "jobs_per_second": handled / took,
            "seconds": took,
            "jobs": handled,
            "server_us_per_job": server_cpu / max(handled, 1) * 1e6,
            "client_us_per_job": sum(end["cpu"] for end in ends) / max(handled, 1) * 1e6,
            "wal_bytes_per_job": wal_bytes / max(handled, 1),
            "peak_mib": max(end["peak_kib"] for end in ends) / 1024,
            "connections": connections,
        }
