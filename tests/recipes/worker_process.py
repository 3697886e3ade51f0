"""A worker process that runs a recipe's Consumer until a signal: ``worker_process RECIPE URL HOLD POISON``.

Each job writes an effect through the session of its handler. In its HOLD-th job the worker prints this and waits to be
killed; with 0 it does not. The job whose key is POISON kills the worker, and another one replaces it.
"""

import itertools
import os
import signal
import sys
import threading
from typing import Any

import sqlalchemy as sa

from sqlaqueue.consumer import pace
from tests.recipes.conftest import Recipe

DEADLY = 13
"""The exit code of a worker that a job has killed."""

EFFECT = sa.text("INSERT INTO effect (job, worker) VALUES (:job, :worker)")


def say(line: str) -> None:
    """Write a line unbuffered, because the process may be killed at any moment."""
    os.write(sys.stdout.fileno(), f"{line}\n".encode())


def main() -> None:
    """Run the worker; if a job may kill it, in a child process that is then replaced."""
    if sys.argv[-1] == "0":
        work(*sys.argv[1:])
        return
    child, code = 0, DEADLY
    signal.signal(signal.SIGTERM, lambda number, _: os.kill(child, number))
    while code == DEADLY:
        child = os.fork()
        if not child:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            work(*sys.argv[1:])
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code == DEADLY:
            say("died")


def work(name: str, url: str, hold: str, poison: str) -> None:
    """Run the Consumer until a signal arrives."""
    pace.RESCUE = 0.2
    program = Recipe(name).program(url)
    consumer, numbers = program.consumer, itertools.count(1)
    handle = consumer._handler

    def handler(session: Any, job: Any) -> None:
        number = next(numbers)
        key = sa.inspect(job).identity[0]
        session.execute(EFFECT, {"job": key, "worker": os.getpid()})
        handle(session, job)
        if key == int(poison):
            os._exit(DEADLY)
        if 0 < int(hold) <= number:
            say(f"holds {key}")
            threading.Event().wait()

    consumer._handler = handler
    consumer.on("claimed", lambda event: say(f"claimed {event.key[0]}"))
    consumer.run()
    program.engine.dispose()


if __name__ == "__main__":
    main()
