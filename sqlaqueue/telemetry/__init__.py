"""The parts of which telemetry is made: around a handler's call, and from there to the events that follow.

:mod:`sqlaqueue.otel` and :mod:`sqlaqueue.prometheus` consist of these parts and of ``consumer.on()``; telemetry for
another system can be made in the same way::

    @contextmanager
    def tag_errors(job):
        with sentry_sdk.new_scope() as scope:
            scope.set_tag("attempt", attempt_of(job).number)
            note(job, {"scope": scope})
            yield
    surround(consumer, tag_errors)
    consumer.on("failed", lambda event: sentry_sdk.capture_exception(event.error, scope=event.notes["scope"]))
"""

from sqlaqueue.consumer.core.events import PollEvent
from sqlaqueue.queue.roles import current_traceparent
from sqlaqueue.telemetry.around import attempt_of, note, seconds_waited, surround
from sqlaqueue.telemetry.asgi import health_app

__all__ = ["PollEvent", "attempt_of", "current_traceparent", "health_app", "note", "seconds_waited", "surround"]
