"""One queue, the processes that work on it, what happens to them, and the verdict in the end."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import re
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from sqlaqueue import rescue
from sqlaqueue.mapping.mixin import spec_of
from tests.consumer.bench import Bench
from tests.faults.checker import FINISHED, Row, Tables, complaints
from tests.faults.history import Line, Log, Reader, of
from tests.faults.worker import GATE, enqueue, finish
from tests.faults.zygote import Zygote, has_ended

LIMIT = 20
"""Attempts that a job has unless the scenario is about them: what faults cost may not end it."""


class Process:
    """A process of a scene."""

    def __init__(self, scene: Scene, name: str, order: dict[str, Any]) -> None:
        self.scene, self.name = scene, name
        self.pid = scene.zygote.fork({**order, "name": name})
        self.code: int | None = None
        """The exit code, once it has been asked for."""

    def said(self, *what: str) -> list[Line]:
        """Return its lines that say one of ``what``."""
        return of(self.scene.lines(), *what, process=self.name)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal; the scene's log has those that are faults."""
        if number in {signal.SIGKILL, signal.SIGSTOP}:
            self.scene.log.write("fault", kind=number.name, to=self.name)
        os.kill(self.pid, number)
        if number == signal.SIGSTOP:
            # It may do something yet before the signal is there.
            self.scene.await_that(self._is_stopped, "that it stops")

    def _is_stopped(self) -> bool:
        tasks = Path(f"/proc/{self.pid}/task").iterdir()
        return all(task.joinpath("stat").read_text().rpartition(")")[2].split()[0] == "T" for task in tasks)

    def answers(self, number: signal.Signals) -> bool:
        """Return whether it has a handler of its own for a signal: a Consumer has, until it is told to stop."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("SigCgt"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
        return False  # it has ended

    def terminate(self) -> None:
        """Send SIGTERM, and wait until the Consumer has taken it in."""
        self.signal(signal.SIGTERM)
        self.scene.await_that(lambda: self.has_ended or not self.answers(signal.SIGTERM), f"that {self.name} stops")

    @property
    def has_ended(self) -> bool:
        return self.code is not None or has_ended(self.pid)

    def await_end(self) -> int:
        """Wait for its end and return its exit code."""
        if self.code is None:
            assert has_ended(self.pid, self.scene.patience), f"{self.name} did not end"
            self.code = self.scene.zygote.reap(self.pid)
        return self.code


class Scene:
    """A queue with a history.

    :param mutant: the name of a remedy that the workers are to do without.
    :param patience: seconds to wait for what must happen.
    """

    def __init__(
        self,
        bench: Bench,
        zygote: Zygote,
        directory: Path,
        dice: random.Random,
        *,
        mutant: str | None = None,
        patience: float = 30,
    ) -> None:
        self.bench, self.zygote, self.directory, self.dice = bench, zygote, directory, dice
        self.mutant, self.patience = mutant, patience
        self.held = bench.held
        self.log, self._reader = Log(directory, "test"), Reader(directory)
        self.processes: list[Process] = []
        self._keys, self._seen = itertools.count(1), dict[int, Any]()

    # -- what happens --------------------------------------------------------------------------------------------

    def enqueue(self, *payloads: str, limit: int = LIMIT, **values: Any) -> list[int]:
        """Add a job for each of ``payloads`` in one transaction, and return their keys."""
        keys = [next(self._keys) for _ in payloads]
        with self.bench.sessions() as session:
            for key, payload in zip(keys, payloads, strict=True):
                enqueue(session, self.bench.Job, self.log, key, payload, self.dice, max_attempts=limit, **values)
            finish(session, self.log, keys, keep=True)
        return keys

    def enqueue_some(self, n: int, payloads: Iterable[str] = ("work", "work", "quiet", "flaky")) -> list[int]:
        """Add jobs of random kinds."""
        return self.enqueue(*self.dice.choices(list(payloads), k=n))

    def produce(self, n: int, payloads: Iterable[str] = ("work", "quiet", "flaky")) -> Process:
        """Start a process that adds jobs, in transactions of which some are rolled back."""
        keys = [next(self._keys) for _ in range(n)]
        order = {"keys": [keys[0], keys[-1] + 1], "payloads": list(payloads), "limit": LIMIT}
        return self._start("producer", "produce", {**order, "url": self.bench.database.url()})

    def worker(self, *, url: Callable[[str], str] | None = None, **options: Any) -> Process:
        """Start a process with a Consumer, and wait until it serves.

        :param url: gives the URL of the database by its driver, where it is not the database's own.
        """
        options = {"poll_interval": 0.05, "grace": 20, "batch_size": 4, "lease": 1} | options
        order = {
            "options": options,
            "pool": options.get("concurrency", 1) + 1,
            "url": (url or self.bench.database.url)("psycopg" if self.bench.colour == "sync" else "asyncpg"),
        }
        worker = self._start("worker", "work", order)
        self.await_that(lambda: worker.has_ended or worker.answers(signal.SIGTERM), "that the worker serves")
        return worker

    def examine(self, test: str, arguments: Mapping[str, Any]) -> Process:
        """Start a process that runs a test of the Consumers, and then again with the scene's mutant."""
        server = self.bench.database.server
        where = [server.version, str(server.bin_directory), str(server.directory)]
        return self._start("test", "examine", {"test": test, "arguments": dict(arguments), "server": where})

    def _start(self, kind: str, role: str, order: dict[str, Any]) -> Process:
        order |= {"role": role, "directory": str(self.directory), "mutant": self.mutant}
        order |= {"strategy": self.bench.strategy, "colour": self.bench.colour, "seed": self.dice.random()}
        process = Process(self, f"{kind}{len(self.processes)}", order)
        self.processes.append(process)
        return process

    def open_gate(self, worker: Process | None = None) -> None:
        """Let all handlers go on that wait for it, now and later; or those of one worker."""
        (self.directory / (GATE if worker is None else f"{GATE}.{worker.name}")).touch()

    def some_lines_later(self, most: int) -> None:
        """Wait until the processes have said some more; not for long, since they may have nothing more to say."""
        number = len(self._of_processes()) + self.dice.randint(1, most)
        deadline = time.monotonic() + 1
        while len(self._of_processes()) < number and time.monotonic() < deadline and not self.is_done():
            time.sleep(0.005)

    def _of_processes(self) -> list[Line]:
        return [line for line in self.lines() if line.process != "test"]

    def end_connections(self, share: float = 1.0) -> None:
        """End sessions of the database as an administrator would, each with a chance of ``share``."""
        others = """
            SELECT pid FROM pg_stat_activity
            WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'
        """
        with self.bench.engine.connect() as connection:
            for pid in connection.scalars(sa.text(others)).all():
                if self.dice.random() < share:
                    self.log.write("fault", kind="terminate", session=pid)
                    connection.execute(sa.text("SELECT pg_terminate_backend(:pid)"), {"pid": pid})

    def rescue(self) -> None:
        """Take back jobs whose lease has expired, as an administrator would."""
        with self.bench.sessions() as session:
            keys = session.scalars(rescue(self.bench.Job)).all()
            session.commit()
        for key in keys:
            self.log.write("rescued", key)

    # -- what is seen --------------------------------------------------------------------------------------------

    def lines(self) -> list[Line]:
        """Return what has been written down so far."""
        return self._reader.lines()

    def await_that(self, condition: Callable[[], Any], what: str) -> None:
        """Wait until ``condition`` holds; far beyond what it can take, fail."""
        deadline = time.monotonic() + self.patience
        while not condition():
            assert time.monotonic() < deadline, f"{what} did not happen"
            time.sleep(0.01)

    def tables(self) -> Tables:
        """Return what is in the database, all at one moment."""
        bench = self.bench
        job, messages = bench.Job.__table__, spec_of(bench.Job).side_tables.get("messages")
        with bench.engine.connect().execution_options(isolation_level="REPEATABLE READ") as connection:
            found = {row.id: row for row in connection.execute(sa.select(job))}
            rows = {key: Row(getattr(row, "status", "pending"), row.attempts) for key, row in found.items()}
            if not bench.has_status:
                dead = sa.text("SELECT key, state, row FROM sqlaqueue_dead_letter")
                rows |= {row.key[0]: Row(row.state, row.row["attempts"]) for row in connection.execute(dead)}
            effects = connection.execute(sa.select(bench.Effect.__table__.c["job", "note"])).all()
            left = () if messages is None else connection.scalars(sa.select(messages.c.id))
            return Tables(rows, [(key, run) for key, run in effects], frozenset(left), bench.has_status)

    def look(self) -> Tables:
        """Return what is in the database, and write down what has changed."""
        tables = self.tables()
        for key, row in tables.rows.items():
            if self._seen.get(key) != row:
                self._seen[key] = row
                self.log.write("seen", key, state=row.state, attempts=row.attempts)
        return tables

    def is_done(self) -> bool:
        """Return whether no job waits or runs, and none is being added."""
        try:
            rows = self.look().rows.values()
        except sa.exc.OperationalError:  # the database is being restarted
            return False
        producing = any(one.name.startswith("producer") and not one.has_ended for one in self.processes)
        return not producing and all(row.state in FINISHED for row in rows)

    def await_done(self) -> None:
        """Wait until no job waits or runs."""
        self.await_that(self.is_done, "that all is done")

    # -- the verdict ---------------------------------------------------------------------------------------------

    def finish(self) -> Tables:
        """Wait until all is done, let the processes end, and judge what they did."""
        self.await_done()
        self.end()
        return self.judge()

    def end(self) -> None:
        """Let the processes end that still work: in peace."""
        working = [one for one in self.processes if not one.has_ended]
        for one in working:
            one.signal(signal.SIGTERM)
        for one in working:
            assert one.await_end() == 0, f"{one.name} ended with {one.code}"
            assert one.said("stopped"), f"{one.name} did not return from run()"

    def judge(self) -> Tables:
        """Check the history.

        :raises AssertionError: with what is wrong.
        """
        tables = self.look()
        found = complaints(self.lines(), tables)
        assert not found, "\n".join(f"{rule}: {text}" for rule, texts in found.items() for text in texts)
        return tables

    def account(self) -> str:
        """Return all that is known, to be read when something is wrong."""
        for one in self.processes:
            if not one.has_ended:
                os.kill(one.pid, signal.SIGUSR1)  # it writes its stacks
        time.sleep(0.3)
        outputs = [
            f"-- {path.name}\n{path.read_text(errors='replace')[-6000:]}" for path in self.directory.glob("*.out")
        ]
        return "\n".join([*map(str, self.lines()), *outputs])

    def output(self, process: Process) -> str:
        """Return what a process has written to its standard output and error."""
        return (self.directory / f"{process.name}.out").read_text(errors="replace")

    def assert_sound(self) -> None:
        """Check that no process was in trouble by the fault of the tests themselves: of a mutant, for instance."""
        for one in self.processes:
            output = self.output(one)
            assert one.said("ready", "enqueueing"), output
            assert not re.search("(Type|Attribute|Name)Error", output), output

    @contextlib.contextmanager
    def playing(self) -> Iterator[Scene]:
        """End all processes in the end, whatever state they are in."""
        try:
            yield self
        except BaseException as error:
            error.add_note(self.account())
            raise
        finally:
            for one in self.processes:
                if one.code is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(one.pid, signal.SIGKILL)
                    one.await_end()
            self.log.close()
