"""Parsers of what strangers write: random inputs, and each that was a fault. ``python -m tests.fuzz`` tries many."""

import random

import pytest

from tests.fuzz.mutations import Mutator
from tests.fuzz.targets import TARGETS
from tests.fuzz.trial import problem_of

pytestmark = pytest.mark.once
SEED = 1

FAULTS = [
    ("notification", "settled " + "[" * 200_000),
    ("notification", "heartbeat host.x"),
    ("fields of a form", "1e5999999999999999999"),
    ("time zone", "Europe" + "/Berlin" * 3000),
    ("cron", f"0 0 1,{'9' * 5000} * *"),
    ("address", "9" * 5000),
    ("size", "9" * 400 + "M"),
    ("duration", "9" * 20_000),
]


@pytest.mark.parametrize("name", TARGETS)
def test_random_inputs_are_read_or_refused(name: str) -> None:
    target = TARGETS[name]
    mutator = Mutator(random.Random(f"{SEED} {name}"), target.corpus)
    accepted = 0
    for text in [*target.corpus, *(mutator.input() for _ in range(100))]:
        problem, is_accepted = problem_of(target, text)
        assert not problem, text
        accepted += is_accepted
    assert accepted, "no input is valid"


@pytest.mark.parametrize("name", TARGETS)
def test_the_corpus_is_valid(name: str) -> None:
    assert all(problem_of(TARGETS[name], text).is_accepted for text in TARGETS[name].corpus)


@pytest.mark.parametrize(("name", "text"), FAULTS, ids=[name for name, _ in FAULTS])
def test_what_was_a_fault(name: str, text: str) -> None:
    assert not problem_of(TARGETS[name], text).problem
