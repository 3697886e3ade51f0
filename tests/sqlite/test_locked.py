"""What happens to a handler that SQLite refuses the write lock, and when transactions take it."""

from __future__ import annotations

import threading
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import sqlalchemy as sa
from sqlalchemy import event

from sqlaqueue.sql.engine import WRITES_LATER
from tests.programs import wait_until

if TYPE_CHECKING:
    from tests.sqlite.bench import SQLiteBench

pytestmark = pytest.mark.once


async def commit_beside(bench: SQLiteBench, io: Any, key: int) -> None:
    """Commit something in a thread of its own: the event loop has to go on, as others may have the lock."""
    thread = threading.Thread(target=bench.execute, args=(bench.effect(key),))
    thread.start()
    await io.wait_for(lambda: not thread.is_alive())


def test_a_handler_that_is_refused_the_lock_runs_again_without_an_attempt(bench: SQLiteBench) -> None:
    """It reads, another transaction commits, it writes: SQLite refuses that at once, however long the timeout is."""
    [key] = bench.enqueue(max_attempts=1)
    errors: list[str] = []

    async def handle(io: Any, job: Any) -> None:
        await io.scalar(sa.select(sa.func.count()).select_from(bench.Effect))
        if not errors:
            await commit_beside(bench, io, 0)
        try:
            await io.execute(bench.effect(job.id))
        except sa.exc.OperationalError as error:
            errors.append(str(error))
            raise

    server = bench.consumer(handle)
    with server.running():
        wait_until(lambda: bench.states() == Counter(completed=1), "the job is completed")
    assert len(errors) == 1
    assert "database is locked" in errors[0]
    assert bench.attempts() == {key: 1}
    assert bench.effects() == {0: 1, key: 1}
    assert server.told("failed") == []


def test_a_handler_that_only_reads_is_settled_beside_other_commits(bench: SQLiteBench) -> None:
    """The settlement needs nothing that the handler has read, so its transaction begins anew."""
    keys = bench.enqueue(3)
    calls: list[int] = []

    async def handle(io: Any, job: Any) -> None:
        calls.append(job.id)
        await io.scalar(sa.select(sa.func.count()).select_from(bench.Effect))
        await commit_beside(bench, io, job.id)

    server = bench.consumer(handle)
    with server.running():
        wait_until(
            lambda: bench.states() == Counter(completed=3) or len(calls) > len(keys),
            "the jobs are completed, or run again",
        )
    assert sorted(calls) == keys, "a settlement was refused the lock, so the handler ran again"
    assert bench.states() == Counter(completed=3)
    assert bench.effects() == dict.fromkeys(keys, 1)


def test_a_handler_that_has_looked_for_rows_to_change_in_vain_is_settled_beside_other_commits(
    bench: SQLiteBench,
) -> None:
    """Such a query takes the lock where it begins a transaction. After a read it is another read."""
    [key] = bench.enqueue(1)
    calls: list[int] = []
    effects = sa.select(sa.func.count()).select_from(bench.Effect)

    async def handle(io: Any, job: Any) -> None:
        calls.append(job.id)
        await io.scalar(effects)
        await io.scalar(effects.execution_options(**{WRITES_LATER: True}))
        await commit_beside(bench, io, job.id)

    server = bench.consumer(handle)
    with server.running():
        wait_until(
            lambda: bench.states() == Counter(completed=1) or len(calls) > 1, "the job is completed, or runs again"
        )
    assert calls == [key], "the settlement was refused the lock, so the handler ran again"
    assert bench.states() == Counter(completed=1)


@pytest.mark.parametrize("api", ["sync"])
def test_transactions_of_consumers_take_the_lock_when_they_begin(bench: SQLiteBench) -> None:
    """A transaction that read first could not write after the commit of another process."""
    bench.enqueue(5)
    server = bench.consumer()
    begun: list[str] = []

    @event.listens_for(server.sync_engine, "before_cursor_execute")
    def note(_: Any, __: Any, statement: str, *___: Any) -> None:
        begun.append(statement)

    server.drain()
    first = {begun[at + 1].split()[0] for at, text in enumerate(begun[:-1]) if text == "BEGIN"}
    assert "BEGIN IMMEDIATE" in begun
    # What begins otherwise only reads.
    writes = [
        text
        for at, text in enumerate(begun)
        if text.split()[0] in {"UPDATE", "INSERT", "DELETE"} and _beginning(begun, at) != "BEGIN IMMEDIATE"
    ]
    assert writes == []
    assert first <= {"SELECT", "WITH", "SAVEPOINT"}


def _beginning(statements: list[str], at: int) -> str:
    return next(text for text in reversed(statements[:at]) if text.startswith("BEGIN"))
