"""The crash journal is written beside the transaction that holds jobs, and must cause no deadlock with it."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from sqlaqueue.consumer import held as held_routines
from sqlaqueue.consumer import quarantine
from sqlaqueue.consumer.core.waker import _cancel
from sqlaqueue.exc import HandlerNotStopped
from sqlaqueue.mapping.mixin import spec_of
from sqlaqueue.queue.run import key_text
from tests.consumer.bench import Bench, Server, listening_connections
from tests.consumer.conftest import Supply
from tests.programs import wait_until


@pytest.fixture
def held(supply: Supply, api: str) -> Bench:
    """The empty queue of a strategy that holds a transaction."""
    return supply.take("batch_select", api)


@pytest.fixture
def held_by_threads(supply: Supply) -> Bench:
    return supply.take("batch_select", "sync")


def test_a_transaction_that_locks_both_tables_is_not_blocked(held: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would wait for the Consumer's jobs, and the Consumer for the journal: the server cannot detect that."""
    monkeypatch.setattr(held_routines, "JOURNAL_DEADLINE", 0.2)
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


def test_a_run_ends_though_its_journal_is_locked(held_by_threads: Bench) -> None:
    """The entry that it leaves there counts no attempt: the jobs wait as before."""
    held = held_by_threads
    held.enqueue()
    started, go_on = threading.Semaphore(0), threading.Event()

    async def work(io: Any, job: Any) -> None:
        started.release()
        await io.wait(go_on)

    # No pool: the connection of the handler that is given up comes back when the Consumer is gone.
    given_up = held.consumer(work, grace=0.2, engine={"poolclass": sa.NullPool})
    not_stopped = pytest.raises(HandlerNotStopped, match="goes on after the grace period")
    with not_stopped, given_up.running() as server, held.engine.connect() as admin:
        context = await_start(server)
        assert started.acquire(timeout=30)
        admin.execute(sa.text("LOCK TABLE sqlaqueue_crash_journal"))
        server.stop()
        assert server.finished.wait(30), "it waits for the transaction that locks its journal"
        admin.rollback()
        go_on.set()
        wait_until(lambda: not context.runner._working, "that the handler has ended")
    assert held.states() == {"pending": 1}


def test_the_thread_that_waits_for_the_workers_may_fail(
    held_by_threads: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``run()`` raises its error, and no worker is left running."""

    def fail(seconds: float) -> None:
        raise RuntimeError("out of threads")

    # No pool: workers that are busy in that moment have their connections for a little longer than it lasts.
    watched = held_by_threads.consumer(engine={"poolclass": sa.NullPool})
    with pytest.raises(RuntimeError, match="out of threads"), watched.running() as server:
        context = await_start(server)
        wait_until(lambda: listening_connections(held_by_threads) == 1)
        monkeypatch.setattr(context.runner._waker, "wait", fail)
        context.runner._waker.wake()
        assert server.finished.wait(30)
    wait_until(lambda: not context.runner._working, "that all threads have ended")
    wait_until(lambda: listening_connections(held_by_threads) == 0, "that it listens no longer")


def await_start(server: Server) -> Any:
    wait_until(lambda: server.context is not None and server.context.has_claimed)
    return server.context


def test_a_cancellation_that_the_server_refuses_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """The server may be restarting, or have no connection left: the thread that checks deadlines goes on."""

    class Refusing:
        def cancel(self) -> None:
            raise OperationalError("cancel", {}, Exception("too many clients"))

    _cancel(Refusing(), sa.create_engine("postgresql+psycopg://"))
    assert "cannot cancel a statement" in caplog.text


@pytest.mark.parametrize("analyzed", [False, True])
def test_jobs_of_other_batches_are_found_by_a_hash(held_by_threads: Bench, *, analyzed: bool) -> None:
    """Comparing each job of a batch with each job of the others would take longer than the claim."""
    held, spec, plans = held_by_threads, spec_of(held_by_threads.Job), list[str]()

    def write(first: int) -> quarantine.JournalEntry:
        names = tuple(key_text((key,)) for key in range(first, first + 500))
        entry = quarantine.JournalEntry(names, solely_responsible=False)
        quarantine.write_entry(session, spec, entry, "worker")
        session.commit()
        return entry

    @sa.event.listens_for(held.engine, "before_cursor_execute")
    def explain(connection: Any, cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        if "INSERT INTO sqlaqueue_crash_journal" in statement:
            cursor.execute(f"EXPLAIN {statement}", parameters)
            plans.append("\n".join(line for (line,) in cursor.fetchall()))

    try:
        with Session(held.engine) as session:
            assert write(1).quarantined == frozenset()
            assert write(501).quarantined == frozenset()
            if analyzed:
                session.execute(sa.text("ANALYZE sqlaqueue_crash_journal"))
            assert write(999).quarantined == {"999", "1000"}
            session.execute(sa.text("DELETE FROM sqlaqueue_crash_journal"))
            session.commit()
    finally:
        sa.event.remove(held.engine, "before_cursor_execute", explain)
    assert len(plans) == 3
    assert all("hashed SubPlan" in plan for plan in plans)
