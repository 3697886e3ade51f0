"""How a batch is claimed, run and settled: one script a strategy's kind, for both Consumers.

A script is a generator. It yields what is to be done, an operation in its session, one in another session, or the
handler, and is sent the result, so that the order of things, which is where the guarantees are, stands here
once; :mod:`sqlaqueue.consumer` and :mod:`sqlaqueue.aio` only carry the steps out, each in its own colour.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from sqlaqueue import operations as ops
from sqlaqueue.exc import HandlerMisuseError, JobTimeout, WorkerDied
from sqlaqueue.ledger import Entry
from sqlaqueue.mapping import run_of
from sqlaqueue.operations import Ended
from sqlaqueue.outcomes import COMPLETED, RELEASED, Outcome, judge
from sqlaqueue.plan import Plan
from sqlaqueue.spec import Run


@dataclass(frozen=True, slots=True)
class Do:
    """Carry out an operation in the script's own session; send its result."""

    operation: Callable[..., Any]
    arguments: tuple[Any, ...] = ()

    def __call__(self, session: Session) -> Any:
        """Carry it out."""
        return self.operation(session, *self.arguments)


@dataclass(frozen=True, slots=True)
class Beside(Do):
    """Carry out an operation in another session, on a connection of its own; send its result."""


@dataclass(frozen=True, slots=True)
class Handle:
    """Call the handler with these jobs; send what it raised, or None."""

    jobs: Sequence[Any]


Step = Do | Handle
Script = Generator[Step, Any, "Report"]


@dataclass(slots=True)
class Report:
    """What a script has done."""

    settled: Sequence[Ended] = ()
    """Runs whose end is committed."""
    unsettled: Sequence[Ended] = ()
    """Runs that ended without touching the database, to be settled together with others."""
    lost: Sequence[Ended] = ()
    """Runs whose result was refused."""
    claimed: int = 0


def _rollback(session: Session) -> None:
    session.rollback()


def _judge(plan: Plan, error: BaseException | None, run: Run) -> Outcome:
    return judge(error, run, plan.policy, has_run_at=plan.spec.has("run_at"))


# -- a transaction holds the batch ---------------------------------------------------------------------------


def held_batch(plan: Plan, n: int) -> Script:
    """Claim a batch, run it and settle it in the one transaction that holds it."""
    while plan.unstruck:
        yield Beside(ops.leave_ledger, (plan, plan.unstruck[0]))
        plan.unstruck.pop(0)
    suspect = plan.suspects.take()
    jobs = yield (Do(ops.claim, (plan, n)) if suspect is None else Do(ops.claim_key, (plan, suspect)))
    if not jobs:
        return Report(claimed=0 if suspect is None else 1)
    runs = [_run(job) for job in jobs]
    entry: Entry = yield Beside(ops.enter_ledger, (plan, [run.key for run in runs]))
    suspects = entry.suspected([run.key for run in runs])
    if suspects and len(jobs) > 1:
        plan.suspects.add(suspects)
        yield Do(_rollback)
        yield Beside(ops.leave_ledger, (plan, entry))
        return Report(claimed=len(suspects))
    try:
        ended = yield from _run_held(plan, jobs, runs, entry)
        yield Do(ops.settle_held, (plan, ended, entry))
    except Exception as error:
        yield from _abandon_held(plan, entry, error)
        raise
    return Report(settled=ended, claimed=len(jobs))


def _run(job: Any) -> Run:
    run = run_of(job)
    if run is None:  # pragma: no cover - the claim's load event sets it
        raise RuntimeError(job)
    return run


def _run_held(plan: Plan, jobs: Sequence[Any], runs: Sequence[Run], entry: Entry) -> Generator[Step, Any, list[Ended]]:
    if entry.deaths and runs[0].attempt - 1 + entry.deaths >= runs[0].max_attempts:
        msg = f"the worker died {entry.deaths} times while it ran this job alone"
        died = WorkerDied(msg)
        return [Ended(runs[0], Outcome("failed", error=f"WorkerDied: {died}", cause=died), jobs[0], entry.deaths)]
    starts = entry.deaths + 1
    ended: list[Ended] = []
    units = [list(jobs)] if plan.batch else [[job] for job in jobs]
    for unit in units:
        if plan.stopping:
            ended += [Ended(_run(job), RELEASED, job) for job in unit]
            continue
        error = yield from _in_savepoint(unit)
        if error is not None and len(unit) > 1:
            # One bad job must not take its mates along: each is tried by itself.
            yield Do(ops.reload, (plan, unit))
            for job in unit:
                alone = yield from _in_savepoint([job])
                ended.append(Ended(_run(job), _judge(plan, alone, _run(job)), job, starts))
        else:
            ended += [Ended(_run(job), _judge(plan, error, _run(job)), job, starts) for job in unit]
    return ended


