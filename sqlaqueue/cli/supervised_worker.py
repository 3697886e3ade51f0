"""One worker process of a supervisor: ``python -m sqlaqueue.cli.supervised_worker``.

Its standard input is a socket. The process reads its options from there, reports when its Consumers could start, or why
they cannot, starts them at the next line, and stops when the other end is closed, by the supervisor or because the
supervisor died.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from uuid import UUID

import click
import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue import exc
from sqlaqueue.admin.jobs import key_parts
from sqlaqueue.cli.database import TargetDatabase
from sqlaqueue.cli.output import InputError, NotStoppedError, OutdatedWorkerError, end_process
from sqlaqueue.cli.processes import (
    CALL_ENDED,
    OUTDATED,
    REPORT_INTERVAL,
    STARTED,
    Call,
    LeftRun,
    WorkerOptions,
    WorkerProcess,
    call_report,
    error_report,
    health_report,
    leaving_report,
    memory_text,
    note_report,
    read_left,
    resident_bytes,
)
from sqlaqueue.consumer.base import ConsumerBase
from sqlaqueue.consumer.in_flight import Deaths, KnownDeath, LeftBehind
from sqlaqueue.log import fields, logger
from sqlaqueue.mapping.runs import runs_of
from sqlaqueue.queue.run import Key, Run, key_text
from sqlaqueue.queue.spec import QueueSpec

AFTER_CANCELLATION = 2.0
"""Seconds that a task has to end after it was cancelled at its timeout, before its process is killed."""

_WITHOUT_SUPERVISOR = 5.0
"""Seconds after which a process that should have been killed ends itself: its supervisor is dead, or stands still."""


class _Supervisor:
    """The process that has started this one, at the other end of a socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self._received = b""
        self._has_started = False
        self._goes = threading.Event()
        self.left: list[LeftRun] = []
        """The runs of a process that has died, of which this one takes the place."""
        self.on_death: Callable[[LeftRun], object] = lambda _: None
        """Called with each run of another process that is being killed."""

    def options(self) -> WorkerOptions | None:
        """Return the options of this process; None if the supervisor died before it sent them."""
        line = self._line()
        return None if line is None else WorkerOptions.from_json(line.decode())

    def _line(self) -> bytes | None:
        while b"\n" not in self._received:
            part = self._connection.recv(65536)
            if not part:
                return None
            self._received += part
        line, _, self._received = self._received.partition(b"\n")
        return line

    def wait_until_closed(self) -> None:
        # A supervisor that was killed before it read the last report resets the connection.
        with contextlib.suppress(OSError):
            while (line := self._line()) is not None:
                left = read_left(line)
                if self._goes.is_set():
                    for one in left:
                        self.on_death(one)
                else:
                    self.left = left
                    self._goes.set()
        self._goes.set()

    def report_start(self) -> None:
        """Report that the Consumers could start, and wait until they may."""
        self._has_started = True
        self.send(STARTED)
        self._goes.wait()

    def report_health(self, worker: WorkerProcess) -> None:
        with contextlib.suppress(OSError):
            while True:
                self.send(health_report(worker.healths()))
                time.sleep(REPORT_INTERVAL)

    def report_error(self, error: click.ClickException) -> None:
        """Report why this process cannot start: several may have the same error, and the supervisor prints it once."""
        outdated = isinstance(error, OutdatedWorkerError)
        try:
            if outdated:
                self.send(OUTDATED)
            if outdated or not self._has_started:
                self.send(error_report(error.format_message()))
                return
        except OSError:
            pass  # the supervisor has died
        error.show()

    def send(self, line: bytes) -> None:
        with self._sending:
            self._connection.sendall(line + b"\n")


