"""Random histories of jobs that wait for others, on SQLite and MariaDB, with workers that are killed.

At the end nothing waits for ever, no job has run twice, none has run before what it waits for, and none stays cancelled
for a job that has come back.
"""

import asyncio
import enum
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, mapped_column, relationship, sessionmaker

from sqlaqueue import (
    AsyncConsumer,
    ConcurrencyLimit,
    Constant,
    Consumer,
    States,
    WaitFor,
    cancel,
    prepare,
    reconcile,
    requeue,
)
from tests.models import new_base
from tests.waits.models import job_class

pytestmark = pytest.mark.once

DEADLINE = 60.0
FAILING = 0.15
"""How often a handler fails while the history lasts."""
DRIVERS = {"sqlite": "sqlite+aiosqlite", "mariadb+pymysql": "mariadb+asyncmy"}


class State(enum.Enum):
    """Names in upper case, which are what the database has."""

    WAITING = 0
    PENDING = 1
    PROCESSING = 2
    COMPLETED = 3
    FAILED = 4
    CANCELLED = 5


# -- the queues --------------------------------------------------------------------------------------------------------


def queues(variant: str, seed: int) -> dict[str, Any]:
    """Return the classes: members, their batches, reports of batches, and chains of steps.

    A batch has a key of two columns, and may be part of another batch.

    :param variant: the strategies, separated by spaces; ``deleted`` if completed members are deleted.
    """
    base, chance = new_base(), random.Random(seed)
    *strategies, deleted = variant.split()
    states = States(**{state.name.lower(): state for state in State}) if seed % 2 else None
    shared: dict[str, Any] = {"lease": 2, "max_attempts": 2, "retry": Constant(0.05)}
    if states is not None:
        shared |= {"states": states, "columns": {"status": "status"}}

    def options() -> dict[str, Any]:
        return {**shared, "strategy": chance.choice(strategies)}

    def attributes(first: State = State.WAITING, **more: Any) -> dict[str, Any]:
        status = {"status": mapped_column(sa.Enum(State), default=first)} if states is not None else {}
        return {"id": mapped_column(sa.Integer, primary_key=True), **status, **more}

    def to_batch(prefix: str) -> tuple[dict[str, Any], Any]:
        columns = {f"{prefix}_{part}": mapped_column(sa.Integer) for part in ("id", "part")}
        return columns, sa.ForeignKeyConstraint([*columns], ["batch.id", "batch.part"])

    (of_member, member_key), (of_report, report_key), (of_batch, batch_key) = map(to_batch, ("batch", "batch", "whole"))
    part = mapped_column(sa.Integer, primary_key=True, default=7)
    batch_attributes = attributes(part=part, **of_batch)
    step_attributes = attributes(previous_id=mapped_column(sa.ForeignKey("step.id")))
    of_batches = options()
    # On MariaDB a claim that holds its transaction admits all jobs.
    limited = seed % 3 == 1 and of_batches["strategy"] == "update_status"
    found = [
        job_class(
            base,
            "Member",
            attributes(State.PENDING, **of_member, batch=relationship("Batch", back_populates="members")),
            (member_key,),
            on_complete="delete" if deleted == "deleted" else "keep",
            **options(),
        ),
        job_class(
            base,
            "Batch",
            batch_attributes
            | {
                "members": relationship("Member", back_populates="batch"),
                "whole": relationship("Batch", remote_side=[batch_attributes["id"], part], back_populates="parts"),
                "parts": relationship("Batch", back_populates="whole"),
            },
            (batch_key,),
            waits_for=("members", "parts"),
            extra_columns=("is_open",),
            flow_control=[ConcurrencyLimit(2)] if limited else [],
            **of_batches,
        ),
        job_class(
            base,
            "Report",
            attributes(**of_report, batch=relationship("Batch")),
            (report_key,),
            waits_for=WaitFor("batch", on_failure="cancel"),
            **options(),
        ),
        job_class(
            base,
            "Step",
            step_attributes | {"previous": relationship("Step", remote_side=[step_attributes["id"]])},
            waits_for="previous",
            **options(),
        ),
    ]
    columns = [sa.Column("kind", sa.String(20)), sa.Column("job", sa.Integer), sa.Column("early", sa.Integer)]
    sa.Table("effect", base.metadata, *columns)
    sa.Table("mood", base.metadata, sa.Column("failing", sa.Float))
    return {model.__name__: model for model in found}


