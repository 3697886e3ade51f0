"""Handlers that do what they must not fail with an error that names the fix; other jobs are not affected."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from sqlaqueue import Consumer
from sqlaqueue.testing import async_run_job, run_job
from tests.consumer.bench import Bench


@pytest.mark.each_value
@pytest.mark.parametrize("verb", ["commit", "rollback", "close"])
@pytest.mark.parametrize("batch_size", [1, 10])
def test_a_handler_that_ends_the_transaction_of_its_batch(supply: Any, api: str, verb: str, batch_size: int) -> None:
    """Its attempt has failed; the other jobs of the batch complete."""
    for strategy in ("delete_returning", "batch_select"):
        bench = supply.take(strategy, api)
        good = bench.enqueue(2)
        [bad] = bench.enqueue(1, max_attempts=2)
        good += bench.enqueue(2)

        async def work(io: Any, job: Any, bench: Bench = bench, bad: int = bad) -> None:
            await io.execute(bench.effect(job.id))
            if job.id == bad:
                await getattr(io, verb)()
                # Nor may anything that it does afterwards reach the database.
                await io.execute(bench.effect(job.id, note="afterwards"))
                if verb != "commit":
                    await io.commit()

        server = bench.consumer(work, batch_size=batch_size)
        server.drain()
        assert bench.states() == {"completed": 4, "failed": 1}
        assert bench.attempts() == dict.fromkeys(good, 1) | {bad: 2}
        assert bench.effects() == dict.fromkeys(good, 1)
        assert "HandlerMisuseError" in bench.row(bad).last_error
        assert server.told("failed") == [bad]
        bench.assert_tidy()


def test_a_handler_that_catches_the_error_of_its_misuse(supply: Any, api: str) -> None:
    for strategy in ("delete_returning", "batch_select"):
        bench = supply.take(strategy, api)
        keys = bench.enqueue(3, max_attempts=1)

        async def work(io: Any, job: Any, bench: Bench = bench, keys: list[int] = keys) -> None:
            await io.execute(bench.effect(job.id))
            if job.id == keys[1]:
                await io.rollback()

        bench.consumer(work).drain()
        assert bench.states() == {"completed": 2, "failed": 1}
        assert bench.effects() == {keys[0]: 1, keys[2]: 1}
        bench.assert_tidy()


def test_under_a_lease_a_handler_may_commit(leased: Bench) -> None:
    """Its transaction holds no other job; what it writes after the commit is as safe as before."""
    keys = leased.enqueue(3)

    async def work(io: Any, job: Any) -> None:
        await io.execute(leased.effect(job.id))
        await io.commit()
        if job.id == keys[0]:
            await io.execute(leased.effect(job.id))
        if job.id == keys[1]:
            await io.rollback()
        if job.id == keys[2]:
            await io.close()

    # The jobs are read after the commit, which async code must say beforehand.
    leased.consumer(work, session={"expire_on_commit": False}).drain()
    assert leased.states() == {"completed": 3}
    assert leased.effects() == {keys[0]: 2, keys[1]: 1, keys[2]: 1}


def test_a_handler_may_undo_a_part_of_its_own(bench: Bench) -> None:
    """By a savepoint within the Consumer's; it may also leave one open."""
    keys = bench.enqueue(3)

    async def work(io: Any, job: Any) -> None:
        await io.execute(bench.effect(job.id))
        if job.id == keys[0]:
            with pytest.raises(sa.exc.DBAPIError):
                async with io.nested():
                    await io.execute(bench.effect(job.id))
                    await io.execute(sa.text("SELECT 1 / 0"))
        elif job.id == keys[1]:
            await io.begin_nested()
            await io.execute(bench.effect(job.id))
        else:
            async with io.nested():
                await io.execute(bench.effect(job.id))

    bench.consumer(work).drain()
    assert bench.states() == {"completed": 3}
    assert bench.effects() == {keys[0]: 1, keys[1]: 2, keys[2]: 2}
    bench.assert_tidy()


def test_a_handler_that_leaves_a_savepoint_open_and_fails(bench: Bench) -> None:
    good, bad = bench.enqueue(2, max_attempts=1)

    async def work(io: Any, job: Any) -> None:
        await io.begin_nested()
        await io.execute(bench.effect(job.id))
        if job.id == bad:
            raise ValueError

    bench.consumer(work).drain()
    assert bench.states() == {"completed": 1, "failed": 1}
    assert bench.effects() == {good: 1}
    bench.assert_tidy()


def test_a_handler_that_catches_a_failed_flush(bench: Bench) -> None:
    """The savepoint cannot be released any more, and the attempt has failed."""
    good, bad = bench.enqueue(2, max_attempts=1)

    async def work(io: Any, job: Any) -> None:
        await io.execute(bench.effect(job.id))
        if job.id == bad:
            io.add(bench.Effect(job=None))
            with pytest.raises(sa.exc.IntegrityError):
                await io.flush()

    bench.consumer(work).drain()
    assert bench.states() == {"completed": 1, "failed": 1}
    assert bench.effects() == {good: 1}
    bench.assert_tidy()


