"""A caller that waits for a job, a handler that a test can hold back, and the notifications in between."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import sessionmaker

from sqlaqueue import JobResult, async_wait, wait
from sqlaqueue.mapping.mixin import spec_of
from sqlaqueue.postgresql.triggers import channel_of
from tests.consumer.bench import Bench, Server
from tests.programs import wait_until


class Waiter:
    """Calls ``wait()`` or ``async_wait()`` in a thread."""

    def __init__(self, bench: Bench, job: Any, **options: Any) -> None:
        self.bench, self.job, self.options = bench, job, options
        self.result: JobResult[Any] | None = None
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._wait, daemon=True)
        self._thread.start()

    def _wait(self) -> None:
        try:
            if self.bench.api == "sync":
                engine = sa.create_engine(self.bench.database.url(), poolclass=sa.NullPool)
                self.result = wait(sessionmaker(engine), self.job, **self.options)
            else:
                self.result = asyncio.run(self._wait_async())
        except BaseException as error:  # noqa: BLE001 - end() raises it
            self.error = error

    async def _wait_async(self) -> JobResult[Any]:
        engine = create_async_engine(self.bench.database.url("asyncpg"), poolclass=sa.NullPool)
        try:
            return await async_wait(async_sessionmaker(engine), self.job, **self.options)
        finally:
            await engine.dispose()

    @property
    def is_waiting(self) -> bool:
        return self._thread.is_alive()

    def end(self) -> JobResult[Any]:
        self._thread.join(30)
        assert not self._thread.is_alive(), "still waiting"
        if self.error is not None:
            raise self.error
        assert self.result is not None
        return self.result


class Gate:
    """A handler that waits until the test releases it; it raises the given errors, then none."""

    def __init__(self, *raised: Exception) -> None:
        self.started, self.go_on = threading.Semaphore(0), threading.Semaphore(0)
        self.raised = [*raised]

    async def __call__(self, hands: Any, job: Any) -> None:
        self.started.release()
        event = threading.Event()
        threading.Thread(target=lambda: (self.go_on.acquire(), event.set()), daemon=True).start()
        await hands.wait(event)
        if self.raised:
            raise self.raised.pop(0)

    def await_start(self) -> None:
        assert self.started.acquire(timeout=60), "the handler was not called"


@contextlib.contextmanager
def serving(bench: Bench, gate: Gate, **options: Any) -> Iterator[Server]:
    async def handle(hands: Any, job: Any) -> None:
        await gate(hands, job)

    with bench.consumer(handle, **{"poll_interval": 0.05} | options).running() as server:
        wait_until(lambda: server.context.polls.peers.listening, "that the Consumer listens")
        yield server


def remembers(server: Server, key: int) -> bool:
    """Return whether a Consumer remembers that a caller waits for a job."""
    return str(key) in server.context.waiters._until


@contextlib.contextmanager
def settled_notifications(bench: Bench) -> Iterator[Callable[[], list[str]]]:
    """Yield a function that returns the ``settled`` notifications received so far."""
    with bench.database.connect() as connection:
        connection.execute(f'LISTEN "{channel_of(spec_of(bench.Job))}"'.encode())

        def received() -> list[str]:
            connection.execute("SELECT 1")
            return [each.payload for each in connection.notifies(timeout=0.1) if each.payload.startswith("settled")]

        yield received


def enqueue_for_later(bench: Bench) -> int:
    """Add a job that make_due() makes due: a Consumer that holds a transaction receives notifications while idle."""
    bench.execute("INSERT INTO job (run_at) VALUES (now() + interval '1 h')")
    (key,) = bench.rows()
    return key


def make_due(bench: Bench) -> None:
    bench.execute("UPDATE job SET run_at = now()")
