"""Conformance: every way to insert and edit a job, the list of jobs, and the verbs for operators."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql

from sqlaqueue import cancel, complete, fail, pause, purge, reconcile, release, requeue, rescue, resume, retry
from sqlaqueue._typing import AnySelect
from sqlaqueue.mapping.mixin import spec_of
from sqlaqueue.queue.options import STATES
from sqlaqueue.strategies.listing import OTHER, SHOWN, key_labels
from sqlaqueue.testing.conformance.queue_under_test import HOUR, QueueUnderTest, needs, numbers_of


def _columns(queue: QueueUnderTest) -> str:
    return ", ".join(queue.values(0))


def _row(queue: QueueUnderTest, number: int) -> str:
    return ", ".join(f"'{value}'" for value in queue.values(number).values())


class EnqueueConformance:
    def test_session_add(self, queue: QueueUnderTest) -> None:
        """The jobs are claimable after the caller's commit, not before."""
        with queue.session() as session:
            session.add_all([queue.Job(**queue.values(number)) for number in range(3)])
            session.flush()
            assert queue.claimable() == []
            session.commit()
        assert sorted(queue.claimable()) == [0, 1, 2]

    def test_a_job_can_be_claimed_in_the_transaction_that_added_it(self, queue: QueueUnderTest) -> None:
        """A transaction sees its own jobs, as it sees any of its writes."""
        with queue.session() as session:
            session.add(queue.Job(**queue.values(0)))
            session.flush()
            assert numbers_of(queue.claim(session)) == [0]

    def test_a_rolled_back_job_is_never_claimed(self, queue: QueueUnderTest) -> None:
        with queue.session() as session:
            session.add(queue.Job(**queue.values(0)))
            session.flush()
            session.rollback()
        assert queue.claimable() == []

    def test_bulk_insert(self, queue: QueueUnderTest) -> None:
        with queue.session() as session:
            session.execute(sa.insert(queue.Job), [queue.values(n) for n in range(20)])
            table = queue.Job.__table__
            session.execute(sa.insert(table), [queue.values(n) for n in range(20, 40)])
            session.commit()
        assert sorted(queue.claimable()) == list(range(40))

    def test_insert_from_select(self, queue: QueueUnderTest) -> None:
        table = queue.Job.__table__
        counted = sa.select(sa.literal(100).label("number")).cte("counted", recursive=True)
        counted = counted.union_all(sa.select(counted.c.number + 1).where(counted.c.number < 119))
        numbers = counted.c.number
        keys = {"tenant": sa.literal("c"), "id": numbers} if queue.composite else {"id": numbers}
        rows = sa.select(*keys.values(), numbers)
        queue.execute(sa.insert(table).from_select([*keys, "number"], rows))
        assert sorted(queue.claimable()) == list(range(100, 120))

    def test_plain_sql(self, queue: QueueUnderTest) -> None:
        """Columns without a value get the database's defaults."""
        for number in range(3):
            queue.execute(f"INSERT INTO conformance_job ({_columns(queue)}) VALUES ({_row(queue, number)})")
        with queue.session() as session:
            assert [job.attempts for job in queue.claim(session)] == [1, 1, 1]

    def test_copy(self, queue: QueueUnderTest) -> None:
        """COPY bypasses all events of SQLAlchemy."""
        lines = "".join("\t".join(map(str, queue.values(n).values())) + "\n" for n in range(30))
        command = f"COPY conformance_job ({_columns(queue)}) FROM STDIN"
        _copy(queue, command, lines)
        assert sorted(queue.claimable()) == list(range(30))

    def test_on_conflict_do_nothing(self, queue: QueueUnderTest) -> None:
        queue.enqueue(2)
        insert = postgresql.insert(queue.Job.__table__).on_conflict_do_nothing()
        queue.execute(insert.values([queue.values(number) for number in range(4)]))
        assert sorted(queue.claimable()) == [0, 1, 2, 3]

    def test_on_conflict_do_update(self, queue: QueueUnderTest) -> None:
        """A finished job becomes pending, and a pending one stays pending; both are claimable once."""
        queue.enqueue(2)
        if queue.keeps_rows:
            queue.run(complete, 0)
        insert = postgresql.insert(queue.Job.__table__)
        insert = insert.values([queue.values(number) for number in range(3)])
        changes: dict[str, Any] = {"status": "pending"} if queue.has_status else {"payload": "x"}
        keys = [key.name for key in queue.Job.__table__.primary_key]
        queue.execute(insert.on_conflict_do_update(index_elements=keys, set_=changes))
        assert sorted(queue.claimable()) == [0, 1, 2]

    def test_merge(self, queue: QueueUnderTest) -> None:
        queue.enqueue([0, 1], priority=1)
        keys = " AND ".join(f"job.{key.name} = new.{key.name}" for key in queue.Job.__table__.primary_key)
        names = list(queue.values(0))
        rows = ", ".join(f"({_row(queue, number)})" for number in (1, 2))
        casts = ", ".join("text" if name == "tenant" else "int" for name in names).split(", ")
        new = ", ".join(f"new.{name}::{cast}" for name, cast in zip(names, casts, strict=True))
        keys = keys.replace("new.id", "new.id::int")
        queue.execute(
            f"MERGE INTO conformance_job AS job USING (VALUES {rows}) AS new ({_columns(queue)})"
            f" ON {keys} WHEN MATCHED THEN UPDATE SET priority = 0"
            f" WHEN NOT MATCHED THEN INSERT ({_columns(queue)}) VALUES ({new})"
        )
        assert sorted(queue.claimable()) == [0, 1, 2]
        assert queue.order()[-1] == 0

    @needs(status=True)
    def test_a_row_inserted_as_finished_is_not_claimed(self, queue: QueueUnderTest) -> None:
        for number, status in enumerate(["completed", "failed", "cancelled"]):
            queue.enqueue([number], status=status)
        assert queue.claimable() == []

    @needs(status=True)
    def test_requeueing_by_plain_sql(self, queue: QueueUnderTest) -> None:
        """An UPDATE of the status makes a job claimable, whatever its attempts."""
        queue.enqueue(3)
        queue.run(fail, 0, 1)
        queue.execute("UPDATE conformance_job SET status = 'pending' WHERE number = 0")
        assert sorted(queue.claimable()) == [0, 2]
        queue.run(complete, 0)
        assert queue.state(0) == "completed"

    @needs(status=True)
    def test_finishing_by_plain_sql(self, queue: QueueUnderTest) -> None:
        queue.enqueue(4)
        queue.execute("UPDATE conformance_job SET status = 'cancelled' WHERE number = 0")
        assert sorted(queue.claimable()) == [1, 2, 3]
        queue.execute("UPDATE conformance_job SET status = 'completed'")
        assert queue.claimable() == []

    def test_deleting_by_plain_sql(self, queue: QueueUnderTest) -> None:
        queue.enqueue(3)
        queue.execute("DELETE FROM conformance_job WHERE number IN (0, 1)")
        assert queue.claimable() == [2]
        queue.enqueue([0])
        assert sorted(queue.claimable()) == [0, 2]

    def test_a_deleted_job_leaves_no_message(self, queue: QueueUnderTest) -> None:
        queue.enqueue(3)
        queue.execute(sa.delete(queue.Job).where(queue.Job.number == 0))
        with queue.session() as session:
            assert session.scalars(reconcile(queue.Job)).all() == []

    def test_truncate(self, queue: QueueUnderTest) -> None:
        queue.enqueue(3)
        queue.execute("TRUNCATE conformance_job CASCADE")
        assert queue.claimable() == []
        queue.enqueue(2)
        assert sorted(queue.claimable()) == [0, 1]

    def test_an_edited_priority_reaches_the_claim(self, queue: QueueUnderTest) -> None:
        queue.enqueue([0, 2, 4, 6])
        queue.execute("UPDATE conformance_job SET priority = -1 WHERE number = 6")
        assert queue.order() == [6, 0, 2, 4]
        queue.execute("UPDATE conformance_job SET priority = -number")
        assert queue.order() == [6, 4, 2, 0]

    def test_an_edited_time_reaches_the_claim(self, queue: QueueUnderTest) -> None:
        queue.enqueue([0, 2, 4])
        some, now = sa.update(queue.Job), sa.func.now()
        queue.execute(some.where(queue.Job.number == 0).values(run_at=now + timedelta(days=1)))
        assert queue.claimable() == [2, 4]
        queue.execute(some.where(queue.Job.number.in_([0, 4])).values(run_at=now - timedelta(days=1)))
        assert queue.order() == [0, 4, 2]

    def test_an_edited_key_reaches_the_claim(self, queue: QueueUnderTest) -> None:
        """Also when two jobs swap their keys in one statement."""
        queue.enqueue([0, 2, 4])
        queue.execute("UPDATE conformance_job SET id = id + 1000 WHERE number = 0")
        with queue.session() as session:
            jobs = queue.claim(session)
            assert numbers_of(jobs) == [0, 2, 4]
            assert len(session.scalars(complete(jobs)).all()) == 3
            session.commit()
        assert queue.claimable() == []

    def test_keys_and_priorities_edited_in_one_statement(self, queue: QueueUnderTest) -> None:
        queue.enqueue([0, 2, 4])
        step = 1 if queue.composite else 2
        # Unique keys are checked row by row, so the keys are negative in between.
        with queue.engine.begin() as connection:
            for text in ("id = -id - 1", f"id = -id - 1 + {step}, priority = -number"):
                connection.execute(sa.text(f"UPDATE conformance_job SET {text}"))
        assert queue.order() == [4, 2, 0]


