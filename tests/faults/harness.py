"""The test harness: a queue, the processes that work on it, the faults, and the check of the history at the end."""

import itertools
import random
import re
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from sqlaqueue import rescue
from sqlaqueue.mapping.mixin import spec_of
from tests.consumer.bench import Bench
from tests.faults.checker import FINAL_STATES, Row, Tables, violations
from tests.faults.history import Record
from tests.faults.lease_replay import unexplained
from tests.faults.processes import Process, Processes, Role
from tests.faults.roles import GATE, end_enqueueing, enqueue, run_producer, run_test, run_worker

MAX_ATTEMPTS = 20
"""The attempts of a job unless a scenario sets them: enough that no fault exhausts them."""


class Harness(Processes):
    """One queue with its processes and their history.

    :param mutant: the name of the mutant that the workers run.
    """

    worker_role: Role = staticmethod(run_worker)

    def __init__(
        self, bench: Bench, directory: Path, rng: random.Random, *, mutant: str | None = None, timeout: float = 30
    ) -> None:
        super().__init__(directory, rng, timeout=timeout)
        self.bench, self.mutant = bench, mutant
        self.held = bench.held
        """Whether an open transaction holds claimed jobs, not a lease."""
        self._own = {"strategy": bench.strategy, "api": bench.api, "mutant": mutant}
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
        return self.enqueue(*self.rng.choices(list(payloads), k=n))

    def start_producer(self, n: int, payloads: Iterable[str] = ("work", "quiet", "flaky")) -> Process:
        """Start a process that enqueues jobs in several transactions, some of which are rolled back."""
        keys = [next(self._keys) for _ in range(n)]
        own = {"strategy": self.bench.strategy, "url": self.bench.database.url()}
        return self.start(
            run_producer, "producer", **own, keys=keys, payloads=list(payloads), max_attempts=MAX_ATTEMPTS
        )

    def start_worker(self, *, url: Callable[[str], str] | None = None, **options: Any) -> Process:
        """Start a process with a Consumer, and wait until it runs.

        :param url: a function that returns the database URL for a driver, to connect through a proxy.
        """
        options = {"poll_interval": 0.05, "grace": 20, "batch_size": 4, "lease": 1} | options
        address = (url or self.bench.database.url)("psycopg" if self.bench.api == "sync" else "asyncpg")
        worker = self.start(self.worker_role, "worker", **self._own, url=address, options=options)
        self.wait_until(lambda: worker.has_exited or worker.handles_signal(signal.SIGTERM), "the worker runs")
        return worker

    def start_test(self, test: str, arguments: Mapping[str, Any]) -> Process:
        """Start a process that runs a test of the Consumers without the mutant, and again with it."""
        server = self.bench.database.server
        directories = server.version, server.bin_directory, server.directory
        return self.start(run_test, "test", **self._own, test_name=test, server=directories, arguments=dict(arguments))

    def open_gate(self, worker: Process | None = None) -> None:
        """Let all handlers pass the gate from now on, or those of one worker."""
        (self.directory / (GATE if worker is None else f"{GATE}.{worker.name}")).touch()

    def terminate_connections(self, share: float = 1.0) -> None:
        """Terminate each connection to the database with the probability ``share``."""
        self.end_connections(self.bench.engine, share)

    def rescue_expired_jobs(self) -> None:
        with self.bench.sessions() as session:
            keys = session.scalars(rescue(self.bench.Job)).all()
            session.commit()
        for key in keys:
            self.recorder.record("rescued", key)

    # -- waiting -------------------------------------------------------------------------------------------------

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
        self.wait_until(self.is_finished, "all jobs are in a final state")

    # -- the history ---------------------------------------------------------------------------------------------

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
        self.stop()
        return self.check_history()

    def check_history(self) -> Tables:
        """Check the history, replay it against the model of a lease, and return the final tables.

        :raises AssertionError: with all violations, or with the events that no path of the model explains.
        """
        tables = self.observe_tables()
        records = self.records()
        found = violations(records, tables)
        assert not found, "\n".join(f"{rule}: {text}" for rule, texts in found.items() for text in texts)
        assert not (texts := unexplained(records, tables, holds=self.held)), "\n".join(texts)
        return tables

    def assert_no_programming_errors(self) -> None:
        """Check that all processes have started and that none failed by an error in the tests, such as in a mutant."""
        for one in self.processes:
            assert one.records("ready", "enqueueing"), one.output
            assert not re.search("(Type|Attribute|Name)Error", one.output), one.output
