"""Random histories of a queue are compared with a model, the same for every strategy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from sqlaqueue import cancel, claim, complete, extend, fail, purge, reconcile, release, requeue, rescue, retry
from sqlaqueue.testing import QueueUnderTest

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from sqlalchemy.orm import Session

numbers = st.integers(0, 7)
priorities = st.integers(-1, 1)
verbs = st.sampled_from([complete, retry, fail, release])
ENDS = {complete: "completed", retry: "pending", fail: "failed", release: "pending"}


@dataclass(frozen=True)
class Job:
    """A job in the model."""

    state: str = "pending"
    priority: int = 0
    attempts: int = 0


class Histories(RuleBasedStateMachine):
    """One worker with one batch at a time, and other transactions."""

    queue: ClassVar[QueueUnderTest]

    def __init__(self) -> None:
        super().__init__()
        self.queue.clear()
        self.jobs: dict[int, Job] = {}
        self.committed: dict[int, Job] = {}
        self.batch: dict[int, Any] = {}
        self.context: AbstractContextManager[Session] = self.queue.session()
        self.session = self.context.__enter__()

    def teardown(self) -> None:
        self.context.__exit__(None, None, None)

    def waiting(self) -> list[int]:
        return sorted(number for number, job in self.committed.items() if job.state == "pending")

    def change(self, number: int, **changes: Any) -> None:
        self.jobs[number] = replace(self.jobs[number], **changes)

    # -- other transactions -------------------------------------------------------------------------------------

    @rule(number=numbers, priority=priorities)
    def enqueue(self, number: int, priority: int) -> None:
        if self.queue.row(number) is None and number not in self.batch:
            self.queue.enqueue([number], priority=priority)
            self.jobs[number] = self.committed[number] = Job(priority=priority)
            if not self.queue.keeps_rows:
                # A dead letter with this key would be requeued beside the new job.
                self.execute_and_commit(purge(self.queue.only(number)))

    @rule(number=numbers)
    def cancel(self, number: int) -> None:
        free = number not in self.batch and self.jobs.get(number, Job("")).state == "pending"
        self.expect(
            self.execute_and_commit(cancel(self.queue.only(number))), number if free else None, state="cancelled"
        )

    @rule(number=numbers)
    def requeue(self, number: int) -> None:
        over = number not in self.batch and self.jobs.get(number, Job("")).state in self.requeued_states
        expected = number if over else None
        self.expect(self.execute_and_commit(requeue(self.queue.only(number))), expected, state="pending", attempts=0)

    @rule(number=numbers)
    def purge(self, number: int) -> None:
        over = number not in self.batch and self.jobs.get(number, Job("")).state in self.requeued_states
        self.expect(self.execute_and_commit(purge(self.queue.only(number))), number if over else None)
        if over:
            del self.jobs[number], self.committed[number]

    @rule()
    def repair_nothing(self) -> None:
        assert self.execute_and_commit(reconcile(self.queue.Job)) == []
        assert self.execute_and_commit(rescue(self.queue.Job)) == []

    @rule(number=numbers, priority=priorities)
    def edit(self, number: int, priority: int) -> None:
        if number not in self.batch and self.queue.row(number) is not None:
            self.queue.execute(
                sa.update(self.queue.Job).where(self.queue.Job.number == number).values(priority=priority)
            )
            self.change(number, priority=priority)
            self.committed[number] = self.jobs[number]

    @rule(number=numbers)
    def delete(self, number: int) -> None:
        if number not in self.batch and self.queue.row(number) is not None:
            self.queue.execute(sa.delete(self.queue.Job).where(self.queue.Job.number == number))
            del self.jobs[number], self.committed[number]

    @property
    def requeued_states(self) -> set[str]:
        return {"completed", "failed", "cancelled"} if self.queue.keeps_rows else {"failed", "cancelled"}

    def execute_and_commit(self, statement: Any) -> list[Any]:
        with self.queue.impatient() as session:
            keys = session.scalars(statement).all()
            session.commit()
        return list(keys)

    def expect(self, keys: list[Any], number: int | None, **changes: Any) -> None:
        assert keys == ([] if number is None else [self.queue.key(number)])
        if number is not None:
            self.change(number, **changes)
            self.committed[number] = self.jobs[number]

    # -- the worker ------------------------------------------------------------------------------------

    @precondition(lambda self: not self.batch)
    @rule(n=st.integers(1, 4))
    def claim(self, n: int) -> None:
        waiting = self.waiting()
        jobs = self.queue.claim(self.session, n)
        self.batch = {job.number: job for job in jobs}
        assert len(self.batch) == len(jobs) == min(n, len(waiting))
        assert set(self.batch) <= set(waiting)
        taken = [self.jobs[job.number].priority for job in jobs]
        assert taken == sorted(self.jobs[number].priority for number in waiting)[:n]
        for job in jobs:
            self.change(job.number, state="processing", attempts=self.jobs[job.number].attempts + 1)
            assert job.attempts == self.jobs[job.number].attempts
            if self.queue.leased:
                self.committed[job.number] = self.jobs[job.number]

    @precondition(lambda self: self.batch)
    @rule(ends=st.lists(verbs, min_size=4, max_size=4), commit=st.booleans())
    def settle(self, ends: list[Any], commit: bool) -> None:  # noqa: FBT001 - drawn by name
        for (number, job), end in zip(self.batch.items(), ends, strict=False):
            assert self.session.scalars(end(job)).all() == [self.queue.key(number)]
            self.change(number, state=ENDS[end], attempts=self.jobs[number].attempts - (end is release))
        if not commit:
            self.session.rollback()
            self.jobs = dict(self.committed)
            if self.queue.leased:
                return
        else:
            self.session.commit()
            done = {number for number in self.batch if self.jobs[number].state == "completed"}
            for number in done if not self.queue.keeps_rows else ():
                del self.jobs[number]
            self.committed = dict(self.jobs)
        self.batch = {}

    @precondition(lambda self: self.batch)
    @rule()
    def die(self) -> None:
        if self.queue.leased:
            self.session.execute(extend(list(self.batch.values()), lease=0))
            self.session.commit()
            assert set(self.execute_and_commit(rescue(self.queue.Job))) == self.queue.keys(*self.batch)
            for number in self.batch:
                job = self.jobs[number]
                alone = len(self.batch) == 1
                spent = alone and job.attempts >= 3
                self.change(number, state="failed" if spent else "pending", attempts=job.attempts - (not alone))
            self.committed = dict(self.jobs)
        self.session.rollback()
        self.jobs = dict(self.committed)
        self.batch = {}

    # -- invariants --------------------------------------------------------------------------------

    @invariant()
    def every_job_is_as_it_was_left(self) -> None:
        with self.queue.impatient() as session:
            rows = session.execute(sa.select(self.queue.Job.__table__)).mappings().all()
            claimed = sorted(job.number for job in session.scalars(claim(self.queue.Job, 100)))
        assert claimed == [number for number in self.waiting() if number not in self.batch]
        found = {row["number"]: row for row in rows}
        assert set(found) == set(self.committed if self.queue.keeps_rows else self.waiting())
        for number, row in found.items():
            job = self.committed[number]
            assert row["attempts"] == job.attempts
            assert row.get("status", "pending") == job.state


@pytest.mark.each_value
@pytest.mark.once
@pytest.mark.parametrize("composite", [False, True], ids=["single-key", "composite-key"])
@pytest.mark.parametrize(
    ("strategy", "columns"),
    [
        ("update_status", {}),
        ("batch_select", {}),
        ("delete_returning", {}),
        ("delete_returning", {"status": None}),
    ],
    ids=["update_status", "batch_select", "delete_returning", "own_message"],
)
def test_any_history_agrees_with_the_model(
    engine: sa.Engine, strategy: str, columns: dict[str, str | None], *, composite: bool
) -> None:
    with QueueUnderTest(engine, strategy, columns, composite=composite) as queue:
        machine = type("HistoriesOfOne", (Histories,), {"queue": queue})
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=8,
                stateful_step_count=20,
                deadline=None,
                database=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
