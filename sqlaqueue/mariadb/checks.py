"""What the database lacks for a queue."""

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
from sqlaqueue.mariadb.errors import number_of, text_of
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

_UNDEFINED = {1051, 1054, 1146}


def undefined_object_advice(error: BaseException, spec: Spec) -> str | None:
    """Return how to fix an error about a table or a column that does not exist."""
    if number_of(error) not in _UNDEFINED:
        return None
    return (
        f"{text_of(error)}, which {spec.model.__name__} needs; create it with Base.metadata.create_all(engine), or "
        f"migrate with {UPDATE_COMMAND}"
    )
