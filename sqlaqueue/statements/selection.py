"""Checks the arguments of verbs: classes, selects and instances."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.engine import ExceptionContext
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import (
    Bundle,
    Mapper,
    QueryableAttribute,
    RelationshipProperty,
    make_transient_to_detached,
    object_session,
)
from sqlalchemy.orm.attributes import instance_state, set_committed_value
from sqlalchemy.orm.util import LoaderCriteriaOption
from sqlalchemy.sql.compiler import COLLECT_CARTESIAN_PRODUCTS

from sqlaqueue._typing import AnySelect
from sqlaqueue.exc import HandlerMisuseError, NotAQueueError, NotClaimedError, StatementError
from sqlaqueue.mapping.mixin import QueueMixin, spec_of
from sqlaqueue.mapping.runs import CLAIM_OPTION, record_run, run_of
from sqlaqueue.postgresql.claim_scan import planned_anew
from sqlaqueue.queue.names import TURN
from sqlaqueue.queue.run import CopiedTransaction, Key, Run, key_text, keys_by_token
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.sessions import WRITES_OPTION
from sqlaqueue.sql.engine import STEPS, Steps, sqlstate, steps_of
from sqlaqueue.sql.types import NEUTRAL, as_library_statement
from sqlaqueue.strategies import ClaimedJobs, Verb
from sqlaqueue.strategies.base import TOKEN
from sqlaqueue.strategies.columns import attribute_names, column_of, named
from sqlaqueue.strategies.unique_key import DUPLICATE


class JobSelection(NamedTuple):
    """Some jobs of a queue, as a SELECT."""

    spec: QueueSpec
    entity: type[Any]
    select: AnySelect
    options: tuple[Any, ...]
    """Loader options of the SELECT, which only a statement that returns instances accepts."""


def select_jobs(target: Any, verb: str) -> JobSelection:
    """Return the jobs selected by a queue class or ``select(Model).where(...)``; refuse rows that cannot be locked."""
    if not isinstance(target, sa.Select):
        spec = _spec_for_selecting(target, verb)
        return JobSelection(spec, target, sa.select(target), ())
    described = target.column_descriptions
    entity = described[0]["entity"] if len(described) == 1 else None
    if entity is None or described[0]["expr"] is not entity:
        msg = f"{verb}(select(...)): select exactly one queue class, as in select(Email), and filter with where()"
        raise StatementError(msg)
    spec = _spec_for_selecting(entity, verb)
    _check_lockable(target, entity, verb)
    bare = target.with_only_columns(*described[:0], entity, maintain_column_froms=True)
    options = target._with_options  # noqa: SLF001 - SQLAlchemy has no public access to the options of a select
    bare._with_options = ()  # noqa: SLF001 - SQLAlchemy has no public access to the options of a select; `bare` is a copy
    return JobSelection(spec, entity, bare, options)


def _spec_for_selecting(entity: Any, verb: str) -> QueueSpec:
    spec = spec_of(entity)
    if sa.inspect(entity).local_table is not spec.table:
        msg = (
            f"{verb}({entity.__name__}): its columns are in two tables (joined inheritance), and one statement cannot "
            f"lock and update both; use {verb}({spec.model.__name__}), which returns instances of subclasses"
        )
        raise StatementError(msg)
    return spec


def _check_lockable(target: AnySelect, entity: type[Any], verb: str) -> None:
    """Refuse clauses with which rows cannot be locked, or are returned more than once."""
    name = entity.__name__
    clauses = {
        "DISTINCT": target._distinct,  # noqa: SLF001 - SQLAlchemy has no public access to the clauses
        "GROUP BY": target._group_by_clauses,  # noqa: SLF001 - SQLAlchemy has no public access to the clauses
        "HAVING": target._having_criteria,  # noqa: SLF001 - SQLAlchemy has no public access to the clauses
        "LIMIT": target._limit_clause is not None,  # noqa: SLF001 - SQLAlchemy has no public access to the clauses
        "OFFSET": target._offset_clause is not None,  # noqa: SLF001 - SQLAlchemy has no public access to the clauses
        "ORDER BY": target._order_by_clauses,  # noqa: SLF001 - SQLAlchemy has no public access to the clauses
        "FOR UPDATE": target._for_update_arg is not None,  # noqa: SLF001 - SQLAlchemy has no public access to the clauses
    }
    for clause, used in clauses.items():
        if used:
            msg = (
                f"{verb}(select({name})...): {clause} cannot be combined with locking rows; leave it out ({verb}() "
                "orders and limits the jobs) and use exists() for conditions on other tables"
            )
            raise StatementError(msg)
    for joined, onclause, _, flags in target._setup_joins:  # noqa: SLF001 - SQLAlchemy has no public access to the clauses
        prop = onclause.property if isinstance(onclause, QueryableAttribute) else getattr(joined, "property", None)
        many = isinstance(prop, RelationshipProperty) and prop.uselist
        if many or flags.get("full"):
            what = f"the to-many join {prop}" if many else "a full outer join"
            msg = f"{verb}(select({name})...): {what} returns a job more than once; use exists() in where() instead"
            raise StatementError(msg)
    if len(target.get_final_froms()) == 1:
        return
    # A cartesian product would return each job once for every row of the other table.
    compiled: Any = target.compile(dialect=NEUTRAL, linting=COLLECT_CARTESIAN_PRODUCTS)
    unconnected, _ = compiled.from_linter.lint()
    if unconnected:
        msg = (
            f"{verb}(select({name})...): no condition connects the tables "
            f"{' and '.join(sorted(compiled.from_linter.froms.values()))}; add it to where(), or use exists()"
        )
        raise StatementError(msg)


def instances(jobs: Any, verb: str) -> list[Any]:
    """Return one instance or an iterable of instances of one queue as a list."""
    found = [jobs] if isinstance(jobs, QueueMixin) else jobs
    if isinstance(found, type) and issubclass(found, QueueMixin):
        msg = f"{verb}() takes an instance of {found.__name__}, or several, and not the class"
        raise StatementError(msg)
    if isinstance(found, str | bytes | sa.Select | type) or not isinstance(found, Iterable):
        msg = f"{verb}() takes an instance of a queue class, or several, not {jobs!r}"
        raise NotAQueueError(msg)
    listed = list(found)
    for job in listed:
        if not isinstance(job, QueueMixin):
            msg = f"{verb}() takes instances of a queue class, not {job!r}"
            raise NotAQueueError(msg)
    if len({id(spec_of(type(job))) for job in listed}) > 1:
        names = ", ".join(sorted({spec_of(type(job)).model.__name__ for job in listed}))
        msg = f"{verb}(): the jobs belong to different queues ({names}); call it once for each queue"
        raise StatementError(msg)
    return listed


def key_of(job: Any, verb: str) -> Key:
    """Return the primary key of an instance; refuse one that has no row yet."""
    key: Key | None = sa.inspect(job).identity
    if key is None:
        msg = f"{verb}(): this {type(job).__name__} is not in the database yet; add it to a session and flush"
        raise StatementError(msg)
    return key


def claimed_run(job: Any, verb: str) -> Run:
    """Return the run of a claimed instance; refuse one without a run, or whose transaction has ended."""
    run = run_of(job)
    name = f"{type(job).__name__} {key_text(sa.inspect(job).identity or ())}".rstrip()
    if run is None:
        msg = f"{verb}(): {name} was not claimed; pass an instance that session.execute(claim(...)) returned"
        raise NotClaimedError(msg)
    if isinstance(run.transaction, CopiedTransaction):
        msg = (
            f"{verb}(): {name} is a copy of a claimed instance (by pickle or deepcopy), without the transaction that "
            "holds the job; pass the original instance, or claim the job again"
        )
        raise NotClaimedError(msg)
    if run.transaction is not None:
        session = object_session(job)
        if not run.transaction.is_active or (session is not None and session.get_transaction() is not run.transaction):
            msg = f"{verb}(): the transaction that held {name} has ended; claim the job again"
            raise NotClaimedError(msg)
    return run


def claimed_jobs(jobs: list[Any], verb: str) -> ClaimedJobs:
    """Return instances with the keys and tokens of their runs; refuse one that is not claimed."""
    claims = keys_by_token(claimed_run(job, verb) for job in jobs)
    return ClaimedJobs(list(claims.items()), jobs)


def refuse_runs_of_consumers(jobs: list[Any], verb: str) -> None:
    """Refuse to settle runs that a Consumer executes and settles itself."""
    for job in jobs:
        run = run_of(job)
        if run is not None and run.by_consumer:
            msg = (
                f"{verb}(): a Consumer runs {type(job).__name__} {key_text(run.key)} and ends the run itself; let "
                "the handler return, or raise Retry, Snooze, Fail or Cancel"
            )
            raise HandlerMisuseError(msg)


# -- the results of verbs: primary keys, and detached instances of rows that a claim deleted ---------------------------

RowProcessor = Callable[[Any], Any]

JOBS_OPTION = "sqlaqueue_jobs"
"""The execution option with the instances that were given to a verb."""

ENTITY_OPTION = "sqlaqueue_entity"
"""The execution option with the queue and the class of the instances."""

_READ_ONLY, _NOT_SUPPORTED = "25006", "0A000"

_OF_CITUS = ("distributed query with FOR UPDATE", "cannot push down this subquery")
"""The errors of Citus for a statement that locks rows on several shards; PostgreSQL itself has no such texts."""


CAME_BACK = "came_back"


class _Key(Bundle[Any]):
    """A primary key as one column of the result: a value, or a tuple for composite keys.

    Executing the statement expires the queue attributes of the instances that were given to the verb, even if the
    caller reads no keys. An UPDATE by the ORM does the same for values that it cannot compute.
    """

    inherit_cache = True

    def create_row_processor(self, query: Any, procs: Sequence[RowProcessor], labels: Sequence[str]) -> RowProcessor:
        for job in query.get_execution_options().get(JOBS_OPTION, ()):
            session = object_session(job)
            # A handler may have deleted it.
            if session is not None and sa.inspect(job).persistent:
                session.expire(job, list(spec_of(type(job)).attributes.values()))
        if len(procs) == 1:
            return procs[0]
        return lambda row: tuple(process(row) for process in procs)


@event.listens_for(sa.Engine, "handle_error")
def _explain(failed: ExceptionContext) -> None:
    """Add the fix to the error of a verb, or raise one that names it."""
    error = failed.sqlalchemy_exception
    options = getattr(failed.execution_context, "execution_options", {})
    if options.get("yield_per") and (CLAIM_OPTION in options or ENTITY_OPTION in options):
        msg = (
            f"claim(): with yield_per={options['yield_per']} SQLAlchemy uses a server-side cursor, which does not "
            "support statements that change rows; leave out yield_per and claim fewer jobs at a time"
        )
        raise StatementError(msg)
    if not isinstance(error, DBAPIError) or not options.get(WRITES_OPTION):
        return
    state = sqlstate(error)
    # The error itself stays: a Consumer tries again what a server refuses that has become a standby.
    if state == _READ_ONLY:
        error.add_note(
            "claim() and the other statements write, and this server is read-only. If the session's get_bind() routes "
            "reads to a replica, let it return the primary's engine where sqlaqueue.sessions.is_write(clause) is true, "
            "or execute them in a session of the primary: Session(primary)"
        )

    if state == _NOT_SUPPORTED and any(text in str(error.orig) for text in _OF_CITUS):
        error.add_note(
            "Citus locks rows on one shard only. Give the select() inside the statement a condition with one value of "
            "the column that distributes the table, such as select(Task).where(Task.tenant == 1), and execute extend() "
            "for the jobs of one value at a time; cancel(), requeue(), purge() and rescue() of QueueAdmin take jobs of "
            "all values"
        )


class _DetachedRow(Bundle[Any]):
    """A detached instance made from a deleted row.

    In a Session the instance would be persistent: setting an attribute would flush an UPDATE that matches no row, and
    reading one after the commit would raise ObjectDeletedError.
    """

    inherit_cache = True

    def create_row_processor(self, query: Any, procs: Sequence[RowProcessor], labels: Sequence[str]) -> RowProcessor:
        # Not attributes of the Bundle: the statement cache compares only its columns.
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


def returning_detached(spec: QueueSpec, entity: type[Any], rows: AnySelect | sa.Delete) -> Any:
    """Return a SELECT of detached instances, in claim order, of ``rows`` that the claim deletes.

    :param rows: what PostgreSQL executes, or a DELETE, which other engines carry out in this order.
    """
    if isinstance(rows, sa.Delete):
        return sa.select(_DetachedRow("job", *rows.exported_columns)).from_statement(rows)
    deleted = rows.subquery("sqlaqueue_deleted")
    order = [deleted.c[TURN]] if TURN in deleted.c else [column_of(deleted, column) for column in spec.claim_order]
    statement = sa.select(_DetachedRow("job", *deleted.c)).order_by(*order)
    return statement.execution_options(**{ENTITY_OPTION: (spec, entity), WRITES_OPTION: True})


class _WithoutCriteria:
    """A statement to which no ``with_loader_criteria()`` can be added.

    Applications add such a condition to all statements, in a listener of ``do_orm_execute``, to hide deleted rows or
    those of other tenants. A run whose row is hidden by it would silently not be settled.
    """

    inherit_cache = True

    def options(self, *options: Any) -> Any:
        kept = [option for option in options if not isinstance(option, LoaderCriteriaOption)]
        added: Any = super().options(*kept)  # type: ignore[misc]  # it is mixed with a statement
        return added


class _Select(_WithoutCriteria, sa.Select[Any]):
    inherit_cache = True


class _Update(_WithoutCriteria, sa.Update):
    inherit_cache = True


class _Delete(_WithoutCriteria, sa.Delete):
    inherit_cache = True


_KINDS: dict[type[Any], type[Any]] = {sa.Select: _Select, sa.Update: _Update, sa.Delete: _Delete}


def without_criteria(statement: Any) -> Any:
    """Return a statement to which no listener of ``do_orm_execute`` can add a ``with_loader_criteria()``."""
    # The statements that its methods return are of its class. It is no subclass from the beginning, because sa.select()
    # and its siblings make none.
    own = statement.options()
    own.__class__ = _KINDS.get(type(own), type(own))
    return own


def returning_keys(
    spec: QueueSpec, verb: Verb, jobs: Sequence[Any] = (), *, chosen: bool = False, came_back: bool = False
) -> Any:
    """Return ``verb`` with the keys of the changed jobs as its only result column.

    Where jobs that come back may meet a duplicate, a second column ``duplicate`` has the duplicate's key, as a text.

    :param jobs: the instances whose queue attributes expire, see :class:`_Key`.
    :param chosen: whether the statement chooses its jobs, so that a ``with_loader_criteria()`` of the application
        applies, as to a claim.
    :param came_back: whether the second column is ``came_back`` instead, for every queue: False for a job that has a
        duplicate.
    """
    steps, options = steps_of(verb), dict[str, Any]({WRITES_OPTION: True})
    second = [sa.true().label(CAME_BACK)] if came_back else []
    if isinstance(verb, sa.Update | sa.Delete):
        # Columns of the table: SQLAlchemy does not expect a with_loader_criteria() where attributes are in a Bundle.
        statement: Any = as_library_statement(verb.where(planned_anew())).returning(_Key("key", *spec.keys), *second)
        options |= {"synchronize_session": "fetch", **({STEPS: steps} if steps else {})}
        statement = statement.execution_options(**options)
        return statement if chosen else without_criteria(statement)

    def shown(rows: AnySelect) -> Any:
        changed, more = rows.subquery("sqlaqueue_changed_keys").c, second
        for column in changed:
            if column.key == DUPLICATE:
                more = [column.is_(None).label(CAME_BACK) if came_back else column.label("duplicate")]
        # Only a new select() keeps the row processor of a Bundle; with_only_columns() drops it.
        keys = _Key("key", *(column for column in changed if column.key != DUPLICATE))
        found: Any = as_library_statement(sa.select(keys, *more).where(planned_anew())).execution_options(**options)
        return found if chosen else without_criteria(found)

    if isinstance(verb, sa.Insert):
        inserted = verb.returning(*named(spec.keys)).cte("sqlaqueue_inserted")
        verb = sa.select(*inserted.c)
    elif any(described["expr"] is spec.model for described in verb.column_descriptions):
        attributes = [getattr(spec.model, spec.mapper.get_property_by_column(key).key) for key in spec.keys]
        verb = verb.with_only_columns(*attributes)
    if jobs:
        options[JOBS_OPTION] = tuple(jobs)
    statement = shown(verb)
    return statement if steps is None else statement.execution_options(**{STEPS: Steps(steps.each, shown)})


def returning_nothing() -> AnySelect:
    """Return a statement that returns no key, for a verb without jobs."""
    columns: list[Any] = [sa.null().label("key"), sa.null().label(CAME_BACK)]
    return sa.select(*columns).where(sa.false())
