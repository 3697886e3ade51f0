"""The statements of programs about jobs and queues: end, extend, cancel, requeue, purge, pause, resume."""

from __future__ import annotations

import time
from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Any

import sqlalchemy as sa

from sqlaqueue._typing import AnySelect
from sqlaqueue.exc import StatementError
from sqlaqueue.mapping.mixin import spec_of
from sqlaqueue.mapping.runs import run_of
from sqlaqueue.notify_payloads import Signal
from sqlaqueue.postgresql.claim_scan import queue_paused
from sqlaqueue.postgresql.side_tables import PAUSE, pause_row
from sqlaqueue.postgresql.triggers import notification, wakes
from sqlaqueue.queue.config import is_count
from sqlaqueue.queue.names import CONSUMERS, CONTROL
from sqlaqueue.queue.options import FINISHED
from sqlaqueue.queue.retry_policies import Delay, seconds
from sqlaqueue.queue.run import Run
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.sql.portable import Span, clock, earlier, later
from sqlaqueue.sql.types import refused_elsewhere
from sqlaqueue.statements.claim import worker_name
from sqlaqueue.statements.selection import (
    claimed_jobs,
    instances,
    key_of,
    refuse_runs_of_consumers,
    returning_keys,
    returning_nothing,
    select_jobs,
)
from sqlaqueue.strategies import ClaimedJobs, Settlement

# -- queues as a whole -------------------------------------------------------------------------------------------------
# A pause is stored in the database. It applies to every claim, of Consumers and of the application. Running jobs are
# not affected.


def pause(model: type[Any], /) -> Any:
    """Return a statement that pauses a queue: after its commit no job is claimed.

    ::

        session.execute(pause(Email))
        session.commit()
        assert session.scalar(is_paused(Email))

    :param model: a queue class.
    :raises NotAQueueError: if ``model`` is not a queue.
    """
    return refused_elsewhere(pause_row(_queue(model, "pause", CONTROL)[0]))


def resume(model: type[Any], /) -> Any:
    """Return a statement that resumes a queue: after its commit jobs are claimed again.

    ::

        session.execute(resume(Email))
        session.commit()

    :param model: a queue class.
    :raises NotAQueueError: if ``model`` is not a queue.
    """
    spec, table = _queue(model, "resume", CONTROL)
    deleted = refused_elsewhere(sa.delete(table).where(sa.and_(table.c.queue == spec.name, table.c.key == PAUSE)))
    return deleted.returning(notification(spec, Signal.POLL)) if wakes(spec) else deleted


def is_paused(model: type[Any], /) -> Any:
    """Return a SELECT of one boolean: whether the queue is paused.

    ::

        print("paused" if session.scalar(is_paused(Email)) else "running")

    :param model: a queue class.
    :raises NotAQueueError: if ``model`` is not a queue.
    """
    spec, _ = _queue(model, "is_paused", CONTROL)
    return refused_elsewhere(sa.select(queue_paused(spec).label("paused")))


def consumers(model: type[Any], /) -> Any:
    """Return a SELECT of the Consumers of a queue that are alive, the oldest first.

    Its columns are ``name`` (as in ``claimed_by`` of its jobs), ``host``, ``pid``, ``version``, ``created_at``,
    ``heartbeat_at``, ``listening`` (True if notifications wake it, False if it only polls), ``running`` (the keys of
    the jobs whose handlers were running at the last heartbeat, each a list of texts), ``claimed`` (the number of its
    other claimed jobs), and ``unclaimable`` (the jobs that it cannot claim, rescue or end, a hundred at most, each
    with its ``key`` and the ``error``; before them, if all of its claims fail, an entry with the number of ``failures``
    in a row, the ``seconds`` that they have lasted, and the ``error``; after them an entry with its ``handlers``, and
    ``quiet`` if it was asked to claim no more jobs). A Consumer writes a heartbeat every ten
    seconds, less often if there are many Consumers.

    ::

        for consumer in session.execute(consumers(Email)):
            print(consumer.host, consumer.pid, consumer.running)

    :param model: a queue class.
    :raises NotAQueueError: if ``model`` is not a queue.
    """
    spec, table = _queue(model, "consumers", CONSUMERS)
    shown = (
        "name",
        "host",
        "pid",
        "version",
        "created_at",
        "heartbeat_at",
        "listening",
        "running",
        "claimed",
        "unclaimable",
    )
    alive = sa.and_(table.c.queue == spec.name, table.c.expires_at > clock())
    columns = refused_elsewhere(sa.select(*(table.c[name] for name in shown)))
    return columns.where(alive).order_by(table.c.created_at, table.c.id)


