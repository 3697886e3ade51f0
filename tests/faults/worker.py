"""What a process does in these tests: it works on the queue, or fills it, and writes down what it does."""

from __future__ import annotations

import asyncio
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
from sqlaqueue.consumer.claiming import scan_cursor
from sqlaqueue.consumer.core import timers
from sqlaqueue.consumer.core.events import EventName
from tests.consumer.conftest import Supply
from tests.consumer.handler_io import for_async, for_sync
from tests.consumer.models import models
from tests.faults.history import Log
from tests.faults.mutants import MUTANTS
from tests.servers import Server

DEADLY = 13
"""The exit code of a worker that a job has killed."""

GATE = "gate"
"""The file that lets handlers go on."""

EXPECTED: dict[str, dict[str, Any]] = {
    "work": {},
    "quiet": {"effect": False},
    "flaky": {},
    "gated": {},
    "quiet gated": {"effect": False},
    "exit": {"ends": "failed", "killer": True},
    "cut": {"ends": "failed"},
    "fails": {"ends": "failed"},
}
"""What a handler does with a job, by its payload, and what the checker expects of it then."""


class Gate:
    """Something that the hands of a handler can wait for: opened for all processes, or for one."""

    def __init__(self, directory: Path, process: str) -> None:
        self._files = [directory / GATE, directory / f"{GATE}.{process}"]

    def is_set(self) -> bool:
        return any(file.exists() for file in self._files)

    def wait(self, patience: float) -> bool:
        for _ in range(int(patience * 200)):
            if self.is_set():
                return True
            time.sleep(0.005)
        return False


class Handler:
    """Does with a job what its payload says, in one transaction with its completion, and writes that down."""

    def __init__(self, log: Log, gate: Gate) -> None:
        self._log, self._gate = log, gate

    async def __call__(self, hands: Any, work: Any) -> None:
        jobs = work if isinstance(work, list) else [work]
        # A batch that fails is tried again job by job: no run of it counts by itself.
        more = {"together": True} if len(jobs) > 1 else {}
        for job in jobs:
            await self._run(hands, job, **more)

    async def _run(self, hands: Any, job: Any, **more: Any) -> None:
        run = uuid.uuid4().hex[:8]
        self._log.write("start", job.id, run=run, attempt=job.attempts, **more)
        try:
            await self._work(hands, job, run)
        except BaseException:
            self._log.write("raise", job.id, run=run)
            raise
        self._log.write("end", job.id, run=run)

    async def _work(self, hands: Any, job: Any, run: str) -> None:
        payload = job.payload
        if not payload.startswith("quiet"):
            effect = sa.text("INSERT INTO effect (job, note) VALUES (:job, :note)")
            await hands.execute(effect, {"job": job.id, "note": run})
        if payload.endswith("gated"):
            self._log.write("waits", job.id)
            await hands.wait(self._gate)
        match payload:
            case "flaky" if job.attempts == 1:
                raise RuntimeError("the first time it fails")
            case "fails":
                raise RuntimeError("it always fails")
            case "exit":
                os._exit(DEADLY)
            case "cut":
                await hands.execute(sa.text("SELECT pg_terminate_backend(pg_backend_pid())"))


def work(order: Any) -> None:
    """Serve the queue until a signal comes."""
    log, gate = Log(Path(order["directory"]), order["name"]), Gate(Path(order["directory"]), order["name"])
    # The order that the checker looks for is that of the head; claims from the cursor may be made a little later.
    scan_cursor._SHARE = 0.0
    timers.RESCUE = 0.2
    if order["mutant"]:
        MUTANTS[order["mutant"]]()
    handler = Handler(log, gate)
    if order["colour"] == "sync":
        engine = sa.create_engine(order["url"], pool_size=order["pool"])
        consumer = Consumer(*_prepared(order, for_sync(handler), sessionmaker(engine)), **order["options"])
        _listen(consumer, order, log)
        consumer.run()
        engine.dispose()
    else:
        asyncio.run(_work_async(order, handler, log))
    log.write("stopped")


