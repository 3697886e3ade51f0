"""What the instances of a test's session show after others have written in its transaction."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from sqlalchemy.exc import InvalidRequestError
from sqlalchemy.orm import Session
from sqlalchemy.orm.attributes import instance_state

from sqlaqueue.mapping.mixin import queue_spec
from sqlaqueue.queue.run import Key
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.testing.in_transaction.existing_rows import existing_keys


def show_changes(session: Session, *, is_async: bool = False) -> None:
    """Let the session's instances show what other sessions have written in its transaction.

    Instances of jobs whose rows are deleted are detached, and keep their values. The others expire, as after a commit;
    in async code they are read again, since the next access to an expired attribute would raise.
    """
    loaded: dict[QueueSpec, dict[Key, Any]] = {}
    for instance in session.identity_map.values():
        spec = queue_spec(type(instance))
        if spec is not None:
            loaded.setdefault(spec, {})[instance_state(instance).identity or ()] = instance
    for spec, jobs in loaded.items():
        for key in jobs.keys() - existing_keys(session, spec, jobs.keys()):
            session.expunge(jobs[key])
    if not is_async:
        session.expire_all()
        return
    for instance in list(session.identity_map.values()):
        state = instance_state(instance)
        columns = {one.key for one in state.mapper.column_attrs if not one.deferred}
        refresh_or_detach(session, instance, columns | state.mapper.attrs.keys() & state.dict.keys())


def load_before_deletion(session: Session, spec: QueueSpec) -> None:
    """Load the expired instances of a queue whose rows a run may delete: then they could not be loaded any more."""
    if spec.strategy.keeps_rows and spec.config.on_complete == "keep":
        return
    for instance in list(session.identity_map.values()):
        state = instance_state(instance)
        if queue_spec(type(instance)) is spec and state.expired_attributes:
            refresh_or_detach(session, instance, set(state.expired_attributes))


def refresh_or_detach(session: Session, instance: Any, names: Collection[str]) -> None:
    """Read attributes of an instance again; detach it if its row is deleted, so that it keeps its values."""
    try:
        session.refresh(instance, names)
    except InvalidRequestError:
        session.expunge(instance)
