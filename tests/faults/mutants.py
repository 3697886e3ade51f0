"""Mutants of the library, each without one safeguard. A mutant is applied in a process that exits afterwards.

The name of a mutant says what it does. It replaces a name in the module that defines it or in those that use it,
depending on which one the consumer's code looks up.
"""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from sqlaqueue.consumer import held, leased, outcomes, quarantine, sessions, settle, statements, tasks, threads, worker
from sqlaqueue.consumer import held as held_module
from sqlaqueue.consumer.claim import NOTHING, HeldBack
from sqlaqueue.consumer.context import ConsumerContext
from sqlaqueue.consumer.core.effects import Routine, Wait
from sqlaqueue.consumer.executor import Executor
from sqlaqueue.consumer.in_flight import CompletionBuffer, runs_in
from sqlaqueue.consumer.leased import Report
from sqlaqueue.consumer.maintenance import cleanup, handlers_running, leases
from sqlaqueue.consumer.maintenance.state import Maintenance
from sqlaqueue.consumer.outcomes import FinishedRun
from sqlaqueue.consumer.quarantine import CrashJournal, JournalEntry, Quarantine
from sqlaqueue.consumer.settle import SettledEach, Settler
from sqlaqueue.flow_control.turns import Turns
from sqlaqueue.strategies.update_status import UpdateStatus
from tests.strategies import mutants as strategy_mutants

MUTANTS: dict[str, Callable[[], None]] = {}


def replace(owner: Any, name: str, value: Any) -> None:
    """Replace an attribute of a class or a module.

    :raises AttributeError: if there is none, because it was renamed: the mutant would be the library itself.
    """
    getattr(owner, name)
    setattr(owner, name, value)


def mutant(apply: Callable[[], None]) -> Callable[[], None]:
    MUTANTS[apply.__name__] = apply
    return apply


def lose(name: str | None) -> None:
    """Apply a mutant in this process; ``lose_in_database`` does what there is to do in the database."""
    if name in IN_DATABASE:
        name = IN_DATABASE[name].in_workers
    if name in MUTANTS:
        MUTANTS[name]()
    for owner, attribute, value in REPLACED.get(name or "", ()):
        replace(owner, attribute, value)


def lose_in_database(connection: sa.Connection, name: str | None) -> None:
    """Apply a mutant to the functions of a database, if it changes any."""
    if name in IN_DATABASE:
        replacement = IN_DATABASE[name]
        assert replace_functions(connection, replacement.prefix, replacement.texts), f"{name}: no such function"


def do_nothing(*_: Any, **__: Any) -> None:
    """Do nothing."""


def return_nothing(*_: Any, **__: Any) -> list[Any]:
    return []


def do_nothing_routine(*_: Any, **__: Any) -> Routine:
    yield from ()


