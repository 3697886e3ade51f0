"""Whether the functions and triggers in the database are those of this version of sqlaqueue.

The comment of a function stores its version. An upgrade of sqlaqueue may bring a newer one, which a migration
creates; until then jobs may get no message, or wake no Consumer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from sqlaqueue.postgresql.catalog import queue_objects
from sqlaqueue.postgresql.checks.missing_objects import UPDATE_COMMAND
from sqlaqueue.postgresql.ddl import wake_triggers
from sqlaqueue.postgresql.ddl.attach import functions_of, objects_of
from sqlaqueue.postgresql.ddl.objects import Function, Trigger, TriggerFunction, version_in
from sqlaqueue.postgresql.sqlstate import UNDEFINED_COLUMN, UNDEFINED_TABLE, sqlstate
from sqlaqueue.queue.backend import SCHEDULE
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.texts import states_text


def outdated_triggers(session: Session | sa.Connection, spec: QueueSpec) -> str | None:
    """Return what is wrong with a queue's triggers in the database, and how to fix it; None if nothing is.

    It sends two small queries of the catalog, and none for a queue without triggers.
    """
    return outdated_triggers_of(session, spec.table, spec.model.__name__)


def outdated_triggers_of(session: Session | sa.Connection, table: sa.Table, needed_by: str) -> str | None:
    """Return what is wrong with the triggers of one table, as above.

    :param needed_by: what needs them, for the text.
    """
    objects = objects_of(table)
    functions = [each for each in objects if isinstance(each, TriggerFunction)]
    triggers = [each.name for each in objects if isinstance(each, Trigger)]
    if not functions and not triggers:
        return None
    comments = queue_objects.function_comments(session, table, [each.name for each in functions])
    other_version = _other_version(table, functions, comments, needed_by)
    if other_version is not None:
        return other_version
    enabled = queue_objects.trigger_names(session, table, enabled_only=True)
    silent = [name for name in triggers if name not in enabled]
    if not silent:
        return None
    there = queue_objects.trigger_names(session, table)
    missing, disabled = ([each for each in silent if (each in there) is found] for found in (False, True))
    what = states_text("trigger", "triggers", {"missing": missing, "disabled": disabled})
    return _outdated(table, needed_by, what, silent)


def outdated_functions(session: Session | sa.Connection, spec: QueueSpec) -> str | None:
    """Return what is wrong with the functions that statements of a queue call, as above."""
    functions = functions_of(spec)
    existing = queue_objects.existing_functions(session, spec.table, functions)
    comments = {each.name: existing[each.signature].comment for each in functions if each.signature in existing}
    return _other_version(spec.table, functions, comments, spec.model.__name__)


def _other_version(
    table: sa.Table, functions: Sequence[Function], comments: Mapping[str, str | None], needed_by: str
) -> str | None:
    """Return which function is missing or of another version; None if none is."""
    for function in functions:
        wanted = version_in(function.comment)
        found = version_in(comments.get(function.name))
        if function.name not in comments or found < wanted:
            there = f"is of version {found}" if function.name in comments else "is missing"
            what = f"the {function.kind} {function.name} {there}, and version {wanted} is needed"
            return _outdated(table, needed_by, what, [function.name])
        if found > wanted:
            return (
                f"{needed_by}: the {function.kind} {function.name} is of version {found}, and this process knows "
                f"version {wanted}: its sqlaqueue is older than the one that the database was migrated for; upgrade it"
            )
    return None


def undefined_object_advice(error: BaseException, spec: QueueSpec) -> str | None:
    """Return how to fix an error about a table or a column that does not exist; None for any other error.

    A migration that changes a queue's strategy drops objects that Consumers of the old models use.
    """
    if not isinstance(error, DBAPIError) or sqlstate(error) not in {UNDEFINED_TABLE, UNDEFINED_COLUMN}:
        return None
    return (
        f"{spec.model.__name__}: the database does not have what this process works with. If a migration has changed "
        f"the queue, restart this consumer with the models of today; if it has not been run, run `alembic upgrade head`"
    )


def _outdated(table: sa.Table, needed_by: str, what: str, names: Sequence[str]) -> str:
    return (
        f"{needed_by}: the table {table.fullname} is not up to date: {what}. Run {UPDATE_COMMAND}; "
        f"env.py needs the line `import sqlaqueue.alembic` for that{_consequence(table, names)}"
    )


def _consequence(table: sa.Table, names: Sequence[str]) -> str:
    """Return what follows until triggers or functions of a table are repaired, as the doctor says it."""
    if table.name == SCHEDULE:
        return ""
    if all(name.startswith(wake_triggers.PREFIX) for name in names):
        return "; until then idle Consumers are not notified of new jobs, and find them at their next poll"
    return "; until then jobs may get no message, or be admitted wrongly, and so are not claimed"
