"""Search for the twins of jobs that are to be enqueued."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import sqlalchemy as sa

from sqlaqueue._typing import AnySelect
from sqlaqueue.postgresql.claim_scan import planned_anew
from sqlaqueue.queue.run import Key
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.sql.types import guarded, numbered_rows
from sqlaqueue.strategies.columns import same
from sqlaqueue.strategies.twins import UniqueKey, explaining_missing_index

_NUMBER = "sqlaqueue_number"


class Found(NamedTuple):
    """What a search has found for one job."""

    twin: Key | None
    """The key of the job that counts already; None for none."""
    first: int
    """The place of the first job of the call with these values; its own for most."""
    order: int
    """The rank of the values: two calls that insert in this order do not wait for each other in a circle."""


def search(connection: sa.Connection, key: UniqueKey, values: Sequence[Sequence[Any]]) -> list[Found]:
    """Look for jobs that count and have the given values.

    The server compares them: values that differ in Python may be equal there, such as texts with a collation.

    :param values: those of :attr:`UniqueKey.stored`, for each job.
    """
    spec = key.spec
    columns = {column.key: (column.type, [row[place] for row in values]) for place, column in enumerate(key.stored)}
    given = numbered_rows(columns, _NUMBER)
    parts = key.as_one(given)
    found = sa.select(
        given.c[_NUMBER],
        sa.func.min(given.c[_NUMBER]).over(partition_by=[parts]),
        sa.func.row_number().over(order_by=[parts, given.c[_NUMBER]]),
        *spec.keys,
    ).select_from(given.outerjoin(spec.table, sa.and_(key.are_twins(spec.table, given), key.counts(spec.table))))
    found = found.where(planned_anew()).order_by(given.c[_NUMBER])
    with explaining_missing_index(spec):
        rows: Any = connection.execute(guarded(found))
    # One for each: without the index there may be several twins, which the INSERT finds out.
    answers = {
        number: Found(None if twin[0] is None else tuple(twin), first - 1, order)
        for number, first, order, *twin in rows
    }
    return list(answers.values())


def with_keys(spec: QueueSpec, jobs: AnySelect, keys: Sequence[Key]) -> AnySelect:
    """Return those of ``jobs``, a SELECT from the table, that have these keys.

    By a join: for the condition that a key is in an array, the server compares each row with each key.
    """
    columns = {column.key: (column.type, [key[place] for key in keys]) for place, column in enumerate(spec.keys)}
    given = numbered_rows(columns, _NUMBER)
    return jobs.join(given, same(spec.keys, [given.c[column.key] for column in spec.keys]))
