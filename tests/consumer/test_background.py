"""Consumers in the background of a host program: `with`, `async with`, and the program's own signal handlers."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import sessionmaker

from sqlaqueue import AsyncConsumer, Consumer
from sqlaqueue.consumer import base as background
from sqlaqueue.consumer.consumer import ConsumerGroup
from sqlaqueue.consumer.core.signals import signal_handlers
from sqlaqueue.exc import ConfigurationError, HandlerNotStopped
from tests.consumer.bench import Bench, nothing
from tests.programs import wait_until
from tests.servers import Database


def hosted(server: Any, body: Callable[[Any], object]) -> None:
    """Run ``body`` in the block of a Consumer."""
    consumer = server.consumer
    if isinstance(consumer, Consumer):
        try:
            with consumer:
                body(consumer)
        finally:
            server.engine.dispose()
        return

    async def main() -> None:
        try:
            async with consumer:
                await asyncio.to_thread(body, consumer)
        finally:
            await server.engine.dispose()

    asyncio.run(main())


def enter(consumer: Any) -> None:
    """Enter the block of a Consumer that cannot start."""
    if isinstance(consumer, Consumer):
        with consumer:
            pytest.fail("it has begun")

    async def main() -> None:
        async with consumer:
            pytest.fail("it has begun")

    asyncio.run(main())


def test_a_block_serves_the_queue_and_shuts_down(mixed: Bench) -> None:
    """At the end of the block running jobs are finished and the others released. Signal handlers are not changed."""
    started, go_on = threading.Event(), threading.Event()
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    during: list[Any] = []

    async def work(io: Any, job: Any) -> None:
        started.set()
        await io.wait(go_on)

    def let_finish(context: Any) -> None:
        wait_until(lambda: context.stopping)
        go_on.set()

    def body(consumer: Any) -> None:
        assert started.wait(30)
        assert consumer.running
        during.extend(signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT))
        threading.Thread(target=let_finish, args=[consumer._context]).start()

    mixed.enqueue(3)
    server = mixed.consumer(work, batch_size=3)
    hosted(server, body)
    assert mixed.states() == {"completed": 1, "pending": 2}
    assert not server.consumer.running
    assert server.consumer.error is None
    if mixed.api == "sync":
        assert during == before
    else:
        # That of asyncio.run().
        assert all("SignalHandlers" not in repr(each) for each in during)


def test_the_end_of_a_block_has_a_grace_period(leased: Bench) -> None:
    started, never = threading.Event(), threading.Event()

    async def work(io: Any, job: Any) -> None:
        started.set()
        await io.wait(never)

    leased.enqueue()
    server = leased.consumer(work, grace=0.1)
    # A task is cancelled; a thread goes on, and the error names its handler.
    goes_on = (
        pytest.raises(HandlerNotStopped, match=r"\(job 1, for \d s\) goes on")
        if leased.api == "sync"
        else contextlib.nullcontext()
    )
    with goes_on:
        hosted(server, lambda _: started.wait(30))
    server.given_up.set()
    assert leased.states() == {"pending": 1}


def test_a_block_raises_what_keeps_its_consumer_from_starting(database: Database, api: str) -> None:
    """After its tables are created, it can be entered."""
    bench = Bench(database, "update_status", api)
    entered: list[Any] = []
    server = bench.consumer()
    with pytest.raises(ConfigurationError, match="job"):
        hosted(server, entered.append)
    assert not entered
    assert not server.consumer.running
    bench.create()
    bench.enqueue()
    hosted(server, lambda _: wait_until(lambda: bench.states() == {"completed": 1}))
    assert server.consumer.error is None


def test_an_error_that_ends_a_consumer_is_logged_and_raised(leased: Bench, log: pytest.LogCaptureFixture) -> None:
    def fail(consumer: Any) -> None:
        consumer._context.fail(LookupError("broken"))
        wait_until(lambda: not consumer.running)
        wait_until(lambda: consumer.error is not None)

    def fail_as_well(consumer: Any) -> None:
        fail(consumer)
        msg = "the host's own"
        raise KeyError(msg)

    server = leased.consumer()
    with pytest.raises(LookupError, match="broken"):
        hosted(server, fail)
    assert "raised LookupError: broken; it no longer serves its queue" in log.text
    with pytest.raises(KeyError, match="the host's own"):
        hosted(server, fail_as_well)
    assert str(server.consumer.error) == "broken"


def test_a_consumer_that_is_stopped_before_the_end_of_its_block(leased: Bench) -> None:
    def body(consumer: Any) -> None:
        consumer.stop()
        wait_until(lambda: not consumer.running)

    server = leased.consumer()
    hosted(server, body)
    assert server.consumer.error is None


def test_a_block_begins_without_the_database(
    leased: Bench, log: pytest.LogCaptureFixture, unused_tcp_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "START_TIMEOUT", 3600.0)
    url = leased.engine.url.set(host="127.0.0.1", port=unused_tcp_port, query={})
    server: Any = leased.consumer()
    if leased.api == "sync":
        server.engine = sa.create_engine(url)
        server.consumer = Consumer(leased.Job, lambda session, job: None, sessionmaker(server.engine))
    else:
        server.engine = create_async_engine(url.set(drivername="postgresql+asyncpg"))

        async def handle(session: Any, job: Any) -> None: ...

        server.consumer = AsyncConsumer(leased.Job, handle, async_sessionmaker(server.engine))
    running: list[bool] = []
    thread = threading.Thread(
        target=hosted, args=(server, lambda consumer: running.append(consumer.running)), daemon=True
    )
    thread.start()
    wait_until(lambda: running == [True])
    thread.join()
    assert "next try in" in log.text


def test_consumers_that_share_a_pool_that_is_too_small(leased: Bench) -> None:
    """The pool is large enough for each of them, but not for both."""
    server = leased.consumer(engine={"pool_size": 3, "max_overflow": 0})
    other = type(server.consumer)(leased.Job, server.consumer._handler, server.session)

    def body(_: Any) -> None:
        with pytest.raises(ConfigurationError, match=r"share this engine \(.*, .*\) need 4 connections.* allows 3"):
            enter(other)

    hosted(server, body)


def test_wrong_uses_of_a_block_are_refused(leased: Bench) -> None:
    server = leased.consumer()

    def body(consumer: Any) -> None:
        with pytest.raises(ConfigurationError, match="is running already"):
            enter(consumer)
        with pytest.raises(ConfigurationError, match="is running already"):
            server.drain_again()

    hosted(server, body)
    consumer: Any = server.consumer
    with pytest.raises(ConfigurationError, match="has not been entered"):
        if leased.api == "sync":
            consumer.__exit__(None, None, None)
        else:
            asyncio.run(consumer.__aexit__(None, None, None))


@pytest.mark.parametrize("times", [1, 2])
def test_a_cancelled_block_shuts_down(supply: Any, times: int) -> None:
    """At the first time handlers have their grace period; at the second they are cancelled."""
    bench = supply.take("update_status", "async")
    started, go_on = threading.Event(), threading.Event()

    async def work(io: Any, job: Any) -> None:
        started.set()
        await io.wait(go_on)

    bench.enqueue()
    server = bench.consumer(work)

    async def serve() -> None:
        async with server.consumer:
            await asyncio.sleep(60)

    async def main() -> None:
        task = asyncio.create_task(serve())
        assert await asyncio.to_thread(started.wait, 30)
        context = server.context
        for _ in range(times):
            task.cancel()
            while not context.stopping:
                await asyncio.sleep(0.01)
        if times == 1:
            go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        await server.engine.dispose()

    asyncio.run(main())
    assert bench.states() == {"completed" if times == 1 else "pending": 1}
    assert not server.consumer.running


# -- signals -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def host() -> Iterator[list[int]]:
    """The signals that the program's own handlers were called with."""
    received: list[int] = []
    before = {
        number: signal.signal(number, lambda n, _: received.append(n)) for number in (signal.SIGTERM, signal.SIGINT)
    }
    yield received
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.once
def test_signal_handlers_of_the_program_are_called_as_well(host: list[int]) -> None:
    """The first signal stops the Consumers and calls the program's handler; the second only calls it."""
    stopped: list[str] = []
    mine = signal.getsignal(signal.SIGTERM)
    with (
        signal_handlers.stop_on_signal(lambda: stopped.append("one")),
        signal_handlers.stop_on_signal(lambda: stopped.append("other")),
    ):
        signal.raise_signal(signal.SIGTERM)
        assert host == [signal.SIGTERM]
        assert stopped == ["one", "other"]
        signal.raise_signal(signal.SIGINT)
        assert host == [signal.SIGTERM, signal.SIGINT]
    assert signal.getsignal(signal.SIGTERM) is mine
    assert stopped == ["one", "other"]


