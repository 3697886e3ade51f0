"""Worker processes with a Consumer each: forked by one that has imported everything, so that they begin in no time."""

from __future__ import annotations

import os
import threading
from multiprocessing.context import ForkServerProcess
from typing import Any, Self

from tests.consumer import worker
from tests.consumer.handler_io import DEADLINE
from tests.programs import FORKS, wait_until
from tests.servers import Database


class Worker:
    """A process with a Consumer; what it says on its standard output can be waited for.

    It rescues expired leases every ``rescue`` seconds, by default more often than usual; with ``restart`` it starts
    processes, a new one whenever one dies.
    """

    def __init__(self, database: Database, strategy: str, api: str, handler: str, options: dict[str, Any]) -> None:
        options = {"poll_interval": 0.05, "grace": 20} | options
        consumers, restart = options.pop("consumers", 1), options.pop("restart", False)
        rescue = options.pop("rescue", 0.2)
        order = {
            "url": database.url("psycopg" if api == "sync" else "asyncpg"),
            "strategy": strategy,
            "api": api,
            "handler": handler,
            "options": options,
            "consumers": consumers,
            "restart": restart,
            "rescue": rescue,
            "pool": consumers * (options.get("concurrency", 1) + 1),
        }
        self.lines: list[str] = []
        (orders, self._orders), (self._words, words) = FORKS.Pipe(duplex=False), FORKS.Pipe(duplex=False)
        self.process: ForkServerProcess = FORKS.Process(target=worker.live, args=(order, orders, words))
        self.process.start()
        # The worker has copies of these; only the last one that is closed ends the pipe.
        orders.close()
        words.close()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with os.fdopen(os.dup(self._words.fileno())) as lines:
            for line in lines:
                self.lines.append(line.rstrip())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.join()
        self._reader.join()
        self._orders.close()
        self._words.close()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    @property
    def has_ended(self) -> bool:
        return self.process.exitcode is not None

    def said(self, beginning: str) -> list[str]:
        """Return what follows ``beginning`` in each line that begins like that."""
        return [line.removeprefix(beginning).strip() for line in list(self.lines) if line.startswith(beginning)]

    def await_word(self, beginning: str, times: int = 1) -> None:
        """Wait until it has said something."""

        def was_said() -> bool:
            assert not self.has_ended or len(self.said(beginning)) >= times, "the worker ended before that"
            return len(self.said(beginning)) >= times

        wait_until(was_said, f"{beginning!r} from the worker")

    def write(self, line: str) -> None:
        """Say something to it."""
        os.write(self._orders.fileno(), f"{line}\n".encode())

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def await_end(self) -> int:
        """Wait for its end and return the exit code."""
        self.process.join(DEADLINE)
        assert self.process.exitcode is not None, "the worker does not end"
        self._reader.join()
        return self.process.exitcode
