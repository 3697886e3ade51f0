"""Handlers that do what they must not fail with an error that names the fix; other jobs are not affected."""

import asyncio
import concurrent.futures
import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from sqlaqueue import Consumer, cancel, complete, extend, fail, release, retry
from sqlaqueue.consumer.sessions import ends_transaction
from sqlaqueue.testing import async_run_job, run_job
from tests.consumer.bench import Bench


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
        bench.expect({"completed": 2, "failed": 1}, effects={keys[0]: 1, keys[2]: 1})


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
    leased.expect({"completed": 3}, effects={keys[0]: 2, keys[1]: 1, keys[2]: 1})


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
    bench.expect({"completed": 3}, effects={keys[0]: 1, keys[1]: 2, keys[2]: 2})


async def leave_a_savepoint_open_and_fail(bench: Bench, io: Any, job: Any) -> None:
    await io.begin_nested()
    await io.execute(bench.effect(job.id))
    raise ValueError


async def catch_a_failed_flush(bench: Bench, io: Any, job: Any) -> None:
    """After which the savepoint cannot be released any more."""
    io.add(bench.Effect(job=None))
    with pytest.raises(sa.exc.IntegrityError):
        await io.flush()


async def catch_a_failed_statement(bench: Bench, io: Any, job: Any) -> None:
    """After which the transaction is aborted, so the job cannot be settled in it."""
    with pytest.raises(sa.exc.DBAPIError):
        await io.execute(sa.text("SELECT 1 / 0"))


@pytest.mark.parametrize("end", [leave_a_savepoint_open_and_fail, catch_a_failed_flush, catch_a_failed_statement])
def test_a_handler_that_leaves_its_transaction_unusable_has_failed(bench: Bench, end: Any) -> None:
    good, bad = bench.enqueue(2, max_attempts=1)
    bench.consumer(bench.doing({bad: partial(end, bench)})).drain()
    bench.expect({"completed": 1, "failed": 1}, effects={good: 1})
    if end is catch_a_failed_statement:
        assert "transaction is aborted" in bench.row(bad).last_error


def test_a_batch_handler_that_catches_a_failed_statement(bench: Bench) -> None:
    """Each job is then tried by itself; the batch used to be claimed again and again."""
    good, bad = bench.enqueue(2, max_attempts=1)

    async def work(io: Any, jobs: list[Any]) -> None:
        if any(job.id == bad for job in jobs):
            await catch_a_failed_statement(bench, io, bad)

    bench.consumer(work, batch=True).drain()
    bench.expect({"completed": 1, "failed": 1}, attempts={good: 1, bad: 1})


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
    """Its writes are kept, and the Consumer ends the run."""
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
    bench.expect(attempts=1)


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
    bench.expect(attempts=1)


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
def test_a_sync_handler_that_hides_its_kind_has_failed(sync_leased: Bench, hidden: Any) -> None:
    engine = sa.create_engine(sync_leased.database.url())
    [key] = sync_leased.enqueue(1, max_attempts=1)
    Consumer(sync_leased.Job, hidden, sessionmaker(engine)).drain()
    assert sync_leased.row(key).status == "failed"
    with sync_leased.sessions() as session:
        job = sync_leased.Job()
        session.add(job)
        assert "nothing of it has been run" in str(run_job(session, job, hidden).error)
    engine.dispose()


def test_a_task_that_a_handler_returns_is_cancelled(async_leased: Bench) -> None:
    """The job is retried, and must not run twice at once."""
    [key] = async_leased.enqueue(1, max_attempts=1)
    tasks: list[Any] = []

    async def work(io: Any, job: Any) -> Any:
        tasks.append(asyncio.create_task(io.suspend()))
        return tasks[0]

    async_leased.consumer(work).drain()
    assert "nothing waits" in async_leased.row(key).last_error
    assert tasks[0].cancelled()


def test_an_async_test_refuses_them_as_well(async_leased: Bench) -> None:
    async def work(session: Any, job: Any) -> Any:
        return _coroutine()

    async def main() -> None:
        engine = create_async_engine(async_leased.database.url("asyncpg"))
        async with AsyncSession(engine) as session:
            job = async_leased.Job()
            session.add(job)
            result = await async_run_job(session, job, work)
            assert "nothing of it has been run" in str(result.error)
        await engine.dispose()

    asyncio.run(main())


# -- handlers that end their own runs, their batch's transaction past the session, or change the key of their job --


COMMITS: dict[str, Callable[[Session], object]] = {
    "connection": lambda session: session.connection().commit(),
    "statement": lambda session: session.execute(sa.text("-- done\nCOMMIT")),
    "driver": lambda session: session.connection().connection.dbapi_connection.commit(),
    "cursor": lambda session: session.connection().connection.cursor().execute("COMMIT"),
}


@pytest.mark.once
@pytest.mark.parametrize("end", COMMITS)
def test_a_commit_past_the_session(supply: Any, api: str, end: str) -> None:
    """Its job fails, and the other jobs of the batch complete."""
    for strategy in ("delete_returning", "batch_select", "own_message"):
        bench = supply.take(strategy, api)
        good = bench.enqueue(2)
        [bad] = bench.enqueue(1, max_attempts=2)
        good += bench.enqueue(2)

        work = bench.doing({bad: lambda io, _: io.run(COMMITS[end])})
        server = bench.consumer(work, batch_size=10)
        server.drain()
        assert server.told("failed") == [bad]
        assert bench.states() == ({"completed": 4, "failed": 1} if bench.has_status else {"failed": 1})
        if bench.has_status:
            assert bench.attempts() == dict.fromkeys(good, 1) | {bad: 2}
            assert "HandlerMisuseError" in bench.row(bad).last_error
            assert "begin_nested" in bench.row(bad).last_error
        effects = bench.effects()
        refused = end in {"connection", "statement"}
        assert effects.pop(bad, 0) == (0 if refused else 2)
        if strategy == "batch_select" and not refused:
            # What the driver commits nothing tells from a rollback: those that had ended before run again.
            assert effects.keys() == set(good)
        else:
            assert effects == dict.fromkeys(good, 1)
        bench.assert_tidy()


