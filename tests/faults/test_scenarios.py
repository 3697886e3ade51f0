"""The guarantees under faults, in scenarios of jobs and random rounds of flow control; and mutants, which these detect.

``python -m tests.faults`` runs more rounds. ``tests/strategies/test_conformance.py`` has a table of the mutants in the
SQL of the strategies.
"""

import dataclasses
import importlib
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

from tests.consumer.conftest import APIS
from tests.consumer.models import STRATEGIES
from tests.faults.conftest import MakeHarness
from tests.faults.key_queues import ACTIONS, FAULTS, Configuration
from tests.faults.key_rounds import run_round
from tests.faults.mutants import IN_DATABASE, MUTANTS, REPLACED
from tests.faults.scenarios import CRASHES_SERVER, ONE_API, SCENARIOS, STRATEGIES_OF
from tests.servers import Database

pytestmark = pytest.mark.once


def combinations() -> Iterator[Any]:
    """Yield scenarios with strategies and APIs; by default each has one of both, in turn, and all in `full`."""
    for row, name in enumerate(SCENARIOS):
        strategies = STRATEGIES_OF.get(name, (*STRATEGIES, "own_message"))
        for column, strategy in enumerate(strategies):
            apis = APIS if (row // len(strategies) + column) % 2 == 0 else APIS[::-1]
            # Rows that are their own messages take the same path as rows with a message, so one API suffices.
            if len(strategies) > 1 and (name in ONE_API or strategy == "own_message"):
                apis = apis[:1]
            for api in apis:
                in_turn = column == row % len(strategies) and api == apis[0]
                yield pytest.param(name, strategy, api, marks=() if in_turn else pytest.mark.thorough)


@pytest.mark.parametrize(("scenario", "strategy", "api"), list(combinations()))
def test_guarantees_hold_under_faults(make_harness: MakeHarness, scenario: str, strategy: str, api: str) -> None:
    with make_harness(strategy, api, own_server=scenario in CRASHES_SERVER) as harness:
        SCENARIOS[scenario](harness)


# -- a few rounds of random faults on queues under flow control; ``python -m tests.faults`` runs more --------------
ROUNDS = {
    "limits": Configuration(
        1, limits=("tenant", "queue"), jobs=60, seconds=1, faults=("kill", "pause"), actions=ACTIONS, customers=5
    ),
    "order and rate": Configuration(
        2,
        order="block",
        rates=((100, 1.0, None, 5),),
        jobs=60,
        seconds=1,
        faults=("terminate",),
        payloads=("ok", "flaky", "retry", "snooze", "throttle"),
        actions=("requeue", "claim", "settle", "cancel"),
    ),
    "slots and order": Configuration(
        4,
        strategy="batch_select",
        limits=("tenant", "queue"),
        order="cancel",
        jobs=60,
        seconds=1,
        faults=("kill", "terminate"),
        actions=("cancel", "requeue", "claim", "limit", "delete"),
    ),
    "reservations and turns": Configuration(
        5,
        strategy="delete_row",
        rates=((100, 1.0, None, 5),),
        fair=1,
        limits=("number",),
        jobs=60,
        seconds=1,
        faults=("kill",),
        actions=("cancel", "requeue", "delete"),
    ),
    "turns": Configuration(3, fair=1, limits=("queue",), jobs=80, seconds=0.5, priorities=True, customers=40),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", ROUNDS)
def test_a_round_of_faults(database: Database, name: str) -> None:
    assert set(FAULTS) >= set(ROUNDS[name].faults)
    result = run_round(ROUNDS[name], database)
    assert not result.violations, str(result)
    assert result.counts["runs"] > 30


# -- the safeguards of the library against faults: without any one of them, a scenario or a test fails -------------
LEASED = ("update_status",)
HELD = ("delete_returning", "batch_select", "own_message")


class Safeguard(NamedTuple):
    """What a mutant lacks, and the scenario or the test of ``tests/consumer`` that detects the mutant."""

    mutant: str
    """Its name says what it does without the safeguard."""
    detected_by: str
    strategies: Sequence[str]
    api: str | None = None
    """The API that detects the mutant, if only one does."""
    arguments: Mapping[str, Any] = MappingProxyType({})
    """The arguments of the test besides its queue."""


DETECTED_BY_SCENARIOS: list[Safeguard] = [
    # Leases.
    Safeguard("compares_no_token", "paused_until_another_runs_its_job", LEASED),
    Safeguard("compares_the_token_only", "paused_until_its_jobs_are_rescued", LEASED),
    Safeguard("commits_effects_before_the_outcome", "paused_until_others_finished", LEASED),
    Safeguard("does_not_rescue", "killed_with_one_batch", LEASED),
    Safeguard("does_not_extend", "handler_runs_longer_than_lease", LEASED),
    Safeguard("extends_running_jobs_only", "failed_batch_runs_longer_than_lease", LEASED),
    Safeguard("holds_all_jobs_responsible", "killed_with_one_batch", LEASED),
    Safeguard("holds_no_job_responsible", "handler_exits_process", LEASED),
    Safeguard("hides_other_claims", "killed_with_several_claims", LEASED),
    Safeguard("claims_quarantined_jobs_with_others", "handler_exits_process", LEASED),
    Safeguard("counts_released_runs", "sigterm_in_handler", LEASED),
    Safeguard("has_no_transaction_timeout", "paused_while_extending_leases", LEASED),
    # Uncertain commits.
    Safeguard("does_not_check_uncertain_runs", "commit_reply_lost", LEASED),
    Safeguard("treats_no_run_as_uncertain", "commit_reply_lost", LEASED),
    Safeguard("treats_every_run_as_uncertain", "paused_while_connections_are_terminated", LEASED),
    Safeguard("forgets_unsettled_runs", "commit_lost", LEASED),
    Safeguard("settles_in_workers_only", "settled_while_other_job_runs", LEASED),
    # Shutdown.
    Safeguard("ignores_signals", "sigterm_while_idle", (*LEASED, "batch_select")),
    Safeguard("ignores_stop", "sigterm_while_idle", (*LEASED, "batch_select")),
    Safeguard("keeps_jobs_that_have_not_begun", "sigterm_in_handler", LEASED),
    Safeguard("runs_its_batch_to_the_end", "sigterm_in_handler", HELD),
    Safeguard("counts_abandoned_runs", "sigterm_and_grace_period_exceeded", (*LEASED, *HELD), "async"),
    Safeguard("leaves_abandoned_batches_in_the_journal", "sigterm_and_grace_period_exceeded", HELD, "sync"),
    # Strategies that hold a transaction.
    Safeguard("writes_no_journal", "handler_exits_process", HELD),
    Safeguard("counts_no_deaths", "handler_exits_process", HELD),
    Safeguard("quarantines_no_job", "handler_exits_process", HELD),
    Safeguard("holds_a_whole_batch_responsible", "killed_with_one_batch", HELD),
    Safeguard("never_ends_a_quarantine", "killed_with_one_batch", HELD),
    Safeguard("discards_no_entry", "commit_lost", HELD),
    Safeguard("keeps_the_writes_of_a_failing_handler", "no_faults", ("delete_returning", "batch_select")),
    Safeguard("counts_no_lost_connection", "handler_terminates_connection", HELD),
    Safeguard("settles_a_lost_job_by_its_old_token", "handler_terminates_connection", ["own_message"]),
    Safeguard("does_not_reconcile", "messages_deleted", ["delete_returning"]),
    # Errors.
    Safeguard("ends_at_the_first_error", "server_crashed", (*LEASED, "batch_select")),
    Safeguard("ends_maintenance_at_the_first_error", "server_crashed", LEASED),
    Safeguard("does_not_limit_attempts", "no_faults", (*LEASED, "batch_select")),
]
DETECTED_BY_TESTS: list[Safeguard] = [
    Safeguard("extension_waits_for_locks", "test_leases:test_a_handler_that_locks_its_row_blocks_no_heartbeat", LEASED),
    Safeguard(
        "runs_all_quarantined_jobs_at_once",
        "test_crashes:test_quarantined_jobs_occupy_half_of_the_handlers",
        LEASED,
        None,
        {"times": 2, "at_once": 1},
    ),
    Safeguard(
        "lets_handlers_commit",
        "test_misuse:test_a_handler_that_ends_the_transaction_of_its_batch",
        ("delete_returning",),
        None,
        {"verb": "commit", "batch_size": 1},
    ),
    Safeguard(
        "ignores_timeouts", "test_cancellation:test_a_thread_that_hangs_loses_its_job_at_its_timeout", LEASED, "sync"
    ),
    Safeguard(
        "ignores_requests_to_cancel",
        "test_cancellation:test_a_claimed_job_that_has_not_begun_is_cancelled",
        ("batch_select",),
    ),
    Safeguard("settles_all_or_nothing", "test_retries:test_a_job_whose_completion_the_database_refuses_fails", LEASED),
    Safeguard(
        "tries_a_batch_as_a_whole_again",
        "test_retries:test_a_batch_that_fails_is_tried_job_by_job",
        ("update_status", "batch_select"),
    ),
]
SAFEGUARDS = [*DETECTED_BY_SCENARIOS, *DETECTED_BY_TESTS]
WORKERS = (("sync", 4, None, None), ("async", 4, None, None), ("sync", 2, 5, None))
BUSY = {"jobs": 400, "work": 0.002, "customers": 3, "documents": 3, "workers": WORKERS, "payloads": ("ok",)}
"""Many claims that compete for a few keys."""
DETECTED_BY_ROUNDS = {
    "limit without a lock": ("limits", Configuration(1, limits=("number",), most=1, **BUSY)),
    "limit always one more": ("limits", Configuration(1, limits=("attribute",), **BUSY)),
    "limit counts in the snapshot of the statement": ("limits", Configuration(1, limits=("queue",), **BUSY)),
    "limit without the claim's own jobs": ("limits", Configuration(1, limits=("pair",), **BUSY)),
    "order is not checked": ("order", Configuration(1, order="continue", **BUSY | {"jobs": 100})),
    "order does not see failed jobs": (
        "order",
        Configuration(1, order="block", **BUSY | {"payloads": ("ok", "fails")}),
    ),
    "order does not see begun jobs": (
        "order",
        Configuration(1, order="continue", **BUSY | {"payloads": ("ok", "snooze"), "jobs": 100}),
    ),
    "a failed job cancels nothing": (
        "cancelled_behind",
        Configuration(1, order="cancel", **BUSY | {"payloads": ("ok", "fails"), "jobs": 60}),
    ),
    # The row of a rate is locked as well, once a first job of the key has begun.
    "rate without a lock": ("rates", Configuration(1, rates=((5, 1.0, "customer_id", 1),), **BUSY | {"customers": 60})),
    "rate always has its burst": ("rates", Configuration(1, rates=((40, 1.0, None, 3),), **BUSY)),
    "rate is not held back": (
        "throttled",
        Configuration(1, rates=((200, 1.0, "customer_id", 200),), **BUSY | {"payloads": ("ok", "throttle")}),
    ),
    "no notification of free places": (
        "forgotten",
        Configuration(1, limits=("number",), most=1, poll_interval=600, **BUSY | {"customers": 1}),
    ),
    "a slot without a lock": ("slots", Configuration(1, strategy="batch_select", limits=("number",), **BUSY)),
    "one slot more": ("running", Configuration(1, strategy="delete_row", limits=("number",), **BUSY | {"work": 0.02})),
    "the slots of a changing limit are not counted": (
        "slots",
        Configuration(1, strategy="delete_returning", limits=("attribute",), **BUSY),
    ),
    "the head is not looked for": ("held_order", Configuration(1, strategy="batch_select", order="continue", **BUSY)),
    "reserves_no_beginnings": (
        "reserved",
        Configuration(1, strategy="delete_row", rates=((40, 1.0, None, 3),), **BUSY | {"jobs": 60}),
    ),
    "forgets_turns": ("turns", Configuration(1, fair=1, **BUSY | {"customers": 20})),
}
"""For each mutant the rule that reports it, and the round in which it does."""
DETECTED_BY_PAIRS = {"order without a lock", "order does not see running jobs"}
"""Those that a requeue shows only within the milliseconds of a claim, see ``tests/flow_control/test_pairs.py``."""
TIMEOUT = 4
"""Seconds after which a mutant counts as detected because what the test waits for does not happen."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Test each safeguard under one of its strategies; with ``--every-mutant`` under each."""
    if "safeguard" not in metafunc.fixturenames:
        return
    found = []
    safeguards = DETECTED_BY_SCENARIOS if "scenario" in metafunc.function.__name__ else DETECTED_BY_TESTS
    for number, safeguard in enumerate(safeguards):
        strategies = safeguard.strategies
        if not metafunc.config.getoption("--every-mutant"):
            strategies = [strategies[number % len(strategies)]]
        for column, strategy in enumerate(strategies):
            api = safeguard.api or APIS[(number + column) % 2]
            found.append(pytest.param(safeguard, strategy, api, id=f"{safeguard.mutant}-{strategy}-{api}"))
    metafunc.parametrize(("safeguard", "strategy", "api"), found)


# These test the scenarios, not the library.
@pytest.mark.thorough
def test_a_scenario_detects_the_mutant(
    make_harness: MakeHarness, safeguard: Safeguard, strategy: str, api: str
) -> None:
    own_server = safeguard.detected_by in CRASHES_SERVER
    with make_harness(strategy, api, own_server=own_server, mutant=safeguard.mutant, timeout=TIMEOUT) as harness:
        with pytest.raises(AssertionError):
            SCENARIOS[safeguard.detected_by](harness)
        harness.assert_no_programming_errors()


@pytest.mark.thorough
def test_a_consumer_test_detects_the_mutant(
    make_harness: MakeHarness, safeguard: Safeguard, strategy: str, api: str
) -> None:
    with make_harness(strategy, api, mutant=safeguard.mutant) as harness:
        test = harness.start_test(safeguard.detected_by, safeguard.arguments)
        harness.wait_until(
            lambda: test.has_exited or len(test.records("test started")) == 2, "the test passes without the mutant"
        )
        assert len(test.records("test started")) == 2, "the test fails without the mutant"
        assert not test.exits_within(TIMEOUT) or test.wait() != 0, "the test passes with the mutant"
        if test.has_exited:
            assert "AssertionError" in test.output


@pytest.mark.thorough
@pytest.mark.parametrize("mutant", DETECTED_BY_ROUNDS)
def test_a_round_of_flow_control_detects_the_mutant(database: Database, mutant: str) -> None:
    rule, configuration = DETECTED_BY_ROUNDS[mutant]
    result = run_round(dataclasses.replace(configuration, mutant=mutant), database)
    assert rule in result.violations, str(result)


def test_every_mutant_is_in_a_table() -> None:
    tables = {safeguard.mutant for safeguard in SAFEGUARDS} | DETECTED_BY_ROUNDS.keys() | DETECTED_BY_PAIRS
    tables |= {mutant.in_workers for mutant in IN_DATABASE.values() if mutant.in_workers}
    assert tables == MUTANTS.keys() | REPLACED.keys() | IN_DATABASE.keys()


def test_every_scenario_and_test_in_the_table_exists() -> None:
    assert {safeguard.detected_by for safeguard in DETECTED_BY_SCENARIOS} <= SCENARIOS.keys()
    for safeguard in DETECTED_BY_TESTS:
        module, _, name = safeguard.detected_by.partition(":")
        assert hasattr(importlib.import_module(f"tests.consumer.{module}"), name), safeguard.detected_by
