"""The result of a claim: how many jobs, which, in what order, and the attributes of the instances."""

from __future__ import annotations

import random
from contextlib import ExitStack
from datetime import date, timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.orm import Session, selectinload

from sqlaqueue import claim, complete, release, retry
from sqlaqueue.mapping.mixin import spec_of
from sqlaqueue.statements.claim import claim_statement
from sqlaqueue.statements.selection import select_jobs
from sqlaqueue.strategies import ScanRange
from sqlaqueue.testing.conformance.queue_under_test import ALL, HOUR, QueueUnderTest, needs, numbers_of

JOBS = 12


class ClaimConformance:
    """One claim at a time; :mod:`sqlaqueue.testing.conformance.suite.concurrency` tests several."""

    @pytest.mark.parametrize("n", [1, 5, JOBS, ALL])
    def test_a_claim_returns_at_most_n_jobs(self, queue: QueueUnderTest, n: int) -> None:
        """Exactly n jobs, if no other transaction holds any."""
        queue.enqueue(JOBS)
        with queue.session() as session, queue.session() as another:
            assert len(queue.claim(session, n)) == min(n, JOBS)
            assert len(queue.claim(another)) == JOBS - min(n, JOBS)

    def test_a_claim_from_an_empty_queue_returns_nothing(self, queue: QueueUnderTest) -> None:
        """The result is an empty list, not an error."""
        with queue.session() as session:
            assert queue.claim(session) == []

    def test_jobs_come_by_priority_then_time_then_key(self, queue: QueueUnderTest) -> None:
        """The order holds within one claim, and from one claim to the next."""
        now = queue.now()
        groups = [(priority, age) for priority in (-1, 0, 3) for age in (3, 2, 1)]
        jobs = [(3 * group + member, group) for group in range(len(groups)) for member in range(3)]
        random.Random(7).shuffle(jobs)  # noqa: S311 - any order but the right one will do
        for number, group in jobs:
            priority, age = groups[group]
            queue.enqueue([number], priority=priority, run_at=now - timedelta(minutes=age))
        with ExitStack() as workers:
            claims = [queue.claim(workers.enter_context(queue.session()), n) for n in (2, 2, 10, ALL)]
            claimed = [job.number for jobs in claims for job in jobs]
        assert claimed == [number for number, _ in sorted(jobs, key=lambda job: (job[1], queue.key(job[0])))]

    @needs(rows=True)
    @pytest.mark.parametrize("joined", [True, False], ids=["join", "where"])
    def test_a_job_that_a_filter_matches_twice_comes_once(self, queue: QueueUnderTest, *, joined: bool) -> None:
        """A join may return a job several times; the claim returns it once."""
        queue.enqueue(3)
        for number in (1, 1, 2):
            queue.execute(sa.insert(queue.Note.__table__).values(queue.key_values(number)))
        same = sa.and_(*(queue.Note.__table__.c[key.key] == key for key in spec_of(queue.Job).keys))
        jobs = sa.select(queue.Job)
        noted = jobs.join(queue.Note, same) if joined else jobs.where(same)
        with queue.session() as session:
            assert numbers_of(queue.claim(session, of=noted)) == [1, 2]

    def test_a_claim_can_be_limited_to_one_priority(self, queue: QueueUnderTest) -> None:
        """Jobs of other priorities stay claimable, including higher ones."""
        for priority in (0, 1, 2):
            queue.enqueue(range(3 * priority, 3 * priority + 3), priority=priority)
        with queue.session() as session:
            jobs = _claim_within(queue, session, lambda order: order[0] == 1)
            assert sorted(numbers_of(jobs)) == [3, 4, 5]
        assert sorted(queue.claimable()) == list(range(9))

    def test_a_claim_can_begin_at_a_cursor(self, queue: QueueUnderTest) -> None:
        """Jobs before the cursor in claim order stay claimable."""
        queue.enqueue(JOBS)
        with queue.session() as session:
            jobs = session.scalars(claim(queue.Job, ALL)).all()
            position = [getattr(jobs[4], column.key) for column in spec_of(queue.Job).claim_order]
            numbers = [job.number for job in jobs]
        with queue.session() as session:
            jobs = _claim_within(queue, session, lambda order: sa.tuple_(*order) >= position)
            assert [job.number for job in jobs] == numbers[4:]

    def test_a_job_waits_until_it_is_due(self, queue: QueueUnderTest) -> None:
        """A job that is not due is not claimed, and does not keep others from being claimed."""
        tomorrow = queue.now() + timedelta(days=1)
        queue.enqueue([0], run_at=tomorrow, priority=-1)
        queue.enqueue([1])
        assert queue.claimable() == [1]

    def test_a_job_that_comes_due_during_a_transaction_is_claimed(self, queue: QueueUnderTest) -> None:
        """The claim compares ``run_at`` with the time of the statement, not of the transaction."""
        with queue.session() as session:
            session.execute(sa.select(sa.func.now()))
            queue.enqueue(1)
            assert numbers_of(session.scalars(claim(queue.Job, 1))) == [0]

    @needs(rows=True)
    def test_no_time_of_the_client_reaches_the_database(self, queue: QueueUnderTest) -> None:
        """Workers' clocks differ; a time from one of them could make a job run early."""
        queue.enqueue(3)
        sent: list[Any] = []

        def note(*call: Any) -> None:
            sent.append(call[3])

        event.listen(queue.engine, "before_cursor_execute", note)
        try:
            with queue.session() as session:
                jobs = queue.claim(session)
                session.execute(complete(jobs[0]))
                session.execute(retry(jobs[1], delay=HOUR))
                session.execute(release(jobs[2], delay=HOUR))
                session.commit()
        finally:
            event.remove(queue.engine, "before_cursor_execute", note)
        assert not [value for value in _flat(sent) if isinstance(value, date)]
        assert queue.claimable() == []

    def test_a_filter_selects_among_the_jobs(self, queue: QueueUnderTest) -> None:
        """The other jobs stay claimable."""
        queue.enqueue([0, 1, 2], payload="this")
        queue.enqueue([3, 4, 5], payload="that")
        chosen = sa.select(queue.Job).where(queue.Job.payload == "that")
        with queue.session() as session, queue.session() as another:
            assert numbers_of(queue.claim(session, 2, chosen)) == [3, 4]
            assert numbers_of(queue.claim(another)) == [0, 1, 2, 5]

    @pytest.mark.parametrize("condition", ["join", "exists", "two tables in where"])
    def test_a_filter_may_use_a_second_table(self, queue: QueueUnderTest, condition: str) -> None:
        """The claim returns exactly the jobs that match, in whatever form the filter is written."""
        Job, Owner = queue.Job, queue.Owner  # noqa: N806 - they are classes
        queue.enqueue([0, 1, 4, 5], owner_id=1)
        queue.enqueue([2, 3, 6, 7], owner_id=2)
        chosen = {
            "join": queue.of_vips(),
            "exists": sa.select(Job).where(Job.owner.has(Owner.vip)),
            "two tables in where": sa.select(Job).where(Job.owner_id == Owner.id, Owner.vip),
        }[condition]
        with queue.session() as session, queue.session() as another:
            assert numbers_of(queue.claim(session, 3, chosen)) == [0, 1, 4]
            assert numbers_of(queue.claim(another)) == [2, 3, 5, 6, 7]

    def test_a_claimed_instance_shows_its_run(self, queue: QueueUnderTest) -> None:
        """Under every strategy its status is processing and its attempts are 1."""
        queue.enqueue(2, payload="text")
        with queue.session() as session:
            for job in queue.claim(session):
                assert job.attempts == 1
                assert job.payload == "text"
                if queue.has_status:
                    assert job.status == "processing"

    def test_an_instance_in_the_session_is_refreshed(self, queue: QueueUnderTest) -> None:
        """Values that were loaded before the claim are replaced."""
        queue.enqueue(1, payload="old")
        with queue.session() as session:
            known = session.scalars(sa.select(queue.Job)).one()
            # In the same transaction: not every engine lets one that has read claim what others have changed since.
            session.execute(
                sa.update(queue.Job).values(payload="new"), execution_options={"synchronize_session": False}
            )
            assert known.payload == "old"
            (job,) = session.scalars(claim(queue.Job, 1)).all()
            assert (job.payload, job.attempts) == ("new", 1)
            if queue.keeps_rows:
                assert job is known

    @needs(rows=True)
    def test_related_rows_can_be_loaded_with_the_claim(self, queue: QueueUnderTest) -> None:
        """Loader options work on the select and on the claim."""
        queue.enqueue(4, owner_id=1)
        load = selectinload(queue.Job.owner)
        with queue.session() as session:
            first = session.scalars(claim(queue.only(0, 1).options(load), 2)).all()
            second = session.scalars(claim(queue.only(2, 3), 2).options(load)).all()
            for job in (*first, *second):
                assert "owner" in job.__dict__
                assert job.owner.vip

    def test_a_pending_job_is_claimed_without_an_attempt_left(self, queue: QueueUnderTest) -> None:
        """The limit is checked when a run ends, not when a job is claimed."""
        queue.enqueue(1, attempts=99)
        assert queue.claimable() == [0]

    def test_a_rolled_back_claim_has_no_effect(self, queue: QueueUnderTest) -> None:
        """The jobs are claimable again, and no attempt is counted."""
        queue.enqueue(3)
        with queue.session() as session:
            assert len(session.scalars(claim(queue.Job, ALL)).all()) == 3
            session.rollback()
            assert sorted(queue.claimable()) == [0, 1, 2]
            assert [queue.attempts(number) for number in range(3)] == [0, 0, 0]


def _flat(values: Any) -> list[Any]:
    if isinstance(values, dict):
        return [inner for value in values.values() for inner in _flat(value)]
    if isinstance(values, list | tuple):
        return [inner for value in values for inner in _flat(value)]
    return [values]


def _claim_within(queue: QueueUnderTest, session: Session, scan_range: ScanRange) -> list[Any]:
    """Claim from a part of the claim order, as Consumers do; the end of the session rolls it back."""
    statement = claim_statement(
        select_jobs(queue.Job, "claim"), sa.bindparam(None, ALL, sa.Integer()), scan_range=scan_range
    )
    return list(session.execute(statement).scalars())
