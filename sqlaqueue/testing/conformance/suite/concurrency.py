"""Concurrent transactions: no job is claimed twice, and none is lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa

from sqlaqueue import cancel, claim, complete, fail, reconcile, requeue, rescue, retry
from sqlaqueue.testing.conformance.gate import DEADLINE
from sqlaqueue.testing.conformance.queue_under_test import HOUR, QueueUnderTest, numbers_of

CLAIMERS = 4
JOBS = 200


def _sql(**values: Any) -> Callable[[QueueUnderTest], None]:
    return lambda queue: queue.execute(sa.update(queue.Job).where(queue.Job.number == 0).values(values))


def _cancel(queue: QueueUnderTest) -> None:
    with queue.session() as session:
        assert session.scalars(cancel(queue.only(0))).all() == [queue.key(0)]
        session.commit()


CHANGES: dict[str, Callable[[QueueUnderTest], Any]] = {
    "completed": lambda queue: queue.run(complete, 0),
    "failed": lambda queue: queue.run(fail, 0),
    "put off": lambda queue: queue.run(lambda jobs: retry(jobs, delay=HOUR), 0),
    "cancelled": _cancel,
    "moved to the future": _sql(run_at=sa.func.now() + timedelta(days=1)),
    "no longer what the filter wants": _sql(payload="other"),
    "deleted": lambda queue: queue.execute(sa.delete(queue.Job).where(queue.Job.number == 0)),
}
"""Changes of job 0 between the snapshot of a claim and its lock."""


class ConcurrencyConformance:
    """Threads with a connection each, and races that are arranged step by step."""

    def test_concurrent_claimers_never_share_a_job(self, queue: QueueUnderTest) -> None:
        """Every job is claimed exactly once."""
        queue.enqueue(JOBS)

        def work(size: int) -> list[int]:
            done: list[int] = []
            with queue.session() as session:
                while jobs := queue.claim(session, size):
                    assert len(jobs) <= size
                    # Before the expired attributes are read: not every engine lets a transaction read first.
                    assert len(session.scalars(complete(jobs)).all()) == len(jobs)
                    done += numbers_of(jobs)
                    session.commit()
            return done

        with ThreadPoolExecutor(CLAIMERS) as pool:
            runs = [pool.submit(work, size) for size in range(3, 3 + CLAIMERS)]
            counts = Counter(number for run in runs for number in run.result(DEADLINE))
        assert counts == dict.fromkeys(range(JOBS), 1)
        assert queue.claimable() == []

    def test_open_claims_are_disjoint(self, queue: QueueUnderTest) -> None:
        """Claims that are open at the same time have no job in common."""
        queue.enqueue(20)
        with ExitStack() as workers:
            claims = [numbers_of(queue.claim(workers.enter_context(queue.session()), 3)) for _ in range(8)]
        assert [len(claim) for claim in claims] == [3, 3, 3, 3, 3, 3, 2, 0]
        assert sorted(number for claim in claims for number in claim) == list(range(20))

    def test_concurrent_claims_and_administration(self, queue: QueueUnderTest) -> None:
        """Claims, cancellations, ``reconcile()`` and ``rescue()`` do not block each other."""
        queue.enqueue(JOBS)

        def work() -> int:
            ended = 0
            with queue.session() as session:
                while jobs := queue.claim(session, 7):
                    kept, given_up = jobs[::2], jobs[1::2]
                    ended += len(session.scalars(complete(kept)).all())
                    ended += len(session.scalars(fail(given_up)).all())
                    session.commit()
            return ended

        def administer() -> int:
            changed = 0
            with queue.session() as session:
                for number in range(0, JOBS, 5):
                    chosen = queue.only(number, number + 1, number + 2)
                    changed += len(session.scalars(cancel(chosen)).all())
                    session.execute(reconcile(queue.Job))
                    session.execute(rescue(queue.Job))
                    session.commit()
            return changed

        with ThreadPoolExecutor(3) as pool:
            counts = [pool.submit(work), pool.submit(work), pool.submit(administer)]
            assert sum(count.result(DEADLINE) for count in counts) == JOBS
        assert queue.claimable() == []

    def test_a_requeued_job_is_claimed_by_one_worker(self, queue: QueueUnderTest) -> None:
        """Several workers claim while jobs are requeued; each job goes to one of them."""
        queue.enqueue(60)
        queue.run(fail, *range(60))

        def bring_back() -> list[int]:
            with queue.session() as session:
                for number in range(60):
                    session.execute(requeue(queue.only(number)))
                    session.commit()
            return []

        def work() -> list[int]:
            done: list[int] = []
            with queue.session() as session:
                while not all(brought.done() for brought in bringing):
                    jobs = queue.claim(session, 4)
                    session.execute(complete(jobs))
                    done += numbers_of(jobs)
                    session.commit()
            return done

        with ThreadPoolExecutor(3) as pool:
            bringing = [pool.submit(bring_back)]
            workers = [pool.submit(work), pool.submit(work)]
            bringing[0].result(DEADLINE)
            done = [number for worker in workers for number in worker.result(DEADLINE)]
        assert len(done) == len(set(done))
        assert sorted([*done, *queue.claimable()]) == list(range(60))

    @pytest.mark.parametrize("change", CHANGES)
    def test_conditions_are_checked_again_when_a_job_is_locked(self, queue: QueueUnderTest, change: str) -> None:
        """A claim returns no job that another transaction changed after the claim's snapshot."""
        queue.enqueue(4, payload="wanted")
        wanted = sa.select(queue.Job).where(queue.Job.payload == "wanted")
        with ThreadPoolExecutor(1) as pool, queue.session() as session, queue.gate() as gate:
            late = claim(wanted.where(gate.passed), 2)
            claiming = pool.submit(lambda: numbers_of(session.scalars(late)))
            gate.await_arrival()
            CHANGES[change](queue)
            gate.open()
            claimed = claiming.result(DEADLINE)
            assert 0 not in claimed
            assert len(claimed) == len(set(claimed)) <= 2
        assert set(queue.claimable()) >= {1, 2, 3}

    def test_a_job_claimed_concurrently_is_not_claimed_again(self, queue: QueueUnderTest) -> None:
        """The other claim began later and finished first."""
        queue.enqueue(4)
        with (
            ThreadPoolExecutor(1) as pool,
            queue.session() as session,
            queue.session() as faster,
            queue.gate() as gate,
        ):
            late = claim(sa.select(queue.Job).where(gate.passed), 2)
            claiming = pool.submit(lambda: numbers_of(session.scalars(late)))
            gate.await_arrival()
            assert numbers_of(queue.claim(faster, of=queue.only(0))) == [0]
            gate.open()
            claimed = claiming.result(DEADLINE)
            assert 0 not in claimed
            assert len(claimed) == len(set(claimed)) <= 2

    def test_a_job_retried_concurrently_is_not_lost(self, queue: QueueUnderTest) -> None:
        """One of the two transactions has it in the end."""
        queue.enqueue(2)
        with ThreadPoolExecutor(1) as pool, queue.session() as session, queue.gate() as gate:
            late = claim(sa.select(queue.Job).where(gate.passed), 2)
            claiming = pool.submit(lambda: numbers_of(session.scalars(late)))
            gate.await_arrival()
            queue.run(retry, 0)
            gate.open()
            assert set(claiming.result(DEADLINE)) <= {0, 1}
        assert sorted(queue.claimable()) == [0, 1]
        with queue.session() as session:
            jobs = queue.claim(session)
            assert len(session.scalars(complete(jobs)).all()) == 2
            session.commit()
        assert queue.claimable() == []
