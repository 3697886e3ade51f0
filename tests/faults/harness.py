"""The test harness: a queue, the processes that work on it, the faults, and the check of the history at the end."""

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
from tests.faults.checker import FINAL_STATES, Row, Tables, violations
from tests.faults.fork_server import ForkServer, wait_for_exit
from tests.faults.history import HistoryReader, Record, Recorder, with_event
from tests.faults.process_roles import GATE, end_enqueueing, enqueue

MAX_ATTEMPTS = 20
"""The attempts of a job unless a scenario sets them: enough that no fault exhausts them."""


class Process:
    """A process that the harness has started."""

    def __init__(self, harness: Harness, name: str, parameters: dict[str, Any]) -> None:
        self.harness, self.name = harness, name
        self.pid = harness.fork_server.fork({**parameters, "name": name})
        self.exit_code: int | None = None
        """The exit code, once :meth:`wait` has returned it."""

    def records(self, *events: str) -> list[Record]:
        """Return the records of this process with one of ``events``."""
        return with_event(self.harness.records(), *events, process=self.name)

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal; SIGKILL and SIGSTOP are recorded as faults."""
        if number in {signal.SIGKILL, signal.SIGSTOP}:
            self.harness.recorder.record("fault", kind=number.name, to=self.name)
        os.kill(self.pid, number)
        if number == signal.SIGSTOP:
            # The process may run on for a moment until the kernel has stopped all of its threads.
            self.harness.wait_until(self._is_paused, f"{self.name} is paused")

    def _is_paused(self) -> bool:
        tasks = Path(f"/proc/{self.pid}/task").iterdir()
        return all(task.joinpath("stat").read_text().rpartition(")")[2].split()[0] == "T" for task in tasks)

    def handles_signal(self, number: signal.Signals) -> bool:
        """Return whether the process has a signal handler: a Consumer has one until it is told to stop."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("SigCgt"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
        return False  # the process has exited

    def terminate(self) -> None:
        """Send SIGTERM, and wait until the Consumer has received it."""
        self.send_signal(signal.SIGTERM)
        self.harness.wait_until(
            lambda: self.has_exited or not self.handles_signal(signal.SIGTERM), f"{self.name} receives SIGTERM"
        )

    @property
    def has_exited(self) -> bool:
        return self.exit_code is not None or wait_for_exit(self.pid)

    def wait(self) -> int:
        """Wait until the process exits, and return its exit code."""
        if self.exit_code is None:
            assert wait_for_exit(self.pid, self.harness.timeout), f"{self.name} did not exit"
            self.exit_code = self.harness.fork_server.reap(self.pid)
        return self.exit_code


