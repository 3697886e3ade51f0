"""The verbs: statements for ``session.execute()``, the same for Session and AsyncSession.

::

    emails = session.execute(claim(Email, 10)).scalars().all()
    session.execute(complete(emails))

``claim()`` hands out instances. Every other verb takes one instance or many and returns the primary keys that it
changed, a tuple each for composite keys: ``session.scalars(complete(emails)).all()``. The verbs are
primitive; what to do about an error, and when, is the :class:`~sqlaqueue.Consumer`'s business.

A session that routes reads to a replica takes these statements for reads; route them to the primary.
"""

from __future__ import annotations

import os
import socket
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from sqlalchemy.orm import undefer

from sqlaqueue._typing import AnySelect
from sqlaqueue.exc import HandlerMisuseError, StatementError
from sqlaqueue.keys import key_text
from sqlaqueue.mapping.mixin import spec_of
from sqlaqueue.mapping.runs import CLAIM_OPTION, RUN_ROLES, run_of
from sqlaqueue.payloads import CLAIMED
from sqlaqueue.postgresql.dialect_check import for_postgresql
from sqlaqueue.postgresql.planner import planned_anew, planned_anew_for_many
from sqlaqueue.postgresql.side_tables import CONTROL, is_paused, notification
from sqlaqueue.queue.config import FINISHED, is_count
from sqlaqueue.queue.retry_policies import Delay, seconds
from sqlaqueue.queue.run import Run
from sqlaqueue.queue.spec import QueueSpec, clock
from sqlaqueue.statements.returning import returning_detached, returning_keys
from sqlaqueue.statements.selection import JobSelection, held, instances, key_of, select_jobs
from sqlaqueue.strategies import ClaimedJobs, ClaimRequest, ScanRange, Settlement
from sqlaqueue.strategies.claim_tokens import alone_token

_ERROR_LIMIT = 100_000
_RETAINED_STATEMENTS = 64
_prepared: dict[tuple[type[Any], int], Any] = {}


def worker_name() -> str:
    """Return the name that a bare claim leaves in ``claimed_by``."""
    return f"{socket.gethostname()}:{os.getpid()}"


if TYPE_CHECKING:
    from sqlaqueue._typing import claim as claim  # noqa: PLC0414 - says to type checkers that it is exported
else:

    def claim(model: Any, n: int, /) -> Any:
        """Return the statement that claims up to ``n`` due jobs, best first, and returns their instances.

        Under a strategy with leases, commit soon after: the claim takes effect for others with the commit. Under one
        that holds a transaction, the jobs are yours until the transaction ends. Loader options (``selectinload()``)
        can be given on the select or on the returned statement; ``joinedload()`` has no effect on it.

        :param model: a queue class, or ``select(Model).where(...)`` to claim among some of its jobs only.
        :param n: the most jobs to claim. Fewer come back when others hold the rest: that is no sign of an empty queue.
        :raises NotAQueueError: when ``model`` is no queue.
        :raises StatementError: when ``n`` is not a positive integer, or the select cannot be claimed from.
        """
        if not is_count(n):
            msg = f"claim({_name(model)}, {n!r}): give the number of jobs as an integer from 1 on"
            raise StatementError(msg)
        if not isinstance(model, type):
            return claim_statement(select_jobs(model, "claim"), sa.bindparam(None, n, sa.Integer()))
        # Building a statement costs more than the database needs for a small claim: one object serves every call.
        statement = _prepared.get((model, n))
        if statement is None:
            statement = claim_statement(select_jobs(model, "claim"), sa.bindparam(None, n, sa.Integer()))
            if len(_prepared) >= _RETAINED_STATEMENTS:
                # Other threads may be claiming: nobody relies on a statement being there from one line to the next.
                _prepared.clear()
            _prepared[model, n] = statement
        return statement


