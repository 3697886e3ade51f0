"""run_all(): several Consumers run in one process, stop together, and no error is lost."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import sessionmaker

from sqlaqueue import AsyncConsumer, Consumer
from sqlaqueue.consumer.core.signals import signal_handlers
from sqlaqueue.exc import ConfigurationError, HandlerNotStopped
from tests.consumer.bench import Bench, nothing
from tests.consumer.models import for_async, for_sync
from tests.programs import wait_until


class Crowd:
    """Two Consumers of a bench's queue that share one engine."""

    def __init__(self, bench: Bench, *handlers: Any, **engine: Any) -> None:
        self.bench = bench
        self.engine: Any
        make = {"pool_size": 2 * len(handlers), "max_overflow": 0} | engine
        if bench.api == "sync":
            self.engine = sa.create_engine(bench.database.url(), **make)
            self.consumers: list[Any] = [
                Consumer(bench.Job, for_sync(one), sessionmaker(self.engine), poll_interval=0.05) for one in handlers
            ]
        else:
            self.engine = create_async_engine(bench.database.url("asyncpg"), **make)
            self.consumers = [
                AsyncConsumer(bench.Job, for_async(one), async_sessionmaker(self.engine), poll_interval=0.05)
                for one in handlers
            ]

    def run(self) -> None:
        if self.bench.api == "sync":
            try:
                Consumer.run_all(*self.consumers)
            finally:
                self.engine.dispose()
        else:
            asyncio.run(self._run())

    async def _run(self) -> None:
        try:
            await AsyncConsumer.run_all(*self.consumers)
        finally:
            await self.engine.dispose()

    def stop(self) -> None:
        for consumer in self.consumers:
            consumer.stop()


def in_thread(crowd: Crowd) -> tuple[threading.Thread, list[BaseException]]:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            crowd.run()
        except BaseException as error:  # noqa: BLE001 - for the test to see
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, errors


def test_all_consumers_work_with_the_smallest_allowed_pool(bench: Bench) -> None:
    started, go_on = threading.Semaphore(0), threading.Event()

    async def work(io: Any, job: Any) -> None:
        started.release()
        await io.wait(go_on)

    crowd = Crowd(bench, work, work)
    thread, errors = in_thread(crowd)
    try:
        # One that begins with both jobs of a held batch leaves none to the other: so one after the other.
        for _ in range(2):
            bench.enqueue()
            assert started.acquire(timeout=30)
    finally:
        go_on.set()
    wait_until(lambda: bench.states() == {"completed": 2})
    # One that is stopped by itself does not end the others.
    crowd.consumers[0].stop()
    wait_until(lambda: crowd.consumers[0]._context is None)
    bench.enqueue()
    wait_until(lambda: bench.states() == {"completed": 3})
    crowd.stop()
    thread.join(30)
    assert not thread.is_alive()
    assert errors == []


def test_an_error_of_one_consumer_stops_the_others_and_is_raised(mixed: Bench, log: pytest.LogCaptureFixture) -> None:
    started, go_on = threading.Event(), threading.Event()

    async def work(io: Any, job: Any) -> None:
        started.set()
        await io.wait(go_on)

    mixed.enqueue()
    crowd = Crowd(mixed, work, work)
    thread, errors = in_thread(crowd)
    assert started.wait(30)
    wait_until(lambda: all(one._context is not None for one in crowd.consumers))
    idle = next(one for one in crowd.consumers if not one._context.in_flight.busy())
    idle._context.fail(LookupError("this one is broken"))
    wait_until(lambda: all(one._context is None or one._context.stopping for one in crowd.consumers))
    assert thread.is_alive()
    go_on.set()
    thread.join(30)
    assert [str(error) for error in errors] == ["this one is broken"]
    # The other one was stopped in order: its job is done.
    assert mixed.states() == {"completed": 1}
    assert "raised LookupError: this one is broken; stopping the other Consumers" in log.text


def test_a_handler_that_goes_on_is_named_whatever_else_has_failed(supply: Any) -> None:
    bench, started, go_on = supply.take("update_status", "sync"), threading.Event(), threading.Event()
    bench.enqueue()
    engine = sa.create_engine(bench.database.url())

    def work(_: Any, __: Any) -> None:
        started.set()
        go_on.wait(60)

    consumers = [Consumer(bench.Job, work, sessionmaker(engine), poll_interval=0.05, grace=0.1) for _ in range(2)]

    def fail() -> None:
        assert started.wait(30)
        wait_until(lambda: all(one._context is not None for one in consumers))
        contexts: list[Any] = [one._context for one in consumers]
        next(one for one in contexts if not one.in_flight.busy()).fail(LookupError("this one is broken"))

    thread = threading.Thread(target=fail)
    thread.start()
    try:
        with pytest.raises(HandlerNotStopped, match=r"\(job 1, for"):
            Consumer.run_all(*consumers)
    finally:
        go_on.set()
        thread.join()
        engine.dispose()


