"""Statements that insert rows of jobs again unless a twin is there by now, for a queue whose claims delete rows.

Of several twins the first of ``rows`` is inserted. A row that is not inserted becomes a cancelled dead letter.
"""

from __future__ import annotations

import sqlalchemy as sa

from sqlaqueue._typing import AnySelect
from sqlaqueue.postgresql.side_tables import bury
from sqlaqueue.queue.names import DEAD_LETTER
from sqlaqueue.queue.spec import QueueSpec, clock
from sqlaqueue.sql.inserts import insert_unless
from sqlaqueue.strategies.parts.columns import named
from sqlaqueue.strategies.parts.twins import TWIN, reason
from sqlaqueue.strategies.parts.unique_key import UniqueKey, key_text_of


def insert_again(spec: QueueSpec, key: UniqueKey, rows: AnySelect) -> AnySelect:
    """Return the statement that inserts ``rows``, with all columns of the table, or buries them."""
    back, inserted = _inserted(spec, key, rows)
    twin = _twin_of(spec, key, back, inserted)
    left_out = sa.select(*back.c).where(~_is_among(spec, back, inserted)).cte("sqlaqueue_left_out")
    error = reason(_twin_of(spec, key, left_out, inserted))
    buried = bury(spec, left_out, "cancelled", error).cte("sqlaqueue_buried")
    return _judged(spec, back, inserted, twin).add_cte(buried)


def requeue_letters(spec: QueueSpec, key: UniqueKey, letters: sa.CTE, rows: AnySelect) -> AnySelect:
    """Return the statement that inserts dead letters as ``rows``, or marks them as cancelled.

    :param letters: the dead letters, locked, see :mod:`sqlaqueue.strategies.parts.dead_letters`.
    """
    back, inserted = _inserted(spec, key, rows)
    dead = spec.side_tables[DEAD_LETTER]
    here = sa.and_(dead.c.queue == letters.c.sqlaqueue_letter_queue, dead.c.key == letters.c.sqlaqueue_letter_key)
    is_back = _is_among(spec, letters, inserted)
    opened = sa.delete(dead).where(here, is_back).cte("sqlaqueue_opened")
    twin = _twin_of(spec, key, letters, inserted)
    marked = (
        sa.update(dead)
        # A twin that was committed after the statement had begun is not known yet: the letter stays as it is.
        .where(here, ~is_back, twin.is_not(None))
        .values(state="cancelled", error=reason(twin, dead.c.error), created_at=clock())
        .cte("sqlaqueue_marked")
    )
    return _judged(spec, back, inserted, _twin_of(spec, key, back, inserted)).add_cte(opened, marked)


def _inserted(spec: QueueSpec, key: UniqueKey, rows: AnySelect) -> tuple[sa.CTE, sa.CTE]:
    back = rows.cte("sqlaqueue_back")
    names = [column.key for column in back.c]
    insert = insert_unless(spec.table, (names, sa.select(*back.c)), unique=key.values(spec.table), where=None)
    returned = dict.fromkeys([*spec.keys, *key.stored])
    return back, insert.returning(*named(returned)).cte("sqlaqueue_inserted")


def _judged(spec: QueueSpec, back: sa.CTE, inserted: sa.CTE, twin: sa.ColumnElement[str]) -> AnySelect:
    shown = sa.case((~_is_among(spec, back, inserted), sa.func.coalesce(twin, "")))
    return sa.select(*(back.c[key.key] for key in spec.keys), shown.label(TWIN))


def _is_among(spec: QueueSpec, rows: sa.FromClause, inserted: sa.CTE) -> sa.ColumnElement[bool]:
    here = sa.select(sa.literal(1)).select_from(inserted)
    return here.where(*(inserted.c[key.key] == rows.c[key.key] for key in spec.keys)).correlate(rows).exists()


def _twin_of(spec: QueueSpec, key: UniqueKey, rows: sa.FromClause, inserted: sa.CTE) -> sa.ColumnElement[str]:
    """Return the key of a twin that was there, or is among the rows that the statement inserts."""
    table = spec.table.alias("sqlaqueue_twin_row")
    found = [
        sa.select(key_text_of(spec, each)).where(key.are_twins(each, rows)).correlate(rows).limit(1).scalar_subquery()
        for each in (table, inserted)
    ]
    return sa.func.coalesce(*found, type_=sa.Text())
