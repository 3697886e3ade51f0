"""The checker of keys under flow control accepts a valid history, and reports each violation that is planted in one."""

import json
from collections.abc import Callable
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest

from tests.faults.history import Record
from tests.faults.key_checker import HELD_RULES, RULES, violations
from tests.faults.key_history import Audit
from tests.faults.key_queues import Configuration

pytestmark = pytest.mark.once


def moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


class Keys:
    """Builds the audit of transactions, one each second: each has seen those before it, unless it is told not to."""

    def __init__(self, **configuration: Any) -> None:
        self.configuration = Configuration(1, **configuration)
        self.now = 0
        self.jobs: dict[int, dict[str, Any]] = {}
        self.changes, self.committed, self.effects, self.rates, self.marks = [], [], [], list[Any](), list[Any]()
        self.records: list[Record] = []

    def commit(
        self, *jobs: int, origin: str = "worker0", unseen: int | None = None, xid: int | None = None, **values: Any
    ) -> int:
        """Change jobs in a transaction, and return its number; ``unseen`` is one that it does not see."""
        self.now += 1
        seen = f"{self.now}:{self.now}:" if unseen is None else f"{unseen}:{self.now}:{unseen}"
        row = {"xid": xid or self.now, "seen": seen, "at": float(self.now)}
        self.committed.append(SimpleNamespace(**row))
        for job in jobs:
            before = self.jobs.get(job)
            self.jobs[job] = {**(before or {"id": job}), **values}
            more = {"seq": len(self.changes), "began": float(self.now), "origin": origin}
            self.changes.append(SimpleNamespace(**row, **more, before=before, after=self.jobs[job]))
        return self.now

    def enqueue(self, *jobs: int, customer: int = 1) -> None:
        keys = {"customer_id": customer, "document_id": customer, "kind": "a", "most": None, "priority": 0}
        state = {"status": "pending", "lease_token": None, "run_at": moment(0), "started_at": None}
        self.commit(*jobs, origin="enqueuer0", **keys, **state)

    def begin(self, *jobs: int, lease: str | None = None, unseen: int | None = None) -> int:
        for job in jobs:
            own = lease or f"lease of {job}"
            found = self.commit(job, unseen=unseen, status="processing", lease_token=own, started_at=moment(1))
            self._call(job, "start", self.now + 0.1)
        return found

    def end(self, *jobs: int, status: str = "completed", effects: int = 1) -> int:
        for job in jobs:
            self._call(job, "end", self.now + 0.9)
            self.effects += [SimpleNamespace(job=job, token=self.jobs[job]["lease_token"])] * effects
            found = self.commit(job, status=status)
        return found

    def run(self, *jobs: int) -> None:
        for job in jobs:
            self.begin(job)
            self.end(job)

    def throttle(self, until: float) -> None:
        """Hold back the key of the rate of the whole queue."""
        xid = self.commit()
        after = {"rate": "/1s", "key": 0, "throttled_until": moment(until)}
        self.rates.append(SimpleNamespace(seq=len(self.rates), xid=xid, before=None, after=after))

    def _call(self, job: int, event: str, at: float) -> None:
        details = {"token": self.jobs[job]["lease_token"], "at": at}
        self.records.append(Record(len(self.records), "worker0", event, job, details))

    def violations(self) -> dict[str, list[str]]:
        rows = {"change": self.changes, "committed": self.committed, "effect": self.effects, "mark": self.marks}
        rows |= {"limit_change": [], "rate_change": self.rates, "letter_change": []}
        rows["job"] = [SimpleNamespace(**job) for job in self.jobs.values()]
        return violations(Audit(self.configuration, rows, {1: 1, 2: 2}, self.records))


LIMITED = {"limits": ("number",), "most": 1}
RATED = {"rates": ((1, 1.0, None, 1),)}


@pytest.mark.parametrize("configuration", [LIMITED, {"order": "block"}, RATED, {"fair": 1}])
def test_a_valid_history_has_no_violations(configuration: dict[str, Any]) -> None:
    keys = Keys(**configuration)
    keys.enqueue(1, 2, 3)
    keys.enqueue(4, customer=2)
    keys.run(1, 4, 2)
    keys.begin(3)
    keys.end(3, status="pending", effects=0)
    keys.begin(3, lease="another")
    keys.end(3)
    assert keys.violations() == {}


