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
        "the effects of a run commit with its end", "commits_effects_before_the_end", "stopped_beyond_its_lease", LEASED
    ),
    Remedy("expired leases are rescued", "does_not_rescue", "killed_at_work", LEASED),
    Remedy("a live worker extends its leases", "does_not_extend", "works_longer_than_its_lease", LEASED),
    Remedy("also of what waits", "extends_only_what_is_at_work", "works_longer_than_its_lease", LEASED),
    Remedy("batch-mates get their attempt back", "blames_everybody", "killed_at_work", LEASED),
    Remedy("who ran alone does not", "blames_nobody", "kills_its_worker", LEASED),
    Remedy("a claim tells of others beside it", "says_nothing_of_other_claims", "killed_with_several_claims", LEASED),
    Remedy("suspects are claimed alone", "claims_suspects_with_others", "kills_its_worker", LEASED),
    Remedy("release gives the attempt back", "release_burns_the_attempt", "stopped_in_a_handler", LEASED),
    Remedy("the server ends a heartbeat that freezes", "freezes_with_its_locks", "frozen_in_its_heartbeat", LEASED),
    # Doubts about a commit.
    Remedy("after a lost answer the row is asked", "does_not_look_again", "loses_the_answer_to_the_commit", LEASED),
    Remedy("from the commit on, an end is in doubt", "doubts_nothing", "loses_the_answer_to_the_commit", LEASED),
    Remedy("before it, it is not", "doubts_what_was_not_committed", "robbed_while_stopped", LEASED),
    Remedy("what could not be settled is kept", "forgets_what_it_could_not_settle", "loses_the_commit", LEASED),
    Remedy("busy lanes keep nothing from being settled", "settles_in_lanes_only", "is_done_before_others", LEASED),
    # The end of a shift.
    Remedy("SIGTERM is answered", "does_not_answer_signals", "stopped_while_idle", (*LEASED, "batch_select")),
    Remedy("it ends a pause", "sleeps_on_when_it_is_stopped", "stopped_while_idle", (*LEASED, "batch_select")),
    Remedy("what has not begun goes back", "keeps_what_it_has_not_begun", "stopped_in_a_handler", LEASED),
    Remedy("also within a batch", "runs_its_batch_to_the_end", "stopped_in_a_handler", HELD),
    Remedy(
        "what is given up is not counted",
        "counts_what_it_gave_up",
        "stopped_beyond_its_grace",
        (*LEASED, *HELD),
        "async",
    ),
    Remedy("nor blamed", "leaves_given_up_batches_in_the_ledger", "stopped_beyond_its_grace", HELD, "sync"),
    # A transaction holds the batch.
    Remedy("the ledger outlives the worker", "keeps_no_ledger", "kills_its_worker", HELD),
    Remedy("deaths count as attempts", "counts_no_deaths", "kills_its_worker", HELD),
    Remedy("who is in the ledger runs alone", "suspects_nobody", "kills_its_worker", HELD),
    Remedy("who died among others is not blamed", "blames_all_of_a_batch", "killed_at_work", HELD),
    Remedy("a suspect that lives is cleared", "never_clears_a_suspect", "killed_at_work", HELD),
    Remedy("a worker that lives strikes its batch out", "strikes_nothing_out", "loses_the_commit", HELD),
    Remedy(
        "a failing job is undone", "keeps_what_a_failing_handler_wrote", "calm", ("delete_returning", "batch_select")
    ),
    Remedy("who loses the connection is blamed", "blames_nobody_for_a_lost_connection", "cuts_its_connection", HELD),
    Remedy(
        "a row that is claimed anew is written anew",
        "settles_a_lost_job_by_its_old_token",
        "cuts_its_connection",
        ["own_message"],
    ),
    Remedy("messages that are gone come back", "does_not_reconcile", "lost_its_messages", ["delete_returning"]),
    # Whatever goes wrong.
    Remedy("lanes go on after trouble", "ends_at_the_first_trouble", "restarted", (*LEASED, "batch_select")),
    Remedy("so does the keeper", "has_a_keeper_that_dies_of_trouble", "restarted", LEASED),
    Remedy("attempts are limited", "knows_no_limit", "calm", (*LEASED, "batch_select")),
]

IN_TESTS: list[Remedy] = [
    Remedy(
        "an extension passes over locked rows",
        "extension_waits_for_locks",
        "test_leases:test_a_handler_that_has_written_its_row_holds_up_no_lease",
        LEASED,
    ),
    Remedy(
        "one suspect runs at a time",
        "runs_suspects_side_by_side",
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
        "has_all_the_time",
        "test_timeouts:test_a_thread_that_hangs_loses_its_job_at_its_timeout",
        LEASED,
        "sync",
    ),
    Remedy(
        "running jobs are asked to stop",
        "hears_no_request",
        "test_cancelling:test_a_claimed_job_that_has_not_begun_is_cancelled",
        ("batch_select",),
    ),
    Remedy(
        "what cannot be settled holds nobody up",
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