def test_a_consumer_that_cannot_start_stops_the_others(mixed: Bench) -> None:
    crowd = Crowd(mixed, nothing, nothing)
    crowd.consumers[1]._context = crowd.consumers[1].stop = Mock()
    with pytest.raises(ConfigurationError, match="is running already"):
        crowd.run()
    assert crowd.consumers[0]._context is None


def test_a_consumer_that_is_stopped_before_it_starts_ends_at_once(mixed: Bench) -> None:
    """A signal may arrive when one has started and the other has not."""
    crowd = Crowd(mixed, nothing, nothing)
    one, other = crowd.consumers
    begin = other._begin

    def late(context: Any) -> None:
        # As a signal would: all are told, and this one has nothing to stop so far.
        signal_handlers._stops[0]()
        begin(context)

    other._begin = late
    thread, errors = in_thread(crowd)
    thread.join(30)
    assert not thread.is_alive()
    assert errors == []
    assert one._context is other._context is None


ROOT = Path(__file__).parents[2]

PROGRAM = """
import asyncio, json, sys, sqlalchemy as sa
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import sessionmaker
from sqlaqueue import AsyncConsumer, Consumer
from tests.consumer.models import models

url, strategy, api = json.loads(sys.argv[1])
Job = models(strategy).job

def handle(session, job):
    print("done", job.id, flush=True)

async def handle_async(session, job):
    print("done", job.id, flush=True)

async def main():
    engine = create_async_engine(url, pool_size=6)
    await AsyncConsumer.run_all(*(AsyncConsumer(Job, handle_async, async_sessionmaker(engine)) for _ in range(3)))
    await engine.dispose()

if api == "sync":
    engine = sa.create_engine(url, pool_size=6)
    Consumer.run_all(*(Consumer(Job, handle, sessionmaker(engine)) for _ in range(3)))
else:
    asyncio.run(main())
print("ended in order", flush=True)
"""


@pytest.mark.each_value
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_all_consumers(mixed: Bench, number: signal.Signals) -> None:
    driver = "psycopg" if mixed.api == "sync" else "asyncpg"
    order = json.dumps([mixed.database.url(driver), mixed.strategy, mixed.api])  # type: ignore[arg-type] # a driver's name
    mixed.enqueue(3)
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, order], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        wait_until(lambda: mixed.states() == {"completed": 3} and serving(mixed) == 3)
        process.send_signal(number)
        said, _ = process.communicate(timeout=30)
    assert process.returncode == 0
    assert said.splitlines()[-1] == "ended in order"
    assert serving(mixed) == 0


def serving(bench: Bench) -> int:
    return int(bench.execute("SELECT count(*) FROM sqlaqueue_consumer"))


def test_cancelling_the_task_stops_all_consumers(supply: Any, strategy: str) -> None:
    bench: Bench = supply.take(strategy, "async")

    async def main() -> None:
        crowd = Crowd(bench, nothing, nothing)
        task = asyncio.create_task(crowd._run())
        while serving(bench) < 2:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert serving(bench) == 0


# -- what cannot be meant ----------------------------------------------------------------------------------------------


def call(kind: Any, *given: Any) -> None:
    found = kind.run_all(*given)
    if asyncio.iscoroutine(found):
        asyncio.run(found)


def test_wrong_arguments_are_refused(leased: Bench) -> None:
    consumer = leased.consumer(nothing).consumer
    kind, other = (Consumer, AsyncConsumer) if leased.api == "sync" else (AsyncConsumer, Consumer)
    for given, said in [
        ([], "give at least one"),
        ([[consumer]], rf"{kind.__name__}.run_all\(one, other\)"),
        ([leased.Job], "as separate arguments"),
        ([consumer, consumer], "is given twice"),
    ]:
        with pytest.raises(ConfigurationError, match=said):
            call(kind, *given)
    with pytest.raises(ConfigurationError, match="as separate arguments"):
        call(other, consumer)


def test_a_pool_that_is_too_small_for_all_consumers_is_refused(leased: Bench) -> None:
    crowd = Crowd(leased, nothing, nothing, nothing, pool_size=4, max_overflow=1)
    with pytest.raises(ConfigurationError, match=r"need 6 connections, .* allows 5; use .*pool_size=6"):
        crowd.run()