REPLACED: dict[str, list[tuple[Any, str, Any]]] = {
    # Leases
    "compares_no_token": [(UpdateStatus, "fence", strategy_mutants.ComparesNoToken.fence)],
    "compares_the_token_only": [(UpdateStatus, "fence", strategy_mutants.ComparesTheTokenOnly.fence)],
    "does_not_rescue": [(leases, "rescue_jobs", return_nothing)],
    "does_not_extend": [(leases, "extend_leases", return_nothing)],
    "extends_running_jobs_only": [
        (ConsumerContext, "live_runs", lambda self: runs_in(one.group for one in self.in_flight.busy()))
    ],
    "holds_all_jobs_responsible": [(UpdateStatus, "_ran_alone", staticmethod(lambda spec: sa.true()))],
    "holds_no_job_responsible": [(UpdateStatus, "_ran_alone", staticmethod(lambda spec: sa.false()))],
    "hides_other_claims": [(statements, "shared_token", statements.alone_token)],
    "claims_quarantined_jobs_with_others": [(UpdateStatus, "quarantined", lambda self, spec: None)],
    "runs_all_quarantined_jobs_at_once": [(Quarantine, "is_running", property(lambda self: False))],
    "has_no_transaction_timeout": [(leases, "limit_transaction", do_nothing)],
    "counts_released_runs": [(UpdateStatus, "counted", lambda self, attempts, settlement: None)],
    # Uncertain commits
    "does_not_check_uncertain_runs": [(settle, "really_lost", lambda session, spec, lost, bind_arguments: list(lost))],
    "treats_no_run_as_uncertain": [(settle, "commit_settlements", lambda session, finished: session.commit())],
    "forgets_unsettled_runs": [(CompletionBuffer, "put_back", do_nothing)],
    # Shutdown
    "ignores_stop": [(threads.ThreadRunner, "stop", do_nothing), (tasks.TaskRunner, "stop", do_nothing)],
    "keeps_jobs_that_have_not_begun": [
        (ConsumerContext, "forget_claimed", return_nothing),
        (handlers_running, "late_groups", return_nothing),
    ],
    "leaves_abandoned_batches_in_the_journal": [(CrashJournal, "discard_all", do_nothing)],
    # Strategies that hold a transaction
    "writes_no_journal": [(quarantine, "write_entry", do_nothing)],
    "counts_no_deaths": [(JournalEntry, "deaths", property(lambda self: 0, do_nothing))],
    "quarantines_no_job": [(JournalEntry, "quarantined_among", return_nothing)],
    "never_ends_a_quarantine": [(quarantine, "close_entry", quarantine.delete_entry)],
    "lets_handlers_commit": [(sessions.Savepoint, "refuses", lambda self: False)],
    "does_not_reconcile": [
        (cleanup, "reconcile_at_once", return_nothing),
        (cleanup, "reconcile_range", lambda *_: ([], None)),
    ],
    # Timeouts and cancellation
    "ignores_timeouts": [(handlers_running, "record_overdue", return_nothing)],
    "ignores_requests_to_cancel": [(handlers_running, "take_requests", return_nothing)],
    "settles_in_workers_only": [(handlers_running, "settle_finished", do_nothing_routine)],
    "settles_all_or_nothing": [
        (
            Settler,
            "settle_each",
            lambda self, session, finished, **_: SettledEach(self.settle_and_commit(session, finished), [], []),
        )
    ],
    "tries_a_batch_as_a_whole_again": [
        (leased, "applies_to_batch", lambda error: True),
        (held, "applies_to_batch", lambda error: True),
    ],
    # Flow control: functions in the database, and what the workers do themselves
    "forgets_turns": [(Turns, "claimed", do_nothing)],
    "reserves_no_beginnings": [(held, "reserve_rates", lambda _, __, keys: set(keys))],
}
"""Mutants that only replace attributes of classes and modules: the owner of each, its name, and its new value."""


# -- leases ----------------------------------------------------------------------------------------------------------


@mutant
def extension_waits_for_locks() -> None:
    original, waiting = UpdateStatus.extend, strategy_mutants.UpdateStatusWaits()
    replace(UpdateStatus, "extend", lambda self, spec, held, lease: original(waiting, spec, held, lease))


@mutant
def commits_effects_before_the_outcome() -> None:
    """The writes of a handler are committed before its run is settled."""

    def complete_and_commit(self: Settler, session: Any, finished: Sequence[FinishedRun]) -> list[FinishedRun]:
        session.commit()
        lost = self.settle(session, finished)
        session.commit()
        return lost

    replace(Settler, "complete_and_commit", complete_and_commit)


# -- uncertain commits -----------------------------------------------------------------------------------------------


@mutant
def treats_every_run_as_uncertain() -> None:
    original = Settler.complete_and_commit

    def complete_and_commit(self: Settler, session: Any, finished: Sequence[FinishedRun]) -> list[FinishedRun]:
        for one in finished:
            one.uncertain = True
        return original(self, session, finished)

    replace(Settler, "complete_and_commit", complete_and_commit)


# -- shutdown --------------------------------------------------------------------------------------------------------