class _Isolation:
    """Has the only Consumer of this process run one job at a time, and reports each call of its handler."""

    def __init__(self, options: WorkerOptions, supervisor: _Supervisor) -> None:
        self._options, self._supervisor = options, supervisor
        self.worker = WorkerProcess(options, self._start, self._prepare)
        self._consumer: Any = None
        self._deaths = Deaths()
        self._limit: float | None = None
        self._jobs = 0
        self._leaves = False
        self._pid = os.getpid()
        # While the application is imported, processes of others may be killed, whose jobs are free from then on.
        supervisor.on_death = self._note_death

    def _prepare(self, consumers: Sequence[ConsumerBase]) -> None:
        if len(consumers) != 1:
            queues = ", ".join(each.queue for each in consumers)
            raise InputError(
                f"--isolate: {len(consumers)} Consumers ({queues}), but a process runs one handler at a time; start a "
                "worker for each"
            )
        consumer = self._consumer = consumers[0]
        size, allowed = resident_bytes(os.getpid()), self._options.max_memory
        if allowed is not None and size > allowed:
            raise InputError(
                f"--max-memory {memory_text(allowed)}: the process has {memory_text(size)} before its first job; give "
                "more"
            )
        given = consumer.settings
        if given.concurrency > 1:
            text = (
                f"queue {consumer.queue}: with --isolate a process runs one handler at a time, so concurrency="
                f"{given.concurrency} of its Consumer has no effect; the number of handlers is --processes"
            )
            self._send(note_report(text))
        if given.timeout is not None:
            # A thread cannot be cancelled.
            self._limit = given.timeout + AFTER_CANCELLATION if consumer.is_async else given.timeout
        consumer.isolate(self._deaths)
        consumer.add_middleware(self._around_async if consumer.is_async else self._around)

    def _start(self) -> None:
        self._supervisor.report_start()
        self._take_over()

    def _take_over(self) -> None:
        """Give the Consumer the run of the process that has died, of which this one takes the place."""
        left, self._supervisor.left = self._supervisor.left, []
        for one in left:
            try:
                self._deaths.left_behind = [*self._deaths.left_behind, self._left_behind(one)]
            except Exception as error:  # noqa: BLE001 - such as a database that is gone: then its lease expires
                extra = fields("run_error", queue=self._consumer.queue, error_kind=type(error).__name__)
                text = "queue %s: job %s stays claimed until its lease expires: %s"
                logger.warning(text, self._consumer.queue, one.run["key"], error, extra=extra)

    def _left_behind(self, left: LeftRun) -> LeftBehind:
        consumer, run, now = self._consumer, left.run, time.monotonic()
        spec: QueueSpec = consumer.settings.spec
        with TargetDatabase(consumer.session_factory) as database:
            key: Key = database.run(_typed_key, spec, run["key"])
        token = None if run["token"] is None else UUID(run["token"])
        dead = Run(key, token, run["attempt"], run["max_attempts"], worker=run["worker"])
        dead.claimed_at = dead.handler_started_at = now - left.seconds
        dead.duration = left.seconds
        return LeftBehind(dead, _error(left))

    def _note_death(self, left: LeftRun) -> None:
        error = _error(left)
        if error is not None:
            self._deaths.add(left.run["key"], KnownDeath(error, left.seconds, left.run["worker"], left.run["attempt"]))

    def _around(self, job: Any, call: Callable[[], Any]) -> None:
        self._begin(job)
        try:
            call()
        finally:
            self._end()

    async def _around_async(self, job: Any, call: Callable[[], Any]) -> None:
        self._begin(job)
        try:
            await call()
        finally:
            self._end()

    def _begin(self, job: Any) -> None:
        settings = self._consumer.settings
        runs = runs_of(job if isinstance(job, list) else [job])
        known, first = None, runs[0]
        jobs = f"job {key_text(first.key)}" if len(runs) == 1 else f"{len(runs)} jobs"
        if len(runs) == 1:
            token = None if settings.holds_transaction or first.token is None else str(first.token)
            known = {
                "key": key_text(first.key),
                "token": token,
                "attempt": first.attempt,
                "max_attempts": first.max_attempts,
                "worker": settings.worker(),
            }
        self._jobs += len(runs)
        # Before the handler is called: it may hold the interpreter's lock for ever.
        self._send(call_report(Call(jobs=f"queue {self._consumer.queue}: {jobs}", limit=self._limit, run=known)))
        if self._limit is not None:
            # Its thread does not need the interpreter's lock. It writes where the handler hangs.
            faulthandler.dump_traceback_later(self._limit + _WITHOUT_SUPERVISOR, exit=True, file=2)
        if self._options.max_jobs is not None and self._jobs >= self._options.max_jobs:
            self._leave(f"after {self._jobs} jobs")

    def _end(self) -> None:
        if os.getpid() != self._pid:
            # A child that a handler has forked, and that returns from it: the call of this process goes on.
            return
        faulthandler.cancel_dump_traceback_later()
        self._send(CALL_ENDED)
        if self._options.max_memory is not None:
            size = resident_bytes(os.getpid())
            if size > self._options.max_memory:
                self._leave(f"as it has {memory_text(size)} of memory after a job")
        if self._leaves:
            # Not before: the job that runs would have the grace period only.
            self.worker.stop()

    def _leave(self, why: str) -> None:
        if not self._leaves:
            self._leaves = True
            self._send(leaving_report(why))

    def _send(self, line: bytes) -> None:
        # Without a supervisor this process is about to stop.
        with contextlib.suppress(OSError):
            self._supervisor.send(line)


def _error(left: LeftRun) -> Exception | None:
    return None if left.kind is None else getattr(exc, left.kind)(left.error)


def _typed_key(session: Session, spec: QueueSpec, text: str) -> Key:
    return tuple(session.execute(sa.select(*key_parts(spec, text)), bind_arguments={"mapper": spec.mapper}).one())


def main() -> int:
    supervisor = _Supervisor(socket.socket(fileno=os.dup(0)))
    null = os.open(os.devnull, os.O_RDONLY)
    # A handler that reads standard input must not read from the supervisor's socket.
    os.dup2(null, 0)
    os.close(null)
    options = supervisor.options()
    if options is None:
        return 0
    isolated = _Isolation(options, supervisor).worker if options.isolate else None
    worker = isolated or WorkerProcess(options, supervisor.report_start)

    def stop_when_closed() -> None:
        supervisor.wait_until_closed()
        worker.stop()

    for task in (stop_when_closed, partial(supervisor.report_health, worker)):
        threading.Thread(target=task, name="sqlaqueue-supervisor", daemon=True).start()
    try:
        worker.run()
    except NotStoppedError as error:
        end_process(error)
    except click.ClickException as error:
        supervisor.report_error(error)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
