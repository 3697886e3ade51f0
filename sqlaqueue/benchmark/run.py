"""Fill a queue, drain it, wait for single jobs: on a database of the user, in a schema that goes again."""

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
from sqlaqueue.consumer.sync import Consumer
from sqlaqueue.exc import ConfigurationError
from sqlaqueue.mapping.mixin import spec_of

PREFIX = "sqlaqueue_bench_"
"""How the names of the schemas begin."""

_CHUNK = 1000
_PATIENCE = 60.0
_PAUSE = 0.02
"""Seconds between single jobs: enough for a consumer to become idle again."""


class BenchmarkError(RuntimeError):
    """A worker process of a benchmark failed; its own output says why."""


@dataclass(frozen=True)
class Benchmark:
    """What was measured.

    :param enqueued_per_second: rows, by ``session.add_all()`` in transactions of 1,000.
    :param done_per_second: jobs whose handler does nothing, by all processes together.
    :param picked_up: seconds from the call of ``commit()`` to the beginning of the handler in an idle Consumer.
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
        """Return the seconds within which this share of the single jobs began, 0.5 for half of them."""
        return self.picked_up[min(int(share * len(self.picked_up)), len(self.picked_up) - 1)]


@dataclass(frozen=True)
class _Task:
    """What a worker process is told; it makes the classes anew."""

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
    """Measure a queue of the shape of ``model`` on a database.

    It makes a schema of its own with a new name, works only in there, and drops it in the end, whatever happens. The
    database is busy meanwhile: it writes as much as the same number of real jobs would.

    The workers are processes of :mod:`multiprocessing` that are spawned: a script calls this under
    ``if __name__ == "__main__":``.

    :param url: the database, by a synchronous driver; the user needs the right to create a schema there.
    :param model: a queue class as ``"package.module:Class"``; None for a table of a key and a text.
    :param strategy: another strategy than the model's, by its name.
    :param jobs: how many jobs are enqueued, and drained.
    :param processes: how many processes drain them.
    :param batch_size: as for :class:`~sqlaqueue.Consumer`.
    :param concurrency: as for :class:`~sqlaqueue.Consumer`.
    :param singles: how many jobs are enqueued one by one, for the time until they begin.
    :raises ConfigurationError: when the model cannot be imitated, or ``url`` is an engine.
    :raises BenchmarkError: when a worker process fails.
    """
    given: object = url  # what a caller without a type checker passes may be anything
    if not isinstance(given, str | sa.URL):
        # Its processes connect by themselves: an engine cannot be handed to them. An address may hold a password.
        msg = (
            f"run_benchmark(url=...): give the address of the database as text, not of type {type(given).__name__}; "
            "that of an engine is engine.url.render_as_string(hide_password=False)"
        )
        raise ConfigurationError(msg)
    schema = PREFIX + secrets.token_hex(6)
    task = _Task(url, schema, model, strategy, batch_size, concurrency)
    shape = _shape(task)
    copy = shape.model(schema)
    engine = sa.create_engine(url)
    with contextlib.ExitStack() as stack:
        stack.callback(engine.dispose)
        stack.enter_context(_schema(engine, schema))
        spec_of(copy).table.metadata.create_all(engine)
        enqueued = _enqueue(engine, copy, shape, jobs)
        done = _drain(engine, copy, task, processes)
        picked_up = _pick_up(engine, copy, shape, task, first=jobs + 1, number=singles)
    return Benchmark(
        strategy=str(shape.config.strategy),
        jobs=jobs,
        processes=processes,
        batch_size=batch_size,
        concurrency=concurrency,
        enqueued_per_second=jobs / enqueued,
        done_per_second=jobs / done,
        picked_up=sorted(picked_up),
    )


def find_model(path: str) -> type[Any]:
    """Import a class by ``"package.module:Class"``.

    :raises ValueError: when the path has another form, or there is no such class.
    """
    module, colon, name = path.partition(":")
    if not (module and colon and name):
        msg = f"{path!r}: give a queue class as package.module:Class"
        raise ValueError(msg)
    try:
        found: type[Any] = getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        msg = f"{path!r}: there is no module {error.name}"
        raise ValueError(msg) from None
    except AttributeError:
        msg = f"{path!r}: the module {module} has no {name}"
        raise ValueError(msg) from None
    return found


def _shape(task: _Task) -> Shape:
    shape = PLAIN if task.model is None else shape_of(find_model(task.model))
    if task.strategy is None:
        return shape
    return replace(shape, config=replace(shape.config, strategy=task.strategy))


@contextlib.contextmanager
def _schema(engine: sa.Engine, name: str) -> Iterator[None]:
    # Without IF NOT EXISTS: what is dropped in the end is what was made here.
    with engine.begin() as connection:
        connection.execute(CreateSchema(name))
    try:
        yield
    finally:
        with engine.begin() as connection:
            connection.execute(DropSchema(name, cascade=True))


def _enqueue(engine: sa.Engine, copy: type[Any], shape: Shape, jobs: int) -> float:
    begun = time.perf_counter()
    for first in range(1, jobs + 1, _CHUNK):
        with Session(engine) as session:
            session.add_all(copy(**row) for row in shape.rows(min(_CHUNK, jobs + 1 - first), first))
            session.commit()
    return time.perf_counter() - begun


def _drain(engine: sa.Engine, copy: type[Any], task: _Task, processes: int) -> float:
    context = multiprocessing.get_context("spawn")
    start = context.Barrier(processes + 1)
    workers = [context.Process(target=_drain_here, args=(task, start), daemon=True) for _ in range(processes)]
    with _running(workers):
        _meet(start, workers)
        begun = time.perf_counter()
        while _has_jobs(engine, copy):
            _check(workers, may_end=True)
            time.sleep(0.005)
        took = time.perf_counter() - begun
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


def _pick_up(engine: sa.Engine, copy: type[Any], shape: Shape, task: _Task, *, first: int, number: int) -> list[float]:
    context = multiprocessing.get_context("spawn")
    start, begun = context.Barrier(2), context.Queue()
    worker = context.Process(target=_wait_here, args=(task, start, begun), daemon=True)
    took: list[float] = []
    with _running([worker]), Session(engine) as session:
        _meet(start, [worker])
        for row in shape.rows(number + 1, first):
            session.add(copy(**row))
            sent = time.time()
            session.commit()
            took.append(_next(begun, worker) - sent)
            time.sleep(_PAUSE)
    # The first one meets a Consumer that is still looking around.
    return took[1:]


def _next(begun: Any, worker: Any) -> float:
    deadline = time.monotonic() + _PATIENCE
    while time.monotonic() < deadline:
        _check([worker], may_end=False)
        with contextlib.suppress(Empty):
            return float(begun.get(timeout=0.5))
    msg = f"a single job has not begun within {_PATIENCE:g} seconds"
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


def _meet(start: Any, workers: Sequence[Any]) -> None:
    """Wait until all workers are ready, and let them begin."""
    deadline = time.monotonic() + _PATIENCE
    while start.n_waiting < len(workers):
        _check(workers, may_end=False)
        if time.monotonic() > deadline:
            msg = f"the worker processes were not ready within {_PATIENCE:g} seconds"
            raise BenchmarkError(msg)
        time.sleep(0.005)
    start.wait()


def _check(workers: Sequence[Any], *, may_end: bool) -> None:
    codes = [worker.exitcode for worker in workers]
    if any(code is not None and (code or not may_end) for code in codes):
        msg = "a worker process failed; see its output above"
        raise BenchmarkError(msg)


# -- in the worker processes ------------------------------------------------------------------------------------


def _drain_here(task: _Task, start: Any) -> None:
    consumer = _consumer(task, _do_nothing)
    start.wait()
    consumer.drain()


def _wait_here(task: _Task, start: Any, begun: Any) -> None:
    def tell(session: Session, job: Any) -> None:  # noqa: ARG001 - the time is all
        begun.put(time.time())

    consumer = _consumer(task, tell)
    start.wait()
    consumer.run()


def _do_nothing(session: Session, job: Any) -> None:
    """Be the handler."""


def _consumer(task: _Task, handler: Any) -> Consumer[Any]:
    engine = sa.create_engine(task.url, pool_size=task.concurrency + 1)
    with engine.connect():
        pass
    model = _shape(task).model(task.schema)
    return Consumer(model, handler, sessionmaker(engine), batch_size=task.batch_size, concurrency=task.concurrency)
