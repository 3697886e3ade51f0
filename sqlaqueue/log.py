"""The logger ``sqlaqueue`` and the attributes of its records.

Every record has the attributes in :data:`FIELDS`; those that do not apply are None. A format string can use them, as in
``%(event)s %(queue)s %(job_key)s``, and a JSON formatter handles them like any other ``extra``.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Mapping
from contextvars import Context, ContextVar
from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa

logger = logging.getLogger("sqlaqueue")

reporter = logging.Handler()
"""Reports the errors of logging itself, as handlers of the standard library do: to stderr, unless
``logging.raiseExceptions`` is false."""


def _handle(record: logging.LogRecord) -> None:
    """Handle a record of the library; whatever a handler, filter or formatter of the application raises is reported.

    Workers log between a claim and the settlement, and a full disk behind a log file must not end them.
    """
    try:
        type(logger).handle(logger, record)
    except Exception:  # noqa: BLE001 - code of the application may raise any error
        # Python's stderr may be closed.
        with contextlib.suppress(ValueError):
            reporter.handleError(record)


# An attribute of this logger, whose class may belong to the application.
logger.__dict__["handle"] = _handle

FIELDS = (
    "event",
    "queue",
    "worker",
    "job_key",
    "attempt",
    "max_attempts",
    "delay",
    "duration",
    "error_kind",
    "count",
)
"""The attributes of every record beside those of :class:`logging.LogRecord`."""

_NONE = dict.fromkeys(FIELDS)


def fields(event: str, **values: Any) -> dict[str, Any]:
    """Return the ``extra`` of a record: all of :data:`FIELDS`, and further ``values`` of this event."""
    return {**_NONE, "event": event, **values}


# -- records of handlers -----------------------------------------------------------------------------------------------

_job: ContextVar[Callable[[], Mapping[str, Any]] | None] = ContextVar("sqlaqueue_job", default=None)


def set_job(context: Context, values: Callable[[], Mapping[str, Any]]) -> None:
    """Let records that are made in a context have these values for :data:`FIELDS`; each record asks for them."""
    context.run(_job.set, values)


class JobLogFilter(logging.Filter):
    """Gives every record the attributes in :data:`FIELDS`, those of the job whose handler logs it, else None.

    Add it to a handler of :mod:`logging`, one line in the program's configuration::

        handler.addFilter(JobLogFilter())

    The attributes are ``queue``, ``worker``, ``job_key``, ``attempt`` and ``max_attempts``. For a handler of several
    jobs ``job_key`` is the list of their keys, ``attempt`` and ``max_attempts`` are None, and ``count`` is their
    number. What a record has already is kept. Threads that a handler starts have no job, unless they get its context,
    as :func:`asyncio.to_thread` and tasks do.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Add the attributes, and keep the record."""
        make = _job.get()
        job = {} if make is None else make()
        for name in FIELDS:
            if getattr(record, name, None) is None:
                setattr(record, name, job.get(name))
        return True


_OF_LOGGING = {*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"}
"""The attributes of a record that are none of its ``extra``."""


class JSONFormatter(logging.Formatter):
    """Writes a record as one line, a JSON object.

    ::

        handler.setFormatter(JSONFormatter())
        handler.addFilter(JobLogFilter())

    It has ``time`` (UTC), ``level``, ``logger``, ``process`` and ``message``, the ``extra`` of the record as far as it
    is not None, and ``exception``, the traceback. Values that JSON does not have are texts.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        values: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(),
            "level": record.levelname,
            "logger": record.name,
            "process": record.process,
            "message": record.getMessage(),
        }
        known = {*_OF_LOGGING, *values}
        values |= {name: value for name, value in vars(record).items() if name not in known and value is not None}
        if record.exc_info:
            values["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            values["stack"] = self.formatStack(record.stack_info)
        try:
            return json.dumps(values, default=str, allow_nan=False)
        except (TypeError, ValueError):
            # Such as a dictionary whose keys are tuples, or infinity.
            return json.dumps({name: one if isinstance(one, str | int) else str(one) for name, one in values.items()})


# -- texts -------------------------------------------------------------------------------------------------------------


def seconds_text(seconds: float) -> str:
    """Return a duration as text, for the message of a record."""
    return f"{seconds:.3f} s" if seconds < 1 else f"{seconds:.1f} s" if seconds < 60 else f"{seconds:.0f} s"  # noqa: PLR2004 - a minute


def database_text(engine: sa.Engine) -> str:
    """Return the name and the host of an engine's database as text; its password is left out."""
    url = engine.url
    host: Any = url.host or url.query.get("host")
    if not isinstance(host, str):
        host = None if host is None else ", ".join(host)
    port = f":{url.port}" if url.port else ""
    return f"database {url.database}" + (f" at {host}{port}" if host else "")
