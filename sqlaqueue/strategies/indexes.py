"""Indexes of a queue, with names that fit PostgreSQL's 63 bytes and never collide."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.sql.elements import conv

from sqlaqueue.queue.backend import backend
from sqlaqueue.queue.spec import QueueSpec

_OF_CLAIMS = {"claim", "suspect", "lease"}


def add_index(
    spec: QueueSpec, purpose: str, columns: Sequence[sa.Column[Any]], where: sa.ColumnElement[bool] | None = None
) -> sa.Index:
    """Add an index to the model's table, named after what it is for.

    The name is final (``conv``): a naming convention would name it after its first column, and two indexes
    of a queue may begin with the same one.
    """
    name = conv(backend().object_name("ix", spec.table.name, "queue", purpose))
    # A class that is defined again finds its table with the index of the class before.
    for known in [index for index in spec.table.indexes if index.name == name]:
        spec.table.indexes.discard(known)
    index = sa.Index(name, *columns, postgresql_where=where)
    if purpose in _OF_CLAIMS:
        spec.claim_indexes.append(index)
    return index
