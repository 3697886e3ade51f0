"""Faults: what is lost, what runs twice, and when all is well again, under the same faults for each system.

A producer commits jobs at a steady rate, and four processes of twelve handlers run them. Handlers sleep, and record
their runs in files. A fault comes after some seconds; processes that end are started again, as a process manager does.
At the end the workers have time to finish what is left: jobs that no handler has finished by then are lost.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from docs.benchmarks import runs
from docs.benchmarks.crew import Crew
from docs.benchmarks.outcome import Outcome
from docs.benchmarks.system_under_test import Program, SystemFailedError, SystemUnderTest
from docs.benchmarks.systems import System
from docs.benchmarks.workloads import Case, Figures, Size, horizon
from tests import servers

REFERENCE = "raw row lock"

RATE = 100
"""Jobs a second, a fraction of what the slowest system sustains."""
CHUNK = 5
"""Jobs in each commit of the producer."""
HANDLER = 0.1
"""Seconds that a handler sleeps."""
PROCESSES = 4
HANDLERS = 12
"""Handlers at the same time in each process: together almost five times as many as the rate needs."""

BEFORE = 10.0
AFTER = 20.0
"""Seconds of steady load before and after the faults; longer after them if a system's lease is."""
EVERY = 5.0
"""Seconds between two kills, or two terminations."""
SETTLE = 120.0
"""Seconds that workers may take at the end, far more than any lease; they are not used up if no job is left."""
IDLE = 1.0
"""Seconds for which a queue without unfinished jobs is observed."""
STEADY = 0.8
"""The least part of the jobs before the fault that a system must have finished, or nothing can be compared."""

ROLE = "app"
"""The workers connect as this role, which is no superuser, so that their connections can be told and refused."""


@dataclass
class Stage:
    """What a fault acts on.

    :param begin: the time of `time.perf_counter` at which the faults begin; ``end`` likewise.
    :param terminated: how many sessions of the workers were terminated.
    """

    sut: SystemUnderTest
    crew: Crew
    begin: float
    end: float
    terminated: int = 0

    def moments(self) -> Sequence[float]:
        """Return the moments of a fault that is repeated."""
        every = min(EVERY, (self.end - self.begin) / 2)
        return [self.begin + number * every for number in range(int((self.end - self.begin) / every))]

    def terminate(self, numbers: Iterable[int]) -> None:
        """Terminate all sessions of the processes with these numbers."""
        names = ", ".join(f"'{_session_name(number)}'" for number in numbers)
        self.terminated += self.sut.execute(
            "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity "
            f"WHERE usename = '{ROLE}' AND application_name IN ({names})"
        )


def kill_processes(stage: Stage) -> list[float]:
    """Kill one process after the other with SIGKILL; return the times."""
    times = []
    for number, moment in enumerate(stage.moments()):
        stage.crew.until(moment)
        times.append(time.perf_counter())
        stage.crew.kill(number % PROCESSES)
    return times


def terminate_sessions(stage: Stage) -> list[float]:
    """Terminate all sessions of the workers, again and again; return the times."""
    times = []
    for moment in stage.moments():
        stage.crew.until(moment)
        times.append(time.perf_counter())
        stage.terminate(range(PROCESSES))
    return times


def crash_server(stage: Stage) -> list[float]:
    """Stop the server without a checkpoint, and start it; return the time at which it accepts connections.

    The period of the fault begins then, as nobody can do anything before.
    """
    server = stage.sut.server
    one = servers.Server(server.version, server.programs, server.directory)
    restart = threading.Thread(target=one.restart, args=("immediate",))
    restart.start()
    while restart.is_alive():
        stage.crew.until(time.perf_counter() + 0.05)
    accepts = time.perf_counter()
    stage.sut.reconnect()
    stage.begin, stage.end = accepts, accepts + stage.end - stage.begin
    return [accepts]


