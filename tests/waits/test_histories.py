"""Random histories of batches and chains, with workers that are killed and a server that crashes.

At the end nothing waits for ever, no job has run twice, and none has run before what it waits for.
"""

import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from sqlaqueue import cancel, requeue
from tests.conftest import SERVERS
from tests.servers import Database
from tests.waits.models import STRATEGIES, faults
from tests.waits.worker import queues

pytestmark = pytest.mark.once

DEADLINE = 90.0
FAILING = 0.15
"""How often a handler fails while the history lasts."""


class History:
    """What a program does with the queues while workers run."""

    def __init__(self, database: Database, seed: int, strategies: list[str], api: str, *, deleted: bool) -> None:
        self.server, self.url, self.seed, self.api, self.deleted = database.server, database.url(), seed, api, deleted
        self.strategies, self.chance = strategies, random.Random(seed)
        self.models = queues(strategies, deleted=deleted)
        self.engine = sa.create_engine(self.url, pool_pre_ping=True)
        self.models["Batch"].metadata.create_all(self.engine)
        self.execute(f"INSERT INTO mood VALUES ({FAILING})")
        self.workers: list[subprocess.Popen[bytes]] = []
        self.done = Counter[str]()

    def execute(self, statement: Any) -> Any:
        with self.engine.begin() as connection:
            result = connection.execute(sa.text(statement) if isinstance(statement, str) else statement)
            return result.all() if result.returns_rows else result.rowcount

    def start_worker(self) -> None:
        arguments = [self.url, self.api, f"{self.seed} {len(self.done)}", str(self.deleted), *self.strategies]
        self.workers.append(
            subprocess.Popen([sys.executable, "-m", "tests.waits.worker", *arguments], stderr=subprocess.DEVNULL)
        )

    def kill_worker(self) -> None:
        worker = self.workers.pop(self.chance.randrange(len(self.workers)))
        worker.kill()
        worker.wait()
        self.start_worker()

    def crash_server(self) -> None:
        self.server.restart("immediate")
        self.engine.dispose()

    # -- what a program does -------------------------------------------------------------------------------------------

    def add_batch(self, session: Session) -> None:
        batch, member, report = (self.models[name] for name in ("Batch", "Member", "Report"))
        job = batch(members=[member() for _ in range(self.chance.randrange(5))])
        session.add_all([job, *(report(batch=job) for _ in range(self.chance.randrange(3)))])
        if self.chance.random() < 0.1:
            session.flush()
            session.rollback()

    def open_batch(self, session: Session) -> None:
        job = self.models["Batch"](is_open=True)
        session.add(job)
        session.commit()
        for _ in range(2):
            session.add(self.models["Member"](batch_id=job.id))
            session.commit()
        job.is_open = False

    def add_chain(self, session: Session) -> None:
        step = None
        for _ in range(self.chance.randrange(1, 5)):
            step = self.models["Step"](previous=step)
            session.add(step)

    def add_late(self, session: Session) -> None:
        """To one that may begin at this moment."""
        batch, report, step = (self.models[name] for name in ("Batch", "Report", "Step"))
        if key := self._one(session, batch, "waiting"):
            session.add(self.models["Member"](batch_id=key))
        if key := self._one(session, batch, "processing", "pending", "waiting"):
            session.add(report(batch_id=key))
        if key := self._one(session, step, "processing", "pending", "waiting", "failed"):
            session.add(step(previous_id=key))

    def _one(self, session: Session, model: Any, *states: str) -> Any:
        table = model.__table__
        found = sa.select(table.c.id).where(table.c.status.in_(states)).order_by(sa.func.random()).limit(1)
        return session.scalar(found)

    def requeue_failed(self, session: Session) -> None:
        """Jobs for which others still wait: those would have to run again otherwise."""
        batch, member, step = (self.models[name] for name in ("Batch", "Member", "Step"))
        waits = sa.select(batch.id).where(batch.status == "waiting").with_for_update(skip_locked=True)
        keys = session.scalars(waits).all()
        session.execute(requeue(sa.select(member).where(member.status == "failed", member.batch_id.in_(keys))))
        session.execute(requeue(sa.select(batch).where(batch.status == "failed")))
        session.execute(requeue(sa.select(step).where(step.status == "failed")))

    def cancel_batch(self, session: Session) -> None:
        batch = self.models["Batch"]
        if key := self._one(session, batch, "waiting"):
            session.execute(cancel(sa.select(batch).where(batch.id == key)))

    def delete_member(self, session: Session) -> None:
        session.execute(
            sa.text("DELETE FROM member WHERE id IN (SELECT id FROM member WHERE status = 'pending' LIMIT 1)")
        )

    def live(self, seconds: float, *, kills: float, crashes: int) -> None:
        """Do something every few milliseconds.

        :param kills: how many workers are killed a second.
        :param crashes: how often the server crashes.
        """
        actions: list[tuple[Callable[[Session], None], int]] = [
            (self.add_batch, 8),
            (self.open_batch, 2),
            (self.add_chain, 4),
            (self.add_late, 4),
            (self.requeue_failed, 1),
            (self.cancel_batch, 1),
            (self.delete_member, 1),
        ]
        begun, crashed = time.monotonic(), 0
        killed = begun + 2
        while (passed := time.monotonic() - begun) < seconds:
            if time.monotonic() > killed:
                self.kill_worker()
                killed += 1 / kills
                self.done["killed"] += 1
            if crashed < crashes and passed > (crashed + 1) * seconds / (crashes + 1):
                self.crash_server()
                crashed += 1
                self.done["crashes"] += 1
            [(action, _)] = self.chance.choices(actions, [weight for _, weight in actions])
            try:
                with Session(self.engine) as session:
                    action(session)
                    session.commit()
                self.done[action.__name__] += 1
            except DBAPIError as error:
                self.done[f"{action.__name__}: {type(error.orig).__name__}"] += 1
            time.sleep(self.chance.random() * 0.04)

    # -- the end -------------------------------------------------------------------------------------------------------

    def states(self) -> dict[str, Counter[str]]:
        found = {}
        for name, model in self.models.items():
            rows = self.execute(f"SELECT status, count(*) FROM {model.__table__.name} GROUP BY 1")
            found[name] = Counter(dict(tuple(row) for row in rows))
        return found

    def finish(self) -> None:
        """Let everything end: no handler fails any more, and what has failed is requeued."""
        self.execute("UPDATE mood SET failing = 0")
        end = time.monotonic() + DEADLINE
        while any(set(states) - {"completed", "cancelled", "failed"} for states in self.states().values()):
            with suppress(DBAPIError), Session(self.engine) as session:
                self.requeue_failed(session)
                session.commit()
            assert time.monotonic() < end, f"seed {self.seed}: jobs wait for ever: {self.states()} {self.done}"
            time.sleep(0.1)

    def check(self) -> None:
        effects = self.execute("SELECT kind, key, count(*), max(early) FROM effect GROUP BY 1, 2")
        twice = [tuple(row) for row in effects if row[2] > 1]
        early = [tuple(row) for row in effects if row[3]]
        with self.engine.connect() as connection:
            wrong = faults(connection, *self.models.values())
        summary = (
            f"seed {self.seed}, {self.strategies}, {self.api}: {dict(self.done)}, {len(effects)} runs, {self.states()}"
        )
        sys.stdout.write(f"{summary}\n")
        found = {"twice": twice, "early": early, "wrong": wrong}
        assert not any(found.values()), f"{summary}: {found}"
        assert self.execute("SELECT count(*) FROM effect")[0][0] > 10

    def close(self) -> None:
        for worker in self.workers:
            worker.kill()
            worker.wait()
        self.engine.dispose()


