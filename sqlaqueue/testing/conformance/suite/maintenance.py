"""Verbs for operators: cancel, requeue, purge, reconcile, rescue."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa

from sqlaqueue import cancel, complete, fail, purge, reconcile, release, requeue, rescue, retry
from sqlaqueue.testing.conformance.queue_under_test import HOUR, QueueUnderTest, numbers_of

Verb = Callable[[Any], Any]


def _do(queue: QueueUnderTest, statement: Any) -> set[Any]:
    """Execute a verb in a session of its own; return the keys that it changed."""
    with queue.session() as session:
        keys = session.scalars(statement).all()
        session.commit()
    assert len(keys) == len(set(keys)), "a key came back twice"
    return set(keys)


def _finish(queue: QueueUnderTest) -> None:
    """Bring jobs 0 to 2 to the three finished states; 3 to 5 stay pending."""
    queue.enqueue(6)
    queue.run(complete, 0)
    queue.run(fail, 1)
    assert _do(queue, cancel(queue.only(2))) == queue.keys(2)


class MaintenanceConformance:
    """Each verb on pending, running and finished jobs."""

    def test_cancel_cancels_pending_jobs(self, queue: QueueUnderTest) -> None:
        """Only those that the filter selects."""
        queue.enqueue(4)
        queue.run(retry, 0)
        assert _do(queue, cancel(queue.only(0, 3))) == queue.keys(0, 3)
        assert (queue.state(0), queue.state(3)) == ("cancelled", "cancelled")
        if queue.keeps_rows:
            assert queue.attempts(0) == 1
            assert queue.stored(0)["finished_at"] is not None
        assert sorted(queue.claimable()) == [1, 2]

    @pytest.mark.parametrize("verb", [cancel, requeue])
    def test_verbs_accept_instances(self, queue: QueueUnderTest, verb: Verb) -> None:
        """One or many; jobs in other states are left alone."""
        queue.enqueue(4)
        with queue.session() as session:
            jobs = session.scalars(sa.select(queue.Job).order_by(queue.Job.number)).all()
            assert session.scalars(cancel(jobs[0])).all() == [queue.key(0)]
            if verb is cancel:
                assert set(session.scalars(cancel(jobs[:2]))) == queue.keys(1)
            else:
                assert set(session.scalars(requeue(jobs[:2]))) == queue.keys(0)
            assert session.scalars(verb([])).all() == []

    def test_cancel_accepts_the_whole_queue(self, queue: QueueUnderTest) -> None:
        """Finished jobs are left alone."""
        _finish(queue)
        assert _do(queue, cancel(queue.Job)) == queue.keys(3, 4, 5)
        assert queue.state(0) == queue.completed
        assert [queue.state(n) for n in range(1, 6)] == ["failed", *["cancelled"] * 4]

    def test_cancel_requests_the_cancellation_of_a_running_job(self, queue: QueueUnderTest) -> None:
        """The row does not change: the run ends as its worker settles it."""
        queue.enqueue(2)
        with queue.session() as session:
            jobs = queue.claim(session, of=queue.only(0))
            assert _do(queue, cancel(queue.Job)) == queue.keys(1)
            assert session.scalars(complete(jobs)).all() == [queue.key(0)]
            session.commit()
        assert (queue.state(0), queue.state(1)) == (queue.completed, "cancelled")

    def test_cancel_twice(self, queue: QueueUnderTest) -> None:
        """The second call changes nothing."""
        queue.enqueue(2)
        with queue.session() as session:
            queue.claim(session, of=queue.only(0))
            assert _do(queue, cancel(queue.Job)) == queue.keys(1)
            assert _do(queue, cancel(queue.Job)) == set()

    def test_requeue_makes_finished_jobs_pending(self, queue: QueueUnderTest) -> None:
        """No other jobs; completed ones only if their rows were kept."""
        _finish(queue)
        finished = {0, 1, 2} if queue.keeps_rows else {1, 2}
        with queue.session() as session:
            queue.claim(session, of=queue.only(5))
            assert _do(queue, requeue(queue.Job)) == queue.keys(*finished)
            assert sorted(queue.claimable()) == sorted(finished | {3, 4})
        assert [queue.attempts(number) for number in finished] == [0] * len(finished)

    def test_requeue_obeys_a_filter(self, queue: QueueUnderTest) -> None:
        """One of two dead letters."""
        queue.enqueue(3)
        queue.run(fail, 0, 1)
        assert _do(queue, requeue(queue.only(1, 2))) == queue.keys(1)
        assert sorted(queue.claimable()) == [1, 2]
        assert queue.state(0) == "failed"

    @pytest.mark.parametrize("verb", [cancel, requeue, purge])
    def test_verbs_accept_a_filter_with_a_second_table(self, queue: QueueUnderTest, verb: Verb) -> None:
        """For rows and for dead letters."""
        queue.enqueue([0, 3], owner_id=1)
        queue.enqueue([1, 2, 4], owner_id=2)
        if verb is not cancel:
            queue.run(fail, *range(5))
        # Two tables in FROM: SQLAlchemy may correlate such a subquery with the outer statement.
        same = queue.Job.owner_id == queue.Owner.id
        of_vips = sa.select(queue.Job).where(same, queue.Owner.vip, queue.Job.number < 4)
        assert _do(queue, verb(of_vips)) == queue.keys(0, 3)
        assert _do(queue, verb(of_vips)) == set()
        assert _do(queue, verb(queue.Job)) == queue.keys(1, 2, 4)

    def test_a_requeued_job_keeps_its_columns(self, queue: QueueUnderTest) -> None:
        """Its payload, owner and priority; it is due now."""
        queue.enqueue([0], payload="kept", owner_id=1, priority=7)
        queue.enqueue([1])
        queue.run(fail, 0)
        _do(queue, requeue(queue.Job))
        row = queue.stored(0)
        assert (row["payload"], row["owner_id"], row["priority"]) == ("kept", 1, 7)
        assert queue.order() == [1, 0]

    def test_a_requeued_job_can_finish_again(self, queue: QueueUnderTest) -> None:
        """In any state, any number of times."""
        queue.enqueue(1)
        for _ in range(2):
            queue.run(fail, 0)
            assert _do(queue, requeue(queue.Job)) == queue.keys(0)
            queue.run(release, 0)
            assert _do(queue, cancel(queue.Job)) == queue.keys(0)
            assert _do(queue, requeue(queue.Job)) == queue.keys(0)
        queue.run(complete, 0)
        assert queue.state(0) == queue.completed

    def test_purge_deletes_finished_jobs(self, queue: QueueUnderTest) -> None:
        """No pending or running job is deleted."""
        _finish(queue)
        with queue.session() as session:
            queue.claim(session, of=queue.only(5))
            assert _do(queue, purge(queue.Job)) == queue.keys(*([0, 1, 2] if queue.keeps_rows else [1, 2]))
            assert sorted(queue.claimable()) == [3, 4]
        assert [queue.state(number) for number in range(3)] == [None] * 3

    @pytest.mark.parametrize(("states", "number"), [("completed", 0), ("failed", 1), ("cancelled", 2)])
    def test_purge_obeys_states(self, queue: QueueUnderTest, states: str, number: int) -> None:
        """Only jobs in the given states are deleted."""
        _finish(queue)
        gone = queue.keys(number) if number or queue.keeps_rows else set()
        assert _do(queue, purge(queue.Job, states=[states])) == gone
        assert _do(queue, purge(queue.Job)) == (queue.keys(0, 1, 2) if queue.keeps_rows else queue.keys(1, 2)) - gone

    def test_purge_obeys_a_filter_and_a_limit(self, queue: QueueUnderTest) -> None:
        """Repeated until no key is returned, it deletes each job once."""
        queue.enqueue(8)
        queue.run(fail, *range(7))
        chosen = sa.select(queue.Job).where(queue.Job.number < 5)
        rounds = [_do(queue, purge(chosen, limit=2)) for _ in range(4)]
        assert [len(keys) for keys in rounds] == [2, 2, 1, 0]
        assert set().union(*rounds) == queue.keys(0, 1, 2, 3, 4)
        assert [queue.state(number) for number in (5, 6, 7)] == ["failed", "failed", "pending"]

    def test_purge_obeys_the_age(self, queue: QueueUnderTest) -> None:
        """The age counts from when a job finished."""
        queue.enqueue(2)
        queue.run(fail, 0, 1)
        assert _do(queue, purge(queue.Job, older_than=HOUR)) == set()
        if queue.keeps_rows:
            long_ago = sa.func.now() - timedelta(hours=2)
            one = sa.update(queue.Job).where(queue.Job.number == 1)
            queue.execute(one.values(finished_at=long_ago))
            assert _do(queue, purge(queue.Job, older_than=HOUR)) == queue.keys(1)
        assert queue.keys(0) <= _do(queue, purge(queue.Job, older_than=0))

    @pytest.mark.parametrize("verb", [reconcile, rescue])
    def test_reconcile_and_rescue_change_nothing_in_a_consistent_queue(self, queue: QueueUnderTest, verb: Verb) -> None:
        """For jobs in every state."""
        _finish(queue)
        with queue.session() as session:
            queue.claim(session, of=queue.only(5))
            assert _do(queue, verb(queue.Job)) == set()
        _do(queue, requeue(queue.Job))
        assert _do(queue, verb(queue.Job)) == set()

    def test_reconcile_repairs_what_bypassed_the_triggers(self, queue: QueueUnderTest) -> None:
        """Afterwards exactly the pending jobs are claimable, each once."""
        queue.enqueue(5)
        if queue.has_status:
            queue.run(fail, 0)
        with queue.session() as session:
            with queue.without_triggers(session):
                session.execute(sa.insert(queue.Job.__table__), [queue.values(7), queue.values(8)])
                session.execute(sa.delete(queue.Job).where(queue.Job.number == 1))
                if queue.has_status:
                    for status, number in {"pending": 0, "completed": 2}.items():
                        job = sa.update(queue.Job).where(queue.Job.number == number)
                        session.execute(job.values(status=status))
            session.commit()
        _do(queue, reconcile(queue.Job))
        waiting = [0, 3, 4, 7, 8] if queue.has_status else [0, 2, 3, 4, 7, 8]
        assert sorted(queue.claimable()) == waiting
        assert _do(queue, reconcile(queue.Job)) == set()
        with queue.session() as session:
            jobs = queue.claim(session)
            assert numbers_of(jobs) == waiting
            session.execute(complete(jobs))
            session.commit()
        assert queue.claimable() == []

    def test_reconcile_passes_over_a_locked_job(self, queue: QueueUnderTest) -> None:
        """A locked job is repaired by the next call."""
        with queue.session() as session:
            with queue.without_triggers(session):
                session.execute(sa.insert(queue.Job.__table__), [queue.values(n) for n in range(3)])
            session.commit()
        with queue.session() as holder, queue.impatient() as session:
            holder.execute(queue.only(0).with_for_update())
            session.execute(reconcile(queue.Job))
            session.commit()
            assert sorted(queue.claimable()) == [1, 2]
        _do(queue, reconcile(queue.Job))
        assert sorted(queue.claimable()) == [0, 1, 2]

    def test_reconcile_leaves_running_jobs_alone(self, queue: QueueUnderTest) -> None:
        """Whatever the result of the run, no other worker gets the job."""
        queue.enqueue(4)
        with queue.session() as session:
            jobs = queue.claim(session, of=queue.only(0, 1))
            assert _do(queue, reconcile(queue.Job)) == set()
            assert sorted(queue.claimable()) == [2, 3]
            session.execute(complete([job for job in jobs if job.number == 0]))
            session.execute(release([job for job in jobs if job.number == 1]))
            assert _do(queue, reconcile(queue.Job)) == set()
            session.commit()
        assert _do(queue, reconcile(queue.Job)) == set()
        assert sorted(queue.claimable()) == [1, 2, 3]
