"""Unique keys under faults: processes enqueue jobs with a few keys, requeue, cancel and run them, and are killed."""

from __future__ import annotations

import os
import random
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session, mapped_column, sessionmaker

import sqlaqueue
from sqlaqueue import Cancel, Consumer, Fail, JobExists, Retry, Snooze, Unique, cancel, enqueue
from sqlaqueue.admin import JobFilter, QueueAdmin
from sqlaqueue.consumer import pace
from sqlaqueue.strategies.unique_key import duplicate_in
from tests.faults.history import Record, Violations, violations_of, with_event
from tests.faults.processes import Actor, Process, Processes, Role
from tests.models import TEXT, make_job, shared
from tests.programs import wait_until

KEYS = "abcdefghijkl"

CONFIGURATIONS: dict[str, tuple[str, Unique]] = {
    "unfinished": ("update_status", Unique("key")),
    "waiting": ("update_status", Unique("key", states=("pending",))),
    "waiting, on_return=wait": ("update_status", Unique("key", states=("pending",), on_return="wait")),
    "held": ("batch_select", Unique("key")),
    "messages": ("delete_returning", Unique("key")),
    "rows are messages": ("rows_are_messages", Unique("key")),
}


@shared
def model_of(name: str) -> Any:
    kind, unique = CONFIGURATIONS[name]
    return make_job(kind, {"key": mapped_column(TEXT)}, unique=unique, max_attempts=4, lease=1)


def new_job(job: Any, rng: random.Random) -> Any:
    return job(id=uuid.uuid4().int >> 98, key=rng.choice(KEYS))


# -- the roles: each runs until its process is killed, and records the jobs whose insertion is about to be committed ---


def engine_of(url: str) -> sa.Engine:
    engine = sa.create_engine(url, pool_size=5)
    if engine.dialect.name == "mariadb":
        sqlaqueue.prepare(engine)
    return engine


def produce(actor: Actor, *, url: str, name: str) -> None:
    """Enqueue jobs, by all ways, in transactions of which some are rolled back."""
    engine, job, rng = engine_of(url), model_of(name), actor.rng
    ways: list[Any] = ["skip", "skip", "raise", "insert"]
    ways += ["replace", "replace_keep_time"] * job.__queue_spec__.strategy.tells_running_apart
    while True:
        jobs = [new_job(job, rng) for _ in range(rng.randint(1, 3))]
        way = rng.choice(ways)
        try:
            with Session(engine) as session:
                if way == "insert":
                    session.add(jobs[0])
                    session.flush()
                    created = [jobs[0].id]
                else:
                    created = [each.job.id for each in enqueue(session, jobs, on_duplicate=way) if each.created]
                time.sleep(rng.random() * 0.02)
                if rng.random() < 0.8:
                    # Whether a process that is killed now has committed is found out from the table.
                    for key in created:
                        actor.recorder.record("enqueueing", key)
                    session.commit()
        except (DBAPIError, JobExists):
            pass
        time.sleep(rng.random() * 0.02)


def administrate(actor: Actor, *, url: str, name: str) -> None:
    engine, job, rng = engine_of(url), model_of(name), actor.rng
    finished = JobFilter(states=("failed", "cancelled"))
    while True:
        try:
            with Session(engine) as session:
                if rng.random() < 0.6:
                    QueueAdmin(session, job).requeue(finished, batch_size=rng.choice([1, 3, 100]), limit=10)
                else:
                    session.execute(cancel(sa.select(job).where(job.key == rng.choice(KEYS))))
                    time.sleep(rng.random() * 0.02)
                    session.commit() if rng.random() < 0.7 else session.rollback()
        except DBAPIError:
            pass
        time.sleep(rng.random() * 0.05)


ENDS = ((0.2, Retry(0)), (0.3, Snooze(0)), (0.35, Fail("no")), (0.4, Cancel("no")), (0.45, ValueError()))


def work(actor: Actor, *, url: str, name: str) -> None:
    """Run a Consumer whose handler ends in all ways, and may exit the process."""
    pace.RESCUE = 0.2
    job, rng = model_of(name), actor.rng

    def handle(session: Session, _: Any) -> None:
        if rng.random() < 0.25:
            session.execute(sa.select(1))
            for found in enqueue(session, new_job(job, rng)):
                if found.created:
                    actor.recorder.record("enqueueing", found.job.id)
        time.sleep(rng.random() * 0.02)
        chance = rng.random()
        if chance < 0.02:
            os._exit(1)
        for limit, signal in ENDS:
            if chance < limit:
                raise signal

    sizes = {"batch_size": rng.randint(1, 4), "concurrency": rng.randint(1, 3)}
    Consumer(job, handle, sessionmaker(engine_of(url)), poll_interval=0.1, **sizes).run()


