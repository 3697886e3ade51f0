"""Enqueueing notifies only while a Consumer waits for it, and no job waits long for one that does not."""

import contextlib
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import sqlalchemy as sa

from sqlaqueue.consumer.notifications import watch
from sqlaqueue.mapping.mixin import spec_of
from sqlaqueue.postgresql.triggers import channel_of, lock_numbers
from tests.consumer.bench import LATER, Bench, Gate, Server, await_listening, idle, is_listening, logged
from tests.programs import wait_until

# By themselves idle Consumers poll after `LATER`, so that a job that none is told of is not run.


def holders(bench: Bench) -> list[int]:
    """Return the server's processes that have a lock of a queue alone, once for each."""
    locks = "FROM pg_locks AS l JOIN pg_database AS d ON d.oid = l.database WHERE d.datname = current_database()"
    alone = "l.locktype = 'advisory' AND l.objsubid = 2 AND l.mode = 'ExclusiveLock' AND l.granted"
    return list(bench.execute(f"SELECT array_agg(pid) {locks} AND {alone}") or ())


def await_notified(bench: Bench, *servers: Server) -> None:
    """Wait until one of them has both locks, and the poll that follows is over."""
    await_listening(*servers)
    wait_until(lambda: len(holders(bench)) == 2, "that a Consumer is notified")
    wait_until(lambda: all(map(is_listening, servers)))


@contextlib.contextmanager
def listening(bench: Bench) -> Iterator[Callable[[], int]]:
    """Yield a function that returns how many announcements of jobs have arrived since its last call."""
    with bench.database.connect() as connection:
        connection.execute(f'LISTEN "{channel_of(spec_of(bench.Job))}"'.encode())

        def received() -> int:
            connection.execute("SELECT 1")
            return sum(each.payload.startswith("pending") for each in connection.notifies(timeout=0.1))

        yield received


@contextlib.contextmanager
def enqueueing(bench: Bench, payload: str = "open") -> Iterator[sa.Connection]:
    """Yield a connection whose transaction has enqueued a job."""
    with bench.engine.connect() as connection:
        connection.execute(sa.insert(bench.Job).values(payload=payload))
        yield connection


def completed(bench: Bench, number: int) -> None:
    wait_until(lambda: bench.states() == {"completed": number}, f"{number} completed jobs")


def test_enqueueing_notifies_only_while_a_consumer_waits(mixed: Bench) -> None:
    gate = Gate()
    with listening(mixed) as received:
        mixed.enqueue()
        assert received() == 0
        with mixed.consumer(gate, poll_interval=LATER).running() as server:
            gate.await_call()
            await_listening(server)
            # It has no capacity.
            mixed.enqueue()
            assert received() == 0
            gate.open()
            completed(mixed, 2)
            await_notified(mixed, server)
            mixed.enqueue()
            completed(mixed, 3)
            assert received() == 1
        assert holders(mixed) == []
        mixed.enqueue()
        assert received() == 0


def test_a_transaction_that_enqueued_before_a_consumer_waited(mixed: Bench) -> None:
    """As long as it is open, the Consumer polls: for its job, and for others, none of which is announced."""
    with idle(mixed).running() as server:
        await_notified(mixed, server)
        server_of_watch = holders(mixed)[0]
        with enqueueing(mixed) as connection:
            # With the other one of its locks, which it tries again.
            mixed.execute("SELECT pg_terminate_backend(:pid, 10000)", pid=server_of_watch)
            with enqueueing(mixed) as silent, listening(mixed) as received:
                wait_until(lambda: len(holders(mixed)) == 1, "that the Consumer polls")
                mixed.enqueue()
                completed(mixed, 1)
                assert received() == 0
                silent.commit()
                completed(mixed, 2)
            connection.commit()
            completed(mixed, 3)
        await_notified(mixed, server)


def test_a_savepoint_that_is_rolled_back(mixed: Bench) -> None:
    """Its lock is returned; the next statement of the transaction takes it again."""
    insert = sa.insert(mixed.Job).values(payload="x")
    with mixed.engine.connect() as connection, idle(mixed).running() as server:
        connection.begin()
        with connection.begin_nested() as savepoint:
            connection.execute(insert)
            await_listening(server)
            wait_until(lambda: len(holders(mixed)) == 1, "that the Consumer polls")
            savepoint.rollback()
        await_notified(mixed, server)
        connection.execute(insert)
        connection.commit()
        completed(mixed, 1)


def test_a_job_for_later_that_was_not_announced(mixed: Bench) -> None:
    with mixed.engine.connect() as connection:
        due = sa.func.now() + sa.literal_column("interval '2 s'")
        connection.execute(sa.insert(mixed.Job).values(payload="x", run_at=due))
        with idle(mixed).running() as server:
            await_listening(server)
            wait_until(lambda: len(holders(mixed)) == 1, "that the Consumer polls")
            connection.commit()
            await_notified(mixed, server)
            completed(mixed, 1)


