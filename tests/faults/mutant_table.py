"""The safeguards of the library against faults: the mutant that lacks each one, and the test that detects it.

``tests/strategies/test_mutants.py`` has a table of the safeguards in the SQL of the strategies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

LEASED = ("update_status",)
HELD = ("delete_returning", "batch_select", "own_message")


class Safeguard(NamedTuple):
    """A safeguard, its mutant, and the scenario or the test of ``tests/consumer`` that detects the mutant."""

    description: str
    mutant: str
    detected_by: str
    strategies: Sequence[str]
    api: str | None = None
    """The API that detects the mutant, if only one does."""
    arguments: Mapping[str, Any] = MappingProxyType({})
    """The arguments of the test besides its queue."""


DETECTED_BY_SCENARIOS: list[Safeguard] = [
    # Leases.
    Safeguard("settlements compare the lease token", "compares_no_token", "paused_until_another_runs_its_job", LEASED),
    Safeguard("settlements compare the state", "compares_the_token_only", "paused_until_its_jobs_are_rescued", LEASED),
    Safeguard(
        "the effects of a run are committed with its outcome",
        "commits_effects_before_the_outcome",
        "paused_until_others_finished",
        LEASED,
    ),
    Safeguard("jobs with an expired lease are rescued", "does_not_rescue", "killed_with_one_batch", LEASED),
    Safeguard("a live worker extends its leases", "does_not_extend", "handler_runs_longer_than_lease", LEASED),
    Safeguard(
        "claimed jobs that wait are extended as well",
        "extends_running_jobs_only",
        "failed_batch_runs_longer_than_lease",
        LEASED,
    ),
    Safeguard(
        "a rescue counts no attempt for jobs that were claimed together",
        "holds_all_jobs_responsible",
        "killed_with_one_batch",
        LEASED,
    ),
    Safeguard(
        "a rescue counts an attempt for a job that ran alone",
        "holds_no_job_responsible",
        "handler_exits_process",
        LEASED,
    ),
    Safeguard(
        "the lease token marks a claim during other claims",
        "hides_other_claims",
        "killed_with_several_claims",
        LEASED,
    ),
    Safeguard(
        "quarantined jobs are claimed alone", "claims_quarantined_jobs_with_others", "handler_exits_process", LEASED
    ),
    Safeguard("a released job keeps its attempts", "counts_released_runs", "sigterm_in_handler", LEASED),
    Safeguard(
        "the server ends an extension whose worker is paused",
        "has_no_transaction_timeout",
        "paused_while_extending_leases",
        LEASED,
    ),
    # Uncertain commits.
    Safeguard("after a lost reply the row is queried", "does_not_check_uncertain_runs", "commit_reply_lost", LEASED),
    Safeguard("a run whose COMMIT was sent is uncertain", "treats_no_run_as_uncertain", "commit_reply_lost", LEASED),
    Safeguard(
        "a run whose COMMIT was not sent is not uncertain",
        "treats_every_run_as_uncertain",
        "paused_while_connections_are_terminated",
        LEASED,
    ),
    Safeguard("a run that could not be settled is settled later", "forgets_unsettled_runs", "commit_lost", LEASED),
    Safeguard(
        "finished runs are settled while workers are busy",
        "settles_in_workers_only",
        "settled_while_other_job_runs",
        LEASED,
    ),
    # Shutdown.
    Safeguard("SIGTERM is handled", "ignores_signals", "sigterm_while_idle", (*LEASED, "batch_select")),
    Safeguard("SIGTERM ends a wait", "ignores_stop", "sigterm_while_idle", (*LEASED, "batch_select")),
    Safeguard("jobs that have not begun are released", "keeps_jobs_that_have_not_begun", "sigterm_in_handler", LEASED),
    Safeguard(
        "jobs of a batch that have not begun are released", "runs_its_batch_to_the_end", "sigterm_in_handler", HELD
    ),
    Safeguard(
        "abandoned runs count no attempt",
        "counts_abandoned_runs",
        "sigterm_and_grace_period_exceeded",
        (*LEASED, *HELD),
        "async",
    ),
    Safeguard(
        "abandoned jobs are not quarantined",
        "leaves_abandoned_batches_in_the_journal",
        "sigterm_and_grace_period_exceeded",
        HELD,
        "sync",
    ),
    # Strategies that hold a transaction.
    Safeguard("the crash journal outlives the worker", "writes_no_journal", "handler_exits_process", HELD),
    Safeguard("deaths of workers count as attempts", "counts_no_deaths", "handler_exits_process", HELD),
    Safeguard("a job in the journal runs alone", "quarantines_no_job", "handler_exits_process", HELD),
    Safeguard(
        "a job that did not run alone is not responsible",
        "holds_a_whole_batch_responsible",
        "killed_with_one_batch",
        HELD,
    ),
    Safeguard("a settled job leaves the quarantine", "never_ends_a_quarantine", "killed_with_one_batch", HELD),
    Safeguard("a live worker discards its journal entry", "discards_no_entry", "commit_lost", HELD),
    Safeguard(
        "the writes of a failing handler are rolled back",
        "keeps_the_writes_of_a_failing_handler",
        "no_faults",
        ("delete_returning", "batch_select"),
    ),
    Safeguard(
        "a connection lost by a handler counts an attempt",
        "counts_no_lost_connection",
        "handler_terminates_connection",
        HELD,
    ),
    Safeguard(
        "a row that is claimed again is inserted again",
        "settles_a_lost_job_by_its_old_token",
        "handler_terminates_connection",
        ["own_message"],
    ),
    Safeguard("lost messages are restored", "does_not_reconcile", "messages_deleted", ["delete_returning"]),
    # Errors.
    Safeguard(
        "workers continue after an error", "ends_at_the_first_error", "server_crashed", (*LEASED, "batch_select")
    ),
    Safeguard(
        "the maintenance loop continues after an error",
        "ends_maintenance_at_the_first_error",
        "server_crashed",
        LEASED,
    ),
    Safeguard("attempts are limited", "does_not_limit_attempts", "no_faults", (*LEASED, "batch_select")),
]

DETECTED_BY_TESTS: list[Safeguard] = [
    Safeguard(
        "an extension skips locked rows",
        "extension_waits_for_locks",
        "test_leases:test_a_handler_that_locks_its_row_blocks_no_heartbeat",
        LEASED,
    ),
    Safeguard(
        "a limited number of quarantined jobs runs at once",
        "runs_all_quarantined_jobs_at_once",
        "test_quarantine:test_quarantined_jobs_occupy_half_of_the_handlers",
        LEASED,
        None,
        {"times": 2, "at_once": 1},
    ),
    Safeguard(
        "a handler cannot commit its batch",
        "lets_handlers_commit",
        "test_misuse:test_a_handler_that_ends_the_transaction_of_its_batch",
        ("delete_returning",),
        None,
        {"verb": "commit", "batch_size": 1},
    ),
    Safeguard(
        "a thread that hangs loses its job",
        "ignores_timeouts",
        "test_timeouts:test_a_thread_that_hangs_loses_its_job_at_its_timeout",
        LEASED,
        "sync",
    ),
    Safeguard(
        "running jobs are cancelled",
        "ignores_requests_to_cancel",
        "test_cancellation:test_a_claimed_job_that_has_not_begun_is_cancelled",
        ("batch_select",),
    ),
    Safeguard(
        "a run that cannot be settled blocks no other",
        "settles_all_or_nothing",
        "test_retries:test_a_job_whose_completion_the_database_refuses_fails",
        LEASED,
    ),
    Safeguard(
        "the jobs of a batch that fails are tried one by one",
        "tries_a_batch_as_a_whole_again",
        "test_retries:test_a_batch_that_fails_is_tried_job_by_job",
        ("update_status", "batch_select"),
    ),
]

SAFEGUARDS = [*DETECTED_BY_SCENARIOS, *DETECTED_BY_TESTS]
