"""The roles of a soak's processes: workers with threads and with tasks, a producer, an operator, and a monitor."""

import asyncio
import contextlib
import gc
import random
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from sqlaqueue import AsyncConsumer, Consumer, WaitTimeout, copy_in, enqueue, requeue, wait
from sqlaqueue.admin import QueueAdmin, doctor
from sqlaqueue.exc import HandlerNotStopped
from sqlaqueue.otel import instrument as trace
from sqlaqueue.prometheus import QueueCollector, instrument
from sqlaqueue.web import Access, Dashboard
from tests.faults.processes import Actor
from tests.soak import queues
from tests.soak.queues import KINDS, QUEUES, Call, Entry, Import, Letter, Mail, Reminder, Row, Step, Work, add

GRACE = 10.0
"""Seconds for which a worker that stops waits for its handlers."""

CUSTOMERS = 40

# -- workers -----------------------------------------------------------------------------------------------------------


def run_worker(actor: Actor, *, url: str) -> None:
    """Run all queues but one in threads."""
    sessions = sessionmaker(sa.create_engine(url, pool_size=20, max_overflow=0))
    common: dict[str, Any] = {"grace": GRACE, "worker_name": actor.name}

    def consumer(model: type[Any], handler: Any, concurrency: int = 1, **more: Any) -> Consumer[Any]:
        made = Consumer(model, handler, sessions, concurrency=concurrency, **common, **more)
        instrument(made)
        return made

    consumers = [
        consumer(Mail, queues.handle, 4),
        consumer(Entry, queues.handle_several, 2, batch=True, batch_size=50),
        consumer(Step, queues.handle, 2),
        consumer(Row, queues.handle_several, batch=True),
        consumer(Import, queues.handle),
        consumer(Call, queues.handle_call),
    ]
    trace(consumers[0])
    # It ends the process in any case; the run measures how long it took.
    with contextlib.suppress(HandlerNotStopped):
        Consumer.run_all(*consumers)


def run_async_worker(actor: Actor, *, url: str) -> None:
    """Run all queues but one in tasks, and the schedules."""
    asyncio.run(_run_async_worker(actor, url))


async def _run_async_worker(actor: Actor, url: str) -> None:
    sessions = async_sessionmaker(create_async_engine(url, pool_size=24, max_overflow=0))
    common: dict[str, Any] = {"grace": GRACE, "worker_name": actor.name}

    def consumer(model: type[Any], handler: Any, concurrency: int = 1, **more: Any) -> AsyncConsumer[Any]:
        made = AsyncConsumer(model, handler, sessions, concurrency=concurrency, **common, **more)
        instrument(made)
        return made

    await AsyncConsumer.run_all(
        consumer(Letter, queues.handle_async, 4, schedules=queues.schedules()),
        consumer(Reminder, queues.handle_async, 4),
        consumer(Mail, queues.handle_async, 2, timeout=60),
        consumer(Entry, queues.handle_several_async, batch=True, batch_size=50),
        consumer(Row, queues.handle_several_async, batch=True),
        consumer(Import, queues.handle_async),
    )


# -- programs that go on while the database fails ---------------------------------------------------------------------


class Rounds:
    """Calls functions, each at an interval, until SIGTERM. A call that fails for its connection is counted only."""

    def __init__(self, actor: Actor) -> None:
        self._actor, self._stopping = actor, threading.Event()
        self._functions: list[list[Any]] = []
        self._failed = 0
        signal.signal(signal.SIGTERM, lambda *_: self._stopping.set())

    def every(self, seconds: float, function: Callable[[], object]) -> None:
        self._functions.append([time.monotonic() + seconds, seconds, function])

    def run(self) -> None:
        while not self._stopping.is_set():
            entry = min(self._functions, key=lambda each: each[0])
            self._stopping.wait(max(entry[0] - time.monotonic(), 0))
            if self._stopping.is_set():
                return
            # One that is late is not made up for: the load stays steady.
            entry[0] = max(entry[0] + entry[1], time.monotonic())
            try:
                entry[2]()
            except (SQLAlchemyError, OSError, WaitTimeout) as error:
                self._failed += 1
                print(f"failed: {type(error).__name__}: {str(error).splitlines()[0][:200]}")
                self._stopping.wait(0.2)


# -- the producer ------------------------------------------------------------------------------------------------------

STEPS = 10
"""Transactions a second."""


def run_producer(actor: Actor, *, url: str, rate: float) -> None:
    """Enqueue jobs at a steady rate, in each way that there is."""
    engine, rng, rounds = sa.create_engine(url), actor.rng, Rounds(actor)
    producer = _Producer(engine, rng, rate / STEPS)
    rounds.every(1 / STEPS, producer.step)
    rounds.run()


