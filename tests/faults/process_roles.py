"""What the forked processes do: run a Consumer, enqueue jobs, or run a test under a mutant. Each records a history."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import importlib
import inspect
import logging
import os
import random
import signal
import sys
import time
import uuid
from pathlib import Path
from typing import Any, get_args

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from sqlaqueue import AsyncConsumer, Consumer
from sqlaqueue.consumer import pace
from sqlaqueue.consumer.core.events import EventName
from sqlaqueue.exc import HandlerNotStopped
from tests.consumer.conftest import Supply
from tests.consumer.models import for_async, for_sync, models, prepared
from tests.faults.history import Recorder, name_of
from tests.faults.mutants import MUTANTS
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

    def __init__(self, directory: Path, process: str) -> None:
        self._files = [directory / GATE, directory / f"{GATE}.{process}"]

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

    def __init__(self, recorder: Recorder, gate: FileGate) -> None:
        self._recorder, self._gate = recorder, gate

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


def run_worker(parameters: Any) -> None:
    """Run a Consumer until a signal stops it."""
    directory, name = Path(parameters["directory"]), parameters["name"]
    recorder, gate = Recorder(directory, name), FileGate(directory, name)
    # The checker expects the order of claims from the head of the queue, which claims from the cursor do not keep.
    pace._SHARE = 0.0
    pace.RESCUE = 0.2
    if parameters["mutant"]:
        MUTANTS[parameters["mutant"]]()
    handler = PayloadHandler(recorder, gate)
    if parameters["api"] == "sync":
        engine = prepared(sa.create_engine(parameters["url"], pool_size=parameters["pool_size"]))
        arguments = _consumer_arguments(parameters, for_sync(handler), sessionmaker(engine))
        consumer = Consumer(*arguments, **parameters["options"])
        _record_events(consumer, parameters, recorder)
        # The scenarios have handlers that go on after the grace period.
        with contextlib.suppress(HandlerNotStopped):
            consumer.run()
        engine.dispose()
    else:
        asyncio.run(_run_async_worker(parameters, handler, recorder))
    recorder.record("stopped")


async def _run_async_worker(parameters: Any, handler: PayloadHandler, recorder: Recorder) -> None:
    # Named, since before SQLAlchemy 2.0.38 aiosqlite had no pool.
    pool = {"poolclass": sa.AsyncAdaptedQueuePool, "pool_size": parameters["pool_size"]}
    engine = prepared(create_async_engine(parameters["url"], **pool))
    arguments = _consumer_arguments(parameters, for_async(handler), async_sessionmaker(engine))
    consumer = AsyncConsumer(*arguments, **parameters["options"])
    _record_events(consumer, parameters, recorder)
    await consumer.run()
    await engine.dispose()


def _consumer_arguments(parameters: Any, handler: Any, session_factory: Any) -> tuple[Any, Any, Any]:
    return models(parameters["strategy"]).job, handler, session_factory


def _record_events(consumer: Any, parameters: Any, recorder: Recorder) -> None:
    for name in get_args(EventName):
        consumer.on(name, lambda event: recorder.record(name_of(event), event.key[0], attempt=event.attempt))
    poll = consumer._parts.intervals.poll

    def poll_and_record() -> float:
        seconds = poll()
        if seconds > 1:
            recorder.record("idle")
        return seconds

    consumer._parts.intervals.poll = poll_and_record
    recorder.record("ready", concurrency=parameters["options"].get("concurrency", 1))


def run_producer(parameters: Any) -> None:
    """Enqueue jobs in transactions of one to four jobs, some of which are rolled back."""
    recorder = Recorder(Path(parameters["directory"]), parameters["name"])
    rng = random.Random(parameters["seed"])
    engine = prepared(sa.create_engine(parameters["url"], poolclass=sa.NullPool))
    Job = models(parameters["strategy"]).job  # noqa: N806 - a class
    keys, max_attempts = list(range(*parameters["keys"])), parameters["max_attempts"]
    while keys:
        batch = [keys.pop(0) for _ in range(min(len(keys), rng.randint(1, 4)))]
        with Session(engine) as session:
            for key in batch:
                payload = rng.choice(parameters["payloads"])
                enqueue(session, Job, recorder, key, payload, rng, max_attempts=max_attempts)
            end_enqueueing(session, recorder, batch, commit=rng.random() < 0.8)
    engine.dispose()


def enqueue(
    session: Session, model: Any, recorder: Recorder, key: int, payload: str, rng: random.Random, **values: Any
) -> None:
    """Add a job to the session, and record its expected outcome."""
    # The same ``run_at`` for all jobs, in the past: committed jobs are claimable, and the key decides the order among
    # jobs of one priority.
    values = {"run_at": sa.func.to_timestamp(0), "priority": rng.randint(-2, 2)} | values
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


def run_test(parameters: Any) -> None:
    """Run a test of the Consumers without the mutant, and again with it."""
    recorder = Recorder(Path(parameters["directory"]), parameters["name"])
    pace.RESCUE = 0.2
    version, *directories = parameters["server"]
    supply = Supply(Server(version, *map(Path, directories)))
    module, _, name = parameters["test"].partition(":")
    test = getattr(importlib.import_module(f"tests.consumer.{module}"), name)

    def argument(name: str) -> Any:
        if name in {"bench", "leased", "threads"}:
            return supply.take(parameters["strategy"], parameters["api"])
        return {"supply": supply, "api": parameters["api"], **parameters, **parameters["arguments"]}[name]

    for mutant in ("", parameters["mutant"]):
        if mutant:
            MUTANTS[mutant]()
        recorder.record("test started", mutant=mutant)
        test(**{name: argument(name) for name in inspect.signature(test).parameters})
    supply.close()


ROLES = {"worker": run_worker, "producer": run_producer, "test": run_test}


def run_role(parameters: Any) -> None:
    """Redirect the output of this process to a file, and run the role that ``parameters`` name.

    Tests of other packages name a function of their own instead, as ``run``: ``module:function``.
    """
    directory = Path(parameters["directory"])
    random.seed()
    output = (directory / f"{parameters['name']}.out").open("ab", buffering=0)
    os.dup2(output.fileno(), sys.stdout.fileno())
    os.dup2(output.fileno(), sys.stderr.fileno())
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    logging.basicConfig(format="%(asctime)s %(threadName)s %(message)s", level=logging.INFO)
    if "run" in parameters:
        module, _, function = parameters["run"].partition(":")
        getattr(importlib.import_module(module), function)(parameters)
    else:
        ROLES[parameters["role"]](parameters)
