"""The processes of a round: workers with a Consumer, and one that enqueues. Operators are in ``operators``."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
import uuid
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from sqlaqueue import AsyncConsumer, Consumer, Fail, Retry, Snooze, Throttle
from sqlaqueue.consumer import pace
from tests.consumer.models import for_async, for_sync
from tests.faults.history import Recorder
from tests.flow_control.faults.configuration import HELD, Configuration, models
from tests.flow_control.faults.held_audit import Marks
from tests.flow_control.faults.mutants import IN_WORKERS


def configuration_of(parameters: Any) -> Configuration:
    """Return the configuration that came as JSON, which has lists where it has tuples."""

    def frozen(value: Any) -> Any:
        return tuple(map(frozen, value)) if isinstance(value, list) else value

    return Configuration(**{name: frozen(value) for name, value in parameters["configuration"].items()})


def engine_of(parameters: Any) -> sa.Engine:
    """Return an engine whose connections have the name of the process."""
    arguments = {"application_name": parameters["name"]}
    return sa.create_engine(parameters["url"], poolclass=sa.NullPool, connect_args=arguments)


def marks_of(parameters: Any) -> Marks | None:
    """Return what records runs, under a strategy whose transaction holds the jobs."""
    held = configuration_of(parameters).strategy in HELD
    return Marks(parameters["url"], parameters["name"]) if held else None


class Handler:
    """Does what the payload of a job says, and records when each call began and ended, by the clock of the server."""

    def __init__(
        self, configuration: Configuration, recorder: Recorder, rng: random.Random, marks: Marks | None = None
    ) -> None:
        self._configuration, self._recorder, self._rng, self._marks = configuration, recorder, rng, marks
        self._effect = sa.text("INSERT INTO effect (job, token) VALUES (:job, :token)")

    async def __call__(self, io: Any, job: Any) -> None:
        # Read before an error can roll the session back.
        key, token = job.id, str(uuid.uuid4() if self._marks else job.lease_token)
        if self._marks is not None:
            await self._marks.write(io, key, token)
        self._recorder.record("start", key, token=token, at=time.time())
        try:
            await self._handle(io, job, token)
        finally:
            self._recorder.record("end", key, token=token, at=time.time())

    async def _handle(self, io: Any, job: Any, token: str) -> None:
        seconds, rng = self._rng.uniform(0, self._configuration.work), self._rng
        if job.payload == "slow" and rng.random() < 0.1:
            # Longer than the timeout of those workers that have one.
            seconds = 0.5
        await io.execute(sa.text("SELECT pg_sleep(:seconds)"), {"seconds": seconds})
        await io.execute(self._effect, {"job": job.id, "token": token})
        match job.payload:
            case "flaky" if job.attempts == 1:
                raise RuntimeError("the first attempt fails")
            case "fails":
                raise Fail if rng.random() < 0.5 else RuntimeError("each attempt fails")
            case "retry" if job.attempts == 1:
                raise Retry(rng.choice([0, 0.02, 0.2]))
            case "snooze" if rng.random() < 0.5:
                raise Snooze(rng.choice([0, 0.05, 0.3]))
            case "throttle" if self._configuration.rates and rng.random() < 0.2:
                raise Throttle(0.2, rate=self._configuration.rates[0][2])


def run_worker(parameters: Any) -> None:
    """Run a Consumer until a signal stops it."""
    configuration = configuration_of(parameters)
    recorder = Recorder(Path(parameters["directory"]), parameters["name"])
    pace.RESCUE = 0.3
    if configuration.mutant in IN_WORKERS:
        IN_WORKERS[configuration.mutant]()
    handler = Handler(configuration, recorder, random.Random(parameters["seed"]), marks_of(parameters))
    api, concurrency, batch_size, timeout = parameters["worker"]
    options = {"concurrency": concurrency, "poll_interval": configuration.poll_interval, "grace": 20}
    options |= {"batch_size": batch_size, "timeout": timeout, "name": parameters["name"]}
    if api == "sync":
        arguments = {"application_name": parameters["name"]}
        engine = sa.create_engine(parameters["url"], pool_size=concurrency + 2, connect_args=arguments)
        consumer = Consumer(models(configuration).job, for_sync(handler), sessionmaker(engine), **options)
        recorder.record("ready")
        consumer.run()
        engine.dispose()
    else:
        asyncio.run(_run_async_worker(parameters, configuration, handler, recorder, options))
    recorder.record("stopped")


async def _run_async_worker(
    parameters: Any, configuration: Configuration, handler: Handler, recorder: Recorder, options: Any
) -> None:
    arguments = {"server_settings": {"application_name": parameters["name"]}}
    engine = create_async_engine(parameters["async_url"], pool_size=options["concurrency"] + 2, connect_args=arguments)
    consumer = AsyncConsumer(models(configuration).job, for_async(handler), async_sessionmaker(engine), **options)
    recorder.record("ready")
    await consumer.run()
    await engine.dispose()


def run_enqueuer(parameters: Any) -> None:
    """Enqueue the jobs in transactions of various sizes, some of which are rolled back."""
    configuration, rng = configuration_of(parameters), random.Random(parameters["seed"])
    recorder = Recorder(Path(parameters["directory"]), parameters["name"])
    job, engine = models(configuration).job, engine_of(parameters)
    left = parameters["jobs"]
    pause = parameters["seconds"] / max(left / 10, 1)
    while left > 0:
        number = min(left, rng.choice([1, 1, 5, 10, 40]))
        left -= number
        # A fault may end this connection.
        with contextlib.suppress(sa.exc.OperationalError, sa.exc.InterfaceError), Session(engine) as session:
            session.add_all([job(**new_job(configuration, rng)) for _ in range(number)])
            session.flush()
            # The jobs of another transaction may be committed first.
            time.sleep(rng.uniform(0, pause * number / 10))
            session.commit() if rng.random() < 0.95 else session.rollback()
    engine.dispose()
    recorder.record("stopped")


def new_job(configuration: Configuration, rng: random.Random) -> dict[str, Any]:
    """Return the values of a random job. A few keys have many of the jobs."""

    def key(number: int) -> int | None:
        if rng.random() < 0.03:
            return None
        return rng.randrange(max(1, number // 5)) if rng.random() < 0.5 else rng.randrange(number)

    values: dict[str, Any] = {"customer_id": key(configuration.customers), "document_id": key(configuration.documents)}
    values |= {"kind": rng.choice("ab"), "most": rng.choice([None, 1, 2, 2, 3, 5])}
    values |= {"payload": rng.choice(configuration.payloads)}
    if configuration.priorities:
        values["priority"] = rng.randint(-1, 1)
    if rng.random() < 0.1:
        values["run_at"] = sa.func.now() + sa.func.make_interval(0, 0, 0, 0, 0, 0, rng.uniform(0, 1.5))
    return values
