"""The maintenance loop of an idle Consumer sleeps until it is woken; here no timer would wake it."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import sqlalchemy as sa

from sqlaqueue import claim
from sqlaqueue.consumer import pace
from sqlaqueue.consumer.maintenance import state
from tests.consumer.bench import LATER, Bench, Server, await_listening, idle
from tests.consumer.test_leases import beats
from tests.programs import wait_until

pytestmark = pytest.mark.once


@pytest.fixture(autouse=True)
def sleeps_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "_SLEEPS_AFTER", 0.0)
    for interval in ("RESCUE", "HEARTBEAT", "RECONCILE"):
        monkeypatch.setattr(pace, interval, LATER)


def await_sleep(server: Server) -> None:
    await_listening(server)
    context = server.context
    assert context is not None
    wait_until(lambda: context.maintenance_sleeps and context.busy_since is None)


def test_a_claimed_job_wakes_it(leased: Bench) -> None:
    """The lease of the job is extended, though it is far shorter than the sleep."""
    go_on = threading.Event()

    async def work(io: Any, job: Any) -> None:
        await io.wait(go_on)

    with leased.consumer(work, lease=1, poll_interval=LATER).running() as server:
        await_sleep(server)
        [key] = leased.enqueue()
        wait_until(beats(leased, key, 3))
        go_on.set()
        wait_until(lambda: leased.states() == {"completed": 1})
    assert server.told("rescued", "lease_lost") == []


def test_expired_leases_are_rescued_without_a_notification(leased: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that has died sends none: the rescue timer wakes the loop."""
    monkeypatch.setattr(pace, "RESCUE", 0.5)
    with idle(leased).running() as server:
        await_sleep(server)
        # Twice: the notification of the first rescue sets the timer again.
        for number in (1, 2):
            with leased.sessions() as session:
                session.add(leased.Job())
                session.flush()
                job = session.execute(claim(leased.Job, 1)).scalars().one()
                job.lease_expires_at = sa.func.now() - sa.text("interval '1 s'")
                session.commit()
            wait_until(lambda number=number: leased.states() == {"completed": number})
    assert list(leased.attempts().values()) == [2, 2]


def test_a_lost_connection_wakes_it(mixed: Bench) -> None:
    """It sends another heartbeat, which shows whether the next connection receives notifications."""
    with idle(mixed).running() as server:
        await_sleep(server)
        assert mixed.database.kill_backends() > 0
        wait_until(lambda: not server.context.polls.peers.listening)
        await_listening(server)


def test_a_row_that_was_locked_at_the_last_extension_keeps_no_idle_loop_awake(
    leased: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    leased.enqueue()
    passed_over, rounds = threading.Event(), list[float]()

    async def work(io: Any, job: Any) -> None:
        job.payload = "written"
        await io.flush()
        await io.wait(passed_over)

    until_next = state.Maintenance.until_next

    def count(maintenance: state.Maintenance) -> float:
        if maintenance.locked:
            passed_over.set()
        wait = until_next(maintenance)
        rounds.append(wait)
        return wait

    monkeypatch.setattr(state.Maintenance, "until_next", count)
    with leased.consumer(work, lease=1, poll_interval=LATER).running() as server:
        wait_until(lambda: leased.states() == {"completed": 1})
        await_sleep(server)
        rounds.clear()
        assert passed_over.wait(0)
        # Some rounds are for the notifications of this moment; an overdue timer causes fifty in each second.
        time.sleep(2)
        assert len(rounds) < 20