def _copy(queue: QueueUnderTest, command: str, lines: str) -> None:
    connection = queue.engine.raw_connection()
    try:
        cursor: Any = connection.cursor()
        if hasattr(cursor, "copy_expert"):
            cursor.copy_expert(command, io.StringIO(lines))
        else:
            with cursor.copy(command) as copy:
                copy.write(lines)
        connection.commit()
    finally:
        connection.close()


def _listing(
    queue: QueueUnderTest, chosen: AnySelect | None = None, states: Sequence[str] | None = None
) -> dict[Any, sa.RowMapping]:
    """Return the row of each job in a listing, by its key; the listing must not wait for a lock."""
    spec = spec_of(queue.Job)
    listing = spec.strategy.list_jobs(spec, sa.select(queue.Job) if chosen is None else chosen, states)
    with queue.impatient() as session:
        rows = session.execute(listing).mappings().all()
    labels = key_labels(spec)
    shown = {tuple(row[name] for name in labels) if queue.composite else row[labels[0]]: row for row in rows}
    assert len(shown) == len(rows), "a job is shown twice"
    return shown


def _states(shown: dict[Any, sa.RowMapping]) -> dict[Any, str]:
    return {key: row["state"] for key, row in shown.items()}


def _fill(queue: QueueUnderTest) -> dict[int, str]:
    """Enqueue jobs and bring them to every state except processing; return the states by number."""
    queue.enqueue([0, 2, 4, 6], owner_id=1)
    queue.enqueue([1, 3, 5], owner_id=2)
    queue.run(complete, 0)
    queue.run(partial(fail, error="broken"), 1, 2)
    queue.run(partial(retry, delay=HOUR), 3)
    queue.do(cancel(queue.only(4)))
    states = {1: "failed", 2: "failed", 3: "pending", 4: "cancelled", 5: "pending", 6: "pending"}
    return {0: "completed", **states} if queue.keeps_rows else states


