"""Handlers that do what they must not fail with an error that names the fix; other jobs are not affected."""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import sessionmaker

from sqlaqueue import Consumer
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


def test_a_handler_that_returns_a_coroutine_has_failed(supply: Any) -> None:
    """Before the call the Consumer cannot know."""
    leased = supply.take("update_status", "sync")

    async def coroutine(session: Any, job: Any) -> None:
        pass

    def generator(session: Any, job: Any) -> Any:
        yield

    engine = sa.create_engine(leased.database.url())
    for hidden in (lambda session, job: coroutine(session, job), generator):
        [key] = leased.enqueue(1, max_attempts=1)
        Consumer(leased.Job, hidden, sessionmaker(engine)).drain()
        assert leased.row(key).status == "failed"
        assert "nothing of it has been run" in leased.row(key).last_error
    engine.dispose()
