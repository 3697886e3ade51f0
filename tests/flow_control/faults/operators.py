"""The process of an operator: it changes jobs, limits and the queue at random, by the library and by plain SQL."""

from __future__ import annotations

import contextlib
import random
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue import cancel, claim, complete, fail, pause, purge, release, requeue, resume, retry
from tests.consumer.models import HandlerIO
from tests.faults.history import Recorder
from tests.flow_control.faults.configuration import Configuration, models
from tests.flow_control.faults.held_audit import Marks
from tests.flow_control.faults.roles import configuration_of, engine_of, marks_of


class Operator:
    """A session, and the jobs that it may change."""

    def __init__(
        self, configuration: Configuration, session: Session, rng: random.Random, marks: Marks | None = None
    ) -> None:
        self.configuration, self.session, self.rng, self.marks = configuration, session, rng, marks
        self.models = models(configuration)

    def some(self, *states: str, most: int = 3) -> Any:
        """Return a select of a few random jobs in some states."""
        job, session = self.models.job, self.session
        if self.configuration.strategy != "delete_row":
            found = sa.select(job.id).where(job.status.in_(states))
        elif {"pending", "processing"} & set(states):
            found = sa.select(job.id)
        else:
            letters = job.metadata.tables["sqlaqueue_dead_letter"]
            found = sa.select(sa.cast(letters.c.key[0], sa.Integer))
        keys = session.scalars(found.limit(500)).all()
        chosen = self.rng.sample(list(keys), min(len(keys), self.rng.randint(1, most)))
        return sa.select(job).where(job.id.in_(sorted(chosen)))

    def end(self, *, commit: float = 0.8) -> None:
        """Commit with a probability, or roll back; sometimes a moment later."""
        if self.rng.random() < 0.3:
            time.sleep(self.rng.uniform(0, 0.1))
        self.session.commit() if self.rng.random() < commit else self.session.rollback()


def _cancel(one: Operator) -> None:
    one.session.execute(cancel(one.some("pending", "processing")))
    one.end()


def _requeue(one: Operator) -> None:
    one.session.execute(requeue(one.some("completed", "failed", "failed", "cancelled")))
    one.end()


def _purge(one: Operator) -> None:
    one.session.execute(purge(one.models.job, limit=one.rng.randint(1, 20)))
    one.end()


def _settle(one: Operator) -> None:
    """Settle running jobs by plain SQL; under a held strategy they read as pending."""
    job, state = one.models.job.__table__, one.rng.choice(["completed", "failed", "pending", "cancelled"])
    running = "processing" if one.marks is None else "pending"
    keys = [row.id for row in one.session.scalars(one.some(running))]
    finished = None if state == "pending" else sa.func.now()
    mine = job.c.id.in_(keys), job.c.status == running
    one.session.execute(sa.update(job).where(*mine).values(status=state, finished_at=finished))
    one.end()


def _delete(one: Operator) -> None:
    job = one.models.job.__table__
    keys = [row.id for row in one.session.scalars(one.some("processing", "pending", "failed", most=2))]
    one.session.execute(sa.delete(job).where(job.c.id.in_(keys)))
    one.end()


def _claim(one: Operator) -> None:
    """Claim without a Consumer, and settle in a second transaction or in the same one."""
    jobs = one.session.scalars(claim(one.models.job, one.rng.randint(1, 8))).all()
    if one.marks is not None:
        _run(one, jobs)
        return
    if one.rng.random() < 0.7:
        if one.rng.random() < 0.3:
            time.sleep(one.rng.uniform(0, 0.1))
        if one.rng.random() < 0.3:
            one.session.rollback()
            return
        one.session.commit()
    for job in jobs:
        verb = one.rng.choice([complete, complete, fail, release, lambda run: retry(run, delay=0.05)])
        one.session.execute(verb(job))
    one.end(commit=0.9)


def _run(one: Operator, jobs: Sequence[Any]) -> None:
    """Run jobs in the transaction that holds them."""
    assert one.marks is not None
    for job in jobs:
        # With a Session nothing suspends.
        with contextlib.suppress(StopIteration):
            one.marks.write(HandlerIO(one.session), job.id, str(uuid.uuid4())).send(None)
        if one.rng.random() < 0.3:
            time.sleep(one.rng.uniform(0, 0.03))
        verb = one.rng.choice([complete, complete, fail, release, lambda run: retry(run, delay=0.05)])
        one.session.execute(verb(job))
    one.end(commit=0.7)


def _abandon(one: Operator) -> None:
    """Claim, and leave the jobs to the end of their leases."""
    one.session.scalars(claim(one.models.job, one.rng.randint(1, 3))).all()
    one.session.commit()


def _limit(one: Operator) -> None:
    tenant = one.models.tenant.__table__
    few = tenant.c.id.in_(one.rng.sample(range(one.configuration.customers), min(3, one.configuration.customers)))
    one.session.execute(sa.update(tenant).where(few).values(most=one.rng.choice([0, 1, 1, 2, 3, 8, None])))
    one.end()


def _pause(one: Operator) -> None:
    one.session.execute(pause(one.models.job))
    one.session.commit()
    time.sleep(one.rng.uniform(0, 0.2))
    one.session.execute(resume(one.models.job))
    one.session.commit()


def _lock(one: Operator) -> None:
    """Hold the locks of a few rows for a while."""
    one.session.execute(one.some("pending", "processing").order_by("id").with_for_update())
    time.sleep(one.rng.uniform(0, 0.3))
    one.session.rollback()


ACTIONS: dict[str, Callable[[Operator], None]] = {
    "cancel": _cancel,
    "requeue": _requeue,
    "purge": _purge,
    "settle": _settle,
    "delete": _delete,
    "claim": _claim,
    "abandon": _abandon,
    "limit": _limit,
    "pause": _pause,
    "lock": _lock,
}


def run_operator(parameters: Any) -> None:
    """Act at random until the time is over; at the end the queue is not paused, and each tenant may run jobs."""
    configuration, rng = configuration_of(parameters), random.Random(parameters["seed"])
    recorder, engine = Recorder(Path(parameters["directory"]), parameters["name"]), engine_of(parameters)
    marks = marks_of(parameters)
    deadline = time.monotonic() + parameters["seconds"]
    while configuration.actions and time.monotonic() < deadline:
        name = rng.choice(configuration.actions)
        # A fault may end this connection, and transactions of operators may deadlock with each other, on rows that
        # each has locked for longer than one statement.
        with contextlib.suppress(sa.exc.OperationalError, sa.exc.InterfaceError), Session(engine) as session:
            ACTIONS[name](Operator(configuration, session, rng, marks))
            recorder.record("acted", kind=name)
        time.sleep(rng.uniform(0, 0.1))
    engine.dispose()
    recorder.record("stopped")
