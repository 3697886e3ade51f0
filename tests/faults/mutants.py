"""The library with one remedy taken out each, to be applied in a process that ends after it.

Each function says what the library then does without. A name may be taken from the module that uses it, or from the
one that defines it: what matters is that the workers find the mutant.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import sqlalchemy as sa

from sqlaqueue.consumer import aio, settings, sync
from sqlaqueue.consumer.claiming import claim_jobs, job_buffer
from sqlaqueue.consumer.claiming.job_buffer import Crew
from sqlaqueue.consumer.core.effects import Doze, Pause, Report, Script
from sqlaqueue.consumer.executing import held, job_instances, leased, worker
from sqlaqueue.consumer.executing.executor import Hand, runs_of
from sqlaqueue.consumer.maintenance import leases, loop
from sqlaqueue.consumer.sessions import savepoint
from sqlaqueue.consumer.settling import crash_journal, settle
from sqlaqueue.consumer.settling.crash_journal import Entries, Entry
from sqlaqueue.consumer.settling.outcomes import Ended
from sqlaqueue.strategies.update_status import UpdateStatus
from tests.strategies import mutants as strategies

MUTANTS: dict[str, Callable[[], None]] = {}


def mutant(apply: Callable[[], None]) -> Callable[[], None]:
    """Enter a mutant into the list."""
    MUTANTS[apply.__name__] = apply
    return apply


def nothing(*_: Any, **__: Any) -> None:
    """Take the place of something that is not done."""


def none_at_all(*_: Any, **__: Any) -> list[Any]:
    """Take the place of something that is not found."""
    return []


# -- leases ----------------------------------------------------------------------------------------------------------


@mutant
def compares_no_token() -> None:
    UpdateStatus.fence = strategies.ComparesNoToken.fence


@mutant
def compares_the_token_only() -> None:
    UpdateStatus.fence = strategies.ComparesTheTokenOnly.fence


@mutant
def does_not_rescue() -> None:
    leases.rescue_expired = none_at_all


@mutant
def does_not_extend() -> None:
    leases.extend_leases = nothing


@mutant
def extends_only_what_is_at_work() -> None:
    Crew.alive = lambda self: [run for one in self.at_work() for run in runs_of(one.unit)]


@mutant
def extension_waits_for_locks() -> None:
    original, waiting = UpdateStatus.extend, strategies.UpdateStatusWaits()
    UpdateStatus.extend = lambda self, spec, held, lease: original(waiting, spec, held, lease)


@mutant
def blames_everybody() -> None:
    UpdateStatus._ran_alone = staticmethod(lambda spec: sa.true())


@mutant
def blames_nobody() -> None:
    UpdateStatus._ran_alone = staticmethod(lambda spec: sa.false())


@mutant
def says_nothing_of_other_claims() -> None:
    settings.shared_token = settings.alone_token


@mutant
def claims_suspects_with_others() -> None:
    UpdateStatus.quarantined = lambda self, spec: None


@mutant
def runs_suspects_side_by_side() -> None:
    settings.Suspects.one_runs = property(lambda self: False)


@mutant
def freezes_with_its_locks() -> None:
    leases._be_brief = nothing


@mutant
def release_burns_the_attempt() -> None:
    UpdateStatus.counted = lambda self, attempts, settlement: None


@mutant
def commits_effects_before_the_end() -> None:
    """What a handler wrote is committed, and then its run is ended."""

    def complete_and_commit(session: Any, plan: Any, ended: Sequence[Ended]) -> list[Ended]:
        session.commit()
        lost = settle.settle(session, plan, ended)
        session.commit()
        return lost

    settle.complete_and_commit = complete_and_commit


# -- doubts about a commit -------------------------------------------------------------------------------------------


@mutant
def does_not_look_again() -> None:
    settle._look_again = lambda session, plan, lost: list(lost)


@mutant
def doubts_nothing() -> None:
    settle.commit = claim_jobs.commit = lambda session, ended: session.commit()


@mutant
def doubts_what_was_not_committed() -> None:
    original = settle.complete_and_commit

    def complete_and_commit(session: Any, plan: Any, ended: Sequence[Ended]) -> list[Ended]:
        for one in ended:
            one.uncertain = True
        return original(session, plan, ended)

    settle.complete_and_commit = complete_and_commit


@mutant
def forgets_what_it_could_not_settle() -> None:
    Crew.give_back = nothing


# -- the end of a shift ----------------------------------------------------------------------------------------------


@mutant
def does_not_answer_signals() -> None:
    nobody = lambda stop: contextlib.nullcontext()  # noqa: E731 - its name says it
    sync.signal_handlers.stop_on_signal = nobody
    aio.signal_handlers.stop_on_signal = nobody


@mutant
def sleeps_on_when_it_is_stopped() -> None:
    def stop(self: Any) -> None:
        self.plan.stopping = True

    sync._Threads.stop = stop
    aio._Tasks.stop = stop


@mutant
def keeps_what_it_has_not_begun() -> None:
    Crew.forget_held = none_at_all


class Instead:
    """An object, but for some attributes."""

    def __init__(self, there: Any, **attributes: Any) -> None:
        self.__dict__.update(attributes, _there=there)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._there, name)


@mutant
def runs_its_batch_to_the_end() -> None:
    original = held._run_held
    held._run_held = lambda crew, jobs, entry: original(
        Instead(crew, plan=Instead(job_buffer.plan, stopping=False)), jobs, entry
    )


@mutant
def counts_what_it_gave_up() -> None:
    original = Hand._verdict

    def verdict(self: Hand, raised: Any) -> Any:
        self.abandoned = False
        return original(self, raised)

    Hand._verdict = verdict


@mutant
def leaves_given_up_batches_in_the_ledger() -> None:
    Entries.give_up_all = nothing


# -- a transaction holds the batch -----------------------------------------------------------------------------------


@mutant
def keeps_no_ledger() -> None:
    job_instances.enter_ledger = nothing


@mutant
def counts_no_deaths() -> None:
    Entry.deaths = property(lambda self: 0, nothing)


@mutant
def suspects_nobody() -> None:
    Entry.suspected = none_at_all


@mutant
def blames_all_of_a_batch() -> None:
    original = Entries.open
    Entries.open = lambda self, keys, *, blamed: original(self, keys, blamed=True)


@mutant
def never_clears_a_suspect() -> None:
    crash_journal.leave = crash_journal.strike


@mutant
def strikes_nothing_out() -> None:
    """A batch that is given up by a worker that lives is taken for the doing of a dead one."""

    def strike(plan: Any) -> Script:
        yield from ()

    held.strike = worker.strike = strike


@mutant
def keeps_what_a_failing_handler_wrote() -> None:
    original = savepoint.Savepoint.close
    savepoint.Savepoint.close = lambda self, *, keep: original(self, keep=True)


@mutant
def blames_nobody_for_a_lost_connection() -> None:
    def settle_alone(plan: Any, runs: Any, cause: Any, entry: Entry) -> Script:
        return Report(claimed=len(entry.names))
        yield

    held._settle_alone = settle_alone


@mutant
def settles_a_lost_job_by_its_old_token() -> None:
    def settle_alone(session: Any, plan: Any, ended: Ended, entry: Entry) -> Ended | None:
        for job in claim_jobs.claim_key(session, plan, ended.run.key):
            again = replace(ended, job=job)
            settle.settle(session, plan, [again])
            job_instances._leave(session, plan, [again], entry)
            session.commit()
            return again
        return None

    job_instances.settle_alone = settle_alone


@mutant
def lets_handlers_commit() -> None:
    savepoint.Savepoint.refuses = lambda self: False


@mutant
def does_not_reconcile() -> None:
    leases.reconcile_messages = none_at_all
    leases.reconcile_range = lambda *_: ([], None)


# -- whatever goes wrong ---------------------------------------------------------------------------------------------


@mutant
def ends_at_the_first_trouble() -> None:
    def trouble(shift: Any, error: Exception) -> Script:
        shift.fail(error)
        yield Pause(0)

    worker._trouble = trouble


@mutant
def has_a_keeper_that_dies_of_trouble() -> None:
    def keep(shift: Any) -> Script:
        while not shift.over:
            for duty in (loop._extend_leases, loop._sweep):
                yield from duty(shift, time.monotonic())
            yield Doze(shift.until_next_duty())

    sync.keep = aio.keep = keep


@mutant
def knows_no_limit() -> None:
    original = settings.judge
    settings.judge = lambda error, run, *arguments, **options: original(
        error, replace(run, max_attempts=10**6), *arguments, **options
    )


# -- handlers that take too long, or are asked to stop ---------------------------------------------------------------


@mutant
def has_all_the_time() -> None:
    Crew.overdue = none_at_all


@mutant
def hears_no_request() -> None:
    leases.requests_to_stop = none_at_all


@mutant
def settles_in_lanes_only() -> None:
    job_buffer.Crew.overlooks = lambda self, now: False


@mutant
def settles_all_or_nothing() -> None:
    settle.settle_each = lambda *arguments, **options: (settle.settle_and_commit(*arguments, **options), [], [])


@mutant
def tries_a_batch_as_a_whole_again() -> None:
    leased.concerns_all = held.concerns_all = lambda error: True