def test_a_claim_may_begin_beside_a_job_that_it_cannot_have_seen() -> None:
    """A job that comes while a claim is executed comes too late for it."""
    keys = Keys(order="block")
    keys.enqueue(2)
    keys.enqueue(1)
    keys.begin(2, unseen=keys.now)
    keys.end(2)
    keys.run(1)
    assert keys.violations() == {}


def begin_two(keys: Keys) -> None:
    keys.begin(1, 2)
    keys.end(1, 2)


def begin_before_an_end_is_seen(keys: Keys) -> None:
    keys.begin(1)
    keys.begin(2, unseen=keys.end(1))
    keys.end(2)


def begin_out_of_order(keys: Keys) -> None:
    keys.run(2, 1)


def begin_behind_a_failed_job(keys: Keys) -> None:
    keys.begin(1)
    keys.end(1, status="failed", effects=0)
    keys.run(2)


def begin_while_the_key_is_held_back(keys: Keys) -> None:
    keys.throttle(until=100)
    keys.run(1)


def begin_one_key_only(keys: Keys) -> None:
    keys.enqueue(10, 11, 12, 13)
    keys.enqueue(20, customer=2)
    keys.run(1, 2, 10, 11, 12, 13)


def lose_a_job(keys: Keys) -> None:
    keys.run(1)
    del keys.jobs[2]


def change_a_job_without_a_record(keys: Keys) -> None:
    keys.run(1)
    keys.jobs[1] = {**keys.jobs[1], "status": "failed"}


def begin_twice_under_one_lease(keys: Keys) -> None:
    keys.begin(1)
    keys.end(1, status="pending", effects=0)
    keys.run(1)


def complete_without_an_effect(keys: Keys) -> None:
    keys.begin(1)
    keys.end(1, effects=0)


def complete_with_two_effects(keys: Keys) -> None:
    keys.begin(1)
    keys.end(1, effects=2)


def complete_before_the_handler_returns(keys: Keys) -> None:
    keys.begin(1)
    keys.effects.append(SimpleNamespace(job=1, token=keys.jobs[1]["lease_token"]))
    keys.commit(1, status="completed")


VIOLATIONS: list[tuple[Callable[[Keys], None], dict[str, Any], set[str]]] = [
    (begin_two, LIMITED, {"limits"}),
    (begin_before_an_end_is_seen, LIMITED, {"limits"}),
    (begin_two, {"order": "block"}, {"one_of_a_key", "order"}),
    (begin_out_of_order, {"order": "block"}, {"order"}),
    (begin_behind_a_failed_job, {"order": "block"}, {"order"}),
    (begin_behind_a_failed_job, {"order": "cancel"}, {"cancelled_behind"}),
    (begin_two, {"rates": ((1, 100.0, None, 1),)}, {"rates"}),
    (begin_while_the_key_is_held_back, RATED, {"throttled"}),
    (begin_one_key_only, {"fair": 1}, {"turns"}),
    (lose_a_job, {}, {"nothing_is_lost"}),
    (change_a_job_without_a_record, {}, {"nothing_is_lost"}),
    (begin_twice_under_one_lease, {}, {"one_run_of_a_lease", "handlers"}),
    (complete_without_an_effect, {}, {"handlers"}),
    (complete_with_two_effects, {}, {"handlers"}),
    (complete_before_the_handler_returns, {}, {"handlers"}),
]
"""What happens to two jobs of one key, under which configuration, and the rules that this violates."""


# -- strategies whose transaction holds the jobs -----------------------------------------------------------------------