async def _work_async(order: Any, handler: Handler, log: Log) -> None:
    engine = create_async_engine(order["url"], pool_size=order["pool"])
    consumer = AsyncConsumer(*_prepared(order, for_async(handler), async_sessionmaker(engine)), **order["options"])
    _listen(consumer, order, log)
    await consumer.run()
    await engine.dispose()


def _prepared(order: Any, handler: Any, session_factory: Any) -> tuple[Any, Any, Any]:
    return models(order["strategy"]).job, handler, session_factory


def _listen(consumer: Any, order: Any, log: Log) -> None:
    for name in get_args(EventName):
        consumer.on(name, lambda event: log.write(event.name, event.key[0], attempt=event.attempt))
    poll = consumer._parts.intervals.poll

    def idle() -> float:
        seconds = poll()
        if seconds > 1:
            log.write("idle")
        return seconds

    consumer._parts.intervals.poll = idle
    log.write("ready", concurrency=order["options"].get("concurrency", 1))


def produce(order: Any) -> None:
    """Enqueue jobs, a few in each transaction, of which some are rolled back."""
    log, dice = Log(Path(order["directory"]), order["name"]), random.Random(order["seed"])
    engine = sa.create_engine(order["url"], poolclass=sa.NullPool)
    Job = models(order["strategy"]).job  # noqa: N806 - a class
    keys = list(range(*order["keys"]))
    while keys:
        chunk = [keys.pop(0) for _ in range(min(len(keys), dice.randint(1, 4)))]
        with Session(engine) as session:
            for key in chunk:
                enqueue(session, Job, log, key, dice.choice(order["payloads"]), dice, max_attempts=order["limit"])
            finish(session, log, chunk, keep=dice.random() < 0.8)
    engine.dispose()


def enqueue(session: Session, model: Any, log: Log, key: int, payload: str, dice: random.Random, **values: Any) -> None:
    """Add a job to a transaction, and write down what is expected of it."""
    # One moment for all, long past: what is committed is due, and among equals the key decides.
    values = {"run_at": sa.func.to_timestamp(0), "priority": dice.randint(-2, 2)} | values
    expected = {"limit": values["max_attempts"], "order": [values["priority"], key]} | EXPECTED[payload]
    log.write("enqueueing", key, **expected)
    session.add(model(id=key, payload=payload, **values))


def finish(session: Session, log: Log, keys: list[int], *, keep: bool) -> None:
    """End the transaction that enqueues jobs."""
    if keep:
        session.commit()
    else:
        session.flush()
        session.rollback()
    for key in keys:
        log.write("enqueued" if keep else "rolled back", key)


def examine(order: Any) -> None:
    """Run a test of the Consumers with the library as it is, and then again with a mutant, which it should find."""
    log = Log(Path(order["directory"]), order["name"])
    timers.RESCUE = 0.2
    version, *directories = order["server"]
    supply = Supply(Server(version, *map(Path, directories)))
    module, _, name = order["test"].partition(":")
    test = getattr(importlib.import_module(f"tests.consumer.{module}"), name)

    def argument(parameter: str) -> Any:
        if parameter in {"bench", "leased", "threads"}:
            return supply.take(order["strategy"], order["colour"])
        return {"supply": supply, **order, **order["arguments"]}[parameter]

    for mutant in ("", order["mutant"]):
        if mutant:
            MUTANTS[mutant]()
        log.write("examines", mutant=mutant)
        test(**{parameter: argument(parameter) for parameter in inspect.signature(test).parameters})
    supply.close()


ROLES = {"work": work, "produce": produce, "examine": examine}


def live(order: Any) -> None:
    """Be the process that was ordered."""
    directory = Path(order["directory"])
    random.seed()
    output = (directory / f"{order['name']}.out").open("ab", buffering=0)
    os.dup2(output.fileno(), sys.stdout.fileno())
    os.dup2(output.fileno(), sys.stderr.fileno())
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    logging.basicConfig(format="%(asctime)s %(threadName)s %(message)s", level=logging.INFO)
    ROLES[order["role"]](order)
