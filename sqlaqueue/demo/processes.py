"""The worker processes: starting, stopping, and the jobs that each holds."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Mapping


class WorkerProcess:
    """A worker process of the demo.

    :param number: its number, from 1.
    """

    def __init__(self, number: int, strategy: str, batch: int, environment: Mapping[str, str]) -> None:
        self.number = number
        self.holds: set[int] = set()
        """The keys of the jobs that it has claimed and not finished."""
        self.rescued: list[int] = []
        """The keys of the jobs that it rescued from a dead worker."""
        self.ready = self.paused = self.killed = False
        self.stderr_lines: list[str] = []
        """Its output on standard error, after it has ended."""
        # -P, or a file in the working directory could shadow a module of the library.
        command = [sys.executable, "-P", "-m", "sqlaqueue.demo.worker", strategy, str(batch)]
        self._process = subprocess.Popen(  # noqa: S603 - a module of this package
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # Ctrl-C at the terminal must reach the demo only, which then stops its workers.
            start_new_session=True,
        )
        stdin, stdout, stderr = self._process.stdin, self._process.stdout, self._process.stderr
        assert stdin is not None and stdout is not None and stderr is not None  # noqa: S101, PT018 - they are pipes
        self._stdin, self._stdout, self._stderr = stdin, stdout, stderr
        # Errors are read as they come, or a worker that writes many would wait for the pipe. A temporary file would
        # do as well, but stays behind when the demo is killed while it is made.
        self._readers = [threading.Thread(target=read, daemon=True) for read in (self._read_events, self._read_errors)]
        for reader in self._readers:
            reader.start()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    def _read_events(self) -> None:
        for line in self._stdout:
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

    def _read_errors(self) -> None:
        self.stderr_lines = self._stderr.read().decode(errors="replace").splitlines()

    def resume(self) -> None:
        """Let it continue the job at which it has paused."""
        self.paused = False
        self._stdin.write(b"resume\n")
        self._stdin.flush()

    def kill(self) -> None:
        """Kill it by SIGKILL, and read its remaining events."""
        self._process.kill()
        self._end()
        self.killed, self.paused = True, False

    def stop(self) -> int:
        """Stop it by SIGTERM, as a service manager does, and return its exit code."""
        self._process.terminate()
        return self._end()

    def _end(self) -> int:
        code = self._process.wait()
        for reader in self._readers:
            reader.join()
        for file in (self._stdin, self._stdout, self._stderr):
            file.close()
        return code
