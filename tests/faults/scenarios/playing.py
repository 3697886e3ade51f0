"""What the scenarios have in common."""

from __future__ import annotations

from collections.abc import Callable

from tests.faults.checker import Tables
from tests.faults.history import of
from tests.faults.scene import Process, Scene

Scenario = Callable[[Scene], None]

SCENARIOS: dict[str, Scenario] = {}
"""All scenarios, by the name of their function."""

ONLY = {
    "lost_its_messages": ("delete_returning",),
    "is_done_before_others": ("update_status",),
    "frozen_in_its_heartbeat": ("update_status",),
    "frozen_in_its_rescue": ("update_status",),
}
"""Those that can be played under some strategies alone."""

IN_TURN = {
    "requeued_by_plain_sql",
    "handled_together",
    "killed_with_several_claims",
    "kills_its_worker_of_three",
    "works_longer_than_its_lease",
}
"""Those that say little of a Consumer: each strategy plays them with one of the two, to save the time."""


def scenario(play: Scenario) -> Scenario:
    """Enter a scenario into the list."""
    SCENARIOS[play.__name__] = play
    return play


def attempts(scene: Scene, tables: Tables) -> set[int]:
    """Return the numbers of attempts that were counted: by the rows, and by what workers told of completed jobs."""
    told = {line.more["attempt"] for line in of(scene.lines(), "completed")}
    return told | {row.attempts for row in tables.rows.values()}


def enqueue_after_a_quick_one(scene: Scene, *payloads: str) -> None:
    """Add jobs that one claim takes together: under leases a worker claims more when it knows that they are quick."""
    scene.enqueue("quiet", priority=-9)
    scene.enqueue(*payloads, priority=0)


def await_handlers(scene: Scene, worker: Process, number: int = 1) -> None:
    """Wait until handlers of a worker have come to the gate."""
    scene.await_that(lambda: len(worker.said("waits")) >= number, "that the handlers wait")
