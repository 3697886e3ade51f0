"""Checks of a database when a Consumer starts: objects, versions, indexes and privileges, each with its fix."""

from __future__ import annotations

from sqlaqueue.postgresql.catalog.foreign_keys import ForeignKey, foreign_keys_to
from sqlaqueue.postgresql.catalog.held_slots import held_slots, slot_of
from sqlaqueue.postgresql.catalog.table_id import sees_all
from sqlaqueue.postgresql.checks.indexes import has_index, missing_index_advice, missing_indexes
from sqlaqueue.postgresql.checks.missing_objects import (
    UPDATE_COMMAND,
    check_complete,
    check_tables,
    missing_objects,
    split_schemas,
)
from sqlaqueue.postgresql.checks.privileges import (
    grants_for,
    missing_grants,
    missing_schema_grants,
    policies_for,
    row_security,
)
from sqlaqueue.postgresql.checks.versions import (
    outdated_functions,
    outdated_triggers,
    outdated_triggers_of,
    undefined_object_advice,
)

__all__ = [
    "UPDATE_COMMAND",
    "ForeignKey",
    "check_complete",
    "check_tables",
    "foreign_keys_to",
    "grants_for",
    "has_index",
    "held_slots",
    "missing_grants",
    "missing_index_advice",
    "missing_indexes",
    "missing_objects",
    "missing_schema_grants",
    "outdated_functions",
    "outdated_triggers",
    "outdated_triggers_of",
    "policies_for",
    "row_security",
    "sees_all",
    "slot_of",
    "split_schemas",
    "undefined_object_advice",
]
