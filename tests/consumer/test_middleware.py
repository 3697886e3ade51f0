"""Middleware around the calls of a handler, ``Consumer(..., middleware=[...])``, and the context variables of each call."""

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextvars import ContextVar
from functools import partial
from typing import Any

import pytest
import sqlalchemy as sa
from opentelemetry import context as otel_context
from opentelemetry import trace
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session, object_session, sessionmaker

from sqlaqueue import AsyncConsumer, Cancel, Consumer, Fail
from sqlaqueue.exc import ConfigurationError, HandlerMisuseError
from sqlaqueue.testing import async_drain, drain, run_job
from tests.consumer.bench import Bench, Gate, noting
from tests.consumer.models import Handler, for_sync
from tests.consumer.test_background import hosted
from tests.programs import wait_until

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

    middleware = [for_api(bench, partial(note, name)) for name in ("outer", "inner")]
    assert bench.consumer(work, middleware=middleware).drain() == 1
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

    work = noting(threads, lambda *_: threading.get_ident())
    bench.consumer(work, middleware=[for_api(bench, note)]).drain()
    assert len(set(threads)) == 1
    assert bench.effects() == {key: 1}


def test_it_sees_the_error_and_may_replace_it(bench: Bench) -> None:
    bench.enqueue(1)

    async def give_up(job: Any, call: Call) -> None:
        try:
            await call()
        except ZeroDivisionError as error:
            raise Fail(f"no division: {error}", kind="zero") from error

    server = bench.consumer(bench.failing(ZeroDivisionError("by zero")), middleware=[for_api(bench, give_up)])
    server.drain()
    assert str(server.errors("failed")[0]) == "no division: by zero"


def test_it_may_leave_the_handler_out_by_a_signal(bench: Bench) -> None:
    bench.enqueue(1)

    async def leave_out(job: Any, call: Call) -> None:
        raise Cancel("not today")

    bench.consumer(bench.work, middleware=[for_api(bench, leave_out)]).drain()
    bench.expect({"cancelled": 1}, effects={})


@pytest.mark.parametrize(("times", "text"), [(0, "without call"), (2, r"has called call\(\) twice")])
def test_the_handler_runs_once(bench: Bench, times: int, text: str) -> None:
    """A job whose handler was not called must not count as completed."""
    bench.enqueue(1)

    async def miscount(job: Any, call: Call) -> None:
        for _ in range(times):
            await call()

    server = bench.consumer(middleware=[for_api(bench, miscount)], retry=lambda *_: 3600)
    server.drain()
    [error] = server.errors("retried")
    assert isinstance(error, HandlerMisuseError)
    assert error.args[0].count(text.replace("\\", "")) == 1
    assert bench.states() == {"pending": 1}


def test_a_call_that_is_not_awaited_does_not_count(async_leased: Bench) -> None:
    async_leased.enqueue(1)

    async def forget(job: Any, call: Call) -> None:
        call().close()  # type: ignore[attr-defined]  # it is a coroutine

    server = async_leased.consumer(middleware=[forget], retry=lambda *_: 3600)
    server.drain()
    assert server.told("retried") == [1]


def test_a_call_that_has_not_ended_does_not_count(async_leased: Bench) -> None:
    """The handler is cancelled, so that it does not go on beside the next attempt."""
    async_leased.enqueue(1)
    began, ended = [], []

    async def leave(job: Any, call: Call) -> None:
        tasks.append(asyncio.ensure_future(call()))
        await asyncio.sleep(0.01)

    async def work(io: Any, job: Any) -> None:
        assert began == ended, "the attempt before goes on"
        began.append(job.id)
        try:
            await io.suspend()
        finally:
            ended.append(job.id)

    tasks: list[Any] = []
    server = async_leased.consumer(work, middleware=[leave], retry=lambda attempt, _: 0 if attempt == 1 else 3600)
    server.drain()
    assert ["before its call() had ended" in str(each) for each in server.errors("retried")] == [True, True]
    assert began == ended == [1, 1]


