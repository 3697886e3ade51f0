"""A claim never waits for a lock, passes over locked jobs, and blocks no other transaction.

If it waited, a long transaction on one row would stop the whole queue.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue import cancel, claim, complete, fail, purge, reconcile, release, requeue, retry
from sqlaqueue.testing.conformance.queue_under_test import QueueUnderTest, needs, numbers_of

Lock = Callable[[QueueUnderTest, Session], Any]


def _row_lock(clause: str) -> Lock:
    return lambda _, session: session.execute(sa.text(f"SELECT * FROM conformance_job WHERE number = 0 FOR {clause}"))


def _write(**values: Any) -> Lock:
    return lambda queue, session: session.execute(sa.update(queue.Job).where(queue.Job.number == 0).values(values))


LOCKS: dict[str, Lock] = {
    "another claim": lambda queue, session: session.scalars(claim(queue.only(0), 1)).all(),
    "cancel()": lambda queue, session: session.execute(cancel(queue.only(0))),
    "an UPDATE of the job": _write(payload="edited"),
    "an UPDATE of its priority": _write(priority=-5),
    "an UPDATE of its time": _write(run_at=sa.func.now() - timedelta(days=1)),
    "a DELETE of the job": lambda queue, session: session.execute(sa.delete(queue.Job).where(queue.Job.number == 0)),
    "FOR UPDATE": _row_lock("UPDATE"),
    "FOR NO KEY UPDATE": _row_lock("NO KEY UPDATE"),
    "FOR SHARE": _row_lock("SHARE"),
}
"""Statements that take job 0 from all others until their transaction ends."""

SHARED_KEYS: dict[str, Lock] = {
    "a child row's foreign key": lambda queue, session: session.execute(
        sa.insert(queue.Note.__table__).values(queue.key_values(0))
    ),
    "FOR KEY SHARE": _row_lock("KEY SHARE"),
}
"""Statements that only keep the key of job 0 from being changed."""

SETTLEMENTS: dict[str, Callable[[list[Any]], Any]] = {
    "complete": complete,
    "retry": retry,
    "fail": fail,
    "release": release,
}


class LockConformance:
    """Each verb against each lock that the library or an ordinary statement takes."""

    @pytest.mark.parametrize("lock", LOCKS)
    def test_a_claim_passes_over_a_locked_job(self, queue: QueueUnderTest, lock: str) -> None:
        """It claims the other jobs without waiting."""
        queue.enqueue(4)
        with queue.session() as holder, queue.impatient() as session:
            LOCKS[lock](queue, holder)
            assert numbers_of(session.scalars(claim(queue.Job, 10))) == [1, 2, 3]

    @pytest.mark.parametrize("lock", SHARED_KEYS)
    def test_a_claim_takes_a_job_that_a_child_row_references(self, queue: QueueUnderTest, lock: str) -> None:
        """A new child row does not hide the job, unless the claim deletes the job's row."""
        queue.enqueue(4)
        with queue.session() as holder, queue.impatient() as session:
            SHARED_KEYS[lock](queue, holder)
            taken = [0, 1, 2, 3] if queue.keeps_rows else [1, 2, 3]
            assert numbers_of(session.scalars(claim(queue.Job, 10))) == taken

    def test_a_claim_does_not_wait_for_the_second_table_of_its_filter(self, queue: QueueUnderTest) -> None:
        """Only jobs are locked: a locked owner neither blocks nor hides them."""
        queue.enqueue(4, owner_id=1)
        with queue.session() as holder, queue.impatient() as session:
            holder.execute(sa.select(queue.Owner).with_for_update())
            assert numbers_of(session.scalars(claim(queue.of_vips(), 10))) == [0, 1, 2, 3]

    def test_a_claim_does_not_lock_the_second_table_of_its_filter(self, queue: QueueUnderTest) -> None:
        """The owner of a running job can be changed."""
        queue.enqueue(4, owner_id=1)
        with queue.session() as session, queue.impatient() as user:
            session.scalars(claim(queue.of_vips(), 10)).all()
            user.execute(sa.update(queue.Owner).values(vip=True))

    def test_a_claim_does_not_wait_for_locks_in_the_side_tables(self, queue: QueueUnderTest) -> None:
        """A user's transaction may lock rows of the strategy's own tables."""
        queue.enqueue(4)
        queue.run(fail, 3)
        with queue.session() as holder, queue.impatient() as session:
            for table in queue.models.base.metadata.sorted_tables:
                if not table.name.startswith("conformance_"):
                    holder.execute(sa.select(table).with_for_update())
            claimed = numbers_of(session.scalars(claim(queue.Job, 10)))
            assert claimed in ([], [0, 1, 2])

    @needs(rows=True)
    def test_a_claim_does_not_block_child_rows(self, queue: QueueUnderTest) -> None:
        """While a job runs, rows that refer to it can be inserted, as long as its row exists."""
        queue.enqueue(1)
        with queue.session() as session, queue.impatient() as user:
            session.scalars(claim(queue.Job, 1)).all()
            SHARED_KEYS["a child row's foreign key"](queue, user)

    @needs(rows=True)
    @pytest.mark.parametrize("verb", SETTLEMENTS)
    def test_settling_does_not_wait_for_child_rows(self, queue: QueueUnderTest, verb: str) -> None:
        """An open transaction that inserts a child row does not delay the settlement."""
        queue.enqueue(1)
        with queue.impatient() as session, queue.session() as user:
            jobs = queue.claim(session)
            SHARED_KEYS["a child row's foreign key"](queue, user)
            assert session.scalars(SETTLEMENTS[verb](jobs)).all() == [queue.key(0)]

    @pytest.mark.parametrize("lock", LOCKS)
    def test_cancel_does_not_wait(self, queue: QueueUnderTest, lock: str) -> None:
        """The cancellation of a locked job is requested, and the others are cancelled at once."""
        queue.enqueue(4)
        with queue.session() as holder, queue.impatient() as session:
            LOCKS[lock](queue, holder)
            assert set(session.scalars(cancel(queue.Job))) == queue.keys(1, 2, 3)
            session.commit()
        assert [queue.state(number) for number in (1, 2, 3)] == ["cancelled"] * 3
        assert queue.state(0) == "pending"

    @pytest.mark.parametrize("lock", LOCKS)
    def test_reconcile_does_not_wait(self, queue: QueueUnderTest, lock: str) -> None:
        """Locked jobs are passed over."""
        queue.enqueue(4)
        with queue.session() as holder, queue.impatient() as session:
            LOCKS[lock](queue, holder)
            assert session.scalars(reconcile(queue.Job)).all() == []
            session.commit()
            holder.rollback()
        assert sorted(queue.claimable()) == [0, 1, 2, 3]

    def test_purge_passes_over_a_locked_job(self, queue: QueueUnderTest) -> None:
        """A finished job that is being requeued is not deleted, and does not block the others."""
        queue.enqueue(3)
        queue.run(fail, 0, 1, 2)
        with queue.session() as holder, queue.impatient() as session:
            holder.execute(requeue(queue.only(0)))
            assert set(session.scalars(purge(queue.Job))) == queue.keys(1, 2)
            session.commit()
            holder.commit()
        assert queue.claimable() == [0]
