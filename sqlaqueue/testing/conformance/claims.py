"""The result of a claim: how many jobs, which, in what order, and the attributes of the instances."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import date, timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.orm import Session, load_only, selectinload

from sqlaqueue import cancel, claim, complete, extend, fail, purge, reconcile, release, requeue, rescue, retry
from sqlaqueue.mapping.mixin import spec_of
from sqlaqueue.postgresql.claim_scan import FEW
from sqlaqueue.statements.claim import claim_statement
from sqlaqueue.statements.selection import select_jobs
from sqlaqueue.strategies import ScanRange
from sqlaqueue.testing.conformance.engines import DEADLINE
from sqlaqueue.testing.conformance.queue_under_test import ALL, HOUR, QueueUnderTest, needs, numbers_of

JOBS = 12


class ClaimConformance:
    @pytest.mark.parametrize("n", [1, 5, JOBS, ALL])
    def test_a_claim_returns_at_most_n_jobs(self, queue: QueueUnderTest, n: int) -> None:
        """Exactly n jobs, if no other transaction holds any."""
        queue.enqueue(JOBS)
        with queue.session() as session, queue.session() as another:
            assert len(queue.claim(session, n)) == min(n, JOBS)
            assert len(queue.claim(another)) == JOBS - min(n, JOBS)

    def test_a_claim_from_an_empty_queue_returns_nothing(self, queue: QueueUnderTest) -> None:
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
        queue.enqueue(3)
        for number in (1, 1, 2):
            queue.execute(sa.insert(queue.Note.__table__).values(queue.key_values(number)))
        same = sa.and_(*(queue.Note.__table__.c[key.key] == key for key in spec_of(queue.Job).keys))
        jobs = sa.select(queue.Job)
        noted = jobs.join(queue.Note, same) if joined else jobs.where(same)
        with queue.session() as session:
            assert numbers_of(queue.claim(session, of=noted)) == [1, 2]

    def test_a_claim_can_be_limited_to_one_priority(self, queue: QueueUnderTest) -> None:
        for priority in (0, 1, 2):
            queue.enqueue(range(3 * priority, 3 * priority + 3), priority=priority)
        with queue.session() as session:
            jobs = _claim_within(queue, session, lambda order: order[0] == 1)
            assert sorted(numbers_of(jobs)) == [3, 4, 5]
        assert sorted(queue.claimable()) == list(range(9))

    def test_a_claim_can_begin_at_a_cursor(self, queue: QueueUnderTest) -> None:
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
        queue.enqueue([0, 1, 2], payload="this")
        queue.enqueue([3, 4, 5], payload="that")
        chosen = sa.select(queue.Job).where(queue.Job.payload == "that")
        with queue.session() as session, queue.session() as another:
            assert numbers_of(queue.claim(session, 2, chosen)) == [3, 4]
            assert numbers_of(queue.claim(another)) == [0, 1, 2, 5]

    @pytest.mark.parametrize("condition", ["join", "exists", "two tables in where", "a subquery of jobs"])
    def test_a_filter_may_use_a_second_table(self, queue: QueueUnderTest, condition: str) -> None:
        """The claim returns exactly the jobs that match, in whatever form the filter is written."""
        Job, Owner = queue.Job, queue.Owner  # noqa: N806 - they are classes
        queue.enqueue([0, 1, 4, 5], owner_id=1)
        queue.enqueue([2, 3, 6, 7], owner_id=2)
        chosen = {
            "join": queue.of_vips(),
            "exists": sa.select(Job).where(Job.owner.has(Owner.vip)),
            "two tables in where": sa.select(Job).where(Job.owner_id == Owner.id, Owner.vip),
            "a subquery of jobs": sa.select(Job).where(Job.number.in_(queue.of_vips().with_only_columns(Job.number))),
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
        queue.enqueue(4, owner_id=1)
        load = selectinload(queue.Job.owner)
        with queue.session() as session:
            first = session.scalars(claim(queue.only(0, 1).options(load), 2)).all()
            second = session.scalars(claim(queue.only(2, 3), 2).options(load)).all()
            for job in (*first, *second):
                assert "owner" in job.__dict__
                assert job.owner.vip

    @needs(rows=True)
    def test_some_attributes_can_be_left_out_of_the_claim(self, queue: QueueUnderTest) -> None:
        """They are loaded when they are read."""
        queue.enqueue(2, payload="text")
        some = sa.select(queue.Job).options(load_only(queue.Job.payload))
        with queue.session() as session:
            jobs = session.scalars(claim(some, 2)).all()
            assert [("payload" in job.__dict__, "number" in job.__dict__) for job in jobs] == [(True, False)] * 2
            assert numbers_of(jobs) == [0, 1]

    def test_a_pending_job_is_claimed_without_an_attempt_left(self, queue: QueueUnderTest) -> None:
        """The limit is checked when a run ends, not when a job is claimed."""
        queue.enqueue(1, attempts=99)
        assert queue.claimable() == [0]

    def test_a_rolled_back_claim_has_no_effect(self, queue: QueueUnderTest) -> None:
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


CLAIMERS = 4
RACING_JOBS = 200


def _sql(**values: Any) -> Callable[[QueueUnderTest], None]:
    return lambda queue: queue.execute(sa.update(queue.Job).where(queue.Job.number == 0).values(values))


def _cancel(queue: QueueUnderTest) -> None:
    assert queue.do(cancel(queue.only(0))) == queue.keys(0)


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
    def test_concurrent_claimers_never_share_a_job(self, queue: QueueUnderTest) -> None:
        queue.enqueue(RACING_JOBS)

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
        assert counts == dict.fromkeys(range(RACING_JOBS), 1)
        assert queue.claimable() == []

    def test_open_claims_are_disjoint(self, queue: QueueUnderTest) -> None:
        queue.enqueue(20)
        with ExitStack() as workers:
            claims = [numbers_of(queue.claim(workers.enter_context(queue.session()), 3)) for _ in range(8)]
        assert [len(claim) for claim in claims] == [3, 3, 3, 3, 3, 3, 2, 0]
        assert sorted(number for claim in claims for number in claim) == list(range(20))

    def test_concurrent_claims_and_administration(self, queue: QueueUnderTest) -> None:
        queue.enqueue(RACING_JOBS)

        def work() -> int:
            ended = 0
            with queue.session() as session:
                # A statement of administration may lock, for a moment, more rows than it changes, which a claim skips.
                while (jobs := queue.claim(session, 7)) or not administering.done():
                    kept, given_up = jobs[::2], jobs[1::2]
                    ended += len(session.scalars(complete(kept)).all())
                    ended += len(session.scalars(fail(given_up)).all())
                    session.commit()
            return ended

        def administer() -> int:
            changed = 0
            with queue.session() as session:
                for number in range(0, RACING_JOBS, 5):
                    chosen = queue.only(number, number + 1, number + 2)
                    changed += len(session.scalars(cancel(chosen)).all())
                    session.execute(reconcile(queue.Job))
                    session.execute(rescue(queue.Job))
                    session.commit()
            return changed

        with ThreadPoolExecutor(3) as pool:
            administering = pool.submit(administer)
            counts = [administering, pool.submit(work), pool.submit(work)]
            assert sum(count.result(DEADLINE) for count in counts) == RACING_JOBS
        assert queue.claimable() == []

    def test_a_requeued_job_is_claimed_by_one_worker(self, queue: QueueUnderTest) -> None:
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
        with ThreadPoolExecutor(1) as pool, queue.session() as session, queue.session() as faster, queue.gate() as gate:
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


# -- locks -------------------------------------------------------------------------------------------------------------
# A claim never waits for a lock, passes over locked jobs, and blocks no other transaction.
#
# If it waited, a long transaction on one row would stop the whole queue.


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
    @pytest.mark.parametrize("lock", LOCKS)
    def test_a_claim_passes_over_a_locked_job(self, queue: QueueUnderTest, lock: str) -> None:
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

    def test_settlements_do_not_wait_for_each_other(self, queue: QueueUnderTest) -> None:
        """Also in a table so small that a database would rather read all rows than an index."""
        queue.enqueue(8)
        with queue.impatient() as first, queue.impatient() as second:
            mine, theirs = queue.claim(first, 3), queue.claim(second, 3)
            left = set(range(8)).difference(numbers_of(mine), numbers_of(theirs))
            for session, jobs in ((first, mine), (second, theirs)):
                assert set(session.scalars(complete(jobs))) == queue.keys(*numbers_of(jobs))
            assert set(numbers_of(queue.claim(second))) == left

    @needs(rows=True)
    @pytest.mark.parametrize("verb", SETTLEMENTS)
    def test_settling_does_not_wait_for_child_rows(self, queue: QueueUnderTest, verb: str) -> None:
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


# -- query plans -------------------------------------------------------------------------------------------------------
# A claim is correct under every plan that PostgreSQL may choose.
#
# A subquery with LIMIT and a lock locks other rows each time that a join executes it. Which plan does so depends on
# statistics, settings and versions, so these tests disable the planner's methods in turn.


N = 3
"""Jobs to claim under each plan."""

_SWITCHES = """
SELECT name FROM pg_settings WHERE name ~ '^enable_' AND setting = 'on' AND name !~ 'parallel|gather|async' ORDER BY 1
"""
"""The settings that are on, except those that do not apply to statements which lock or change rows."""

_COMBINATIONS = [
    ("enable_hashjoin", "enable_mergejoin"),
    ("enable_hashjoin", "enable_mergejoin", "enable_material"),
    ("enable_hashjoin", "enable_mergejoin", "enable_material", "enable_memoize"),
    ("enable_hashjoin", "enable_mergejoin", "enable_material", "enable_hashagg", "enable_sort"),
    ("enable_hashjoin", "enable_mergejoin", "enable_material", "enable_indexscan", "enable_bitmapscan"),
    ("enable_nestloop", "enable_mergejoin"),
    ("enable_nestloop", "enable_hashjoin"),
    ("enable_indexscan", "enable_indexonlyscan", "enable_bitmapscan"),
]


def _plans(queue: QueueUnderTest) -> Iterator[tuple[str, ...]]:
    """Disable each planner method by itself, then combinations that leave one kind of join."""
    yield ()
    with queue.engine.connect() as connection:
        known = connection.scalars(sa.text(_SWITCHES)).all()
    yield from ((name,) for name in known)
    yield from (names for names in _COMBINATIONS if set(names) <= set(known))


def _prepare_at_once(session: Session) -> None:
    """Let the driver prepare statements on first use: only prepared ones can have a generic plan."""
    driver: Any = session.connection().connection.driver_connection
    if hasattr(driver, "prepare_threshold"):
        driver.prepare_threshold = 0


class QueryPlanConformance:
    @pytest.mark.parametrize("cache", ["force_custom_plan", "force_generic_plan"])
    @pytest.mark.parametrize("filtered", [False, True], ids=["all-jobs", "second-table"])
    def test_a_claim_is_correct_under_every_plan(self, queue: QueueUnderTest, cache: str, *, filtered: bool) -> None:
        """Exactly n jobs, in order, and no lock on any other."""
        self._enqueue(queue)
        for table in queue.models.base.metadata.sorted_tables:
            queue.execute(f"ANALYZE {table.name}")
        self._check(queue, cache, filtered=filtered)

    @pytest.mark.parametrize("cache", ["force_custom_plan", "force_generic_plan"])
    @pytest.mark.parametrize("filtered", [False, True], ids=["all-jobs", "second-table"])
    def test_a_claim_is_correct_without_statistics(self, queue: QueueUnderTest, cache: str, *, filtered: bool) -> None:
        """Without ANALYZE the planner assumes a default size of the table."""
        queue.create()
        for table in queue.models.base.metadata.sorted_tables:
            queue.execute(f"ALTER TABLE {table.name} SET (autovacuum_enabled = off)")
        self._enqueue(queue)
        self._check(queue, cache, filtered=filtered)

    @staticmethod
    def _enqueue(queue: QueueUnderTest) -> None:
        # The order of the rows in the table is neither the claim order nor its reverse.
        own = [{"owner_id": 1 + number % 2, "priority": 7 * number % 40} for number in range(40)]
        with queue.session() as session:
            session.add_all([queue.Job(**queue.values(number, **values)) for number, values in enumerate(own)])
            session.commit()

    @staticmethod
    def _check(queue: QueueUnderTest, cache: str, *, filtered: bool) -> None:
        # Two tables in FROM: SQLAlchemy may correlate such a subquery with the outer statement.
        of_vips = sa.and_(queue.Job.owner_id == queue.Owner.id, queue.Owner.vip)
        wanted = sa.select(queue.Job).where(of_vips if filtered else sa.true())
        order = [number for number in queue.claimable() if number % 2 == 0 or not filtered]
        for switched_off in _plans(queue):
            with queue.session() as session, queue.session() as another:
                _prepare_at_once(session)
                session.execute(sa.text(f"SET LOCAL plan_cache_mode = {cache}"))
                for name in switched_off:
                    session.execute(sa.text(f"SET LOCAL {name} = off"))
                jobs = session.scalars(claim(wanted, N)).all()
                claimed = [job.number for job in jobs]
                assert claimed == order[:N], f"claimed {claimed} without {switched_off}"
                # The claim must not have locked or written any other job.
                left = len(another.scalars(claim(queue.Job, ALL)).all())
                assert left == 40 - N, f"{left} of {40 - N} other jobs are left without {switched_off}"

    def test_no_plan_of_a_small_table_is_reused(self, queue: QueueUnderTest) -> None:
        """A plan that reads a small table and compares each row with each is very slow once the table has grown.

        PostgreSQL may keep a generic plan from the sixth execution of a prepared statement on. A claim of a few jobs
        may have one.
        """
        queue.enqueue(60 * FEW)
        kept = sa.text("SELECT statement FROM pg_prepared_statements WHERE generic_plans > 0")
        name, some_key = queue.Job.__table__.name, next(iter(queue.Job.__table__.primary_key))
        nobody = sa.select(queue.Job).where(sa.cast(some_key, sa.Text()) == "nobody's")
        reads_jobs = re.compile(rf"(FROM|UPDATE|JOIN)\s+(sqlaqueue_message_)?{name}\b(?!\s+WHERE false)")
        with queue.engine.connect() as connection, queue.session(on=connection) as session:
            _prepare_at_once(session)
            earlier = set(session.scalars(kept))
            for _ in range(12):
                jobs = queue.claim(session, 3 * FEW)
                done, failed, again = jobs[::3], jobs[1::3], jobs[2::3]
                ends = [extend(again, lease=60), complete(done), fail(failed), retry(again, delay=60)]
                maintenance = [rescue(queue.Job), reconcile(queue.Job), purge(queue.Job, limit=1)]
                for verb in (*ends, *maintenance, cancel(nobody), requeue(nobody)):
                    session.execute(verb)
                session.commit()
            texts = set(session.scalars(kept)) - earlier
        assert [text for text in texts if reads_jobs.search(text)] == []
