"""The worker processes as the show sees them: what each has told, and what it holds."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path


class WorkerProcess:
    """A worker process of the demo.

    :param number: its number in the show, from 1.
    :param log: the file for what it says on standard error.
    """

    def __init__(self, number: int, strategy: str, batch: int, environment: Mapping[str, str], log: Path) -> None:
        self.number, self.log = number, log
        self.holds: set[int] = set()
        """The keys of the jobs that it has claimed and not ended."""
        self.rescued: list[int] = []
        """The keys of the jobs that it took back from a dead worker."""
        self.ready = self.paused = self.killed = False
        # -P, or a file in the working directory could stand in for a module of the library.
        command = [sys.executable, "-P", "-m", "sqlaqueue.demo.worker", strategy, str(batch)]
        with log.open("wb") as errors:
            self._process = subprocess.Popen(  # noqa: S603 - a module of this package
                command,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                # A Ctrl-C at the terminal is for the show, which then ends its workers.
                start_new_session=True,
            )
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def lives(self) -> bool:
        """Whether it runs."""
        return self._process.poll() is None

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            match line.decode().split():
                case ["ready"]:
                    self.ready = True
                case ["paused"]:
                    self.paused = True
                case ["claimed", key]:
                    self.holds.add(int(key))
                case ["rescued", key]:
                    self.rescued.append(int(key))
                case [_, key]:
                    self.holds.discard(int(key))

    def go_on(self) -> None:
        """Let it go on with the job at which it has paused."""
        assert self._process.stdin is not None
        self.paused = False
        self._process.stdin.write(b"go on\n")
        self._process.stdin.flush()

    def kill(self) -> None:
        """End it by SIGKILL, and read to the end what it has told."""
        self._process.kill()
        self._end()
        self.killed, self.paused = True, False

    def stop(self) -> int:
        """End it by SIGTERM, as a service manager would, and return its exit code."""
        self._process.terminate()
        return self._end()

    def _end(self) -> int:
        code = self._process.wait()
        self._listener.join()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        return code