def state(model: Any, *names: str) -> sa.ColumnElement[bool]:
    """Return the condition that a job is in one of some states."""
    by_name = isinstance(model.__table__.c.status.type, sa.Enum) and model.__table__.c.status.type.enum_class
    condition: sa.ColumnElement[bool] = model.status.in_([State[name.upper()] if by_name else name for name in names])
    return condition


def unfinished(models: Mapping[str, Any], kind: str, job: Any) -> Any:
    """Return the SELECT of how many jobs a job should have waited for; None for a kind that waits for none."""
    member, batch, _, step = models.values()
    number = sa.select(sa.func.count())
    ends = ("completed", "failed", "cancelled")
    if kind == "Batch":
        members = number.where(member.batch_id == job.id, member.batch_part == job.part, ~state(member, *ends))
        parts = number.where(batch.whole_id == job.id, batch.whole_part == job.part, ~state(batch, *ends))
        return sa.select(members.scalar_subquery() + parts.scalar_subquery())
    if kind == "Report":
        return number.where(batch.id == job.batch_id, ~state(batch, "completed"))
    return number.where(step.id == job.previous_id, ~state(step, "completed")) if kind == "Step" else None


# -- a worker ----------------------------------------------------------------------------------------------------------


def handler(models: Mapping[str, Any], kind: str, chance: random.Random) -> Any:
    """Return a handler that has an effect, and fails now and then."""

    def handle(session: Session, job: Any) -> None:
        number = unfinished(models, kind, job)
        early: Any = 0 if number is None else number.scalar_subquery()
        tables = models[kind].metadata.tables
        # Written first: a transaction of SQLite that has read before could find the database locked.
        session.execute(sa.insert(tables["effect"]).values(kind=kind, job=job.id, early=early))
        if chance.random() < (session.scalar(sa.select(tables["mood"].c.failing)) or 0):
            message = "by chance"
            raise ValueError(message)

    return handle


def main(url: str, api: str, seed: str, number: str, variant: str) -> None:
    models, chance = queues(variant, int(seed)), random.Random(f"{seed} {number}")
    if api == "async":
        asyncio.run(_serve(url, models, chance))
        return
    sessions = sessionmaker(prepare(sa.create_engine(url, pool_size=30)))
    made = [Consumer(model, handler(models, name, chance), sessions, concurrency=2) for name, model in models.items()]
    Consumer.run_all(*made)


async def _serve(url: str, models: dict[str, Any], chance: random.Random) -> None:
    driver, rest = url.split(":", 1)
    sessions = async_sessionmaker(prepare(create_async_engine(f"{DRIVERS[driver]}:{rest}", pool_size=30)))

    def made_async(name: str) -> Any:
        handle = handler(models, name, chance)

        async def handle_async(session: AsyncSession, job: Any) -> None:
            await session.run_sync(handle, job)

        return handle_async

    made = [AsyncConsumer(model, made_async(name), sessions, concurrency=2) for name, model in models.items()]
    await AsyncConsumer.run_all(*made)


# -- the history -------------------------------------------------------------------------------------------------------


