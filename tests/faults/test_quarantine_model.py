"""A job that kills its worker fails, and no other job loses an attempt: in every sequence of steps of the model."""

from dataclasses import fields, replace

import pytest

from tests.faults.quarantine_model import Design, Scope, search

pytestmark = pytest.mark.once

ONE_AT_A_TIME = Scope(workers=("a", "b"))
SEVERAL = Scope(jobs=("kills", "works", "works"), workers=("a", "b"), concurrency=4)
LOCKED = Scope(workers=("a", "b"), skips="briefly")

HOLDS = {
    "one at a time": ONE_AT_A_TIME,
    "and killed from outside": replace(ONE_AT_A_TIME, kills=1, most_attempts=3),
    "several at a time": SEVERAL,
    "rows are locked": LOCKED,
    "rows of several are locked": replace(SEVERAL, workers=("a",), skips="briefly"),
}
DEEP = {
    "four jobs": replace(SEVERAL, jobs=("kills", "works", "works", "works"), kills=1, skips="briefly", most_attempts=3),
}
BROKEN = {
    "keeps_token": ("Q3", ONE_AT_A_TIME),
    "spares_mates": ("Q2", ONE_AT_A_TIME),
    "counts_lonely_deaths": ("Q3", ONE_AT_A_TIME),
    "sees_rescued_mates": ("Q2", LOCKED),
    "marks_shared": ("Q2", SEVERAL),
    "keeps_apart": ("Q3", SEVERAL),
    "separates_at_last": ("Q3", SEVERAL),
    "one_lot_at_a_time": ("Q4", SEVERAL),
}
"""The safeguards, each with the promise that is broken without it, and where the search finds this."""
NOT_PROMISED = {
    "a second job that kills its worker": Scope(jobs=("kills", "kills", "works"), concurrency=4),
    "a row that stays locked while its mate runs again": Scope(skips="long"),
}
"""What may cost a job an attempt for the death of a worker that another job has killed."""


@pytest.mark.parametrize("scope", HOLDS.values(), ids=HOLDS)
def test_every_sequence_keeps_the_promises(scope: Scope) -> None:
    found = search(Design(), scope)
    assert (found.fault, found.trace) == ("", ())
    assert found.states > 50, "the search has visited next to nothing"


@pytest.mark.thorough
@pytest.mark.parametrize("scope", DEEP.values(), ids=DEEP)
def test_every_sequence_of_more_jobs_keeps_the_promises(scope: Scope) -> None:
    test_every_sequence_keeps_the_promises(scope)


@pytest.mark.parametrize("safeguard", [each.name for each in fields(Design)])
def test_each_safeguard_of_the_quarantine_is_needed(safeguard: str) -> None:
    breaks, scope = BROKEN[safeguard]
    assert search(Design(), scope).fault == ""
    found = search(replace(Design(), **{safeguard: False}), scope)
    assert found.fault.startswith(breaks), found
    assert found.trace


@pytest.mark.parametrize("scope", NOT_PROMISED.values(), ids=NOT_PROMISED)
def test_what_is_not_promised_is_found(scope: Scope) -> None:
    assert search(Design(), scope).fault.startswith("Q2")