def claim_statement(
    chosen: JobSelection,
    limit: Any,
    *,
    lease: timedelta | None = None,
    worker: Any = None,
    token: Callable[[], uuid.UUID] = alone_token,
    scan_range: ScanRange | None = None,
    tickets: sa.BindParameter[str] | None = None,
    of_many: bool = False,
) -> sa.sql.expression.Executable:
    """Return the claim of ``chosen`` jobs with its limit and worker as the caller binds them.

    :param of_many: whether there are many jobs, however few are to be claimed.
    :param tickets: the calls that the claim answers: when it commits, the others hear that its jobs are taken.
    :param token: makes the token of each execution, see :mod:`sqlaqueue.strategies.claim_tokens`.
    :param scan_range: the part of the claim order to scan, see :class:`~sqlaqueue.strategies.ClaimRequest`.
    """
    spec, entity, candidates, options = chosen
    if CONTROL in spec.side_tables:
        candidates = candidates.where(~is_paused(spec))
    # Of a bound LIMIT a generic plan only knows that it may be a tenth of the table, and reads the table for it.
    limit = limit.render_literal_execute()
    request = ClaimRequest(
        spec=spec,
        candidates=candidates.where(planned_anew() if of_many else planned_anew_for_many(limit)),
        limit=limit,
        lease=sa.bindparam(None, lease or spec.lease, sa.Interval()),
        worker=sa.bindparam(None, callable_=worker_name, type_=sa.Text()) if worker is None else worker,
        token=sa.bindparam(None, callable_=token, type_=sa.Uuid()),
        scan_range=scan_range,
    )
    claimed = spec.strategy.claim(request)
    if tickets is not None:
        payload = sa.func.concat(f"{CLAIMED} ", sa.func.count().over(), " ", tickets, type_=sa.Text())
        claimed = claimed.add_columns(notification(spec, payload).label("sqlaqueue_told"))
    rows = for_postgresql(claimed)
    if not spec.strategy.keeps_rows:
        if options:
            msg = (
                f"claim(select({entity.__name__}).options(...)): the claim deletes the row and hands out a detached "
                "instance, for which nothing more can be loaded; leave the options out"
            )
            raise StatementError(msg)
        return returning_detached(spec, entity, rows)
    # A column that is deferred, or that load_only() leaves out, would not tell which run this is.
    needed = (undefer(getattr(entity, spec.attributes[role])) for role in RUN_ROLES if spec.has(role))
    statement = sa.select(entity).from_statement(rows).options(*options, *needed)
    return statement.execution_options(populate_existing=True, **{CLAIM_OPTION: True})


def complete(jobs: Any, /) -> Any:
    """Return the statement that ends runs with success: the jobs are completed, or deleted by config.

    :param jobs: an instance that a claim handed out, or several.
    :raises NotClaimedError: when an instance is not held.
    :raises HandlerMisuseError: in the handler of a Consumer, which ends the run.
    """
    return _settle(jobs, "complete", Settlement("completed"))


def retry(
    jobs: Any, /, *, delay: Delay | None = None, at: datetime | None = None, error: BaseException | str | None = None
) -> Any:
    """Return the statement that ends runs and lets the jobs run again; the attempt counts.

    :param delay: seconds or timedelta from the moment the statement reaches the database; at once by default.
    :param at: a moment instead of a delay.
    :param error: an exception or a text for ``last_error``.
    :raises NotClaimedError: when an instance is not held.
    :raises HandlerMisuseError: in the handler of a Consumer, which ends the run.
    :raises StatementError: when both ``delay`` and ``at`` are given, or the model has no ``run_at`` for them.
    """
    jobs = instances(jobs, "retry")
    when = _due(jobs, "retry", 0.0 if delay is None and at is None else delay, at)
    return _settle(jobs, "retry", Settlement("pending", run_at=when, error=_error(error)))


def fail(jobs: Any, /, *, error: BaseException | str | None = None) -> Any:
    """Return the statement that fails jobs for good: the dead letter, from where ``requeue()`` brings them back.

    :param error: an exception or a text for ``last_error``.
    :raises NotClaimedError: when an instance is not held.
    :raises HandlerMisuseError: in the handler of a Consumer, which ends the run.
    """
    return _settle(jobs, "fail", Settlement("failed", error=_error(error)))


def release(jobs: Any, /, *, delay: Delay | None = None) -> Any:
    """Return the statement that gives jobs back with their attempt: for a shutdown, or to snooze.

    :param delay: seconds or timedelta until the jobs are due again; None leaves ``run_at`` as it is.
    :raises NotClaimedError: when an instance is not held.
    :raises HandlerMisuseError: in the handler of a Consumer, which ends the run.
    """
    jobs = instances(jobs, "release")
    return _settle(jobs, "release", Settlement("pending", starts=0, run_at=_due(jobs, "release", delay, None)))


