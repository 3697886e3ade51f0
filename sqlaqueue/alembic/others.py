"""Other plug-ins for Alembic that look at triggers, functions and types of states, and would drop or make them again.

alembic_utils drops each trigger and function that has not been registered with it. What it found is known here only by
the look of its operations, so that this plug-in needs none of the others.
"""

from __future__ import annotations

import sys

from alembic.operations import MigrateOperation
from alembic.operations import ops as alembic_ops

from sqlaqueue.alembic.catalog import PREFIX

_UTILS = "alembic_utils"
_ENUMS = "alembic_postgresql_enum"


def keep_ours(upgrade: alembic_ops.UpgradeOps) -> None:
    """Take out of a migration what alembic_utils does to triggers and functions of queues.

    Those that are not wanted any more are dropped by this plug-in.
    """
    upgrade.ops[:] = [op for op in upgrade.ops if not _drops_ours(op)]


def _drops_ours(op: MigrateOperation) -> bool:
    kind = type(op)
    if kind.__name__ != "DropOp" or kind.__module__.partition(".")[0] != _UTILS:
        return False
    # The name of a trigger, or a function with its arguments.
    signature = str(getattr(getattr(op, "target", None), "signature", ""))
    return signature.lstrip('"').startswith(PREFIX)


def types_are_left_to_another() -> bool:
    """Tell whether ``env.py`` has alembic-postgresql-enum, which creates and drops the types of all columns.

    Its operations come after those of this plug-in, and fail where a type is there already, or is gone.
    """
    return _ENUMS in sys.modules
