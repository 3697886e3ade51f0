"""A keeper that has nothing to do sleeps until somebody wakes it: here nothing else would."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import sqlalchemy as sa

from sqlaqueue import claim
from sqlaqueue.consumer import context
from sqlaqueue.consumer.claiming import batch_size
from tests.consumer.bench import Bench, Server, wait_until
from tests.consumer.hearing import LATER, await_hearing, idle
from tests.consumer.test_leases import beats

pytestmark = pytest.mark.once


@pytest.fixture(autouse=True)
def dozing_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "_AFTER_WORK", 0.0)
    for duty in ("SWEEP", "CHECK_IN", "RECONCILE"):
        monkeypatch.setattr(batch_size, duty, LATER)


def await_dozing(server: Server) -> None:
    await_hearing(server)
    shift = server.consumer._shift
    assert shift is not None
    wait_until(lambda: context.crew.keeper_dozes and context.crew.busy_since is None)


def test_work_wakes_it(leased: Bench) -> None:
    """The lease of a job is extended, though it is far shorter than a doze."""
    go_on = threading.Event()

    async def work(hands: Any, job: Any) -> None:
        await hands.wait(go_on)

    with leased.consumer(work, lease=1, poll_interval=LATER).running() as server:
        await_dozing(server)
        [key] = leased.enqueue()
        wait_until(beats(leased, key, 3))
        go_on.set()
        wait_until(lambda: leased.states() == {"completed": 1})
    assert server.told("rescued", "lease_lost") == []


def test_it_is_told_when_nobody_sweeps(leased: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has died said nothing: what is not heard wakes it."""
    monkeypatch.setattr(batch_size, "SWEEP", 0.5)
    with idle(leased).running() as server:
        await_dozing(server)
        with leased.sessions() as session:
            session.add(leased.Job())
            session.flush()
            session.execute(claim(leased.Job, 1)).scalars().one()
            session.execute(sa.update(leased.Job).values(lease_expires_at=sa.func.now() - sa.text("interval '1 s'")))
            session.commit()
        wait_until(lambda: leased.states() == {"completed": 1})
    assert list(leased.attempts().values()) == [2]


def test_a_lost_connection_wakes_it(mixed: Bench) -> None:
    """It checks in again, to learn whether it hears by the next one."""
    with idle(mixed).running() as server:
        await_dozing(server)
        assert mixed.database.kill_backends() > 0
        wait_until(lambda: not server.consumer._shift.calls.hears)
        await_hearing(server)