class HeldKeys(Keys):
    """The same for transactions that hold the jobs until they end."""

    def __init__(self, **configuration: Any) -> None:
        super().__init__(strategy="batch_select", **configuration)
        self.open: dict[int, int] = {}
        """The transaction of each job that runs."""

    def begin_held(self, job: int, *, beside: int = 0, admits: bool = True) -> None:
        """Run a job in a transaction of its own; it sees ``beside`` more of those before it in progress."""
        self.now += 1
        progress = range(self.now - beside, self.now + 1)
        seen = f"{progress[0]}:{self.now + 1}:{','.join(map(str, progress))}"
        hold = {"job": job, "limits": ["number"], "keys": [1], "most": [1], "before": seen, "after": seen}
        hold |= dict.fromkeys(("began", "started", "at"), self.now)
        row = {"job": job, "xid": self.now, "seen": seen, "at": self.now, "transaction_began": self.now}
        self.marks.append(SimpleNamespace(**row, holds=json.dumps(hold) if admits else "", origin="worker0"))
        self.open[job] = self.now

    def end_held(self, *jobs: int, status: str = "completed", effects: int = 1) -> None:
        for job in jobs:
            xid = self.open.pop(job)
            self.effects += [SimpleNamespace(job=job, xid=xid)] * effects
            self.commit(job, xid=xid, status=status)

    def run_held(self, *jobs: int) -> None:
        for job in jobs:
            self.begin_held(job)
            self.end_held(job)

    def reserve(self, beginnings: int) -> None:
        xid = self.commit()
        after = {"rate": "/1s", "key": 0, "next_at": moment(xid + beginnings), "throttled_until": None}
        row = {"seq": len(self.rates), "xid": xid, "at": float(xid), "began": float(xid), "origin": "worker0"}
        self.rates.append(SimpleNamespace(**row, before=None, after=after))


@pytest.mark.parametrize("configuration", [LIMITED, {"order": "block"}, RATED, {"fair": 1}])
def test_a_valid_history_of_transactions_that_hold_has_no_violations(configuration: dict[str, Any]) -> None:
    keys = HeldKeys(**configuration)
    keys.enqueue(1, 2)
    for job in (1, 2):
        keys.reserve(1)
        keys.run_held(job)
    assert keys.violations() == {}


def hold_two(keys: HeldKeys) -> None:
    keys.begin_held(1)
    keys.begin_held(2, beside=1)
    keys.end_held(1, 2)


def run_what_was_not_admitted(keys: HeldKeys) -> None:
    keys.begin_held(1, admits=False)
    keys.end_held(1)


def hold_behind_a_failed_job(keys: HeldKeys) -> None:
    keys.begin_held(1)
    keys.end_held(1, status="failed", effects=0)
    keys.run_held(2)


def reserve_too_many(keys: HeldKeys) -> None:
    keys.reserve(5)


def hold_one_key_only(keys: HeldKeys) -> None:
    keys.enqueue(10, 11, 12, 13)
    keys.enqueue(20, customer=2)
    keys.run_held(1, 2, 10, 11, 12, 13)


def end_without_an_effect(keys: HeldKeys) -> None:
    keys.begin_held(1)
    keys.end_held(1, effects=0)


HELD_VIOLATIONS: list[tuple[Callable[[HeldKeys], None], dict[str, Any], set[str]]] = [
    (hold_two, LIMITED, {"slots", "running"}),
    (run_what_was_not_admitted, LIMITED, {"admitted"}),
    (hold_behind_a_failed_job, {"order": "block"}, {"held_order"}),
    (hold_behind_a_failed_job, {"order": "cancel"}, {"held_cancelled_behind"}),
    (reserve_too_many, RATED, {"held_rates"}),
    (end_without_an_effect, RATED, {"reserved", "held_nothing_is_lost"}),
    (hold_one_key_only, {"fair": 1}, {"held_turns"}),
    (end_without_an_effect, {}, {"held_nothing_is_lost"}),
]


@pytest.mark.parametrize(
    ("make", "violate", "configuration", "expected"),
    [*((Keys, *each) for each in VIOLATIONS), *((HeldKeys, *each) for each in HELD_VIOLATIONS)],
)
def test_each_violation_is_reported(
    make: type[Keys], violate: Callable[[Any], None], configuration: dict[str, Any], expected: set[str]
) -> None:
    keys = make(**configuration)
    keys.enqueue(1, 2)
    violate(keys)
    assert keys.violations().keys() == expected


def test_every_rule_is_violated_by_some_history() -> None:
    violated = {rule for *_, rules in [*VIOLATIONS, *HELD_VIOLATIONS] for rule in rules}
    assert violated == {rule.__name__ for rule in [*RULES, *HELD_RULES]}
