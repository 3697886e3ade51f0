"""The jobs of a test's transaction: why one is not claimed, which it has enqueued, and what instances of them show."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import InvalidRequestError
from sqlalchemy.orm import Session, object_session
from sqlalchemy.orm.attributes import instance_state

from sqlaqueue.exc import NotAQueueError, NotClaimableError, StatementError
from sqlaqueue.flow_control.held_back import held_back_by
from sqlaqueue.log import seconds_text
from sqlaqueue.mapping.mixin import QueueMixin, queue_spec, spec_of
from sqlaqueue.postgresql.claim_scan import queue_paused
from sqlaqueue.postgresql.due_times import written_here
from sqlaqueue.queue.names import CONTROL
from sqlaqueue.queue.run import Key, key_text, keys_from
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.sql.portable import clock, elapsed, set_setting, setting
from sqlaqueue.sql.types import check_dialect
from sqlaqueue.statements.selection import JobSelection, instances, key_of
from sqlaqueue.waiting.wait import read_states


def check_prepared(session: Session, spec: QueueSpec, function: str) -> None:
    """Raise an error for a session whose engine is for another database, or is not prepared.

    :raises ConfigurationError: naming the function and the line that is missing.
    """
    check_dialect(session.get_bind(spec.mapper).dialect, f"{function}()", "the engine of the session")


def flushed_key(session: Session, job: Any, function: str) -> Key:
    if isinstance(job, Iterable) and not isinstance(job, QueueMixin):
        raise NotAQueueError(f"{function}(): this is a {type(job).__name__}; give one job, and call it for each")
    (job,) = instances([job], function)
    owner = object_session(job)
    if owner is not None and owner is not session:
        raise StatementError(
            f"{function}(): this {type(job).__name__} belongs to another session, whose transaction this one may not "
            "see; give the session to which the job was added"
        )
    check_prepared(session, spec_of(type(job)), function)
    session.flush()
    return key_of(job, function)


def not_claimable(session: Session, model: type[Any], key: Key, function: str) -> NotClaimableError:
    spec = spec_of(model)
    return NotClaimableError(f"{function}(): {model.__name__} {key_text(key)} {_reason(session, spec, key)}")


def _reason(session: Session, spec: QueueSpec, key: Key) -> str:
    bind = {"mapper": spec.mapper}
    (state,) = read_states(session, spec, [key])
    if not state.has_row:
        return "has no row in this transaction"
    if state.state != "pending":
        return _not_pending(spec, state.state)
    if queue_is_paused(session, spec):
        name = spec.model.__name__
        return f"waits, since its queue is paused; session.execute(resume({name})) ends that"
    if spec.has("run_at"):
        wait = sa.select(elapsed(clock(), spec.columns["run_at"])).where(spec.key_in(spec.keys, [key]))
        delay = session.execute(wait, bind_arguments=bind).scalar_one_or_none()
        if delay is not None and delay.total_seconds() > 0:
            left = delay.total_seconds()
            return f"is not due for {seconds_text(left)}; travel(session, {int(left) + 1}) moves it there"
    other = "was not claimed: another transaction has locked it, or the Consumer's select leaves it out"
    return _held_back(session, spec, key) or other


def _not_pending(spec: QueueSpec, state: str | None) -> str:
    if state == "processing":
        return "is already claimed and its run has not ended; to test a crash, call crash() while the job is pending"
    if state == "waiting":
        return (
            f"waits for its {' and '.join(wait.name for wait in spec.waits)}, so no worker claims it; run those first"
        )
    return f"is {state}, so no worker claims it; requeue() makes it pending"


def _held_back(session: Session, spec: QueueSpec, key: Key) -> str:
    found = [*held_back_by(session, spec, key)]
    if not found:
        return ""
    waits = [one.seconds for one in found if one.kind == "rate"]
    hint = f" travel(session, {int(max(waits)) + 1}) moves it there." if waits else ""
    return f"is blocked. {' '.join(one.text for one in found)}{hint}".removesuffix(".")


def queue_is_paused(session: Session, spec: QueueSpec) -> bool:
    if CONTROL not in spec.side_tables:
        return False
    paused = sa.select(queue_paused(spec))
    return bool(session.execute(paused, bind_arguments={"mapper": spec.mapper}).scalar_one())


def existing_keys(session: Session, spec: QueueSpec, keys: Collection[Key]) -> set[Key]:
    found = sa.select(*spec.keys).where(spec.key_in(spec.keys, list(keys)))
    rows = session.execute(found, bind_arguments={"mapper": spec.mapper}).all()
    return set(keys_from((row if len(row) > 1 else row[0] for row in rows), len(spec.keys)))


_EARLIER = "sqlaqueue_earlier_jobs"
"""The key in ``Connection.info`` of jobs that were enqueued before the test's transaction, and written by a function of
this package: such a row looks like one that the transaction has enqueued."""


def enqueued_keys(session: Session, selection: JobSelection) -> list[Key]:
    spec = selection.spec
    keys = spec.strategy.pick(spec, selection.select, *spec.keys).where(_written_here(spec)).order_by(*spec.keys)
    if spec.has("status"):
        keys = keys.where(spec.in_state("pending"))
    earlier = _earlier(session, spec)
    found = (tuple(row) for row in session.execute(keys, bind_arguments={"mapper": spec.mapper}))
    return [key for key in found if key not in earlier]


def remember_earlier_jobs(session: Session, spec: QueueSpec, key: Key | None = None) -> None:
    """Remember which pending jobs are not of this transaction, before they, or the one of ``key``, are written."""
    others = sa.select(*spec.keys).where(~_written_here(spec))
    if spec.has("status"):
        pending = spec.in_state("pending")
        # Those with an expired lease become pending.
        expired = [] if spec.strategy.holds_transaction else [spec.in_state("processing")]
        if key is not None:
            pending = sa.and_(pending, spec.key_in(spec.keys, [key]))
        others = others.where(sa.or_(pending, *expired))
    elif key is not None:
        others = others.where(spec.key_in(spec.keys, [key]))
    found = session.execute(others, bind_arguments={"mapper": spec.mapper})
    _earlier(session, spec).update(tuple(row) for row in found)


def forget_deleted_jobs(session: Session, spec: QueueSpec, keys: Collection[Key]) -> None:
    """Forget those of some jobs whose rows are deleted: another job may be enqueued under the same key."""
    earlier = _earlier(session, spec)
    among = earlier.intersection(keys)
    if among:
        earlier -= among - existing_keys(session, spec, among)


def _written_here(spec: QueueSpec) -> sa.ColumnElement[bool]:
    written = spec.table.alias("sqlaqueue_written")
    same = [written.c[key.key] == key for key in spec.keys]
    return sa.exists().where(*same, written_here(written))


def _earlier(session: Session, spec: QueueSpec) -> set[Key]:
    """Return the remembered keys of the connection's present transaction, which several sessions may share."""
    connection = session.connection(bind_arguments={"mapper": spec.mapper})
    transaction, tables = connection.info.get(_EARLIER, (None, {}))
    if transaction is not connection.get_transaction():
        tables = {}
        connection.info[_EARLIER] = (connection.get_transaction(), tables)
    # By name, as several classes may be mapped to one table.
    remembered: set[Key] = tables.setdefault((spec.table.schema, spec.table.name), set())
    return remembered


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


# -- settings ----------------------------------------------------------------------------------------------------------
# Restore the settings that a worker sets with SET LOCAL.
#
# In production they end with its transaction; in a test they would last until the test's rollback.


_CHANGED = ("lock_timeout", "synchronous_commit")
"""Entries of the crash journal change these."""


def read_settings(session: Session, spec: QueueSpec) -> tuple[str, ...]:
    if not spec.strategy.holds_transaction:
        return ()
    current = sa.select(*(setting(name) for name in _CHANGED))
    return tuple(session.execute(current, bind_arguments={"mapper": spec.mapper}).one())


def restore_settings(session: Session, spec: QueueSpec, settings: tuple[str, ...]) -> None:
    if settings:
        before = [set_setting(name, value) for name, value in zip(_CHANGED, settings, strict=True)]
        session.execute(sa.select(*before), bind_arguments={"mapper": spec.mapper})
