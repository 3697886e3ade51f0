"""What jobs wait for is counted right in every reachable state; without any one of the safeguards, it is not."""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple, get_args

import pytest

from tests.waits.programs import (
    cancel,
    close,
    complete,
    delete,
    fail,
    insert,
    link,
    reconcile,
    reopen,
    requeue,
    retry,
    run,
    together,
)
from tests.waits.scope import Design, Model, OnFailure, Scope
from tests.waits.search import search
from tests.waits.shapes import (
    batch,
    batch_of_batch,
    chain,
    dependents,
    held,
    held_batch,
    lost,
    mixed,
    two_batches,
    two_parents,
)

pytestmark = pytest.mark.once
LARGE = (batch, batch_of_batch, two_batches, mixed, held, held_batch)
"""The shapes with so many states that their search takes seconds."""
SHAPES = [dependents, two_parents, chain, *(pytest.param(each, marks=pytest.mark.thorough) for each in LARGE)]


class Variant(NamedTuple):
    """A design that lacks a safeguard, the scope that shows it, and the invariant that is broken."""

    name: str
    scope: Scope
    design: Design
    breaks: str
    steps: int
    """The length of the shortest trace to the fault."""


_INSERTED = dependents("block", insert(1, 0), *complete(0))
_RECONCILED = batch("block", together(insert(0, -1), insert(1, 0)), *complete(1), *reconcile(0))
_LATE = batch("block", together(insert(0, -1), insert(1, 0)), insert(2, 0), *complete(1))
_RETRIED = batch("block", together(insert(0, -1), insert(1, 0), insert(2, 0)), *complete(1, 2), *retry(1))
_FILLED = batch("block", together(insert(0, -1), insert(1, 0), insert(2, 0)), *complete(1, 2))
_BACK = batch("block", together(insert(0, -1), insert(1, 0)), *complete(1), *requeue(1), *retry(0))
_MOVED = mixed("block", link(1, 0, 3), link(1, 0, 0), *complete(0, 3), *requeue(0, 3))
_DELETED = dependents("cancel", insert(1, 0), *fail(0), *delete(0))
_HELD = held("block", *run(2), link(2, 1, 1), *complete(0, 1), *requeue(0, 1), *reconcile(2))
_OWN = batch(
    "block",
    together(insert(0, -1), insert(1, 0), insert(2, 0)),
    *complete(1, 2),
    together(*complete(1), *reconcile(0)),
)
BROKEN = [
    Variant("no advisory locks", _INSERTED, Design(buckets="none"), "W3", 13),
    Variant("looks take no advisory locks", _INSERTED, Design(buckets="no looks"), "W3", 14),
    Variant(
        "looks do not lock satisfied parents",
        dependents("block", insert(1, 0), *complete(0), *requeue(0)),
        Design(exempt="satisfied"),
        "W2",
        21,
    ),
    Variant(
        "looks do not lock the satisfied one of two parents",
        two_parents("block", insert(2, 0, 1), *complete(0), *requeue(1)),
        Design(exempt="satisfied"),
        "W1",
        15,
    ),
    Variant("only looks at inserted rows take advisory locks", _MOVED, Design(masks="inserted"), "W2", 14),
    Variant("no look at rows that come back", _BACK, Design(looks_back=False), "W2", 27),
    Variant("rows that come back do not lock the key of their members", _BACK, Design(back_locks="to-one"), "W2", 32),
    Variant("look in the snapshot before the locks", _INSERTED, Design(look="before locks"), "W3", 15),
    Variant("count when the row is inserted, no look", _INSERTED, Design(look="statement"), "W3", 9),
    Variant("looks after the writes of other looks", lost(), Design(looks_together=False), "W2", 16),
    Variant("count read before the row is locked", _FILLED, Design(locks_waiting_rows=False), "W3", 24),
    Variant("no check of late members at the commit", _LATE, Design(rechecks="none"), "W6", 25),
    Variant("no check of late members of rows that are looked at", mixed(), Design(rechecks="not looked at"), "W6", 19),
    Variant(
        "requeued whatever the count is",
        dependents("block", insert(1, 0), *cancel(1), *requeue(1)),
        Design(checks_requeued=False, looks_back=False),
        "W2",
        12,
    ),
    Variant("reconciliation in the snapshot of its lock", _RECONCILED, Design(reconciles="statement"), "W3", 21),
    Variant("reconciliation beside changes of its transaction", _OWN, Design(reconciles="at once"), "W2", 19),
    Variant("each settlement takes one off, a retry too", _RETRIED, Design(counts_events=True), "W1", 19),
    Variant(
        "a failure takes one off", dependents("block", insert(1, 0), *fail(0)), Design(counts_events=True), "W2", 16
    ),
    Variant("brought back by the deletion of the failed parent", _DELETED, Design(deleted="mend"), "W7", 29),
    Variant(
        "brought back without one of two failed parents",
        two_parents("cancel", insert(2, 0, 1), *fail(0, 1), *requeue(1), *delete(0)),
        Design(deleted="keep"),
        "W7",
        53,
    ),
    Variant("lost parents that are deleted are not seen", lost(), Design(lost="now"), "W7", 11),
    Variant("lost parents that are given back", lost(), Design(lost="ever"), "W7", 14),
    Variant("held rows that are locked are skipped", _HELD, Design(held="skipped"), "W2", 16),
    Variant(
        "held rows that have another parent are looked at by that only",
        held("block", link(2, 0, -1), link(2, 0, 0), link(2, 1, 1), *complete(0, 1), *requeue(0, 1)),
        Design(back="not begun"),
        "W3",
        30,
    ),
    Variant(
        "held batches that are opened again are not looked at",
        held_batch("block", *complete(1), *requeue(1), reopen(0), close(0)),
        Design(back="not begun"),
        "W1",
        17,
    ),
]
SLOW = {
    "no check of late members of rows that are looked at",
    "held rows that have another parent are looked at by that only",
}
ALTERNATIVES = (Design(masks="all"), Design(returns_for="one relation"))
"""Designs that are correct as well: a row that is brought back too early is cancelled again, as it is looked at."""


