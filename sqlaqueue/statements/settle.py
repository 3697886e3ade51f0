"""Statements that settle or extend runs: ``complete()``, ``retry()``, ``fail()``, ``release()``, ``extend()``."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import sqlalchemy as sa

from sqlaqueue.exc import StatementError
from sqlaqueue.mapping.mixin import spec_of
from sqlaqueue.mapping.runs import run_of
from sqlaqueue.queue.retry_policies import Delay, seconds
from sqlaqueue.queue.run import Run
from sqlaqueue.queue.spec import QueueSpec, clock
from sqlaqueue.statements.claim import worker_name
from sqlaqueue.statements.returning import returning_keys, returning_nothing
from sqlaqueue.statements.selection import claimed_jobs, instances, refuse_runs_of_consumers
from sqlaqueue.strategies import ClaimedJobs, Settlement

_ERROR_LIMIT = 100_000


def complete(jobs: Any, /) -> Any:
    """Return a statement that settles runs as successful: the jobs are completed, or deleted if so configured.

    :param jobs: a claimed instance, or several.
    :raises NotClaimedError: if an instance is not claimed.
    :raises HandlerMisuseError: in the handler of a Consumer, which settles the run itself.
    """
    return _settle(jobs, "complete", Settlement("completed"))


def retry(
    jobs: Any, /, *, delay: Delay | None = None, at: datetime | None = None, error: BaseException | str | None = None
) -> Any:
    """Return a statement that settles runs and makes their jobs pending again; the attempt counts.

    :param jobs: a claimed instance, or several.
    :param delay: seconds or timedelta from the execution of the statement; no delay by default.
    :param at: a time, instead of a delay.
    :param error: an exception or a text for ``last_error``.
    :raises NotClaimedError: if an instance is not claimed.
    :raises HandlerMisuseError: in the handler of a Consumer, which settles the run itself.
    :raises StatementError: if both ``delay`` and ``at`` are given, or the model has no ``run_at`` for them.
    """
    jobs = instances(jobs, "retry")
    run_at = _run_at(jobs, "retry", 0.0 if delay is None and at is None else delay, at)
    return _settle(jobs, "retry", Settlement("pending", run_at=run_at, error=_bound_error(error)))


def fail(jobs: Any, /, *, error: BaseException | str | None = None) -> Any:
    """Return a statement that fails jobs for good; ``requeue()`` makes them pending again.

    :param jobs: a claimed instance, or several.
    :param error: an exception or a text for ``last_error``.
    :raises NotClaimedError: if an instance is not claimed.
    :raises HandlerMisuseError: in the handler of a Consumer, which settles the run itself.
    """
    return _settle(jobs, "fail", Settlement("failed", error=_bound_error(error)))


def release(jobs: Any, /, *, delay: Delay | None = None) -> Any:
    """Return a statement that makes jobs pending again without counting the attempt, for a shutdown or to snooze.

    :param jobs: a claimed instance, or several.
    :param delay: seconds or timedelta until the jobs are due again; None leaves ``run_at`` as it is.
    :raises NotClaimedError: if an instance is not claimed.
    :raises HandlerMisuseError: in the handler of a Consumer, which settles the run itself.
    """
    jobs = instances(jobs, "release")
    return _settle(jobs, "release", Settlement("pending", starts=0, run_at=_run_at(jobs, "release", delay, None)))


def extend(jobs: Any, /, *, lease: Delay | None = None) -> Any:
    """Return a statement that lets leases expire ``lease`` from now.

    It skips rows that another transaction has locked. Under a strategy that holds a transaction there is no lease: the
    statement returns the keys of the jobs and changes nothing.

    :param jobs: a claimed instance, or several.
    :param lease: seconds or timedelta; the lease of the queue by default.
    :raises NotClaimedError: if an instance is not claimed.
    """
    jobs = instances(jobs, "extend")
    if not jobs:
        return returning_nothing()
    spec = spec_of(type(jobs[0]))
    span = spec.lease if lease is None else timedelta(seconds=seconds(lease, "extend(lease=...)"))
    verb = spec.strategy.extend(spec, claimed_jobs(jobs, "extend"), sa.literal(span, sa.Interval()))
    return returning_keys(spec, verb)


def settle_statement(spec: QueueSpec, runs: ClaimedJobs, settlement: Settlement) -> Any:
    """Return the statement that settles ``runs`` as ``settlement`` says."""
    return returning_keys(spec, spec.strategy.settle(spec, runs, settlement), runs.jobs)


def delayed(delay: Delay) -> sa.ColumnElement[Any]:
    """Return the time ``delay`` after the execution of the statement."""
    return clock() + sa.literal(timedelta(seconds=seconds(delay)), sa.Interval())


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
    started_at = clock() - sa.literal(timedelta(seconds=ago), sa.Interval())
    return replace(settlement, started_at=started_at, worker=sa.literal(worker, sa.Text()))


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
