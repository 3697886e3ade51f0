"""Consumers in a host program: `with`, `async with`, several by `run_all()`, and the program's own signal handlers."""

import asyncio
import contextlib
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import Mock

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import sessionmaker

from sqlaqueue import AsyncConsumer, Consumer
from sqlaqueue.consumer import base as background
from sqlaqueue.consumer.consumer import ConsumerGroup
from sqlaqueue.consumer.core.signals import signal_handlers
from sqlaqueue.consumer.core.waker import Waker
from sqlaqueue.consumer.maintenance import cleanup
from sqlaqueue.exc import ConfigurationError, HandlerNotStopped
from tests.consumer.bench import Bench, Crowd, Gate, nothing, noting
from tests.programs import DEADLINE, wait_until
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
    gate = Gate()
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    during: list[Any] = []

    def let_finish(context: Any) -> None:
        wait_until(lambda: context.stopping)
        gate.open()

    def body(consumer: Any) -> None:
        gate.await_call()
        assert consumer.running
        during.extend(signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT))
        threading.Thread(target=let_finish, args=[consumer._context]).start()

    mixed.enqueue(3)
    server = mixed.consumer(gate, batch_size=3)
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
    gate = Gate()
    leased.enqueue()
    server = leased.consumer(gate, grace=0.1)
    # A task is cancelled; a thread goes on, and the error names its handler.
    goes_on = (
        pytest.raises(HandlerNotStopped, match=r"\(job 1, for \d s\) still runs")
        if leased.api == "sync"
        else contextlib.nullcontext()
    )
    with goes_on:
        hosted(server, lambda _: gate.await_call())
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


def test_an_error_that_ends_a_consumer_is_logged_and_raised(leased: Bench, log: Any) -> None:
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
    assert "raised LookupError: broken; it no longer works for its queue" in log.text
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
    leased: Bench, log: Any, unused_tcp_port: int, monkeypatch: pytest.MonkeyPatch
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
def test_a_cancelled_block_shuts_down(async_leased: Bench, times: int) -> None:
    """At the first time handlers have their grace period; at the second they are cancelled."""
    gate = Gate()
    async_leased.enqueue()
    server = async_leased.consumer(gate)

    async def serve() -> None:
        async with server.consumer:
            await asyncio.sleep(60)

    async def main() -> None:
        task = asyncio.create_task(serve())
        await asyncio.to_thread(gate.await_call)
        context = server.context
        for _ in range(times):
            task.cancel()
            while not context.stopping:
                await asyncio.sleep(0.01)
        if times == 1:
            gate.open()
        with pytest.raises(asyncio.CancelledError):
            await task
        await server.engine.dispose()

    asyncio.run(main())
    assert async_leased.states() == {"completed" if times == 1 else "pending": 1}
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
def test_a_signal_wakes_a_waiting_main_thread_that_it_did_not_interrupt(host: list[int]) -> None:
    """As one that arrives between the last bytecode and the system call; here another thread receives it."""

    def receive() -> None:
        time.sleep(0.1)  # Until the main thread waits; if it does not yet, the test cannot fail.
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)

    waker, (reader, writer) = Waker(), socket.socketpair()
    writer.settimeout(0)
    for descriptor in (-1, writer.fileno()):
        signal.set_wakeup_fd(descriptor)
        other = threading.Thread(target=receive)
        other.start()
        woken = waker.wait(DEADLINE, reader.fileno())
        assert signal.set_wakeup_fd(-1) == descriptor
        assert woken, "nothing was written"
        other.join()
    assert host == [signal.SIGTERM] * 2
    assert reader.recv(9) == bytes([signal.SIGTERM]), "the event loop has not got its signal"
    for end in (waker, reader, writer):
        end.close()


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
    mine, during = signal.getsignal(signal.SIGTERM), list[Any]()
    leased.enqueue()
    server = leased.consumer(noting(during, lambda *_: signal.getsignal(signal.SIGTERM)), signals=False)
    server.drain()
    with ConsumerGroup([server.consumer]).running(signals=server.consumer.handles_signals):
        during.append(signal.getsignal(signal.SIGTERM))
    assert during == [mine, mine]
    with pytest.raises(ConfigurationError, match="signals=False is given to some only"):
        ConsumerGroup.of(type(server.consumer), [server.consumer, leased.consumer(nothing).consumer])


# -- run_all(): several Consumers run in one process, stop together, and no error is lost --------------------------


def test_all_consumers_work_with_the_smallest_allowed_pool(bench: Bench) -> None:
    gate = Gate()
    with (crowd := Crowd(bench, gate, gate)).running():
        # One that begins with both jobs of a held batch leaves none to the other: so one after the other.
        for _ in range(2):
            bench.enqueue()
            gate.await_call()
        gate.open()
        wait_until(lambda: bench.states() == {"completed": 2})
        # One that is stopped by itself does not end the others.
        crowd.consumers[0].stop()
        wait_until(lambda: crowd.context is None)
        bench.enqueue()
        wait_until(lambda: bench.states() == {"completed": 3})