@mutant
def ignores_signals() -> None:
    def stop_on_signal(stop: Any, **_: Any) -> Any:
        return contextlib.nullcontext()

    replace(threads.signal_handlers, "stop_on_signal", stop_on_signal)
    replace(tasks.signal_handlers, "stop_on_signal", stop_on_signal)


class Override:
    """Replaces some attributes of an object, and reads the others from it."""

    def __init__(self, target: Any, **attributes: Any) -> None:
        self.__dict__.update(attributes, _target=target)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)


@mutant
def runs_its_batch_to_the_end() -> None:
    original = held._run
    replace(held, "_run", lambda context, jobs, entry: original(Override(context, stopping=False), jobs, entry))


@mutant
def counts_abandoned_runs() -> None:
    original = Executor._result

    def result(self: Executor, raised: Any) -> Any:
        self.abandoned = False
        return original(self, raised)

    replace(Executor, "_result", result)


# -- strategies that hold a transaction ------------------------------------------------------------------------------


@mutant
def holds_a_whole_batch_responsible() -> None:
    original = CrashJournal.open
    replace(
        CrashJournal, "open", lambda self, keys, *, solely_responsible: original(self, keys, solely_responsible=True)
    )


@mutant
def discards_no_entry() -> None:
    """The journal entry of a batch that a live worker gives up stays, as after the death of a worker."""
    replace(held, "discard_entries", do_nothing_routine)
    replace(worker, "discard_entries", do_nothing_routine)


@mutant
def keeps_the_writes_of_a_failing_handler() -> None:
    original = sessions.Savepoint.close
    replace(sessions.Savepoint, "close", lambda self, *, keep: original(self, keep=True))


@mutant
def counts_no_lost_connection() -> None:
    def settle_alone(context: Any, runs: Any, cause: Any, entry: JournalEntry) -> Routine:
        return Report(claimed=len(entry.names))
        yield

    replace(held, "_settle_alone", settle_alone)


@mutant
def settles_a_lost_job_by_its_old_token() -> None:
    def settle_alone(session: Any, context: Any, finished: FinishedRun, entry: JournalEntry) -> FinishedRun | None:
        for job in context.claimer.claim_key(session, finished.run.key):
            again = dataclasses.replace(finished, job=job)
            context.settler.settle(session, [again])
            held_module._close_journal_entry(session, context, [again], entry)
            session.commit()
            return again
        return None

    replace(held_module, "settle_alone", settle_alone)


# -- errors ----------------------------------------------------------------------------------------------------------


@mutant
def ends_at_the_first_error() -> None:
    def try_again_later(context: Any, error: Exception) -> Routine:
        context.fail(error)
        yield Wait("stop", 0)

    replace(worker, "_try_again_later", try_again_later)


@mutant
def ends_maintenance_at_the_first_error() -> None:
    def maintain(context: Any) -> Routine:
        maintenance = Maintenance(context)
        while not context.workers_ended:
            for task in (leases.extend, leases.rescue_expired):
                yield from task(maintenance, time.monotonic())
            yield Wait("maintenance", maintenance.until_next())

    replace(threads, "maintain", maintain)
    replace(tasks, "maintain", maintain)


@mutant
def does_not_limit_attempts() -> None:
    original = outcomes.outcome_of
    replace(
        outcomes,
        "outcome_of",
        lambda error, run, *arguments, **options: original(
            error, dataclasses.replace(run, max_attempts=10**6), *arguments, **options
        ),
    )


# -- timeouts and cancellation ---------------------------------------------------------------------------------------


# -- flow control: functions in the database, and what the workers do themselves --------------------------------------


@dataclass(frozen=True)
class Replacement:
    """A change of a function in the database: each text is replaced by the other one."""

    prefix: str
    """How the names of the functions begin."""
    texts: Mapping[str, str]
    in_workers: str | None = None
    """The mutant that the workers run as well."""


_LOCK = "IF NOT pg_catalog.pg_try_advisory_xact_lock("
_UNLOCKED = {_LOCK: f"IF false AND {_LOCK.removeprefix('IF ')}"}
_CAPACITY, _HEAD, _RATE = "sqlaqueue_capacity_", "sqlaqueue_head_", "sqlaqueue_rate_capacity"
_HOLD = "sqlaqueue_hold_"

