"""Programs in processes of their own, forked by one that has imported everything, so that they begin in no time.

To start Python and to import the library takes a second of a core, which hundreds of tests would pay.
"""

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
DEADLINE = 60
"""Seconds until a test fails that waits in vain."""

# The one server of a process: a second list of modules would take the place of this one.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        *(f"sqlaqueue.cli.{name}" for name in ("change", "doctor", "http", "inspect", "schedules", "worker")),
        "sqlaqueue.web.dashboard",
        "tests.consumer.worker",
        "tests.faults.key_queues",
        "tests.faults.roles",
        "tests.faults.ticks",
        "tests.faults.duplicates",
        "uvicorn",
    ]
)


def wait_until(
    condition: Callable[[], Any], what: str | Callable[[], str] = "what the test waits for", seconds: float = DEADLINE
) -> None:
    """Wait until ``condition`` holds; far beyond what it can take, fail."""
    deadline, pause = time.monotonic() + seconds, 0.005
    while not condition():
        assert time.monotonic() < deadline, f"in vain: {what if isinstance(what, str) else what()}"
        time.sleep(pause)
        # Many conditions are queries: asked a hundred times a second, they took a tenth of the machine.
        pause = min(0.05, 1.5 * pause)


class _Words:
    """What a process writes to a pipe."""

    def __init__(self) -> None:
        self.words, self.end = FORKS.Pipe(duplex=False)
        self._pieces: list[bytes] = []
        self._reader = threading.Thread(target=self._read, daemon=True)

    def read(self) -> None:
        # The process has a copy of this end; only the last one that is closed ends the pipe.
        self.end.close()
        self._reader.start()

    def _read(self) -> None:
        while piece := os.read(self.words.fileno(), 65536):
            self._pieces.append(piece)

    def text(self) -> str:
        return b"".join(self._pieces).decode(errors="surrogateescape")

    def await_end(self, seconds: float) -> None:
        self._reader.join(seconds)
        # A child process that is left keeps the pipe open; to close it while it is read would wait for ever.
        assert not self._reader.is_alive(), "a child process is left"


class Program:
    """``python -m module arguments``, or a script, whose output is read while it runs.

    :param program: the name of a module, or the path of a script.
    :param environment: its environment; by default that of this process.
    :param apart: whether ``errors`` is what it writes to its standard error; it is in ``output`` otherwise.
    """

    def __init__(
        self,
        program: str | Path,
        *arguments: str | Path,
        environment: Mapping[str, str] | None = None,
        directory: Path | None = None,
        apart: bool = False,
    ) -> None:
        self._pipes = [_Words() for _ in range(1 + apart)]
        order = str(program), [*map(str, arguments)], dict(environment or os.environ), str(directory or Path.cwd())
        ends = self._pipes[0].end, self._pipes[-1].end
        self.process: ForkServerProcess = FORKS.Process(target=_run, args=(order, *ends))
        self.process.start()
        for pipe in self._pipes:
            pipe.read()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    @property
    def code(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        return self.process.exitcode

    @property
    def output(self) -> str:
        """What it has written so far."""
        return self._pipes[0].text()

    @property
    def errors(self) -> str:
        return self._pipes[-1].text()

    @property
    def lines(self) -> list[str]:
        return self.output.splitlines()

    def wait_for(self, text: str) -> None:
        wait_until(lambda: text in self.output, lambda: f"{text!r} in\n{self.output}")

    def signal(self, number: signal.Signals = signal.SIGTERM) -> None:
        os.kill(self.pid, number)

    def end(self) -> int:
        """Wait until it and its child processes have ended; return the exit code."""
        self.process.join(DEADLINE)
        code = self.process.exitcode
        if code is None:
            pytest.fail(f"the process does not end:\n{self.output}")
        for pipe in self._pipes:
            pipe.await_end(DEADLINE)
        return code

    def clear(self) -> None:
        """Kill it, and close what this process has of it."""
        self.process.kill()
        self.process.join()
        for pipe in self._pipes:
            pipe.await_end(5)
            pipe.words.close()


def run_program(program: str | Path, *arguments: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a program until it ends; see :class:`Program`."""
    running = Program(program, *arguments, apart=True, **options)
    try:
        return subprocess.CompletedProcess([program, *arguments], running.end(), running.output, running.errors)
    finally:
        running.clear()


def _run(order: tuple[str, list[str], dict[str, str], str], output: Connection, errors: Connection) -> None:
    """Become a program: with its environment, directory, arguments and output, in a session of its own."""
    program, arguments, environment, directory = order
    os.setsid()
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    for number, end in ((1, output), (2, errors)):
        os.dup2(end.fileno(), number)
    output.close()
    errors.close()
    sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
    sys.path[:0] = environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.argv = [program, *arguments]
    try:
        if program.endswith(".py"):
            sys.path.insert(0, str(Path(program).parent))
            runpy.run_path(program, run_name="__main__")
        else:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
    except Exception:  # noqa: BLE001 - as Python itself does at the end of a program
        traceback.print_exc()
        sys.exit(1)