def _name(value: object) -> str | None:
    if isinstance(value, Variant):
        return value.name.replace(",", "").replace(" ", "-")
    return getattr(value, "__name__", None)


@pytest.mark.parametrize("connections", [2, pytest.param(3, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("on_failure", get_args(OnFailure))
@pytest.mark.parametrize("shape", SHAPES, ids=_name)
def test_the_invariants_hold_in_every_state(
    shape: Callable[[OnFailure], Scope], on_failure: OnFailure, connections: int
) -> None:
    result = search(Model(Design(), replace(shape(on_failure), connections=connections)))
    assert not result.fault, str(result)
    assert result.states > 1000, "the search has visited next to nothing"


def test_the_invariants_hold_where_a_row_loses_its_parent() -> None:
    result = search(Model(Design(), lost()))
    assert not result.fault, str(result)
    assert result.states > 500, "the search has visited next to nothing"


@pytest.mark.thorough
@pytest.mark.parametrize("design", ALTERNATIVES, ids=["looks-lock-all-parents", "brought-back-for-one-relation"])
@pytest.mark.parametrize("shape", SHAPES, ids=_name)
def test_the_invariants_hold_in_other_designs(shape: Callable[[OnFailure], Scope], design: Design) -> None:
    result = search(Model(design, shape("cancel")))
    assert not result.fault, str(result)


@pytest.mark.parametrize(
    "variant",
    [pytest.param(each, marks=pytest.mark.thorough) if each.name in SLOW else each for each in BROKEN],
    ids=_name,
)
def test_the_search_finds_the_fault(variant: Variant) -> None:
    assert not search(Model(Design(), variant.scope)).fault, "the scope breaks the design of the library as well"
    result = search(Model(variant.design, variant.scope))
    assert result.fault.startswith(variant.breaks), str(result)
    assert len(result.trace) == variant.steps, str(result)
