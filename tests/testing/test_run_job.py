"""run_job() follows the rules of a Consumer in the test's transaction, and crash() leaves what a dead worker leaves."""

import time
from datetime import UTC, datetime, timedelta
from typing import Any
from unittest import mock

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from sqlaqueue import AsyncConsumer, Cancel, Constant, Consumer, Fail, Retry, Snooze, pause, resume
from sqlaqueue.exc import (
    ConfigurationError,
    DatabaseNotReadyError,
    HandlerMisuseError,
    JobFailed,
    JobTimeout,
    NotAQueueError,
    NotClaimableError,
    StatementError,
    TransactionLostError,
)
from sqlaqueue.queue.names import CRASH_JOURNAL
from sqlaqueue.testing import async_drain, async_run_job, drain, run_job
from tests.testing.app import (
    App,
    AsyncApp,
    Base,
    DeletedWhenDone,
    Email,
    HeldEmail,
    LeasedEmail,
    OwnMessage,
    Sent,
    send,
)

# Of the applications of `app`: sync and async, each with three strategies.
pytestmark = pytest.mark.few(3)


def test_a_success(app: App) -> None:
    email = app.add()
    result = app.run(email)
    assert (result.state, result.outcome, result.error, result.delay, result.exception) == (
        ("completed", "completed", None, None, None)
    )
    assert app.sent == ["ada@example.com"]
    if app.model in {DeletedWhenDone, OwnMessage}:
        assert result.job is None
        assert app.scalars(sa.select(app.model)) == []
        assert email.to == "ada@example.com"  # it keeps what it had
    else:
        assert result.job is email
        assert (email.status, email.attempts) == ("completed", 1)


def test_a_failure_is_retried_with_its_backoff_and_its_writes_are_undone(app: App) -> None:
    email = app.add("nobody")
    before = datetime.now(UTC)
    result = app.run(email)
    assert (result.state, result.outcome, result.error, result.delay) == (
        "pending",
        "retried",
        "ValueError: nobody",
        60,
    )
    assert isinstance(result.exception, ValueError)
    assert result.exception.__traceback__ is not None
    assert result.job is email
    assert email.attempts == 1
    assert timedelta(seconds=50) < email.run_at - before < timedelta(seconds=90)
    assert app.sent == []


def test_the_last_failure_is_final(app: App) -> None:
    email = app.add("nobody")
    app.run(email)
    app.travel(60)
    (email,) = app.enqueued()
    result = app.run(email)
    assert (result.state, result.outcome, result.error) == ("failed", "failed", "ValueError: nobody")
    assert app.sent == []
    assert app.enqueued() == []


@pytest.mark.parametrize(
    ("raised", "state", "outcome", "delay", "error"),
    [
        (Retry(5), "pending", "retried", 5, None),
        (Snooze(7), "pending", "released", 7, None),
        (Fail("no stock"), "failed", "failed", None, "Fail: no stock"),
        (Cancel("not needed"), "cancelled", "cancelled", None, "not needed"),
    ],
    ids=["retry", "snooze", "fail", "cancel"],
)
def test_the_exceptions_that_settle(
    app: App, raised: Exception, state: str, outcome: str, delay: float | None, error: str | None
) -> None:
    def handle(session: Session, email: Email) -> None:
        session.add(Sent(to=email.to))
        raise raised

    result = app.run(app.add(), handle)
    assert (result.state, result.outcome, result.delay, result.error) == (state, outcome, delay, error)
    assert result.exception is raised
    assert app.sent == []


def test_a_job_that_is_due_again_at_once_has_run_once(app: App) -> None:
    def retry(session: Session, email: Email) -> None:
        raise Retry(0)

    email = app.add()
    assert app.run(email, retry).outcome == "retried"
    assert email.attempts == 1


def test_a_failure_can_be_raised(app: App) -> None:
    assert app.run(app.add(), check=True).state == "completed"
    with pytest.raises(JobFailed, match=r"\d+: the run ended as retried, and the job is pending: ValueError") as raised:
        app.run(app.add("nobody"), check=True)
    assert isinstance(raised.value.__cause__, ValueError)
    assert raised.value.result.state == "pending"


