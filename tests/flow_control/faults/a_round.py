"""One round: a queue, its processes and their faults, a quiet end, and the check of what was recorded."""

from __future__ import annotations

import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import sqlalchemy as sa

from tests.faults.fork_server import ForkServer
from tests.faults.harness import Harness, Process
from tests.flow_control.faults import audit, held_audit
from tests.flow_control.faults.checker import violations
from tests.flow_control.faults.configuration import HELD, LEASE, Configuration, models
from tests.flow_control.faults.mutants import IN_DATABASE, replace_functions
from tests.flow_control.faults.transactions import Audit

STALL = 12.0
"""Seconds without any change, beside those of a poll, after which a due job that nothing holds back is forgotten."""

_ROLES = "tests.flow_control.faults"


class Queue(NamedTuple):
    """What :class:`~tests.faults.harness.Harness` needs to know of a queue."""

    database: Any
    engine: sa.Engine
    held: bool = False
    strategy: str = "update_status"
    api: str = "both"


@dataclass
class Result:
    """What a round has found."""

    configuration: Configuration
    violations: dict[str, list[str]] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    """Jobs, runs and changes, and faults and actions by kind."""

    def __str__(self) -> str:
        counts = " ".join(f"{name}={number}" for name, number in sorted(self.counts.items()))
        texts = [f"  {rule}: {text}" for rule, texts in self.violations.items() for text in texts[:5]]
        more = [f"  {rule}: {len(texts)} in all" for rule, texts in self.violations.items() if len(texts) > 5]
        state = "FAILED" if self.violations else "passed"
        return "\n".join([f"seed {self.configuration.seed} {state}: {self.configuration}; {counts}", *texts, *more])


