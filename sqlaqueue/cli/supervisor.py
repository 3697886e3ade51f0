"""The supervisor of ``sqlaqueue worker --processes`` and ``--reload``: starts worker processes, and restarts them.

It stops a process by closing its socket, not by a signal. A service manager may send its signal to all processes of a
service, and a second signal would end a worker in the middle of its jobs.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import click

from sqlaqueue.cli import http as http_module
from sqlaqueue.cli.http import serving_http
from sqlaqueue.cli.output import (
    FAILED,
    NO_DATABASE,
    NOT_STOPPED,
    FailedError,
    InputError,
    first_line,
    signals_handled,
)
from sqlaqueue.cli.processes import STARTED, WorkerOptions, read_error, read_report
from sqlaqueue.consumer.context import STUCK_AFTER, Health
from sqlaqueue.log import fields, logger
from sqlaqueue.texts import printable

FIRST_RESTART_DELAY, LONGEST_RESTART_DELAY = 0.5, 30.0
"""Seconds before a restart; each death in a row doubles the delay."""

STABLE_AFTER = 30.0
"""Seconds after which a process counts as stable: its death starts again with the first delay."""

_CHECK_INTERVAL = 0.05
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def supervise(options: WorkerOptions, processes: int, *, reload: bool = False) -> int:
    """Keep a number of worker processes running until a signal arrives; return the exit code.

    They start side by side. One that cannot start is given up, and an error that stops all of them is printed once. A
    second signal kills the processes, and this one.

    :param reload: whether to restart them when a Python file changes; one that cannot start waits for a change then.
    """
    try:
        with http_module.shared_directory(wanted=options.measured) as metrics:
            changes = _python_changes(_application_paths(options)) if reload else None
            supervisor = Supervisor(replace(options, http=None), processes, metrics, changes)
            read_metrics = http_module.of_processes(metrics)
            recorded = signals_handled(_SIGNALS, lambda number, _: supervisor.signals.append(number))
            with recorded, serving_http(options.http, supervisor.healths, read_metrics):
                try:
                    return supervisor.run()
                finally:
                    supervisor.stop()
    except _KilledError as killed:
        _die_by(killed.signal)


class _KilledError(Exception):
    """A second signal has arrived, and the processes are killed; the directory of their metrics is left."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.signal = number


def restart_delay(deaths: int) -> float:
    return float(min(LONGEST_RESTART_DELAY, FIRST_RESTART_DELAY * 2 ** min(deaths - 1, 20)))


