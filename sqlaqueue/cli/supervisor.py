"""The supervisor of ``sqlaqueue worker``: starts worker processes, and restarts them.

It is there with ``--processes``, ``--reload`` and ``--isolate``.

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
from sqlaqueue.cli.processes import (
    CALL_ENDED,
    OUTDATED,
    STARTED,
    Call,
    LeftRun,
    WorkerOptions,
    left_line,
    memory_text,
    read_call,
    read_error,
    read_leaving,
    read_note,
    read_report,
    resident_bytes,
)
from sqlaqueue.consumer.context import STUCK_AFTER, Health
from sqlaqueue.consumer.in_flight import DEATH_IS_KNOWN
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


class _Process:
    """A worker process, and what it has reported."""

    def __init__(self, number: int, options: WorkerOptions, metrics: str | None) -> None:
        if metrics is not None:
            # A cleaner of temporary directories may have removed it, and no worker could start without it.
            os.makedirs(metrics, mode=0o700, exist_ok=True)  # noqa: PTH103 - the directory is kept as a text
        self._options, self._metrics = options, metrics
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._popen = subprocess.Popen(
                # -P, or a file in the working directory could shadow a module of the library.
                [sys.executable, "-P", "-m", "sqlaqueue.cli.supervised_worker"],
                stdin=theirs.fileno(),
                # Ctrl-C at the terminal must reach the supervisor only.
                start_new_session=True,
                env=None if metrics is None else {**os.environ, http_module.DIRECTORY: metrics},
            )
        self.pid, self.started_at = self._popen.pid, time.monotonic()
        self.is_started = False
        """Whether its Consumers have started, or could."""
        self.error: str | None = None
        """Why it cannot start, if it has said so."""
        self.is_outdated = False
        """Whether it has an error that would come again at each start."""
        self.leaves: str | None = None
        """Why it ends after its current job, to be replaced; None if it does not."""
        self.killed_as: str | None = None
        """Why it was killed, as a limit was exceeded."""
        self.notes: list[str] = []
        self._received = b""
        self._health: Health | None = None
        self._reported_at = self.started_at
        self._call: Call | None = None
        self._called_at = 0.0
        self._killed: tuple[Call, str, str] | None = None
        """The call for which it was killed, and the class and the text of the error."""
        # Not on the command line, where other users could read the database's password.
        self._send(options.to_json().encode() + b"\n")
        self._socket.settimeout(0)
        extra = fields("process_started", number=number, pid=self.pid)
        logger.info("worker %d is process %d", number, self.pid, extra=extra)

    def send_left(self, left: Sequence[LeftRun]) -> None:
        """Let its Consumers start, which settle these runs of an earlier process first; then, tell it of others."""
        self._send(left_line(left))

    def _send(self, line: bytes) -> None:
        with contextlib.suppress(OSError):
            self._socket.sendall(line)

    def poll(self) -> int | None:
        """Read what the process has sent; return its exit code if it has ended."""
        # Before its socket is read: what it has sent is complete then.
        code = self._popen.poll()
        with contextlib.suppress(OSError):
            while part := self._socket.recv(65536):
                self._received += part
        *lines, self._received = self._received.split(b"\n")
        for line in lines:
            self._read(line)
        if code is not None:
            self._socket.close()
            http_module.forget_process(self.pid, self._metrics)
        return code

    def _read(self, line: bytes) -> None:
        if line == STARTED:
            self.is_started = True
        elif line == CALL_ENDED:
            self._call = None
        elif line == OUTDATED:
            self.is_outdated = True
        elif (call := read_call(line)) is not None:
            self._call, self._called_at = call, time.monotonic()
        elif (health := read_report(line)) is not None:
            self._health, self._reported_at = health, time.monotonic()
        elif (note := read_note(line)) is not None:
            self.notes.append(note)
        else:
            self.leaves, self.error = read_leaving(line) or self.leaves, read_error(line) or self.error

    def health(self) -> Health:
        if time.monotonic() - self._reported_at > STUCK_AFTER:
            return Health(alive=False, ready=False, problems=("it is stuck",))
        return self._health or Health(alive=True, ready=False, problems=("it is starting",))

    def exceed_limit(self) -> LeftRun | None:
        """Return the run whose handler has exceeded a limit, for which the process is to be killed; None usually."""
        call, most = self._call, self._options.max_memory
        if call is None or self._killed is not None:
            return None
        ran = time.monotonic() - self._called_at
        if call.limit is not None and ran > call.limit:
            kind = "JobTimeout"
            text = f"the handler ran for longer than {call.limit:g} seconds, and its process was killed"
        elif most is not None and (size := resident_bytes(self.pid)) > most:
            had = f"{memory_text(size)} of memory, more than --max-memory {memory_text(most)}"
            kind, text = "WorkerDied", f"its process had {had}, and was killed"
        else:
            return None
        self._killed, self.killed_as = (call, kind, text), f"{call.jobs}: {text}"
        return LeftRun(run=call.run or {}, seconds=ran, kind=kind, error=text)

    def kill_group(self) -> None:
        """Kill the process, and those that its handler has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def left_run(self, code: int) -> LeftRun | None:
        """Return the run that it has left behind, after it has ended with this exit code; None without any."""
        call = self._call
        # A worker that had to abandon its handler has released the job.
        if call is None or call.run is None or code == NOT_STOPPED:
            return None
        kind: str | None = "WorkerDied"
        error = f"its process {exit_reason(code)} while it ran this job alone"
        if code == -signal.SIGKILL:
            error += "; the system does that when it is out of memory"
        if self._killed is not None:
            # Another job may have begun at the last moment, which is not to blame.
            kind, error = self._killed[1:] if self._killed[0] is call else (None, "")
        return LeftRun(run=call.run, seconds=time.monotonic() - self._called_at, kind=kind, error=error)

    def stop(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def kill(self) -> None:
        self._popen.kill()
        self._popen.wait()


class WorkerSlot:
    """One of the numbered places for a worker process, and its current process."""

    def __init__(self, number: int, options: WorkerOptions, metrics: str | None = None) -> None:
        self.number, self._options, self._metrics = number, options, metrics
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
        self._process: _Process | None = None
        self._next: _Process | None = None
        """The process that takes the place of one that leaves: it has started, and waits for the end of the other."""
        self._left: list[LeftRun] = []
        """The runs that processes have left behind, for the next one."""
        self._told: list[tuple[float, LeftRun]] = []
        """The runs of processes of other slots that were killed, and when, for a process that does not run yet."""

    def start_if_due(self) -> None:
        if self.closed or self.waits_for_change or time.monotonic() < self._next_start:
            return
        if self._process is None:
            process = self._process = self._next or _Process(self.number, self._options, self._metrics)
            self._next, self._started_at = None, time.monotonic()
            self.error, self.is_started, self.is_restarting = None, False, False
            process.send_left(self._left)
            if told := [one for at, one in self._told if time.monotonic() - at < DEATH_IS_KNOWN]:
                process.send_left(told)
            self._left, self._told = [], []
        elif self._process.leaves and self._next is None and not self.is_restarting:
            self._next = _Process(self.number, self._options, self._metrics)

    def poll(self) -> int | None:
        """Read what the process has sent; return its exit code if it has ended."""
        process = self._process
        if self._next is not None:
            was_started = self._next.is_started
            if self._next.poll() is not None:
                # The reason comes up again when one is started in its place.
                self._next = None
                self._delay_start()
            elif self._next.is_started and not was_started and process is not None:
                extra = fields("process_waits", number=self.number, pid=self._next.pid)
                text = "worker %d: process %d waits for the end of process %d"
                logger.debug(text, self.number, self._next.pid, process.pid, extra=extra)
        if process is None:
            return None
        code = process.poll()
        self.is_started |= process.is_started
        self.has_started |= self.is_started
        self.error = process.error or self.error
        return code

    def enforce_limits(self, others: Sequence[WorkerSlot]) -> None:
        """Kill the process if its handler has exceeded a limit.

        Without a lease its job is free from then on, and one of the others may be the first to claim it. So they know
        of the death before.
        """
        process = self._process
        exceeding = None if process is None else process.exceed_limit()
        if process is not None and exceeding is not None:
            for other in others if exceeding.run else ():
                if other is not self:
                    other.tell(exceeding)
            process.kill_group()

    def tell(self, killed: LeftRun) -> None:
        """Tell the current process of a run whose process is being killed, or else the next one."""
        if self._process is not None:
            self._process.send_left([killed])
        if not self.closed and (self._process is None or self._next is not None):
            self._told.append((time.monotonic(), killed))

    def take_notes(self) -> list[str]:
        if self._process is None:
            return []
        notes, self._process.notes = self._process.notes, []
        return notes

    def take_ended(self, code: int) -> _Process | None:
        """Return the process, which has ended with this code, and forget it."""
        process, self._process = self._process, None
        left = None if process is None else process.left_run(code)
        self._left += [] if left is None else [left]
        return process

    @property
    def has_left(self) -> bool:
        """Whether a process has left a run behind, which the next one settles."""
        return bool(self._left)

    def health(self) -> Health:
        if self.closed or self._process is None:
            waiting = "it waits for a change of the files" if self.waits_for_change else "it is restarting"
            return Health(alive=True, ready=False, problems=("it is stopped" if self.closed else waiting,))
        return self._process.health()

    def _delay_start(self) -> float:
        self._deaths = 1 if time.monotonic() - self._started_at >= STABLE_AFTER else self._deaths + 1
        delay = restart_delay(self._deaths)
        self._next_start = time.monotonic() + delay
        return delay

    def schedule_restart(self, code: int) -> None:
        delay = self._delay_start()
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
        self._kill_next()
        if self._process is not None:
            self._process.stop()

    def kill(self) -> None:
        self._kill_next()
        if self._process is not None:
            self._process.kill()

    def _kill_next(self) -> None:
        # It has no job yet.
        if self._next is not None:
            self._next.kill()
            self._next.poll()
            self._next = None

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
                if code is None:
                    slot.enforce_limits(self._slots)
                for note in slot.take_notes():
                    self._log_once(note)
                if code is not None:
                    self._handle_exit(slot, code)
            if self._changes is None:
                time.sleep(_CHECK_INTERVAL)
            else:
                self._restart_after(next(self._changes))
        return self._exit_code

    def _log_once(self, note: str) -> None:
        if note not in self._printed:
            self._printed.add(note)
            logger.warning("%s", note, extra=fields("isolated"))

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
        process = slot.take_ended(code)
        if process is not None and process.killed_as is not None:
            extra = fields("process_killed", number=slot.number, pid=process.pid)
            logger.warning("worker %d: %s", slot.number, process.killed_as, extra=extra)
            return
        if process is not None and process.leaves is not None and code == 0:
            extra = fields("process_replaced", number=slot.number, pid=process.pid)
            logger.info("worker %d is replaced %s", slot.number, process.leaves, extra=extra)
            return
        if slot.is_restarting and not slot.closed:
            # If it has an error, that is one of files which have changed since.
            return
        outdated = process is not None and process.is_outdated
        known = self._printed if self._changes is not None or not slot.has_started or outdated else ()
        if slot.error is not None and slot.error not in known:
            self._printed.add(slot.error)
            click.echo(f"Error: {slot.error}", err=True)
        # A handler may end its process with any exit code.
        expected = slot.closed or (self._draining and code == 0 and not slot.has_left)
        if not expected and self._changes is not None and not slot.is_started and code != NO_DATABASE:
            slot.wait_for_change(code)
            return
        # No change of the files starts a database, and a signal says nothing about the options.
        if not expected and not outdated and (slot.has_started or self._changes is not None or code < 0):
            slot.schedule_restart(code)
            return
        slot.closed = True
        if code:
            extra = fields("process_died", number=slot.number)
            logger.warning("worker %d %s", slot.number, exit_reason(code), extra=extra)
            # The exit code of a process that could not start tells why; a later failure is FAILED.
            tells_why = code == NOT_STOPPED or outdated or (code > 0 and not slot.has_started)
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