def test_mocks_are_handlers(session: Session) -> None:
    session.add(email := LeasedEmail(to="ada@example.com"))
    handler = mock.Mock(return_value=None)
    assert run_job(session, email, handler, check=True).state == "completed"
    handler.assert_called_once()


def test_an_async_test_may_run_a_sync_handler(async_leased: AsyncApp) -> None:
    wait_for, session, email = async_leased.wait_for, async_leased.session, async_leased.add()
    assert wait_for(async_run_job(session, email, send)).state == "completed"
    assert email.status == "completed"
    async_leased.add()
    assert wait_for(async_drain(session, LeasedEmail, Consumer(LeasedEmail, send, Session))) == 1
    assert async_leased.sent == ["ada@example.com"] * 2


def test_async_mocks_are_handlers(async_leased: AsyncApp) -> None:
    handler = mock.AsyncMock(return_value=None)
    async_leased.wait_for(async_run_job(async_leased.session, async_leased.add(), handler, check=True))
    handler.assert_awaited_once()


def test_a_snooze_costs_no_attempt(app: App) -> None:
    def snooze(session: Session, email: Email) -> None:
        raise Snooze(1)

    email = app.add()
    app.run(email, snooze)
    assert email.attempts == 0


def test_the_handler_sees_the_job_as_in_a_consumer(app: App) -> None:
    seen: list[Any] = []

    def look(session: Session, email: Email) -> None:
        seen.append((email.attempts, getattr(email, "status", None), email in session, email.to))

    email = app.add()
    app.run(email, look)
    status = None if app.model is OwnMessage else "processing"
    assert seen == [(1, status, app.model is not OwnMessage, "ada@example.com")]


def test_a_change_of_the_job_is_kept(app: App) -> None:
    def change(session: Session, email: Email) -> None:
        email.to = "bob@example.com"
        raise Retry(0) if app.model is OwnMessage else Cancel

    email = app.add()
    app.run(email, change)
    assert email.to == "ada@example.com"  # undone with the handler's writes

    def keep(session: Session, other: Email) -> None:
        other.extra = {"seen": True}

    email = app.add()
    app.run(email, keep)
    if app.model not in {DeletedWhenDone, OwnMessage}:
        assert email.extra == {"seen": True}


def test_pending_changes_are_flushed(app: App) -> None:
    email = app.model(to="ada@example.com")
    app.session.add(email)
    assert app.run(email).state == "completed"


def test_a_handler_under_a_lease_may_commit(leased: App) -> None:
    def commit(session: Session, email: Email) -> None:
        session.add(Sent(to="first"))
        session.commit()
        session.add(Sent(to="second"))
        session.flush()
        raise ValueError

    result = leased.run(leased.add(), commit)
    assert result.outcome == "retried"
    assert leased.sent == ["first"]


def test_a_handler_in_a_held_transaction_may_not_commit(held: App) -> None:
    def commit(session: Session, email: Email) -> None:
        session.add(Sent(to="first"))
        session.commit()

    result = held.run(held.add(), commit)
    assert (result.outcome, held.sent) == ("retried", [])
    assert isinstance(result.exception, HandlerMisuseError)


@pytest.mark.parametrize("statement", ["COMMIT", "ROLLBACK", "/* done */ commit and chain"])
def test_a_statement_that_ends_the_transaction_is_refused(app: App, statement: str) -> None:
    def end(session: Session, email: Email) -> None:
        session.add(Sent(to="first"))
        session.flush()
        session.execute(sa.text(statement))

    result = app.run(app.add(), end)
    assert result.outcome == "retried"
    assert "a handler ended its transaction by the statement" in str(result.exception)
    assert app.sent == []


@pytest.mark.parametrize("end", ["commit", "rollback", "close"])
def test_the_end_of_the_connections_transaction_is_refused(app: App, end: str) -> None:
    def end_connection(session: Session, email: Email) -> None:
        session.add(Sent(to="first"))
        session.flush()
        getattr(session.connection(), end)()

    email = app.add()
    result = app.run(email, end_connection)
    assert result.outcome == "retried"
    assert f"a handler ended its transaction by session.connection().{end}()" in str(result.exception)
    assert app.sent == []


