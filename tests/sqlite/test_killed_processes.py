"""Processes on one file, some of which are killed: nothing is lost, and no result of a lost run counts."""

from __future__ import annotations

import contextlib
import signal
import sqlite3
from typing import TYPE_CHECKING

import pytest

from tests.faults.scenarios import SCENARIOS, attempts, wait_for_handlers

if TYPE_CHECKING:
    from tests.sqlite.bench import SQLiteBench
    from tests.sqlite.conftest import MakeHarness

pytestmark = pytest.mark.once


@pytest.mark.each_value
@pytest.mark.parametrize(
    "scenario", ["no_faults", "killed_at_random", "handler_exits_process", "requeued_by_plain_sql"]
)
def test_guarantees_hold_under_faults(make_harness: MakeHarness, scenario: str) -> None:
    with make_harness() as harness:
        SCENARIOS[scenario](harness)


def test_a_worker_is_killed_while_its_handlers_run(make_harness: MakeHarness) -> None:
    """Its jobs were claimed together: they are rescued, run by another process, and no attempt is counted."""
    with make_harness() as harness:
        # A handler that had written would have the write lock until it returns.
        keys = harness.enqueue(*["quiet gated"] * 4)
        killed = harness.start_worker(concurrency=2, batch_size=2)
        wait_for_handlers(harness, killed, 2)
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        other = harness.start_worker(concurrency=2, batch_size=2)
        harness.open_gate()
        assert attempts(harness, harness.finish()) == {1}
        rescued = {record.key for record in other.records("rescued")}
        assert {record.key for record in killed.records("at gate")} <= rescued <= set(keys)


def test_a_worker_is_killed_while_it_has_the_write_lock(make_harness: MakeHarness) -> None:
    """What its handler wrote is gone, and the lock is free at once."""
    with make_harness() as harness:
        harness.enqueue("gated", "work", "work")
        killed = harness.start_worker()
        wait_for_handlers(harness, killed)
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        harness.enqueue("work")
        harness.open_gate()
        harness.start_worker()
        harness.finish()


def test_a_paused_worker_changes_nothing_when_it_resumes(make_harness: MakeHarness, bench: SQLiteBench) -> None:
    """Its jobs were rescued and run by another process in the meantime."""
    with make_harness() as harness:
        harness.enqueue("quiet gated")
        paused = harness.start_worker()
        wait_for_handlers(harness, paused)
        with contextlib.closing(sqlite3.connect(bench.file.path, timeout=30, isolation_level=None)) as other:
            # Not while its heartbeat has the write lock: no process could write until it resumes.
            other.execute("BEGIN IMMEDIATE")
            paused.send_signal(signal.SIGSTOP)
            other.execute("ROLLBACK")
        harness.open_gate()
        harness.start_worker()
        harness.wait_until_finished()
        paused.send_signal(signal.SIGCONT)
        harness.wait_until(lambda: paused.records("lease_lost"), "the paused worker loses its lease")
        harness.finish()
        assert not paused.records("completed")
