"""A worker process of the supervisor's: ``python -m sqlaqueue.cli.child``, with a socket as its standard input.

It reads its order from there, says when it has begun to serve, and stops in order when the other end is closed: when
the supervisor wants it to, and when the supervisor is no more.
"""

from __future__ import annotations

import os
import socket
import sys
import threading

import click

from sqlaqueue.cli.order import Order
from sqlaqueue.cli.serving import Service

BEGUN = b"!"
"""What it says when it has begun to serve."""


def main() -> int:
    """Carry out an order and return the exit code."""
    line = socket.socket(fileno=os.dup(0))
    nothing = os.open(os.devnull, os.O_RDONLY)
    # A handler that reads from its standard input must not read what is said here.
    os.dup2(nothing, 0)
    os.close(nothing)
    said = b""
    while not said.endswith(b"\n"):
        part = line.recv(65536)
        if not part:
            return 0
        said += part
    service = Service(Order.from_text(said.decode()), lambda: line.sendall(BEGUN))

    def wait_for_the_end() -> None:
        line.recv(1)
        service.stop()

    threading.Thread(target=wait_for_the_end, name="sqlaqueue-supervisor", daemon=True).start()
    try:
        service.run()
    except click.ClickException as error:
        error.show()
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