REFUSE = """
CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN IF EXISTS (SELECT FROM effect) THEN {refusal}; END IF; RETURN OLD; END $$;
CREATE TRIGGER refuse BEFORE DELETE ON {table} FOR EACH ROW WHEN (OLD.id = 1) EXECUTE FUNCTION refuse()
"""


@pytest.mark.once
@pytest.mark.parametrize("refusal", ["RAISE EXCEPTION 'no'", "RETURN NULL"])
@pytest.mark.parametrize("strategy", ["delete_returning", "own_message"])
def test_a_refused_end_beside_a_commit_past_the_session(bench: Bench, strategy: str, refusal: str) -> None:
    """Its job waits, and no job of the batch vanishes: the commit has deleted all their rows or messages."""
    table = "job" if strategy == "own_message" else "sqlaqueue_message_job"
    bench.execute(REFUSE.format(refusal=refusal, table=table))
    refused, *good = bench.enqueue(2)
    [bad] = bench.enqueue(1, max_attempts=1)
    good += bench.enqueue(2)
    work = bench.doing({bad: lambda io, job: io.run(COMMITS["driver"])})
    server = bench.consumer(work, batch_size=10)
    try:
        server.drain()
    finally:
        bench.execute("DROP FUNCTION refuse CASCADE")
    assert server.told("failed") == [bad]
    assert sorted(server.told("completed")) == good
    assert bench.states()["pending"] == 1
    assert bench.row(refused).id == refused


@pytest.mark.once
def test_an_outage_after_a_commit_past_the_session(supply: Any, api: str) -> None:
    """No job vanishes: only the Consumer knows the rows that the commit has deleted, so it tries again."""
    bench = supply.take("own_message", api)
    good = bench.enqueue(2)
    [bad] = bench.enqueue(1, max_attempts=1)
    good += bench.enqueue(2)
    outage = list[int]()

    async def work(io: Any, job: Any) -> None:
        await io.execute(bench.effect(job.id))
        if job.id == bad:
            await io.run(COMMITS["driver"])
            outage.extend([1, 2, 3])

    def refuse(_: Any, __: Any, statement: str, *___: Any) -> None:
        if outage and "INSERT INTO job " in statement:
            outage.pop()
            raise sa.exc.OperationalError(statement, {}, OSError("no route to host"), connection_invalidated=True)

    server = bench.consumer(work, batch_size=10)
    sa.event.listen(server.sync_engine, "before_cursor_execute", refuse)
    server.drain()
    assert not outage
    assert server.told("failed") == [bad]
    bench.expect({"failed": 1}, effects=dict.fromkeys(good, 1) | {bad: 1})


ENDS: dict[str, Callable[[Session, Any], object]] = {
    "set_status": lambda session, job: setattr(job, "status", "completed"),
    "change_key": lambda session, job: setattr(job, "id", job.id + 100),
    **{
        text: lambda session, job, text=text: session.execute(sa.text(f"{text} WHERE id = :id"), {"id": job.id})
        for text in ("UPDATE job SET id = id + 100", "UPDATE job SET status = 'completed'", "DELETE FROM job")
    },
    **{
        verb.__name__: lambda session, job, verb=verb: session.execute(verb(job))
        for verb in (complete, fail, retry, release, cancel)
    },
}


@pytest.mark.once
def test_a_handler_must_not_end_its_own_run(bench: Bench) -> None:
    """In any way: the error names the fix, its writes are undone, and the other jobs complete."""
    good = bench.enqueue(1)
    bad = dict(zip(bench.enqueue(len(ENDS), max_attempts=1), ENDS, strict=True))
    good += bench.enqueue(1)

    async def end(io: Any, job: Any) -> None:
        await io.run(lambda session, way=ENDS[bad[job.id]]: way(session, job))

    server = bench.consumer(bench.doing(dict.fromkeys(bad, end)))
    server.drain()
    rows = bench.rows()
    assert {bad[key]: rows[key].status for key in bad} == dict.fromkeys(ENDS, "failed")
    for key in bad:
        assert rows[key].last_error.startswith(("HandlerMisuseError", "RowsChanged")), rows[key].last_error
        assert rows[key].attempts == 1
    bench.expect(effects=good)
    assert sorted(server.told("completed")) == good
    assert server.told("lease_lost") == []


@pytest.mark.once
def test_a_handler_may_extend_its_lease(leased: Bench) -> None:
    leased.enqueue(1)

    leased.consumer(lambda io, job: io.execute(extend(job))).drain()
    assert leased.states() == {"completed": 1}


@pytest.mark.once
@pytest.mark.parametrize(
    "text", ["commit", " COMMIT;", "/* a */ -- b\n rollback", "END", "abort", "PREPARE TRANSACTION 'x'"]
)
def test_statements_that_end_a_transaction(text: str) -> None:
    assert ends_transaction(text)


@pytest.mark.once
@pytest.mark.parametrize(
    "text",
    [
        "ROLLBACK TO SAVEPOINT x",
        "rollback work to x",
        "SELECT 'commit'",
        "committed",
        "PREPARE x AS SELECT 1",
        "ending",
    ],
)
def test_statements_that_do_not(text: str) -> None:
    assert not ends_transaction(text)