def test_a_handler_that_catches_a_failed_statement(bench: Bench) -> None:
    """The transaction is aborted, so the job cannot be settled in it."""
    good, bad = bench.enqueue(2, max_attempts=1)

    async def work(io: Any, job: Any) -> None:
        await io.execute(bench.effect(job.id))
        if job.id == bad:
            with pytest.raises(sa.exc.DBAPIError):
                await io.execute(sa.text("SELECT 1 / 0"))

    bench.consumer(work).drain()
    assert bench.states() == {"completed": 1, "failed": 1}
    assert bench.effects() == {good: 1}
    assert "transaction is aborted" in bench.row(bad).last_error
    bench.assert_tidy()


def test_a_batch_handler_that_catches_a_failed_statement(bench: Bench) -> None:
    """Each job is then tried by itself; the batch used to be claimed again and again."""
    good, bad = bench.enqueue(2, max_attempts=1)

    async def work(io: Any, jobs: list[Any]) -> None:
        if any(job.id == bad for job in jobs):
            with pytest.raises(sa.exc.DBAPIError):
                await io.execute(sa.text("SELECT 1 / 0"))

    bench.consumer(work, batch=True).drain()
    assert bench.states() == {"completed": 1, "failed": 1}
    assert bench.attempts() == {good: 1, bad: 1}
    bench.assert_tidy()


@pytest.mark.parametrize("options", [{"expire_on_commit": True}, {"expire_on_commit": False}], ids=str)
def test_under_a_lease_a_handler_may_delete_its_job_and_commit(leased: Bench, options: dict[str, bool]) -> None:
    [key] = leased.enqueue(1)

    async def work(io: Any, job: Any) -> None:
        await io.delete(job)
        await io.commit()

    server = leased.consumer(work, session=options)
    assert server.drain() == 1
    assert server.told("completed") == [key]
    assert leased.rows() == {}


def test_a_handler_may_delete_a_job_whose_row_the_claim_has_deleted(supply: Any, api: str) -> None:
    bench = supply.take("own_message", api)
    keys = bench.enqueue(2)

    async def work(io: Any, job: Any) -> None:
        await io.delete(job)
        with pytest.warns(sa.exc.SAWarning, match="expected to delete 1 row"):
            await io.flush()

    server = bench.consumer(work)
    assert server.drain() == 2
    assert sorted(server.told("completed")) == keys
    assert bench.rows() == {}


def test_a_handler_may_delete_its_job(bench: Bench) -> None:
    keys = bench.enqueue(4)

    async def work(io: Any, job: Any) -> None:
        await io.execute(bench.effect(job.id))
        if job.id == keys[1]:
            await io.delete(job)
        if job.id == keys[2]:
            await io.delete(job)
            await io.flush()

    server = bench.consumer(work)
    assert server.drain() == 4
    assert sorted(bench.rows()) == [keys[0], keys[3]]
    assert bench.effects() == dict.fromkeys(keys, 1)
    assert sorted(server.told("completed")) == keys
    bench.assert_tidy()


def test_a_stale_handler_cannot_delete_its_job(leased: Bench) -> None:
    [key] = leased.enqueue(1)

    async def work(io: Any, job: Any) -> None:
        leased.execute("UPDATE job SET lease_token = gen_random_uuid()")
        await io.delete(job)

    server = leased.consumer(work)
    server.drain()
    assert server.told("lease_lost") == [key]
    assert leased.row(key).status == "processing"


def test_a_handler_may_change_its_own_row(bench: Bench) -> None:
    """Its writes are kept, and the Consumer settles the run."""
    keys = bench.enqueue(3)

    async def work(io: Any, job: Any) -> None:
        assert (job.status, job.attempts) == ("processing", 1)
        job.payload = f"result of {job.id}"
        job.priority = 7
        if job.id == keys[1]:
            await io.flush()
        if job.id == keys[2]:
            raise ValueError

    bench.consumer(work, retry=lambda *_: 3600).drain()
    rows = bench.rows()
    assert [rows[key].payload for key in keys] == [f"result of {keys[0]}", f"result of {keys[1]}", None]
    assert [rows[key].priority for key in keys] == [7, 7, 0]
    assert set(bench.attempts().values()) == {1}
    bench.assert_tidy()


def _undo_a_part(session: Session, job: Any) -> None:
    """Change the job in a savepoint that is rolled back, which expires it."""
    with contextlib.suppress(ZeroDivisionError), session.begin_nested():
        job.payload = "undone"
        session.flush()
        raise ZeroDivisionError


def _read_all_again(session: Session, job: Any) -> None:
    session.scalars(sa.select(type(job)).execution_options(populate_existing=True)).all()


READS: dict[str, Callable[[Session, Any], object]] = {
    "refresh": lambda session, job: session.refresh(job),
    "refresh_status": lambda session, job: session.refresh(job, ["status"]),
    "refresh_with_lock": lambda session, job: session.refresh(job, with_for_update=True),
    "expire": lambda session, job: (session.expire(job), job.status),
    "expire_status": lambda session, job: (session.expire(job, ["status"]), job.status),
    "expire_all": lambda session, job: (session.expire_all(), job.status),
    "get": lambda session, job: session.get(type(job), job.id, populate_existing=True),
    "get_with_lock": lambda session, job: session.get(type(job), job.id, with_for_update=True),
    "select_all": _read_all_again,
    "savepoint": _undo_a_part,
    "update": lambda session, job: session.execute(
        sa.update(type(job)).where(type(job).id == job.id).values(payload="x").returning(type(job))
    ).all(),
}