# -- the test ----------------------------------------------------------------------------------------------------------


class Duplicates(Processes):
    """The processes of a test, and the history of what they do to one table."""

    def __init__(self, engine: sa.Engine, url: str, name: str, directory: Path, rng: random.Random) -> None:
        super().__init__(directory, rng)
        self.engine, self.job = engine, model_of(name)
        self._own, self._alive = {"url": url, "name": name}, list[Process]()
        self.unique = CONFIGURATIONS[name][1]

    def run(self, roles: Iterable[Role], *, jobs: int) -> None:
        """Let processes play these roles, and kill one of them each time when they have enqueued so many jobs."""
        self._alive = [self.start(role, role.__name__, **self._own) for role in roles]
        for _ in range(3):
            # A process may take seconds to begin, so that its work is counted, not the time.
            least = self._enqueued() + jobs
            self.wait_until(lambda least=least: self._goes_on() and self._enqueued() >= least, "jobs are enqueued")
            process = self.rng.choice(self._alive)
            process.kill()
            self._replace(process)
        for process in self._alive:
            process.kill()

    def _goes_on(self) -> bool:
        self._observe()
        for process in [each for each in self._alive if each.has_exited]:
            assert process.role is work, f"{process.name} has failed"
            self._replace(process)
        return True

    def _enqueued(self) -> int:
        return len(with_event(self.records(), "enqueueing"))

    def _replace(self, process: Process) -> None:
        self._alive[self._alive.index(process)] = self.start_again(process)

    def _observe(self) -> None:
        """Record how many jobs count, by key."""
        table = self.job.__table__
        counts = sa.true() if "status" not in table.c else table.c.status.in_(self.unique.states)
        with self.engine.connect() as connection:
            rows = connection.execute(sa.select(table.c.key, sa.func.count()).where(counts).group_by(table.c.key))
            self.recorder.record("observed", counts={row[0]: row[1] for row in rows})

    def drain(self) -> None:
        """Run what is left, also the jobs of killed workers."""
        consumer = Consumer(self.job, lambda session, each: None, sessionmaker(self.engine), poll_interval=0.1)
        active = JobFilter(states=("pending", "processing"))

        def is_empty() -> bool:
            with Session(self.engine) as session:
                return not QueueAdmin(session, self.job).count(active)

        with consumer:
            wait_until(is_empty, "all jobs have an end")

    def history(self) -> DuplicateHistory:
        with Session(self.engine) as session:
            found = QueueAdmin(session, self.job).jobs(limit=10**6)
            return DuplicateHistory(self.records(), {info.key: (info.state, info.last_error) for info in found})


# -- what must hold ----------------------------------------------------------------------------------------------------


@dataclass
class DuplicateHistory:
    """What the processes have recorded, and the final state and the last error of each job that has a row."""

    records: Sequence[Record]
    jobs: Mapping[int, tuple[str, str | None]]

    @cached_property
    def observed(self) -> list[Mapping[str, int]]:
        """How many jobs counted by key, each time."""
        return [record.details["counts"] for record in with_event(self.records, "observed")]

    @cached_property
    def enqueued(self) -> set[int | None]:
        """The jobs whose insertion was about to be committed."""
        return {record.key for record in with_event(self.records, "enqueueing")}

    @cached_property
    def duplicates(self) -> dict[int, str]:
        """The errors of the jobs that were cancelled for a duplicate."""
        return {key: error for key, (_, error) in self.jobs.items() if error and error.startswith("duplicate of job ")}


def no_two_duplicates_count(history: DuplicateHistory) -> Violations:
    """Of each key at most one job counts at any time."""
    for counts in history.observed:
        for key, number in counts.items():
            if number > 1:
                yield f"{number} jobs of {key!r} count"


def each_job_has_an_end(history: DuplicateHistory) -> Violations:
    """Each job that was committed has an end, and no other exists."""
    for key, (state, _) in history.jobs.items():
        if key not in history.enqueued:
            yield f"job {key} was never enqueued"
        if state not in {"completed", "failed", "cancelled"}:
            yield f"job {key} is {state}"


def duplicates_existed(history: DuplicateHistory) -> Violations:
    """A job that was cancelled for its duplicate names one that existed."""
    for key, error in history.duplicates.items():
        if int(duplicate_in(error) or 0) not in history.enqueued:
            yield f"job {key} names a duplicate that was never enqueued: {error}"


RULES = (no_two_duplicates_count, each_job_has_an_end, duplicates_existed)


def violations(history: DuplicateHistory) -> dict[str, list[str]]:
    """Return the violations of each rule by its name; empty if all hold."""
    return violations_of(RULES, history)
