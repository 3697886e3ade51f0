"""Spans and metrics in memory, and a queue whose jobs store their trace."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter


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


@pytest.fixture
def recorded() -> Iterator[Recorded]:
    recorded = Recorded()
    yield recorded
    recorded.tracer_provider.shutdown()
    recorded.meter_provider.shutdown()
