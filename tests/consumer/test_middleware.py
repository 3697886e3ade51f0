"""Middleware around the calls of a handler: ``Consumer(..., around=[...])``."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import pytest
from sqlalchemy.orm import Session, object_session

from sqlaqueue import AsyncConsumer, Cancel, Consumer, Fail
from sqlaqueue.exc import ConfigurationError, HandlerMisuseError
from sqlaqueue.testing import run_job
from tests.consumer.bench import Bench
from tests.consumer.models import DEADLINE

Call = Callable[[], Awaitable[Any]]


def for_api(bench: Bench, middleware: Callable[[Any, Call], Awaitable[object]]) -> Callable[..., Any]:
    """Return the middleware, for a sync Consumer as a function; it awaits nothing but its call."""
    if bench.api == "async":
        return middleware

    def function(job: Any, call: Callable[[], Any]) -> Any:
        async def awaited() -> Any:
            return call()

        with pytest.raises(StopIteration) as end:
            next(middleware(job, awaited).__await__())
        return end.value.value

    return function


def test_the_first_one_is_the_outermost(bench: Bench) -> None:
    [key] = bench.enqueue(1)
    seen: list[Any] = []

    async def note(name: str, job: Any, call: Call) -> Any:
        seen.append((name, job.id))
        result = await call()
        seen.append((name, result))
        return result

    async def work(io: Any, job: Any) -> str:
        seen.append(("handler", job.id))
        return "result"

    around = [for_api(bench, partial(note, name)) for name in ("outer", "inner")]
    assert bench.consumer(work, around=around).drain() == 1
    assert seen == [("outer", key), ("inner", key), ("handler", key), ("inner", "result"), ("outer", "result")]
    assert bench.states() == {"completed": 1}


def test_it_runs_where_the_handler_runs(bench: Bench) -> None:
    """In its thread or task, and in its transaction."""
    [key] = bench.enqueue(1)
    threads = []

    async def note(job: Any, call: Call) -> None:
        threads.append(threading.get_ident())
        object_session(job).add(bench.Effect(job=job.id))
        await call()

    async def work(io: Any, job: Any) -> None:
        threads.append(threading.get_ident())

    bench.consumer(work, around=[for_api(bench, note)]).drain()
    assert len(set(threads)) == 1
    assert bench.effects() == {key: 1}


def test_it_sees_the_error_and_may_replace_it(bench: Bench) -> None:
    bench.enqueue(1)

    async def give_up(job: Any, call: Call) -> None:
        try:
            await call()
        except ZeroDivisionError as error:
            raise Fail(f"no division: {error}", kind="zero") from error

    async def work(io: Any, job: Any) -> None:
        raise ZeroDivisionError("by zero")

    server = bench.consumer(work, around=[for_api(bench, give_up)])
    server.drain()
    [failed] = [event for event in server.events if event.name == "failed"]
    assert str(failed.error) == "no division: by zero"


def test_it_may_leave_the_handler_out_by_a_signal(bench: Bench) -> None:
    bench.enqueue(1)
    called = []

    async def leave_out(job: Any, call: Call) -> None:
        raise Cancel("not today")

    async def work(io: Any, job: Any) -> None:
        called.append(job.id)

    bench.consumer(work, around=[for_api(bench, leave_out)]).drain()
    assert (bench.states(), called) == ({"cancelled": 1}, [])


@pytest.mark.parametrize(("times", "text"), [(0, "without call"), (2, r"has called call\(\) twice")])
def test_the_handler_runs_once(bench: Bench, times: int, text: str) -> None:
    """A job whose handler was not called must not count as completed."""
    bench.enqueue(1)

    async def miscount(job: Any, call: Call) -> None:
        for _ in range(times):
            await call()

    server = bench.consumer(around=[for_api(bench, miscount)], retry=lambda *_: 3600)
    server.drain()
    [retried] = [event for event in server.events if event.name == "retried"]
    assert isinstance(retried.error, HandlerMisuseError)
    assert retried.error.args[0].count(text.replace("\\", "")) == 1
    assert bench.states() == {"pending": 1}


def test_a_call_that_is_not_awaited_does_not_count(supply: Any) -> None:
    held = supply.take("update_status", "async")
    held.enqueue(1)

    async def forget(job: Any, call: Call) -> None:
        call().close()  # type: ignore[attr-defined]  # it is a coroutine

    server = held.consumer(around=[forget], retry=lambda *_: 3600)
    server.drain()
    assert server.told("retried") == [1]


def test_a_call_that_has_not_ended_does_not_count(supply: Any) -> None:
    """The handler is cancelled, so that it does not go on beside the next attempt."""
    leased = supply.take("update_status", "async")
    leased.enqueue(1)
    began, ended = [], []

    async def leave(job: Any, call: Call) -> None:
        tasks.append(asyncio.ensure_future(call()))
        await asyncio.sleep(0.01)

    async def work(io: Any, job: Any) -> None:
        began.append(job.id)
        try:
            await io.suspend()
        finally:
            ended.append(job.id)

    tasks: list[Any] = []
    server = leased.consumer(work, around=[leave], retry=lambda *_: 3600)
    server.drain()
    [retried] = [event for event in server.events if event.name == "retried"]
    assert "before its call() had ended" in str(retried.error)
    assert began == ended == [1]


def test_a_call_that_begins_after_its_middleware_is_refused(supply: Any) -> None:
    leased = supply.take("update_status", "async")
    leased.enqueue(1)
    tasks: list[Any] = []
    began: list[Any] = []

    async def leave(job: Any, call: Call) -> None:
        tasks.append(asyncio.ensure_future(call()))

    async def work(io: Any, job: Any) -> None:
        began.append(job.id)

    server = leased.consumer(work, around=[leave], retry=lambda *_: 3600)
    server.drain()
    assert server.told("retried") == [1]
    assert isinstance(tasks[0].exception(), HandlerMisuseError)
    assert not began


def test_a_thread_that_a_middleware_leaves_behind_does_not_count(supply: Any) -> None:
    leased = supply.take("update_status", "sync")
    leased.enqueue(1)
    began, go_on, threads = threading.Event(), threading.Event(), list[threading.Thread]()

    def leave(job: Any, call: Callable[[], Any]) -> None:
        threads.append(threading.Thread(target=call))
        threads[0].start()
        assert began.wait(DEADLINE)

    async def work(io: Any, job: Any) -> None:
        began.set()
        assert go_on.wait(DEADLINE)

    server = leased.consumer(work, around=[leave], retry=lambda *_: 3600)
    server.drain()
    go_on.set()
    threads[0].join()
    [retried] = [event for event in server.events if event.name == "retried"]
    assert "before its call() had ended" in str(retried.error)


def test_a_batch_is_one_call_with_the_list(bench: Bench) -> None:
    keys = bench.enqueue(3)
    seen = []

    async def note(jobs: Any, call: Call) -> None:
        seen.append([job.id for job in jobs])
        await call()

    bench.consumer(batch=True, around=[for_api(bench, note)]).drain()
    assert seen == [keys]


def test_a_test_runs_the_middleware_of_its_consumer(supply: Any) -> None:
    bench = supply.take("update_status", "sync")
    bench.enqueue(1)
    seen = []

    def note(job: Any, call: Callable[[], Any]) -> None:
        seen.append(job.id)
        call()

    consumer = Consumer(bench.Job, lambda session, job: None, bench.sessions, around=[note])
    with bench.sessions() as session:
        assert run_job(session, session.get(bench.Job, 1), consumer).state == "completed"
    assert seen == [1]


def sync_middleware(job: Any, call: Any) -> None:
    call()


async def async_middleware(job: Any, call: Any) -> None:
    await call()


def generating_middleware(job: Any, call: Any) -> Any:
    yield call()


async def async_generating(job: Any, call: Any) -> Any:
    yield await call()


def too_few(job: Any) -> None: ...


@pytest.mark.parametrize(
    ("kind", "around", "text"),
    [
        (Consumer, sync_middleware, r"Consumer\(around=<function.*: give a list of callables, around=\[middleware\]"),
        (Consumer, None, r"Consumer\(around=None\): give a list of callables"),
        (Consumer, [3], r"Consumer\(around=\[3\]\): a middleware is a callable, middleware\(job, call\)"),
        (
            Consumer,
            [too_few],
            r"Consumer\(around=\[too_few\]\): a middleware is called as too_few\(job, call\): too many",
        ),
        (Consumer, [async_middleware], "async_middleware is a coroutine function; define it with `def`"),
        (Consumer, [generating_middleware], "generating_middleware is a generator function, and a call of it runs"),
        (AsyncConsumer, [generating_middleware], "generating_middleware is a generator function, and a call of it"),
        (AsyncConsumer, [async_generating], "async_generating is an async generator function, and a call of it runs"),
        (AsyncConsumer, [sync_middleware], "sync_middleware is not a coroutine function; define it with `async def`"),
    ],
)
def test_wrong_middleware_is_refused(supply: Any, kind: Any, around: Any, text: str) -> None:
    bench = supply.take("update_status", "sync")

    async def work(session: Any, job: Any) -> None: ...

    handler = work if kind is AsyncConsumer else lambda session, job: None
    with pytest.raises(ConfigurationError, match=text):
        kind(bench.Job, handler, Session, around=around)
