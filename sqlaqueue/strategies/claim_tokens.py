"""How a row tells that its worker has died, and that it died again while it was running suspects together.

A rescued job keeps its last token while it waits, which marks it as a suspect. The tokens of claims are UUIDs of
version 4. Those of a claim of several suspects are of version 8, so that a job that waits with such a token is known to
have died a second time, and runs alone. It takes no column, and the claim of other jobs stays as it is.
"""

from __future__ import annotations

import uuid

import sqlalchemy as sa

from sqlaqueue.queue.spec import QueueSpec

CLAIM_TOKEN = "sqlaqueue_token"  # noqa: S105 - the name of a parameter
"""The parameter of a claim that takes another token than a random one."""

_VERSION_AT, _VERSION = 15, 8


def together_token() -> uuid.UUID:
    """Return a token for a claim of several suspects."""
    above = 76
    return uuid.UUID(int=uuid.uuid4().int & ~(0xF << above) | _VERSION << above)


def died_together(spec: QueueSpec) -> sa.ColumnElement[bool]:
    """Return the condition that a suspect died while it was running with other suspects."""
    version = sa.func.substr(sa.cast(spec.columns["lease_token"], sa.Text()), _VERSION_AT, 1)
    return version == sa.literal_column(f"'{_VERSION}'", sa.Text())