def refuse_connections(stage: Stage) -> list[float]:
    """Refuse new connections, and terminate the sessions of half of the processes; return the time of the end."""
    period = (stage.end - stage.begin) / 4
    stage.sut.execute(f"ALTER ROLE {ROLE} CONNECTION LIMIT 0")
    for number in range(PROCESSES // 2):
        stage.crew.until(stage.begin + (number + 1) * period)
        stage.terminate([number])
    stage.crew.until(stage.end)
    stage.sut.execute(f"ALTER ROLE {ROLE} CONNECTION LIMIT -1")
    return [time.perf_counter()]


def under(sut: SystemUnderTest, size: Size, *, fault: Callable[[Stage], list[float]], seconds: float) -> Figures:
    """Run jobs at a steady rate before, during and after a fault."""
    after = sut.system.options.get("after", AFTER)
    before, during, after = (max(size.seconds(one), 2.0) for one in (BEFORE, seconds, after))
    jobs = int(RATE * (before + during + after))
    _create_role(sut)
    with tempfile.TemporaryDirectory(dir="/tmp") as path, _crew(sut, path, jobs).running() as crew:
        producer = sut.request_enqueue(jobs, chunk=CHUNK, interval=CHUNK / RATE, outlast=True)
        start = time.perf_counter()
        crew.until(start + before)
        begin = time.perf_counter()
        stage = Stage(sut, crew, begin, begin + during)
        times = fault(stage)
        crew.until(stage.end + after)
        committed = _committed(producer)
        _settle(sut, crew, max(size.seconds(SETTLE), size.limit))
        outcome = Outcome(committed, runs.read(Path(path), -1.0))
        steady = outcome.finished(start, begin) / (RATE * before)
        if steady < STEADY:
            raise SystemFailedError(f"{sut.system.name}: finished {steady:.0%} of the load before the fault")
        return {
            "committed": len(committed),
            "lost": outcome.lost,
            "twice": outcome.twice,
            "cut_off": outcome.cut_off,
            "unfinished": _unfinished(sut),
            "recovery_s": outcome.recovery(times),
            "longest_wait_s": outcome.longest_wait,
            "kept_before": steady,
            "kept": outcome.finished(stage.begin, stage.end) / (RATE * (stage.end - stage.begin)),
            "exits": len(crew.exits),
            "terminated": stage.terminated,
        }


def _create_role(sut: SystemUnderTest) -> None:
    """Create the role of the workers, with the rights of the owner of all tables."""
    if not sut.execute(f"SELECT 1 FROM pg_roles WHERE rolname = '{ROLE}'"):
        sut.execute(f"CREATE ROLE {ROLE} LOGIN")
        sut.execute(f"GRANT postgres TO {ROLE}")
    sut.execute(f"ALTER ROLE {ROLE} CONNECTION LIMIT -1")


def _crew(sut: SystemUnderTest, directory: str, jobs: int) -> Crew:
    """Return the workers, whose sessions have the names of their processes."""
    url = sut.url.replace("postgres@", f"{ROLE}@")

    def start(number: int) -> Program:
        return sut.worker(
            url=f"{url}?application_name={_session_name(number)}",
            handler="sleep",
            sleep=HANDLER,
            processes=PROCESSES,
            concurrency=HANDLERS,
            runs=directory,
            most_runs=2 * jobs,
            report_every=1.0,
        )

    return Crew(start, PROCESSES)


def _session_name(number: int) -> str:
    return f"worker-{number}"


def _committed(producer: Program) -> dict[int, float]:
    """Return the number of each job whose commit was acknowledged, and when."""
    acknowledged = producer.wait_for("enqueued")["acknowledged"]
    return {first + number: at for first, size, at in acknowledged for number in range(size)}


def _settle(sut: SystemUnderTest, crew: Crew, seconds: float) -> None:
    """Wait until the queue has had no unfinished job for a while, in which the last handlers return."""
    deadline = idle_since = time.perf_counter()
    deadline += seconds
    while (now := time.perf_counter()) < deadline:
        if sut.has_jobs():
            idle_since = now
        elif now - idle_since > IDLE:
            return
        crew.until(now + 0.25)


def _unfinished(sut: SystemUnderTest) -> int:
    """Return how many jobs the queue has not marked as finished, whether or not their handlers have."""
    return int(sut.execute(f"SELECT count(*) FROM ({sut.remaining}) AS unfinished"))


def _includes(system: System) -> bool:
    return "faults" in system.workloads


def _is_a_queue(system: System) -> bool:
    """Return whether a system is no control, which can lose jobs with its process only."""
    return _includes(system) and system.options.get("one") != "deleted first"


def _recovers(system: System) -> bool:
    """Return whether a system has the settings for a fast recovery."""
    return _includes(system) and bool(system.options.get("recovers", True))


CASES = [
    Case("processes killed", partial(under, fault=kill_processes, seconds=60), _includes, REFERENCE),
    Case("sessions terminated", partial(under, fault=terminate_sessions, seconds=60), _is_a_queue, REFERENCE),
    Case("server crashed", partial(under, fault=crash_server, seconds=10), _recovers, REFERENCE),
    Case("connections refused", partial(under, fault=refuse_connections, seconds=20), _recovers, REFERENCE),
    Case("open snapshot", partial(horizon.hold, snapshot=True, concurrency=HANDLERS), _recovers, REFERENCE),
]
