"""What the file lacks for a queue."""

from __future__ import annotations

from sqlaqueue.engines.checks import (
    UPDATE_COMMAND,
    check_complete,
    check_tables,
    foreign_keys_to,
    grants_for,
    has_index,
    missing_grants,
    missing_index_advice,
    missing_indexes,
    missing_policies,
    missing_schema_grants,
    outdated_functions,
    outdated_triggers,
    outdated_triggers_of,
    policies_for,
    split_schemas,
)
from sqlaqueue.queue.strategy_protocol import Spec

__all__ = [
    "UPDATE_COMMAND",
    "check_complete",
    "check_tables",
    "foreign_keys_to",
    "grants_for",
    "has_index",
    "missing_grants",
    "missing_index_advice",
    "missing_indexes",
    "missing_policies",
    "missing_schema_grants",
    "outdated_functions",
    "outdated_triggers",
    "outdated_triggers_of",
    "policies_for",
    "split_schemas",
    "undefined_object_advice",
]


def undefined_object_advice(error: BaseException, spec: Spec) -> str | None:
    """Return how to fix an error about a table or a column that does not exist."""
    text = str(getattr(error, "orig", ""))
    if not text.startswith(("no such table", "no such column")) and "has no column named" not in text:
        return None
    return (
        f"{text}, which {spec.model.__name__} needs; create it with Base.metadata.create_all(engine), or migrate with "
        f"{UPDATE_COMMAND}"
    )