class History:
    """What a program does with the queues while workers run."""

    def __init__(self, url: str, log: Path, seed: int, variant: str, api: str) -> None:
        self.url, self.log, self.arguments = url, log, [url, api, str(seed)]
        self.name = f"{url.split(':', 1)[0]}, seed {seed}, {variant}, {api}"
        self.variant, self.chance = variant, random.Random(seed)
        self.models = queues(variant, seed)
        self.member, self.batch, self.report, self.step = self.models.values()
        self.tables = self.batch.metadata.tables
        self.engine = prepare(sa.create_engine(url))
        self.batch.metadata.create_all(self.engine)
        with self.engine.begin() as connection:
            connection.execute(sa.insert(self.tables["mood"]).values(failing=FAILING))
        self.numbers = count(1)
        self.workers: list[subprocess.Popen[bytes]] = []
        self.done = Counter[str]()

    def start_worker(self) -> None:
        arguments = [*self.arguments, str(sum(self.done.values())), self.variant]
        with self.log.open("ab") as log:
            self.workers.append(subprocess.Popen([sys.executable, "-m", __name__, *arguments], stderr=log))

    def wait_for_workers(self) -> None:
        """Wait until all Consumers run: it takes a process longer to start than many a history lasts."""
        end, running = (
            time.monotonic() + DEADLINE,
            sa.select(sa.func.count()).select_from(self.tables["sqlaqueue_consumer"]),
        )
        with self.engine.connect() as connection:
            while connection.scalar(running) < len(self.workers) * len(self.models):
                connection.rollback()
                assert time.monotonic() < end, self.log.read_text()
                time.sleep(0.05)

    def kill_worker(self) -> None:
        worker = self.workers.pop(self.chance.randrange(len(self.workers)))
        worker.kill()
        worker.wait()
        self.start_worker()

    # -- what a program does -------------------------------------------------------------------------------------------

    def write_first(self, session: Session) -> None:
        """Lock SQLite's database: what has been read before would be old by the time of the first change."""
        mood = self.tables["mood"]
        session.execute(sa.update(mood).values(failing=mood.c.failing))

    def new(self, model: Any, **attributes: Any) -> Any:
        # SQLite numbers no key of two columns, and may give a new row the number of one that was deleted.
        return model(id=next(self.numbers), **attributes)

    def add_batch(self, session: Session) -> None:
        job = self.new(self.batch, members=[self.new(self.member) for _ in range(self.chance.randrange(5))])
        session.add_all([job, *(self.report(batch=job) for _ in range(self.chance.randrange(3)))])
        if self.chance.random() < 0.3:
            job.parts = [self.new(self.batch, members=[self.new(self.member)]) for _ in range(self.chance.randrange(3))]
        if self.chance.random() < 0.1:
            session.flush()
            session.rollback()

    def open_batch(self, session: Session) -> None:
        job = self.new(self.batch, is_open=True)
        session.add(job)
        session.commit()
        for _ in range(2):
            session.add(self.new(self.member, batch_id=job.id, batch_part=job.part))
            session.commit()
        job.is_open = False

    def add_chain(self, session: Session) -> None:
        step = None
        for _ in range(self.chance.randrange(1, 5)):
            step = self.step(previous=step)
            session.add(step)

    def add_late(self, session: Session) -> None:
        """To one that may begin at this moment."""
        session.execute(reconcile(self.batch))
        if key := self._one(session, self.batch, "pending", "waiting"):
            session.add(self.new(self.member, batch_id=key, batch_part=7))
        if key := self._one(session, self.batch, "processing", "pending", "waiting"):
            session.add(self.report(batch_id=key, batch_part=7))
        if key := self._one(session, self.step, "processing", "pending", "waiting", "failed"):
            session.add(self.step(previous_id=key))

    def _one(self, session: Session, model: Any, *names: str) -> Any:
        keys = session.scalars(sa.select(model.id).where(state(model, *names))).all()
        # Often the last one, which may begin soon.
        return self.chance.choice([*keys, keys[-1]]) if keys else None

    def requeue_failed(self, session: Session) -> None:
        """Jobs for which others still wait: those would have to run again otherwise."""
        member, batch, step = self.member, self.batch, self.step
        waits = sa.select(batch.id).where(state(batch, "waiting")).with_for_update(skip_locked=True)
        keys = session.scalars(waits).all()
        session.execute(requeue(sa.select(member).where(state(member, "failed"), member.batch_id.in_(keys))))
        is_free = sa.or_(batch.whole_id.is_(None), batch.whole_id.in_(keys))
        session.execute(requeue(sa.select(batch).where(state(batch, "failed"), is_free)))
        session.execute(requeue(sa.select(step).where(state(step, "failed"))))

    def cancel_batch(self, session: Session) -> None:
        if key := self._one(session, self.batch, "waiting"):
            session.execute(cancel(sa.select(self.batch).where(self.batch.id == key)))

    def delete_member(self, session: Session) -> None:
        if key := self._one(session, self.member, "pending"):
            member = self.member
            session.execute(sa.delete(member).where(member.id == key, state(member, "pending")))

    def live(self, seconds: float, *, kills: float) -> None:
        """Do something every few milliseconds.

        :param kills: how many workers are killed a second.
        """
        actions: list[tuple[Callable[[Session], None], int]] = [
            (self.add_batch, 8),
            (self.open_batch, 2),
            (self.add_chain, 4),
            (self.add_late, 8),
            (self.requeue_failed, 3),
            (self.cancel_batch, 1),
            (self.delete_member, 1),
        ]
        self.wait_for_workers()
        begun = time.monotonic()
        killed = begun + 2
        while time.monotonic() - begun < seconds:
            if time.monotonic() > killed:
                self.kill_worker()
                killed += 1 / kills
                self.done["killed"] += 1
            [(action, _)] = self.chance.choices(actions, [weight for _, weight in actions])
            try:
                with Session(self.engine) as session:
                    self.write_first(session)
                    action(session)
                    session.commit()
                self.done[action.__name__] += 1
            except DBAPIError as error:
                self.done[f"{action.__name__}: {str(error.orig)[:60]}"] += 1
            time.sleep(self.chance.random() * 0.04)

    # -- the end -------------------------------------------------------------------------------------------------------

    def states(self, session: Session) -> dict[str, Counter[str]]:
        found = {}
        for name, model in self.models.items():
            rows = session.execute(sa.select(model.status, sa.func.count()).group_by(model.status))
            found[name] = Counter({getattr(key, "name", key).lower(): number for key, number in rows})
        return found

    def finish(self) -> None:
        """Let everything end: no handler fails any more, and what has failed is requeued."""
        end = time.monotonic() + DEADLINE
        with self.engine.begin() as connection:
            connection.execute(sa.update(self.tables["mood"]).values(failing=0))
            # Those whose members were refused, or whose transaction has met the lock of another.
            connection.execute(sa.update(self.batch.__table__).values(is_open=False))
        while True:
            with suppress(DBAPIError), Session(self.engine) as session:
                self.write_first(session)
                self.requeue_failed(session)
                session.commit()
                states = self.states(session)
                if not any(set(each) - {"completed", "cancelled", "failed"} for each in states.values()):
                    return
                assert time.monotonic() < end, f"{self.name}: jobs wait for ever: {states} {self.done}"
            time.sleep(0.1)

    def check(self) -> None:
        effect, batch, report = self.tables["effect"], self.batch, self.report
        runs = sa.select(effect.c.kind, effect.c.job, sa.func.count(), sa.func.max(effect.c.early))
        is_there = sa.exists().where(batch.id == report.batch_id, state(batch, "failed", "cancelled"))
        lost = sa.select(report.id).where(state(report, "cancelled"), report.cancelled_for.is_not(None), ~is_there)
        with Session(self.engine) as session:
            effects = session.execute(runs.group_by(effect.c.kind, effect.c.job)).all()
            summary = f"{self.name}: {dict(self.done)}, {len(effects)} runs, {self.states(session)}"
            found = {
                "twice": [tuple(row) for row in effects if row[2] > 1],
                "early": [tuple(row) for row in effects if row[3]],
                "cancelled for a job that came back": session.scalars(lost).all(),
            }
        sys.stdout.write(f"{summary}\n")
        assert not any(found.values()), f"{summary}: {found}"
        assert len(effects) > 10

    def close(self) -> None:
        for worker in self.workers:
            worker.kill()
            worker.wait()
        self.engine.dispose()


