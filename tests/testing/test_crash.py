"""crash() leaves what a dead worker leaves, and the next run follows the rules for that."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
import sqlalchemy as sa

from sqlaqueue.exc import NotClaimableError
from sqlaqueue.queue.names import CRASH_JOURNAL
from tests.testing.app import App, send
from tests.testing.models import Base, DeletedWhenDone, LeasedEmail


def test_a_job_runs_again(app: App) -> None:
    email = app.add()
    app.crash(email)
    result = app.run(email)
    assert (result.state, result.outcome) == ("completed", "completed")
    assert app.sent == ["ada@example.com"]
    if result.job is not None:
        assert email.attempts == 2


def test_a_consumer_with_several_handlers_runs_it_as_well(app: App) -> None:
    email = app.add()
    app.crash(email)
    assert app.run(email, app.consumer(send, concurrency=4)).state == "completed"


def test_a_lease_stays_and_has_expired(leased: App) -> None:
    email = leased.add()
    leased.crash(email)
    assert (email.status, email.attempts) == ("processing", 1)
    assert email.lease_expires_at < datetime.now(UTC)
    assert email.claimed_by


def test_a_held_claim_is_rolled_back_and_the_journal_names_the_job(held: App) -> None:
    email = held.add()
    held.crash(email)
    assert email.attempts == 0
    journal = Base.metadata.tables[CRASH_JOURNAL]
    assert held.scalars(sa.select(journal.c["keys"])) == [[str(email.id)]]
    held.run(email)
    assert held.scalars(sa.select(journal.c["keys"])) == []


@pytest.mark.each_value
def test_a_job_that_always_crashes_fails(app: App) -> None:
    email = app.add()
    app.crash(email)
    app.crash(email)
    result = app.run(email)
    assert result.state == "failed"
    assert "died" in (result.error or "")
    assert app.sent == []


def test_a_job_without_an_attempt_left_cannot_crash(app: App) -> None:
    email = app.add()
    app.crash(email)
    app.crash(email)
    with pytest.raises(NotClaimableError, match=r"has no attempt left|is failed"):
        app.crash(email)
    if app.model in {LeasedEmail, DeletedWhenDone}:
        assert email.status == "failed"  # by the rescue
    else:
        assert app.run(email).state == "failed"


def test_other_jobs_are_not_affected(app: App) -> None:
    app.crash(app.add())
    app.add("bob@example.com")
    assert app.drain() == 2
    assert sorted(app.sent) == ["ada@example.com", "bob@example.com"]


def test_a_job_that_cannot_be_claimed(app: App) -> None:
    email = app.add(run_at=datetime.now(UTC) + timedelta(hours=1))
    with pytest.raises(NotClaimableError, match=r"crash\(\): .* is not due"):
        app.crash(email)
