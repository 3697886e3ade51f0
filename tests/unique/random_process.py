"""One process of the random histories: a producer, an administrator or a worker. It is killed at any moment.

    python -m tests.unique.random_process ROLE URL CONFIGURATION SEED FILE

It appends the keys of the jobs whose insertion was committed to FILE, one line for each transaction.
"""

from __future__ import annotations

import os
import random
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session, sessionmaker

import sqlaqueue.mariadb
from sqlaqueue import Cancel, Consumer, Fail, JobExists, Retry, Snooze, Unique, admin, cancel, enqueue
from sqlaqueue.consumer import pace
from tests.unique.models import make_job

KEYS = "abcdefghijkl"

CONFIGURATIONS: dict[str, tuple[str, Unique]] = {
    "unfinished": ("update_status", Unique("key")),
    "waiting": ("update_status", Unique("key", states=("pending",))),
    "waiting, on_return=wait": ("update_status", Unique("key", states=("pending",), on_return="wait")),
    "held": ("batch_select", Unique("key")),
    "messages": ("delete_returning", Unique("key")),
    "rows are messages": ("rows_are_messages", Unique("key")),
}


def main() -> None:
    """Run one role until the process is killed, or told to stop by a signal."""
    role, url, name, seed, file = sys.argv[1:]
    kind, unique = CONFIGURATIONS[name]
    job = make_job(kind, unique, max_attempts=4, lease=1)
    engine = sa.create_engine(url, pool_size=5)
    if engine.dialect.name == "mariadb":
        sqlaqueue.mariadb.prepare(engine)
    rng = random.Random(int(seed))
    with Path(file).open("a", buffering=1) as log:
        ROLES[role](engine, job, rng, log)


def produce(engine: sa.Engine, job: Any, rng: random.Random, log: Any) -> None:
    """Enqueue jobs, by all ways, in transactions of which some are rolled back."""
    ways = ["skip", "skip", "raise", "insert"] + [
        "replace",
        "replace_keep_time",
    ] * job.__queue_spec__.strategy.tells_running_apart
    while True:
        jobs = [job(id=uuid.uuid4().int >> 98, key=rng.choice(KEYS)) for _ in range(rng.randint(1, 3))]
        way = rng.choice(ways)
        try:
            with Session(engine) as session:
                if way == "insert":
                    session.add(jobs[0])
                    session.flush()
                    created = [jobs[0].id]
                else:
                    found = enqueue(session, jobs, on_twin=way)  # type: ignore[arg-type] # one of its values
                    created = [each.job.id for each in found if each.created]
                time.sleep(rng.random() * 0.02)
                if rng.random() < 0.8:
                    # Written before the commit: whether a killed process has committed is found out from the table.
                    log.write(" ".join(map(str, created)) + "\n")
                    session.commit()
        except (DBAPIError, JobExists):
            pass
        time.sleep(rng.random() * 0.02)


def administrate(engine: sa.Engine, job: Any, rng: random.Random, _: Any) -> None:
    """Requeue and cancel jobs."""
    finished = admin.JobFilter(states=("failed", "cancelled"))
    while True:
        try:
            with Session(engine) as session:
                if rng.random() < 0.6:
                    admin.requeue(session, job, finished, batch_size=rng.choice([1, 3, 100]), limit=10)
                else:
                    session.execute(cancel(sa.select(job).where(job.key == rng.choice(KEYS))))
                    time.sleep(rng.random() * 0.02)
                    session.commit() if rng.random() < 0.7 else session.rollback()
        except DBAPIError:
            pass
        time.sleep(rng.random() * 0.05)


def work(engine: sa.Engine, job: Any, rng: random.Random, log: Any) -> None:
    """Run a Consumer whose handler ends in all ways."""
    pace.RESCUE = 0.2

    def handle(session: Session, each: Any) -> None:
        chance = rng.random()
        if chance < 0.25:
            session.execute(sa.select(1))
            for found in enqueue(session, job(id=uuid.uuid4().int >> 98, key=rng.choice(KEYS))):
                if found.created:
                    log.write(f"{found.job.id}\n")
        time.sleep(rng.random() * 0.02)
        chance = rng.random()
        if chance < 0.02:
            os._exit(1)
        for limit, signal in (
            (0.2, Retry(0)),
            (0.3, Snooze(0)),
            (0.35, Fail("no")),
            (0.4, Cancel("no")),
            (0.45, ValueError()),
        ):
            if chance < limit:
                raise signal

    consumer = Consumer(
        job,
        handle,
        sessionmaker(engine),
        batch_size=rng.randint(1, 4),
        concurrency=rng.randint(1, 3),
        poll_interval=0.1,
    )
    consumer.run()


ROLES = {"producer": produce, "administrator": administrate, "worker": work}

if __name__ == "__main__":
    main()