@pytest.mark.parametrize("signals", [True, False])
def test_an_idle_process_has_two_connections(mixed: Bench, monkeypatch: pytest.MonkeyPatch, *, signals: bool) -> None:
    """However many Consumers are in it: one listens, and the pool has one. A host program keeps those that it had."""
    monkeypatch.setattr(cleanup, "_UNUSED_AFTER", 1.0)

    async def use_connection(io: Any, _: Any) -> None:
        await io.execute(sa.select(1))

    name, gate = "application_name", Gate(first=use_connection)
    given = {name: "crowd"} if mixed.api == "sync" else {"server_settings": {name: "crowd"}}
    options: dict[str, Any] = {"engine": {"connect_args": given}, "poll_interval": 600, "signals": signals}
    ours = f"SELECT count(*) FROM pg_stat_activity WHERE {name} = 'crowd' AND datname = current_database()"
    with (crowd := Crowd(mixed, gate, gate, gate, **options)).running():
        for _round in range(2):
            # One that begins with all jobs of a held batch leaves none to the others: so one after the other.
            for _ in range(3):
                mixed.enqueue()
                gate.await_call()
            # The listener, and one for each handler.
            wait_until(lambda: mixed.execute(ours) >= 4)
            busy = mixed.execute(ours)
            gate.let_go(3)
            wait_until(lambda: not mixed.states()["pending"])
            if signals:
                wait_until(lambda: mixed.execute(ours) <= 2)
        if not signals:
            # For longer than others keep them.
            wait_until(lambda: all(one._context.busy_since is None for one in crowd.consumers))
            time.sleep(2.5)
            assert mixed.execute(ours) >= busy
    assert mixed.states() == {"completed": 6}


def test_several_consumers_of_a_process_log_one_stop(mixed: Bench, log: Any) -> None:
    mixed.enqueue()
    gate = Gate()
    with Crowd(mixed, gate, gate).running():
        gate.await_call()
        gate.open()
        wait_until(lambda: mixed.states() == {"completed": 1})
    # Not the lines of a stop with a job that runs: the run may end in the database before its Consumer has counted it.
    stopped = [record for record in log.records if record.levelname == "INFO" and ": stopped" in record.getMessage()]
    assert [(record.event, record.count) for record in stopped] == [("consumers_stopped", 2)]


def test_an_error_of_one_consumer_stops_the_others_and_is_raised(mixed: Bench, log: Any) -> None:
    mixed.enqueue()
    gate = Gate()
    crowd = Crowd(mixed, gate, gate)
    with pytest.raises(LookupError, match="this one is broken"), crowd.running():
        gate.await_call()
        crowd.idle().fail(LookupError("this one is broken"))
        wait_until(lambda: all(one._context is None or one._context.stopping for one in crowd.consumers))
        assert not crowd.finished.is_set()
        gate.open()
        assert crowd.finished.wait(30)
    # The other one was stopped in order: its job is done.
    assert mixed.states() == {"completed": 1}
    assert "raised LookupError: this one is broken; stopping the other Consumers" in log.text


def test_a_handler_that_goes_on_is_named_whatever_else_has_failed(sync_leased: Bench) -> None:
    sync_leased.enqueue()
    gate = Gate()
    crowd = Crowd(sync_leased, gate, gate, grace=0.1)
    with pytest.raises(HandlerNotStopped, match=r"\(job 1, for"), crowd.running():
        gate.await_call()
        crowd.idle().fail(LookupError("this one is broken"))
        assert crowd.finished.wait(30)
    gate.open()


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
    with crowd.running():
        assert crowd.finished.wait(30)
    assert one._context is other._context is None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_all_consumers(mixed: Bench, number: signal.Signals) -> None:
    mixed.enqueue(3)
    with mixed.worker("work", consumers=3, together=True) as worker:
        wait_until(lambda: mixed.states() == {"completed": 3} and serving(mixed) == 3)
        worker.signal(number)
        assert worker.await_end() == 0
        assert worker.said("handlers are back")
    assert serving(mixed) == 0


def serving(bench: Bench) -> int:
    return int(bench.execute("SELECT count(*) FROM sqlaqueue_consumer"))


def test_cancelling_the_task_stops_all_consumers(async_bench: Bench) -> None:
    async def main() -> None:
        crowd = Crowd(async_bench, nothing, nothing)
        task = asyncio.create_task(crowd.serve())
        while serving(async_bench) < 2:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert serving(async_bench) == 0


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
    crowd = Crowd(leased, nothing, nothing, nothing, engine={"pool_size": 4, "max_overflow": 1})
    with pytest.raises(ConfigurationError, match=r"need 6 connections, .* allows 5; use .*pool_size=6"):
        crowd.run()