def test_the_end_of_the_transactions_object_is_reported(engine: sa.Engine) -> None:
    def roll_back(session: Session, email: Email) -> None:
        transaction = session.connection().get_transaction()
        assert transaction is not None
        transaction.rollback()

    with Session(engine) as session:
        session.add(email := LeasedEmail(to="ada@example.com"))
        with pytest.raises(HandlerMisuseError, match="by the object of the connection's transaction"):
            run_job(session, email, roll_back)


def test_a_handler_that_rolls_a_held_transaction_back(held: App) -> None:
    def roll_back(session: Session, email: Email) -> None:
        session.rollback()

    email = held.add()
    result = held.run(email, roll_back)
    assert result.outcome == "retried"
    assert isinstance(result.exception, HandlerMisuseError)
    assert email.attempts == 1


def test_the_test_may_go_on_after_an_error_of_the_database(app: App) -> None:
    def divide(session: Session, email: Email) -> None:
        session.execute(sa.text("SELECT 1 / 0"))

    result = app.run(app.add(), divide)
    assert result.outcome == "retried"
    assert "division by zero" in (result.error or "")
    assert app.sent == []


def test_a_run_that_has_lost_its_lease_changes_nothing(leased: App) -> None:
    email = leased.add()
    key = email.id

    def lose(session: Session, email: Email) -> None:
        session.add(Sent(to="late"))
        session.flush()
        table = sa.inspect(LeasedEmail).local_table
        session.execute(sa.update(table).values(lease_token=sa.func.gen_random_uuid()).where(table.c.id == key))
        session.commit()
        session.add(Sent(to="later"))

    result = leased.run(email, lose)
    assert result.outcome == "lease_lost"
    assert result.state == "processing"
    assert leased.sent == ["late"]


def test_a_consumer_brings_its_options(app: App) -> None:
    email = app.add("nobody")
    events = []
    consumer = app.consumer(send, retry=Constant(5, jitter=0), concurrency=3)
    consumer.on("retried", events.append)
    result = app.run(email, consumer)
    assert result.delay == 5
    assert [event.delay for event in events] == [5]


def test_a_batch_consumer_gets_a_list(app: App) -> None:
    seen = []

    def batch(session: Session, emails: list[Email]) -> None:
        seen.append([email.to for email in emails])

    assert app.run(app.add(), app.consumer(batch, batch=True)).state == "completed"
    assert seen == [["ada@example.com"]]


def test_a_timeout_counts(app: App) -> None:
    def wait(session: Session, email: Email) -> None:
        time.sleep(0.2)

    result = app.run(app.add(), app.consumer(wait, timeout=0.1))
    assert result.outcome == "retried"
    assert isinstance(result.exception, JobTimeout)


# -- what is refused -----------------------------------------------------------------------------------------------


def test_a_job_that_is_not_due(app: App) -> None:
    email = app.add(run_at=datetime.now(UTC) + timedelta(hours=1))
    with pytest.raises(NotClaimableError, match=r"is not due for .*; travel\(session, \d+\) moves it there"):
        app.run(email)
    app.travel(timedelta(hours=1))
    assert app.run(email).state == "completed"


def test_a_job_that_has_ended(leased: App) -> None:
    email = leased.add()
    leased.run(email)
    with pytest.raises(NotClaimableError, match=r"LeasedEmail \d+ is completed, so no worker claims it"):
        leased.run(email)


def test_a_job_that_runs(leased: App) -> None:
    email = leased.add()
    leased.call(lambda session: session.execute(sa.update(LeasedEmail).values(status="processing")))
    with pytest.raises(NotClaimableError, match="is already claimed and its run has not ended"):
        leased.run(email)


def test_a_paused_queue(app: App) -> None:
    email = app.add()
    app.call(lambda session: session.execute(pause(app.model)))
    with pytest.raises(NotClaimableError, match=r"its queue is paused; session\.execute\(resume\("):
        app.run(email)
    app.call(lambda session: session.execute(resume(app.model)))
    assert app.run(email).state == "completed"


