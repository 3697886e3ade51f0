"""The history checker accepts a valid history, and reports each violation that is added to it."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.faults.checker import RULES, Row, Tables, violations
from tests.faults.history import HistoryReader, Record, Recorder

pytestmark = pytest.mark.once

LOST = "no_committed_job_is_lost"
EXIST = "only_committed_jobs_exist"
EFFECTS = "effects_are_committed_exactly_once"
SETTLED = "each_claim_is_settled_at_most_once"
ATTEMPTS = "attempts_stay_within_max_attempts"
FINAL = "final_states_do_not_change"
ORDER = "jobs_are_claimed_in_order"


class HistoryBuilder:
    """Builds a history; each record is one nanosecond later than the one before it."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.rows: dict[int, Row] = {}
        self.effects: list[tuple[int, str]] = []
        self.messages: set[int] = set()
        self.keeps_completed = True

    def record(self, process: str, event: str, key: int | None = None, **details: Any) -> None:
        self.records.append(Record(len(self.records), process, event, key, details))

    def enqueue(self, *keys: int, **expected: Any) -> None:
        for key in keys:
            self.record("producer", "enqueueing", key, **expected)
            self.record("producer", "enqueued", key)
            self.rows[key] = Row("pending", 0)

    def claim(self, *keys: int, process: str = "a") -> None:
        for key in keys:
            self.record(process, "claimed", key)

    def run(self, key: int, *, process: str = "a", run: str | None = None) -> None:
        run = run or f"{key}-{len(self.records)}"
        self.record(process, "start", key, run=run)
        self.record(process, "return", key, run=run)
        self.effects.append((key, run))

    def settle(self, key: int, event: str = "completed", *, process: str = "a", attempts: int = 1) -> None:
        self.record(process, event, key)
        self.rows[key] = Row(event, attempts)

    def observe(self, key: int) -> None:
        row = self.rows[key]
        self.record("test", "observed", key, state=row.state, attempts=row.attempts)

    def violations(self) -> dict[str, list[str]]:
        tables = Tables(self.rows, self.effects, frozenset(self.messages), self.keeps_completed)
        return violations(self.records, tables)


def valid_history() -> HistoryBuilder:
    """Return a valid history with a retry, a job that exits its process, a killed worker and a rescue."""
    history = HistoryBuilder()
    history.record("a", "ready", concurrency=1)
    history.enqueue(1, 2, 3)
    history.enqueue(4, expected_state="failed", max_attempts=2, exits_process=True)
    history.enqueue(5, has_effect=False)
    history.record("producer", "enqueueing", 6)
    history.record("producer", "rolled back", 6)
    history.record("producer", "enqueueing", 7)
    history.claim(1, 2, 3)
    history.run(1)
    history.settle(1)
    history.observe(1)
    history.record("a", "start", 2, run="raises")
    history.record("a", "raise", 2, run="raises")
    history.record("a", "retried", 2)
    history.record("a", "start", 3, run="killed")
    history.record("test", "fault", kind="SIGKILL")
    history.record("b", "ready", concurrency=1)
    history.record("b", "rescued", 3)
    history.claim(2, 3, process="b")
    history.run(2, process="b")
    history.settle(2, process="b", attempts=2)
    history.run(3, process="b")
    history.settle(3, process="b")
    for start in range(3):
        history.claim(4, process=f"exited{start}")
        history.record(f"exited{start}", "start", 4, run=f"exits{start}")
    history.claim(4, 5, process="b")
    history.settle(4, "failed", process="b", attempts=2)
    history.record("b", "start", 5, run="quiet")
    history.record("b", "return", 5, run="quiet")
    history.settle(5, process="b")
    history.observe(4)
    return history


def claims_of_one_consumer(*claims: int) -> HistoryBuilder:
    """Return a history of one consumer that claims three jobs; job 3 is enqueued after the first claim and is first."""
    history = HistoryBuilder()
    history.enqueue(1, claim_order=[0, 1])
    history.enqueue(2, claim_order=[0, 2])
    history.record("a", "ready", concurrency=1)
    for number, key in enumerate(claims):
        history.claim(key)
        history.run(key)
        history.settle(key)
        if number == 0:
            history.enqueue(3, claim_order=[-1, 3])
            # A later record of the handler proves that the next claim begins after the commit of job 3.
            history.record("a", "return", 1, run="second")
    return history


