"""The designs that are searched, and the scope within which each is."""

from __future__ import annotations

from dataclasses import dataclass

from tests.flow_control.model.design import DESIGN, UNLIMITED, Design, Model, Operation, Scope

SETTLE: tuple[Operation, ...] = ("complete", "retry")
LEASES: tuple[Operation, ...] = (*SETTLE, "rescue")
DELAYS: tuple[Operation, ...] = (*SETTLE, "retry later", "fall due")
CONTROL: tuple[Operation, ...] = (*SETTLE, "cancel", "requeue", "roll back")
LIMITS: tuple[Operation, ...] = (*SETTLE, "change limit")

THREE = (0, 0, 0)
FIRST = frozenset({0})


@dataclass(frozen=True)
class Variant:
    """A design, the scope within which it is searched, and the invariant that it breaks."""

    name: str
    scope: Scope
    design: Design = DESIGN
    breaks: str = ""
    steps: int = 0
    """The length of the shortest trace to the fault."""

    @property
    def model(self) -> Model:
        """The design within the scope."""
        return Model(self.design, self.scope)


HOLDS = [
    Variant("limit that changes", Scope(keys=(0, 0), operations=(*LIMITS, "roll back"))),
    Variant("limit, three workers", Scope(keys=(0, 0), versions=THREE, operations=SETTLE)),
    Variant("limit of 2", Scope(keys=(0, 0, 0), limits=(2,), operations=SETTLE)),
    Variant("limit, plain SQL", Scope(keys=(0, 0), operations=(*LEASES, "plain start"))),
    Variant("leases", Scope(keys=(0, 0), limits=(2,), operations=LEASES)),
    Variant("two keys", Scope(keys=(0, 0, 1), operations=SETTLE)),
    Variant(
        "two keys, rows locked after each look",
        Scope(keys=(0, 0, 1), limits=(1, 2), operations=SETTLE),
        Design(locks_rows="after each look"),
    ),
    Variant("two configurations", Scope(keys=(0, 0, 0), versions=(1, 2), wakeups=True, operations=SETTLE)),
    Variant("order, three workers", Scope(keys=(0, 0, 0), ordered=FIRST, versions=THREE, operations=CONTROL)),
    Variant("order, leases and delays", Scope(keys=(0, 0), ordered=FIRST, operations=(*LEASES, *DELAYS, *CONTROL))),
    Variant("order beside a limit", Scope(keys=(0, 1, 0, 1), ordered=FIRST, operations=SETTLE)),
    Variant(
        "wake-ups, limit that changes", Scope(keys=(0, 0), wakeups=True, operations=(*LIMITS, "cancel", "requeue"))
    ),
    Variant("wake-ups, order", Scope(keys=(0, 0, 0), ordered=FIRST, wakeups=True, operations=(*DELAYS, "cancel"))),
    Variant("wake-ups, two keys", Scope(keys=(0, 0, 1), wakeups=True, batch=1, operations=(*SETTLE, "cancel"))),
]
"""The design of the library, which breaks nothing."""

HOLDS_DEEP = [
    Variant(
        "limit that changes, three workers",
        Scope(keys=(0, 0, 0), versions=THREE, operations=(*LIMITS, "roll back")),
    ),
    Variant("limit of 2, four jobs", Scope(keys=(0, 0, 0, 0), limits=(2,), versions=THREE, operations=SETTLE)),
    Variant("limit that changes, plain SQL", Scope(keys=(0, 0), operations=(*LEASES, *LIMITS, "plain start"))),
    Variant("limit, plain SQL, three jobs", Scope(keys=(0, 0, 0), operations=(*LEASES, "plain start"))),
    Variant("limit that changes, leases", Scope(keys=(0, 0), versions=THREE, operations=(*LIMITS, *LEASES))),
    Variant("leases, three workers", Scope(keys=(0, 0), limits=(2,), versions=THREE, operations=LEASES)),
    Variant("leases, three jobs", Scope(keys=(0, 0, 0), versions=THREE, operations=LEASES)),
    Variant("two keys that change", Scope(keys=(0, 0, 1), operations=LIMITS)),
    Variant("two keys, four jobs", Scope(keys=(0, 0, 1, 1), limits=(1, 2), versions=THREE, operations=SETTLE)),
    Variant(
        "two configurations, three workers",
        Scope(keys=(0, 0, 0), versions=(1, 1, 2), wakeups=True, operations=(*SETTLE, "cancel")),
    ),
    Variant("order, four jobs", Scope(keys=(0, 0, 0, 0), ordered=FIRST, versions=THREE, operations=CONTROL)),
    Variant("order, five jobs", Scope(keys=(0, 0, 0, 0, 0), ordered=FIRST, operations=CONTROL)),
    Variant(
        "order, leases, three workers",
        Scope(keys=(0, 0, 0), ordered=FIRST, versions=THREE, operations=(*LEASES, "cancel", "requeue")),
    ),
    Variant(
        "order, delays, three workers",
        Scope(keys=(0, 0, 0), ordered=FIRST, versions=THREE, operations=(*DELAYS, "cancel", "requeue")),
    ),
    Variant(
        "order beside a limit, three workers",
        Scope(keys=(0, 1, 0, 1, 0), ordered=FIRST, versions=THREE, operations=SETTLE),
    ),
    Variant(
        "wake-ups, three workers",
        Scope(keys=(0, 0), versions=THREE, wakeups=True, batch=1, operations=(*LIMITS, *LEASES, "cancel", "requeue")),
    ),
    Variant(
        "wake-ups, order, three workers",
        Scope(keys=(0, 0, 0), ordered=FIRST, versions=THREE, wakeups=True, operations=(*DELAYS, "cancel", "requeue")),
    ),
    Variant(
        "wake-ups, two keys, three workers",
        Scope(keys=(0, 0, 1), versions=THREE, wakeups=True, batch=1, operations=(*SETTLE, "cancel")),
    ),
]
"""The same with wider bounds."""

