"""drain() runs all due jobs, and with scheduled=True those that are due later."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue import JobFailed, Snooze, pause
from tests.testing.app import App, send
from tests.testing.models import Email, LeasedEmail, Sent


def test_all_due_jobs_run(app: App) -> None:
    for number in range(5):
        app.add(f"{number}@example.com")
    app.add("nobody")
    app.add("later@example.com", run_at=datetime.now(UTC) + timedelta(hours=1))
    assert app.drain() == 6
    assert app.sent == [f"{number}@example.com" for number in range(5)]
    assert {email.to for email in app.enqueued()} == {"nobody", "later@example.com"}
    assert app.drain() == 0


@pytest.mark.each_value
def test_scheduled_jobs_run_as_well(app: App) -> None:
    app.add("nobody")
    app.add("later@example.com", run_at=datetime.now(UTC) + timedelta(hours=1))
    app.add()
    assert app.drain(scheduled=True) == 4
    assert app.sent == ["ada@example.com", "later@example.com"]
    assert app.enqueued() == []


def test_jobs_that_a_handler_enqueues(app: App) -> None:
    def follow(session: Session, email: Email) -> None:
        session.add(Sent(to=email.to))
        if email.to == "first":
            session.add(type(email)(to="second"))

    app.add("first")
    assert app.drain(follow) == 2
    assert app.sent == ["first", "second"]


def test_some_jobs_of_a_queue(app: App) -> None:
    app.add()
    app.add("bob@example.com")
    assert app.drain(model=sa.select(app.model).where(app.model.to == "bob@example.com")) == 1
    assert app.sent == ["bob@example.com"]


@pytest.mark.each_value
def test_a_batch(app: App) -> None:
    sizes = []

    def batch(session: Session, emails: list[Email]) -> None:
        sizes.append(len(emails))
        session.add_all([Sent(to=email.to) for email in emails])

    for number in range(3):
        app.add(str(number))
    assert app.drain(app.consumer(batch, batch=True)) == 3
    assert sum(sizes) == 3
    assert max(sizes) > 1
    assert app.sent == ["0", "1", "2"]


def test_one_bad_job_of_a_batch(app: App) -> None:
    def batch(session: Session, emails: list[Email]) -> None:
        session.add_all([Sent(to=email.to) for email in emails])
        session.flush()
        if any(email.to == "bad" for email in emails):
            raise ValueError

    for to in ("a", "bad", "c"):
        app.add(to)
    app.drain(app.consumer(batch, batch=True))
    assert sorted(app.sent) == ["a", "c"]
    assert [email.to for email in app.enqueued()] == ["bad"]


def test_a_paused_queue_is_left_alone(app: App) -> None:
    app.add()
    app.call(lambda session: session.execute(pause(app.model)))
    assert app.drain(scheduled=True) == 0


def test_a_handler_without_an_end_is_an_error(leased: App) -> None:
    def snooze(session: Session, email: Email) -> None:
        raise Snooze(0)

    email = leased.add()
    before = email.run_at
    with pytest.raises(AssertionError, match=r"21 runs have come to no end, 21 of them of LeasedEmail \d+; does a h"):
        leased.drain(snooze, limit=20)
    assert email.run_at > before


def test_a_handler_that_enqueues_its_successor_is_an_error(leased: App) -> None:
    def follow(session: Session, email: Email) -> None:
        session.add(LeasedEmail(to="next", run_at=datetime.now(UTC) + timedelta(days=1)))

    leased.add()
    assert leased.drain(follow) == 1
    with pytest.raises(AssertionError, match=r"For more than 10 runs give (async_)?drain\(\.\.\., limit=\.\.\.\)"):
        leased.drain(follow, scheduled=True, limit=10)


def test_failures_can_be_raised(app: App) -> None:
    app.add()
    assert app.drain(check=True) == 1
    app.add("nobody")
    with pytest.raises(JobFailed, match="the run ended as retried, and the job is pending: ValueError") as raised:
        app.drain(check=True)
    assert isinstance(raised.value.__cause__, ValueError)
    assert raised.value.result.state == "pending"


def test_a_rescued_job_that_completes_is_no_failure(leased: App) -> None:
    leased.crash(leased.add())
    assert leased.drain(check=True) == 1
    email = leased.add()
    for _ in range(2):
        leased.crash(email)
    with pytest.raises(JobFailed, match="the lease expired: its worker died"):
        leased.drain(check=True)


def test_an_interrupt_ends_it(app: App) -> None:
    calls: list[Any] = []

    def interrupt(session: Session, email: Email) -> None:
        calls.append(email)
        raise KeyboardInterrupt

    app.add()
    with pytest.raises(KeyboardInterrupt):
        app.drain(interrupt)
    assert len(calls) == 1


def test_each_class_has_its_handler(leased: App) -> None:
    leased.add()
    assert leased.drain({LeasedEmail: send}) == 1
    assert leased.sent == ["ada@example.com"]


def test_a_job_whose_lease_has_expired_is_rescued(leased: App) -> None:
    email = leased.add()
    leased.crash(email)
    assert leased.drain() == 1
    assert email.attempts == 2


def test_instances_whose_rows_are_gone_do_not_disturb(app: App) -> None:
    emails = [app.add(), app.add(run_at=datetime.now(UTC) + timedelta(days=1))]
    assert app.drain(scheduled=True) == 2
    assert [email.to for email in emails] == ["ada@example.com"] * 2


def test_a_job_that_no_handler_takes_does_not_hide_later_ones(app: App) -> None:
    """Of a select, as a worker of a newer version leaves other classes alone."""
    app.add("left", run_at=datetime.now(UTC) + timedelta(hours=1))
    app.add("taken@b", run_at=datetime.now(UTC) + timedelta(hours=2))
    assert app.drain(model=sa.select(app.model).where(app.model.to == "taken@b"), scheduled=True) == 1
    assert [email.to for email in app.enqueued()] == ["left"]


def test_a_parked_job_is_never_due(app: App) -> None:
    app.add(run_at=datetime(9999, 12, 31, tzinfo=UTC))
    app.add()
    assert app.drain(scheduled=True) == 1
    assert len(app.enqueued()) == 1