@pytest.mark.once
def test_a_signal_handler_that_raises_does_not_end_the_grace_period(host: list[int]) -> None:
    ended: list[str] = []

    def serve() -> None:
        with signal_handlers.stop_on_signal(lambda: None):
            signal.raise_signal(signal.SIGTERM)
            ended.append("in order")

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
    with pytest.raises(SystemExit, match="7"):
        serve()
    assert ended == ["in order"]
    with signal_handlers.stop_on_signal(lambda: None):
        pass  # Raised once.


@pytest.mark.once
def test_signal_handlers_installed_meanwhile_stay(host: list[int]) -> None:
    def later(number: int, _: Any) -> None: ...

    with signal_handlers.stop_on_signal(lambda: None):
        signal.signal(signal.SIGTERM, later)
    assert signal.getsignal(signal.SIGTERM) is later


@pytest.mark.once
@pytest.mark.parametrize("installed", [1, 2])
def test_a_signal_that_arrives_while_the_handlers_are_installed_stops_the_consumer(
    host: list[int], monkeypatch: pytest.MonkeyPatch, installed: int
) -> None:
    calls: list[int] = []
    stopped: list[str] = []
    install = signal.signal
    mine = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]

    def install_and_receive(number: signal.Signals, handler: Any) -> Any:
        before = install(number, handler)
        calls.append(number)
        if len(calls) == installed:
            signal.raise_signal(signal.SIGTERM)
        return before

    monkeypatch.setattr(signal, "signal", install_and_receive)
    with signal_handlers.stop_on_signal(lambda: stopped.append("stopped")):
        assert (host, stopped) == ([signal.SIGTERM], ["stopped"])
        # As after any first signal, the next one is the program's.
        signal.raise_signal(signal.SIGINT)
        assert (host, stopped) == ([signal.SIGTERM, signal.SIGINT], ["stopped"])
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == mine


