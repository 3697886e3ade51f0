"""Races, lost connections and dead workers while somebody waits for a job."""

from __future__ import annotations

from typing import Any

import pytest
from asyncpg.exceptions import InternalClientError
from sqlalchemy.orm import Session

import sqlaqueue
from sqlaqueue import claim, wait
from sqlaqueue.consumer.claiming import batch_size
from sqlaqueue.waiting import wait_state
from tests.consumer.bench import Bench, wait_until
from tests.consumer.hearing import LATER
from tests.consumer.waiting.waiter import Gate, Waiter, enqueue_for_later, heard, knows, make_due, serving


@pytest.mark.usefixtures("no_polling")
def test_the_job_ends_between_the_first_look_and_the_announcement(
    leased: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    (key,) = leased.enqueue()
    announce = sqlaqueue.waiting.job_end.announce

    def drained_before(session: Session, waiter: Any) -> None:
        leased.consumer().drain()
        announce(session, waiter)

    monkeypatch.setattr(sqlaqueue.waiting.job_end, "announce", drained_before)
    # Were there no look after the announcement, nobody would ever tell.
    monkeypatch.setattr(wait_state, "FIRST_PAUSE", LATER)
    assert wait(leased.sessions, (leased.Job, key), timeout=60).state == "completed"


@pytest.mark.usefixtures("no_polling")
def test_a_consumer_that_comes_later_learns_of_it(mixed: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wait_state, "REPEAT", 0.2)
    key = enqueue_for_later(mixed)
    waiter = Waiter(mixed, (mixed.Job, key), timeout=60)
    gate = Gate()
    with serving(mixed, gate) as server:
        wait_until(lambda: knows(server, key))
        make_due(mixed)
        gate.go_on.release()
        assert waiter.end().state == "completed"


@pytest.mark.usefixtures("no_polling")
def test_connections_are_lost_meanwhile(mixed: Bench) -> None:
    gate = Gate()
    with serving(mixed, gate) as server:
        key = enqueue_for_later(mixed)
        waiter = Waiter(mixed, (mixed.Job, key), timeout=60)
        wait_until(lambda: knows(server, key))
        mixed.database.kill_backends()
        make_due(mixed)
        gate.await_start()
        gate.go_on.release()
        assert waiter.end().state == "completed"


def test_the_driver_complains_of_itself(leased: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """What asyncpg says of a connection that was ended between two statements, which SQLAlchemy lets through as it is.

    It takes a moment that cannot be arranged: the server's last word has been read, the end of the socket has not.
    """
    announce, complaints = sqlaqueue.waiting.job_end.announce, [InternalClientError("another operation is in progress")]

    def announce_at_a_bad_time(session: Session, waiter: Any) -> None:
        if complaints:
            raise complaints.pop()
        announce(session, waiter)

    monkeypatch.setattr(sqlaqueue.waiting.job_end, "announce", announce_at_a_bad_time)
    (key,) = leased.enqueue()
    waiter = Waiter(leased, (leased.Job, key), timeout=60)
    wait_until(lambda: not complaints)
    leased.consumer().drain()
    assert waiter.end().state == "completed"


def test_a_rescued_job_that_fails_for_good_is_an_end(leased: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_size, "SWEEP", 0.1)
    (key,) = leased.enqueue(max_attempts=1)
    with leased.sessions() as session:
        session.scalars(claim(leased.Job, 1)).all()
        session.commit()
    with serving(leased, Gate()) as server:
        waiter = Waiter(leased, (leased.Job, key), timeout=60)
        wait_until(lambda: knows(server, key))
        with heard(leased) as said:
            leased.execute("UPDATE job SET lease_expires_at = now()")
            result = waiter.end()
            assert said() == [f'settled ["{key}"]']
    assert result.state == "failed"
    assert result.error is not None
    assert "lease expired" in result.error