def _in_savepoint(unit: Sequence[Any]) -> Generator[Step, Any, BaseException | None]:
    """Run the handler in a savepoint, so that what it wrote can be undone without losing the batch."""
    savepoint: ops.Savepoint = yield Do(ops.Savepoint)
    error: BaseException | None = yield Handle(unit)
    try:
        yield Do(_close, (savepoint, error is None))
    except HandlerMisuseError as misuse:
        misuse.add_note(str([_run(job).key for job in unit]))
        raise _BatchBroken(unit, misuse) from error
    except DBAPIError as failed:
        if error is not None or failed.connection_invalidated:
            raise
        yield Do(_close, (savepoint, False))
        return failed
    except Exception as failed:
        if error is not None:
            raise
        yield Do(_close, (savepoint, False))
        return failed
    return error


def _close(_: Session, savepoint: ops.Savepoint, keep: bool) -> None:  # noqa: FBT001 - called positionally by its step
    savepoint.close(keep=keep)


class _BatchBroken(Exception):
    """A handler ended the transaction of its batch."""

    def __init__(self, unit: Sequence[Any], misuse: HandlerMisuseError) -> None:
        super().__init__(str(misuse))
        self.keys = [_run(job).key for job in unit]
        self.runs = [_run(job) for job in unit]
        self.misuse = misuse


def _abandon_held(plan: Plan, entry: Entry, error: BaseException) -> Generator[Step, Any, None]:
    """Give a batch up whose transaction is lost; the worker lives, so nobody is a suspect."""
    yield Do(_rollback)
    plan.unstruck.append(entry)
    yield Beside(ops.leave_ledger, (plan, entry))
    plan.unstruck.remove(entry)
    if isinstance(error, _BatchBroken):
        for run in error.runs:
            yield Beside(ops.settle_alone, (plan, run.key, _judge(plan, error.misuse, run)))


# -- leases hold the jobs --------------------------------------------------------------------------------------


def leased_unit(plan: Plan, jobs: Sequence[Any]) -> Script:
    """Run one job, or one batch, whose claim is committed."""
    error, adopted = yield from _run_leased(jobs)
    if error is not None and len(jobs) > 1 and not isinstance(error, JobTimeout):
        yield Do(_rollback)
        parts = []
        for job in adopted:
            yield Do(ops.reload, (plan, [job]))
            alone: BaseException | None = yield Handle([job])
            parts.append((yield from _finish(plan, [job], alone)))
        return Report(
            settled=[one for part in parts for one in part.settled],
            unsettled=[one for part in parts for one in part.unsettled],
            lost=[one for part in parts for one in part.lost],
            claimed=len(jobs),
        )
    return (yield from _finish(plan, adopted, error))


def _run_leased(jobs: Sequence[Any]) -> Generator[Step, Any, tuple[BaseException | None, list[Any]]]:
    adopted: list[Any] = yield Do(ops.adopt, (jobs,))
    error: BaseException | None = yield Handle(adopted)
    return error, adopted


def _finish(plan: Plan, jobs: Sequence[Any], error: BaseException | None) -> Script:
    """Commit a handler's writes with the completion of its jobs; leave everything else to be settled in bulk."""
    runs = [_run(job) for job in jobs]
    if error is None and (yield Do(ops.touched)):
        ended = [Ended(run, COMPLETED) for run in runs]
        try:
            lost = yield Do(ops.complete_and_commit, (plan, ended))
        except Exception as failed:  # noqa: BLE001 - whatever the flush or the commit raises is the job's error
            yield Do(_rollback)
            broken = isinstance(failed, DBAPIError) and failed.connection_invalidated
            return Report(
                unsettled=[Ended(run, _judge(plan, failed, run), uncertain=broken) for run in runs], claimed=len(runs)
            )
        if not lost:
            return Report(settled=ended, claimed=len(runs))
        # A batch is one transaction: the mates of a lost job are rolled back with it, and run again uncounted.
        mates = [Ended(one.run, RELEASED) for one in ended if one not in lost]
        return Report(unsettled=mates, lost=lost, claimed=len(runs))
    yield Do(_rollback)
    return Report(unsettled=[Ended(run, _judge(plan, error, run)) for run in runs], claimed=len(runs))
