"""Leases and settlements keep their promises in every reachable state; without any one of the safeguards, not."""

from dataclasses import fields, replace

import pytest

from tests.faults.lease_model import Design, Scope, search

pytestmark = pytest.mark.once
SMALL = Scope(lost=0)
SCOPES = [
    pytest.param(Scope(), id="lost replies"),
    pytest.param(Scope(lost=0, requeues=1), id="requeued"),
    pytest.param(Scope(lost=1, requeues=1, attempts=3), id="both", marks=pytest.mark.thorough),
    pytest.param(Scope(lost=0, runs=3), id="three runs", marks=pytest.mark.thorough),
]
BROKEN = {
    "compares_tokens": "L2",
    "tokens_are_new": "L2",
    "clears_token": "L4",
    "waits_for_lease": "L3",
    "writes_together": "L1",
    "counts_at_claim": "L7",
    "rescues": "L6",
    "claims_rescued": "L8",
    "extends_own": "L4",
    "ends_transactions": "L6",
}
"""The safeguards, each with the promise that is broken first without it."""


@pytest.mark.parametrize("scope", SCOPES)
def test_every_state_keeps_the_promises(scope: Scope) -> None:
    found = search(Design(), scope)
    assert (found.fault, found.trace) == ("", ())
    assert found.states > 1000


@pytest.mark.parametrize("safeguard", [each.name for each in fields(Design)])
def test_each_safeguard_is_needed(safeguard: str) -> None:
    found = search(replace(Design(), **{safeguard: False}), SMALL)
    assert found.fault.startswith(BROKEN[safeguard]), found
    assert found.trace
