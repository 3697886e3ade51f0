"""Spans and metrics in memory, and a queue of each strategy whose jobs store their trace."""

from collections.abc import Iterator
from typing import Any

import pytest
import sqlalchemy as sa
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from sqlalchemy.orm import DeclarativeBase, Session, mapped_column, sessionmaker

from sqlaqueue import Constant, QueueConfig, QueueMixin, Snooze
from tests.servers import Database, Server

Sessions = sessionmaker[Session]
TRACED = ("traceparent",)


class Base(DeclarativeBase):
    pass


def _make(name: str, **config: Any) -> Any:
    body = {
        "__module__": __name__,
        "__tablename__": name.lower(),
        "__queue__": QueueConfig(extra_columns=TRACED, retry=Constant(0, jitter=0), max_attempts=3, **config),
        "id": mapped_column(sa.Integer, primary_key=True),
        "text": mapped_column(sa.String),
    }
    return type(name, (QueueMixin, Base), body)


Leased = _make("Leased", strategy="update_status")
Held = _make("Held", strategy="batch_select")
Message = _make("Message", strategy="delete_returning", rows_are_messages=True)
MODELS: list[Any] = [Leased, Held, Message]


def add(sessions: Any, model: Any, *texts: str | None) -> None:
    """Insert jobs with these texts."""
    with sessions.begin() as session:
        session.add_all([model(text=text) for text in texts])


def behave(session: Any, job: Any) -> None:
    """Do what the text of a job says."""
    if job.text == "fail":
        raise ValueError(job.text)
    if job.text == "snooze":
        raise Snooze(60)


class Recorded:
    """The providers of a test, and what was recorded with them."""

    def __init__(self) -> None:
        self._spans, self._reader = InMemorySpanExporter(), InMemoryMetricReader()
        self.tracer_provider = TracerProvider()
        self.tracer_provider.add_span_processor(SimpleSpanProcessor(self._spans))
        self.meter_provider = MeterProvider([self._reader])
        self.providers = {"tracer_provider": self.tracer_provider, "meter_provider": self.meter_provider}

    def spans(self, name: str | None = None) -> list[ReadableSpan]:
        """Return the ended spans, all or those of a name, in the order of their beginnings."""
        found = [span for span in self._spans.get_finished_spans() if name in {None, span.name}]
        return sorted(found, key=lambda span: span.start_time or 0)

    def names(self) -> list[str]:
        return [span.name for span in self.spans()]

    def points(self, name: str) -> dict[tuple[tuple[str, Any], ...], Any]:
        """Return the data points of a metric by their attributes, of histograms the number of values."""
        data = self._reader.get_metrics_data()
        found: dict[tuple[tuple[str, Any], ...], Any] = {}
        for resource in [] if data is None else data.resource_metrics:
            for scope in resource.scope_metrics:
                for metric in scope.metrics:
                    for point in metric.data.data_points if metric.name == name else ():
                        key = tuple(sorted((point.attributes or {}).items()))
                        found[key] = getattr(point, "value", None) if hasattr(point, "value") else point.count
        return found

    def total(self, name: str, **attributes: Any) -> Any:
        """Return the sum of the data points of a metric with these attributes, ``__`` in place of a dot."""
        wanted = {(key.replace("__", "."), value) for key, value in attributes.items()}
        return sum(value for key, value in self.points(name).items() if wanted <= set(key))


@pytest.fixture(scope="session")
def template(server: Server) -> Iterator[Database]:
    """A database with the queues of ``MODELS``, of which each test gets a copy."""
    with server.database() as template:
        engine = sa.create_engine(template.url(), poolclass=sa.NullPool)
        Base.metadata.create_all(engine)
        yield template


@pytest.fixture
def database(server: Server, template: Database) -> Iterator[Database]:
    with server.database(template.name) as database:
        yield database


@pytest.fixture
def sessions(database: Database) -> Iterator[Sessions]:
    """A maker of sessions on the queues of ``MODELS``."""
    engine = sa.create_engine(database.url())
    yield sessionmaker(engine)
    engine.dispose()


@pytest.fixture
def recorded() -> Iterator[Recorded]:
    recorded = Recorded()
    yield recorded
    recorded.tracer_provider.shutdown()
    recorded.meter_provider.shutdown()
