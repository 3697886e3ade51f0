"""Context variables: each call of a handler has its own, a copy of the program's."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from contextvars import ContextVar
from typing import Any

import pytest
import sqlalchemy as sa
from opentelemetry import context as otel_context
from opentelemetry import trace
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from sqlaqueue import Consumer
from sqlaqueue.testing import async_drain, drain, run_job
from tests.consumer.bench import Bench
from tests.consumer.models import for_sync
from tests.consumer.test_background import hosted
from tests.consumer.test_middleware import for_api
from tests.programs import wait_until

tenant: ContextVar[Any] = ContextVar("tenant", default=None)
program: ContextVar[Any] = ContextVar("program", default=None)


@pytest.fixture(autouse=True)
def set_by_the_program() -> Iterator[None]:
    token = program.set("set before run()")
    yield
    program.reset(token)


@pytest.mark.each_value
@pytest.mark.parametrize("concurrency", [1, 2])
@pytest.mark.parametrize("uses_session", [False, True])
def test_a_handler_sees_what_the_program_has_set_and_nothing_of_other_jobs(
    bench: Bench, concurrency: int, *, uses_session: bool
) -> None:
    keys, seen = bench.enqueue(6), list[Any]()

    async def work(io: Any, job: Any) -> None:
        seen.append((program.get(), tenant.get()))
        tenant.set(job.id)
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

    async def work(io: Any, job: Any) -> None:
        seen.append((program.get(), tenant.get()))
        tenant.set(job.id)

    server = bench.consumer(work)
    server.consumer.on("completed", lambda event: seen.append(program.get()))
    hosted(server, lambda _: wait_until(lambda: len(seen) == 2 * len(keys)))
    assert sorted(seen, key=str) == [("set before run()", None)] * 3 + ["set before run()"] * 3


def test_several_consumers_see_what_the_program_has_set(supply: Any) -> None:
    bench, seen = supply.take("update_status", "sync"), list[Any]()
    bench.enqueue(1)

    def work(session: Session, job: Any) -> None:
        seen.append(program.get())
        consumer.stop()

    engine = sa.create_engine(bench.database.url())
    consumer = Consumer(bench.Job, work, sessionmaker(engine))
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

    bench.consumer(work, around=[for_api(bench, bind)]).drain()
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


def test_a_task_that_a_handler_starts_has_its_variables(supply: Any) -> None:
    """And a cancellation, an error and a suspension reach the handler as they do without variables."""
    bench = supply.take("update_status", "async")
    keys, seen = bench.enqueue(3, max_attempts=1), list[Any]()

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

    bench.consumer(work, timeout=1.0).drain()
    assert sorted(seen, key=str) == sorted([*keys, ("cancelled", keys[1])], key=str)
    rows = bench.rows()
    assert rows[keys[0]].last_error == "ValueError: an error"
    assert "JobTimeout" in rows[keys[1]].last_error
    assert rows[keys[2]].status == "completed"


def test_a_test_runs_handlers_with_variables_of_their_own(bench: Bench) -> None:
    seen: list[Any] = []

    async def work(session: Any, job: Any) -> None:
        seen.append((program.get(), tenant.get()))
        tenant.set(job.id)

    with bench.sessions() as session:
        jobs = [bench.Job() for _ in range(3)]
        session.add_all(jobs)
        handler = for_sync(work)
        assert run_job(session, jobs[0], handler).state == "completed"
        assert drain(session, bench.Job, handler) == 2
    assert seen == [("set before run()", None)] * 3
    assert tenant.get() is None


def test_an_async_test_runs_handlers_with_variables_of_their_own(supply: Any) -> None:
    bench, seen = supply.take("batch_select", "async"), list[Any]()

    async def work(session: Any, job: Any) -> None:
        seen.append((program.get(), tenant.get()))
        tenant.set(job.id)

    async def main() -> None:
        engine = create_async_engine(bench.database.url("asyncpg"))
        async with AsyncSession(engine) as session:
            session.add_all([bench.Job() for _ in range(3)])
            assert await async_drain(session, bench.Job, work) == 3
        await engine.dispose()

    asyncio.run(main())
    assert seen == [("set before run()", None)] * 3
