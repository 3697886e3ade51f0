"""What is in a queue, as its operator sees it: one row a job with its key, its state and what it shows of its life."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from sqlaqueue._typing import AnySelect
from sqlaqueue.queue.config import STATES
from sqlaqueue.queue.spec import QueueSpec

OTHER = "other"
"""The state of rows whose status is none of the queue's words."""

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
"""The roles that a survey shows; those that the model leaves out are no columns of it."""


def key_labels(spec: QueueSpec) -> list[str]:
    """Return the names under which a survey shows the parts of a key."""
    return [f"key_{number}" for number in range(len(spec.keys))]


def labelled_keys(spec: QueueSpec, chosen: AnySelect) -> list[Any]:
    """Return the key of the jobs that ``chosen`` selects, under the names that a survey has for it.

    As attributes of the entity: by these the ORM knows to add the discriminator of a single-table subclass.
    """
    entity = chosen.column_descriptions[0]["entity"]
    mapper = sa.inspect(entity)
    keys = [getattr(entity, mapper.get_property_by_column(key).key) for key in spec.keys]
    return [key.label(name) for key, name in zip(keys, key_labels(spec), strict=True)]


def job_listing(spec: QueueSpec, chosen: AnySelect, states: Sequence[str] | None) -> AnySelect:
    """Return the survey of a queue whose rows have a status."""
    status = spec.columns["status"]
    words = [state for state in STATES if getattr(spec.config.states, state) is not None]
    state = sa.case(*((status == spec.literal(each), sa.literal_column(f"'{each}'")) for each in words), else_=OTHER)
    columns = [*labelled_keys(spec, chosen), sa.type_coerce(state, sa.Text()).label("state")]
    columns.extend(spec.columns[role].label(role) for role in SHOWN if spec.has(role))
    survey = chosen.with_only_columns(*columns, maintain_column_froms=True)
    return survey if states is None else survey.where(spec.in_state(*states))
