"""Autogenerate on MariaDB: it refuses the tables of queues, which it would not create as prepare() does."""

from __future__ import annotations

from alembic.autogenerate.api import AutogenContext
from alembic.operations import ops as alembic_ops
from alembic.util import PriorityDispatchResult

from sqlaqueue.exc import ConfigurationError
from sqlaqueue.postgresql.ddl import queue_of

_OURS = "sqlaqueue_"


def refuse_queues(
    context: AutogenContext,
    upgrade: alembic_ops.UpgradeOps,  # noqa: ARG001 - the signature that Alembic calls
    schemas: set[str | None],  # noqa: ARG001 - as above
) -> PriorityDispatchResult:
    """Refuse tables of queues that ``include_object`` does not exclude.

    The migration would have PostgreSQL's partial indexes, whose columns a claim on MariaDB does not find, texts without
    the binary collation, and defaults that MariaDB does not accept.

    :raises ConfigurationError: naming the tables and what to do instead.
    """
    found = [
        table.name
        for table in context.sorted_tables
        if (queue_of(table) is not None or table.name.startswith(_OURS))
        and context.run_object_filters(table, table.name, "table", False, None)  # noqa: FBT003 - Alembic passes it so
    ]
    if found:
        msg = (
            f"env.py: autogenerate cannot write the tables of queues on MariaDB ({', '.join(sorted(found))}); exclude "
            "them by include_object, and create them in a migration by "
            "Base.metadata.create_all(op.get_bind(), tables=[Model.__table__])"
        )
        raise ConfigurationError(msg)
    return PriorityDispatchResult.CONTINUE
