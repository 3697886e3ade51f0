"""One piece of a soak: processes under a steady load, a fault every now and then, and a check at the end.

Two workers, the producer, the operator and the monitor live as long as the piece, so that a leak shows. They are paused
and disconnected. Two more workers are also killed, and told to stop, and others take their places.
"""

import contextlib
import heapq
import itertools
import random
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import sqlalchemy as sa

from sqlaqueue import requeue, resume
from tests.faults.processes import Process, Processes
from tests.faults.proxy import Proxy
from tests.servers import Database, Server
from tests.soak.queues import LEASE, QUEUES, create_tables
from tests.soak.roles import GRACE, ROLES
from tests.soak.samples import Checker, SampleFile, look_at
from tests.soak.verdict import STOP_LIMIT

DATABASE = "soak"

# Those of initdb but for what the machine decides: the load has to wait for the disk, as it would in production.
SETTINGS = """
listen_addresses = ''
unix_socket_directories = '{socket_directory}'
port = 5432
max_connections = 300
timezone = 'UTC'
log_timezone = 'UTC'
"""

GIVE_UP = 120.0
"""Seconds after which a process that does not stop is killed."""

DRAIN = 240.0
"""Seconds for the jobs that are left at the end: leases expire, and retries become due."""


@dataclass(frozen=True)
class Plan:
    """How long and how hard.

    :param seconds: how long the piece lasts, without its end.
    :param rate: jobs a second.
    :param sample_every: seconds between samples.
    :param fault_every: the least and the most seconds between faults.
    """

    seconds: float
    rate: float = 100.0
    sample_every: float = 5.0
    fault_every: tuple[float, float] = (20.0, 60.0)
    seed: int = 0