class WorkerSlot:
    """One of the numbered places for a worker process, and its current process."""

    def __init__(self, number: int, options: WorkerOptions, metrics: str | None = None) -> None:
        self.number, self._options, self._metrics = number, options, metrics
        self._received = b""
        self._report: Health | None = None
        self._reported_at = 0.0
        self.is_started = False
        """Whether the Consumers of the current or last process have started."""
        self.has_started = False
        """Whether the Consumers of some process of this slot have started."""
        self.is_restarting = False
        """Whether the current process was stopped to be started again."""
        self.waits_for_change = False
        """Whether a process could not start, and a change of the files may help."""
        self.error: str | None = None
        """Why the last process could not start, if it has said so."""
        self.closed = False
        """Whether no process is to be started here any more."""
        self._deaths = 0
        self._next_start = 0.0
        self._started_at = 0.0
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    def start_if_due(self) -> None:
        if self.closed or self.waits_for_change or self.is_running or time.monotonic() < self._next_start:
            return
        if self._metrics is not None:
            # A cleaner of temporary directories may have removed it, and no worker could start without it.
            os.makedirs(self._metrics, mode=0o700, exist_ok=True)  # noqa: PTH103 - the directory is kept as a text
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                # -P, or a file in the working directory could shadow a module of the library.
                [sys.executable, "-P", "-m", "sqlaqueue.cli.supervised_worker"],
                stdin=theirs.fileno(),
                # Ctrl-C at the terminal must reach the supervisor only.
                start_new_session=True,
                env=None if self._metrics is None else {**os.environ, http_module.DIRECTORY: self._metrics},
            )
        self._socket, self._started_at = ours, time.monotonic()
        self._received, self._report, self._reported_at = b"", None, self._started_at
        self.error, self.is_started, self.is_restarting = None, False, False
        # Not on the command line, where other users could read the database's password.
        with contextlib.suppress(OSError):
            ours.sendall(self._options.to_json().encode() + b"\n")
        ours.settimeout(0)
        extra = fields("process_started", number=self.number, pid=self._process.pid)
        logger.info("worker %d is process %d", self.number, self._process.pid, extra=extra)

    def poll(self) -> int | None:
        """Read what the process has sent; return its exit code if it has ended."""
        if self._process is None or self._socket is None:
            return None
        # Before its socket is read: what it has sent is complete then.
        code = self._process.poll()
        with contextlib.suppress(OSError):
            while part := self._socket.recv(65536):
                self._received += part
        *lines, self._received = self._received.split(b"\n")
        self.is_started |= STARTED in lines
        self.has_started |= self.is_started
        self.error = next(filter(None, map(read_error, lines)), self.error)
        reports = [health for health in map(read_report, lines) if health is not None]
        if reports:
            self._report, self._reported_at = reports[-1], time.monotonic()
        if code is not None:
            self._socket.close()
            http_module.forget_process(self._process.pid, self._metrics)
            self._process = self._socket = None
        return code

    def health(self) -> Health:
        if self.closed or not self.is_running:
            waiting = "it waits for a change of the files" if self.waits_for_change else "it is restarting"
            return Health(alive=True, ready=False, problems=("it is stopped" if self.closed else waiting,))
        if time.monotonic() - self._reported_at > STUCK_AFTER:
            return Health(alive=False, ready=False, problems=("it is stuck",))
        return self._report or Health(alive=True, ready=False, problems=("it is starting",))

    def schedule_restart(self, code: int) -> None:
        self._deaths = 1 if time.monotonic() - self._started_at >= STABLE_AFTER else self._deaths + 1
        delay = restart_delay(self._deaths)
        self._next_start = time.monotonic() + delay
        extra = fields("process_died", number=self.number, delay=delay)
        text = "worker %d %s; restarting in %.1f s"
        logger.warning(text, self.number, exit_reason(code), delay, extra=extra)

    def wait_for_change(self, code: int) -> None:
        self.waits_for_change = True
        extra = fields("process_died", number=self.number)
        logger.warning("worker %d %s; waiting for a change of the files", self.number, exit_reason(code), extra=extra)

    def restart(self) -> None:
        """Start another process now, or when the current one has stopped as after a signal."""
        self.is_restarting, self.waits_for_change = self.is_running, False
        self._deaths, self._next_start = 0, 0.0
        self._stop_process()

    def stop(self) -> None:
        self.closed = True
        self._stop_process()

    def _stop_process(self) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_WR)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    @property
    def is_running(self) -> bool:
        return self._process is not None


