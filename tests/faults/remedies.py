"""Every remedy of the library for the faults that a worker or a database can have, and what fails without it.

The remedies in the SQL of the strategies have a table of their own, in ``tests/strategies/test_mutants.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

LEASED = ("update_status",)
HELD = ("delete_returning", "batch_select", "own_message")


class Remedy(NamedTuple):
    """One remedy, the mutant that lacks it, and the scenario, or the test of the Consumers, that finds the mutant."""

    what: str
    mutant: str
    caught_by: str
    strategies: Sequence[str]
    colour: str | None = None
    """The Consumer that shows it, where the other one does not."""
    arguments: Mapping[str, Any] = MappingProxyType({})
    """What a test is called with, beside its queue."""


IN_SCENARIOS: list[Remedy] = [
    # Leases.
    Remedy("ends of runs are fenced by the token", "compares_no_token", "replaced_while_stopped", LEASED),
    Remedy("and by the state", "compares_the_token_only", "taken_back_from_a_zombie", LEASED),
    Remedy(
        "the effects of a run commit with its end",
        "commits_effects_before_the_outcome",
        "stopped_beyond_its_lease",
        LEASED,
    ),
    Remedy("expired leases are rescued", "does_not_rescue", "killed_at_work", LEASED),
    Remedy("a live worker extends its leases", "does_not_extend", "works_longer_than_its_lease", LEASED),
    Remedy("also of waiting jobs", "extends_running_jobs_only", "works_longer_than_its_lease", LEASED),
    Remedy("jobs claimed together get their attempt back", "holds_all_jobs_responsible", "killed_at_work", LEASED),
    Remedy("a job that ran alone does not", "holds_no_job_responsible", "kills_its_worker", LEASED),
    Remedy("a claim's token tells of other claims", "hides_other_claims", "killed_with_several_claims", LEASED),
    Remedy("quarantined jobs are claimed alone", "claims_quarantined_jobs_with_others", "kills_its_worker", LEASED),
    Remedy("release gives the attempt back", "release_spends_the_attempt", "stopped_in_a_handler", LEASED),
    Remedy("the server ends a heartbeat that freezes", "freezes_with_its_locks", "frozen_in_its_heartbeat", LEASED),
    # Uncertain commits.
    Remedy(
        "after a lost reply the row is queried",
        "does_not_check_uncertain_runs",
        "loses_the_answer_to_the_commit",
        LEASED,
    ),
    Remedy(
        "from the commit on, a run is uncertain",
        "takes_no_commit_for_uncertain",
        "loses_the_answer_to_the_commit",
        LEASED,
    ),
    Remedy("before it, it is not", "takes_every_run_for_uncertain", "robbed_while_stopped", LEASED),
    Remedy("a run that could not be settled is kept", "forgets_what_it_could_not_settle", "loses_the_commit", LEASED),
    Remedy(
        "finished runs are settled while workers are busy", "settles_in_workers_only", "is_done_before_others", LEASED
    ),
    # Shutdown.
    Remedy("SIGTERM is answered", "does_not_answer_signals", "stopped_while_idle", (*LEASED, "batch_select")),
    Remedy("it ends a wait", "sleeps_on_when_it_is_stopped", "stopped_while_idle", (*LEASED, "batch_select")),
    Remedy("jobs that have not begun are released", "keeps_jobs_that_have_not_begun", "stopped_in_a_handler", LEASED),
    Remedy("also within a batch", "runs_its_batch_to_the_end", "stopped_in_a_handler", HELD),
    Remedy(
        "abandoned runs are not counted",
        "counts_abandoned_runs",
        "stopped_beyond_its_grace",
        (*LEASED, *HELD),
        "async",
    ),
    Remedy("nor quarantined", "leaves_abandoned_batches_in_the_journal", "stopped_beyond_its_grace", HELD, "sync"),
    # A transaction holds the batch.
    Remedy("the journal outlives the worker", "writes_no_journal", "kills_its_worker", HELD),
    Remedy("deaths count as attempts", "counts_no_deaths", "kills_its_worker", HELD),
    Remedy("a job in the journal runs alone", "quarantines_no_job", "kills_its_worker", HELD),
    Remedy(
        "a job that died among others is not responsible", "holds_a_whole_batch_responsible", "killed_at_work", HELD
    ),
    Remedy("a job that ends leaves the quarantine", "never_ends_a_quarantine", "killed_at_work", HELD),
    Remedy("a live worker discards its entry", "discards_no_entry", "loses_the_commit", HELD),
    Remedy(
        "a failing job is undone", "keeps_the_writes_of_a_failing_handler", "calm", ("delete_returning", "batch_select")
    ),
    Remedy("a lost connection counts", "counts_no_lost_connection", "cuts_its_connection", HELD),
    Remedy(
        "a row that is claimed again is inserted again",
        "settles_a_lost_job_by_its_old_token",
        "cuts_its_connection",
        ["own_message"],
    ),
    Remedy("lost messages are restored", "does_not_reconcile", "lost_its_messages", ["delete_returning"]),
    # Errors.
    Remedy("workers go on after an error", "ends_at_the_first_error", "restarted", (*LEASED, "batch_select")),
    Remedy("so does maintenance", "ends_maintenance_at_the_first_error", "restarted", LEASED),
    Remedy("attempts are limited", "does_not_limit_attempts", "calm", (*LEASED, "batch_select")),
]

IN_TESTS: list[Remedy] = [
    Remedy(
        "an extension passes over locked rows",
        "extension_waits_for_locks",
        "test_leases:test_a_handler_that_has_written_its_row_holds_up_no_lease",
        LEASED,
    ),
    Remedy(
        "one quarantined job runs at a time",
        "runs_quarantined_jobs_side_by_side",
        "test_poison:test_suspects_do_not_keep_the_others_from_running",
        LEASED,
    ),
    Remedy(
        "a handler cannot commit its batch",
        "lets_handlers_commit",
        "test_misuse:test_a_handler_that_ends_the_transaction_of_its_batch",
        ("delete_returning",),
        None,
        {"verb": "commit", "batch_size": 1},
    ),
    Remedy(
        "a thread that hangs loses its job",
        "ignores_timeouts",
        "test_timeouts:test_a_thread_that_hangs_loses_its_job_at_its_timeout",
        LEASED,
        "sync",
    ),
    Remedy(
        "running jobs are cancelled",
        "ignores_requests_to_cancel",
        "test_cancelling:test_a_claimed_job_that_has_not_begun_is_cancelled",
        ("batch_select",),
    ),
    Remedy(
        "a run that cannot be settled blocks no other",
        "settles_all_or_nothing",
        "test_retries:test_a_job_that_the_database_refuses_to_end_ends_as_failed",
        LEASED,
    ),
    Remedy(
        "a batch that fails is tried job by job",
        "tries_a_batch_as_a_whole_again",
        "test_retries:test_a_batch_that_fails_is_tried_job_by_job",
        ("update_status", "batch_select"),
    ),
]

REMEDIES = [*IN_SCENARIOS, *IN_TESTS]