class Harness:
    """One queue with its processes and their history.

    :param mutant: the name of the mutant that the workers run.
    :param timeout: the number of seconds after which a wait fails.
    """

    def __init__(
        self,
        bench: Bench,
        fork_server: ForkServer,
        directory: Path,
        rng: random.Random,
        *,
        mutant: str | None = None,
        timeout: float = 30,
    ) -> None:
        self.bench, self.fork_server, self.directory, self.rng = bench, fork_server, directory, rng
        self.mutant, self.timeout = mutant, timeout
        self.held = bench.held
        """Whether an open transaction holds claimed jobs, not a lease."""
        self.recorder, self._reader = Recorder(directory, "test"), HistoryReader(directory)
        self.processes: list[Process] = []
        self._keys, self._observed = itertools.count(1), dict[int, Any]()

    # -- jobs and processes --------------------------------------------------------------------------------------

    def enqueue(self, *payloads: str, max_attempts: int = MAX_ATTEMPTS, **values: Any) -> list[int]:
        """Enqueue a job for each of ``payloads`` in one transaction, and return their keys."""
        keys = [next(self._keys) for _ in payloads]
        model, values = self.bench.Job, {"max_attempts": max_attempts, **values}
        with self.bench.sessions() as session:
            for key, payload in zip(keys, payloads, strict=True):
                enqueue(session, model, self.recorder, key, payload, self.rng, **values)
            end_enqueueing(session, self.recorder, keys, commit=True)
        return keys

    def enqueue_random(self, n: int, payloads: Iterable[str] = ("work", "work", "quiet", "flaky")) -> list[int]:
        """Enqueue jobs with random payloads."""
        return self.enqueue(*self.rng.choices(list(payloads), k=n))

    def start_producer(self, n: int, payloads: Iterable[str] = ("work", "quiet", "flaky")) -> Process:
        """Start a process that enqueues jobs in several transactions, some of which are rolled back."""
        keys = [next(self._keys) for _ in range(n)]
        parameters = {
            "keys": [keys[0], keys[-1] + 1],
            "payloads": list(payloads),
            "max_attempts": MAX_ATTEMPTS,
            "url": self.bench.database.url(),
        }
        return self._start("producer", parameters)

    def start_worker(self, *, url: Callable[[str], str] | None = None, **options: Any) -> Process:
        """Start a process with a Consumer, and wait until it runs.

        :param url: a function that returns the database URL for a driver, to connect through a proxy.
        """
        options = {"poll_interval": 0.05, "grace": 20, "batch_size": 4, "lease": 1} | options
        parameters = {
            "options": options,
            "pool_size": options.get("concurrency", 1) + 1,
            "url": (url or self.bench.database.url)("psycopg" if self.bench.api == "sync" else "asyncpg"),
        }
        worker = self._start("worker", parameters)
        self.wait_until(lambda: worker.has_exited or worker.handles_signal(signal.SIGTERM), "the worker runs")
        return worker

    def start_test(self, test: str, arguments: Mapping[str, Any]) -> Process:
        """Start a process that runs a test of the Consumers without the mutant, and again with it."""
        server = self.bench.database.server
        directories = [server.version, str(server.bin_directory), str(server.directory)]
        return self._start("test", {"test": test, "arguments": dict(arguments), "server": directories})

    def _start(self, role: str, parameters: dict[str, Any]) -> Process:
        parameters |= {"role": role, "directory": str(self.directory), "mutant": self.mutant}
        parameters |= {"strategy": self.bench.strategy, "api": self.bench.api, "seed": self.rng.random()}
        process = Process(self, f"{role}{len(self.processes)}", parameters)
        self.processes.append(process)
        return process

    def open_gate(self, worker: Process | None = None) -> None:
        """Let all handlers pass the gate from now on, or those of one worker."""
        (self.directory / (GATE if worker is None else f"{GATE}.{worker.name}")).touch()

    def terminate_connections(self, share: float = 1.0) -> None:
        """Terminate each connection to the database with the probability ``share``."""
        others = """
            SELECT pid FROM pg_stat_activity
            WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'
        """
        with self.bench.engine.connect() as connection:
            for pid in connection.scalars(sa.text(others)).all():
                if self.rng.random() < share:
                    self.recorder.record("fault", kind="terminated connection", pid=pid)
                    connection.execute(sa.text("SELECT pg_terminate_backend(:pid)"), {"pid": pid})

    def rescue_expired_jobs(self) -> None:
        """Call ``rescue()``, and record the rescued jobs."""
        with self.bench.sessions() as session:
            keys = session.scalars(rescue(self.bench.Job)).all()
            session.commit()
        for key in keys:
            self.recorder.record("rescued", key)

    # -- waiting -------------------------------------------------------------------------------------------------

    def wait_until(self, condition: Callable[[], Any], description: str) -> None:
        """Wait until ``condition`` is true; fail after the timeout."""
        deadline = time.monotonic() + self.timeout
        while not condition():
            assert time.monotonic() < deadline, f"timeout while waiting until {description}"
            time.sleep(0.01)

    def wait_for_records(self, at_most: int) -> None:
        """Wait until processes have written a random number of records, for one second at most."""
        number = len(self._process_records()) + self.rng.randint(1, at_most)
        deadline = time.monotonic() + 1
        while len(self._process_records()) < number and time.monotonic() < deadline and not self.is_finished():
            time.sleep(0.005)

    def _process_records(self) -> list[Record]:
        return [record for record in self.records() if record.process != "test"]

    def is_finished(self) -> bool:
        """Return whether all jobs are in a final state and no producer is running."""
        try:
            rows = self.observe_tables().rows.values()
        except sa.exc.OperationalError:  # the server is being restarted
            return False
        producing = any(one.name.startswith("producer") and not one.has_exited for one in self.processes)
        return not producing and all(row.state in FINAL_STATES for row in rows)

    def wait_until_finished(self) -> None:
        """Wait until all jobs are in a final state."""
        self.wait_until(self.is_finished, "all jobs are in a final state")

    # -- the history ---------------------------------------------------------------------------------------------

    def records(self) -> list[Record]:
        """Return all records so far."""
        return self._reader.records()

    def read_tables(self) -> Tables:
        """Return the contents of the database, from one snapshot."""
        bench = self.bench
        job, messages = bench.Job.__table__, spec_of(bench.Job).side_tables.get("messages")
        with bench.snapshot() as connection:
            found = {row.id: row for row in connection.execute(sa.select(job))}
            rows = {key: Row(getattr(row, "status", "pending"), row.attempts) for key, row in found.items()}
            if not bench.has_status:
                dead_letters = sa.text("SELECT key, state, row FROM sqlaqueue_dead_letter")
                for row in connection.execute(dead_letters):
                    rows[row.key[0]] = Row(row.state, row.row["attempts"])
            effects = connection.execute(sa.select(bench.Effect.__table__.c["job", "note"])).all()
            keys = () if messages is None else connection.scalars(sa.select(messages.c.id))
            return Tables(rows, [(key, run) for key, run in effects], frozenset(keys), bench.has_status)

    def observe_tables(self) -> Tables:
        """Return the contents of the database, and record which rows have changed."""
        tables = self.read_tables()
        for key, row in tables.rows.items():
            if self._observed.get(key) != row:
                self._observed[key] = row
                self.recorder.record("observed", key, state=row.state, attempts=row.attempts)
        return tables

    # -- the end of a test ---------------------------------------------------------------------------------------

    def finish(self) -> Tables:
        """Wait until all jobs are in a final state, stop the processes, and check the history."""
        self.wait_until_finished()
        self.stop_processes()
        return self.check_history()

    def stop_processes(self) -> None:
        """Send SIGTERM to the processes that run, and check that each stops without an error."""
        running = [one for one in self.processes if not one.has_exited]
        for one in running:
            one.send_signal(signal.SIGTERM)
        for one in running:
            assert one.wait() == 0, f"{one.name} exited with {one.exit_code}"
            assert one.records("stopped"), f"{one.name} did not return from run()"

    def check_history(self) -> Tables:
        """Check the history, and return the final tables.

        :raises AssertionError: with all violations.
        """
        tables = self.observe_tables()
        found = violations(self.records(), tables)
        assert not found, "\n".join(f"{rule}: {text}" for rule, texts in found.items() for text in texts)
        return tables

    def diagnostics(self) -> str:
        """Return the history, the stacks and the output of all processes, for the report of a failure."""
        for one in self.processes:
            if not one.has_exited:
                os.kill(one.pid, signal.SIGUSR1)  # faulthandler writes the stacks
        time.sleep(0.3)
        outputs = [
            f"-- {path.name}\n{path.read_text(errors='replace')[-6000:]}" for path in self.directory.glob("*.out")
        ]
        return "\n".join([*map(str, self.records()), *outputs])

    def output_of(self, process: Process) -> str:
        """Return the standard output and error of a process."""
        return (self.directory / f"{process.name}.out").read_text(errors="replace")

    def assert_no_programming_errors(self) -> None:
        """Check that all processes have started and that none failed by an error in the tests, such as in a mutant."""
        for one in self.processes:
            output = self.output_of(one)
            assert one.records("ready", "enqueueing"), output
            assert not re.search("(Type|Attribute|Name)Error", output), output

    @contextlib.contextmanager
    def running(self) -> Iterator[Harness]:
        """Kill all processes at the end, and add the diagnostics to an error."""
        try:
            yield self
        except BaseException as error:
            error.add_note(self.diagnostics())
            raise
        finally:
            for one in self.processes:
                if one.exit_code is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(one.pid, signal.SIGKILL)
                    one.wait()
            self.recorder.close()