class Supervisor:
    def __init__(
        self,
        options: WorkerOptions,
        processes: int,
        metrics: str | None = None,
        changes: Iterator[Sequence[str]] | None = None,
    ) -> None:
        self.signals: list[int] = []
        self._slots = [WorkerSlot(number, options, metrics) for number in range(1, processes + 1)]
        self._draining = options.drain
        self._changes = changes
        """Waits a moment for Python files that change, and yields them; None if no process is restarted then."""
        self._stopping = False
        self._exit_code = 0
        self._printed = set[str]()
        """The errors of processes that could not start: one in the options stops all of them, and each reports it."""

    def healths(self) -> dict[str, Health]:
        return {f"worker {slot.number}": slot.health() for slot in self._slots}

    def stop(self) -> None:
        self._stopping = True
        for slot in self._slots:
            slot.stop()

    def run(self) -> int:
        while any(slot.is_running or not slot.closed for slot in self._slots):
            self._handle_signals()
            for slot in self._slots:
                slot.start_if_due()
                code = slot.poll()
                if code is not None:
                    self._handle_exit(slot, code)
            if self._changes is None:
                time.sleep(_CHECK_INTERVAL)
            else:
                self._restart_after(next(self._changes))
        return self._exit_code

    def _restart_after(self, changed: Sequence[str]) -> None:
        if not changed or self._stopping:
            return
        others = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        extra = fields("files_changed", count=len(changed))
        logger.info("%s%s changed; restarting", printable(changed[0]), others, extra=extra)
        self._printed.clear()
        for slot in self._slots:
            slot.restart()

    def _handle_signals(self) -> None:
        if len(self.signals) > 1:
            for slot in self._slots:
                slot.kill()
            raise _KilledError(self.signals[-1])
        if self.signals and not self._stopping:
            name, number = signal.Signals(self.signals[0]).name, sum(slot.is_running for slot in self._slots)
            extra = fields("shutdown_started", signal=name, count=number)
            text = "%s: stopping %d worker processes; a second signal kills them"
            logger.info(text, name, number, extra=extra)
            self.stop()

    def _handle_exit(self, slot: WorkerSlot, code: int) -> None:
        if slot.is_restarting and not slot.closed:
            # If it has an error, that is one of files which have changed since.
            return
        known = self._printed if self._changes is not None or not slot.has_started else ()
        if slot.error is not None and slot.error not in known:
            self._printed.add(slot.error)
            click.echo(f"Error: {slot.error}", err=True)
        expected = slot.closed or (self._draining and code == 0)
        if not expected and self._changes is not None and not slot.is_started and code != NO_DATABASE:
            slot.wait_for_change(code)
            return
        # No change of the files starts a database.
        if not expected and (slot.has_started or self._changes is not None):
            slot.schedule_restart(code)
            return
        slot.closed = True
        if code:
            extra = fields("process_died", number=slot.number)
            logger.warning("worker %d %s", slot.number, exit_reason(code), extra=extra)
            # The exit code of a process that could not start tells why; a later failure is FAILED.
            tells_why = code == NOT_STOPPED or (code > 0 and not slot.has_started)
            self._exit_code = code if tells_why else FAILED


# -- the files of the application --------------------------------------------------------------------------------------

_LONGEST_GROUPING = 300
"""Milliseconds in which changes are taken together, as an editor or git may write many files."""


def _application_paths(options: WorkerOptions) -> list[Path]:
    """Return the current directory, and where the modules of the targets and handlers are if not below it."""
    here, paths = Path.cwd(), list[Path]()
    texts = [text for target in options.targets for text in target.split("=")] + options.handlers
    for name in dict.fromkeys(text.partition(":")[0].partition(".")[0] for text in texts):
        # A wrong name is an error in the worker processes. An outermost module is found without being imported.
        with contextlib.suppress(ImportError, ValueError):
            found = importlib.util.find_spec(name)
            if found is not None and found.submodule_search_locations is not None:
                paths += map(Path, found.submodule_search_locations)
            elif found is not None and found.has_location:
                paths.append(Path(str(found.origin)).parent)
    return [here, *(path for path in dict.fromkeys(paths) if path.is_dir() and not path.is_relative_to(here))]


def _python_changes(paths: Sequence[Path]) -> Iterator[Sequence[str]]:
    """Yield the Python files that have changed below these paths, and nothing now and then if none has."""
    try:
        from watchfiles import PythonFilter, watch  # noqa: PLC0415 - it needs an extra
    except ModuleNotFoundError:
        raise InputError("--reload needs watchfiles: pip install 'sqlaqueue[reload]'") from None
    # It logs each change of any file.
    logging.getLogger("watchfiles").setLevel(logging.WARNING)
    is_python = PythonFilter()
    # Not its own filter: it would not return while other files change, such as a database or a log.
    found = watch(
        *paths,
        watch_filter=None,
        debounce=_LONGEST_GROUPING,
        rust_timeout=round(_CHECK_INTERVAL * 1000),
        yield_on_timeout=True,
        ignore_permission_denied=True,
    )
    try:
        # The processes start when the files are watched.
        next(found)
    except (OSError, RuntimeError) as error:
        raise FailedError(f"--reload: the files cannot be watched: {first_line(error)}") from error
    return (sorted(_shown(path) for change, path in each if is_python(change, path)) for each in found)


def _shown(path: str) -> str:
    return os.path.relpath(path) if Path(path).is_relative_to(Path.cwd()) else path


def _die_by(number: int) -> NoReturn:
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    # The first process of a container does not die by a signal that it sends itself.
    sys.exit(128 + number)


def exit_reason(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