@pytest.mark.once
def test_signal_handlers_of_the_event_loop_are_called_as_well(host: list[int]) -> None:
    """As installed by aiohttp and Hypercorn, with ``loop.add_signal_handler()``."""

    async def main() -> None:
        received = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, received.set)
        with signal_handlers.stop_on_signal(lambda: None):
            signal.raise_signal(signal.SIGTERM)
            await asyncio.wait_for(received.wait(), 30)
        asyncio.get_running_loop().remove_signal_handler(signal.SIGTERM)

    asyncio.run(main())


@pytest.mark.once
def test_the_signal_handler_of_asyncio_is_not_called(host: list[int]) -> None:
    """It would cancel the main task and with it the job handlers."""
    signal.signal(signal.SIGINT, signal.default_int_handler)

    async def main() -> str:
        with signal_handlers.stop_on_signal(lambda: None):
            signal.raise_signal(signal.SIGINT)
            await asyncio.sleep(0)
            return "in order"

    assert asyncio.run(main()) == "in order"


@pytest.mark.once
def test_signals_can_be_left_to_the_program(leased: Bench, host: list[int]) -> None:
    mine, during = signal.getsignal(signal.SIGTERM), []

    async def work(io: Any, job: Any) -> None:
        during.append(signal.getsignal(signal.SIGTERM))

    leased.enqueue()
    server = leased.consumer(work, signals=False)
    server.drain()
    with ConsumerGroup([server.consumer]).running(signals=server.consumer.handles_signals):
        during.append(signal.getsignal(signal.SIGTERM))
    assert during == [mine, mine]
    with pytest.raises(ConfigurationError, match="signals=False is given to some only"):
        ConsumerGroup.of(type(server.consumer), [server.consumer, leased.consumer(nothing).consumer])