def _queue(model: Any, verb: str, needed: str) -> tuple[QueueSpec, sa.Table]:
    spec = spec_of(model)
    if needed not in spec.side_tables:
        msg = f"{verb}({model.__name__}): the strategy {spec.strategy.name!r} does not attach the table {needed}"
        raise StatementError(msg)
    return spec, spec.side_tables[needed]


# -- jobs that the caller has not claimed ------------------------------------------------------------------------------


def cancel(jobs: Any, /) -> Any:
    """Return a statement that cancels pending jobs and requests the cancellation of running ones, without waiting.

    It returns the keys of the jobs that are now cancelled, not of those whose cancellation is requested. The members of
    a batch are cancelled with it.

    ::

        cancelled = session.scalars(cancel(select(Email).where(Email.to == "ada@example.com"))).all()
        session.commit()

    :class:`~sqlaqueue.Cancel` is what a handler raises to cancel its own job.

    :param jobs: instances, a queue class, or ``select(Model).where(...)``.
    :raises HandlerMisuseError: for the job of a handler, in the handler of a Consumer.
    """
    if not isinstance(jobs, type | sa.Select):
        jobs = instances(jobs, "cancel")
        refuse_runs_of_consumers(jobs, "cancel")
    spec, select = _spec_and_select(jobs, "cancel")
    if spec is None:
        return returning_nothing()
    return returning_keys(spec, spec.strategy.cancel(spec, select), chosen=True)


def requeue(jobs: Any, /) -> Any:
    """Return a statement that makes finished jobs pending again, with 0 attempts.

    Its rows are pairs of ``key`` and ``came_back``. The latter is False for a job of a unique queue that has a
    duplicate, and is not pending therefore; :meth:`QueueAdmin.requeue() <sqlaqueue.admin.QueueAdmin.requeue>` names
    the duplicates::

        failed = select(Email).where(Email.status == "failed")
        for key, came_back in session.execute(requeue(failed)):
            print(key, "is pending" if came_back else "has a duplicate")
        session.commit()

    :param jobs: instances, a queue class, or ``select(Model).where(...)``.
    :raises NotAQueueError: for anything else.
    """
    return requeue_jobs(jobs, came_back=True)


def requeue_jobs(jobs: Any, *, came_back: bool) -> Any:
    """Return the statement of :func:`requeue`.

    :param came_back: False for the keys of duplicates instead of ``came_back``, where there can be any.
    """
    listed = () if isinstance(jobs, type | sa.Select) else instances(jobs, "requeue")
    spec, select = _spec_and_select(listed or jobs, "requeue")
    if spec is None:
        return returning_nothing()
    return returning_keys(spec, spec.strategy.requeue(spec, select), listed, chosen=True, came_back=came_back)


def rescue(model: type[Any], /) -> Any:
    """Return a statement that makes jobs whose lease has expired pending again.

    A job that was claimed alone keeps its attempt, and fails if it was the last. A job that was claimed with other jobs
    gets its attempt back, and Consumers claim it alone from then on. Under a strategy without leases the statement
    changes nothing. Consumers rescue jobs by themselves; a program without a Consumer does it like this::

        rescued = session.scalars(rescue(Email)).all()
        session.commit()

    :param model: a queue class.
    :raises StatementError: if the model leaves out ``lease_expires_at``.
    """
    spec, *_ = select_jobs(model, "rescue")
    return returning_keys(spec, spec.strategy.rescue(spec))


def purge(
    model: Any, /, *, older_than: Delay | None = None, states: Iterable[str] = FINISHED, limit: int = 1000
) -> Any:
    """Return a statement that deletes up to ``limit`` finished jobs. Repeat it until it returns no keys.

    ::

        while session.scalars(purge(Email, older_than=timedelta(days=30))).all():
            session.commit()

    :param model: a queue class, or ``select(Model).where(...)``.
    :param older_than: the minimum age since the job finished, in seconds or as a timedelta; None for any age.
    :param states: which of ``completed``, ``failed`` and ``cancelled`` to delete.
    :param limit: the maximum number of jobs that one execution deletes.
    :raises StatementError: for other states, or if ``limit`` is not a positive integer.
    """
    spec, _, select, _ = select_jobs(model, "purge")
    given: Any = states  # without a type checker, callers may pass any object
    names = tuple(given) if isinstance(given, Iterable) and not isinstance(given, str) else ()
    if not names or not set(names) <= set(FINISHED):
        which = names or states
        msg = f"purge(states={which!r}): use a tuple of some of {', '.join(FINISHED)}; only finished jobs can be purged"
        raise StatementError(msg)
    if not is_count(limit):
        msg = f"purge(limit={limit!r}): the limit must be an integer of 1 or more"
        raise StatementError(msg)
    age = None if older_than is None else sa.literal(timedelta(seconds=seconds(older_than)), Span())
    return returning_keys(spec, spec.strategy.purge(spec, select, names, age, sa.literal(limit)), chosen=True)


