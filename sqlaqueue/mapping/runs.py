"""The run of a job, stored in ``InstanceState.info`` of its instance.

A run is recorded when the rows of a claim are loaded or refreshed; ``Session.merge()`` and pickle copy it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sqlalchemy import event
from sqlalchemy.orm import ColumnProperty, InstanceState, Mapper, QueryContext
from sqlalchemy.orm.attributes import instance_state

from sqlaqueue.exc import StatementError
from sqlaqueue.flow_control.turns import turns_of
from sqlaqueue.mapping.mixin import QueueMixin, queue_spec, spec_of
from sqlaqueue.queue.run import Run, key_text
from sqlaqueue.queue.spec import QueueSpec

CLAIM_OPTION = "sqlaqueue_claim"
"""The execution option that marks a statement as a claim, so that loading its rows records runs."""

RUN_ROLES = ("attempts", "max_attempts", "lease_token")
"""The roles whose values a run takes from the claimed row."""

_RUN = "sqlaqueue_run"


def run_of(job: Any) -> Run | None:
    """Return the run of an instance, None if it has none."""
    run: Run | None = instance_state(job).info.get(_RUN)
    return run


def runs_of(jobs: Iterable[Any]) -> list[Run]:
    """Return the runs of claimed instances, without a further call for each of them; KeyError if one has none."""
    return [instance_state(job).info[_RUN] for job in jobs]


def set_run(job: Any, run: Run | None) -> None:
    """Store the run of an instance; None removes it."""
    if run is None:
        instance_state(job).info.pop(_RUN, None)
    else:
        instance_state(job).info[_RUN] = run


def show_claimed(job: Any, spec: QueueSpec) -> None:
    """Set status and attempts of an instance to what they are while its job runs.

    A claim that holds a transaction writes no row; settling the run does. Handlers still read the same values under
    every strategy.
    """
    attributes, values = spec.attributes, job.__dict__
    # Not by setattr(), which would mark the attributes as modified.
    if "attempts" in attributes:
        values[attributes["attempts"]] = (values.get(attributes["attempts"]) or 0) + 1
    if "status" in attributes and spec.config.states.processing is not None:
        values[attributes["status"]] = spec.config.states.processing


def record_run(state: InstanceState[Any], session: Any, token: str | None = None) -> None:
    """Store the run of an instance that a claim has just loaded.

    :param session: the session of the claim, None if the claim deleted the row and the instance is detached.
    :param token: the token of the claim, unless the instance has it as ``lease_token``.
    """
    job: Any = state.obj()
    spec, values, info = queue_spec(type(job)), job.__dict__, state.info
    if spec is None:
        return
    if spec.strategy.holds_transaction:
        show_claimed(job, spec)
    if spec.config.fair is not None:
        turns_of(spec).claimed(values)
    # This function is called for each claimed job, so the names are looked up once per queue.
    token_name, limit_name, attempts_name, trace_name = spec.run_attributes
    limit = values.get(limit_name)
    if limit is None:
        limit = spec.config.max_attempts
    identity: Any = state.key
    run = Run(identity[1], values.get(token_name, token), values.get(attempts_name) or 1, limit)
    if trace_name:
        run.traceparent = values.get(trace_name)
    if session is not None and spec.strategy.holds_transaction:
        run.transaction, run.savepoint = session.get_transaction(), session.get_nested_transaction()
        if _RUN in info and _is_same_run(info[_RUN], run):
            msg = (
                f"{type(job).__name__} {key_text(run.key)} was claimed twice in one transaction; complete, retry or "
                "fail the claimed jobs and commit before the next claim"
            )
            raise StatementError(msg)
    info[_RUN] = run


def _is_same_run(one: Run, other: Run) -> bool:
    """Return whether a transaction claimed a job again that it holds: SKIP LOCKED does not skip its own locks."""
    if one.transaction is None or one.transaction is not other.transaction:
        return False
    undone = one.savepoint is not None and not one.savepoint.is_active
    return not undone and one.attempt == other.attempt


@event.listens_for(QueueMixin, "pickle", propagate=True)
def _pickle_run(job: Any, state: dict[str, Any]) -> None:
    run: Run | None = state.get("info", {}).get(_RUN)
    if run is not None:
        held = spec_of(type(job)).strategy.holds_transaction
        state["info"] = {**state["info"], _RUN: run.copied(held=held)}


class _KeyProperty(ColumnProperty[Any]):
    """The key attribute of a queue class; merging it also merges the run.

    SQLAlchemy has no event for the merge of an instance.
    """

    __slots__ = ()
    inherit_cache = True

    def merge(
        self,
        session: Any,
        source_state: InstanceState[Any],
        source_dict: Any,
        dest_state: InstanceState[Any],
        *others: Any,
        **more: Any,
    ) -> None:
        super().merge(session, source_state, source_dict, dest_state, *others, **more)
        run: Run | None = source_state.info.get(_RUN)
        known: Run | None = dest_state.info.get(_RUN)
        if run is not None and (known is None or known.claimed_at < run.claimed_at):
            dest_state.info[_RUN] = run


@event.listens_for(QueueMixin, "after_mapper_constructed", propagate=True)
def _merge_runs(mapper: Mapper[Any], cls: type[Any]) -> None:  # noqa: ARG001 - the event's signature
    key = mapper.get_property_by_column(mapper.primary_key[0])
    if type(key) is ColumnProperty:
        key.__class__ = _KeyProperty


# Called for each row that is loaded; raw=True passes the state and saves looking it up.


@event.listens_for(QueueMixin, "load", propagate=True, raw=True)
def _on_load(state: InstanceState[Any], context: QueryContext | None) -> None:
    # The context is None for Session.merge().
    # A composite() that is read after a flush sends the event with an object in place of the context.
    if isinstance(context, QueryContext) and CLAIM_OPTION in context.query.get_execution_options():
        record_run(state, context.session)


@event.listens_for(QueueMixin, "refresh", propagate=True, raw=True)
def _on_refresh(state: InstanceState[Any], context: QueryContext | None, attributes: Iterable[str] | None) -> None:
    # A composite() that is read after a flush sends the event with an object in place of the context, and an UPDATE
    # that synchronizes the session sends it without one.
    if not isinstance(context, QueryContext):
        return
    if CLAIM_OPTION in context.query.get_execution_options():
        record_run(state, context.session)
        return
    run: Run | None = state.info.get(_RUN)
    if run is not None and run.by_consumer and run.transaction is context.session.get_transaction():
        _show_claimed_again(state, run, attributes)


def _show_claimed_again(state: InstanceState[Any], run: Run, attributes: Iterable[str] | None) -> None:
    """Set status and attempts as :func:`show_claimed` did, after a handler has read its job again.

    :param attributes: the attributes that were read; None for all.
    """
    spec = spec_of(state.class_)
    values, states = state.dict, spec.config.states
    read = {role: name for role, name in spec.attributes.items() if attributes is None or name in attributes}
    status, attempts = read.get("status"), read.get("attempts")
    # Any other status was written by the handler, and is refused when it returns.
    if status in values and values[status] == states.pending and states.processing is not None:
        values[status] = states.processing
    if attempts in values:
        values[attempts] = max(values[attempts] or 0, run.attempt)
