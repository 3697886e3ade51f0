"""One worker process of a supervisor: ``python -m sqlaqueue.cli.supervised_worker``.

Its standard input is a socket. The process reads its options from there, reports when its Consumers start, or why they
cannot, and stops when the other end is closed, by the supervisor or because the supervisor died.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from functools import partial

import click

from sqlaqueue.cli.output import NotStoppedError, end_process
from sqlaqueue.cli.processes import (
    REPORT_INTERVAL,
    STARTED,
    WorkerOptions,
    WorkerProcess,
    error_report,
    health_report,
)


class _Supervisor:
    """The process that has started this one, at the other end of a socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self._has_started = False

    def options(self) -> WorkerOptions | None:
        """Return the options of this process; None if the supervisor died before it sent them."""
        received = b""
        while not received.endswith(b"\n"):
            part = self._connection.recv(65536)
            if not part:
                return None
            received += part
        return WorkerOptions.from_json(received.decode())

    def wait_until_closed(self) -> None:
        # A supervisor that was killed before it read the last report resets the connection.
        with contextlib.suppress(OSError):
            self._connection.recv(1)

    def report_start(self) -> None:
        self._has_started = True
        self._send(STARTED)

    def report_health(self, worker: WorkerProcess) -> None:
        with contextlib.suppress(OSError):
            while True:
                self._send(health_report(worker.healths()))
                time.sleep(REPORT_INTERVAL)

    def report_error(self, error: click.ClickException) -> None:
        """Report why this process cannot start: several may have the same error, and the supervisor prints it once."""
        try:
            if not self._has_started:
                self._send(error_report(error.format_message()))
                return
        except OSError:
            pass  # the supervisor has died
        error.show()

    def _send(self, line: bytes) -> None:
        with self._sending:
            self._connection.sendall(line + b"\n")


def main() -> int:
    supervisor = _Supervisor(socket.socket(fileno=os.dup(0)))
    null = os.open(os.devnull, os.O_RDONLY)
    # A handler that reads standard input must not read from the supervisor's socket.
    os.dup2(null, 0)
    os.close(null)
    options = supervisor.options()
    if options is None:
        return 0
    worker = WorkerProcess(options, supervisor.report_start)

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