def reconcile(model: type[Any], /) -> Any:
    """Return a statement that repairs what changes have left that bypassed the triggers.

    Pending jobs without a message get one, and messages whose job does not exist or is not pending are deleted. For
    jobs that wait for other jobs (``waits_for``) it is counted again how many they are, when the transaction commits.
    Without a message table and waiting jobs the statement changes nothing.

    ::

        repaired = session.scalars(reconcile(Email)).all()
        session.commit()

    :param model: a queue class.
    :raises NotAQueueError: if ``model`` is not a queue.
    """
    spec, *_ = select_jobs(model, "reconcile")
    return returning_keys(spec, spec.strategy.reconcile(spec))


def _spec_and_select(jobs: Any, verb: str) -> tuple[QueueSpec | None, AnySelect]:
    if isinstance(jobs, type | sa.Select):
        spec, _, select, _ = select_jobs(jobs, verb)
        return spec, select
    listed = instances(jobs, verb)
    if not listed:
        return None, sa.select()
    spec = spec_of(type(listed[0]))
    return spec, sa.select(spec.model).where(spec.key_in(spec.keys, [key_of(job, verb) for job in listed]))


# -- claimed jobs ------------------------------------------------------------------------------------------------------

_ERROR_LIMIT = 100_000


def complete(jobs: Any, /) -> Any:
    """Return a statement that ends runs as successful: the jobs are completed, or deleted if so configured.

    ::

        (email,) = session.scalars(claim(Email, 1))
        session.execute(complete(email))
        session.commit()

    :param jobs: a claimed instance, or several.
    :raises NotClaimedError: if an instance is not claimed.
    :raises HandlerMisuseError: in the handler of a Consumer, which ends the run itself.
    """
    return _settle(jobs, "complete", Settlement("completed"))


def retry(
    jobs: Any, /, *, delay: Delay | None = None, at: datetime | None = None, error: BaseException | str | None = None
) -> Any:
    """Return a statement that ends runs and makes their jobs pending again; the attempt counts.

    ::

        (email,) = session.scalars(claim(Email, 1))
        session.execute(retry(email, delay=timedelta(minutes=5), error="the server is busy"))
        session.commit()

    :class:`~sqlaqueue.Retry` is what a handler raises for this.

    :param jobs: a claimed instance, or several.
    :param delay: seconds or timedelta from the execution of the statement; no delay by default.
    :param at: a time, instead of a delay.
    :param error: an exception or a text for ``last_error``.
    :raises NotClaimedError: if an instance is not claimed.
    :raises HandlerMisuseError: in the handler of a Consumer, which ends the run itself.
    :raises StatementError: if both ``delay`` and ``at`` are given, or the model has no ``run_at`` for them.
    """
    jobs = instances(jobs, "retry")
    run_at = _run_at(jobs, "retry", 0.0 if delay is None and at is None else delay, at)
    return _settle(jobs, "retry", Settlement("pending", run_at=run_at, error=_bound_error(error)))


def fail(jobs: Any, /, *, error: BaseException | str | None = None) -> Any:
    """Return a statement that fails jobs for good; ``requeue()`` makes them pending again.

    ::

        (email,) = session.scalars(claim(Email, 1))
        session.execute(fail(email, error="the address does not exist"))
        session.commit()

    :class:`~sqlaqueue.Fail` is what a handler raises for this.

    :param jobs: a claimed instance, or several.
    :param error: an exception or a text for ``last_error``.
    :raises NotClaimedError: if an instance is not claimed.
    :raises HandlerMisuseError: in the handler of a Consumer, which ends the run itself.
    """
    return _settle(jobs, "fail", Settlement("failed", error=_bound_error(error)))


def release(jobs: Any, /, *, delay: Delay | None = None) -> Any:
    """Return a statement that makes jobs pending again without counting the attempt, for a shutdown or to snooze.

    ::

        (email,) = session.scalars(claim(Email, 1))
        session.execute(release(email, delay=60))
        session.commit()

    :param jobs: a claimed instance, or several.
    :param delay: seconds or timedelta until the jobs are due again; None leaves ``run_at`` as it is.
    :raises NotClaimedError: if an instance is not claimed.
    :raises HandlerMisuseError: in the handler of a Consumer, which ends the run itself.
    """
    jobs = instances(jobs, "release")
    return _settle(jobs, "release", Settlement("pending", starts=0, run_at=_run_at(jobs, "release", delay, None)))


