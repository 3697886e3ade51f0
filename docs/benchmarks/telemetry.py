"""What telemetry costs a job: ``python -m docs.benchmarks telemetry``.

The same jobs are drained by one Consumer of one thread with an empty handler, without telemetry and with each kind of
it, in turn, several times. The figure is the processor time of this process for a job, of which the time of the server
is no part, so that other work on the machine matters little. A trace costs the server a column in each row.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import sqlalchemy as sa
from opentelemetry.metrics import NoOpMeterProvider
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import NoOpTracerProvider
from prometheus_client import CollectorRegistry
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from sqlaqueue import Consumer, QueueConfig, QueueMixin, otel, prometheus
from sqlaqueue.telemetry import surround

TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


class Base(DeclarativeBase):
    pass


class Plain(QueueMixin, Base):
    __tablename__ = "plain"

    id: Mapped[int] = mapped_column(primary_key=True)


class Traced(QueueMixin, Base):
    __tablename__ = "traced"
    __queue__ = QueueConfig(extra_columns=("traceparent",))

    id: Mapped[int] = mapped_column(primary_key=True)


class _Dropped(SpanExporter):
    """An exporter whose collector takes no time."""

    def export(self, spans: Any) -> SpanExportResult:
        return SpanExportResult.SUCCESS


class _Nothing:
    """A context manager that does nothing."""

    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


def _provider(**options: Any) -> TracerProvider:
    provider = TracerProvider(**options)
    provider.add_span_processor(BatchSpanProcessor(_Dropped()))
    return provider


def _variants() -> dict[str, tuple[Any, Callable[[Consumer[Any]], object]]]:
    """Return the model and the instrumentation of each variant."""
    spans, unsampled = _provider(), _provider(sampler=ALWAYS_OFF)
    none, meters = NoOpTracerProvider(), MeterProvider([InMemoryMetricReader()])
    no_meters = NoOpMeterProvider()
    registry = CollectorRegistry()

    def with_otel(tracers: Any, meter_provider: Any) -> Callable[[Consumer[Any]], object]:
        return lambda consumer: otel.instrument(consumer, tracer_provider=tracers, meter_provider=meter_provider)

    return {
        "none": (Plain, lambda consumer: None),
        "a middleware that does nothing": (Plain, lambda consumer: surround(consumer, lambda job: _Nothing())),
        "a listener of each end": (Plain, lambda consumer: consumer.on("completed", lambda event: None)),
        "the attribute traceparent": (Traced, lambda consumer: None),
        "Prometheus": (Plain, lambda consumer: prometheus.instrument(consumer, registry=registry)),
        "OpenTelemetry: metrics": (Plain, with_otel(none, meters)),
        "OpenTelemetry: spans that are not sampled": (Traced, with_otel(unsampled, no_meters)),
        "OpenTelemetry: spans": (Traced, with_otel(spans, no_meters)),
        "OpenTelemetry: spans and metrics": (Traced, with_otel(spans, meters)),
    }


def measure(url: str, *, jobs: int, rounds: int) -> dict[str, float]:
    """Return the processor time of a job in microseconds for each variant: the median of the rounds."""
    times: dict[str, list[float]] = {}
    engine = sa.create_engine(url.replace("postgresql://", "postgresql+psycopg://"))
    Base.metadata.create_all(engine)
    sessions, variants = sessionmaker(engine), _variants()
    for number in range(rounds + 1):
        for name, (model, instrument) in variants.items():
            _enqueue(sessions, model, jobs)
            consumer = Consumer(model, _do_nothing, sessions)
            instrument(consumer)
            began = time.process_time()
            assert consumer.drain() == jobs
            took = time.process_time() - began
            # The first round fills caches.
            if number:
                times.setdefault(name, []).append(took / jobs * 1e6)
    engine.dispose()
    return {name: statistics.median(taken) for name, taken in times.items()}


def _enqueue(sessions: sessionmaker[Session], model: Any, jobs: int) -> None:
    values: dict[str, Any] = {"traceparent": TRACE} if model is Traced else {}
    with sessions() as session:
        session.execute(sa.text(f"TRUNCATE {model.__tablename__}"))
        session.execute(sa.insert(model), [values] * jobs)
        session.execute(sa.text(f"ANALYZE {model.__tablename__}"))
        session.commit()


def _do_nothing(session: Session, job: object) -> None:
    pass


def table(costs: dict[str, float]) -> str:
    """Return the result as a Markdown table."""
    base = costs["none"]
    lines = ["| telemetry | µs a job | more than none |", "| --- | ---: | ---: |"]
    lines += [f"| {name} | {cost:.0f} | {cost - base:.0f} |" for name, cost in costs.items()]
    return "\n".join(lines)
