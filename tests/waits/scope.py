"""What a model is made of: the choices of its design, the rows and relations, and what happens to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from tests.waits.programs import ENDED, FAILED, READY, Program, Status


@dataclass(frozen=True, kw_only=True)
class Design:
    """The choices of which each makes the protocol correct; the defaults are the design of the library."""

    buckets: Literal["both", "no looks", "none"] = "both"
    """Who takes advisory locks: those who change a key and those who look at it, only the former, or nobody."""
    exempt: Literal["own", "satisfied"] = "own"
    """The parents that a look does not lock: those that its transaction has written, or satisfied ones as well."""
    masks: Literal["new", "all", "inserted"] = "new"
    """The relations of which a look takes the advisory locks: those by which the row did not wait before, all of them,
    or those of inserted rows only."""
    back_locks: Literal["all", "to-one"] = "all"
    """The relations of which the look at a row that comes back takes the advisory locks."""
    looks_back: bool = True
    """Whether rows that come back are looked at."""
    look: Literal["fresh", "before locks", "statement"] = "fresh"
    """When a look reads: in a snapshot after the locks, in the one that finds the locks, or when the row is written."""
    locks_waiting_rows: bool = True
    """Whether the rows that wait are locked before their counts are read."""
    looks_together: bool = True
    """Whether all looks of a step read before the first of them writes."""
    rechecks: Literal["all", "not looked at", "none"] = "all"
    """The rows of which new members are refused once they are locked."""
    checks_requeued: bool = True
    """Whether the trigger BEFORE a write decides about requeued rows as well."""
    reconciles: Literal["look", "at once", "statement"] = "look"
    """How a reconciliation counts: by a look at the commit, at once, or in the snapshot of the statement that locks."""
    counts_events: bool = False
    """Whether each settlement takes one off, whatever the status was and is."""
    deleted: Literal["cancel", "keep", "mend"] = "cancel"
    """What the deletion of a failed parent does to a row that was cancelled for one that had failed: it is cancelled
    for good; it is not brought back by that; or it is."""
    lost: Literal["exact", "now", "ever"] = "exact"
    """Which rows have lost a parent: those that have none at the commit, and whose old one is unsatisfied then or was
    when it was deleted; those whose old one is there at the commit; or those that had none at any time."""
    returns_for: Literal["all relations", "one relation"] = "all relations"
    """The relations in which nothing may have failed when a row is brought back: all, or that of its cancellation."""
    held: Literal["have begun", "skipped"] = "have begun"
    """What is done with a pending row that its handler may hold: nothing, as its count is not kept; or it is skipped if
    it is locked."""
    back: Literal["kept", "not begun"] = "kept"
    """Which rows come back: those whose counts are kept again, or those that have not begun any more."""


DESIGN = Design()
"""The design of the library."""

OnFailure = Literal["continue", "block", "cancel"]


class Relation(NamedTuple):
    kind: Literal["to-one", "to-many"]
    waiters: tuple[int, ...]
    """The rows that may wait in it."""
    targets: tuple[int, ...]
    """The rows that they may wait for."""
    on_failure: OnFailure = "block"

    def is_unsatisfied(self, row: Row) -> bool:
        if row.status == "absent":
            return False
        return row.status not in ENDED if self.on_failure == "continue" else row.status != "completed"

    def has_failed(self, row: Row) -> bool:
        return self.on_failure == "cancel" and row.status in FAILED


class Row(NamedTuple):
    """A version of a row; the numbers of rows are their keys."""

    status: Status
    links: tuple[int, ...] = ()
    """The foreign key of each relation, or -1."""
    waits_for: int = 0
    is_open: bool = False
    cancelled_for: int = -1
    """The relation for which it was cancelled, or -1."""
    started: bool = False
    """Recorded for the invariants: whether its handler has started since the last retry, rescue or requeue."""


ABSENT = Row("absent")


@dataclass(frozen=True, kw_only=True)
class Scope:
    relations: tuple[Relation, ...]
    rows: tuple[Row, ...]
    """The rows that are committed at the beginning, and ABSENT ones that programs may insert."""
    programs: Sequence[Program]
    """What may happen, at any time and any number of times."""
    claimed: tuple[int, ...] = ()
    """The rows that are claimed by a transaction of its own."""
    held: bool = False
    """Whether handlers run in the transaction of their claim."""
    connections: int = 2
    """The most transactions in flight."""


@dataclass(frozen=True)
class Model:
    design: Design
    scope: Scope


def level(model: Model, rows: Sequence[Row], number: int) -> int:
    return sum(
        relation.is_unsatisfied(rows[target])
        for index, relation in enumerate(model.scope.relations)
        for target in targets(model, rows, index, number)
    )


def targets(model: Model, rows: Sequence[Row], index: int, number: int) -> list[int]:
    """Return the rows that a row waits for in a relation."""
    relation = model.scope.relations[index]
    if number not in relation.waiters or rows[number].status == "absent":
        return []
    if relation.kind == "to-one":
        target = rows[number].links[index]
        return [target] if target >= 0 else []
    return [
        target for target in relation.targets if rows[target].status != "absent" and rows[target].links[index] == number
    ]


def waiters(model: Model, rows: Sequence[Row], index: int, key: int) -> list[int]:
    """Return the rows that wait for a key."""
    relation = model.scope.relations[index]
    if relation.kind == "to-many":
        return [key] if rows[key].status != "absent" else []
    return [
        number for number in relation.waiters if rows[number].status != "absent" and rows[number].links[index] == key
    ]


def failed_targets(model: Model, rows: Sequence[Row], number: int) -> list[int]:
    """Return the relations in which a row waits for a failed one that is to cancel it."""
    return [
        index
        for index, relation in enumerate(model.scope.relations)
        if any(relation.has_failed(rows[target]) for target in targets(model, rows, index, number))
    ]


def is_kept(model: Model, status: Status) -> bool:
    """Whether the count of a row is kept."""
    has_begun = model.scope.held and model.design.held == "have begun" and status == "pending"
    return status in READY and not has_begun


def is_waiter(model: Model, number: int) -> bool:
    return any(number in relation.waiters for relation in model.scope.relations)
