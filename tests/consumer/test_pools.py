"""The size of the connection pool: too small a pool is refused, and the smallest allowed one is enough."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from sqlalchemy.pool import NullPool

from sqlaqueue.exc import ConfigurationError
from tests.consumer.bench import Bench
from tests.programs import wait_until


def test_a_pool_that_is_too_small_is_refused(bench: Bench) -> None:
    """Before the first claim; the error contains the size that is needed."""
    bench.enqueue(1)
    server = bench.consumer(concurrency=4, engine={"pool_size": 2, "max_overflow": 2})
    with pytest.raises(ConfigurationError, match=r"needs 5 connections.*allows 4.*pool_size=5"):
        server.drain()
    assert bench.states() == {"pending": 1}


@pytest.mark.parametrize("engine", [{"pool_size": 1, "max_overflow": 4}, {"pool_size": 0}, {"max_overflow": -1}])
def test_a_pool_that_is_large_enough_is_not_refused(bench: Bench, engine: dict[str, Any]) -> None:
    bench.enqueue(3)
    assert bench.consumer(concurrency=4, engine=engine).drain() == 3


def test_an_engine_without_a_pool_is_not_refused(bench: Bench) -> None:
    bench.enqueue(8)
    assert bench.consumer(concurrency=4, batch_size=2, engine={"poolclass": NullPool}).drain() == 8


def test_the_smallest_allowed_pool_is_enough(bench: Bench) -> None:
    """All handlers use their sessions at once, and the maintenance loop works as well."""
    bench.enqueue(40)
    at_work, lock, full = [0], threading.Lock(), threading.Event()

    async def work(io: Any, job: Any) -> None:
        await io.execute(bench.effect(job.id))
        with lock:
            at_work[0] += 1
            if at_work[0] == 4:
                full.set()
        await io.wait(full)

    engine = {"pool_size": 5, "max_overflow": 0, "pool_timeout": 10}
    server = bench.consumer(work, concurrency=4, batch_size=5, engine=engine, lease=1)
    with server.running():
        wait_until(lambda: bench.states() == {"completed": 40})
    assert set(bench.effects().values()) == {1}
    assert server.told() == {"claimed": 40, "completed": 40}
    bench.assert_tidy()


def test_sessions_with_autocommit_are_refused(bench: Bench) -> None:
    """Other Consumers could claim the jobs of a batch, and a rollback would undo nothing."""
    bench.enqueue(2)
    server = bench.consumer(engine={"isolation_level": "AUTOCOMMIT"})
    with pytest.raises(ConfigurationError, match="AUTOCOMMIT"):
        server.drain()
    assert bench.states() == {"pending": 2}
    bench.assert_tidy()


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_stricter_isolation_still_drains(bench: Bench, level: str) -> None:
    """Claims may fail with conflicts, and are tried again."""
    bench.enqueue(20)
    servers = [bench.consumer(concurrency=2, batch_size=2, engine={"isolation_level": level}) for _ in range(2)]
    with servers[0].running(), servers[1].running():
        wait_until(lambda: bench.states() == {"completed": 20})
    assert set(bench.attempts().values()) == {1}