@pytest.mark.each_value
@pytest.mark.parametrize("read", READS)
def test_a_handler_may_read_its_job_again(bench: Bench, read: str) -> None:
    """It sees what it saw before, and so do the handlers of the other jobs of the batch."""
    bench.enqueue(3)
    seen: list[Any] = []

    async def work(io: Any, job: Any) -> None:
        await io.run(lambda session: READS[read](session, job))
        await io.run(lambda _: seen.append((job.status, job.attempts)))

    bench.consumer(work, batch_size=3).drain()
    assert bench.states() == {"completed": 3}
    assert seen == [("processing", 1)] * 3
    assert set(bench.attempts().values()) == {1}
    bench.assert_tidy()


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("how", "status"),
    [("flush", "pending"), ("flush", "completed"), ("refresh", "completed"), ("statement", "completed")],
)
def test_a_status_that_a_handler_writes_is_refused(bench: Bench, how: str, status: str) -> None:
    """Whether or not it reads its job again."""
    [key] = bench.enqueue(1, max_attempts=1)

    async def work(io: Any, job: Any) -> None:
        if how == "statement":
            await io.execute(sa.update(bench.Job).values(status=status))
            return
        job.status = status
        await io.flush()
        if how == "refresh":
            await io.run(lambda session: session.refresh(job))

    bench.consumer(work).drain()
    assert bench.row(key).status == "failed"
    assert "HandlerMisuseError" in bench.row(key).last_error
    bench.assert_tidy()


async def _coroutine(session: Any = None, job: Any = None) -> None:
    pass


def _generator(session: Any = None, job: Any = None) -> Any:
    yield


async def _async_generator(session: Any = None, job: Any = None) -> Any:
    yield


class _Awaitable:
    def __await__(self) -> Any:
        yield from ()


class _Waiting:
    """A callable whose kind cannot be seen before its call."""

    def __init__(self, result: Callable[[], Any]) -> None:
        self._result = result

    def __call__(self, session: Any, job: Any) -> Any:
        return self._result()


RESULTS: dict[str, Callable[[], Any]] = {
    "coroutine": _coroutine,
    "generator": _generator,
    "async_generator": _async_generator,
    "awaitable": _Awaitable,
    "map": lambda: map(str, [1]),
    "future": concurrent.futures.Future,
}


@pytest.mark.each_value
@pytest.mark.parametrize("result", RESULTS)
@pytest.mark.parametrize("batch", [False, True])
def test_a_handler_that_returns_what_nobody_runs_has_failed(bench: Bench, result: str, *, batch: bool) -> None:
    """Before the call the Consumer cannot know."""
    [key] = bench.enqueue(1, max_attempts=1)
    refused = "nothing waits" if result == "future" else "nothing of it has been run"

    async def work(io: Any, jobs: Any) -> Any:
        return RESULTS[result]()

    bench.consumer(work, batch=batch).drain()
    assert bench.row(key).status == "failed"
    assert refused in bench.row(key).last_error
    bench.assert_tidy()


@pytest.mark.parametrize("hidden", [lambda session, job: _coroutine(session, job), _Waiting(_async_generator)])
def test_a_sync_handler_that_hides_its_kind_has_failed(supply: Any, hidden: Any) -> None:
    leased = supply.take("update_status", "sync")
    engine = sa.create_engine(leased.database.url())
    [key] = leased.enqueue(1, max_attempts=1)
    Consumer(leased.Job, hidden, sessionmaker(engine)).drain()
    assert leased.row(key).status == "failed"
    with leased.sessions() as session:
        job = leased.Job()
        session.add(job)
        assert "nothing of it has been run" in str(run_job(session, job, hidden).error)
    engine.dispose()


def test_a_task_that_a_handler_returns_is_cancelled(supply: Any) -> None:
    """The job is retried, and must not run twice at once."""
    leased = supply.take("update_status", "async")
    [key] = leased.enqueue(1, max_attempts=1)
    tasks: list[Any] = []

    async def work(io: Any, job: Any) -> Any:
        tasks.append(asyncio.create_task(io.suspend()))
        return tasks[0]

    leased.consumer(work).drain()
    assert "nothing waits" in leased.row(key).last_error
    assert tasks[0].cancelled()


def test_an_async_test_refuses_them_as_well(supply: Any) -> None:
    leased = supply.take("update_status", "async")

    async def work(session: Any, job: Any) -> Any:
        return _coroutine()

    async def main() -> None:
        engine = create_async_engine(leased.database.url("asyncpg"))
        async with AsyncSession(engine) as session:
            job = leased.Job()
            session.add(job)
            result = await async_run_job(session, job, work)
            assert "nothing of it has been run" in str(result.error)
        await engine.dispose()

    asyncio.run(main())
