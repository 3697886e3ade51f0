"""Which jobs still have a row."""

from __future__ import annotations

from collections.abc import Collection

import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue.queue.run import Key, keys_from
from sqlaqueue.queue.spec import QueueSpec


def existing_keys(session: Session, spec: QueueSpec, keys: Collection[Key]) -> set[Key]:
    """Return those of some keys whose rows exist."""
    found = sa.select(*spec.keys).where(spec.key_in(spec.keys, list(keys)))
    rows = session.execute(found, bind_arguments={"mapper": spec.mapper}).all()
    return set(keys_from((row if len(row) > 1 else row[0] for row in rows), len(spec.keys)))
