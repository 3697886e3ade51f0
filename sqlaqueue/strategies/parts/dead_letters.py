"""Dead letters as rows of the model's table, with the conditions of a caller's select applied to them."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy.sql.visitors import replacement_traverse

from sqlaqueue._typing import AnySelect
from sqlaqueue.exc import StatementError
from sqlaqueue.postgresql.side_tables import stored_rows
from sqlaqueue.queue.names import DEAD_LETTER
from sqlaqueue.queue.spec import QueueSpec


def stored_columns(spec: QueueSpec) -> list[sa.Column[Any]]:
    """Return the columns of the model's table that an INSERT may write."""
    return [column for column in spec.table.c if column.computed is None]


def letters(spec: QueueSpec, chosen: AnySelect, verb: str) -> AnySelect:
    """Return the dead letters of a queue that ``chosen`` selects.

    The columns of the table of dead letters have names that begin with ``sqlaqueue_letter_``.

    :raises StatementError: when ``chosen`` joins another table.
    """
    dead = spec.side_tables[DEAD_LETTER]
    rows = stored_rows(dead.c.row, stored_columns(spec))
    found = sa.select(
        *(rows.c[column.key] for column in stored_columns(spec)),
        dead.c.queue.label("sqlaqueue_letter_queue"),
        dead.c.key.label("sqlaqueue_letter_key"),
        dead.c.state.label("sqlaqueue_letter_state"),
        dead.c.error.label("sqlaqueue_letter_error"),
        dead.c.created_at.label("sqlaqueue_letter_time"),
    ).select_from(dead.join(rows, sa.true()))
    return found.where(dead.c.queue == spec.name, *_conditions(spec, rows, chosen, verb))


def locked_letters(spec: QueueSpec, chosen: AnySelect, verb: str) -> AnySelect:
    """Return the same, locked; those that another transaction has locked are passed over."""
    return letters(spec, chosen, verb).with_for_update(of=spec.side_tables[DEAD_LETTER], skip_locked=True)


def delete_letters(spec: QueueSpec, chosen: sa.CTE) -> sa.CTE:
    """Return the DELETE of dead letters, as a CTE that returns their keys."""
    dead = spec.side_tables[DEAD_LETTER]
    here = sa.and_(dead.c.queue == chosen.c.sqlaqueue_letter_queue, dead.c.key == chosen.c.sqlaqueue_letter_key)
    return sa.delete(dead).where(here).returning(dead.c.key).cte("sqlaqueue_deleted_letters")


def _conditions(spec: QueueSpec, rows: sa.FromClause, chosen: AnySelect, verb: str) -> list[sa.ColumnElement[bool]]:
    """Return the conditions of ``chosen`` on the model's table as conditions on ``rows``."""
    if any(isinstance(source, sa.Join) for source in chosen.get_final_froms()):
        name = spec.model.__name__
        msg = (
            f"{verb}(select({name}).join(...)): what failed of {name} is kept in another table, which cannot take the "
            f"place of {name} in a join; say it with exists(), such as where({name}.relation.has(...))"
        )
        raise StatementError(msg)

    def replace(element: Any, **_: Any) -> Any:
        mine = isinstance(element, sa.Column) and spec.table.c.contains_column(element)
        return rows.c[element.key] if mine else None

    conditions = [] if chosen.whereclause is None else [replacement_traverse(chosen.whereclause, {}, replace)]
    mapper = sa.inspect(chosen.column_descriptions[0]["entity"])
    if mapper is not spec.mapper and mapper.polymorphic_on is not None:
        identities = [part.polymorphic_identity for part in mapper.self_and_descendants]
        conditions.append(rows.c[mapper.polymorphic_on.key].in_(identities))
    return conditions
