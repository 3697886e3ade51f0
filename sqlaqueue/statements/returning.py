"""What the verbs return: keys, tuples for composite ones, and instances whose row the claim deleted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.engine import ExceptionContext
from sqlalchemy.orm import Bundle, Mapper, make_transient_to_detached, object_session
from sqlalchemy.orm.attributes import instance_state, set_committed_value

from sqlaqueue._typing import AnySelect
from sqlaqueue.exc import StatementError
from sqlaqueue.mapping.mixin import spec_of
from sqlaqueue.mapping.runs import CLAIM_OPTION, record_run
from sqlaqueue.queue.backend import backend
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.strategies import Verb
from sqlaqueue.strategies.base import TOKEN, attribute_names, column_of, named

RowProcessor = Callable[[Any], Any]

JOBS_OPTION = "sqlaqueue_jobs"
"""The execution option that carries the instances a verb was given."""

ENTITY_OPTION = "sqlaqueue_entity"
"""The execution option that carries the queue and the class of which instances are made."""


class _Key(Bundle[Any]):
    """A key as one column of the result: the value itself, a tuple for composite keys.

    The instances whose runs a statement ends travel with it as an execution option; what they show of the queue is
    expired when it is executed, whether or not anybody reads the keys, as an UPDATE by the ORM does for what it cannot
    compute.
    """

    inherit_cache = True

    def create_row_processor(
        self,
        query: Any,
        procs: Sequence[RowProcessor],
        labels: Sequence[str],
    ) -> RowProcessor:
        for job in query.get_execution_options().get(JOBS_OPTION, ()):
            _expire(job)
        if len(procs) == 1:
            return procs[0]
        return lambda row: tuple(process(row) for process in procs)


@event.listens_for(sa.Engine, "handle_error")
def _refuse_to_stream(failed: ExceptionContext) -> None:
    """Say what to do when the server refuses to read a claim by a cursor, which is what ``yield_per`` asks for."""
    options = getattr(failed.execution_context, "execution_options", {})
    if options.get("yield_per") and (CLAIM_OPTION in options or ENTITY_OPTION in options):
        msg = (
            f"claim(): with yield_per={options['yield_per']} SQLAlchemy reads the result by a cursor of the server, "
            "and those take no statement that changes rows; leave yield_per out, and claim fewer jobs at a time instead"
        )
        raise StatementError(msg)


def _expire(job: Any) -> None:
    session = object_session(job)
    if session is not None:
        session.expire(job, list(spec_of(type(job)).attributes.values()))


class _DetachedRow(Bundle[Any]):
    """An instance made from a row that is already deleted.

    The Session would take such an instance for persistent: setting an attribute would flush an UPDATE that finds no
    row, and reading after the commit would look for it in vain.
    """

    inherit_cache = True

    def create_row_processor(self, query: Any, procs: Sequence[RowProcessor], labels: Sequence[str]) -> RowProcessor:
        # Not kept in the Bundle: SQLAlchemy takes two of them for the same when their columns are.
        spec, entity = query.get_execution_options()[ENTITY_OPTION]
        columns = [spec.table.c.get(label, label) for label in labels]
        base: Mapper[Any] = sa.inspect(entity)
        names = {mapper: attribute_names(mapper) for mapper in base.self_and_descendants}

        def make(row: Any) -> Any:
            values = {column: process(row) for column, process in zip(columns, procs, strict=True)}
            mapper = base if base.polymorphic_on is None else base.polymorphic_map[values[base.polymorphic_on]]
            job = mapper.class_manager.new_instance()
            for column, name in names[mapper].items():
                if column in values:
                    set_committed_value(job, name, values[column])
            make_transient_to_detached(job)
            record_run(instance_state(job), None, values.get(TOKEN))
            return job

        return make


def returning_detached(spec: QueueSpec, entity: type[Any], rows: AnySelect) -> AnySelect:
    """Return ``rows`` of the model's table, which the claim deleted, as detached instances in claim order."""
    deleted = rows.subquery("deleted")
    order = (column_of(deleted, column) for column in spec.claim_order)
    statement = sa.select(_DetachedRow("job", *deleted.c)).order_by(*order)
    return statement.execution_options(**{ENTITY_OPTION: (spec, entity)})


def returning_keys(spec: QueueSpec, verb: Verb, jobs: Sequence[Any] = ()) -> Any:
    """Return ``verb`` as a statement whose one column is the key of each job that it changed.

    :param jobs: the instances it is about, for which see :class:`_Key`.
    """
    attributes = [getattr(spec.model, spec.mapper.get_property_by_column(key).key) for key in spec.keys]
    if isinstance(verb, sa.Update | sa.Delete):
        changing = backend().guarded(verb.where(backend().claims.planned_anew())).returning(_Key("key", *attributes))
        return changing.execution_options(synchronize_session="fetch")
    if isinstance(verb, sa.Insert):
        inserted = verb.returning(*named(spec.keys)).cte("inserted")
        verb = sa.select(*inserted.c)
    elif any(described["expr"] is spec.model for described in verb.column_descriptions):
        verb = verb.with_only_columns(*attributes)
    # A new SELECT, as it is select() that hands the ORM's part of a Bundle on; with_only_columns() does not.
    keys = backend().guarded(
        sa.select(_Key("key", *verb.subquery("changed_keys").c)).where(backend().claims.planned_anew())
    )
    if jobs:
        keys = keys.execution_options(**{JOBS_OPTION: tuple(jobs)})
    return keys


def returning_nothing() -> AnySelect:
    """Return a statement that returns no key, for a verb without jobs."""
    return sa.select(sa.null()).where(sa.false())