class _Producer:
    """Makes a number of jobs in each transaction, of one queue at a time."""

    def __init__(self, engine: sa.Engine, rng: random.Random, jobs: float) -> None:
        self._engine, self._rng, self._jobs, self._owed = engine, rng, jobs, 0.0
        self._ways = self._turns()

    def _turns(self) -> Iterator[Callable[[Session, int], None]]:
        while True:
            yield from (self._mail, self._entries, self._letters, self._mail, self._steps)
            yield from (self._entries, self._reminders, self._letters, self._batch, self._mail)

    def step(self) -> None:
        self._owed = min(self._owed + self._jobs, 3 * self._jobs + 1)
        number, self._owed = int(self._owed), self._owed % 1
        if number:
            with Session(self._engine) as session:
                next(self._ways)(session, number)
                session.commit()

    def _values(self, *, kinds: dict[str, int] = KINDS) -> dict[str, Any]:
        [kind] = self._rng.choices([*kinds], [*kinds.values()])
        values = {"kind": kind, "customer": self._rng.randrange(CUSTOMERS)}
        if kind == "later":
            values["run_at"] = datetime.now(UTC) + timedelta(seconds=self._rng.uniform(1, 20))
        return values

    def _mail(self, session: Session, number: int) -> None:
        session.add_all(Mail(**self._values()) for _ in range(number))

    def _entries(self, session: Session, number: int) -> None:
        rows = [self._values(kinds={"plain": 97, "flaky": 2, "broken": 1}) for _ in range(number)]
        copy_in(session, Entry, rows)

    def _letters(self, session: Session, number: int) -> None:
        rows = [self._values(kinds={"plain": 97, "flaky": 2, "broken": 1}) for _ in range(number)]
        session.execute(sa.insert(Letter), rows)

    def _steps(self, session: Session, number: int) -> None:
        session.add_all(Step(**self._values()) for _ in range(number))

    def _reminders(self, session: Session, number: int) -> None:
        jobs = [Reminder(**self._values(kinds={"plain": 50, "flaky": 5, "later": 45})) for _ in range(number)]
        enqueue(session, jobs, on_duplicate=self._rng.choice(["skip", "replace", "replace_keep_time"]))

    def _batch(self, session: Session, number: int) -> None:
        session.add(Import(rows=[Row() for _ in range(number)]))


# -- the operator ------------------------------------------------------------------------------------------------------


def run_operator(actor: Actor, *, url: str) -> None:
    """Cancel, mend and requeue, pause, examine, and wait for results, again and again."""
    engine = sa.create_engine(url)
    operator, rounds = _Operator(engine, actor.rng), Rounds(actor)
    rounds.every(1, operator.call)
    rounds.every(2, operator.cancel)
    rounds.every(5, operator.mend)
    rounds.every(10, operator.look)
    rounds.every(45, operator.pause)
    rounds.every(90, operator.examine)
    rounds.run()


class _Operator:
    def __init__(self, engine: sa.Engine, rng: random.Random) -> None:
        self._sessions, self._rng = sessionmaker(engine), rng

    def call(self) -> None:
        one, other = self._rng.randrange(1000), self._rng.randrange(1000)
        with self._sessions() as session:
            call = add.enqueue(session, one, other)
            session.commit()
        result = wait(self._sessions, call, timeout=20)
        assert result.value == one + other, f"{one} + {other} is not {result.value}"

    def cancel(self) -> None:
        """Cancel jobs that are not due yet."""
        model = self._rng.choice([Mail, Step, Reminder])
        with self._sessions() as session:
            later = sa.select(model.id).where(model.status == "pending", model.kind == "later").limit(2)
            QueueAdmin(session, model).cancel(session.scalars(later).all())

    def mend(self) -> None:
        """Mend what has failed, and requeue it, in one transaction for each queue."""
        for model in queues.WORK:
            with self._sessions() as session:
                failed = session.scalars(sa.select(model).where(model.status == "failed").limit(200)).all()
                for job in failed:
                    job.kind = "plain"
                session.flush()
                if failed:
                    session.execute(requeue(failed))
                session.commit()

    def look(self) -> None:
        model: type[Any] = self._rng.choice(QUEUES)
        with self._sessions() as session:
            admin = QueueAdmin(session, model)
            admin.stats()
            admin.failures()
            admin.consumers()
            if job := session.scalars(sa.select(model).limit(1)).first():
                admin.explain(job)

    def pause(self) -> None:
        model: type[Work] = self._rng.choice(queues.WORK)
        with self._sessions() as session:
            QueueAdmin(session, model).pause(reason="a soak")
        time.sleep(self._rng.uniform(1, 5))
        self.resume(model)

    def resume(self, model: type[Any]) -> None:
        """Resume a queue, also while the database fails: nobody else would."""
        for _ in range(100):
            with contextlib.suppress(DBAPIError), self._sessions() as session:
                QueueAdmin(session, model).resume()
                return
            time.sleep(0.5)

    def examine(self) -> None:
        with self._sessions() as session:
            findings = doctor(session, *QUEUES)
            print("doctor:", [finding.code for finding in findings])


# -- the monitor -------------------------------------------------------------------------------------------------------

PAGES = 4


def run_monitor(actor: Actor, *, url: str) -> None:
    """Collect the metrics of an exporter, and read the dashboard by following its links."""
    sessions = sessionmaker(sa.create_engine(url))
    collector = QueueCollector(QUEUES, sessions)
    board = Dashboard(QUEUES, sessions, access=lambda _: Access(read=True, act=True, user="ada"))
    rounds = Rounds(actor)
    rounds.every(5, lambda: list(collector.collect()))
    with asyncio.Runner() as runner:
        rounds.every(10, lambda: runner.run(_browse(board, actor.rng)))
        rounds.every(60, gc.collect)
        rounds.run()


async def _browse(board: Any, rng: random.Random) -> None:
    transport = httpx.ASGITransport(app=board)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", follow_redirects=True) as browser:
        path = "/"
        for _ in range(PAGES):
            page = await browser.get(path)
            if page.status_code >= 400:
                print(f"dashboard: {path} answers {page.status_code}")
                return
            links = re.findall(r'href="(/queues/[^"#]*)"', page.text)
            path = rng.choice(links).replace("&amp;", "&") if links else "/"


ROLES: dict[str, Callable[..., None]] = {
    "sync": run_worker,
    "async": run_async_worker,
    "producer": run_producer,
    "operator": run_operator,
    "monitor": run_monitor,
}
