"""A process of the tests: a Consumer that records what it does, ``python -m tests.mariadb.worker '{...}'``."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import time
import uuid
from pathlib import Path
from typing import Any, get_args

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import sessionmaker

import sqlaqueue.mariadb
from sqlaqueue import AsyncConsumer, Consumer
from sqlaqueue.consumer import pace
from sqlaqueue.consumer.core.events import EventName
from tests.faults.history import Recorder, name_of
from tests.mariadb.models import Effect, Job


def _call(recorder: Recorder, job: Job) -> Effect:
    """Record the start of a run, and return the row that it inserts."""
    run = uuid.uuid4().hex[:8]
    recorder.record("start", job.id, run=run)
    if job.payload == "flaky" and job.attempts == 1:
        recorder.record("raise", job.id, run=run)
        message = "the first attempt fails"
        raise RuntimeError(message)
    return Effect(job=job.id, note=run)


def _record_events(consumer: Any, recorder: Recorder) -> None:
    for name in get_args(EventName):
        consumer.on(name, lambda event: recorder.record(name_of(event), event.key[0], attempt=event.attempt))


def _run(order: dict[str, Any], recorder: Recorder) -> None:
    engine = sa.create_engine(order["url"], pool_size=10)
    sqlaqueue.mariadb.prepare(engine)

    def handle(session: Any, job: Job) -> None:
        effect = _call(recorder, job)
        session.add(effect)
        session.flush()
        time.sleep(order.get("seconds", 0))
        recorder.record("return", job.id, run=effect.note)

    consumer = Consumer(Job, handle, sessionmaker(engine), **order["options"])
    _record_events(consumer, recorder)
    recorder.record("ready", concurrency=4)
    consumer.run()
    engine.dispose()


async def _run_async(order: dict[str, Any], recorder: Recorder) -> None:
    engine = create_async_engine(order["url"], pool_size=10)
    sqlaqueue.mariadb.prepare(engine)

    async def handle(session: Any, job: Job) -> None:
        effect = _call(recorder, job)
        session.add(effect)
        await session.flush()
        await asyncio.sleep(order.get("seconds", 0))
        recorder.record("return", job.id, run=effect.note)

    consumer = AsyncConsumer(Job, handle, async_sessionmaker(engine), **order["options"])
    _record_events(consumer, recorder)
    recorder.record("ready", concurrency=4)
    await consumer.run()
    await engine.dispose()


def main() -> None:
    """Run a Consumer until a signal stops it."""
    logging.basicConfig(level=logging.INFO)
    order = json.loads(sys.argv[1])
    recorder = Recorder(Path(order["directory"]), f"worker-{os.getpid()}")
    pace.RESCUE = 0.2
    order["options"] = {"concurrency": 4, "poll_interval": 0.05, "lease": 1} | order.get("options", {})
    if "asyncmy" in order["url"]:
        asyncio.run(_run_async(order, recorder))
    else:
        _run(order, recorder)
    recorder.record("stopped")


if __name__ == "__main__":
    main()
