"""Fill a queue, drain it, and measure the latency of single jobs, in a temporary schema of the user's database."""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from queue import Empty
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session, sessionmaker
from sqlalchemy.schema import CreateSchema, DropSchema

from sqlaqueue.benchmark.shape import PLAIN, Shape, shape_of
from sqlaqueue.consumer.consumer import Consumer
from sqlaqueue.exc import ConfigurationError
from sqlaqueue.mapping.mixin import spec_of

PREFIX = "sqlaqueue_bench_"
"""The prefix of the schema's name."""

_CHUNK = 1000
_TIMEOUT = 60.0
_PAUSE = 0.02
"""Seconds between single jobs, after which the Consumer is idle again."""


class BenchmarkError(RuntimeError):
    """A worker process of a benchmark failed; its own output says why."""


@dataclass(frozen=True)
class Benchmark:
    """The result of a benchmark.

    :param enqueued_per_second: rows inserted by ``session.add_all()``, in transactions of 1,000.
    :param done_per_second: jobs with an empty handler, completed by all processes together.
    :param picked_up: latencies of single jobs: seconds from ``commit()`` to the start of the handler, in an idle
        Consumer; sorted.
    """

    strategy: str
    jobs: int
    processes: int
    batch_size: int
    concurrency: int
    enqueued_per_second: float
    done_per_second: float
    picked_up: Sequence[float]

    def picked_up_within(self, share: float) -> float:
        """Return a percentile of the latencies in seconds, for ``share=0.5`` the median."""
        return self.picked_up[min(int(share * len(self.picked_up)), len(self.picked_up) - 1)]


@dataclass(frozen=True)
class _Arguments:
    """The arguments of a worker process, which creates the copy of the model itself."""

    url: str
    schema: str
    model: str | None
    strategy: str | None
    batch_size: int
    concurrency: int


def run_benchmark(
    url: str,
    model: str | None = None,
    *,
    strategy: str | None = None,
    jobs: int = 10_000,
    processes: int = 1,
    batch_size: int = 100,
    concurrency: int = 1,
    singles: int = 100,
) -> Benchmark:
    """Benchmark a copy of a queue in a database.

    The copy is in a new schema, which is dropped afterwards, also after an error. The database writes as much as for
    the same number of real jobs.

    The workers are processes spawned by :mod:`multiprocessing`, so a script must call this under
    ``if __name__ == "__main__":``.

    :param url: the database, with a synchronous driver; the role needs the privilege to create a schema.
    :param model: a queue class as ``"package.module:Class"``; None for a table with a key and a text.
    :param strategy: the name of a strategy that overrides the model's.
    :param jobs: number of jobs that are enqueued and drained.
    :param processes: number of worker processes.
    :param batch_size: as for :class:`~sqlaqueue.Consumer`.
    :param concurrency: as for :class:`~sqlaqueue.Consumer`.
    :param singles: number of jobs that are enqueued one by one to measure the latency.
    :raises ConfigurationError: if the model cannot be copied, or ``url`` is an engine.
    :raises BenchmarkError: if a worker process fails.
    """
    given: object = url  # a caller without a type checker may pass any object
    if not isinstance(given, str | sa.URL):
        # An engine cannot be sent to the worker processes. The error does not repeat a URL, which may hold a password.
        msg = (
            f"run_benchmark(url=...): give the URL of the database as text, not of type {type(given).__name__}; "
            "that of an engine is engine.url.render_as_string(hide_password=False)"
        )
        raise ConfigurationError(msg)
    schema = PREFIX + secrets.token_hex(6)
    arguments = _Arguments(url, schema, model, strategy, batch_size, concurrency)
    shape = _shape(arguments)
    copy = shape.model(schema)
    engine = sa.create_engine(url)
    with contextlib.ExitStack() as stack:
        stack.callback(engine.dispose)
        stack.enter_context(_schema(engine, schema))
        spec_of(copy).table.metadata.create_all(engine)
        enqueued = _enqueue(engine, copy, shape, jobs)
        done = _drain(engine, copy, arguments, processes)
        latencies = _measure_latency(engine, copy, shape, arguments, first=jobs + 1, number=singles)
    return Benchmark(
        strategy=str(shape.config.strategy),
        jobs=jobs,
        processes=processes,
        batch_size=batch_size,
        concurrency=concurrency,
        enqueued_per_second=jobs / enqueued,
        done_per_second=jobs / done,
        picked_up=sorted(latencies),
    )


def find_model(path: str) -> type[Any]:
    """Import a class by ``"package.module:Class"``.

    :raises ValueError: if the path is malformed, or there is no such class.
    """
    module, colon, name = path.partition(":")
    if not (module and colon and name):
        msg = f"{path!r}: give a queue class as package.module:Class"
        raise ValueError(msg)
    try:
        model: type[Any] = getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        msg = f"{path!r}: there is no module {error.name}"
        raise ValueError(msg) from None
    except AttributeError:
        msg = f"{path!r}: the module {module} has no {name}"
        raise ValueError(msg) from None
    return model


