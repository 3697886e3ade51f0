"""A round: a queue under flow control, its processes and their faults, a quiet end, and the check of the history."""

import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from tests.faults.key_checker import violations
from tests.faults.key_history import APPLICATION, Audit, install, read
from tests.faults.key_queues import HELD, LEASE, Configuration, Urls, models, run_enqueuer, run_operator, run_worker
from tests.faults.mutants import lose_in_database
from tests.faults.processes import Process, Processes
from tests.models import execute

STALL = 12.0
"""Seconds without any change, beside those of a poll, after which a due job that nothing holds back is forgotten."""


@dataclass
class Result:
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


class Round(Processes):
    def __init__(self, configuration: Configuration, database: Any, engine: sa.Engine, directory: Path) -> None:
        super().__init__(directory, random.Random(configuration.seed))
        self.configuration, self.engine = configuration, engine
        self._own = {"configuration": configuration, "urls": Urls(database.url("psycopg"), database.url("asyncpg"))}
        self._workers: list[Process] = []
        self._told_to_stop: list[Process] = []

    def run(self) -> None:
        """Inject faults, and wait until all that can end has ended."""
        config = self.configuration
        self._workers = [self.start(run_worker, "worker", **self._own, worker=each) for each in config.workers]
        # Two of each, so that jobs are committed in another order than that of their ids, and operators meet.
        jobs, seconds = config.jobs // 2, config.seconds * 0.7
        more = {"jobs": jobs, "seconds": seconds}
        others = [self.start(run_enqueuer, "enqueuer", **self._own, **more) for _ in range(2)]
        others += [self.start(run_operator, "operator", **self._own, seconds=config.seconds) for _ in range(2)]
        end = time.monotonic() + config.seconds
        while config.faults and time.monotonic() < end:
            time.sleep(self.rng.uniform(0.05, 0.4))
            self._inject(self.rng.choice(config.faults))
        for process in others:
            process.wait()
        for worker in self._told_to_stop:
            assert worker.wait() == 0, f"{worker.name} exited with {worker.exit_code}"
        for worker in self._workers:
            worker.send_signal(signal.SIGCONT)
            self._wait_until_it_runs(worker)
        execute(self.engine, sa.update(models(config).tenant).values(most=2).where(sa.text("most = 0")))

    def _inject(self, fault: str) -> None:
        chosen = self.rng.randrange(len(self._workers))
        process = self._workers[chosen]
        match fault:
            case "kill":
                process.kill()
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
                # But those that only record.
                self.end_connections(self.engine, 0.3, spare=APPLICATION)
                return
        self._workers[chosen] = self.start_again(process)

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
            with self.engine.connect() as connection:
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
        rows = read(self.engine)
        with self.engine.connect() as connection:
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


def run_round(configuration: Configuration, database: Any, keep: Path | None = None) -> Result:
    """Run a round in an empty database.

    :param keep: where to leave what was recorded, if the round fails.
    """
    engine = sa.create_engine(database.url(), poolclass=sa.NullPool)
    prepare(configuration, engine)
    with tempfile.TemporaryDirectory() as directory, Round(configuration, database, engine, Path(directory)) as one:
        one.run()
        forgotten = one.wait_until_quiet()
        if not forgotten:
            one.stop()
        result = one.check(forgotten)
        if result.violations and keep is not None:
            (keep / f"seed-{configuration.seed}.txt").write_text(f"{result}\n{one.diagnostics()}")
        return result


def prepare(configuration: Configuration, engine: sa.Engine) -> None:
    """Create the tables, the triggers of the audit and the tenants, and remove the safeguard that a mutant lacks."""
    found = models(configuration)
    found.base.metadata.create_all(engine)
    install(engine, held=configuration.strategy in HELD)
    tenants: list[Mapping[str, int]] = [
        {"id": number, "most": configuration.most} for number in range(configuration.customers)
    ]
    with engine.begin() as connection:
        connection.execute(sa.insert(found.tenant), tenants)
        lose_in_database(connection, configuration.mutant)
