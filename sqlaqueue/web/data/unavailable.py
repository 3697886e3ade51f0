"""Numbers that cannot be read at a bounded cost: why, and what to configure."""

from __future__ import annotations

from dataclasses import dataclass

from sqlaqueue.postgresql.catalog_text import quoted, table_name
from sqlaqueue.queue.options import FINISHED
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.sql.types import object_name
from sqlaqueue.web.data.queue_reader import QueueReader

HISTORY = "attempt_history=timedelta(days=14)"
"""The option that turns the attempt history on."""


@dataclass(frozen=True, kw_only=True)
class Fix:
    """One way to make a number available."""

    what: str
    """A sentence."""
    code: str
    """Python or SQL, to be copied."""


@dataclass(frozen=True, kw_only=True)
class Unavailable:
    """A number that is not read, as that would read a whole table."""

    reason: str
    """A sentence."""
    fixes: tuple[Fix, ...] = ()
    """Each one is enough by itself."""


def attempt_history_fix(spec: QueueSpec) -> Fix:
    """Return how to turn the attempt history of a queue on."""
    return Fix(
        what=f"Keep the attempts of {spec.model.__name__}, and migrate the database.",
        code=f"__queue__ = QueueConfig(..., {HISTORY})",
    )


def finished_index_fix(reader: QueueReader) -> Fix:
    """Return the SQL of an index that has the finished jobs of each state by time."""
    spec = reader.spec
    status, finished = (quoted(spec.columns[role].name) for role in ("status", "finished_at"))
    states = [state for state in FINISHED if getattr(spec.config.states, state) is not None]
    condition = " OR ".join(f"{status} = {spec.literal(state)}" for state in states)
    name = quoted(object_name("ix", spec.table.name, "finished"))
    table = table_name(reader.connection, spec.table)
    return Fix(
        what="Create an index of finished jobs, which has no entry for pending ones.",
        code=f"CREATE INDEX CONCURRENTLY {name} ON {table} ({status}, {finished})\n    WHERE {condition};",
    )
