"""One contestant on a fresh database: its processes, and what is done with them."""

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

from tests.benchmarks.contestants import Contestant
from tests.benchmarks.environments import ROOT, command_of
from tests.benchmarks.server import BenchServer

_PATIENCE = 120.0


class ContestantError(RuntimeError):
    """A program of a contestant ended, or does not answer."""


class Program:
    """A process of a contestant, and the events that it tells."""

    def __init__(self, contestant: Contestant, verb: str, options: dict[str, Any]) -> None:
        self._name = f"{contestant.name}: {verb}"
        self.jobs = 0
        """How many jobs it has handled."""
        self.stamps: list[tuple[float, float]] = []
        """When jobs were sent, and handled."""
        self.claims: list[dict[str, Any]] = []
        """What claims cost, where the contestant can tell."""
        self._events: dict[str, dict[str, Any]] = {}
        self._changed = threading.Condition()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(
            [*command_of(contestant), verb, json.dumps(options)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,
        )
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def wait_for(self, event: str, seconds: float = _PATIENCE) -> dict[str, Any]:
        """Wait for an event, and return what it said; each is waited for once."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while event not in self._events:
                if not self._listener.is_alive():
                    raise ContestantError(f"{self._name} ended without {event!r}:\n{self._last_words()}")
                if time.monotonic() > deadline:
                    raise ContestantError(
                        f"{self._name} has not said {event!r} in {seconds:g} s:\n{self._last_words()}"
                    )
                self._changed.wait(0.1)
            return self._events.pop(event)

    def said(self, event: str) -> bool:
        """Whether it has said something that nobody has waited for yet."""
        with self._changed:
            return event in self._events

    def say(self, line: str) -> None:
        """Write a line to its input."""
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode() + b"\n")
        self._process.stdin.flush()

    def check(self) -> None:
        """Raise if it has ended by itself."""
        if self._process.poll() is not None:
            raise ContestantError(f"{self._name} ended:\n{self._last_words()}")

    def end(self) -> None:
        """End it, whatever it does."""
        self._process.kill()
        self._process.wait()
        self._listener.join()
        for file in (self._process.stdin, self._process.stdout, self._errors):
            if file is not None:
                # A pipe that nobody reads any more may still hold a line.
                with contextlib.suppress(BrokenPipeError):
                    file.close()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if not line.startswith(b"{"):
                continue  # some peers print
            told = json.loads(line)
            with self._changed:
                event = told.pop("event", "")
                if event == "claim":
                    self.claims.append(told)
                    continue
                if event in {"count", "end"}:
                    self.jobs = told["jobs"]
                    self.stamps += [(sent, at) for sent, at in told["stamps"]]
                self._events[event] = told
                self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()

    def _last_words(self) -> str:
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace")[-3000:]


class Workers:
    """Worker processes that are ready, and begin together."""

    def __init__(self, programs: list[Program]) -> None:
        self.programs = programs

    @property
    def jobs(self) -> int:
        """How many jobs they have handled."""
        return sum(program.jobs for program in self.programs)

    @property
    def stamps(self) -> list[tuple[float, float]]:
        """When jobs were sent, and handled."""
        return [stamp for program in self.programs for stamp in program.stamps]

    def go(self) -> None:
        """Let them begin."""
        for program in self.programs:
            program.say("go")

    def stop(self) -> list[dict[str, Any]]:
        """Stop them; return what each says at its end: its seconds of CPU, and its peak of memory."""
        for program in self.programs:
            program.say("stop")
        return [program.wait_for("end") for program in self.programs]

    def check(self) -> None:
        """Raise if one has ended by itself."""
        for program in self.programs:
            program.check()

    def wait_until(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Wait until ``condition`` holds; tell whether it came to it within ``seconds``."""
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                return False
            self.check()
            time.sleep(0.002)
        return True

    def wait_for_jobs(self, jobs: int, seconds: float) -> bool:
        """Wait until so many jobs have been handled; tell whether they were within ``seconds``."""
        return self.wait_until(lambda: self.jobs >= jobs, seconds)


class Match:
    """A contestant with its schema in an empty database."""

    def __init__(self, contestant: Contestant, server: BenchServer, url: str) -> None:
        self.contestant, self.server, self.url = contestant, server, url
        self._feeder: Program | None = None
        self._admin = psycopg.connect(url, autocommit=True)
        preparing = self._program("prepare")
        told = preparing.wait_for("prepared")
        preparing.end()
        self.remaining: str = told["remaining"]
        self.versions: dict[str, str] = told["versions"]
        self.words: dict[str, str | None] = told
        """The statements that only some contestants have: ``finish`` and ``lock``."""

    @classmethod
    @contextlib.contextmanager
    def on(cls, server: BenchServer, contestant: Contestant) -> Iterator[Self]:
        """Make a database, and a match in it; drop the database in the end."""
        with server.database() as url:
            match = cls(contestant, server, url)
            try:
                yield match
            finally:
                match.close()

    def close(self) -> None:
        """End what is left."""
        self.end_enqueueing()
        self._admin.close()

    def _program(self, verb: str, **options: Any) -> Program:
        return Program(self.contestant, verb, {**self.contestant.options, "url": self.url, **options})

    # -- enqueueing ---------------------------------------------------------------------------------------------------

    def order(self, jobs: int, *, chunk: int = 1000, way: str = "bulk", **more: Any) -> Program:
        """Let the process that enqueues begin; the answer is its event ``enqueued``."""
        if self._feeder is None:
            self._feeder = self._program("enqueue")
            self._feeder.wait_for("ready")
        self._feeder.say(json.dumps({"jobs": jobs, "chunk": chunk, "way": way, **more}))
        return self._feeder

    def enqueue(self, jobs: int, *, chunk: int = 1000, way: str = "bulk", seconds: float = 7200, **more: Any) -> float:
        """Enqueue ``jobs`` and return the seconds that it took."""
        enqueued = self.order(jobs, chunk=chunk, way=way, **more).wait_for("enqueued", seconds)
        return float(enqueued["seconds"])

    def end_enqueueing(self) -> None:
        """End the process that enqueues, and with it its connections; the next order starts another one."""
        if self._feeder is not None:
            self._feeder.end()
            self._feeder = None

    # -- looking ------------------------------------------------------------------------------------------------------

    def execute(self, statement: str) -> Any:
        """Run a statement; return the first value of its first row, if it has one."""
        cursor = self._admin.execute(statement.encode())
        row = cursor.fetchone() if cursor.description else None
        return row[0] if row else None

    def has_jobs(self) -> bool:
        """Whether a job is left that has not been done."""
        return bool(self.execute(f"SELECT EXISTS ({self.remaining})"))

    def settle_down(self, *, analyze: bool = True) -> None:
        """Let the server come to rest after a load, the same for all."""
        if analyze:
            self.execute("VACUUM ANALYZE")
        self.server.checkpoint()

    def connections(self) -> int:
        """How many connections the workers have now."""
        others = """
            SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()
            AND backend_type = 'client backend' AND pid <> pg_backend_pid()
        """
        return int(self.execute(others))

    # -- working ------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def workers(self, number: int = 1, handler: str = "read", **options: Any) -> Iterator[Workers]:
        """Start worker processes, and wait until all of them are ready."""
        programs = [self._program("work", handler=handler, processes=number, **options) for _ in range(number)]
        try:
            for program in programs:
                program.wait_for("ready")
            yield Workers(programs)
        finally:
            for program in programs:
                program.end()

    def drain(self, jobs: int, *, processes: int = 1, limit: float = 60.0, **options: Any) -> dict[str, float]:
        """Let workers do ``jobs``, for up to ``limit`` seconds, and return the figures of it."""
        self.end_enqueueing()
        with self.workers(processes, **options) as workers:
            server_cpu, begun = self.server.cpu(), time.perf_counter()
            workers.go()
            ended = workers.wait_until(lambda: workers.jobs >= jobs, limit)
            connections = self.connections()
            if ended:
                # What has been handled is not yet done: the last batch is still to be settled.
                workers.wait_until(lambda: not self.has_jobs(), limit)
            handled, took = workers.jobs, time.perf_counter() - begun
            server_cpu = self.server.cpu() - server_cpu
            ends = workers.stop()
        return {
            "jobs_per_second": handled / took,
            "seconds": took,
            "jobs": handled,
            "server_us_per_job": server_cpu / max(handled, 1) * 1e6,
            "client_us_per_job": sum(end["cpu"] for end in ends) / max(handled, 1) * 1e6,
            "peak_mib": max(end["peak_kib"] for end in ends) / 1024,
            "connections": connections,
        }
