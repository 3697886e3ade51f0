"""What autogenerate finds out about queues, beyond what Alembic sees by itself.

Alembic shows each table to :func:`remember_table`, after its filters (``include_name``, ``include_object``), and
compares tables, columns and indexes. When it is through with all of them, :func:`compare_queues` looks at the same
tables for what it does not see, and completes the list of operations. The way down is that list backwards.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic.autogenerate.api import AutogenContext
from alembic.operations import ops as alembic_ops
from alembic.util import PriorityDispatchResult

from sqlaqueue.alembic import adopting, objects, others, switching, tables, wording
from sqlaqueue.alembic.catalog import Catalog
from sqlaqueue.alembic.seen import Review, Seen, seen_by, take_seen


def remember_table(  # noqa: PLR0917 - the signature that Alembic calls
    context: AutogenContext,
    modify: alembic_ops.ModifyTableOps,
    schema: str | None,
    name: str,
    found: sa.Table | None,
    wanted: sa.Table | None,
) -> PriorityDispatchResult:
    """Remember a table that Alembic compares."""
    seen_by(context).append(Seen((schema, str(name)), found, wanted, modify))
    return PriorityDispatchResult.CONTINUE


def compare_queues(
    context: AutogenContext, upgrade: alembic_ops.UpgradeOps, schemas: set[str | None]
) -> PriorityDispatchResult:
    """Complete the operations that Alembic has found.

    :raises CommandError: when the database has something that cannot be meant.
    """
    others.keep_ours(upgrade)
    seen = take_seen(context)
    if context.connection is None or not seen:
        return PriorityDispatchResult.CONTINUE
    catalog = Catalog(context.connection, [each.place for each in seen], schemas)
    review = Review(context, upgrade, seen, catalog)
    adopting.refuse_columns_of_others(review)
    tables.compare_within(review)
    if not others.types_are_left_to_another():
        objects.compare_enums(review)
    tables.compare_storage(review)
    objects.compare_functions(review)
    objects.compare_triggers(review)
    switching.move_jobs(review)
    switching.keep_order_of_columns(review)
    switching.ask_about_rows(review)
    adopting.spare_live_tables(review)
    wording.write_as_meant(review)
    kept = [op for op in upgrade.ops if not (isinstance(op, alembic_ops.ModifyTableOps) and op.is_empty())]
    upgrade.ops[:] = [*review.front, *kept, *review.behind, *review.last]
    return PriorityDispatchResult.CONTINUE
