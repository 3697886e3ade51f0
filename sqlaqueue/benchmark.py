"""Benchmark a copy of your queue in your own database: ``sqlaqueue bench``, or :func:`run_benchmark` for programs.

The copy is a table with columns of the types of your model's, in a schema of its own; it is filled, drained and
dropped. It uses none of your tables, sequences, types or defaults.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import decimal
import importlib
import multiprocessing
import secrets
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from queue import Empty
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session, registry, sessionmaker
from sqlalchemy.schema import CreateSchema, DropSchema
from sqlalchemy.types import TypeEngine

from sqlaqueue.consumer.consumer import Consumer
from sqlaqueue.exc import ConfigurationError
from sqlaqueue.mapping.mixin import QueueMixin, spec_of
from sqlaqueue.queue.config import ROLES, QueueConfig
from sqlaqueue.queue.options import States

__all__ = ["Benchmark", "BenchmarkError", "Shape", "run_benchmark", "shape_of"]


_MAX_TEXT = 20
"""Maximum number of characters of the texts in a copy."""


@dataclass(frozen=True)
class CopiedColumn:
    """A column of a model that is not a queue attribute.

    :param value: its value in all rows; None for a key, which is numbered.
    """

    name: str
    type: TypeEngine[Any]
    nullable: bool
    is_key: bool
    value: Any


@dataclass(frozen=True)
class Shape:
    """The columns and the configuration of a copy."""

    fields: tuple[CopiedColumn, ...]
    config: QueueConfig

    def model(self, schema: str) -> type[Any]:
        """Return a mapped class of this shape, with its tables in ``schema``."""
        metadata = sa.MetaData(schema=schema)
        columns = [
            sa.Column(
                field.name, field.type, primary_key=field.is_key, nullable=field.nullable, autoincrement=is_serial
            )
            for field, is_serial in self._fields_with_serial()
        ]
        table = sa.Table("job", metadata, *columns)
        # The name of the channel depends on it: Consumers of the original must not be notified of these jobs.
        config = replace(self.config, name=f"{schema}.job")
        model = type("Job", (QueueMixin,), {"__queue__": config})
        registry(metadata=metadata).map_imperatively(model, table)
        return model

    def rows(self, number: int, first: int = 1) -> Iterator[dict[str, Any]]:
        """Yield the values of ``number`` rows.

        :param first: the number of the first row, for its key.
        """
        fixed = {field.name: field.value for field in self.fields if not field.is_key and field.value is not None}
        numbered = [field for field, is_serial in self._fields_with_serial() if field.is_key and not is_serial]
        for count in range(first, first + number):
            yield fixed | {field.name: _key(field, count) for field in numbered}

    def _fields_with_serial(self) -> Iterator[tuple[CopiedColumn, bool]]:
        """Yield each field, and whether the database numbers it."""
        keys = [field for field in self.fields if field.is_key]
        for field in self.fields:
            yield field, field.is_key and len(keys) == 1 and _kind(field.type) is int


PLAIN = Shape(
    (
        CopiedColumn("id", sa.BigInteger(), nullable=False, is_key=True, value=None),
        CopiedColumn("payload", sa.String(), nullable=False, is_key=False, value="x" * _MAX_TEXT),
    ),
    QueueConfig(),
)
"""A table with a key and a text."""


def shape_of(model: type[Any]) -> Shape:
    """Return the shape of a queue class.

    It has the same queue attributes. The other columns keep their types, sizes and nullability, but not defaults,
    foreign keys, sequences and enums, which would refer to objects of the original.

    :raises NotAQueueError: if ``model`` is not a queue.
    :raises ConfigurationError: if a column cannot be copied; the error names it.
    """
    spec = spec_of(model)
    config = spec.config
    if not isinstance(config.strategy, str):
        raise ConfigurationError(
            f"{model.__name__}: its strategy {config.strategy!r} is an object, which may have tables of its own; the "
            "benchmark supports strategies that are given by name"
        )
    roles = {column for column in spec.columns.values() if not column.primary_key}
    fields = tuple(
        _field(model, number, column) for number, column in enumerate(spec.table.columns, 1) if column not in roles
    )
    named = ROLES if config.adopt is not None else config.columns
    left_out: Mapping[str, str | None] = {role: None for role in ROLES if role not in spec.columns and role in named}
    return Shape(fields, replace(config, columns=left_out, adopt=None, states=States()))


def _field(model: type[Any], number: int, column: sa.Column[Any]) -> CopiedColumn:
    kind = _plain(column.type)
    value = None if column.primary_key else _value(kind)
    if column.primary_key and _kind(kind) not in {int, str, uuid.UUID}:
        raise ConfigurationError(
            f"{model.__name__}: cannot make values for the key {column.name} of type {column.type!r}"
        )
    if value is None and not column.nullable and not column.primary_key:
        raise ConfigurationError(
            f"{model.__name__}: the column {column.name} is not nullable, and the benchmark cannot make a value of "
            f"type {column.type!r}"
        )
    # Not the original name, which may be that of a queue attribute.
    return CopiedColumn(f"column_{number}", kind, bool(column.nullable), column.primary_key, value)


def _plain(kind: TypeEngine[Any]) -> TypeEngine[Any]:
    """Return a built-in type: enums and domains are objects of the database, and decorators run the user's code."""
    if isinstance(kind, sa.types.TypeDecorator):
        return _plain(kind.impl_instance)
    if isinstance(kind, sa.Enum):
        return sa.String(kind.length)
    if kind.__visit_name__ == "DOMAIN":
        domain: Any = kind
        return _plain(sa.types.to_instance(domain.data_type))
    if isinstance(kind, sa.ARRAY):
        return sa.ARRAY(_plain(kind.item_type), dimensions=kind.dimensions)
    return kind


