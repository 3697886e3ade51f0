"""Traces and metrics by OpenTelemetry, with the names of its conventions for messaging.

::

    from sqlaqueue.otel import instrument, instrument_sessions

    instrument_sessions(sessions)     # where jobs are enqueued: a span for each flush that inserts jobs
    instrument(consumer)              # where they run: a span for each claim, attempt and settlement

A queue with the attribute ``traceparent`` continues the trace of the transaction that enqueued a job::

    __queue__ = QueueConfig(columns={"traceparent": "traceparent"})
"""

try:
    import opentelemetry.trace  # noqa: F401 - all modules of this package need it
except ModuleNotFoundError as missing:
    msg = f"sqlaqueue.otel needs {missing.name}: pip install 'sqlaqueue[otel]'"
    raise ImportError(msg, name=missing.name) from None

from sqlaqueue.otel.instrument import instrument
from sqlaqueue.otel.sessions import instrument_sessions

__all__ = ["instrument", "instrument_sessions"]
