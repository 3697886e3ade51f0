"""The operations of queues, as ``op.create_queue_triggers()`` and others, each with its reverse.

A migration must do the same in two years, with any version of the models and of this library. So an operation carries
everything that it writes: the text of a function, columns, conditions.

``schema`` is the schema of all tables and functions that an operation names, None for the default one.
"""

from __future__ import annotations

from sqlaqueue.alembic.operations.base import OperationList, PerDirection, QueueOp
from sqlaqueue.alembic.operations.jobs_and_messages import EmptyMessages, FillMessages, LockTables, ReleaseJobs
from sqlaqueue.alembic.operations.tables import (
    AddColumns,
    CreateEnum,
    CreateIndex,
    DropColumns,
    DropEnum,
    DropIndex,
    SetStorageParameters,
)
from sqlaqueue.alembic.operations.triggers import (
    CreateFunction,
    CreateTriggers,
    DropFunction,
    DropTriggers,
    ExecuteVerbatim,
    TriggerDefinition,
    trigger_definition,
)
from sqlaqueue.alembic.operations.unique_indexes import CreateUniqueIndex

__all__ = [
    "AddColumns",
    "CreateEnum",
    "CreateFunction",
    "CreateIndex",
    "CreateTriggers",
    "CreateUniqueIndex",
    "DropColumns",
    "DropEnum",
    "DropFunction",
    "DropIndex",
    "DropTriggers",
    "EmptyMessages",
    "ExecuteVerbatim",
    "FillMessages",
    "LockTables",
    "OperationList",
    "PerDirection",
    "QueueOp",
    "ReleaseJobs",
    "SetStorageParameters",
    "TriggerDefinition",
    "trigger_definition",
]