IN_DATABASE: Mapping[str, Replacement] = {
    "limit without a lock": Replacement(_CAPACITY, _UNLOCKED),
    "limit always one more": Replacement(
        _CAPACITY, {"IF sqlaqueue_free <= 0 THEN": "IF false THEN", "RETURN sqlaqueue_free;": "RETURN 1;"}
    ),
    "limit counts in the snapshot of the statement": Replacement(
        _CAPACITY, {"LANGUAGE plpgsql": "LANGUAGE plpgsql STABLE"}
    ),
    "limit without the claim's own jobs": Replacement(
        _CAPACITY, {":= sqlaqueue_free - (": ":= sqlaqueue_free - 0 * ("}
    ),
    "order without a lock": Replacement(_HEAD, _UNLOCKED),
    "order is not checked": Replacement(
        _HEAD,
        {
            "IF sqlaqueue_first IS DISTINCT FROM sqlaqueue_job": "IF false",
            "RETURN sqlaqueue_first;": "RETURN sqlaqueue_job;",
        },
    ),
    "order does not see running jobs": Replacement(_HEAD, {"OR EXISTS (": "OR false AND EXISTS ("}),
    "order does not see failed jobs": Replacement(_HEAD, {" OR status = 'failed'": ""}),
    "order does not see begun jobs": Replacement(_HEAD, {"started_at IS NOT NULL OR ": ""}),
    "a failed job cancels nothing": Replacement("sqlaqueue_order_", {"WHERE ": "WHERE false AND "}),
    "rate without a lock": Replacement(_RATE, _UNLOCKED),
    "rate always has its burst": Replacement(
        _RATE, {"IF sqlaqueue_free <= 0 THEN": "IF false THEN", "RETURN sqlaqueue_free;": "RETURN sqlaqueue_burst;"}
    ),
    "rate is not held back": Replacement(_RATE, {"IF sqlaqueue_until >": "IF false AND sqlaqueue_until >"}),
    "a slot without a lock": Replacement(
        _HOLD, {"pg_catalog.pg_try_advisory_xact_lock(sqlaqueue_slot | sqlaqueue_try)": "true"}
    ),
    "one slot more": Replacement(_HOLD, {"- 1 LOOP": "LOOP"}),
    "the slots of a changing limit are not counted": Replacement(
        _HOLD, {"IF sqlaqueue_taken AND sqlaqueue_changing[i] THEN": "IF false THEN"}
    ),
    "the head is not looked for": Replacement(
        _HOLD, {"IF sqlaqueue_first IS DISTINCT FROM sqlaqueue_job THEN": "IF false THEN"}
    ),
    "no notification of free places": Replacement(
        "sqlaqueue_freed_", {"BEGIN\n": "BEGIN\n  RETURN NULL;\n"}, "forgets_that_jobs_wait"
    ),
}


@mutant
def forgets_that_jobs_wait() -> None:
    """The Consumer that ends a run would look for the jobs that wait for its place."""
    replace(HeldBack, "of", classmethod(lambda *_: NOTHING))


def replace_functions(connection: sa.Connection, prefix: str, texts: Mapping[str, str], *, once: bool = False) -> int:
    """Replace texts in the functions of the database whose names begin with ``prefix``; return how many these are.

    :param once: whether a function has each text once; it may have it several times otherwise.
    """
    statement = sa.text("SELECT pg_get_functiondef(oid) FROM pg_proc WHERE starts_with(proname, :prefix)")
    found = connection.scalars(statement, {"prefix": prefix}).all()
    for text in found:
        changed = text
        for old, new in texts.items():
            assert changed.count(old) == 1 if once else old in changed, f"{old!r} in {changed}"
            changed = changed.replace(old, new)
        # A percent sign would be a parameter of the driver.
        connection.exec_driver_sql(changed.replace("%", "%%"))
    return len(found)