@contextmanager
def _history(url: str, log: Path, seed: int, variant: str, api: str) -> Iterator[History]:
    history = History(url, log, seed, variant, api)
    try:
        for _ in range(2):
            history.start_worker()
        yield history
    finally:
        history.close()


def _variant(place: str, seed: int) -> str:
    strategies = "update_status" if place.startswith("sqlite") else "update_status batch_select"
    return f"{strategies} {'deleted' if seed % 4 == 3 else 'kept'}"


@pytest.mark.thorough
@pytest.mark.few(1)
def test_a_history_with_killed_workers(place: str, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    seed = pytestconfig.getoption("--seed") or 7
    with _history(place, tmp_path / "log", seed, _variant(place, seed), "sync") as history:
        history.live(4, kills=0.4)
        history.finish()
        history.check()


@pytest.mark.thorough
@pytest.mark.parametrize("api", ["sync", "async"])
@pytest.mark.parametrize("seed", range(8))
def test_histories(place: str, tmp_path: Path, seed: int, api: str) -> None:
    """Long ones, also with members that are deleted when they complete, and with limits."""
    with _history(place, tmp_path / "log", seed, _variant(place, seed), api) as history:
        history.live(25, kills=0.3)
        history.finish()
        history.check()


if __name__ == "__main__":
    main(*sys.argv[1:])
