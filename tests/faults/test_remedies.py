"""Each remedy is taken out of the library, and the scenario that is named beside it finds that out."""

from __future__ import annotations

import pytest

from tests.faults.conftest import MakeScene
from tests.faults.mutants import MUTANTS
from tests.faults.remedies import IN_SCENARIOS, IN_TESTS, REMEDIES, Remedy
from tests.faults.scenarios import SCENARIOS
from tests.faults.zygote import has_ended

# It is the tests that these examine, not the library: they change when a remedy or a scenario does.
pytestmark = [pytest.mark.once, pytest.mark.thorough]

PATIENCE = 4
"""Seconds until a mutant counts as one that never does what it should."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Show each remedy under one of its strategies, another one for each; with ``--every-remedy`` under all."""
    if "remedy" not in metafunc.fixturenames:
        return
    found = []
    for number, remedy in enumerate(IN_SCENARIOS if "play" in metafunc.function.__name__ else IN_TESTS):
        strategies = remedy.strategies
        if not metafunc.config.getoption("--every-remedy"):
            strategies = [strategies[number % len(strategies)]]
        for turn, strategy in enumerate(strategies):
            colour = remedy.colour or ("sync", "async")[(number + turn) % 2]
            found.append(pytest.param(remedy, strategy, colour, id=f"{remedy.mutant}-{strategy}-{colour}"))
    metafunc.parametrize(("remedy", "strategy", "colour"), found)


def test_a_play_fails_without_it(make_scene: MakeScene, remedy: Remedy, strategy: str, colour: str) -> None:
    crash = remedy.caught_by == "restarted"
    with make_scene(strategy, colour, crash=crash, mutant=remedy.mutant, patience=PATIENCE) as scene:
        with pytest.raises(AssertionError):
            SCENARIOS[remedy.caught_by](scene)
        scene.assert_sound()


def test_a_test_fails_without_it(make_scene: MakeScene, remedy: Remedy, strategy: str, colour: str) -> None:
    with make_scene(strategy, colour, mutant=remedy.mutant) as scene:
        test = scene.examine(remedy.caught_by, remedy.arguments)
        scene.await_that(lambda: test.has_ended or len(test.said("examines")) == 2, "that it passes with the remedy")
        assert len(test.said("examines")) == 2, "it fails with the remedy"
        assert not has_ended(test.pid, PATIENCE) or test.await_end() != 0, "it passes without the remedy"
        if test.has_ended:
            assert "AssertionError" in scene.output(test)


def test_every_mutant_lacks_some_remedy() -> None:
    assert {remedy.mutant for remedy in REMEDIES} == MUTANTS.keys()