def test_another_consumer_watches_when_one_is_killed(mixed: Bench) -> None:
    servers = [idle(mixed) for _ in range(3)]
    with servers[0].running(), servers[1].running(), servers[2].running():
        await_notified(mixed, *servers)
        for number in range(1, 4):
            mixed.execute("SELECT pg_terminate_backend(:pid, 10000)", pid=holders(mixed)[0])
            mixed.enqueue()
            completed(mixed, number)
            await_notified(mixed, *servers)


def test_a_busy_consumer_hands_over(mixed: Bench) -> None:
    """Nothing is announced while a transaction that has enqueued is open, so the next Consumer has to poll."""
    gate = Gate()
    servers = [mixed.consumer(gate, poll_interval=LATER, batch_size=1) for _ in range(3)]
    with mixed.engine.connect() as connection:
        connection.execute(sa.insert(mixed.Job).values(payload="open"))
        with servers[0].running(), servers[1].running(), servers[2].running():
            await_listening(*servers)
            for _ in servers:
                mixed.enqueue()
                gate.await_call()
            gate.open()
            completed(mixed, 3)
            connection.commit()
            completed(mixed, 4)


def test_many_transactions_are_not_announced(mixed: Bench) -> None:
    """A Consumer polls while so many are committed that each would wait for the one before."""
    with idle(mixed).running() as server, listening(mixed) as received, mixed.engine.connect() as connection:
        await_notified(mixed, server)
        number = 0
        statement = sa.insert(mixed.Job).values(payload="x")
        while len(holders(mixed)) == 2:
            for _ in range(3 * watch.FLOOD):
                connection.execute(statement)
                connection.commit()
                number += 1
            assert number < 3_000, "all of them notify"
        completed(mixed, number)
        assert received() <= number
        await_notified(mixed, server)


def test_consumers_of_parts_of_a_queue(mixed: Bench) -> None:
    """Each watches for itself: a poll of one finds no job of the other."""
    job = mixed.Job
    parts = [sa.select(job).where(job.payload == name) for name in ("a", "b")]
    servers = [mixed.consumer(model=part, poll_interval=LATER) for part in parts]
    with enqueueing(mixed, "none") as connection, servers[0].running(), servers[1].running():
        await_listening(*servers)
        for number, name in enumerate("abab", 1):
            mixed.execute(f"INSERT INTO job (payload) VALUES ('{name}')")
            wait_until(lambda number=number: mixed.states()["completed"] == number)
        connection.rollback()
        for number, name in enumerate("abab", 5):
            mixed.execute(f"INSERT INTO job (payload) VALUES ('{name}')")
            wait_until(lambda number=number: mixed.states()["completed"] == number)


@pytest.mark.parametrize("name", ["{channel}", "{channel} watch "])
def test_a_lock_that_a_stranger_has(mixed: Bench, name: str) -> None:
    """It costs commits or a moment, but no job waits for the next regular poll."""
    numbers = lock_numbers(name.format(channel=channel_of(spec_of(mixed.Job))))
    with mixed.database.connect() as stranger:
        stranger.execute("SELECT pg_advisory_lock(%s, %s)", numbers)
        with idle(mixed).running() as server:
            await_listening(server)
            for number in range(1, 4):
                mixed.enqueue()
                completed(mixed, number)
            stranger.execute("SELECT pg_advisory_unlock(%s, %s)", numbers)
            await_notified(mixed, server)


def test_a_lock_that_cannot_be_tried(sync_leased: Bench) -> None:
    """As when the server has no room for another lock: the statement succeeds, and notifies."""
    function = "FUNCTION pg_catalog.pg_try_advisory_xact_lock_shared(integer, integer)"
    bench = sync_leased
    role = f"writer_{random.randrange(10**9)}"
    bench.execute(
        f"CREATE ROLE {role}", f"GRANT INSERT ON job TO {role}", f"GRANT USAGE ON SEQUENCE job_id_seq TO {role}"
    )
    bench.execute(f"REVOKE EXECUTE ON {function} FROM PUBLIC")
    try:
        with listening(bench) as received:
            bench.execute(f"SET ROLE {role}; INSERT INTO job (payload) VALUES ('x'); RESET ROLE")
            assert received() == 1
    finally:
        bench.execute(f"GRANT EXECUTE ON {function} TO PUBLIC", f"DROP OWNED BY {role}", f"DROP ROLE {role}")


def test_a_transaction_that_stays_open_is_logged_once(mixed: Bench, monkeypatch: pytest.MonkeyPatch, log: Any) -> None:
    monkeypatch.setattr(watch, "_LOGGED_AFTER", 0.2)
    with enqueueing(mixed) as connection, idle(mixed).running():
        wait_until(lambda: logged(log, "transaction_open"))
        # Time for further looks.
        time.sleep(0.6)
        pid = connection.scalar(sa.text("SELECT pg_backend_pid()"))
        assert [record.pid for record in logged(log, "transaction_open")] == [pid]
