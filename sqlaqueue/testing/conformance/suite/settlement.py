"""The settlement of runs: the effect of each verb, on one job and on many, and in one transaction with other writes."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import sqlalchemy as sa

from sqlaqueue import complete, extend, fail, release, requeue, retry
from sqlaqueue.exc import NotClaimedError
from sqlaqueue.testing.conformance.queue_under_test import HOUR, QueueUnderTest, needs, numbers_of

Verb = Callable[[Any], Any]

VERBS: dict[str, Verb] = {"complete": complete, "retry": retry, "fail": fail, "release": release}


class SettlementConformance:
    """The verbs that settle a run."""

    def test_complete(self, queue: QueueUnderTest) -> None:
        """The job is completed, and its attempt counts."""
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
        """The job becomes pending, and is not due yet."""
        queue.enqueue(2)
        queue.run(lambda jobs: retry(jobs, delay=timedelta(hours=1)), 0)
        assert (queue.state(0), queue.attempts(0)) == ("pending", 1)
        assert queue.claimable() == [1]

    def test_retry_at_a_moment(self, queue: QueueUnderTest) -> None:
        """The job is due at that time."""
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
        """The job is a dead letter."""
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
        """The attempt is returned, and the job is due later."""
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
        """One statement settles all of them."""
        queue.enqueue(4)
        with queue.session() as session:
            jobs = [
                *queue.claim(session, of=queue.only(0, 1)),
                *queue.claim(session, of=queue.only(2, 3)),
            ]
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
        """The attributes are refreshed by the statement."""
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
        """Either both are committed or neither is."""
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
        """A settlement that was rolled back has not happened."""
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
        """Also if another verb follows."""
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
        """The settlement keeps its changes."""
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

    def test_only_a_claimed_job_can_be_settled(self, queue: QueueUnderTest) -> None:
        """An instance that no claim returned is refused before anything is sent."""
        queue.enqueue(1)
        with queue.session() as session:
            job = session.scalars(sa.select(queue.Job)).one()
            for verb in (*VERBS.values(), extend):
                with pytest.raises(NotClaimedError, match="claim"):
                    verb(job)

    def test_requeue_starts_from_zero(self, queue: QueueUnderTest) -> None:
        """A dead letter becomes pending with no attempt counted."""
        queue.enqueue(2)
        queue.run(retry, 0)
        queue.run(fail, 0)
        with queue.session() as session:
            assert session.scalars(requeue(queue.only(0))).all() == [queue.key(0)]
            session.commit()
        assert (queue.state(0), queue.attempts(0)) == ("pending", 0)
        assert sorted(queue.claimable()) == [0, 1]
        with queue.session() as session:
            assert numbers_of(queue.claim(session)) == [0, 1]
