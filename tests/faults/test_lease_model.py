"""Leases and settlements keep their promises in every reachable state; without any one of the safeguards, not."""

from dataclasses import fields, replace

import pytest

from tests.faults.lease_model import Design, search

pytestmark = pytest.mark.once
BROKEN = {
    "compares_tokens": "L2",
    "tokens_are_new": "L2",
    "clears_token": "L4",
    "waits_for_lease": "L3",
    "writes_together": "L1",
    "counts_at_claim": "L7",
    "rescues": "L6",
}
"""The safeguards, each with the promise that is broken first without it."""


def test_every_state_keeps_the_promises() -> None:
    found = search(Design())
    assert (found.fault, found.trace) == ("", ())
    assert found.states > 1000


@pytest.mark.parametrize("safeguard", [each.name for each in fields(Design)])
def test_each_safeguard_is_needed(safeguard: str) -> None:
    found = search(replace(Design(), **{safeguard: False}))
    assert found.fault.startswith(BROKEN[safeguard]), found
    assert found.trace