def test_a_job_that_the_consumer_does_not_serve(leased: App) -> None:
    email = leased.add("bob@example.com")
    consumer = leased.consumer(send)
    other = type(consumer)(
        sa.select(LeasedEmail).where(LeasedEmail.to == "ada@example.com"), consumer.handler, consumer.session_factory
    )
    with pytest.raises(NotClaimableError, match="the Consumer's select leaves it out"):
        leased.run(email, other)


def test_wrong_arguments(engine: sa.Engine) -> None:
    with Session(engine) as session, Session(engine) as other:
        email = LeasedEmail(to="ada@example.com")
        with pytest.raises(StatementError, match="is not in the database yet"):
            run_job(session, email, send)
        other.add(email)
        with pytest.raises(StatementError, match="belongs to another session"):
            run_job(session, email, send)
        with pytest.raises(NotAQueueError, match="takes instances of a queue class"):
            run_job(session, Sent(to="ada"), send)
        with pytest.raises(NotAQueueError, match=r"run_job\(\): this is a list; give one job, and call it for each"):
            run_job(session, [email], send)
        with pytest.raises(ConfigurationError, match=r"give a Session, as in"):
            run_job(engine, email, send)  # type: ignore[arg-type]  # that is the mistake
        other.flush()
        with pytest.raises(ConfigurationError, match=r"is called as no_parameters\(session, job\)"):
            run_job(other, email, no_parameters)


def no_parameters() -> None:
    """Cannot be called with a session and a job."""


def test_a_coroutine_function_needs_an_async_session(engine: sa.Engine) -> None:
    async def asend(session: Any, email: Email) -> None: ...

    with Session(engine) as session:
        session.add(email := LeasedEmail(to="ada@example.com"))
        for handler in (asend, {LeasedEmail: asend}, AsyncConsumer(LeasedEmail, asend, AsyncSession)):
            with pytest.raises(ConfigurationError, match=r"use async_run_job\(\) with an AsyncSession"):
                run_job(session, email, handler)


def test_a_consumer_of_another_queue(session: Session) -> None:
    session.add(LeasedEmail(to="ada@example.com"))
    with pytest.raises(ConfigurationError, match="it works for HeldEmail, and not for these jobs"):
        drain(session, LeasedEmail, Consumer(HeldEmail, send, Session))
    with pytest.raises(ConfigurationError, match="the Consumer chooses its jobs itself; give the class"):
        drain(session, sa.select(LeasedEmail), Consumer(LeasedEmail, send, Session))


def test_a_missing_table_is_named(engine: sa.Engine) -> None:
    with engine.connect() as connection, Session(connection) as session:
        session.add(email := LeasedEmail(to="ada@example.com"))
        session.flush()
        session.execute(sa.text("DROP TABLE sqlaqueue_control CASCADE"))
        with pytest.raises(DatabaseNotReadyError, match="run `alembic upgrade head`"):
            run_job(session, email, send)


def test_a_lost_connection_is_reported(leased: App) -> None:
    def end(session: Session, email: Email) -> None:
        session.execute(sa.text("SELECT pg_terminate_backend(pg_backend_pid())"))

    with pytest.raises(TransactionLostError, match="has to be tested with committed jobs"):
        leased.run(leased.add(), end)


def test_an_interrupt_in_a_handler_ends_the_test(app: App) -> None:
    def interrupt(session: Session, email: Email) -> None:
        raise KeyboardInterrupt

    def fail(session: Session, email: Email) -> None:
        pytest.fail("the test is over")

    email = app.add()
    with pytest.raises(KeyboardInterrupt):
        app.run(email, interrupt)
    with pytest.raises(pytest.fail.Exception, match="the test is over"):
        app.run(app.add(), fail)


def test_an_exit_is_a_failed_attempt(app: App) -> None:
    def leave(session: Session, email: Email) -> None:
        raise SystemExit(3)

    assert app.run(app.add(), leave).outcome == "retried"


# -- after crash() -------------------------------------------------------------------------------------------------


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