def test_a_valid_history_has_no_violations() -> None:
    assert valid_history().violations() == {}
    assert claims_of_one_consumer(1, 3, 2).violations() == {}


def test_completed_jobs_may_leave_no_row() -> None:
    history = valid_history()
    history.keeps_completed = False
    history.rows = {4: history.rows[4]}
    assert history.violations() == {}


def test_a_job_of_a_producer_killed_during_commit_may_exist() -> None:
    history = valid_history()
    history.claim(7)
    history.run(7)
    history.settle(7)
    assert history.violations() == {}


def test_a_job_requeued_by_plain_sql_has_one_more_attempt() -> None:
    history = valid_history()
    history.record("test", "requeued", 4)
    history.claim(4, process="b")
    history.record("b", "start", 4, run="requeued")
    history.settle(4, "failed", process="b", attempts=3)
    assert history.violations() == {}
    history.rows[4] = Row("failed", 4)
    assert set(history.violations()) == {ATTEMPTS}


def fail_job_that_should_complete(history: HistoryBuilder) -> None:
    history.claim(7)
    history.record("a", "start", 7, run="fails")
    history.settle(7, "failed")


def complete_rolled_back_job(history: HistoryBuilder) -> None:
    history.claim(6)
    history.run(6)
    history.settle(6)


def complete_without_a_run(history: HistoryBuilder) -> None:
    history.records = [record for record in history.records if record.details.get("run") != "quiet"]


def complete_without_row_or_run(history: HistoryBuilder) -> None:
    """Completed jobs leave no row, and the history contains no run of one of them."""
    history.keeps_completed = False
    history.rows = {4: history.rows[4]}
    complete_without_a_run(history)


def keep_effect_of_raised_run(history: HistoryBuilder) -> None:
    history.effects = [(2, "raises") if key == 2 else (key, run) for key, run in history.effects]


def settle_claim_twice(history: HistoryBuilder) -> None:
    history.settle(2, "retried", process="b")
    history.rows[2] = Row("completed", 2)


def settle_without_claim(history: HistoryBuilder) -> None:
    history.claim(7)
    history.run(7)
    history.settle(7, process="c")


def complete_in_two_workers(history: HistoryBuilder) -> None:
    history.claim(3, process="c")
    history.settle(3, process="c")


def settle_rescued_job(history: HistoryBuilder) -> None:
    """A paused worker settles a job that was rescued meanwhile."""
    history.records = [record for record in history.records if record.event != "fault"]
    history.record("test", "fault", kind="SIGSTOP")
    history.claim(7)
    history.record("b", "rescued", 7)
    history.run(7)
    history.settle(7)


def exceed_starts(history: HistoryBuilder) -> None:
    for process in ("x", "y"):
        history.claim(4, process=process)
        history.record(process, "start", 4, run=process)


def change_observed_row(history: HistoryBuilder) -> None:
    history.rows[1] = Row("completed", 2)
    history.observe(1)


def reopen_completed_job(history: HistoryBuilder) -> None:
    history.rows[1] = Row("pending", 1)
    history.observe(1)
    history.settle(1)


def change_recorded_state(history: HistoryBuilder) -> None:
    """A worker has recorded the job as completed, the test has not observed it, and it is failed in the end."""
    history.rows[5] = Row("failed", 1)


