"""A process that has imported everything, and forks into workers: they begin in no time.

``python -m tests.faults.zygote`` reads an order a line and answers each with a line; see :class:`Zygote`. It ends, and
its children with it, when its standard input does.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any, Self

from sqlalchemy.orm import configure_mappers

from tests.consumer.models import STRATEGIES, models
from tests.faults import worker

ROOT = Path(__file__).parents[2]


class Zygote:
    """The test's end of it."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.zygote"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def fork(self, order: dict[str, Any]) -> int:
        """Start a process and return its id, which stays its own until :meth:`reap`."""
        return self._ask(["fork", order])

    def reap(self, pid: int) -> int:
        """Return the exit code of a process that has ended, negative for a signal."""
        return self._ask(["reap", pid])

    def _ask(self, request: list[Any]) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{json.dumps(request)}\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())


def has_ended(pid: int, patience: float = 0) -> bool:
    """Wait for the end of a process that is not reaped yet, and return whether it has come."""
    handle = os.pidfd_open(pid)
    try:
        return bool(select.select([handle], [], [], patience)[0])
    finally:
        os.close(handle)


def main() -> None:
    for strategy in (*STRATEGIES, "own_message"):
        assert models(strategy)
    configure_mappers()
    children: set[int] = set()
    for line in sys.stdin:
        match json.loads(line):
            case "fork", order:
                answer = fork(order)
                children.add(answer)
            case "reap", pid:
                children.discard(pid)
                answer = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        sys.stdout.write(f"{answer}\n")
        sys.stdout.flush()
    for pid in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def fork(order: Any) -> int:
    """Return the id of a new process that does what it was ordered."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        worker.live(order)
        code = 0
    except BaseException:  # noqa: BLE001 - nothing may return into the loop of the parent
        traceback.print_exc()
    finally:
        # os._exit() writes out nothing that is buffered.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