_REQUEUE_RACES = Scope(keys=(0, 0), initial="fp", ordered=FIRST, operations=CONTROL, strict_requeue=True)
_SKIPPED_ROW = Scope(keys=(0,), wakeups=True, operations=(*SETTLE, "cancel", "roll back"))
_FIRST_LIMIT = Scope(keys=(0, 0), limits=(UNLIMITED,), limit_values=(1, UNLIMITED), operations=LIMITS)

NOT_PROMISED = [
    Variant("a job requeued behind a claim's back comes first", _REQUEUE_RACES, breaks="I2", steps=6),
    Variant("a claim wakes up for a skipped row", _SKIPPED_ROW, breaks="I4", steps=7),
    Variant("the first limit of a key counts at once", _FIRST_LIMIT, breaks="I1", steps=11),
]
"""Promises that the design does not make: the search has found that it breaks them."""

ALTERNATIVES = [
    Variant("requeues lock the key", _REQUEUE_RACES, Design(requeue_locks_key=True)),
    Variant("skipped rows are reported", _SKIPPED_ROW, Design(reports_locked_rows=True)),
    Variant("unlimited keys are locked", _FIRST_LIMIT, Design(locks_unlimited_keys=True)),
]
"""Designs that make these promises."""

_PLAIN = Scope(keys=(0, 0), operations=SETTLE)
_ORDERED = Scope(keys=(0, 0), ordered=FIRST, operations=CONTROL)
_WAKEUPS = Scope(keys=(0, 0), wakeups=True, operations=(*SETTLE, "cancel"))
_ORDERED_WAKEUPS = Scope(keys=(0, 0), ordered=FIRST, wakeups=True, operations=(*SETTLE, "cancel"))

BROKEN = [
    Variant("count in the statement's snapshot", _PLAIN, Design(count="statement"), "I1", 13),
    Variant("no lock of the key", _PLAIN, Design(key_lock="none"), "I1", 10),
    Variant("key locked after the count", _PLAIN, Design(key_lock="after look"), "I1", 13),
    Variant("key unlocked before the commit", _PLAIN, Design(unlocks_before_commit=True), "I1", 14),
    Variant(
        "counter that expires under a running job",
        Scope(keys=(0, 0), operations=(*SETTLE, "time out")),
        Design(counter=True),
        "I1",
        13,
    ),
    Variant("counter that leaks", Scope(keys=(0, 0), operations=LEASES), Design(counter=True), "I4", 8),
    Variant("order past a locked head", _ORDERED, Design(head="first unlocked"), "I2", 7),
    Variant("order by the statement's snapshot", _ORDERED, Design(head="statement"), "I2", 8),
    Variant("head beside a running job", _ORDERED, Design(head_waits_for_running=False), "I2", 14),
    Variant(
        "order past a delayed head",
        Scope(keys=(0, 0), ordered=FIRST, operations=DELAYS),
        Design(head="first due"),
        "I2",
        12,
    ),
    Variant("settle without the token", Scope(keys=(0,), operations=LEASES), Design(fenced=False), "I3", 13),
    Variant("contention not reported", _WAKEUPS, Design(reports_contention=False), "I4", 10),
    Variant(
        "batch cut off first", Scope(keys=(0, 0, 1), batch=1, operations=SETTLE), Design(limit_first=True), "I4", 6
    ),
    Variant("no notification of a free slot", _WAKEUPS, Design(silent=("complete",)), "I4", 12),
    Variant("no notification of a cancelled head", _ORDERED_WAKEUPS, Design(silent=("cancel",)), "I4", 7),
]
"""Designs that lack a safeguard each."""
