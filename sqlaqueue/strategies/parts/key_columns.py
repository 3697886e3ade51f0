"""The columns of attributes that a configuration names as a key, checked when a class is mapped."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from sqlaqueue.exc import ConfigurationError
from sqlaqueue.queue.config import did_you_mean
from sqlaqueue.queue.spec import QueueSpec

_UNCHANGED_ROLES = ("priority", "created_at", "max_attempts")
"""The roles that the library does not change while a job is in the queue."""


def column_named(spec: QueueSpec, name: str, what: str) -> sa.Column[Any]:
    """Return the column of an attribute.

    :param what: the class and the part of its configuration, for errors.
    :raises ConfigurationError: if the class has no such attribute with a column in its own table.
    """
    column = spec.mapper.columns.get(name)
    if isinstance(column, sa.Column) and column.table is spec.table:
        return column
    # Not mapper.attrs, which would configure the mappers of classes that refer to others not mapped yet.
    is_other = column is None and spec.mapper.has_property(name)
    hint = "; of a relationship, name the attributes of its foreign key" if is_other else ""
    msg = f"{what}: there is no such attribute with a column in {spec.table.name}{hint}"
    raise ConfigurationError(msg + ("" if is_other else did_you_mean(name, spec.mapper.columns.keys())))


def key_column(spec: QueueSpec, name: str, what: str) -> sa.Column[Any]:
    """Return the column of an attribute that is a part of a key: its values are compared, and must not change.

    :raises ConfigurationError: as above, and if the column is not fit for that.
    """
    column, model = column_named(spec, name, what), spec.model.__name__
    role = next((role for role, other in spec.columns.items() if other is column), None)
    if role is not None and role not in _UNCHANGED_ROLES:
        msg = f"{what}: {model}.{name} is the {role} of the queue, which changes while a job is in it; leave it out"
        raise ConfigurationError(msg)
    stored = getattr(column.type, "impl_instance", column.type)
    if getattr(stored, "__visit_name__", "") == "JSON":
        msg = f"{what}: PostgreSQL compares no values of type JSON; use JSONB for {model}.{name}"
        raise ConfigurationError(msg)
    return column
