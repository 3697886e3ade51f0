"""Several worker processes under one supervisor, which starts again what dies.

A process is told to stop by the end of its socket, not by a signal: a service manager may signal all processes of a
service at once, and a second signal would end a worker in the middle of its jobs.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from types import FrameType

from sqlaqueue.cli.errors import FAILED
from sqlaqueue.cli.order import Order
from sqlaqueue.log import fields, logger

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
"""Seconds before a process is started again: twice as long each time, up to a limit."""

STEADY = 30.0
"""Seconds after which a process counts as well, so that the next pause is a short one again."""

_LOOK = 0.05
_NUMBERS = (signal.SIGTERM, signal.SIGINT)


def pause_before(deaths: int) -> float:
    """Return the seconds to wait after so many deaths in a row."""
    return float(min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** min(deaths - 1, 20)))


class Worker:
    """A place for a worker process, and the process that has it now."""

    def __init__(self, number: int, order: Order) -> None:
        self.number, self._order = number, order
        self.begun = False
        """Whether some process here has begun to serve."""
        self.over = False
        """Nothing is to be started here any more."""
        self._deaths = 0
        self._next_start = 0.0
        self._started = 0.0
        self._process: subprocess.Popen[bytes] | None = None
        self._line: socket.socket | None = None

    def start_if_due(self) -> None:
        """Start a process, when there is none and it is time to."""
        if self.over or self._process is not None or time.monotonic() < self._next_start:
            return
        mine, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                # -P, or a file in the working directory could stand in for a module of the library.
                [sys.executable, "-P", "-m", "sqlaqueue.cli.child"],
                stdin=theirs.fileno(),
                # A Ctrl-C at the terminal is for the supervisor.
                start_new_session=True,
            )
        self._line, self._started = mine, time.monotonic()
        # Not on its command line, where everybody could read the password.
        with contextlib.suppress(OSError):
            mine.sendall(self._order.to_text().encode() + b"\n")
        mine.settimeout(0)
        extra = fields("process_started", number=self.number, pid=self._process.pid)
        logger.info("worker %d is process %d", self.number, self._process.pid, extra=extra)

    def look(self) -> int | None:
        """Note what the process has said; return its exit code when it has ended."""
        if self._process is None or self._line is None:
            return None
        with contextlib.suppress(OSError):
            self.begun = bool(self._line.recv(16)) or self.begun
        code = self._process.poll()
        if code is not None:
            self._line.close()
            self._process = self._line = None
        return code

    def died(self, code: int) -> None:
        """Plan the next start."""
        self._deaths = 1 if time.monotonic() - self._started >= STEADY else self._deaths + 1
        pause = pause_before(self._deaths)
        self._next_start = time.monotonic() + pause
        extra = fields("process_died", number=self.number, delay=pause)
        text = "worker %d %s; it is started again in %.1f s"
        logger.warning(text, self.number, how_it_ended(code), pause, extra=extra)

    def stop(self) -> None:
        """Have the process stop in order."""
        self.over = True
        if self._line is not None:
            with contextlib.suppress(OSError):
                self._line.shutdown(socket.SHUT_WR)

    def kill(self) -> None:
        """End the process at once."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    @property
    def lives(self) -> bool:
        """Whether there is a process."""
        return self._process is not None


def supervise(order: Order, processes: int) -> int:
    """Keep so many worker processes at work until a signal arrives, and return the exit code.

    The first one has to begin to serve before there are others: what keeps it from that would keep all of them. A
    second signal kills them, and ends this process as well.
    """
    supervisor = Supervisor(order, processes)
    with _noted(supervisor.signals):
        try:
            return supervisor.watch()
        finally:
            supervisor.stop()


class Supervisor:
    """The worker processes of one order."""

    def __init__(self, order: Order, processes: int) -> None:
        self.signals: list[int] = []
        """Those that have arrived."""
        self._workers = [Worker(number, order) for number in range(1, processes + 1)]
        self._draining = order.drain
        self._stopping = False
        self._result = 0

    def stop(self) -> None:
        """Have all processes stop in order."""
        self._stopping = True
        for worker in self._workers:
            worker.stop()

    def watch(self) -> int:
        """Start processes and start them again, until all are over; return the exit code."""
        first = self._workers[0]
        while any(worker.lives or not worker.over for worker in self._workers):
            self._answer_signals()
            for worker in self._workers if first.begun or self._stopping else [first]:
                worker.start_if_due()
                code = worker.look()
                if code is not None:
                    self._ended(worker, code)
            if first.over and not first.begun:
                self.stop()
            time.sleep(_LOOK)
        return self._result

    def _answer_signals(self) -> None:
        if len(self.signals) > 1:
            for worker in self._workers:
                worker.kill()
            _die_by(self.signals[-1])
        if self.signals and not self._stopping:
            name, number = signal.Signals(self.signals[0]).name, sum(worker.lives for worker in self._workers)
            extra = fields("shutdown_started", signal=name, count=number)
            text = "%s: stopping, %d worker processes are told to; a second signal kills them"
            logger.info(text, name, number, extra=extra)
            self.stop()

    def _ended(self, worker: Worker, code: int) -> None:
        done = worker.over or (self._draining and code == 0)
        if not done and worker.begun:
            worker.died(code)
            return
        worker.over = True
        if code:
            extra = fields("process_died", number=worker.number)
            logger.warning("worker %d %s", worker.number, how_it_ended(code), extra=extra)
            # It could not begin: its own code says why. One that could, and ends badly now, has failed.
            self._result = code if code > 0 and not worker.begun else FAILED


@contextlib.contextmanager
def _noted(signals: list[int]) -> Iterator[None]:
    def note(number: int, _: FrameType | None) -> None:
        signals.append(number)

    before = {number: signal.signal(number, note) for number in _NUMBERS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _die_by(number: int) -> None:
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    # The first process of a container does not die by a signal.
    sys.exit(128 + number)


def how_it_ended(code: int) -> str:
    """Return the end of a process in words."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
