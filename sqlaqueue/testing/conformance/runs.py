"""Conformance: which worker holds a job, and what each settlement does."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue import claim, complete, extend, fail, reconcile, release, requeue, rescue, retry
from sqlaqueue.exc import NotClaimedError
from sqlaqueue.mapping.mixin import spec_of
from sqlaqueue.statements.selection import returning_keys
from sqlaqueue.testing.conformance.queue_under_test import HOUR, QueueUnderTest, needs, numbers_of

LEASE_VERBS: dict[str, Callable[[Any], Any]] = {
    "complete": complete,
    "retry": retry,
    "fail": fail,
    "release": release,
    "extend": extend,
}


def _expire(session: Session, jobs: list[Any]) -> None:
    session.execute(extend(jobs, lease=0))
    session.commit()


def _rescue(queue: QueueUnderTest) -> set[Any]:
    return queue.do(rescue(queue.Job))


class LeaseConformance:
    @needs(leases=True)
    @pytest.mark.parametrize("taken_over", [False, True], ids=["rescued", "taken-over"])
    def test_a_late_result_changes_nothing(self, queue: QueueUnderTest, *, taken_over: bool) -> None:
        queue.enqueue(1)
        with queue.session() as stale, queue.session() as thief:
            jobs = queue.claim(stale)
            _expire(stale, jobs)
            assert _rescue(queue) == queue.keys(0)
            if taken_over:
                assert numbers_of(queue.claim(thief)) == [0]
            before = queue.row(0)
            # Reading the expired attributes loads the row of the new worker, with its token.
            assert jobs[0].attempts == (2 if taken_over else 1)
            for name, verb in LEASE_VERBS.items():
                assert stale.scalars(verb(jobs)).all() == [], name
                stale.commit()
                assert queue.row(0) == before, name

    @needs(leases=True)
    def test_the_new_worker_settles_after_a_late_result(self, queue: QueueUnderTest) -> None:
        """The late result has not taken the job from its new worker."""
        queue.enqueue(1)
        with queue.session() as stale, queue.session() as thief:
            late = queue.claim(stale)
            _expire(stale, late)
            _rescue(queue)
            jobs = queue.claim(thief)
            for verb in LEASE_VERBS.values():
                stale.execute(verb(late))
            stale.commit()
            assert thief.scalars(complete(jobs)).all() == [queue.key(0)]
            thief.commit()
        assert queue.state(0) == "completed"

    @needs(leases=True)
    def test_every_execution_of_a_claim_has_its_own_token(self, queue: QueueUnderTest) -> None:
        """Also of the same statement object, by the same worker."""
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
    def test_a_batch_with_one_lost_lease(self, queue: QueueUnderTest) -> None:
        """The other jobs are settled, and the keys returned are theirs."""
        queue.enqueue(3)
        with queue.session() as session:
            jobs = queue.claim(session)
            _expire(session, [job for job in jobs if job.number == 1])
            assert _rescue(queue) == queue.keys(1)
            assert set(session.scalars(complete(jobs))) == queue.keys(0, 2)
            session.commit()
        assert queue.claimable() == [1]

    @needs(leases=True)
    def test_jobs_are_rescued_by_their_keys(self, queue: QueueUnderTest) -> None:
        """Consumers rescue so, by ``rescue_some()``."""
        queue.enqueue(3)
        spec = spec_of(queue.Job)
        with queue.session() as session:
            jobs = queue.claim(session)
            _expire(session, jobs)
            keys = [sa.inspect(job).identity for job in jobs if job.number != 1]
            rescued = set(session.scalars(returning_keys(spec, spec.strategy.rescue_some(spec, keys))))
            session.commit()
        assert rescued >= queue.keys(0, 2)
        assert sorted(queue.claimable()) in ([0, 2], [0, 1, 2])

    @needs(leases=True)
    def test_an_expired_lease_counts_until_the_job_is_rescued(self, queue: QueueUnderTest) -> None:
        """A slow worker can still settle its run."""
        queue.enqueue(1)
        with queue.session() as session:
            jobs = queue.claim(session)
            _expire(session, jobs)
            assert session.scalars(complete(jobs)).all() == [queue.key(0)]

    def test_extend_keeps_a_job_from_being_rescued(self, queue: QueueUnderTest) -> None:
        """It returns the keys of the jobs that are still held."""
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
        """For claims and extensions, however long the transaction has been open."""
        queue.enqueue(1)
        expires = queue.Job.__table__.c.lease_expires_at
        enough = timedelta(seconds=HOUR + 0.3)
        with queue.session() as session:
            began = queue.open_for(0.3, session)
            jobs = session.scalars(claim(queue.Job, 1)).all()
            assert session.scalars(sa.select(expires)).one() > began + enough
            session.commit()
            began = queue.open_for(0.3, session)
            session.execute(extend(jobs, lease=HOUR))
            assert session.scalars(sa.select(expires)).one() > began + enough

    @needs(leases=True)
    def test_extend_passes_over_a_locked_job(self, queue: QueueUnderTest) -> None:
        """A handler that has written its own row does not keep the other leases from being extended."""
        queue.enqueue(3)
        with queue.session() as handler, queue.impatient() as heart:
            jobs = queue.claim(handler)
            handler.execute(sa.update(queue.Job).where(queue.Job.number == 0).values(payload="w"))
            assert set(heart.scalars(extend(jobs))) == queue.keys(1, 2)

    @needs(leases=True)
    def test_rescue_passes_over_a_locked_job(self, queue: QueueUnderTest) -> None:
        """The lock shows that its worker is alive."""
        queue.enqueue(3)
        with queue.session() as handler, queue.impatient() as rescuer:
            _expire(handler, queue.claim(handler))
            handler.execute(sa.update(queue.Job).where(queue.Job.number == 0).values(payload="w"))
            assert set(rescuer.scalars(rescue(queue.Job))) == queue.keys(1, 2)

    def test_rescue_leaves_live_leases_alone(self, queue: QueueUnderTest) -> None:
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
    def test_jobs_claimed_together_get_their_attempt_back_when_rescued(self, queue: QueueUnderTest) -> None:
        """It is not known which of them killed the worker."""
        queue.enqueue(3)
        with queue.session() as session:
            _expire(session, queue.claim(session))
        assert _rescue(queue) == queue.keys(0, 1, 2)
        assert [queue.attempts(number) for number in range(3)] == [0, 0, 0]
        assert sorted(queue.claimable()) == [0, 1, 2]

    @needs(leases=True)
    def test_jobs_claimed_together_and_rescued_one_by_one(self, queue: QueueUnderTest) -> None:
        """The last of them did not run alone, though it is rescued alone."""
        queue.enqueue(3, max_attempts=1)
        with queue.session() as session:
            for job in queue.claim(session):
                _expire(session, [job])
                assert _rescue(queue) == queue.keys(job.number)
        assert [queue.attempts(number) for number in range(3)] == [0, 0, 0]
        assert sorted(queue.claimable()) == [0, 1, 2]

    @needs(leases=True)
    @pytest.mark.parametrize("limit", ["the queue's", "the job's own"])
    def test_a_job_without_attempts_left_is_failed_when_rescued(self, queue: QueueUnderTest, limit: str) -> None:
        """Its worker died each time that it ran alone."""
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
        assert queue.do(requeue(queue.only(0))) == queue.keys(0)
        assert queue.claimable() == [0]

    def test_the_jobs_of_a_dead_worker_become_claimable(self, queue: QueueUnderTest) -> None:
        """At once if a transaction held them, or when the leases have expired."""
        queue.enqueue(3)
        with queue.session() as worker:
            jobs = queue.claim(worker, 2)
            if queue.leased:
                _expire(worker, jobs)
            queue.kill(worker)
        if queue.leased:
            assert len(_rescue(queue)) == 2
        assert sorted(queue.claimable()) == [0, 1, 2]
        assert [queue.attempts(number) for number in range(3)] == [0, 0, 0]

    # -- held transactions ---------------------------------------------------------------------------

    @needs(leases=False, rows=True)
    def test_a_held_claim_ends_with_its_transaction(self, queue: QueueUnderTest) -> None:
        """Verbs refuse jobs that another worker may have claimed."""
        queue.enqueue(1)
        with queue.session() as session, queue.session() as another:
            jobs = queue.claim(session)
            session.rollback()
            assert numbers_of(queue.claim(another)) == [0]
            for verb in LEASE_VERBS.values():
                with pytest.raises(NotClaimedError, match="transaction"):
                    verb(jobs)

    @needs(leases=False)
    @pytest.mark.parametrize("done", [False, True], ids=["waiting", "done"])
    def test_a_result_after_the_rollback_changes_nothing(self, queue: QueueUnderTest, *, done: bool) -> None:
        """Whether the job is pending or another worker has completed it."""
        queue.enqueue(1)
        with queue.session() as session:
            jobs = queue.claim(session)
            session.rollback()
            if done:
                queue.run(complete, 0)
            for name, verb in LEASE_VERBS.items():
                with suppress(NotClaimedError):
                    assert session.scalars(verb(jobs)).all() == [], name
                session.commit()
        assert queue.claimable() == ([] if done else [0])
        assert queue.state(0) == (queue.completed if done else "pending")

    @needs(leases=False, rows=True)
    def test_jobs_committed_without_settlement_become_claimable(self, queue: QueueUnderTest) -> None:
        """At once or by `reconcile()`, and each of them once."""
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
        """Nothing takes effect before the commit."""
        queue.enqueue(1)
        with queue.session() as session:
            queue.claim(session)
            assert (queue.state(0), queue.attempts(0)) == ("pending", 0)


Verb = Callable[[Any], Any]

VERBS: dict[str, Verb] = {"complete": complete, "retry": retry, "fail": fail, "release": release}


class SettlementConformance:
    def test_complete(self, queue: QueueUnderTest) -> None:
        queue.enqueue(2)
        queue.run(complete, 0)
        assert queue.state(0) == queue.completed
        if queue.keeps_rows:
            row = queue.stored(0)
            assert row["attempts"] == 1
            assert row["finished_at"] is not None
        assert queue.claimable() == [1]

    def test_retry(self, queue: QueueUnderTest) -> None:
        """The job becomes pending, its attempt counts, and the error is stored."""
        queue.enqueue(2)
        queue.run(lambda jobs: retry(jobs, error=ValueError("no luck")), 0)
        row = queue.stored(0)
        assert (queue.state(0), row["attempts"], row["finished_at"]) == ("pending", 1, None)
        assert row["last_error"] == "ValueError: no luck"
        assert sorted(queue.claimable()) == [0, 1]
        with queue.session() as session:
            (job,) = queue.claim(session, of=queue.only(0))
            assert job.attempts == 2

    def test_retry_with_a_delay(self, queue: QueueUnderTest) -> None:
        queue.enqueue(2)
        queue.run(lambda jobs: retry(jobs, delay=timedelta(hours=1)), 0)
        assert (queue.state(0), queue.attempts(0)) == ("pending", 1)
        assert queue.claimable() == [1]

    def test_retry_at_a_moment(self, queue: QueueUnderTest) -> None:
        at = datetime(2999, 12, 31, 23, 59, tzinfo=UTC)
        queue.enqueue(2)
        queue.run(lambda jobs: retry(jobs, at=at), 0)
        assert queue.stored(0)["run_at"] == at
        assert queue.claimable() == [1]

    def test_a_retried_job_comes_after_those_that_waited(self, queue: QueueUnderTest) -> None:
        """Without a delay it is due at once, and a failing job at the head does not starve the rest."""
        queue.enqueue(3)
        queue.run(retry, 0)
        assert queue.order()[-1] == 0

    def test_fail(self, queue: QueueUnderTest) -> None:
        queue.enqueue(2)
        queue.run(lambda jobs: fail(jobs, error="beyond repair"), 0)
        assert queue.state(0) == "failed"
        if queue.keeps_rows:
            row = queue.stored(0)
            assert (row["attempts"], row["last_error"]) == (1, "beyond repair")
            assert row["finished_at"] is not None
        assert queue.claimable() == [1]

    def test_release(self, queue: QueueUnderTest) -> None:
        """The job becomes pending at its old position, and its attempt is returned."""
        queue.enqueue(3)
        before, order = queue.stored(0), queue.order()
        queue.run(release, 0)
        row = queue.stored(0)
        assert (queue.state(0), row["attempts"], row["run_at"]) == ("pending", 0, before["run_at"])
        assert queue.order() == order

    def test_release_with_a_delay(self, queue: QueueUnderTest) -> None:
        queue.enqueue(2)
        queue.run(lambda jobs: release(jobs, delay=HOUR), 0)
        assert (queue.state(0), queue.attempts(0)) == ("pending", 0)
        assert queue.claimable() == [1]

    @pytest.mark.parametrize("verb", [retry, release])
    def test_a_delay_counts_from_the_statement(self, queue: QueueUnderTest, verb: Callable[..., Any]) -> None:
        """A transaction that has been open for longer than the delay does not shorten it."""
        queue.enqueue(1)
        with queue.session() as session:
            jobs = queue.claim(session)
            began = queue.open_for(0.3, session)
            session.execute(verb(jobs, delay=HOUR))
            run_at = sa.select(queue.Job.__table__.c.run_at)
            assert session.scalars(run_at).one() > began + timedelta(seconds=HOUR + 0.3)

    @pytest.mark.parametrize("verb", VERBS)
    def test_a_verb_takes_one_job_or_many_or_none(self, queue: QueueUnderTest, verb: str) -> None:
        """It returns the keys of the jobs that it changed."""
        queue.enqueue(5)
        end = VERBS[verb]
        with queue.session() as session:
            one, *more = queue.claim(session)
            rest = {queue.key(job.number) for job in more}
            assert session.scalars(end(one)).all() == [queue.key(one.number)]
            assert set(session.scalars(end(iter(more)))) == rest
            assert session.scalars(end([])).all() == []

    @pytest.mark.parametrize("verb", VERBS)
    def test_jobs_of_several_claims_are_settled_together(self, queue: QueueUnderTest, verb: str) -> None:
        queue.enqueue(4)
        with queue.session() as session:
            jobs = [*queue.claim(session, of=queue.only(0, 1)), *queue.claim(session, of=queue.only(2, 3))]
            assert set(session.scalars(VERBS[verb](jobs))) == queue.keys(0, 1, 2, 3)

    def test_settling_leaves_other_jobs_alone(self, queue: QueueUnderTest) -> None:
        """Those of the same claim, and those that share a part of the key."""
        queue.enqueue(6)
        with queue.session() as session:
            jobs = queue.claim(session, of=queue.only(0, 1, 2, 3))
            session.execute(complete([job for job in jobs if job.number in {0, 3}]))
            session.execute(retry([job for job in jobs if job.number in {1, 2}]))
            session.commit()
        assert sorted(queue.claimable()) == [1, 2, 4, 5]

    @needs(status=True)
    def test_an_instance_shows_how_its_run_ended(self, queue: QueueUnderTest) -> None:
        queue.enqueue(3)
        with queue.session() as session:
            first, second, third = queue.claim(session)
            session.execute(complete(first))
            session.execute(fail(second, error="why"))
            session.execute(release(third))
            assert (first.status, first.attempts) == ("completed", 1)
            assert (second.status, second.last_error) == ("failed", "why")
            assert (third.status, third.attempts) == ("pending", 0)

    @pytest.mark.parametrize("verb", VERBS)
    def test_other_writes_commit_with_the_settlement(self, queue: QueueUnderTest, verb: str) -> None:
        queue.enqueue(1)
        with queue.session() as session:
            jobs = queue.claim(session)
            session.add(queue.Owner(id=77, vip=False))
            session.execute(VERBS[verb](jobs))
            session.rollback()
        assert not queue.execute(sa.select(queue.Owner.id).where(queue.Owner.id == 77))
        if not queue.leased:
            assert queue.claimable() == [0]
            assert queue.attempts(0) == 0

    def test_a_failing_job_is_rolled_back_without_its_batch(self, queue: QueueUnderTest) -> None:
        """Each job runs in a SAVEPOINT."""
        queue.enqueue(3)
        with queue.session() as session:
            for job in queue.claim(session):
                nested = session.begin_nested()
                session.add(queue.Owner(id=100 + job.number, vip=False))
                session.flush()
                if job.number == 1:
                    nested.rollback()
                    session.execute(retry(job, error="undone"))
                else:
                    nested.commit()
                    session.execute(complete(job))
            session.commit()
        with queue.session() as session:
            kept = session.scalars(sa.select(queue.Owner.id).where(queue.Owner.id >= 100)).all()
        assert sorted(kept) == [100, 102]
        assert queue.claimable() == [1]
        assert queue.attempts(1) == 1

    def test_a_settlement_rolled_back_to_a_savepoint_can_be_replaced(self, queue: QueueUnderTest) -> None:
        queue.enqueue(1)
        with queue.session() as session:
            jobs = queue.claim(session)
            nested = session.begin_nested()
            assert len(session.scalars(complete(jobs)).all()) == 1
            nested.rollback()
            assert len(session.scalars(fail(jobs)).all()) == 1
            session.commit()
        assert queue.state(0) == "failed"

    @needs(rows=True)
    @pytest.mark.parametrize("last", ["complete", "fail"])
    def test_a_run_is_settled_once(self, queue: QueueUnderTest, last: str) -> None:
        """A second verb in the same transaction changes nothing."""
        queue.enqueue(1)
        with queue.session() as session:
            jobs = queue.claim(session)
            session.execute(VERBS[last](jobs))
            for verb in (*VERBS.values(), extend):
                assert session.scalars(verb(jobs)).all() == []
            session.commit()
        assert queue.state(0) == ("completed" if last == "complete" else "failed")
        assert queue.attempts(0) == 1

    @pytest.mark.parametrize("verb", VERBS)
    def test_a_released_job_becomes_pending_once(self, queue: QueueUnderTest, verb: str) -> None:
        queue.enqueue(1)
        with queue.session() as session:
            jobs = queue.claim(session)
            session.execute(release(jobs))
            session.execute(VERBS[verb](jobs))
            session.commit()
        assert queue.claimable() == ([0] if queue.state(0) == "pending" else [])
        assert queue.state(0) in {"pending", "completed", "failed"}

    @needs(rows=True)
    def test_a_handler_may_change_its_own_row(self, queue: QueueUnderTest) -> None:
        queue.enqueue(4)
        with queue.session() as session:
            session.autoflush = False
            for job, end in zip(queue.claim(session), VERBS.values(), strict=True):
                job.payload = f"changed by {job.number}"
                session.flush()
                assert len(session.scalars(end(job)).all()) == 1
            session.commit()
        payloads = [queue.stored(number)["payload"] for number in range(4)]
        assert payloads == [f"changed by {number}" for number in range(4)]

    def test_any_error_text_is_stored(self, queue: QueueUnderTest) -> None:
        """PostgreSQL cannot store every text that Python can."""
        queue.enqueue(1)
        queue.run(lambda jobs: retry(jobs, error="null \0 and \ud800 alone"), 0)
        assert "and" in queue.stored(0)["last_error"]

    @needs(rows=True)
    def test_a_long_error_text_is_stored(self, queue: QueueUnderTest) -> None:
        """Some databases have types of text for 65,535 bytes."""
        text = "\N{SNOWMAN}" * 70_000
        queue.enqueue(1)
        queue.run(lambda jobs: retry(jobs, error=text), 0)
        assert queue.stored(0)["last_error"] == text

    def test_only_a_claimed_job_can_be_settled(self, queue: QueueUnderTest) -> None:
        """An instance that no claim returned is refused before anything is sent."""
        queue.enqueue(1)
        with queue.session() as session:
            job = session.scalars(sa.select(queue.Job)).one()
            for verb in (*VERBS.values(), extend):
                with pytest.raises(NotClaimedError, match="claim"):
                    verb(job)

    def test_requeue_starts_from_zero(self, queue: QueueUnderTest) -> None:
        queue.enqueue(2)
        queue.run(retry, 0)
        queue.run(fail, 0)
        assert queue.do(requeue(queue.only(0))) == queue.keys(0)
        assert (queue.state(0), queue.attempts(0)) == ("pending", 0)
        assert sorted(queue.claimable()) == [0, 1]
        with queue.session() as session:
            assert numbers_of(queue.claim(session)) == [0, 1]