def _kind(kind: TypeEngine[Any]) -> type[Any] | None:
    try:
        return kind.python_type
    except NotImplementedError:
        return None


_VALUES: dict[type[Any], Any] = {
    int: 1,
    bool: False,
    float: 0.5,
    bytes: b"x" * _MAX_TEXT,
    list: [],
    decimal.Decimal: decimal.Decimal(1),
    uuid.UUID: uuid.UUID(int=1),
    dt.datetime: dt.datetime(2000, 1, 1, tzinfo=dt.UTC),
    dt.date: dt.date(2000, 1, 1),
    dt.time: dt.time(12),
    dt.timedelta: dt.timedelta(hours=1),
}


def _value(kind: TypeEngine[Any]) -> Any:
    if isinstance(kind, sa.JSON):
        return {}  # its python_type differs between versions of SQLAlchemy
    python = _kind(kind)
    if python is str:
        return "x" * min(getattr(kind, "length", None) or _MAX_TEXT, _MAX_TEXT)
    if python is dt.datetime and not getattr(kind, "timezone", False):
        return dt.datetime(2000, 1, 1)  # noqa: DTZ001 - the column has no zone
    return None if python is None else _VALUES.get(python)


def _key(field: CopiedColumn, count: int) -> Any:
    match _kind(field.type):
        case kind if kind is int:
            return count
        case kind if kind is uuid.UUID:
            return uuid.UUID(int=count)
        case _:
            return str(count)


# -- run ---------------------------------------------------------------------------------------------------------------

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
        raise ConfigurationError(
            f"run_benchmark(url=...): give the URL of the database as text, not of type {type(given).__name__}; "
            "that of an engine is engine.url.render_as_string(hide_password=False)"
        )
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
    """Import a class by ``"package.module:Class"``; raise ValueError for a wrong path."""
    module, colon, name = path.partition(":")
    if not (module and colon and name):
        raise ValueError(f"{path!r}: give a queue class as package.module:Class")
    try:
        model: type[Any] = getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise ValueError(f"{path!r}: there is no module {error.name}") from None
    except AttributeError:
        raise ValueError(f"{path!r}: the module {module} has no {name}") from None
    return model


def _shape(arguments: _Arguments) -> Shape:
    shape = PLAIN if arguments.model is None else shape_of(find_model(arguments.model))
    if arguments.strategy is None:
        return shape
    name: Any = arguments.strategy  # perhaps that of another package's strategy
    return replace(shape, config=replace(shape.config, strategy=name))


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
    raise BenchmarkError(f"a single job has not started within {_TIMEOUT:g} seconds")


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
    deadline = time.monotonic() + _TIMEOUT
    while start.n_waiting < len(workers):
        _check(workers, may_end=False)
        if time.monotonic() > deadline:
            raise BenchmarkError(f"the worker processes were not ready within {_TIMEOUT:g} seconds")
        time.sleep(0.005)
    start.wait()


def _check(workers: Sequence[Any], *, may_end: bool) -> None:
    codes = [worker.exitcode for worker in workers]
    if any(code is not None and (code or not may_end) for code in codes):
        raise BenchmarkError("a worker process failed; see its output above")


# -- in the worker processes ------------------------------------------------------------------------------------


def _drain_in_process(arguments: _Arguments, start: Any) -> None:
    def handle(session: Session, job: Any) -> None:
        """Do nothing, as an empty handler."""

    consumer = _consumer(arguments, handle)
    start.wait()
    consumer.drain()


def _run_in_process(arguments: _Arguments, start: Any, started: Any) -> None:
    def handle(session: Session, job: Any) -> None:  # noqa: ARG001 - only the time matters
        started.put(time.time())

    consumer = _consumer(arguments, handle)
    start.wait()
    consumer.run()


def _consumer(arguments: _Arguments, handler: Any) -> Consumer[Any]:
    engine = sa.create_engine(arguments.url, pool_size=arguments.concurrency + 1)
    with engine.connect():
        pass
    model = _shape(arguments).model(arguments.schema)
    return Consumer(
        model, handler, sessionmaker(engine), batch_size=arguments.batch_size, concurrency=arguments.concurrency
    )