def extend(jobs: Any, /, *, lease: Delay | None = None) -> Any:
    """Return the statement that moves the end of leases to ``lease`` from now.

    Rows that another transaction has locked are passed over. Under a strategy that holds a transaction there is no
    lease to move: the keys of the jobs come back and nothing changes.

    :param lease: seconds or timedelta; the config's lease by default.
    :raises NotClaimedError: when an instance is not held.
    """
    jobs = instances(jobs, "extend")
    if not jobs:
        return _nothing()
    spec = _spec(jobs)
    span = spec.lease if lease is None else timedelta(seconds=seconds(lease, "extend(lease=...)"))
    return returning_keys(spec, spec.strategy.extend(spec, held(jobs, "extend"), sa.literal(span, sa.Interval())))


def cancel(jobs: Any, /) -> Any:
    """Return the statement that cancels waiting jobs and asks running ones to stop; it never waits for a running job.

    The keys of the jobs that are cancelled now come back, not those of jobs that were asked.

    :param jobs: instances, a queue class, or ``select(Model).where(...)``.
    """
    if not isinstance(jobs, type | sa.Select):
        jobs = instances(jobs, "cancel")
        _refuse_consumers(jobs, "cancel")
    spec, select = _jobs_or_filter(jobs, "cancel")
    return _nothing() if spec is None else returning_keys(spec, spec.strategy.cancel(spec, select))


def requeue(jobs: Any, /) -> Any:
    """Return the statement that makes failed, cancelled or completed jobs wait again, with no attempt counted.

    :param jobs: instances, a queue class, or ``select(Model).where(...)``.
    """
    spec, select = _jobs_or_filter(jobs, "requeue")
    return _nothing() if spec is None else returning_keys(spec, spec.strategy.requeue(spec, select))


def rescue(model: type[Any], /) -> Any:
    """Return the statement that takes jobs back whose lease has expired.

    A job that ran alone keeps its attempt, and is failed when that was the last; one that was claimed with
    others gets it back, and Consumers claim it alone from then on. Nothing under a strategy without leases.

    :raises StatementError: when the model leaves out ``lease_expires_at``.
    """
    spec, *_ = select_jobs(model, "rescue")
    return returning_keys(spec, spec.strategy.rescue(spec))


def purge(
    model: Any, /, *, older_than: Delay | None = None, states: Iterable[str] = FINISHED, limit: int = 1000
) -> Any:
    """Return the statement that deletes up to ``limit`` finished jobs; repeat it until no key comes back.

    :param model: a queue class, or ``select(Model).where(...)``.
    :param older_than: seconds or timedelta since the jobs were finished; None for any.
    :param states: which of ``completed``, ``failed`` and ``cancelled`` to delete.
    :raises StatementError: for other states, or when ``limit`` is not a positive integer.
    """
    spec, _, select, _ = select_jobs(model, "purge")
    names = tuple(states)
    if not names or not set(names) <= set(FINISHED):
        msg = f"purge(states={names!r}): give some of {', '.join(FINISHED)}; only finished jobs can be purged"
        raise StatementError(msg)
    if not is_count(limit):
        msg = f"purge(limit={limit!r}): give an integer from 1 on"
        raise StatementError(msg)
    age = None if older_than is None else sa.literal(timedelta(seconds=seconds(older_than)), sa.Interval())
    return returning_keys(spec, spec.strategy.purge(spec, select, names, age, sa.literal(limit)))


def reconcile(model: type[Any], /) -> Any:
    """Return the statement that mends what bypassed the triggers of a message table; nothing without one.

    Waiting jobs without a message get one, messages whose job is gone or not waiting are consumed.
    """
    spec, *_ = select_jobs(model, "reconcile")
    return returning_keys(spec, spec.strategy.reconcile(spec))


# -- parts -----------------------------------------------------------------------------------------------------