class Round(Harness):
    """A harness of the processes of a round."""

    def __init__(self, configuration: Configuration, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.configuration = configuration
        self._workers: list[tuple[Process, Any]] = []
        self._told_to_stop: list[Process] = []

    def start(self, role: str, name: str, **parameters: Any) -> Process:
        """Start a process."""
        urls = {"url": self.bench.database.url("psycopg"), "async_url": self.bench.database.url("asyncpg")}
        configuration = asdict(self.configuration)
        return self._start(name, {"run": f"{_ROLES}.{role}", "configuration": configuration, **urls, **parameters})

    def run(self) -> None:
        """Inject faults, and wait until all that can end has ended."""
        config = self.configuration
        for worker in config.workers:
            self._start_worker(worker)
        # Two of each, so that jobs are committed in another order than that of their ids, and operators meet.
        jobs, seconds = config.jobs // 2, config.seconds * 0.7
        others = [self.start("roles:run_enqueuer", "enqueuer", jobs=jobs, seconds=seconds) for _ in range(2)]
        others += [self.start("operators:run_operator", "operator", seconds=config.seconds) for _ in range(2)]
        end = time.monotonic() + config.seconds
        while config.faults and time.monotonic() < end:
            time.sleep(self.rng.uniform(0.05, 0.4))
            self._inject(self.rng.choice(config.faults))
        for process in others:
            process.wait()
        for worker in self._told_to_stop:
            assert worker.wait() == 0, f"{worker.name} exited with {worker.exit_code}"
        for worker, _ in self._workers:
            worker.send_signal(signal.SIGCONT)
            self._wait_until_it_runs(worker)
        with self.bench.engine.begin() as connection:
            connection.execute(sa.update(models(config).tenant).values(most=2).where(sa.text("most = 0")))

    def _start_worker(self, worker: Any) -> None:
        self._workers.append((self.start("roles:run_worker", "worker", worker=worker), worker))

    def _inject(self, fault: str) -> None:
        chosen = self.rng.randrange(len(self._workers))
        process, worker = self._workers[chosen]
        match fault:
            case "kill":
                process.send_signal(signal.SIGKILL)
                process.wait()
            case "stop":
                process.send_signal(signal.SIGCONT)
                self._wait_until_it_runs(process)
                self.recorder.record("stop", to=process.name)
                process.send_signal(signal.SIGTERM)
                self._told_to_stop.append(process)
            case "pause":
                process.send_signal(signal.SIGSTOP)
                if self.rng.random() < 0.5:
                    time.sleep(LEASE + 0.5)
                    process.send_signal(signal.SIGCONT)
                return
            case "terminate":
                self.terminate_connections(share=0.3)
                return
        self._workers.pop(chosen)
        self._start_worker(worker)

    def terminate_connections(self, share: float = 1.0) -> None:
        """Terminate connections, but those that only record."""
        statement = """
            SELECT pid, pg_terminate_backend(pid) FROM pg_stat_activity
            WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'
              AND application_name <> :marks AND random() < :share
        """
        with self.bench.engine.connect() as connection:
            values = {"marks": held_audit.APPLICATION, "share": share}
            for pid, _ in connection.execute(sa.text(statement), values):
                self.recorder.record("fault", kind="terminated connection", pid=pid)

    def _wait_until_it_runs(self, worker: Process) -> None:
        # SIGTERM would kill a worker that is about to start, or one that is about to stop.
        self.wait_until(lambda: worker.handles_signal(signal.SIGTERM), f"{worker.name} runs")
        # The handler of a Consumer needs what is stored once all handlers are set.
        time.sleep(0.05)

    # -- the quiet end -----------------------------------------------------------------------------------------------

    def wait_until_quiet(self) -> list[str]:
        """Wait until no job runs and none that is left can begin; return the jobs that were forgotten."""
        poll = self.configuration.poll_interval
        allowed = STALL + (0 if poll > 60 else poll)
        last, progress = -1, time.monotonic()
        while True:
            with self.bench.engine.connect() as connection:
                changes = connection.scalar(sa.text("SELECT last_value FROM change_seq_seq"))
                rows = connection.execute(sa.select(models(self.configuration).job.__table__)).all()
            if changes != last:
                last, progress = changes, time.monotonic()
            left = sorted(self._may_begin(rows))
            if not left:
                return []
            if time.monotonic() - progress > allowed:
                return [f"job {key} is {state} and nothing holds it back" for key, state in left]
            time.sleep(0.1)

    def _may_begin(self, rows: Any) -> set[tuple[int, str]]:
        """Return the jobs that run, or could begin sooner or later."""
        config, found = self.configuration, set()
        blocked: set[int] = set()
        """The documents whose later jobs are held back for ever."""
        for row in sorted(rows, key=lambda row: row.id):
            status = getattr(row, "status", "pending")
            if status == "processing":
                found.add((row.id, status))
            elif status == "failed" and config.order == "block":
                blocked.add(row.document_id)
            elif status == "pending":
                if config.order is not None and row.document_id is not None and row.document_id in blocked:
                    continue
                found.add((row.id, status))
        return found

    # -- the check ---------------------------------------------------------------------------------------------------

    def check(self, forgotten: list[str]) -> Result:
        """Check what was recorded."""
        rows = audit.read(self.bench.engine)
        with self.bench.engine.connect() as connection:
            statement = "SELECT n, hash_record_extended(ROW(n), 0) AS key FROM generate_series(0, :most) AS n"
            hashes = connection.execute(sa.text(statement), {"most": self.configuration.customers})
            keys = {row.n: row.key for row in hashes}
        found = Audit(self.configuration, rows, keys, self.records())
        result = Result(self.configuration, violations(found))
        if forgotten:
            result.violations["forgotten"] = forgotten
        kinds = Counter(record.details["kind"] for record in found.handlers if record.event in {"fault", "acted"})
        kinds["SIGTERM"] = sum(record.event == "stop" for record in found.handlers)
        result.counts = kinds + Counter(
            jobs=len(found.by_job), runs=len(found.runs) + len(found.marks), changes=len(found.changes)
        )
        return result


def run_round(configuration: Configuration, database: Any, fork_server: ForkServer, keep: Path | None = None) -> Result:
    """Run a round in an empty database.

    :param keep: where to leave what was recorded, if the round fails.
    """
    engine = sa.create_engine(database.url(), poolclass=sa.NullPool)
    prepare(configuration, engine)
    with tempfile.TemporaryDirectory() as directory:
        rng = random.Random(configuration.seed)
        one = Round(
            configuration, Queue(database, engine, configuration.strategy in HELD), fork_server, Path(directory), rng
        )
        with one.running():
            one.run()
            forgotten = one.wait_until_quiet()
            if not forgotten:
                one.stop_processes()
            result = one.check(forgotten)
            if result.violations and keep is not None:
                (keep / f"seed-{configuration.seed}.txt").write_text(f"{result}\n{one.diagnostics()}")
        return result


def prepare(configuration: Configuration, engine: sa.Engine) -> None:
    """Create the tables, the triggers of the audit and the tenants, and remove the safeguard that a mutant lacks."""
    found = models(configuration)
    found.base.metadata.create_all(engine)
    audit.install(engine)
    if configuration.strategy in HELD:
        held_audit.install(engine)
    with engine.begin() as connection:
        tenants: list[Mapping[str, int]] = [
            {"id": number, "most": configuration.most} for number in range(configuration.customers)
        ]
        connection.execute(sa.insert(found.tenant), tenants)
    if configuration.mutant in IN_DATABASE:
        replace_functions(engine, configuration.mutant)
