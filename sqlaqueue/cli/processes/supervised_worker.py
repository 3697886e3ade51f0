"""One worker process of a supervisor: ``python -m sqlaqueue.cli.processes.supervised_worker``.

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
from collections.abc import Collection

import click

from sqlaqueue.cli.processes.worker_options import WorkerOptions
from sqlaqueue.cli.processes.worker_process import WorkerProcess
from sqlaqueue.consumer.health import Health

STARTED = b"!"
"""Sent to the supervisor when the Consumers start."""

STUCK, ALIVE, READY = b"0", b"1", b"2"
"""Sent again and again: the health of the Consumers together."""

REPORT_INTERVAL = 1.0
"""Seconds between two reports of the health."""


def main() -> int:
    """Run the worker and return its exit code."""
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
    worker = WorkerProcess(WorkerOptions.from_json(received.decode()), lambda: connection.sendall(STARTED))

    def stop_when_closed() -> None:
        connection.recv(1)
        worker.stop()

    def report_health() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection.sendall(health_byte(worker.healths().values()))
                time.sleep(REPORT_INTERVAL)

    for task in (stop_when_closed, report_health):
        threading.Thread(target=task, name="sqlaqueue-supervisor", daemon=True).start()
    try:
        worker.run()
    except click.ClickException as error:
        error.show()
        return error.exit_code
    return 0


def health_byte(healths: Collection[Health]) -> bytes:
    """Return the worst health, as it is sent to the supervisor."""
    if not all(each.alive for each in healths):
        return STUCK
    return READY if healths and all(each.ready for each in healths) else ALIVE


if __name__ == "__main__":
    sys.exit(main())
