"""The logger ``sqlaqueue`` and the attributes of its records.

Every record has the attributes in :data:`FIELDS`; those that do not apply are None. A format string can use them, as in
``%(event)s %(queue)s %(job_key)s``, and a JSON formatter handles them like any other ``extra``.
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
