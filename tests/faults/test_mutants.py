"""Each mutant of the library, which lacks one safeguard, is detected by the scenario or test named in the table."""

from __future__ import annotations

import importlib

import pytest

from tests.consumer.conftest import APIS
from tests.faults.conftest import MakeHarness
from tests.faults.fork_server import wait_for_exit
from tests.faults.mutant_table import DETECTED_BY_SCENARIOS, DETECTED_BY_TESTS, SAFEGUARDS, Safeguard
from tests.faults.mutants import MUTANTS
from tests.faults.scenarios import CRASHES_SERVER, SCENARIOS

pytestmark = pytest.mark.once

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
        assert not wait_for_exit(test.pid, TIMEOUT) or test.wait() != 0, "the test passes with the mutant"
        if test.has_exited:
            assert "AssertionError" in harness.output_of(test)


def test_every_mutant_is_in_the_table() -> None:
    assert {safeguard.mutant for safeguard in SAFEGUARDS} == MUTANTS.keys()


def test_every_scenario_and_test_in_the_table_exists() -> None:
    assert {safeguard.detected_by for safeguard in DETECTED_BY_SCENARIOS} <= SCENARIOS.keys()
    for safeguard in DETECTED_BY_TESTS:
        module, _, name = safeguard.detected_by.partition(":")
        assert hasattr(importlib.import_module(f"tests.consumer.{module}"), name), safeguard.detected_by