def _shape(arguments: _Arguments) -> Shape:
    shape = PLAIN if arguments.model is None else shape_of(find_model(arguments.model))
    if arguments.strategy is None:
        return shape
    return replace(shape, config=replace(shape.config, strategy=arguments.strategy))


@contextlib.contextmanager
def _schema(engine: sa.Engine, name: str) -> Iterator[None]:
    # Without IF NOT EXISTS: only a schema created here may be dropped.
    with engine.begin() as connection:
        connection.execute(CreateSchema(name))
    try:
        yield
    finally:
        with engine.begin() as connection:
            connection.execute(DropSchema(name, cascade=True))


def _enqueue(engine: sa.Engine, copy: type[Any], shape: Shape, jobs: int) -> float:
    start_time = time.perf_counter()
    for first in range(1, jobs + 1, _CHUNK):
        with Session(engine) as session:
            session.add_all(copy(**row) for row in shape.rows(min(_CHUNK, jobs + 1 - first), first))
            session.commit()
    return time.perf_counter() - start_time


def _drain(engine: sa.Engine, copy: type[Any], arguments: _Arguments, processes: int) -> float:
    context = multiprocessing.get_context("spawn")
    start = context.Barrier(processes + 1)
    workers = [
        context.Process(target=_drain_in_process, args=(arguments, start), daemon=True) for _ in range(processes)
    ]
    with _running(workers):
        _start_together(start, workers)
        start_time = time.perf_counter()
        while _has_jobs(engine, copy):
            _check(workers, may_end=True)
            time.sleep(0.005)
        took = time.perf_counter() - start_time
        for worker in workers:
            worker.join()
        _check(workers, may_end=True)
    return took


def _has_jobs(engine: sa.Engine, copy: type[Any]) -> bool:
    spec = spec_of(copy)
    left = sa.select(sa.literal(1)).select_from(spec.table)
    if spec.has("status"):
        left = left.where(sa.or_(spec.in_state("pending"), spec.in_state("processing")))
    with engine.connect() as connection:
        return bool(connection.scalar(sa.select(left.exists())))


def _measure_latency(
    engine: sa.Engine, copy: type[Any], shape: Shape, arguments: _Arguments, *, first: int, number: int
) -> list[float]:
    context = multiprocessing.get_context("spawn")
    start, started = context.Barrier(2), context.Queue()
    worker = context.Process(target=_run_in_process, args=(arguments, start, started), daemon=True)
    latencies: list[float] = []
    with _running([worker]), Session(engine) as session:
        _start_together(start, [worker])
        for row in shape.rows(number + 1, first):
            session.add(copy(**row))
            sent = time.time()
            session.commit()
            latencies.append(_next_start(started, worker) - sent)
            time.sleep(_PAUSE)
    # The first one starts while the Consumer is still starting up.
    return latencies[1:]


def _next_start(started: Any, worker: Any) -> float:
    deadline = time.monotonic() + _TIMEOUT
    while time.monotonic() < deadline:
        _check([worker], may_end=False)
        with contextlib.suppress(Empty):
            return float(started.get(timeout=0.5))
    msg = f"a single job has not started within {_TIMEOUT:g} seconds"
    raise BenchmarkError(msg)


@contextlib.contextmanager
def _running(workers: Sequence[Any]) -> Iterator[None]:
    for worker in workers:
        worker.start()
    try:
        yield
    finally:
        for worker in workers:
            worker.kill()
            worker.join()


def _start_together(start: Any, workers: Sequence[Any]) -> None:
    """Wait until all workers are ready, and let them start."""
    deadline = time.monotonic() + _TIMEOUT
    while start.n_waiting < len(workers):
        _check(workers, may_end=False)
        if time.monotonic() > deadline:
            msg = f"the worker processes were not ready within {_TIMEOUT:g} seconds"
            raise BenchmarkError(msg)
        time.sleep(0.005)
    start.wait()


def _check(workers: Sequence[Any], *, may_end: bool) -> None:
    codes = [worker.exitcode for worker in workers]
    if any(code is not None and (code or not may_end) for code in codes):
        msg = "a worker process failed; see its output above"
        raise BenchmarkError(msg)


# -- in the worker processes ------------------------------------------------------------------------------------


def _drain_in_process(arguments: _Arguments, start: Any) -> None:
    consumer = _consumer(arguments, _do_nothing)
    start.wait()
    consumer.drain()


def _run_in_process(arguments: _Arguments, start: Any, started: Any) -> None:
    def handle(session: Session, job: Any) -> None:  # noqa: ARG001 - only the time matters
        started.put(time.time())

    consumer = _consumer(arguments, handle)
    start.wait()
    consumer.run()


def _do_nothing(session: Session, job: Any) -> None:
    """Do nothing, as an empty handler."""


def _consumer(arguments: _Arguments, handler: Any) -> Consumer[Any]:
    engine = sa.create_engine(arguments.url, pool_size=arguments.concurrency + 1)
    with engine.connect():
        pass
    model = _shape(arguments).model(arguments.schema)
    return Consumer(
        model, handler, sessionmaker(engine), batch_size=arguments.batch_size, concurrency=arguments.concurrency
    )
