"""The roles of processes that work on a queue of jobs: run a Consumer, enqueue jobs, or run a test under a mutant."""

import asyncio
import contextlib
import importlib
import inspect
import os
import random
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, configure_mappers, sessionmaker

from sqlaqueue import AsyncConsumer, Consumer
from sqlaqueue.consumer import pace
from sqlaqueue.consumer.core.events import EventName
from sqlaqueue.exc import HandlerNotStopped
from sqlaqueue.sql.portable import after_epoch
from tests.consumer.conftest import Supply
from tests.consumer.models import STRATEGIES, for_async, for_sync, models, prepared
from tests.faults.history import Recorder, name_of
from tests.faults.mutants import lose
from tests.faults.processes import Actor
from tests.servers import Server

EXITED_BY_JOB = 13
"""The exit code of a worker whose handler has exited the process."""

GATE = "gate"
"""The name of the file that opens the gate."""

EXPECTED: dict[str, dict[str, Any]] = {
    "work": {},
    "quiet": {"has_effect": False},
    "flaky": {},
    "gated": {},
    "quiet gated": {"has_effect": False},
    "exit": {"expected_state": "failed", "exits_process": True},
    "disconnect": {"expected_state": "failed"},
    "fails": {"expected_state": "failed"},
}
"""For each payload, what differs from the defaults of :class:`tests.faults.checker.Job`."""


class FileGate:
    """A gate between processes: handlers wait until a file exists, one for all processes or one per process."""

    def __init__(self, actor: Actor) -> None:
        self._files = [actor.directory / GATE, actor.directory / f"{GATE}.{actor.name}"]

    def is_set(self) -> bool:
        return any(file.exists() for file in self._files)

    def wait(self, timeout: float) -> bool:
        for _ in range(int(timeout * 200)):
            if self.is_set():
                return True
            time.sleep(0.005)
        return False


class PayloadHandler:
    """A handler that does what the payload of the job says, and records each run."""

    def __init__(self, actor: Actor) -> None:
        self._recorder, self._gate = actor.recorder, FileGate(actor)

    async def __call__(self, io: Any, work: Any) -> None:
        jobs = work if isinstance(work, list) else [work]
        # The jobs of a batch that fails are tried one by one, so the checker does not count a run in a batch.
        details = {"in_batch": True} if len(jobs) > 1 else {}
        for job in jobs:
            await self._run(io, job, **details)

    async def _run(self, io: Any, job: Any, **details: Any) -> None:
        run = uuid.uuid4().hex[:8]
        self._recorder.record("start", job.id, run=run, attempt=job.attempts, **details)
        try:
            await self._handle(io, job, run)
        except BaseException:
            self._recorder.record("raise", job.id, run=run)
            raise
        self._recorder.record("return", job.id, run=run)

    async def _handle(self, io: Any, job: Any, run: str) -> None:
        payload = job.payload
        if not payload.startswith("quiet"):
            effect = sa.text("INSERT INTO effect (job, note) VALUES (:job, :note)")
            await io.execute(effect, {"job": job.id, "note": run})
        if payload.endswith("gated"):
            self._recorder.record("at gate", job.id)
            await io.wait(self._gate)
        match payload:
            case "flaky" if job.attempts == 1:
                raise RuntimeError("the first attempt fails")
            case "fails":
                raise RuntimeError("every attempt fails")
            case "exit":
                os._exit(EXITED_BY_JOB)
            case "disconnect":
                await io.execute(sa.text("SELECT pg_terminate_backend(pg_backend_pid())"))


def run_worker(actor: Actor, *, strategy: str, api: str, mutant: str | None, url: str, options: dict[str, Any]) -> None:
    # The checker expects the order of claims from the head of the queue, which claims from the cursor do not keep.
    pace._SHARE = 0.0
    pace.RESCUE = 0.2
    lose(mutant)
    job, handler = models(strategy).job, PayloadHandler(actor)
    if api == "sync":
        engine = prepared(sa.create_engine(url, pool_size=pool_size_of(options)))
        consumer = Consumer(job, for_sync(handler), sessionmaker(engine), **options)
        record_events(consumer, actor.recorder, options)
        # The scenarios have handlers that go on after the grace period.
        with contextlib.suppress(HandlerNotStopped):
            consumer.run()
        engine.dispose()
    else:
        asyncio.run(_run_async_worker(actor, job, handler, url, options))


