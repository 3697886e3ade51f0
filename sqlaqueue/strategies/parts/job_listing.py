"""A list of jobs for operators: one row for each job, with its key, its state and the columns of its life."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from sqlaqueue._typing import AnySelect
from sqlaqueue.queue.options import STATES
from sqlaqueue.queue.spec import QueueSpec

OTHER = "other"
"""The state of rows whose status is none of the queue's values."""

SHOWN = (
    "priority",
    "run_at",
    "created_at",
    "started_at",
    "finished_at",
    "attempts",
    "max_attempts",
    "last_error",
    "claimed_by",
    "lease_expires_at",
)
"""The roles that a listing has as columns, unless the model leaves them out."""


def key_labels(spec: QueueSpec) -> list[str]:
    """Return the names of the columns of a listing that contain the key."""
    return [f"key_{number}" for number in range(len(spec.keys))]


def labelled_keys(spec: QueueSpec, chosen: AnySelect) -> list[Any]:
    """Return the key columns of the jobs that ``chosen`` selects, labelled for a listing.

    They are attributes of the entity, for which the ORM adds the discriminator of a single-table subclass.
    """
    entity = chosen.column_descriptions[0]["entity"]
    mapper = sa.inspect(entity)
    keys = [getattr(entity, mapper.get_property_by_column(key).key) for key in spec.keys]
    return [key.label(name) for key, name in zip(keys, key_labels(spec), strict=True)]


def job_listing(spec: QueueSpec, chosen: AnySelect, states: Sequence[str] | None) -> AnySelect:
    """Return the listing of a queue whose rows have a status."""
    status = spec.columns["status"]
    named = [state for state in STATES if getattr(spec.config.states, state) is not None]
    state = sa.case(*((status == spec.literal(each), sa.literal_column(f"'{each}'")) for each in named), else_=OTHER)
    columns = [*labelled_keys(spec, chosen), sa.type_coerce(state, sa.Text()).label("state")]
    columns.extend(spec.columns[role].label(role) for role in SHOWN if spec.has(role))
    listing = chosen.with_only_columns(*columns, maintain_column_froms=True)
    return listing if states is None else listing.where(spec.in_state(*states))
