"""The tokens of claims, and what a token that a dead worker left behind reveals about its run.

Each execution of a claim has a new token. A rescued job keeps its last token while it waits. The kind of the token is
in its UUID version, so it needs no column:

* **alone**, version 4: while the job ran, its worker ran no job of another claim;
* **shared**, version 8: its worker ran jobs of several claims at the same time;
* **several quarantined jobs**, version 8: as shared, and all jobs of the claim had been quarantined before. A job that
  waits with such a token has lost its worker a second time, and runs alone from then on.
"""

from __future__ import annotations

import uuid

import sqlalchemy as sa

from sqlaqueue.queue.spec import QueueSpec

_SHARED, _SEVERAL_QUARANTINED = 0x81, 0x82
"""The version, and the digit after it."""

_VERSION_AT = 15
"""The position of the version in the text of a UUID, from 1."""

alone_token = uuid.uuid4


def shared_token() -> uuid.UUID:
    """Return a token for a claim of a worker that runs jobs of several claims at the same time."""
    return _token(_SHARED)


def several_quarantined_token() -> uuid.UUID:
    """Return a token for a claim of several quarantined jobs, by a worker that runs other jobs as well."""
    return _token(_SEVERAL_QUARANTINED)


def ran_beside_others(token: sa.ColumnElement[uuid.UUID]) -> sa.ColumnElement[bool]:
    """Return the condition that a job's worker ran jobs of several claims at the same time."""
    return _digits(token, 1) == sa.literal_column("'8'", sa.Text())


def lost_twice(spec: QueueSpec) -> sa.ColumnElement[bool]:
    """Return the condition that a job lost its worker while it ran with other quarantined jobs."""
    return _digits(spec.columns["lease_token"], 2) == sa.literal_column(f"'{_SEVERAL_QUARANTINED:x}'", sa.Text())


def _token(kind: int) -> uuid.UUID:
    above = 72
    return uuid.UUID(int=uuid.uuid4().int & ~(0xFF << above) | kind << above)


def _digits(token: sa.ColumnElement[uuid.UUID], number: int) -> sa.ColumnElement[str]:
    digits: sa.ColumnElement[str] = sa.func.substr(sa.cast(token, sa.Text()), _VERSION_AT, number)
    return digits
