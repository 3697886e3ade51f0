"""Indexes on a queue's table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.sql.elements import conv

from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.sql.types import object_name

_OF_OTHERS = {"finished", "unique"}
"""The purposes of indexes that neither claims nor rescues read."""


def add_index(
    spec: QueueSpec,
    purpose: str,
    columns: Sequence[sa.ColumnElement[Any]],
    where: sa.ColumnElement[bool] | None = None,
    *,
    unique: bool = False,
) -> sa.Index:
    """Add an index to the model's table, named after its purpose.

    The name is final (``conv``): a naming convention would name the index after its first column, which two indexes of
    a queue may share.
    """
    name = conv(object_name("ix", spec.table.name, "queue", purpose))
    # The table of a class that is defined again still has the index of the class before.
    for known in [index for index in spec.table.indexes if index.name == name]:
        spec.table.indexes.discard(known)
    index = sa.Index(name, *columns, unique=unique, postgresql_where=where)
    if purpose not in _OF_OTHERS:
        spec.claim_indexes.append(index)
    return index
