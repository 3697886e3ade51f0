"""Strict isolation levels, by default or chosen by a handler: runs are settled as at READ COMMITTED."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import sqlalchemy as sa

from tests.consumer.bench import Bench
from tests.programs import wait_until

pytestmark = [pytest.mark.usefixtures("frequent_rescues"), pytest.mark.once]

LEVEL = sa.text("SELECT current_setting('transaction_isolation')")
LEASE = 1.0


@contextlib.contextmanager
def strict_by_default(bench: Bench, where: str, level: str) -> Iterator[dict[str, Any]]:
    """Yield engine options with a strict level, or set it as the default of the database."""
    if where != "database":
        yield {"engine": {"isolation_level": level}, "factory": {"execution_options": {"isolation_level": level}}}[
            where
        ]
        return
    name = bench.database.name
    bench.execute(f"ALTER DATABASE \"{name}\" SET default_transaction_isolation = '{level.lower()}'")
    bench.database.kill_backends()
    try:
        yield {}
    finally:
        bench.execute(f'ALTER DATABASE "{name}" RESET default_transaction_isolation')
        bench.database.kill_backends()


def past_its_lease(bench: Bench) -> None:
    """Wait until a lease that is not extended has expired."""
    end = bench.execute(f"SELECT clock_timestamp() + interval '{1.2 * LEASE} s'")
    wait_until(lambda: bench.execute("SELECT clock_timestamp() > :end", end=end))


DEFAULTS = [
    pytest.param("database", "SERIALIZABLE"),
    pytest.param("engine", "REPEATABLE READ"),
    pytest.param("factory", "SERIALIZABLE", marks=pytest.mark.thorough),
    pytest.param("database", "REPEATABLE READ", marks=pytest.mark.thorough),
]


@pytest.mark.parametrize(("where", "level"), DEFAULTS)
def test_a_strict_default_changes_no_result(bench: Bench, where: str, level: str) -> None:
    """No job runs twice or loses an attempt. Handlers under a lease have that level, for longer than the lease."""
    keys = bench.enqueue(5)
    patient, levels = threading.Event(), set[str]()
    begun = threading.Semaphore(0)

    async def work(io: Any, job: Any) -> None:
        levels.add(await io.scalar(LEVEL))
        await io.execute(bench.effect(job.id))
        if job.id in keys[:2]:
            begun.release()
            await io.wait(patient)

    with strict_by_default(bench, where, level) as engine:
        server = bench.consumer(work, concurrency=2, batch_size=2, lease=LEASE, engine=engine)
        with server.running():
            if not bench.held:
                assert all(begun.acquire(timeout=30) for _ in range(2))
                past_its_lease(bench)
            patient.set()
            wait_until(lambda: bench.states() == {"completed": 5})
    assert levels == {"read committed" if bench.held else level.lower()}
    assert server.told() == {"claimed": 5, "completed": 5}
    assert set(bench.attempts().values()) == {1}
    assert set(bench.effects().values()) == {1}
    bench.assert_tidy()


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_a_handler_chooses_a_strict_level(leased: Bench, level: str) -> None:
    """Several run at once for longer than their leases, and each is settled at the first try."""
    keys = leased.enqueue(3)
    begun, patient = threading.Semaphore(0), threading.Event()

    async def work(io: Any, job: Any) -> None:
        await io.choose(level)
        assert await io.scalar(LEVEL) == level.lower()
        await io.execute(leased.effect(job.id))
        begun.release()
        await io.wait(patient)

    server = leased.consumer(work, concurrency=3, lease=LEASE)
    with server.running():
        assert all(begun.acquire(timeout=30) for _ in keys)
        past_its_lease(leased)
        patient.set()
        wait_until(lambda: leased.states() == {"completed": 3})
    assert server.told() == {"claimed": 3, "completed": 3}
    assert leased.effects() == dict.fromkeys(keys, 1)
    assert leased.execute("SHOW enable_seqscan") == "on"


def test_handlers_whose_transactions_conflict_run_again(leased: Bench) -> None:
    """Each reads what the other writes, so one of them fails. It is retried after a delay, and costs no attempt."""
    keys = leased.enqueue(2)
    seen = list[int]()

    async def work(io: Any, job: Any) -> None:
        await io.choose("SERIALIZABLE")
        await io.scalar(sa.text("SELECT count(*) FROM effect"))
        await io.execute(leased.effect(job.id))
        seen.append(job.id)
        if len(seen) <= 2:
            await io.wait_for(lambda: len(seen) >= 2)

    server = leased.consumer(work, concurrency=2)
    with server.running():
        wait_until(lambda: leased.states() == {"completed": 2})
    assert leased.attempts() == dict.fromkeys(keys, 1)
    assert leased.effects() == dict.fromkeys(keys, 1)
    assert not server.told("failed", "retried", "lease_lost")
    [released] = [event for event in server.events if event.name == "released"]
    assert released.delay