VIOLATIONS: list[tuple[str, Callable[[HistoryBuilder], object], set[str]]] = [
    ("delete_row", lambda history: history.rows.pop(2), {LOST, EFFECTS, FINAL}),
    ("leave_job_pending", lambda history: history.rows.update({7: Row("pending", 0)}), {LOST}),
    ("leave_job_processing", lambda history: history.rows.update({7: Row("processing", 1)}), {LOST}),
    ("fail_job_that_should_complete", fail_job_that_should_complete, {LOST}),
    ("run_rolled_back_job", lambda history: history.record("a", "start", 6, run="phantom"), {EXIST}),
    ("complete_rolled_back_job", complete_rolled_back_job, {EXIST}),
    ("complete_without_a_run", complete_without_a_run, {LOST}),
    ("add_row_never_enqueued", lambda history: history.rows.update({9: Row("completed", 1)}), {EXIST}),
    ("run_job_never_enqueued", lambda history: history.record("a", "start", 9, run="phantom"), {EXIST}),
    ("leave_message_of_completed_job", lambda history: history.messages.add(1), {EXIST}),
    ("complete_without_row_or_run", complete_without_row_or_run, {LOST, FINAL}),
    ("duplicate_effect", lambda history: history.effects.append(history.effects[0]), {EFFECTS}),
    ("add_effect_of_second_run", lambda history: history.run(3, process="c"), {EFFECTS}),
    ("delete_effect", lambda history: history.effects.pop(), {EFFECTS}),
    ("keep_effect_of_raised_run", keep_effect_of_raised_run, {EFFECTS}),
    ("keep_effect_of_exited_process", lambda history: history.effects.append((4, "exits0")), {EFFECTS}),
    ("settle_claim_twice", settle_claim_twice, {SETTLED}),
    ("settle_without_claim", settle_without_claim, {SETTLED}),
    ("complete_in_two_workers", complete_in_two_workers, {SETTLED}),
    ("settle_rescued_job", settle_rescued_job, {SETTLED}),
    ("exceed_max_attempts", lambda history: history.rows.update({4: Row("failed", 3)}), {ATTEMPTS}),
    ("count_more_attempts_than_starts", lambda history: history.rows.update({5: Row("completed", 3)}), {ATTEMPTS}),
    ("exceed_starts", exceed_starts, {ATTEMPTS}),
    ("change_observed_row", change_observed_row, {FINAL}),
    ("reopen_completed_job", reopen_completed_job, {FINAL, SETTLED}),
    ("change_observed_state", lambda history: history.rows.update({4: Row("cancelled", 2)}), {LOST, FINAL}),
    ("change_recorded_state", change_recorded_state, {LOST, FINAL}),
]
"""How each valid history is changed, and the rules that this violates."""


@pytest.mark.parametrize(("violate", "expected"), [pytest.param(*each, id=name) for name, *each in VIOLATIONS])
def test_each_violation_is_reported(violate: Callable[[HistoryBuilder], object], expected: set[str]) -> None:
    history = valid_history()
    violate(history)
    assert set(history.violations()) == expected


def test_a_claim_out_of_order_is_reported() -> None:
    assert set(claims_of_one_consumer(2, 3, 1).violations()) == {ORDER}
    assert set(claims_of_one_consumer(1, 2, 3).violations()) == {ORDER}


def test_events_of_a_commit_do_not_date_the_claim_in_it() -> None:
    history = HistoryBuilder()
    history.enqueue(1, claim_order=[0, 1])
    history.enqueue(2, claim_order=[0, 2])
    history.record("a", "ready", concurrency=1)
    history.claim(1)
    history.run(1)
    history.enqueue(3, claim_order=[-1, 3])
    for settled, key in ((1, 2), (2, 3)):
        history.settle(settled)
        history.claim(key)
        history.run(key)
    history.settle(3)
    assert history.violations() == {}


def test_the_order_of_two_consumers_is_not_checked() -> None:
    history = claims_of_one_consumer(2, 3, 1)
    history.record("b", "ready", concurrency=1)
    assert history.violations() == {}


def test_every_rule_is_violated_by_some_history() -> None:
    violated = {rule for *_, rules in VIOLATIONS for rule in rules} | {ORDER}
    assert violated == {rule.__name__ for rule in RULES}


def test_a_history_is_read_while_it_grows(tmp_path: Any) -> None:
    recorder, reader = Recorder(tmp_path, "a"), HistoryReader(tmp_path)
    recorder.record("claimed", 1)
    assert [record.key for record in reader.records()] == [1]
    recorder.record("completed", 1, attempt=2)
    with (tmp_path / "b.history").open("w") as incomplete:
        incomplete.write('[1, "b", "cl')
    assert [str(record).partition(" ")[2] for record in reader.records()] == [
        "a: claimed 1",
        "a: completed 1 attempt=2",
    ]
    recorder.close()
