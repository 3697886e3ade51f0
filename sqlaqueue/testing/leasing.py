"""Whose job it is: leases and their tokens, held transactions and their end, and workers that die."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue import claim, complete, extend, fail, reconcile, release, requeue, rescue, retry
from sqlaqueue.exc import NotClaimedError
from sqlaqueue.testing.gate import wait_for
from sqlaqueue.testing.queue import HOUR, QueueUnderTest, needs, numbers_of

VERBS: dict[str, Callable[[Any], Any]] = {
    "complete": complete,
    "retry": retry,
    "fail": fail,
    "release": release,
    "extend": extend,
}


def _expire(session: Session, jobs: list[Any]) -> None:
    """Let the leases of these jobs end now."""
    session.execute(extend(jobs, lease=0))
    session.commit()


def _rescue(queue: QueueUnderTest) -> set[Any]:
    with queue.session() as session:
        rescued = set(session.scalars(rescue(queue.Job)))
        session.commit()
    return rescued


class LeasingConformance:
    """Claims that end without the word of their worker."""

    @needs(leases=True)
    @pytest.mark.parametrize("taken_over", [False, True], ids=["rescued", "taken-over"])
    def test_a_late_result_changes_nothing(self, queue: QueueUnderTest, *, taken_over: bool) -> None:
        """Neither after the job has been taken from its worker, nor after another one has it."""
        queue.enqueue(1)
        with queue.session() as stale, queue.session() as thief:
            jobs = queue.claim(stale)
            _expire(stale, jobs)
            assert _rescue(queue) == queue.keys(0)
            if taken_over:
                assert numbers_of(queue.claim(thief)) == [0]
            before = queue.row(0)
            # Reading what the commit expired shows the row of the thief, token and all.
            assert jobs[0].attempts == (2 if taken_over else 1)
            for name, verb in VERBS.items():
                assert stale.scalars(verb(jobs)).all() == [], name
                stale.commit()
                assert queue.row(0) == before, name

    @needs(leases=True)
    def test_the_new_owner_settles_after_a_late_result(self, queue: QueueUnderTest) -> None:
        """The late result has not taken the job from the one that has it."""
        queue.enqueue(1)
        with queue.session() as stale, queue.session() as thief:
            late = queue.claim(stale)
            _expire(stale, late)
            _rescue(queue)
            jobs = queue.claim(thief)
            for verb in VERBS.values():
                stale.execute(verb(late))
            stale.commit()
            assert thief.scalars(complete(jobs)).all() == [queue.key(0)]
            thief.commit()
        assert queue.state(0) == "completed"

    @needs(leases=True)
    def test_every_execution_of_a_claim_has_a_token_of_its_own(self, queue: QueueUnderTest) -> None:
        """Even of the same statement object, by the same worker."""
        queue.enqueue(1)
        statement = claim(queue.Job, 1)
        with queue.session() as first, queue.session() as second:
            late = first.scalars(statement).all()
            first.commit()
            _expire(first, list(late))
            _rescue(queue)
            assert len(second.scalars(statement).all()) == 1
            second.commit()
            assert first.scalars(complete(late)).all() == []

    @needs(leases=True)
    def test_a_batch_of_which_one_job_is_lost(self, queue: QueueUnderTest) -> None:
        """The others are settled, and the keys that come back say which."""
        queue.enqueue(3)
        with queue.session() as session:
            jobs = queue.claim(session)
            _expire(session, [job for job in jobs if job.number == 1])
            assert _rescue(queue) == queue.keys(1)
            assert set(session.scalars(complete(jobs))) == queue.keys(0, 2)
            session.commit()
        assert queue.claimable() == [1]

    @needs(leases=True)
    def test_a_late_lease_that_nobody_took_still_counts(self, queue: QueueUnderTest) -> None:
        """A worker that is merely slow keeps its result."""
        queue.enqueue(1)
        with queue.session() as session:
            jobs = queue.claim(session)
            _expire(session, jobs)
            assert session.scalars(complete(jobs)).all() == [queue.key(0)]

    def test_extend_keeps_a_job_from_being_rescued(self, queue: QueueUnderTest) -> None:
        """And returns the keys of the jobs that are still held."""
        queue.enqueue(3)
        with queue.session() as session:
            jobs = queue.claim(session)
            if queue.leased:
                _expire(session, jobs)
            assert set(session.scalars(extend(jobs))) == queue.keys(0, 1, 2)
            if queue.leased:
                session.commit()
            assert _rescue(queue) == set()
            assert queue.claimable() == []

    @needs(leases=True)
    def test_a_lease_counts_from_the_statement(self, queue: QueueUnderTest) -> None:
        """When claiming as when extending, however long the transaction has been open."""
        queue.enqueue(1)
        expires = queue.Job.__table__.c.lease_expires_at
        slept = sa.select(sa.func.now(), sa.func.pg_sleep(0.3))
        left = sa.select(expires - sa.func.now())
        enough = timedelta(seconds=HOUR + 0.3)
        with queue.session() as session:
            session.execute(slept)
            jobs = session.scalars(claim(queue.Job, 1)).all()
            assert session.scalars(left).one() > enough
            session.commit()
            session.execute(slept)
            session.execute(extend(jobs, lease=HOUR))
            assert session.scalars(left).one() > enough

    @needs(leases=True)
    def test_extend_passes_over_a_locked_job(self, queue: QueueUnderTest) -> None:
        """A handler that has written its own row does not keep its batch-mates' leases from living."""
        queue.enqueue(3)
        with queue.session() as handler, queue.impatient() as heart:
            jobs = queue.claim(handler)
            handler.execute(sa.update(queue.Job).where(queue.Job.number == 0).values(payload="w"))
            assert set(heart.scalars(extend(jobs))) == queue.keys(1, 2)

    @needs(leases=True)
    def test_rescue_passes_over_a_locked_job(self, queue: QueueUnderTest) -> None:
        """Its worker is alive, whatever the lease says: it has the row's lock."""
        queue.enqueue(3)
        with queue.session() as handler, queue.impatient() as rescuer:
            _expire(handler, queue.claim(handler))
            handler.execute(sa.update(queue.Job).where(queue.Job.number == 0).values(payload="w"))
            assert set(rescuer.scalars(rescue(queue.Job))) == queue.keys(1, 2)

    def test_rescue_leaves_live_leases_alone(self, queue: QueueUnderTest) -> None:
        """And jobs that wait or are finished."""
        queue.enqueue(3)
        queue.run(complete, 0)
        with queue.session() as session:
            queue.claim(session, 1)
            assert _rescue(queue) == set()

    @needs(leases=True)
    def test_a_job_that_ran_alone_keeps_its_attempt_when_rescued(self, queue: QueueUnderTest) -> None:
        """It may have killed its worker."""
        queue.enqueue(2)
        with queue.session() as session:
            _expire(session, queue.claim(session, of=queue.only(0)))
        assert _rescue(queue) == queue.keys(0)
        assert (queue.state(0), queue.attempts(0)) == ("pending", 1)
        assert sorted(queue.claimable()) == [0, 1]

    @needs(leases=True)
    def test_batch_mates_get_their_attempt_back_when_rescued(self, queue: QueueUnderTest) -> None:
        """One of them may have killed the worker; nobody knows which."""
        queue.enqueue(3)
        with queue.session() as session:
            _expire(session, queue.claim(session))
        assert _rescue(queue) == queue.keys(0, 1, 2)
        assert [queue.attempts(number) for number in range(3)] == [0, 0, 0]
        assert sorted(queue.claimable()) == [0, 1, 2]

    @needs(leases=True)
    def test_batch_mates_that_are_rescued_one_after_the_other(self, queue: QueueUnderTest) -> None:
        """The last one of a batch did not run alone because it is rescued alone."""
        queue.enqueue(3, max_attempts=1)
        with queue.session() as session:
            for job in queue.claim(session):
                _expire(session, [job])
                assert _rescue(queue) == queue.keys(job.number)
        assert [queue.attempts(number) for number in range(3)] == [0, 0, 0]
        assert sorted(queue.claimable()) == [0, 1, 2]

    @needs(leases=True)
    @pytest.mark.parametrize("limit", ["the queue's", "the job's own"])
    def test_a_job_that_spent_its_attempts_is_failed_when_rescued(self, queue: QueueUnderTest, limit: str) -> None:
        """It has killed its workers often enough, when each time it ran alone."""
        runs = 3
        if limit == "the job's own":
            runs = 2
            queue.enqueue(1, max_attempts=runs)
        else:
            queue.enqueue(1)
        for attempt in range(1, runs + 1):
            assert (queue.state(0), queue.attempts(0)) == ("pending", attempt - 1)
            with queue.session() as session:
                _expire(session, queue.claim(session, 1))
            assert _rescue(queue) == queue.keys(0)
        assert (queue.state(0), queue.attempts(0)) == ("failed", runs)
        assert queue.stored(0)["finished_at"] is not None
        with queue.session() as session:
            assert session.scalars(requeue(queue.only(0))).all() == [queue.key(0)]
            session.commit()
        assert queue.claimable() == [0]

    def test_a_dead_worker_loses_its_jobs_but_nobody_else_does(self, queue: QueueUnderTest) -> None:
        """Its connection is gone: the jobs are free at once, or when the lease is over."""
        queue.enqueue(3)
        with queue.session() as worker:
            jobs = queue.claim(worker, 2)
            if queue.leased:
                _expire(worker, jobs)
            backend = worker.scalar(sa.select(sa.func.pg_backend_pid()))
            queue.execute("SELECT pg_terminate_backend(:pid)", pid=backend)
            alive = "SELECT count(*) FROM pg_stat_activity WHERE pid = :pid"
            wait_for(lambda: queue.execute(alive, pid=backend) == 0)
            worker.invalidate()
        if queue.leased:
            assert len(_rescue(queue)) == 2
        assert sorted(queue.claimable()) == [0, 1, 2]
        assert [queue.attempts(number) for number in range(3)] == [0, 0, 0]

    # -- held transactions ---------------------------------------------------------------------------

    @needs(leases=False, rows=True)
    def test_a_claim_is_over_with_its_transaction(self, queue: QueueUnderTest) -> None:
        """A verb refuses jobs that anybody may have by now."""
        queue.enqueue(1)
        with queue.session() as session, queue.session() as another:
            jobs = queue.claim(session)
            session.rollback()
            assert numbers_of(queue.claim(another)) == [0]
            for verb in VERBS.values():
                with pytest.raises(NotClaimedError, match="transaction"):
                    verb(jobs)

    @needs(leases=False)
    @pytest.mark.parametrize("done", [False, True], ids=["waiting", "done"])
    def test_a_result_after_the_rollback_changes_nothing(self, queue: QueueUnderTest, *, done: bool) -> None:
        """Whether the job waits again or somebody else has done it meanwhile."""
        queue.enqueue(1)
        with queue.session() as session:
            jobs = queue.claim(session)
            session.rollback()
            if done:
                queue.run(complete, 0)
            for name, verb in VERBS.items():
                with suppress(NotClaimedError):
                    assert session.scalars(verb(jobs)).all() == [], name
                session.commit()
        assert queue.claimable() == ([] if done else [0])
        assert queue.state(0) == (queue.completed if done else "pending")

    @needs(leases=False, rows=True)
    def test_a_claim_that_is_committed_unsettled_comes_back(self, queue: QueueUnderTest) -> None:
        """At once or by `reconcile()`, and as often as it was there: once."""
        queue.enqueue(3)
        with queue.session() as session:
            queue.claim(session, of=queue.only(0, 1))
            session.commit()
            assert set(session.scalars(reconcile(queue.Job))) <= queue.keys(0, 1)
            session.commit()
            assert session.scalars(reconcile(queue.Job)).all() == []
        assert sorted(queue.claimable()) == [0, 1, 2]
        assert queue.attempts(0) == 0

    @needs(leases=False, rows=True)
    def test_a_held_job_reads_as_pending_to_others(self, queue: QueueUnderTest) -> None:
        """Nothing is in effect before the commit."""
        queue.enqueue(1)
        with queue.session() as session:
            queue.claim(session)
            assert (queue.state(0), queue.attempts(0)) == ("pending", 0)