@contextmanager
def _history(database: Database, seed: int, strategies: list[str], api: str, *, deleted: bool) -> Iterator[History]:
    history = History(database, seed, strategies, api, deleted=deleted)
    try:
        for _ in range(2):
            history.start_worker()
        yield history
    finally:
        history.close()


def _strategies(seed: int) -> list[str]:
    """Return one for each class; three seeds are each strategy alone, the others mix them."""
    return [STRATEGIES[seed]] * 4 if seed < len(STRATEGIES) else random.Random(seed).choices(STRATEGIES, k=4)


def test_a_history_with_killed_workers(database: Database, pytestconfig: pytest.Config) -> None:
    seed = pytestconfig.getoption("--seed") or 7
    with _history(
        database, seed, ["update_status", "delete_returning", "batch_select", "update_status"], "sync", deleted=False
    ) as history:
        history.live(5, kills=0.5, crashes=0)
        history.finish()
        history.check()


@pytest.mark.thorough
@pytest.mark.parametrize("api", ["sync", "async"])
@pytest.mark.parametrize("seed", range(8))
def test_histories(pytestconfig: pytest.Config, postgres_version: int, seed: int, api: str) -> None:
    """Long ones, also with a server that crashes, and with members that are deleted when they complete."""
    with (
        pytestconfig.stash[SERVERS].own(postgres_version) as server,
        server.database() as database,
        _history(database, seed, _strategies(seed), api, deleted=seed % 2 == 1) as history,
    ):
        history.live(25, kills=0.5, crashes=2)
        history.finish()
        history.check()
