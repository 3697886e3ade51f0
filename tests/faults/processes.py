"""The processes of a test under faults: each plays a role, is killed, paused or ended, and reports what it does.

A role is a function of an :class:`Actor` and of parameters. It runs in a process that is forked, see
:mod:`tests.programs`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, Self

import sqlalchemy as sa

from tests.faults.history import HistoryReader, Record, Recorder, with_event
from tests.programs import FORKS, wait_until


class Actor:
    """A process, as its role sees it."""

    def __init__(self, name: str, directory: Path, seed: float) -> None:
        self.name, self.directory = name, directory
        self.recorder, self.rng = Recorder(directory, name), random.Random(seed)


Role = Callable[..., None]


class Process:
    """A process, as the test sees it."""

    def __init__(self, test: Processes, name: str, role: Role, parameters: dict[str, Any]) -> None:
        self.test, self.name, self.role, self.parameters = test, name, role, parameters
        actor = name, test.directory, test.rng.random()
        self._process: ForkServerProcess = FORKS.Process(target=_play, args=(role, actor, parameters))
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        return self._process.exitcode

    @property
    def has_exited(self) -> bool:
        return self.exit_code is not None

    @property
    def output(self) -> str:
        path = self.test.directory / f"{self.name}.out"
        return path.read_text(errors="replace") if path.exists() else ""

    def records(self, *events: str) -> list[Record]:
        return with_event(self.test.records(), *events, process=self.name)

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, if it runs; SIGKILL and SIGSTOP are recorded as faults."""
        if number in {signal.SIGKILL, signal.SIGSTOP}:
            self.test.record_fault(number.name, to=self.name)
        if not self.has_exited:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)
        if number == signal.SIGSTOP:
            # The process may run on for a moment until the kernel has stopped all of its threads.
            self.test.wait_until(self._is_paused, f"{self.name} is paused")

    def _is_paused(self) -> bool:
        with contextlib.suppress(FileNotFoundError):
            tasks = Path(f"/proc/{self.pid}/task").iterdir()
            return all(task.joinpath("stat").read_text().rpartition(")")[2].split()[0] == "T" for task in tasks)
        return self.has_exited

    def handles_signal(self, number: signal.Signals) -> bool:
        """Return whether the process has a signal handler: a Consumer has one until it is told to stop."""
        with contextlib.suppress(FileNotFoundError):
            for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
                if line.startswith("SigCgt"):
                    return bool(int(line.split()[1], 16) >> (number - 1) & 1)
        return False  # the process has exited

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)
        self.test.wait_until(
            lambda: self.has_exited or not self.handles_signal(signal.SIGTERM), f"{self.name} receives SIGTERM"
        )

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)
        self.wait()

    def wait(self) -> int:
        self._process.join(self.test.timeout)
        assert self.exit_code is not None, f"{self.name} did not exit"
        return self.exit_code

    def exits_within(self, seconds: float) -> bool:
        """Wait until the process exits; return False after so many seconds."""
        self._process.join(seconds)
        return self.has_exited

    def clear(self) -> None:
        """Kill it, if it still runs, without a record."""
        self._process.kill()
        self._process.join()


class Processes:
    """The processes of one test and their history.

    :param rng: the random choices of the test, from which those of each process follow.
    :param timeout: the number of seconds after which a wait fails.
    """

    def __init__(self, directory: Path, rng: random.Random, *, timeout: float = 60) -> None:
        self.directory, self.rng, self.timeout = directory, rng, timeout
        self.recorder, self._reader = Recorder(directory, "test"), HistoryReader(directory)
        self.processes: list[Process] = []

    def start(self, role: Role, name: str, /, **parameters: Any) -> Process:
        """Start a process; a number is added to its name."""
        process = Process(self, f"{name}{len(self.processes)}", role, parameters)
        self.processes.append(process)
        return process

    def start_again(self, process: Process) -> Process:
        """Start a process in the place of one that has ended."""
        return self.start(process.role, process.name.rstrip("0123456789"), **process.parameters)

    def running(self) -> list[Process]:
        return [one for one in self.processes if not one.has_exited]

    def records(self) -> list[Record]:
        return self._reader.records()

    def record_fault(self, kind: str, **details: Any) -> None:
        self.recorder.record("fault", kind=kind, **details)

    def end_connections(self, engine: sa.Engine, share: float, *, spare: str = "") -> None:
        """Terminate each connection to the database with a probability, but those of the application ``spare``."""
        others = """
            SELECT pid FROM pg_stat_activity
            WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'
              AND (:spare = '' OR application_name <> :spare)
        """
        with engine.connect() as connection:
            for pid in connection.scalars(sa.text(others), {"spare": spare}).all():
                if self.rng.random() < share:
                    self.record_fault("terminated connection", pid=pid)
                    connection.execute(sa.text("SELECT pg_terminate_backend(:pid)"), {"pid": pid})

    def wait_until(self, condition: Callable[[], Any], description: str | Callable[[], str]) -> None:
        """Wait until ``condition`` is true; fail after the timeout."""
        wait_until(condition, description, self.timeout)

    def stop(self) -> None:
        """Send SIGTERM to the processes that run, and check that each stops without an error."""
        running = self.running()
        for one in running:
            one.send_signal(signal.SIGTERM)
        for one in running:
            assert one.wait() == 0, f"{one.name} exited with {one.exit_code}"
            assert one.records("stopped"), f"{one.name} did not return from its role"

    def diagnostics(self) -> str:
        """Return the history, the stacks and the output of all processes, for the report of a failure."""
        for one in self.running():
            one.send_signal(signal.SIGUSR1)  # faulthandler writes the stacks
        time.sleep(0.3)
        outputs = [f"-- {one.name}\n{one.output[-6000:]}" for one in self.processes]
        return "\n".join([*map(str, self.records()), *outputs])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        """Kill all processes, and add the diagnostics to an error."""
        if error is not None:
            error.add_note(self.diagnostics())
        for one in self.processes:
            one.clear()
        self.recorder.close()


def _play(role: Role, actor: tuple[str, Path, float], parameters: dict[str, Any]) -> None:
    """Become a process: its output goes to a file, and its end is that of its role."""
    threading.Thread(target=_end_with_the_test, daemon=True).start()
    random.seed()
    name, directory, _ = actor
    with (directory / f"{name}.out").open("ab", buffering=0) as output:
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    logging.basicConfig(format="%(asctime)s %(threadName)s %(message)s", level=logging.INFO)
    code = 1
    try:
        own = Actor(*actor)
        role(own, **parameters)
        own.recorder.record("stopped")
        code = 0
    except BaseException:  # noqa: BLE001 - as Python itself does at the end of a program
        traceback.print_exc()
    finally:
        # A handler may go on in a thread, for which another exit would wait. This one does not flush buffers.
        for flushed in (sys.stdout, sys.stderr):
            flushed.flush()
        os._exit(code)


def _end_with_the_test() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