@contextlib.contextmanager
def server_in(directory: Path, version: int, programs: Path) -> Iterator[Server]:
    """Start the server of a soak: a new one, or that of the pieces before."""
    server = Server(version, programs, directory / "server")
    if server.data.exists():
        if (server.data / "postmaster.pid").exists():
            with contextlib.suppress(RuntimeError):  # it had ended with the machine
                server.stop("immediate")
        server.start()
    else:
        server.create(SETTINGS)
        with psycopg.connect(server.dsn(), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {DATABASE}".encode())
        engine = sa.create_engine(server.url(database=DATABASE))
        create_tables(engine)
        engine.dispose()
    try:
        yield server
    finally:
        server.stop("fast")


class Piece(Processes):
    """The processes, the faults and the samples of one piece."""

    def __init__(self, directory: Path, server: Server, proxy: Proxy, samples: SampleFile, plan: Plan) -> None:
        super().__init__(directory, random.Random(plan.seed), timeout=60)
        self._server, self._proxy, self._samples, self._plan = server, proxy, samples, plan
        self._database = Database(server, DATABASE)
        self._checker = Checker(self._database.dsn)
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._busy: set[Process] = set()
        """Those to which a fault is being done."""
        self._expected_ends: set[Process] = set()
        self._stopping: set[Process] = set()
        self._unexpected: list[str] = []
        self._lasting: dict[str, Process] = {}
        self._mortal: dict[str, Process] = {}

    # -- processes -----------------------------------------------------------------------------------------------------

    def _play(self, role: str) -> Process:
        """Start a process; workers connect through the proxy, which can go silent."""
        more: dict[str, Any] = {"rate": self._plan.rate} if role == "producer" else {}
        address = self._proxy.url if role in {"sync", "async"} else self._database.url
        return self.start(ROLES[role], role, url=address("psycopg" if role != "async" else "asyncpg"), **more)

    def _start_all(self) -> None:
        for role in ROLES:
            self._lasting[role] = self._play(role)
        for role in ("sync", "async"):
            self._mortal[role] = self._play(role)

    def _workers(self) -> list[Process]:
        lasting = [self._lasting[role] for role in ("sync", "async") if role in self._lasting]
        return [*lasting, *self._mortal.values()]

    def _replace(self, role: str) -> None:
        """Start a worker in the place of one that has ended."""
        ended = self._mortal.pop(role)
        self._busy.discard(ended)
        self._mortal[role] = self._play(role)

    def _look_after(self) -> None:
        """Note processes that have ended by themselves, and replace them."""
        for role, process in [*self._lasting.items(), *self._mortal.items()]:
            if process.has_exited and process not in self._expected_ends:
                self._expected_ends.add(process)
                text = f"{process.name} ended by itself, with the exit code {process.exit_code}"
                self._unexpected.append(f"{text}: {process.output[-1500:]}")
                if self._mortal.get(role) is process:
                    self._replace(role)
                else:
                    self._lasting[role] = self._play(role)

    # -- time ----------------------------------------------------------------------------------------------------------

    def _after(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._later, (time.monotonic() + seconds, next(self._numbers), action))

    def _pass_time(self, until: Callable[[], bool]) -> None:
        """Do what is due until a condition holds."""
        while not until():
            self._look_after()
            if self._later and self._later[0][0] <= time.monotonic():
                heapq.heappop(self._later)[2]()
            else:
                time.sleep(0.1)

    def _sample(self) -> None:
        lasting = {role: look_at(process.pid) for role, process in self._lasting.items()}
        values: dict[str, Any] = {"processes": {role: one for role, one in lasting.items() if one}}
        try:
            values |= self._checker.look()
        except psycopg.Error as error:
            # The server restarts.
            self._samples.write("missed", {"error": type(error).__name__})
        else:
            self._samples.write("sample", values)
        self._after(self._plan.sample_every, self._sample)

    # -- faults --------------------------------------------------------------------------------------------------------

    def _fault(self) -> None:
        kinds = {
            self._kill: 3,
            self._pause: 3,
            self._stop_one: 4,
            self._disconnect: 3,
            self._go_silent: 2,
            self._restart_server: 1,
        }
        [fault] = self.rng.choices([*kinds], [*kinds.values()])
        fault()
        self._after(self.rng.uniform(*self._plan.fault_every), self._fault)

    def _note(self, kind: str, **details: Any) -> None:
        self._samples.write("fault", {"kind": kind, **details})

    def _free(self) -> list[tuple[str, Process]]:
        return [(role, one) for role, one in self._mortal.items() if one not in self._busy and not one.has_exited]

    def _kill(self) -> None:
        if not (free := self._free()):
            return
        role, process = self.rng.choice(free)
        self._note("kill", process=process.name)
        self._busy.add(process)
        self._expected_ends.add(process)
        process.kill()
        self._after(self.rng.uniform(1, 5), lambda: self._replace(role))

    def _pause(self) -> None:
        """Pause a worker for longer than its leases."""
        process = self.rng.choice(self._workers())
        if process in self._busy or process.has_exited:
            return
        seconds = self.rng.uniform(1.2, 2) * LEASE
        self._note("pause", process=process.name, seconds=round(seconds, 1))
        self._busy.add(process)
        process.send_signal(signal.SIGSTOP)

        def go_on() -> None:
            process.send_signal(signal.SIGCONT)
            self._busy.discard(process)

        self._after(seconds, go_on)

    def _stop_one(self) -> None:
        """Stop a worker gracefully, and start another one."""
        if free := self._free():
            role, process = self.rng.choice(free)
            self._note("stop", process=process.name)
            self._stop_gracefully(process, lambda: self._replace(role))

    def _stop_gracefully(self, process: Process, then: Callable[[], None] = lambda: None) -> None:
        """Tell a process to stop, and measure how long it takes; one that takes too long writes its stacks."""
        self._busy.add(process)
        self._stopping.add(process)
        if not process.has_exited and not process.handles_signal(signal.SIGTERM):
            # It is only starting: the signal would end it as any other program.
            self._after(0.2, lambda: self._stop_gracefully(process, then))
            return
        self._expected_ends.add(process)
        start, told = time.monotonic(), False
        process.send_signal(signal.SIGTERM)

        def look() -> None:
            nonlocal told
            took = time.monotonic() - start
            if process.has_exited:
                self._samples.write("stop", {"process": process.name, "seconds": round(took, 2), "grace": GRACE})
                if process.exit_code:
                    text = f"{process.name} stopped with the exit code {process.exit_code}: {process.output[-1500:]}"
                    self._unexpected.append(text)
                self._stopping.discard(process)
                then()
                return
            if took > GRACE + STOP_LIMIT and not told:
                told = True
                process.send_signal(signal.SIGUSR1)
            if took > GIVE_UP:
                process.send_signal(signal.SIGKILL)
            self._after(0.1, look)

        look()

    def _disconnect(self) -> None:
        self._note("disconnect")
        with contextlib.suppress(psycopg.Error), self._database.connect() as connection:
            others = """
                SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()
                AND backend_type = 'client backend'
            """
            for (pid,) in connection.execute(others).fetchall():
                if self.rng.random() < 0.4:
                    connection.execute("SELECT pg_terminate_backend(%s)", [pid])

    def _go_silent(self) -> None:
        """Let all connections of workers bring nothing more, for so long that deadlines pass."""
        seconds, answers_new = self.rng.uniform(10, 40), self.rng.random() < 0.7
        self._note("silence", seconds=round(seconds, 1), answers_new=answers_new)
        self._proxy.go_silent(answers_new=answers_new)
        self._after(seconds, self._proxy.close_silent)

    def _restart_server(self) -> None:
        self._note("restart")
        self._server.restart(self.rng.choice(["fast", "immediate"]))

    # -- the whole -----------------------------------------------------------------------------------------------------

    def run(self) -> dict[str, Any]:
        """Run the piece, and return its end: what was done, lost, done twice, and left."""
        end = time.monotonic() + self._plan.seconds
        self._start_all()
        self._after(self._plan.sample_every, self._sample)
        self._after(min(self.rng.uniform(*self._plan.fault_every), self._plan.seconds / 4), self._fault)
        self._pass_time(lambda: time.monotonic() >= end)
        self._end_faults()
        # The two that have lived all the time stop under the load.
        for role in ("sync", "async"):
            self._stop_gracefully(self._lasting.pop(role))
        self._pass_time(lambda: not self._stopping)
        for role in ("producer", "operator"):
            self._stop_gracefully(self._lasting.pop(role))
        self._pass_time(lambda: not self._stopping)
        left = self._drain()
        self._stop_gracefully(self._lasting.pop("monitor"))
        for role in [*self._mortal]:
            self._stop_gracefully(self._mortal.pop(role))
        self._pass_time(lambda: not self._stopping)
        checked = self._checker.checked
        ended = {
            "done": checked.done,
            "cancelled": checked.cancelled,
            "lost": checked.lost,
            "twice": checked.twice,
            "unexpected": self._unexpected,
            "left": left,
            "plan": vars(self._plan),
        }
        self._samples.write("ended", ended)
        return ended

    def _end_faults(self) -> None:
        """Let no new fault begin, and wait until the last ones are over."""
        self._later = [entry for entry in self._later if entry[2] != self._fault]
        heapq.heapify(self._later)
        end = max((at for at, _, action in self._later if action != self._sample), default=0.0)
        self._pass_time(lambda: time.monotonic() > end and not self._stopping)

    def _drain(self) -> dict[str, int]:
        """Wait until no job is left; return the number of those that are, for each queue."""
        engine = sa.create_engine(self._database.url())
        with engine.begin() as connection:
            for model in QUEUES:
                connection.execute(resume(model))
            # What waits to be mended would stay failed for ever.
            for model in QUEUES:
                if hasattr(model, "kind"):
                    connection.execute(sa.update(model).where(model.kind == "broken").values(kind="plain"))
        deadline = time.monotonic() + DRAIN
        left: dict[str, int] = {}

        def is_empty() -> bool:
            with engine.begin() as connection:
                self._requeue_failed(connection)
                query = sa.text("SELECT queue, count(*) FROM soak_expected GROUP BY queue")
                left.clear()
                left.update((str(queue), int(number)) for queue, number in connection.execute(query))
            return not left or time.monotonic() > deadline

        self._pass_time(is_empty)
        engine.dispose()
        return dict(left)

    @staticmethod
    def _requeue_failed(connection: sa.Connection) -> None:
        for model in QUEUES:
            connection.execute(requeue(sa.select(model).where(model.status == "failed")))


def run_piece(directory: Path, server: Server, samples: SampleFile, plan: Plan) -> dict[str, Any]:
    """Run one piece; a process that does not stop is killed at the end."""
    outputs = directory / f"outputs-{plan.seed}"
    outputs.mkdir(exist_ok=True)
    with Proxy(Database(server, DATABASE)) as proxy, Piece(outputs, server, proxy, samples, plan) as piece:
        return piece.run()
