"""Names and attributes of OpenTelemetry's conventions for messaging (version 1.44, status Development)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Link
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

SYSTEM = "sqlaqueue"
SCOPE = "sqlaqueue"
"""The name of the tracer and of the meter."""
SCHEMA_URL = "https://opentelemetry.io/schemas/1.44.0"

BATCH_COUNT = "messaging.batch.message_count"

DURATION_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
"""Seconds; the boundaries that the conventions recommend for durations."""

OperationType = Literal["send", "receive", "process", "settle"]

_PROPAGATOR = TraceContextTextMapPropagator()


def attributes(queue: str, operation: str, kind: OperationType, **others: Any) -> dict[str, Any]:
    """Return the attributes of a span or a measurement.

    :param operation: the name of the operation, such as ``process`` or ``retry``.
    :param others: further attributes, with ``__`` in place of a dot; those that are None are left out.
    """
    given = {name.replace("__", "."): value for name, value in others.items() if value is not None}
    return {
        "messaging.system": SYSTEM,
        "messaging.destination.name": queue,
        "messaging.operation.name": operation,
        "messaging.operation.type": kind,
        **given,
    }


def context_of(traceparent: str | None) -> Context:
    """Return the context of a job's trace, an empty one without a trace.

    The context of the thread or task that runs the job is not used: it may be that of the program's start.
    """
    return Context() if traceparent is None else _PROPAGATOR.extract({"traceparent": traceparent}, Context())


def links_to(contexts: Iterable[Context]) -> list[Link]:
    """Return a link to the span of each of the contexts that has one."""
    spans = [trace.get_current_span(context).get_span_context() for context in contexts]
    return [Link(span) for span in spans if span.is_valid]