def test_a_call_that_begins_after_its_middleware_is_refused(async_leased: Bench) -> None:
    async_leased.enqueue(1)
    tasks: list[Any] = []

    async def leave(job: Any, call: Call) -> None:
        tasks.append(asyncio.ensure_future(call()))

    server = async_leased.consumer(async_leased.work, middleware=[leave], retry=lambda *_: 3600)
    server.drain()
    assert server.told("retried") == [1]
    assert isinstance(tasks[0].exception(), HandlerMisuseError)
    assert not async_leased.effects()


def test_a_thread_that_calls_after_its_middleware_is_refused(sync_leased: Bench) -> None:
    sync_leased.enqueue(1)
    calls: list[Callable[[], Any]] = []

    def keep(job: Any, call: Callable[[], Any]) -> None:
        calls.append(call)

    server = sync_leased.consumer(sync_leased.work, middleware=[keep], retry=lambda *_: 3600)
    server.drain()
    assert server.told("retried") == [1]
    with pytest.raises(HandlerMisuseError, match="has returned before its call"):
        calls[0]()
    assert not sync_leased.effects()


def test_a_thread_that_a_middleware_leaves_behind_does_not_count(sync_leased: Bench) -> None:
    sync_leased.enqueue(1)
    gate, threads = Gate(), list[threading.Thread]()

    def leave(job: Any, call: Callable[[], Any]) -> None:
        threads.append(threading.Thread(target=call))
        threads[0].start()
        gate.await_call()

    server = sync_leased.consumer(gate, middleware=[leave], retry=lambda *_: 3600)
    server.drain()
    gate.open()
    threads[0].join()
    assert "before its call() had ended" in str(server.errors("retried")[0])


def test_a_batch_is_one_call_with_the_list(bench: Bench) -> None:
    keys = bench.enqueue(3)
    seen = []

    async def note(jobs: Any, call: Call) -> None:
        seen.append([job.id for job in jobs])
        await call()

    bench.consumer(batch=True, middleware=[for_api(bench, note)]).drain()
    assert seen == [keys]


def test_a_test_runs_the_middleware_of_its_consumer(sync_leased: Bench) -> None:
    sync_leased.enqueue(1)
    seen = []

    def note(job: Any, call: Callable[[], Any]) -> None:
        seen.append(job.id)
        call()

    consumer = Consumer(sync_leased.Job, lambda session, job: None, sync_leased.sessions, middleware=[note])
    with sync_leased.sessions() as session:
        assert run_job(session, session.get(sync_leased.Job, 1), consumer).state == "completed"
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
    ("kind", "middleware", "text"),
    [
        (
            Consumer,
            sync_middleware,
            r"Consumer\(middleware=<function.*: give a list of callables, middleware=\[function\]",
        ),
        (Consumer, None, r"Consumer\(middleware=None\): give a list of callables"),
        (Consumer, [3], r"Consumer\(middleware=\[3\]\): a middleware is a callable, middleware\(job, call\)"),
        (
            Consumer,
            [too_few],
            r"Consumer\(middleware=\[too_few\]\): a middleware is called as too_few\(job, call\): too many",
        ),
        (Consumer, [async_middleware], "async_middleware is a coroutine function; define it with `def`"),
        (Consumer, [generating_middleware], "generating_middleware is a generator function, and a call of it runs"),
        (AsyncConsumer, [generating_middleware], "generating_middleware is a generator function, and a call of it"),
        (AsyncConsumer, [async_generating], "async_generating is an async generator function, and a call of it runs"),
        (AsyncConsumer, [sync_middleware], "sync_middleware is not a coroutine function; define it with `async def`"),
    ],
)
def test_wrong_middleware_is_refused(sync_leased: Bench, kind: Any, middleware: Any, text: str) -> None:
    async def work(session: Any, job: Any) -> None: ...

    handler = work if kind is AsyncConsumer else lambda session, job: None
    with pytest.raises(ConfigurationError, match=text):
        kind(sync_leased.Job, handler, Session, middleware=middleware)


