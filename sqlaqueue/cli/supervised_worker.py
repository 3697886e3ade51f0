"""One worker process of a supervisor: ``python -m sqlaqueue.cli.supervised_worker``.

Its standard input is a socket. The process reads its options from there, reports when its Consumers start, and stops
when the other end is closed, by the supervisor or because the supervisor died.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time

import click

from sqlaqueue.cli.output import NotStoppedError, end_process
from sqlaqueue.cli.processes import REPORT_INTERVAL, STARTED, WorkerOptions, WorkerProcess, health_report


def main() -> int:
    connection = socket.socket(fileno=os.dup(0))
    null = os.open(os.devnull, os.O_RDONLY)
    # A handler that reads standard input must not read from the supervisor's socket.
    os.dup2(null, 0)
    os.close(null)
    received = b""
    while not received.endswith(b"\n"):
        part = connection.recv(65536)
        if not part:
            return 0
        received += part
    worker = WorkerProcess(WorkerOptions.from_json(received.decode()), lambda: connection.sendall(STARTED + b"\n"))

    def stop_when_closed() -> None:
        # A supervisor that was killed before it read the last report resets the connection.
        with contextlib.suppress(OSError):
            connection.recv(1)
        worker.stop()

    def report_health() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection.sendall(health_report(worker.healths()) + b"\n")
                time.sleep(REPORT_INTERVAL)

    for task in (stop_when_closed, report_health):
        threading.Thread(target=task, name="sqlaqueue-supervisor", daemon=True).start()
    try:
        worker.run()
    except NotStoppedError as error:
        end_process(error)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