def extend(jobs: Any, /, *, lease: Delay | None = None) -> Any:
    """Return a statement that lets leases expire ``lease`` from now.

    It skips rows that another transaction has locked. Under a strategy that holds a transaction there is no lease: the
    statement returns the keys of the jobs and changes nothing.

    ::

        (email,) = session.scalars(claim(Email, 1))
        session.commit()
        assert session.scalars(extend(email)).all() == [email.id]  # else another worker has it
        session.commit()

    :param jobs: a claimed instance, or several.
    :param lease: seconds or timedelta; the lease of the queue by default.
    :raises NotClaimedError: if an instance is not claimed.
    """
    jobs = instances(jobs, "extend")
    if not jobs:
        return returning_nothing()
    spec = spec_of(type(jobs[0]))
    span = spec.lease if lease is None else timedelta(seconds=seconds(lease, "extend(lease=...)"))
    verb = spec.strategy.extend(spec, claimed_jobs(jobs, "extend"), sa.literal(span, Span()))
    return returning_keys(spec, verb)


def settle_statement(spec: QueueSpec, runs: ClaimedJobs, settlement: Settlement) -> Any:
    return returning_keys(spec, spec.strategy.settle(spec, runs, settlement), runs.jobs)


def delayed(delay: Delay) -> sa.ColumnElement[Any]:
    """Return the time ``delay`` after the execution of the statement."""
    return later(clock(), sa.literal(timedelta(seconds=seconds(delay)), Span()))


def error_text(error: BaseException | str) -> str:
    """Return an error as a text that PostgreSQL can store: without NUL and lone surrogates, and not too long."""
    text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
    if len(text) > _ERROR_LIMIT:
        text = f"{text[:_ERROR_LIMIT]}... ({len(text)} characters)"
    return storable(text)


def storable(text: str) -> str:
    """Return a text that PostgreSQL can store: without NUL and lone surrogates."""
    return text.replace("\0", "\\0").encode("utf-8", "backslashreplace").decode()


def with_run_details(spec: QueueSpec, settlement: Settlement, runs: Iterable[Run], worker: str) -> Settlement:
    """Return ``settlement`` with the start of the runs and their worker, if the claim of the strategy writes neither.

    A settlement that does not count the attempt writes neither: it does not count as a run. With an order a job that is
    put off gets them nevertheless, since only a job that has begun holds back the others of its key while it waits.
    """
    if not (spec.strategy.holds_transaction and (spec.has("started_at") or spec.has("claimed_by"))):
        return settlement
    if settlement.starts == 0 and (spec.config.order is None or settlement.run_at is None):
        return settlement
    # The clock of this machine measures only the duration since the claim.
    ago = time.monotonic() - min(run.claimed_at for run in runs)
    started_at = earlier(clock(), sa.literal(timedelta(seconds=ago), Span()))
    return settlement._replace(started_at=started_at, worker=sa.literal(worker, sa.Text()))


def _settle(jobs: Any, verb: str, settlement: Settlement) -> Any:
    jobs = instances(jobs, verb)
    refuse_runs_of_consumers(jobs, verb)
    if not jobs:
        return returning_nothing()
    spec, claimed = spec_of(type(jobs[0])), claimed_jobs(jobs, verb)
    runs = [run for job in jobs if (run := run_of(job)) is not None]
    return settle_statement(spec, claimed, with_run_details(spec, settlement, runs, worker_name()))


def _run_at(jobs: list[Any], verb: str, delay: Delay | None, at: datetime | None) -> sa.ColumnElement[Any] | None:
    if not jobs:
        return None
    spec = spec_of(type(jobs[0]))
    if delay is not None and at is not None:
        msg = f"{verb}(delay=..., at=...): give one of the two"
        raise StatementError(msg)
    if at is not None:
        run_at = spec.column("run_at", f"{verb}(at=...)")
        if getattr(run_at.type, "timezone", False) and at.tzinfo is None:
            msg = f"{verb}(at={at!r}): {spec.model.__name__}.{run_at.key} has a time zone; use a datetime with tzinfo"
            raise StatementError(msg)
        return sa.literal(at, run_at.type)
    if delay is None or (delay == 0 and not spec.has("run_at")):
        return None
    spec.column("run_at", f"{verb}(delay=...)")
    return delayed(delay)


def _bound_error(error: BaseException | str | None) -> sa.ColumnElement[Any] | None:
    return None if error is None else sa.literal(error_text(error), sa.Text())
