"""The replay explains a history in which a job is rescued, and refuses each event that is added to it."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.faults.checker import Row, Tables
from tests.faults.history import Record
from tests.faults.lease_replay import unexplained

pytestmark = pytest.mark.once


class Story:
    """The records of one job, each at so many seconds."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.row, self.effects = Row("completed", 1), 1

    def add(self, seconds: float, process: str, event: str, **details: Any) -> None:
        key = None if event in {"ready", "fault"} else 1
        self.records.append(Record(int(seconds * 1e9), process, event, key, details))

    def change(self, process: str, event: str, **details: Any) -> None:
        """Change the details of an event, or its ``seconds`` or its name ``to`` another one."""
        at = next(n for n, one in enumerate(self.records) if (one.process, one.event) == (process, event))
        old = self.records.pop(at)
        seconds, name = details.pop("seconds", old.time_ns / 1e9), details.pop("to", event)
        self.add(seconds, process, name, **{**old.details, **details})

    def remove(self, event: str) -> None:
        self.records = [record for record in self.records if record.event != event]

    def unexplained(self) -> list[str]:
        effects = [(1, f"run {number}") for number in range(self.effects)]
        return unexplained(self.records, Tables({1: self.row}, effects), holds=False)


def paused_and_rescued() -> Story:
    """Worker a is paused in the handler, b rescues and completes the job, and a loses its lease."""
    story = Story()
    for process in ("a", "b"):
        story.add(0, process, "ready", lease=1)
    story.add(0.1, "test", "enqueueing", max_attempts=3)
    story.add(0.2, "test", "enqueued")
    story.add(0.3, "a", "claimed", attempt=1)
    story.add(0.4, "a", "start", run="first")
    story.add(0.5, "test", "fault", kind="SIGSTOP", to="a")
    story.add(1.5, "b", "rescued", attempt=None)
    story.add(1.6, "b", "claimed", attempt=1)
    story.add(1.7, "b", "start", run="second")
    story.add(1.8, "b", "return", run="second")
    story.add(1.9, "a", "return", run="first")
    story.add(2.0, "a", "lease_lost", attempt=1)
    story.add(2.1, "b", "completed", attempt=1)
    story.add(2.2, "test", "observed", state="completed", attempts=1)
    return story


def killed_before_it_reports() -> Story:
    """Worker a is killed when its result is committed, before it has recorded so."""
    story = Story()
    story.add(0, "a", "ready", lease=1)
    story.add(0.1, "test", "enqueueing", max_attempts=3)
    story.add(0.2, "test", "enqueued")
    story.add(0.3, "a", "claimed", attempt=1)
    story.add(0.4, "a", "start", run="first")
    story.add(0.5, "a", "return", run="first")
    story.add(0.6, "test", "fault", kind="SIGKILL", to="a")
    story.add(0.7, "test", "observed", state="completed", attempts=1)
    return story


@pytest.mark.parametrize("story", [paused_and_rescued, killed_before_it_reports])
def test_a_path_explains_the_history(story: Callable[[], Story]) -> None:
    assert story().unexplained() == []


def rescued_while_the_lease_is_valid(story: Story) -> str:
    story.change("b", "rescued", seconds=0.9)
    return "0.9000 b: rescued 1"


def completed_by_two(story: Story) -> str:
    story.change("a", "lease_lost", to="completed")
    return "2.0000 a: completed 1"


def committed_twice(story: Story) -> str:
    story.effects = 2
    return "ends with Row(state='completed', attempts=1) and 2 effects"


def claimed_without_a_rescue(story: Story) -> str:
    story.remove("rescued")
    return "1.6000 b: claimed 1"


def counted_twice(story: Story) -> str:
    story.change("b", "claimed", attempt=3)
    return "1.6000 b: claimed 1 attempt=3"


def started_without_a_claim(story: Story) -> str:
    story.add(1.0, "c", "start", run="third")
    return "1.0000 c: start 1"


def completed_before_the_handler_returns(story: Story) -> str:
    story.change("test", "observed", seconds=1.65)
    return "1.6500 test: observed 1"


def completed_again(story: Story) -> str:
    story.add(2.3, "b", "completed", attempt=1)
    return "2.3000 b: completed 1"


def ends_as_another(story: Story) -> str:
    story.row = Row("failed", 1)
    return "ends with Row(state='failed', attempts=1)"


CHANGES = [
    rescued_while_the_lease_is_valid,
    completed_by_two,
    committed_twice,
    claimed_without_a_rescue,
    counted_twice,
    started_without_a_claim,
    completed_before_the_handler_returns,
    completed_again,
    ends_as_another,
]


@pytest.mark.parametrize("change", CHANGES)
def test_no_path_explains_what_is_wrong(change: Callable[[Story], str]) -> None:
    story = paused_and_rescued()
    expected = change(story)
    [text] = story.unexplained()
    assert text.startswith("job 1: ")
    assert expected in text


def test_without_the_fault_nothing_is_unrecorded() -> None:
    story = killed_before_it_reports()
    story.remove("fault")
    assert story.unexplained() == [
        "job 1: no step of the model explains 0.7000 test: observed 1 state=completed attempts=1"
    ]
