"""enqueued() returns the jobs that the test's transaction has enqueued, however it did."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session, sessionmaker

from sqlaqueue import claim, copy_in, requeue
from sqlaqueue.exc import NotAQueueError, StatementError
from sqlaqueue.testing import crash, drain, enqueued, run_job, travel
from tests.testing.app import App, Base, DeletedWhenDone, HeldEmail, LeasedEmail, OwnMessage, Sent, send


def test_by_columns(app: App) -> None:
    ada, bob = app.add(), app.add("bob@example.com", extra={"cc": ["eve"]})
    assert app.enqueued() == [ada, bob]
    assert app.enqueued(to="ada@example.com") == [ada]
    assert app.enqueued(extra={"cc": ["eve"]}) == [bob]
    assert app.enqueued(to="ada@example.com", extra={"cc": ["eve"]}) == []
    assert app.enqueued(sa.select(app.model).where(app.model.to.startswith("bob"))) == [bob]


def test_a_failed_assertion_shows_what_is_enqueued_instead(leased: App) -> None:
    for number in range(7):
        leased.add(f"{number}@example.com")
    with pytest.raises(AssertionError, match=r"\[\], but 7 with to='0@example.com'; to='1@.*; \.\.\."):
        assert leased.enqueued(to="ada@example.com")
    assert leased.enqueued(to="ada@example.com") == []
    assert repr(leased.enqueued(DeletedWhenDone, to="ada@example.com")) == "[]"


def test_changes_by_statements_are_seen(leased: App) -> None:
    leased.add()
    leased.call(lambda session: session.execute(sa.text("UPDATE leased_email SET \"to\" = 'bob@example.com'")))
    assert len(leased.enqueued(to="bob@example.com")) == 1


def test_jobs_that_are_due_later(app: App) -> None:
    email = app.add(run_at=datetime.now(UTC) + timedelta(days=1))
    assert app.enqueued() == [email]


def test_jobs_that_have_run_wait_no_more(app: App) -> None:
    app.run(app.add())
    assert app.enqueued() == []


def commit(session: Session) -> None:
    session.add(LeasedEmail(to="x"))
    session.commit()


def use_savepoints(session: Session) -> None:
    with session.begin_nested(), session.begin_nested():
        session.add(LeasedEmail(to="x"))
    undone = session.begin_nested()
    session.add(LeasedEmail(to="undone"))
    session.flush()
    undone.rollback()


def use_another_session(session: Session) -> None:
    with Session(session.connection(), join_transaction_mode="create_savepoint") as other:
        other.add(LeasedEmail(to="x"))
        other.commit()


WAYS: dict[str, Callable[[Session], object]] = {
    "orm": lambda session: session.add(LeasedEmail(to="x")),
    "commit": commit,
    "savepoints": use_savepoints,
    "bulk": lambda session: session.execute(sa.insert(LeasedEmail), [{"to": "x", "extra": {}}]),
    "sql": lambda session: session.execute(sa.text("INSERT INTO leased_email (\"to\", extra) VALUES ('x', '{}')")),
    "another session": use_another_session,
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_enqueue(leased: App, way: str) -> None:
    leased.call(WAYS[way])
    assert [email.to for email in leased.enqueued()] == ["x"]


def test_copied_jobs(session: Session) -> None:
    copy_in(session, LeasedEmail, [{"to": "x", "extra": {}}])
    assert [email.to for email in enqueued(session, LeasedEmail)] == ["x"]


@pytest.fixture
def earlier(engine: sa.Engine) -> Any:
    """Jobs that were committed before the test's transaction, while another one is open."""
    with Session(engine) as session, Session(engine) as other:
        jobs = [
            LeasedEmail(to="earlier"),
            LeasedEmail(to="done", status="completed"),
            LeasedEmail(to="later", run_at=datetime.now(UTC) + timedelta(hours=1)),
        ]
        session.add_all(jobs)
        session.commit()
        other.add(LeasedEmail(to="unseen"))
        other.flush()
        yield
        other.rollback()
        session.execute(sa.delete(LeasedEmail))
        session.commit()


