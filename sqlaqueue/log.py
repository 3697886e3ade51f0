"""What the records of the logger ``sqlaqueue`` carry beside their text.

Every record has the attributes of :data:`FIELDS`, None where one does not apply, so that a formatter can name them
without asking: ``%(event)s %(queue)s %(job_key)s``. A formatter that writes JSON finds them as it finds any ``extra``.
"""

from __future__ import annotations

import logging
from typing import Any

import sqlalchemy as sa

logger = logging.getLogger("sqlaqueue")

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
"""The attributes of every record; none of them is one that :class:`logging.LogRecord` has itself."""

_NONE = dict.fromkeys(FIELDS)


def fields(event: str, **values: Any) -> dict[str, Any]:
    """Return the ``extra`` of one record: all of :data:`FIELDS`, and what else belongs to this event."""
    return {**_NONE, "event": event, **values}


def seconds_text(seconds: float) -> str:
    """Return a span of time as a record's text has it."""
    return f"{seconds:.3f} s" if seconds < 1 else f"{seconds:.1f} s" if seconds < 60 else f"{seconds:.0f} s"  # noqa: PLR2004 - a minute


def database_text(engine: sa.Engine) -> str:
    """Return the database of an engine and its host, without a password."""
    url = engine.url
    host: Any = url.host or url.query.get("host")
    if not isinstance(host, str):
        host = None if host is None else ", ".join(host)
    port = f":{url.port}" if url.port else ""
    return f"database {url.database}" + (f" at {host}{port}" if host else "")