# -- context variables: each call of a handler has its own, a copy of the program's --------------------------------
tenant: ContextVar[Any] = ContextVar("tenant", default=None)
program: ContextVar[Any] = ContextVar("program", default=None)


@pytest.fixture(autouse=True)
def set_by_the_program() -> Iterator[None]:
    token = program.set("set before run()")
    yield
    program.reset(token)


def seeing(seen: list[Any]) -> Handler:
    """Return a handler that notes which variables it sees, and sets one."""

    async def see(_: Any, job: Any) -> None:
        seen.append((program.get(), tenant.get()))
        tenant.set(job.id)

    return see


@pytest.mark.parametrize("concurrency", [1, 2])
@pytest.mark.parametrize("uses_session", [False, True])
def test_a_handler_sees_what_the_program_has_set_and_nothing_of_other_jobs(
    bench: Bench, concurrency: int, *, uses_session: bool
) -> None:
    keys, seen = bench.enqueue(6), list[Any]()

    see = seeing(seen)

    async def work(io: Any, job: Any) -> None:
        await see(io, job)
        if uses_session:
            await io.execute(bench.effect(job.id))
        seen.append(tenant.get() == job.id)
        if job.id == keys[1] and job.attempts == 1:
            raise ValueError

    bench.consumer(work, concurrency=concurrency).drain()
    assert bench.states() == {"completed": 6}
    assert seen.count(("set before run()", None)) == seen.count(True) == 7
    assert tenant.get() is None


def test_consumers_in_the_background_see_what_the_program_has_set(bench: Bench) -> None:
    keys, seen = bench.enqueue(3), list[Any]()

    server = bench.consumer(seeing(seen))
    server.consumer.on("completed", lambda event: seen.append(program.get()))
    hosted(server, lambda _: wait_until(lambda: len(seen) == 2 * len(keys)))
    assert sorted(seen, key=str) == [("set before run()", None)] * 3 + ["set before run()"] * 3


def test_several_consumers_see_what_the_program_has_set(sync_leased: Bench) -> None:
    seen = list[Any]()
    sync_leased.enqueue(1)

    def work(session: Session, job: Any) -> None:
        seen.append(program.get())
        consumer.stop()

    engine = sa.create_engine(sync_leased.database.url())
    consumer = Consumer(sync_leased.Job, work, sessionmaker(engine))
    Consumer.run_all(consumer)
    engine.dispose()
    assert seen == ["set before run()"]


def test_middleware_and_handler_share_the_variables_of_their_call(bench: Bench) -> None:
    """As structlog and tracing need it."""
    bench.enqueue(3)
    seen: list[Any] = []

    async def bind(job: Any, call: Callable[[], Awaitable[Any]]) -> None:
        seen.append(tenant.get())
        tenant.set(("bound", job.id))
        await call()
        seen.append(tenant.get() == ("handler", job.id))

    async def work(io: Any, job: Any) -> None:
        seen.append(tenant.get() == ("bound", job.id))
        tenant.set(("handler", job.id))

    bench.consumer(work, middleware=[for_api(bench, bind)]).drain()
    assert seen == [None, True, True] * 3


def test_the_flush_of_a_handlers_changes_sees_its_variables(bench: Bench) -> None:
    """The Consumer flushes what a handler has left, and listeners fill in who has changed it."""
    keys = bench.enqueue(3)

    class Audited(Session):
        pass

    @sa.event.listens_for(Audited, "before_flush")
    def fill_in(session: Session, *_: Any) -> None:
        for job in session.dirty:
            job.payload = str(tenant.get())

    async def work(io: Any, job: Any) -> None:
        tenant.set(job.id)
        job.priority = 7

    bench.consumer(work, session={"class_": Audited}).drain()
    assert {key: row.payload for key, row in bench.rows().items()} == {key: str(key) for key in keys}