@pytest.mark.usefixtures("earlier")
def test_earlier_jobs_are_left_out_and_requeued_ones_are_not(engine: sa.Engine) -> None:
    with Session(engine) as session:
        session.add(LeasedEmail(to="mine"))
        assert [email.to for email in enqueued(session, LeasedEmail)] == ["mine"]
        # Another transaction that begins and ends later.
        with Session(engine) as other:
            other.add(LeasedEmail(to="later"))
            other.commit()
        assert [email.to for email in enqueued(session, LeasedEmail)] == ["mine"]
        session.execute(requeue(sa.select(LeasedEmail).where(LeasedEmail.to == "done")))
        assert {email.to for email in enqueued(session, LeasedEmail)} == {"mine", "done"}


@pytest.mark.usefixtures("earlier")
def test_earlier_jobs_are_left_out_when_time_passes_or_they_run(session: Session) -> None:
    earlier = session.scalars(sa.select(LeasedEmail).where(LeasedEmail.to == "earlier")).one()
    assert enqueued(session, LeasedEmail) == []
    travel(session, 60)
    assert enqueued(session, LeasedEmail) == []
    assert run_job(session, earlier, send).outcome == "retried"
    assert enqueued(session, LeasedEmail) == []
    travel(session, 3600)
    crash(session, earlier)
    assert enqueued(session, LeasedEmail) == []
    session.rollback()
    # A new transaction; the connection may be the same.
    session.add(LeasedEmail(to="mine"))
    assert [email.to for email in enqueued(session, LeasedEmail)] == ["mine"]


@pytest.mark.usefixtures("earlier")
def test_earlier_jobs_are_left_out_in_other_sessions_and_when_they_are_rescued(engine: sa.Engine) -> None:
    with Session(engine) as session:
        running = LeasedEmail(to="running", status="processing", lease_expires_at=datetime(2000, 1, 1, tzinfo=UTC))
        session.add(running)
        session.commit()
    with engine.connect() as connection:
        sessions = sessionmaker(connection, join_transaction_mode="create_savepoint")
        transaction = connection.begin()
        with sessions() as one:
            travel(one, 60)
            one.commit()
        with sessions() as two:
            assert enqueued(two, LeasedEmail) == []
            two.add(mine := LeasedEmail(to="mine@example.com"))
            assert run_job(two, mine, send).state == "completed"
            assert two.scalars(sa.select(LeasedEmail.status).where(LeasedEmail.to == "running")).all() == ["pending"]
            assert enqueued(two, LeasedEmail) == []
        transaction.rollback()


def test_a_key_that_is_used_again(engine: sa.Engine) -> None:
    with Session(engine) as session:
        session.add(OwnMessage(id=5, to="a@b"))
        session.commit()
    with Session(engine) as session:
        assert drain(session, OwnMessage, send) == 1
        session.add(again := OwnMessage(id=5, to="a@b"))
        assert enqueued(session, OwnMessage) == [again]
    with engine.begin() as connection:
        connection.execute(sa.delete(OwnMessage))


def test_many_earlier_jobs(engine: sa.Engine) -> None:
    """It took seconds for each thousand, as each job was compared with each."""
    with Session(engine) as session:
        session.execute(sa.insert(LeasedEmail), [{"to": "x", "extra": {}}] * 5_000)
        session.commit()
    with Session(engine) as session:
        session.add(mine := LeasedEmail(to="mine"))
        session.execute(sa.text("SET LOCAL statement_timeout = '10s'"))
        travel(session, 1)
        assert enqueued(session, LeasedEmail) == [mine]
    with engine.begin() as connection:
        connection.execute(sa.delete(LeasedEmail))


def test_a_transaction_that_has_written_nothing(session: Session) -> None:
    assert enqueued(session, LeasedEmail) == []


def test_claimed_jobs_of_a_held_transaction_still_wait(session: Session) -> None:
    session.add(email := HeldEmail(to="x"))
    session.execute(claim(HeldEmail, 1)).all()
    assert enqueued(session, HeldEmail) == [email]


def test_wrong_arguments(session: Session) -> None:
    with pytest.raises(StatementError, match=r"the class has no attribute 'too'; it has .*to"):
        enqueued(session, LeasedEmail, too="ada@example.com")
    with pytest.raises(NotAQueueError, match="Sent"):
        enqueued(session, Sent)
    with pytest.raises(NotAQueueError):
        enqueued(session, Base)
    with pytest.raises(NotAQueueError, match="is not a mapped class; give the class LeasedEmail"):
        enqueued(session, LeasedEmail(to="ada@example.com"))  # type: ignore[call-overload]  # that is the mistake
