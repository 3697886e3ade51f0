"""Checks the arguments of verbs: classes, selects and instances."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy.orm import QueryableAttribute, RelationshipProperty, object_session
from sqlalchemy.sql.compiler import COLLECT_CARTESIAN_PRODUCTS

from sqlaqueue._typing import AnySelect
from sqlaqueue.exc import HandlerMisuseError, NotAQueueError, NotClaimedError, StatementError
from sqlaqueue.mapping.mixin import QueueMixin, spec_of
from sqlaqueue.mapping.runs import run_of
from sqlaqueue.queue.run import CopiedTransaction, Key, Run, key_text, keys_by_token
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.sql.types import NEUTRAL
from sqlaqueue.strategies import ClaimedJobs


class JobSelection(NamedTuple):
    """Some jobs of a queue, as a SELECT."""

    spec: QueueSpec
    entity: type[Any]
    select: AnySelect
    options: tuple[Any, ...]
    """Loader options of the SELECT, which only a statement that returns instances accepts."""


def select_jobs(target: Any, verb: str) -> JobSelection:
    """Return the jobs selected by a queue class or ``select(Model).where(...)``.

    :raises NotAQueueError: if the class is not a queue.
    :raises StatementError: if rows of the select cannot be locked individually.
    """
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
    _check_connected(target, entity, verb)
    bare = target.with_only_columns(*described[:0], entity, maintain_column_froms=True)
    options = target._with_options  # noqa: SLF001 - SQLAlchemy has no public access to the options of a select
    bare._with_options = ()  # noqa: SLF001 - as above; `bare` is a copy
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
        "GROUP BY": target._group_by_clauses,  # noqa: SLF001 - as above
        "HAVING": target._having_criteria,  # noqa: SLF001 - as above
        "LIMIT": target._limit_clause is not None,  # noqa: SLF001 - as above
        "OFFSET": target._offset_clause is not None,  # noqa: SLF001 - as above
        "ORDER BY": target._order_by_clauses,  # noqa: SLF001 - as above
        "FOR UPDATE": target._for_update_arg is not None,  # noqa: SLF001 - as above
    }
    for clause, used in clauses.items():
        if used:
            msg = (
                f"{verb}(select({name})...): {clause} cannot be combined with locking rows; leave it out (the verb "
                "orders and limits the jobs) and use exists() for conditions on other tables"
            )
            raise StatementError(msg)
    for joined, onclause, _, flags in target._setup_joins:  # noqa: SLF001 - as above
        prop = onclause.property if isinstance(onclause, QueryableAttribute) else getattr(joined, "property", None)
        many = isinstance(prop, RelationshipProperty) and prop.uselist
        if many or flags.get("full"):
            what = f"the to-many join {prop}" if many else "a full outer join"
            msg = f"{verb}(select({name})...): {what} returns a job more than once; use exists() in where() instead"
            raise StatementError(msg)


def _check_connected(target: AnySelect, entity: type[Any], verb: str) -> None:
    """Refuse cartesian products: each job would be returned once for every row of the other table."""
    if len(target.get_final_froms()) == 1:
        return
    compiled: Any = target.compile(dialect=NEUTRAL, linting=COLLECT_CARTESIAN_PRODUCTS)
    unconnected, _ = compiled.from_linter.lint()
    if unconnected:
        msg = (
            f"{verb}(select({entity.__name__})...): no condition connects the tables "
            f"{' and '.join(sorted(compiled.from_linter.froms.values()))}; add it to where(), or use exists()"
        )
        raise StatementError(msg)


def instances(jobs: Any, verb: str) -> list[Any]:
    """Return one instance or an iterable of instances as a list.

    :raises NotAQueueError: if one of them is not an instance of a queue class.
    :raises StatementError: if they belong to different queues.
    """
    found = [jobs] if isinstance(jobs, QueueMixin) else jobs
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
    """Return the primary key of an instance.

    :raises StatementError: if the instance has no row yet.
    """
    key: Key | None = sa.inspect(job).identity
    if key is None:
        msg = f"{verb}(): this {type(job).__name__} is not in the database yet; add it to a session and flush"
        raise StatementError(msg)
    return key


def claimed_run(job: Any, verb: str) -> Run:
    """Return the run of a claimed instance.

    :raises NotClaimedError: if it has no run, or its transaction has ended.
    """
    run = run_of(job)
    name = f"{type(job).__name__} {key_text(sa.inspect(job).identity or ())}"
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
    """Return instances with the keys and tokens of their runs.

    :raises NotClaimedError: if an instance is not claimed.
    """
    claims = keys_by_token(claimed_run(job, verb) for job in jobs)
    return ClaimedJobs(list(claims.items()), jobs)


def refuse_runs_of_consumers(jobs: list[Any], verb: str) -> None:
    """Refuse to settle runs that a Consumer executes and settles itself.

    :raises HandlerMisuseError: if one of the instances has such a run.
    """
    for job in jobs:
        run = run_of(job)
        if run is not None and run.by_consumer:
            msg = (
                f"{verb}(): a Consumer runs {type(job).__name__} {key_text(run.key)} and settles the run itself; let "
                "the handler return, or raise Retry, Snooze, Fail or Cancel"
            )
            raise HandlerMisuseError(msg)
