"""Races, lost connections and dead workers during a wait."""

from __future__ import annotations

from typing import Any

import pytest
from asyncpg.exceptions import InternalClientError
from sqlalchemy.orm import Session

import sqlaqueue
from sqlaqueue import claim, wait
from sqlaqueue.consumer import pace
from sqlaqueue.waiting import wait as wait_module
from tests.consumer.bench import LATER, Bench
from tests.consumer.waiting.waiter import (
    Gate,
    Waiter,
    enqueue_for_later,
    make_due,
    remembers,
    serving,
    settled_notifications,
)
from tests.programs import wait_until


@pytest.mark.usefixtures("no_polling")
def test_a_job_settled_between_the_first_poll_and_the_notification(
    leased: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    (key,) = leased.enqueue()
    notify = sqlaqueue.waiting.wait.notify_consumers

    def drained_before(session: Session, waiter: Any) -> None:
        leased.consumer().drain()
        notify(session, waiter)

    monkeypatch.setattr(sqlaqueue.waiting.wait, "notify_consumers", drained_before)
    # Without a poll after the notification the caller would never return.
    monkeypatch.setattr(wait_module, "FIRST_DELAY", LATER)
    assert wait(leased.sessions, (leased.Job, key), timeout=60).state == "completed"


@pytest.mark.usefixtures("no_polling")
def test_a_consumer_started_later_receives_an_announcement(mixed: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wait_module, "NOTIFY_INTERVAL", 0.2)
    key = enqueue_for_later(mixed)
    waiter = Waiter(mixed, (mixed.Job, key), timeout=60)
    gate = Gate()
    with serving(mixed, gate) as server:
        wait_until(lambda: remembers(server, key))
        make_due(mixed)
        gate.go_on.release()
        assert waiter.end().state == "completed"


@pytest.mark.usefixtures("no_polling")
def test_connections_lost_during_a_wait(mixed: Bench) -> None:
    gate = Gate()
    with serving(mixed, gate) as server:
        key = enqueue_for_later(mixed)
        waiter = Waiter(mixed, (mixed.Job, key), timeout=60)
        wait_until(lambda: remembers(server, key))
        mixed.database.kill_backends()
        make_due(mixed)
        gate.await_start()
        gate.go_on.release()
        assert waiter.end().state == "completed"


def test_an_internal_error_of_asyncpg_is_retried(leased: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that asyncpg raises for a connection closed between two statements; SQLAlchemy does not wrap it.

    It is simulated, as it depends on timing: the server's last message has been read, the end of the socket has not.
    """
    notify, errors = (
        sqlaqueue.waiting.wait.notify_consumers,
        [InternalClientError("another operation is in progress")],
    )

    def notify_with_error(session: Session, waiter: Any) -> None:
        if errors:
            raise errors.pop()
        notify(session, waiter)

    monkeypatch.setattr(sqlaqueue.waiting.wait, "notify_consumers", notify_with_error)
    (key,) = leased.enqueue()
    waiter = Waiter(leased, (leased.Job, key), timeout=60)
    wait_until(lambda: not errors)
    leased.consumer().drain()
    assert waiter.end().state == "completed"


def test_a_rescued_job_that_fails_for_good_ends_the_wait(leased: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "RESCUE", 0.1)
    (key,) = leased.enqueue(max_attempts=1)
    with leased.sessions() as session:
        session.scalars(claim(leased.Job, 1)).all()
        session.commit()
    with serving(leased, Gate()) as server:
        waiter = Waiter(leased, (leased.Job, key), timeout=60)
        wait_until(lambda: remembers(server, key))
        with settled_notifications(leased) as received:
            leased.execute("UPDATE job SET lease_expires_at = now()")
            result = waiter.end()
            assert received() == [f'settled ["{key}"]']
    assert result.state == "failed"
    assert result.error is not None
    assert "lease expired" in result.error