async def _run_async_worker(actor: Actor, job: Any, handler: PayloadHandler, url: str, options: dict[str, Any]) -> None:
    # Named, since before SQLAlchemy 2.0.38 aiosqlite had no pool.
    pool = {"poolclass": sa.AsyncAdaptedQueuePool, "pool_size": pool_size_of(options)}
    engine = prepared(create_async_engine(url, **pool))
    consumer = AsyncConsumer(job, for_async(handler), async_sessionmaker(engine), **options)
    record_events(consumer, actor.recorder, options)
    await consumer.run()
    await engine.dispose()


def pool_size_of(options: dict[str, Any]) -> int:
    return options.get("concurrency", 1) + 1


def record_events(consumer: Any, recorder: Recorder, options: dict[str, Any]) -> None:
    """Record what a Consumer tells of its jobs, and that it is ready and idle."""
    for name in get_args(EventName):
        consumer.on(name, lambda event: recorder.record(name_of(event), event.key[0], attempt=event.attempt))
    poll = consumer._parts.intervals.poll

    def poll_and_record() -> float:
        seconds = poll()
        if seconds > 1:
            recorder.record("idle")
        return seconds

    consumer._parts.intervals.poll = poll_and_record
    recorder.record("ready", concurrency=options.get("concurrency", 1), lease=options.get("lease", 0))


def run_producer(
    actor: Actor, *, strategy: str, url: str, keys: list[int], payloads: list[str], max_attempts: int
) -> None:
    """Enqueue jobs in transactions of one to four jobs, some of which are rolled back."""
    rng, recorder, job = actor.rng, actor.recorder, models(strategy).job
    engine = prepared(sa.create_engine(url, poolclass=sa.NullPool))
    while keys:
        batch = [keys.pop(0) for _ in range(min(len(keys), rng.randint(1, 4)))]
        with Session(engine) as session:
            for key in batch:
                enqueue(session, job, recorder, key, rng.choice(payloads), rng, max_attempts=max_attempts)
            end_enqueueing(session, recorder, batch, commit=rng.random() < 0.8)
    engine.dispose()


def enqueue(
    session: Session, model: Any, recorder: Recorder, key: int, payload: str, rng: random.Random, **values: Any
) -> None:
    """Add a job to the session, and record its expected outcome."""
    # The same ``run_at`` for all jobs, in the past: committed jobs are claimable, and the key decides the order among
    # jobs of one priority.
    values = {"run_at": after_epoch(0), "priority": rng.randint(-2, 2)} | values
    expected = {"max_attempts": values["max_attempts"], "claim_order": [values["priority"], key]} | EXPECTED[payload]
    recorder.record("enqueueing", key, **expected)
    session.add(model(id=key, payload=payload, **values))


def end_enqueueing(session: Session, recorder: Recorder, keys: list[int], *, commit: bool) -> None:
    """Commit or roll back the transaction that enqueues jobs, and record which."""
    if commit:
        session.commit()
    else:
        session.flush()
        session.rollback()
    for key in keys:
        recorder.record("enqueued" if commit else "rolled back", key)


def run_test(
    actor: Actor,
    *,
    test_name: str,
    strategy: str,
    api: str,
    mutant: str | None,
    server: tuple[int, Path, Path],
    arguments: Mapping[str, Any],
) -> None:
    """Run a test of the Consumers without the mutant, and again with it."""
    pace.RESCUE = 0.2
    supply = Supply(Server(*server))
    module, _, name = test_name.partition(":")
    test = getattr(importlib.import_module(f"tests.consumer.{module}"), name)

    def argument(name: str) -> Any:
        if name in {"bench", "leased", "sync_leased"}:
            return supply.take(strategy, api)
        return {"supply": supply, "strategy": strategy, "api": api, **arguments}[name]

    for lost in (None, mutant):
        lose(lost)
        actor.recorder.record("test started", mutant=lost)
        test(**{name: argument(name) for name in inspect.signature(test).parameters})
    supply.close()


# Once, in the process that forks all others.
for each in (*STRATEGIES, "own_message"):
    models(each)
configure_mappers()
