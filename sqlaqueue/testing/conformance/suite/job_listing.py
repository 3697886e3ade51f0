"""The list of jobs that operators see."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import sqlalchemy as sa

from sqlaqueue import cancel, complete, fail, retry
from sqlaqueue._typing import AnySelect
from sqlaqueue.mapping.mixin import spec_of
from sqlaqueue.queue.options import STATES
from sqlaqueue.strategies.listing import OTHER, SHOWN, key_labels
from sqlaqueue.testing.conformance.queue_under_test import HOUR, QueueUnderTest, needs


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
    with queue.session() as session:
        session.execute(cancel(queue.only(4)))
        session.commit()
    states = {1: "failed", 2: "failed", 3: "pending", 4: "cancelled", 5: "pending", 6: "pending"}
    return {0: "completed", **states} if queue.keeps_rows else states


class ListingConformance:
    """One row for each job, from whatever table stores it."""

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
        """Its columns have the names of the queue's roles."""
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
        """By one of them, and by both."""
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
            holder.execute(queue.only(1).with_for_update())
            running = "processing" if queue.leased else "pending"
            assert _states(_listing(queue)) == {
                queue.key(0): running,
                queue.key(1): "pending",
                queue.key(2): "pending",
            }

    @needs(status=True)
    def test_a_listing_shows_an_unknown_status_as_other(self, queue: QueueUnderTest) -> None:
        """For example a status that was written by hand."""
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
                look = spec.strategy.job_state(spec, key if queue.composite else (key,))
                row = session.execute(look).one_or_none()
                return None if row is None else tuple(row)

        errors = {1: "broken", 2: "broken"}
        expected = {number: (states[number], errors.get(number)) if number in states else None for number in range(8)}
        assert {number: standing(number) for number in range(8)} == expected
        with queue.session() as holder, queue.session() as session:
            holder.execute(queue.only(6).with_for_update())
            queue.claim(session, of=queue.only(5))
            assert standing(5) == ("processing" if queue.leased else "pending", None)
            assert standing(6) == ("pending", None)