def test_the_current_span_of_a_handler_does_not_reach_the_next_job(bench: Bench) -> None:
    bench.enqueue(2)
    seen: list[bool] = []

    async def work(io: Any, job: Any) -> None:
        seen.append(trace.get_current_span().get_span_context().is_valid)
        parent = trace.SpanContext(1, 2, is_remote=False, trace_flags=trace.TraceFlags(1))
        otel_context.attach(trace.set_span_in_context(trace.NonRecordingSpan(parent)))
        seen.append(trace.get_current_span().get_span_context().is_valid)

    bench.consumer(work).drain()
    assert seen == [False, True] * 2


def test_listeners_and_retry_policies_have_variables_of_their_own(bench: Bench) -> None:
    bench.enqueue(2, max_attempts=2)
    seen: list[Any] = []

    def remember(what: str) -> None:
        seen.append((what, program.get(), tenant.get()))
        tenant.set(what)

    def policy(attempt: int, error: BaseException) -> float:
        remember("policy")
        return 0

    async def work(io: Any, job: Any) -> None:
        remember("handler")
        raise ValueError

    server = bench.consumer(work, retry=policy)
    for event in ("claimed", "retried", "failed"):
        server.consumer.on(event, lambda event: remember("listener"))
    server.drain()
    assert set(seen) == {(what, "set before run()", None) for what in ("handler", "policy", "listener")}


def test_a_task_that_a_handler_starts_has_its_variables(async_leased: Bench) -> None:
    """And a cancellation, an error and a suspension reach the handler as they do without variables."""
    keys, seen = async_leased.enqueue(3, max_attempts=1), list[Any]()

    async def work(io: Any, job: Any) -> None:
        tenant.set(job.id)

        async def child() -> Any:
            await asyncio.sleep(0)
            return tenant.get()

        async with asyncio.TaskGroup() as group:
            task = group.create_task(child())
        seen.append(task.result())
        if job.id == keys[0]:
            await asyncio.gather(child(), asyncio.sleep(0.01))
            raise ValueError("an error")
        if job.id == keys[1]:
            try:
                await io.suspend()
            except asyncio.CancelledError:
                seen.append(("cancelled", tenant.get()))
                raise
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.01):
                await io.suspend()

    async_leased.consumer(work, timeout=1.0).drain()
    assert sorted(seen, key=str) == sorted([*keys, ("cancelled", keys[1])], key=str)
    rows = async_leased.rows()
    assert rows[keys[0]].last_error.splitlines()[0] == "ValueError: an error"
    assert "JobTimeout" in rows[keys[1]].last_error
    assert rows[keys[2]].status == "completed"


def test_a_test_runs_handlers_with_variables_of_their_own(bench: Bench) -> None:
    seen: list[Any] = []

    with bench.sessions() as session:
        jobs = [bench.Job() for _ in range(3)]
        session.add_all(jobs)
        handler = for_sync(seeing(seen))
        assert run_job(session, jobs[0], handler).state == "completed"
        assert drain(session, bench.Job, handler) == 2
    assert seen == [("set before run()", None)] * 3
    assert tenant.get() is None


def test_an_async_test_runs_handlers_with_variables_of_their_own(supply: Any) -> None:
    bench, seen = supply.take("batch_select", "async"), list[Any]()

    async def main() -> None:
        engine = create_async_engine(bench.database.url("asyncpg"))
        async with AsyncSession(engine) as session:
            session.add_all([bench.Job() for _ in range(3)])
            assert await async_drain(session, bench.Job, seeing(seen)) == 3
        await engine.dispose()

    asyncio.run(main())
    assert seen == [("set before run()", None)] * 3
