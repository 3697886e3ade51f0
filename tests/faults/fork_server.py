"""A process that has imported all modules, and forks the processes of the tests, which start quickly.

``python -m tests.faults.fork_server`` reads one request per line from its standard input and answers each with a line;
see :class:`ForkServer`. At the end of its input it exits and kills its children.
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
from tests.faults import process_roles

ROOT = Path(__file__).parents[2]


class ForkServer:
    """The client of the fork server, which the test uses."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.fork_server"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def fork(self, parameters: dict[str, Any]) -> int:
        """Start a process and return its id, which is not reused before :meth:`reap`.

        :param parameters: what :func:`tests.faults.process_roles.run_role` takes.
        """
        return self._request(["fork", parameters])

    def reap(self, pid: int) -> int:
        """Return the exit code of a process that has exited; negative for a signal."""
        return self._request(["reap", pid])

    def _request(self, request: list[Any]) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{json.dumps(request)}\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())


def wait_for_exit(pid: int, timeout: float = 0) -> bool:
    """Wait until a process exits that has not been reaped; return False after ``timeout`` seconds."""
    handle = os.pidfd_open(pid)
    try:
        return bool(select.select([handle], [], [], timeout)[0])
    finally:
        os.close(handle)


def main() -> None:
    for strategy in (*STRATEGIES, "own_message"):
        assert models(strategy)
    configure_mappers()
    children: set[int] = set()
    for line in sys.stdin:
        match json.loads(line):
            case "fork", parameters:
                answer = fork(parameters)
                children.add(answer)
            case "reap", pid:
                children.discard(pid)
                answer = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        sys.stdout.write(f"{answer}\n")
        sys.stdout.flush()
    for pid in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def fork(parameters: Any) -> int:
    """Fork a process that runs the role in ``parameters``; return its id."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        process_roles.run_role(parameters)
        code = 0
    except BaseException:  # noqa: BLE001 - the child must not return into the loop of the parent
        traceback.print_exc()
    finally:
        # os._exit() does not flush buffers.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