class ListingConformance:
    def test_a_listing_shows_each_job_once_with_its_state(self, queue: QueueUnderTest) -> None:
        """All jobs of which a row or a dead letter exists."""
        states = _fill(queue)
        assert _states(_listing(queue)) == {queue.key(number): state for number, state in states.items()}

    def test_pending_jobs_are_those_that_a_listing_shows_as_pending(self, queue: QueueUnderTest) -> None:
        """Once each, with the times of their rows, also where their messages are counted."""
        states, spec = _fill(queue), spec_of(queue.Job)
        with queue.impatient() as session:
            pending = session.execute(spec.strategy.pending_jobs(spec, len(states))).mappings().all()
        waiting = [row for row in _listing(queue).values() if row["state"] == "pending"]
        assert [row["run_at"] for row in pending] == sorted(row["run_at"] for row in waiting)

    def test_a_listing_shows_the_roles_of_a_job(self, queue: QueueUnderTest) -> None:
        _fill(queue)
        shown, spec = _listing(queue), spec_of(queue.Job)
        failed, waiting = shown[queue.key(1)], shown[queue.key(5)]
        assert {*key_labels(spec), "state", *(role for role in SHOWN if spec.has(role))} <= failed.keys()
        assert failed["last_error"] == "broken"
        assert failed["finished_at"] >= failed["created_at"]
        assert (waiting["last_error"], waiting["finished_at"]) == (None, None)
        assert waiting["run_at"] <= waiting["created_at"]
        assert shown[queue.key(3)]["run_at"] > waiting["run_at"]
        assert [shown[queue.key(number)]["attempts"] for number in (1, 3, 5)] == [1, 1, 0]

    def test_a_listing_can_be_limited_by_a_filter_and_states(self, queue: QueueUnderTest) -> None:
        states = _fill(queue)
        for state in STATES:
            wanted = queue.keys(*(number for number in states if states[number] == state))
            assert _listing(queue, states=[state]).keys() == wanted
        assert _listing(queue, states=["pending", "cancelled"]).keys() == queue.keys(3, 4, 5, 6)
        assert _listing(queue, states=[]).keys() == set()
        assert _listing(queue, queue.only(1, 5)).keys() == queue.keys(1, 5)
        assert _listing(queue, queue.only(1, 3, 5), ["failed"]).keys() == queue.keys(1)
        of_vips = sa.select(queue.Job).where(queue.Job.owner.has(queue.Owner.vip))
        assert _listing(queue, of_vips, ["failed", "pending"]).keys() == queue.keys(2, 6)

    def test_a_listing_waits_for_no_lock(self, queue: QueueUnderTest) -> None:
        """It shows held jobs as other transactions see them."""
        queue.enqueue(3)
        with queue.session() as holder, queue.session() as session:
            queue.claim(session, of=queue.only(0))
            holder.execute(queue.only(1).with_for_update(skip_locked=True))
            running = "processing" if queue.leased else "pending"
            assert _states(_listing(queue)) == {queue.key(0): running, queue.key(1): "pending", queue.key(2): "pending"}

    @needs(status=True)
    def test_a_listing_shows_an_unknown_status_as_other(self, queue: QueueUnderTest) -> None:
        queue.enqueue(2)
        queue.execute("UPDATE conformance_job SET status = 'elsewhere' WHERE number = 1")
        assert _states(_listing(queue)) == {queue.key(0): "pending", queue.key(1): OTHER}
        assert _listing(queue, states=STATES).keys() == queue.keys(0)

    def test_the_state_of_one_job_is_that_of_the_listing(self, queue: QueueUnderTest) -> None:
        """Also while it is locked; a job without a row or dead letter has no state."""
        states, spec = _fill(queue), spec_of(queue.Job)

        def standing(number: int) -> Any:
            key = queue.key(number)
            with queue.impatient() as session:
                look = spec.strategy.job_states(spec, [key if queue.composite else (key,)])
                row = session.execute(look).one_or_none()
                return None if row is None else tuple(row[-2:])

        errors = {1: "broken", 2: "broken"}
        expected = {number: (states[number], errors.get(number)) if number in states else None for number in range(8)}
        assert {number: standing(number) for number in range(8)} == expected
        with queue.session() as holder, queue.session() as session:
            holder.execute(queue.only(6).with_for_update())
            queue.claim(session, of=queue.only(5))
            assert standing(5) == ("processing" if queue.leased else "pending", None)
            assert standing(6) == ("pending", None)


