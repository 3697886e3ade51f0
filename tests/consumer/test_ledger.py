"""The ledger of strategies that hold a transaction is written beside it, and must not tie two locks together."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from sqlaqueue.consumer.core.statement_deadline import StatementDeadlines, _Statement
from sqlaqueue.consumer.executing import held as runs
from sqlaqueue.consumer.settling import crash_journal
from sqlaqueue.keys import key_text
from sqlaqueue.mapping.mixin import spec_of
from tests.consumer.bench import Bench, Server, wait_until
from tests.consumer.conftest import Supply
from tests.consumer.hearing import listening


@pytest.fixture
def held(supply: Supply, colour: str) -> Bench:
    """The empty queue of a strategy that holds a transaction."""
    return supply.take("batch_select", colour)


@pytest.fixture
def held_by_threads(supply: Supply) -> Bench:
    return supply.take("batch_select", "sync")


def test_whoever_locks_both_tables_is_let_through(held: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would wait for the Consumer's jobs, and the Consumer for its ledger, and no server would see it."""
    monkeypatch.setattr(runs, "LEDGER_PATIENCE", 0.2)
    held.enqueue(3)
    table = held.Job.__table__.name
    waits = """
        SELECT count(*) FROM pg_stat_activity
        WHERE wait_event_type = 'Lock' AND query LIKE '%INSERT INTO sqlaqueue_crash_journal%' AND pid <> pg_backend_pid()
    """
    with held.engine.connect() as admin:
        admin.execute(sa.text("LOCK TABLE sqlaqueue_crash_journal"))
        with held.consumer().running():
            wait_until(lambda: held.execute(waits))
            got_through = threading.Event()

            def lock_the_other() -> None:
                admin.execute(sa.text(f"LOCK TABLE {table}"))
                got_through.set()

            threading.Thread(target=lock_the_other, daemon=True).start()
            assert got_through.wait(30), "it waits for the Consumer, which waits for it"
            admin.rollback()
            wait_until(lambda: held.states() == {"completed": 3})
    held.assert_tidy()


def test_a_shift_ends_though_somebody_locks_its_ledger(held_by_threads: Bench) -> None:
    """What it leaves there blames nobody: the jobs wait as before."""
    held = held_by_threads
    held.enqueue()
    at_work, go_on = threading.Semaphore(0), threading.Event()

    async def work(hands: Any, job: Any) -> None:
        at_work.release()
        await hands.wait(go_on)

    # No pool: the connection of the handler that is given up comes back when the Consumer is gone.
    given_up = held.consumer(work, grace=0.2, engine={"poolclass": sa.NullPool})
    with given_up.running() as server, held.engine.connect() as admin:
        shift = wait_for_shift(server)
        assert at_work.acquire(timeout=30)
        admin.execute(sa.text("LOCK TABLE sqlaqueue_crash_journal"))
        server.stop()
        assert server.finished.wait(30), "it waits for whoever locks its ledger"
        admin.rollback()
        go_on.set()
        wait_until(lambda: not shift._working, "that the handler has ended")
    assert held.states() == {"pending": 1}


def test_whoever_watches_the_lanes_may_fail(held_by_threads: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """``run()`` raises what it raised, and no lane is left at work behind its back."""

    def fail(self: StatementDeadlines) -> None:
        raise RuntimeError("out of threads")

    # No pool: lanes that are at work in that moment have their connections for a little longer than it lasts.
    watched = held_by_threads.consumer(engine={"poolclass": sa.NullPool})
    with pytest.raises(RuntimeError, match="out of threads"), watched.running() as server:
        shift = wait_for_shift(server)
        wait_until(lambda: listening(held_by_threads) == 1)
        monkeypatch.setattr(StatementDeadlines, "cancel_overdue", fail)
        shift._waker.wake()
        assert server.finished.wait(30)
    wait_until(lambda: not shift._working, "that all threads have ended")
    wait_until(lambda: listening(held_by_threads) == 0, "that it listens no longer")


def wait_for_shift(server: Server) -> Any:
    wait_until(lambda: server.consumer._shift is not None and server.consumer._shift.proven)
    return server.consumer._shift


def test_a_server_that_takes_no_cancellation_ends_nobody(caplog: pytest.LogCaptureFixture) -> None:
    """It may be restarting, or have no connection left: whoever looks after the others goes on."""

    class Refusing:
        def cancel(self) -> None:
            raise OperationalError("cancel", {}, Exception("too many clients"))

    deadlines = StatementDeadlines(lambda: None)
    statement = _Statement(Refusing(), deadline=0.0)
    deadlines._open.add(statement)
    deadlines.cancel_overdue()
    assert statement.canceller is not None
    statement.canceller.join()
    assert "cannot cancel a statement" in caplog.text
    assert deadlines.until_check() < 1


@pytest.mark.parametrize("analyzed", [False, True])
def test_jobs_of_other_batches_are_found_by_a_hash(held_by_threads: Bench, *, analyzed: bool) -> None:
    """To compare each job of a batch with each of all others took longer than the claim."""
    held, spec, plans = held_by_threads, spec_of(held_by_threads.Job), list[str]()

    def enter(first: int) -> crash_journal.Entry:
        entry = crash_journal.Entry(tuple(key_text((key,)) for key in range(first, first + 500)), blamed=False)
        crash_journal.enter(session, spec, entry, "worker")
        session.commit()
        return entry

    @sa.event.listens_for(held.engine, "before_cursor_execute")
    def explain(connection: Any, cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        if "INSERT INTO sqlaqueue_crash_journal" in statement:
            cursor.execute(f"EXPLAIN {statement}", parameters)
            plans.append("\n".join(line for (line,) in cursor.fetchall()))

    try:
        with Session(held.engine) as session:
            assert enter(1).suspects == frozenset()
            assert enter(501).suspects == frozenset()
            if analyzed:
                session.execute(sa.text("ANALYZE sqlaqueue_crash_journal"))
            assert enter(999).suspects == {"999", "1000"}
            session.execute(sa.text("DELETE FROM sqlaqueue_crash_journal"))
            session.commit()
    finally:
        sa.event.remove(held.engine, "before_cursor_execute", explain)
    assert len(plans) == 3
    assert all("hashed SubPlan" in plan for plan in plans)
