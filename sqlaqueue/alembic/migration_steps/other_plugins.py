"""Compatibility with other Alembic plug-ins that compare triggers, functions or enum types.

They are recognized by the names of their classes and modules, so that this plug-in does not depend on them.
"""

from __future__ import annotations

import sys

from alembic.operations import MigrateOperation
from alembic.operations import ops as alembic_ops

from sqlaqueue.postgresql.catalog_schemas import PREFIX

_UTILS = "alembic_utils"
_ENUMS = "alembic_postgresql_enum"


def remove_drops_of_queue_objects(upgrade: alembic_ops.UpgradeOps) -> None:
    """Remove the operations by which alembic_utils drops triggers and functions of queues.

    alembic_utils drops all triggers and functions that are not registered with it. Those that queues no longer need are
    dropped by this plug-in.
    """
    upgrade.ops[:] = [op for op in upgrade.ops if not _drops_queue_object(op)]


def _drops_queue_object(op: MigrateOperation) -> bool:
    kind = type(op)
    if kind.__name__ != "DropOp" or kind.__module__.partition(".")[0] != _UTILS:
        return False
    # The name of a trigger, or of a function with its arguments.
    signature = str(getattr(getattr(op, "target", None), "signature", ""))
    return signature.lstrip('"').startswith(PREFIX)


def enums_are_managed_elsewhere() -> bool:
    """Return whether ``env.py`` uses alembic-postgresql-enum, which creates and drops the types of all columns.

    Its operations come after those of this plug-in, and fail if a type exists already or has been dropped.
    """
    return _ENUMS in sys.modules
