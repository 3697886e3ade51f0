"""The claim keeps its invariants in every reachable state; without any one of its safeguards, it does not."""

import pytest

from tests.flow_control.claim_search import ALTERNATIVES, BROKEN, HOLDS, HOLDS_DEEP, NOT_PROMISED, Variant, search

pytestmark = pytest.mark.once


def _name(variant: Variant) -> str:
    return variant.name.replace(",", "").replace(" ", "-")


@pytest.mark.parametrize(
    "variant",
    [*HOLDS, *ALTERNATIVES, *(pytest.param(each, marks=pytest.mark.thorough) for each in HOLDS_DEEP)],
    ids=_name,
)
def test_the_invariants_hold_in_every_state(variant: Variant) -> None:
    result = search(variant.model)
    assert not result.fault, str(result)
    assert result.states > 50, "the search has visited next to nothing"


@pytest.mark.parametrize("variant", [*BROKEN, *NOT_PROMISED], ids=_name)
def test_the_search_finds_the_fault(variant: Variant) -> None:
    result = search(variant.model)
    assert result.fault.startswith(variant.breaks), str(result)
    assert len(result.trace) == variant.steps, str(result)
