"""Why a new instance of a queue class would not be enqueued: its twin."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Mapper, RelationshipDirection, Session
from sqlalchemy.orm.attributes import instance_state, set_committed_value

from sqlaqueue.admin.explanation.result import Reason
from sqlaqueue.admin.job_listing import JobInfo, job
from sqlaqueue.mapping.mixin import spec_of
from sqlaqueue.queue.run import Key, key_text
from sqlaqueue.strategies.twins import UniqueKey, unique_key
from sqlaqueue.texts import moment_text
from sqlaqueue.unique.insert import NewJob, search, set_created_at
from sqlaqueue.unique.relationships import set_foreign_key


def reasons_of_new(session: Session, given: Any) -> tuple[Reason, ...]:
    """Return whether a twin keeps a new instance from being enqueued. The instance is left as it is.

    :raises StatementError: if the database computes a value that makes the job unique.
    """
    spec = spec_of(type(given))
    key = unique_key(spec)
    if key is None:
        return (
            Reason(
                "ready",
                f"Nothing keeps it from being enqueued: {spec.name} has no QueueConfig(unique=...), so no twins.",
            ),
        )
    connection = session.connection(bind_arguments={"mapper": spec.mapper})
    new = NewJob(_copy(given))
    set_created_at(connection, key, [new])
    values = new.unique_values(key, connection)
    pairs = ", ".join(f"{name}={getattr(new.job, name)!r}" for name in key.config.attributes)
    if key.config.nulls_distinct and None in values:
        return (
            Reason("ready", f"It has no twin, as it has a None in {pairs} and NULLs differ; enqueue() inserts it."),
        )
    twin = search(connection, key, [values])[0].twin
    found = None if twin is None else job(session, spec.model, twin)
    if twin is not None and found is not None:
        return (_twin(key, twin, found[0], pairs),)
    return (
        Reason(
            "ready",
            f"No job with {pairs} counts, so enqueue() inserts it; it would wait for a transaction that has inserted "
            "one and is not committed.",
        ),
    )


def _twin(key: UniqueKey, twin: Key, info: JobInfo, pairs: str) -> Reason:
    since = "" if info.created_at is None else f", enqueued at {moment_text(info.created_at)}"
    until = "" if key.config.per is None else f", or the period of {key.config.per} is over"
    return Reason(
        "twin",
        f"Job {key_text(twin)} has {pairs} as well and is {info.state}{since}: enqueue() returns it and inserts "
        f"nothing, and an INSERT fails, until it is no longer {' or '.join(key.states)}{until}.",
    )


def _copy(given: Any) -> Any:
    """Return a copy of an instance with its values, in no session: defaults are set on this one only."""
    mapper: Mapper[Any] = sa.inspect(given).mapper
    copy = mapper.class_manager.new_instance()
    present = instance_state(given).dict
    for name, value in NewJob(given).given().items():
        set_committed_value(copy, name, value)
    for each in mapper.relationships:
        parent = present.get(each.key)
        if each.direction is not RelationshipDirection.MANYTOONE or each.viewonly or parent is None:
            continue
        set_foreign_key(copy, each, parent)
    return copy
