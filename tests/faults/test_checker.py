"""Forged histories: one that keeps every promise, and for each way to break one the checker's complaint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.faults.checker import RULES, Row, Tables, complaints
from tests.faults.history import Line, Log, Reader

pytestmark = pytest.mark.once

ORDER = "claims_come_in_order"


class Forgery:
    """A history in the making; each line comes a moment after the one before."""

    def __init__(self) -> None:
        self.lines: list[Line] = []
        self.rows: dict[int, Row] = {}
        self.effects: list[tuple[int, str]] = []
        self.messages: set[int] = set()
        self.keeps_completed = True

    def say(self, process: str, what: str, key: int | None = None, **more: Any) -> None:
        self.lines.append(Line(len(self.lines), process, what, key, more))

    def enqueue(self, *keys: int, **expected: Any) -> None:
        for key in keys:
            self.say("producer", "enqueueing", key, **expected)
            self.say("producer", "enqueued", key)
            self.rows[key] = Row("pending", 0)

    def claim(self, *keys: int, process: str = "a") -> None:
        for key in keys:
            self.say(process, "claimed", key)

    def run(self, key: int, *, process: str = "a", run: str | None = None) -> None:
        run = run or f"{key}-{len(self.lines)}"
        self.say(process, "start", key, run=run)
        self.say(process, "end", key, run=run)
        self.effects.append((key, run))

    def settle(self, key: int, what: str = "completed", *, process: str = "a", attempts: int = 1) -> None:
        self.say(process, what, key)
        self.rows[key] = Row(what, attempts)

    def see(self, key: int) -> None:
        row = self.rows[key]
        self.say("test", "seen", key, state=row.state, attempts=row.attempts)

    def complaints(self) -> dict[str, list[str]]:
        tables = Tables(self.rows, self.effects, frozenset(self.messages), self.keeps_completed)
        return complaints(self.lines, tables)


def a_good_one() -> Forgery:
    """Return a history of a retry, a killer, a lost worker and a rescue, in which nothing is wrong."""
    it = Forgery()
    it.say("a", "ready", concurrency=1)
    it.enqueue(1, 2, 3)
    it.enqueue(4, ends="failed", limit=2, killer=True)
    it.enqueue(5, effect=False)
    it.say("producer", "enqueueing", 6)
    it.say("producer", "rolled back", 6)
    it.say("producer", "enqueueing", 7)
    it.claim(1, 2, 3)
    it.run(1)
    it.settle(1)
    it.see(1)
    it.say("a", "start", 2, run="raises")
    it.say("a", "raise", 2, run="raises")
    it.say("a", "retried", 2)
    it.say("a", "start", 3, run="dies")
    it.say("test", "fault", kind="SIGKILL")
    it.say("b", "ready", concurrency=1)
    it.say("b", "rescued", 3)
    it.claim(2, 3, process="b")
    it.run(2, process="b")
    it.settle(2, process="b", attempts=2)
    it.run(3, process="b")
    it.settle(3, process="b")
    for start in range(3):
        it.claim(4, process=f"dead{start}")
        it.say(f"dead{start}", "start", 4, run=f"kills{start}")
    it.claim(4, 5, process="b")
    it.settle(4, "failed", process="b", attempts=2)
    it.say("b", "start", 5, run="quiet")
    it.say("b", "end", 5, run="quiet")
    it.settle(5, process="b")
    it.see(4)
    return it


def in_order(*claims: int) -> Forgery:
    """Return a history of one consumer that claims three jobs, of which the last one becomes the best."""
    it = Forgery()
    it.enqueue(1, order=[0, 1])
    it.enqueue(2, order=[0, 2])
    it.say("a", "ready", concurrency=1)
    for number, key in enumerate(claims):
        it.claim(key)
        it.run(key)
        it.settle(key)
        if number == 0:
            it.enqueue(3, order=[-1, 3])
            # What is heard of the consumer after it shows that the next claim begins later.
            it.say("a", "end", 1, run="again")
    return it


def test_a_good_history_is_not_complained_about() -> None:
    assert a_good_one().complaints() == {}
    assert in_order(1, 3, 2).complaints() == {}


def test_a_completed_job_need_not_leave_a_row() -> None:
    it = a_good_one()
    it.keeps_completed = False
    it.rows = {4: it.rows[4]}
    assert it.complaints() == {}


def test_what_a_producer_did_not_live_to_tell_may_be_there() -> None:
    it = a_good_one()
    it.claim(7)
    it.run(7)
    it.settle(7)
    assert it.complaints() == {}


def test_a_job_requeued_by_plain_sql_may_run_once_more() -> None:
    it = a_good_one()
    it.say("test", "requeued", 4)
    it.claim(4, process="b")
    it.say("b", "start", 4, run="once more")
    it.settle(4, "failed", process="b", attempts=3)
    assert it.complaints() == {}
    it.rows[4] = Row("failed", 4)
    assert set(it.complaints()) == {"attempts_stay_in_their_limit"}


def drop_row(it: Forgery) -> None:
    del it.rows[2]


def leave_pending(it: Forgery) -> None:
    it.rows[7] = Row("pending", 0)


def leave_processing(it: Forgery) -> None:
    it.rows[7] = Row("processing", 1)


def fail_an_innocent(it: Forgery) -> None:
    it.claim(7)
    it.say("a", "start", 7, run="innocent")
    it.settle(7, "failed")


def run_what_was_rolled_back(it: Forgery) -> None:
    it.say("a", "start", 6, run="phantom")


def keep_what_was_rolled_back(it: Forgery) -> None:
    it.claim(6)
    it.run(6)
    it.settle(6)


def complete_without_a_run(it: Forgery) -> None:
    it.lines = [line for line in it.lines if line.more.get("run") != "quiet"]


def have_a_job_of_nobody(it: Forgery) -> None:
    it.rows[9] = Row("completed", 1)


def run_a_job_of_nobody(it: Forgery) -> None:
    it.say("a", "start", 9, run="phantom")


def leave_a_message(it: Forgery) -> None:
    it.messages = {1}


def lose_without_a_row(it: Forgery) -> None:
    """Where a completed job leaves none: nothing says that it was run."""
    it.keeps_completed = False
    it.rows = {4: it.rows[4]}
    complete_without_a_run(it)


def repeat_an_effect(it: Forgery) -> None:
    it.effects.append(it.effects[0])


def have_effects_of_two_runs(it: Forgery) -> None:
    it.run(3, process="c")


def drop_an_effect(it: Forgery) -> None:
    it.effects.pop()


def keep_the_effect_of_a_run_that_raised(it: Forgery) -> None:
    it.effects = [(2, "raises") if key == 2 else (key, run) for key, run in it.effects]


def keep_the_effect_of_a_killer(it: Forgery) -> None:
    it.effects.append((4, "kills0"))


def settle_twice(it: Forgery) -> None:
    it.settle(2, "retried", process="b")
    it.rows[2] = Row("completed", 2)


def settle_unclaimed(it: Forgery) -> None:
    it.claim(7)
    it.run(7)
    it.settle(7, process="c")


def finish_in_two_workers(it: Forgery) -> None:
    it.claim(3, process="c")
    it.settle(3, process="c")


def settle_what_was_rescued(it: Forgery) -> None:
    """A worker was stopped, its job was taken back, and then it settled it all the same."""
    it.lines = [line for line in it.lines if line.what != "fault"]
    it.say("test", "fault", kind="SIGSTOP")
    it.claim(7)
    it.say("b", "rescued", 7)
    it.run(7)
    it.settle(7)


def count_too_much(it: Forgery) -> None:
    it.rows[4] = Row("failed", 3)


def count_what_did_not_start(it: Forgery) -> None:
    it.rows[5] = Row("completed", 3)


def start_too_often(it: Forgery) -> None:
    for process in ("x", "y"):
        it.claim(4, process=process)
        it.say(process, "start", 4, run=process)


def change_what_was_seen(it: Forgery) -> None:
    it.rows[1] = Row("completed", 2)
    it.see(1)


def wait_again(it: Forgery) -> None:
    it.rows[1] = Row("pending", 1)
    it.see(1)
    it.settle(1)


def undo_in_the_end(it: Forgery) -> None:
    it.rows[4] = Row("cancelled", 2)


def lose_what_was_told(it: Forgery) -> None:
    """It was completed, said its worker, and nobody looked; now it is not."""
    it.rows[5] = Row("failed", 1)


BROKEN: list[tuple[Callable[[Forgery], None], set[str]]] = [
    (drop_row, {"nothing_is_lost", "effects_happen_once", "settled_stays_settled"}),
    (leave_pending, {"nothing_is_lost"}),
    (leave_processing, {"nothing_is_lost"}),
    (fail_an_innocent, {"nothing_is_lost"}),
    (run_what_was_rolled_back, {"nothing_comes_from_nowhere"}),
    (keep_what_was_rolled_back, {"nothing_comes_from_nowhere"}),
    (complete_without_a_run, {"nothing_is_lost"}),
    (have_a_job_of_nobody, {"nothing_comes_from_nowhere"}),
    (run_a_job_of_nobody, {"nothing_comes_from_nowhere"}),
    (leave_a_message, {"nothing_comes_from_nowhere"}),
    (lose_without_a_row, {"nothing_is_lost", "settled_stays_settled"}),
    (repeat_an_effect, {"effects_happen_once"}),
    (have_effects_of_two_runs, {"effects_happen_once"}),
    (drop_an_effect, {"effects_happen_once"}),
    (keep_the_effect_of_a_run_that_raised, {"effects_happen_once"}),
    (keep_the_effect_of_a_killer, {"effects_happen_once"}),
    (settle_twice, {"a_claim_is_settled_once"}),
    (settle_unclaimed, {"a_claim_is_settled_once"}),
    (finish_in_two_workers, {"a_claim_is_settled_once"}),
    (settle_what_was_rescued, {"a_claim_is_settled_once"}),
    (count_too_much, {"attempts_stay_in_their_limit"}),
    (count_what_did_not_start, {"attempts_stay_in_their_limit"}),
    (start_too_often, {"attempts_stay_in_their_limit"}),
    (change_what_was_seen, {"settled_stays_settled"}),
    (wait_again, {"settled_stays_settled", "a_claim_is_settled_once"}),
    (undo_in_the_end, {"nothing_is_lost", "settled_stays_settled"}),
    (lose_what_was_told, {"nothing_is_lost", "settled_stays_settled"}),
]
"""What is forged, and which promises are broken by it."""


@pytest.mark.parametrize(("forge", "expected"), BROKEN, ids=[forge.__name__ for forge, _ in BROKEN])
def test_a_forged_history_is_complained_about(forge: Callable[[Forgery], None], expected: set[str]) -> None:
    it = a_good_one()
    forge(it)
    assert set(it.complaints()) == expected


def test_a_claim_out_of_order_is_complained_about() -> None:
    assert set(in_order(2, 3, 1).complaints()) == {ORDER}
    assert set(in_order(1, 2, 3).complaints()) == {ORDER}


def test_what_is_told_of_a_commit_says_nothing_of_the_claim_in_it() -> None:
    it = Forgery()
    it.enqueue(1, order=[0, 1])
    it.enqueue(2, order=[0, 2])
    it.say("a", "ready", concurrency=1)
    it.claim(1)
    it.run(1)
    it.enqueue(3, order=[-1, 3])
    for ended, key in ((1, 2), (2, 3)):
        it.settle(ended)
        it.claim(key)
        it.run(key)
    it.settle(3)
    assert it.complaints() == {}


def test_the_order_of_two_consumers_says_nothing() -> None:
    it = in_order(2, 3, 1)
    it.say("b", "ready", concurrency=1)
    assert it.complaints() == {}


def test_every_rule_is_broken_by_some_history() -> None:
    broken = {rule for _, rules in BROKEN for rule in rules} | {ORDER}
    assert broken == {rule.__name__ for rule in RULES}


def test_a_log_can_be_read_while_it_grows(tmp_path: Any) -> None:
    log, reader = Log(tmp_path, "a"), Reader(tmp_path)
    log.write("claimed", 1)
    assert [line.key for line in reader.lines()] == [1]
    log.write("completed", 1, attempt=2)
    with (tmp_path / "b.log").open("w") as torn:
        torn.write('[1, "b", "cl')
    assert [str(line).partition(" ")[2] for line in reader.lines()] == ["a: claimed 1", "a: completed 1 attempt=2"]
    log.close()