Verb = Callable[[Any], Any]


def _finish(queue: QueueUnderTest) -> None:
    """Bring jobs 0 to 2 to the three finished states; 3 to 5 stay pending."""
    queue.enqueue(6)
    queue.run(complete, 0)
    queue.run(fail, 1)
    assert queue.do(cancel(queue.only(2))) == queue.keys(2)


class MaintenanceConformance:
    def test_cancel_cancels_pending_jobs(self, queue: QueueUnderTest) -> None:
        queue.enqueue(4)
        queue.run(retry, 0)
        assert queue.do(cancel(queue.only(0, 3))) == queue.keys(0, 3)
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
        _finish(queue)
        assert queue.do(cancel(queue.Job)) == queue.keys(3, 4, 5)
        assert queue.state(0) == queue.completed
        assert [queue.state(n) for n in range(1, 6)] == ["failed", *["cancelled"] * 4]

    def test_cancel_requests_the_cancellation_of_a_running_job(self, queue: QueueUnderTest) -> None:
        """The row does not change: the run ends as its worker settles it."""
        queue.enqueue(2)
        with queue.session() as session:
            jobs = queue.claim(session, of=queue.only(0))
            assert queue.do(cancel(queue.Job)) == queue.keys(1)
            assert session.scalars(complete(jobs)).all() == [queue.key(0)]
            session.commit()
        assert (queue.state(0), queue.state(1)) == (queue.completed, "cancelled")

    def test_cancel_twice(self, queue: QueueUnderTest) -> None:
        queue.enqueue(2)
        with queue.session() as session:
            queue.claim(session, of=queue.only(0))
            assert queue.do(cancel(queue.Job)) == queue.keys(1)
            assert queue.do(cancel(queue.Job)) == set()

    def test_a_rolled_back_cancellation_has_no_effect(self, queue: QueueUnderTest) -> None:
        """Neither on pending jobs nor on one that runs."""
        queue.enqueue(2)
        with queue.session() as session, queue.session() as operator:
            jobs = queue.claim(session, 1)
            assert operator.scalars(cancel(queue.Job)).all() == [queue.key(1)]
            operator.rollback()
            assert session.scalars(complete(jobs)).all() == [queue.key(0)]
            session.commit()
        assert queue.claimable() == [1]

    def test_a_paused_queue_gives_no_jobs(self, queue: QueueUnderTest) -> None:
        """Until it is resumed; jobs that run are settled meanwhile."""
        queue.enqueue(3)
        with queue.session() as session:
            jobs = queue.claim(session, of=queue.only(0))
            for _ in range(2):
                queue.execute(pause(queue.Job))
            assert queue.claimable() == []
            assert session.scalars(complete(jobs)).all() == [queue.key(0)]
            session.commit()
        queue.execute(resume(queue.Job))
        assert sorted(queue.claimable()) == [1, 2]

    def test_requeue_makes_finished_jobs_pending(self, queue: QueueUnderTest) -> None:
        """No other jobs; completed ones only if their rows were kept."""
        _finish(queue)
        finished = {0, 1, 2} if queue.keeps_rows else {1, 2}
        with queue.session() as session:
            queue.claim(session, of=queue.only(5))
            assert queue.do(requeue(queue.Job)) == queue.keys(*finished)
            assert sorted(queue.claimable()) == sorted(finished | {3, 4})
        assert [queue.attempts(number) for number in finished] == [0] * len(finished)

    def test_requeue_obeys_a_filter(self, queue: QueueUnderTest) -> None:
        queue.enqueue(3)
        queue.run(fail, 0, 1)
        assert queue.do(requeue(queue.only(1, 2))) == queue.keys(1)
        assert sorted(queue.claimable()) == [1, 2]
        assert queue.state(0) == "failed"

    @pytest.mark.parametrize("verb", [cancel, requeue, purge])
    def test_verbs_accept_a_filter_with_a_second_table(self, queue: QueueUnderTest, verb: Verb) -> None:
        queue.enqueue([0, 3], owner_id=1)
        queue.enqueue([1, 2, 4], owner_id=2)
        if verb is not cancel:
            queue.run(fail, *range(5))
        # Two tables in FROM: SQLAlchemy may correlate such a subquery with the outer statement.
        same = queue.Job.owner_id == queue.Owner.id
        of_vips = sa.select(queue.Job).where(same, queue.Owner.vip, queue.Job.number < 4)
        assert queue.do(verb(of_vips)) == queue.keys(0, 3)
        assert queue.do(verb(of_vips)) == set()
        assert queue.do(verb(queue.Job)) == queue.keys(1, 2, 4)

    def test_a_requeued_job_keeps_its_columns(self, queue: QueueUnderTest) -> None:
        """Its payload, owner and priority; it is due now."""
        queue.enqueue([0], payload="kept", owner_id=1, priority=7)
        queue.enqueue([1])
        queue.run(fail, 0)
        queue.do(requeue(queue.Job))
        row = queue.stored(0)
        assert (row["payload"], row["owner_id"], row["priority"]) == ("kept", 1, 7)
        assert queue.order() == [1, 0]

    def test_a_requeued_job_can_finish_again(self, queue: QueueUnderTest) -> None:
        queue.enqueue(1)
        for _ in range(2):
            queue.run(fail, 0)
            assert queue.do(requeue(queue.Job)) == queue.keys(0)
            queue.run(release, 0)
            assert queue.do(cancel(queue.Job)) == queue.keys(0)
            assert queue.do(requeue(queue.Job)) == queue.keys(0)
        queue.run(complete, 0)
        assert queue.state(0) == queue.completed

    def test_purge_deletes_finished_jobs(self, queue: QueueUnderTest) -> None:
        _finish(queue)
        with queue.session() as session:
            queue.claim(session, of=queue.only(5))
            assert queue.do(purge(queue.Job)) == queue.keys(*([0, 1, 2] if queue.keeps_rows else [1, 2]))
            assert sorted(queue.claimable()) == [3, 4]
        assert [queue.state(number) for number in range(3)] == [None] * 3

    @pytest.mark.parametrize(("states", "number"), [("completed", 0), ("failed", 1), ("cancelled", 2)])
    def test_purge_obeys_states(self, queue: QueueUnderTest, states: str, number: int) -> None:
        _finish(queue)
        gone = queue.keys(number) if number or queue.keeps_rows else set()
        assert queue.do(purge(queue.Job, states=[states])) == gone
        assert queue.do(purge(queue.Job)) == (queue.keys(0, 1, 2) if queue.keeps_rows else queue.keys(1, 2)) - gone

    def test_purge_obeys_a_filter_and_a_limit(self, queue: QueueUnderTest) -> None:
        """Repeated until no key is returned, it deletes each job once."""
        queue.enqueue(8)
        queue.run(fail, *range(7))
        chosen = sa.select(queue.Job).where(queue.Job.number < 5)
        rounds = [queue.do(purge(chosen, limit=2)) for _ in range(4)]
        assert [len(keys) for keys in rounds] == [2, 2, 1, 0]
        assert set().union(*rounds) == queue.keys(0, 1, 2, 3, 4)
        assert [queue.state(number) for number in (5, 6, 7)] == ["failed", "failed", "pending"]

    def test_purge_obeys_the_age(self, queue: QueueUnderTest) -> None:
        queue.enqueue(2)
        queue.run(fail, 0, 1)
        assert queue.do(purge(queue.Job, older_than=HOUR)) == set()
        if queue.keeps_rows:
            long_ago = sa.func.now() - timedelta(hours=2)
            one = sa.update(queue.Job).where(queue.Job.number == 1)
            queue.execute(one.values(finished_at=long_ago))
            assert queue.do(purge(queue.Job, older_than=HOUR)) == queue.keys(1)
        assert queue.keys(0) <= queue.do(purge(queue.Job, older_than=0))

    @pytest.mark.parametrize("verb", [reconcile, rescue])
    def test_reconcile_and_rescue_change_nothing_in_a_consistent_queue(self, queue: QueueUnderTest, verb: Verb) -> None:
        _finish(queue)
        with queue.session() as session:
            queue.claim(session, of=queue.only(5))
            assert queue.do(verb(queue.Job)) == set()
        queue.do(requeue(queue.Job))
        assert queue.do(verb(queue.Job)) == set()

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
        queue.do(reconcile(queue.Job))
        waiting = [0, 3, 4, 7, 8] if queue.has_status else [0, 2, 3, 4, 7, 8]
        assert sorted(queue.claimable()) == waiting
        assert queue.do(reconcile(queue.Job)) == set()
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
        queue.do(reconcile(queue.Job))
        assert sorted(queue.claimable()) == [0, 1, 2]

    def test_reconcile_leaves_running_jobs_alone(self, queue: QueueUnderTest) -> None:
        """Whatever the result of the run, no other worker gets the job."""
        queue.enqueue(4)
        with queue.session() as session:
            jobs = queue.claim(session, of=queue.only(0, 1))
            assert queue.do(reconcile(queue.Job)) == set()
            assert sorted(queue.claimable()) == [2, 3]
            session.execute(complete([job for job in jobs if job.number == 0]))
            session.execute(release([job for job in jobs if job.number == 1]))
            assert queue.do(reconcile(queue.Job)) == set()
            session.commit()
        assert queue.do(reconcile(queue.Job)) == set()
        assert sorted(queue.claimable()) == [1, 2, 3]
