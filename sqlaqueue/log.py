"""The logger ``sqlaqueue`` and the attributes of its records.

Every record has the attributes in :data:`FIELDS`; those that do not apply are None. A format string can use them, as in
``%(event)s %(queue)s %(job_key)s``, and a JSON formatter handles them like any other ``extra``.
"""

from __future__ import annotations

import contextlib
import logging
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