def settle_statement(spec: QueueSpec, runs: ClaimedJobs, settlement: Settlement) -> Any:
    """Return the statement that ends ``runs`` as ``settlement`` says."""
    return returning_keys(spec, spec.strategy.settle(spec, runs, settlement), runs.jobs)


def delayed(delay: Delay) -> sa.ColumnElement[Any]:
    """Return the moment that is ``delay`` away from when the statement reaches the database."""
    return clock() + sa.literal(timedelta(seconds=seconds(delay)), sa.Interval())


def error_text(error: BaseException | str) -> str:
    """Return an error as PostgreSQL can store it: no NUL, no lone surrogate, not without end."""
    text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
    if len(text) > _ERROR_LIMIT:
        text = f"{text[:_ERROR_LIMIT]}... ({len(text)} characters)"
    return text.replace("\0", "\\0").encode("utf-8", "backslashreplace").decode()


def with_run_details(spec: QueueSpec, settlement: Settlement, runs: Iterable[Run], worker: str) -> Settlement:
    """Return ``settlement`` with when the runs began and who ran them, where a claim leaves that to it.

    One that gives attempts back writes neither, as they do not count as runs.
    """
    if not (spec.strategy.holds_transaction and (spec.has("started_at") or spec.has("claimed_by"))):
        return settlement
    if settlement.starts == 0:
        return settlement
    # By the database's clock: how long ago that was is all that is taken from this machine's.
    ago = time.monotonic() - min(run.claimed_at for run in runs)
    began = clock() - sa.literal(timedelta(seconds=ago), sa.Interval())
    return replace(settlement, started_at=began, worker=sa.literal(worker, sa.Text()))


def _settle(jobs: Any, verb: str, settlement: Settlement) -> Any:
    jobs = instances(jobs, verb)
    _refuse_consumers(jobs, verb)
    if not jobs:
        return _nothing()
    spec, mine = _spec(jobs), held(jobs, verb)
    runs = [run for job in jobs if (run := run_of(job)) is not None]
    return settle_statement(spec, mine, with_run_details(spec, settlement, runs, worker_name()))


def _refuse_consumers(jobs: list[Any], verb: str) -> None:
    for job in jobs:
        run = run_of(job)
        if run is not None and run.by_consumer:
            msg = (
                f"{verb}(): a Consumer runs {type(job).__name__} {key_text(run.key)}, and "
                "ends the run itself; let the handler return, or raise Retry, Snooze, Fail or Cancel"
            )
            raise HandlerMisuseError(msg)


def _spec(jobs: list[Any]) -> QueueSpec:
    return spec_of(type(jobs[0]))


def _jobs_or_filter(jobs: Any, verb: str) -> tuple[QueueSpec | None, AnySelect]:
    if isinstance(jobs, type | sa.Select):
        spec, _, select, _ = select_jobs(jobs, verb)
        return spec, select
    listed = instances(jobs, verb)
    if not listed:
        return None, sa.select()
    spec = _spec(listed)
    return spec, sa.select(spec.model).where(spec.key_in(spec.keys, [key_of(job, verb) for job in listed]))


def _due(jobs: list[Any], verb: str, delay: Delay | None, at: datetime | None) -> sa.ColumnElement[Any] | None:
    if not jobs:
        return None
    spec = _spec(jobs)
    if delay is not None and at is not None:
        msg = f"{verb}(delay=..., at=...): give one of the two"
        raise StatementError(msg)
    if at is not None:
        run_at = spec.column("run_at", f"{verb}(at=...)")
        if getattr(run_at.type, "timezone", False) and at.tzinfo is None:
            msg = f"{verb}(at={at!r}): {spec.model.__name__}.{run_at.key} has a time zone; give a datetime with tzinfo"
            raise StatementError(msg)
        return sa.literal(at, run_at.type)
    if delay is None or (delay == 0 and not spec.has("run_at")):
        return None
    spec.column("run_at", f"{verb}(delay=...)")
    return delayed(delay)


def _error(error: BaseException | str | None) -> sa.ColumnElement[Any] | None:
    return None if error is None else sa.literal(error_text(error), sa.Text())


def _nothing() -> AnySelect:
    return sa.select(sa.null()).where(sa.false())


def _name(model: Any) -> str:
    return model.__name__ if isinstance(model, type) else str(type(model).__name__)
