"""The list of scenarios, and functions that several scenarios use."""

from __future__ import annotations

from collections.abc import Callable

from tests.faults.checker import Tables
from tests.faults.harness import Harness, Process
from tests.faults.history import with_event

Scenario = Callable[[Harness], None]

SCENARIOS: dict[str, Scenario] = {}
"""All scenarios by the name of their function."""

STRATEGIES_OF = {
    "messages_deleted": ("delete_returning",),
    "settled_while_other_job_runs": ("update_status",),
    "failed_batch_runs_longer_than_lease": ("update_status",),
    "paused_while_extending_leases": ("update_status",),
    "paused_while_rescuing": ("update_status",),
}
"""The strategies of the scenarios that do not apply to all."""

ONE_API = {
    "requeued_by_plain_sql",
    "batch_handler",
    "killed_with_several_claims",
    "handler_exits_process_with_concurrency",
    "handler_runs_longer_than_lease",
}
"""Scenarios that run with one API under each strategy, to save time: the API does not matter to them."""

CRASHES_SERVER = {"server_crashed"}
"""Scenarios that need a server of their own."""


def scenario(function: Scenario) -> Scenario:
    """Add a scenario to the list."""
    SCENARIOS[function.__name__] = function
    return function


def attempts(harness: Harness, tables: Tables) -> set[int]:
    """Return the distinct numbers of attempts, in rows and in ``completed`` events of jobs that leave no row."""
    completed = {record.details["attempt"] for record in with_event(harness.records(), "completed")}
    return completed | {row.attempts for row in tables.rows.values()}


def enqueue_after_short_job(harness: Harness, *payloads: str) -> None:
    """Enqueue jobs that one claim takes together: under a lease, a worker does so once it has run a short job."""
    harness.enqueue("quiet", priority=-9)
    harness.enqueue(*payloads, priority=0)


def wait_for_handlers(harness: Harness, worker: Process, number: int = 1) -> None:
    """Wait until handlers of a worker have arrived at the gate."""
    harness.wait_until(lambda: len(worker.records("at gate")) >= number, "handlers are at the gate")
