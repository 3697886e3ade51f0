"""An attempt is in the history if and only if its settlement is committed; no job stays unsettled for the history."""

import logging
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue import Cancel, Fail, Snooze, claim
from sqlaqueue.consumer.context import ConsumerContext
from sqlaqueue.consumer.outcomes import COMPLETED, RELEASED, FinishedRun
from sqlaqueue.consumer.settle import TRACEBACK_LIMIT, traceback_text
from sqlaqueue.exc import DatabaseNotReadyError
from sqlaqueue.mapping.runs import run_of
from sqlaqueue.queue.run import Run
from tests.consumer.bench import lose_at_commit
from tests.contexts import make_context
from tests.history.conftest import INSERT, HistoryQueue, obey
from tests.programs import wait_until


def claimed_run(job: Any) -> Run:
    run = run_of(job)
    assert run is not None
    return run


def finish(context: ConsumerContext, jobs: Sequence[Any], *errors: BaseException | None) -> list[FinishedRun]:
    """Return runs whose handlers have returned, or raised these errors."""
    finished = []
    for job, error in zip(jobs, errors, strict=True):
        run = claimed_run(job)
        run.handler_started_at, run.duration = run.claimed_at, 0.0
        outcome = COMPLETED if error is None else context.outcome_rules.outcome(error, run)
        finished.append(FinishedRun(run, outcome, job))
    return finished


def claim_all(session: Session, queue: HistoryQueue) -> list[Any]:
    jobs = list(session.scalars(claim(queue.Job, 100)))
    if queue.kind == "update_status":
        session.commit()
    return jobs


ATTEMPTS = "SELECT count(*) FROM sqlaqueue_attempt"
ERRORS = (None, ValueError("no address"), Fail("no"), Cancel("no"), Snooze(60), None)


def test_one_statement_for_all_runs_that_are_settled_together(queue: HistoryQueue) -> None:
    queue.enqueue(*[None] * len(ERRORS))
    context, sent = make_context(queue.Job), list[str]()

    @sa.event.listens_for(queue.engine, "before_cursor_execute")
    def record(_: Any, __: Any, statement: str, *___: Any) -> None:
        sent.append(statement)

    with queue.sessions() as session:
        jobs = claim_all(session, queue)
        assert context.settler.settle(session, finish(context, jobs, *ERRORS)) == []
        session.commit()
    assert sum(statement.startswith(INSERT) for statement in sent) == 1
    ended = ["completed", "retried", "failed", "cancelled", "released", "completed"]
    assert [row.outcome for row in queue.history()] == ended


def test_a_settlement_that_is_rolled_back_leaves_no_row(queue: HistoryQueue) -> None:
    queue.enqueue(None, None)
    context = make_context(queue.Job)
    with queue.sessions() as session:
        jobs = claim_all(session, queue)
        context.settler.settle(session, finish(context, jobs, None, Fail("no")))
        assert session.scalar(sa.select(sa.func.count()).select_from(queue.attempt)) == 2
        session.rollback()
    assert queue.history() == []


def test_a_handler_whose_commit_fails_has_one_row(queue: HistoryQueue) -> None:
    """The row of the refused success is rolled back with the handler's writes; that of the failure is there."""
    queue.execute("CREATE TABLE child (n int UNIQUE DEFERRABLE INITIALLY DEFERRED)")
    [key] = queue.enqueue(None, max_attempts=1)

    async def work(io: Any, job: Any) -> None:
        await io.execute(sa.text("INSERT INTO child VALUES (1), (1)"))

    queue.drain(work)
    assert queue.outcomes(key) == [(1, "failed")]
    assert queue.execute("SELECT count(*) FROM child") == 0


def test_a_lost_lease_writes_no_row(leased: HistoryQueue) -> None:
    lost, kept = leased.enqueue(None, None)
    context = make_context(leased.Job)
    with leased.sessions() as session:
        jobs = claim_all(session, leased)
        leased.execute(f"UPDATE job SET lease_token = gen_random_uuid() WHERE id = {lost}")
        without = context.settler.settle(session, finish(context, jobs, None, None))
        session.commit()
    assert [one.run.key for one in without] == [(lost,)]
    assert leased.outcomes(lost) == []
    assert leased.outcomes(kept) == [(1, "completed")]


def test_a_run_that_was_never_begun_is_no_attempt(queue: HistoryQueue) -> None:
    """As at a shutdown, when jobs are released that have been claimed and wait for a handler."""
    waiting, begun = queue.enqueue(None, None)
    context = make_context(queue.Job)
    with queue.sessions() as session:
        jobs = claim_all(session, queue)
        finished = [FinishedRun(claimed_run(job), RELEASED, job) for job in jobs]
        finished[1].run.handler_started_at = finished[1].run.claimed_at
        assert context.settler.settle(session, finished) == []
        session.commit()
    assert queue.outcomes(waiting) == []
    assert queue.outcomes(begun) == [(1, "released")]


def test_runs_settled_one_by_one(leased: HistoryQueue) -> None:
    """As when the settlement of many fails for one of them."""
    leased.enqueue(None, None, None)
    context = make_context(leased.Job)
    with leased.sessions() as session:
        finished = finish(context, claim_all(session, leased), None, Fail("no"), None)
        result = context.settler.settle_each(session, [*finished, FinishedRun(finished[0].run, RELEASED)])
    assert [one.run.key for one in result.lease_lost] == [finished[0].run.key]
    assert [row.outcome for row in leased.history()] == ["completed", "failed", "completed"]


def test_an_outcome_that_the_database_refuses_has_one_row(leased: HistoryQueue) -> None:
    """It is settled as a failure instead."""
    [key] = leased.enqueue(None, max_attempts=1)
    leased.execute("ALTER TABLE job ADD CHECK (status <> 'completed')")
    leased.drain()
    assert leased.outcomes(key) == [(1, "failed")]
    assert leased.execute("SELECT status FROM job") == "failed"


@pytest.mark.parametrize("payload", [None, "write", "fail"])
def test_the_reply_to_a_commit_is_lost(leased: HistoryQueue, payload: str | None) -> None:
    """The settlement is committed, so the attempt is there, and settling it again does not add another one."""
    [key] = leased.enqueue(payload)
    server = leased.server()
    lost = lose_at_commit(server, leased, ATTEMPTS, committed=True)
    server.drain()
    assert lost
    assert leased.outcomes(key) == [(1, "failed" if payload == "fail" else "completed")]


def test_a_commit_that_did_not_arrive(leased: HistoryQueue) -> None:
    """The connection is lost before the commit: only the attempt that is settled after that is there."""
    [key] = leased.enqueue("write")
    server = leased.server()
    lost = lose_at_commit(server, leased, ATTEMPTS, committed=False)
    server.drain()
    assert lost
    released, completed = leased.history()
    assert leased.outcomes(key) == [(1, "released"), (1, "completed")]
    assert released.error is not None
    assert completed.error is None


# -- a history that cannot be written ---------------------------------------------------------------------------------


def test_characters_that_the_database_cannot_store(queue: HistoryQueue, log: pytest.LogCaptureFixture) -> None:
    # pytest could not pass such a log on to another process.
    log.set_level(logging.CRITICAL, "sqlaqueue")
    [key] = queue.enqueue(None, max_attempts=1)

    async def work(io: Any, job: Any) -> None:
        raise ValueError("a\0b\udc80c")

    queue.drain(work)
    (row,) = queue.history()
    assert row.error == "ValueError: a\\0b\\udc80c"
    assert row.traceback.endswith("ValueError: a\\0b\\udc80c\n")
    assert queue.outcomes(key) == [(1, "failed")]


def test_a_history_that_cannot_be_written_costs_no_settlement(
    queue: HistoryQueue, caplog: pytest.LogCaptureFixture
) -> None:
    """As after a constraint of the application's own, or without the table."""
    keys = queue.enqueue(None, "write", "raise", "fail", None)
    queue.execute("ALTER TABLE sqlaqueue_attempt ADD CHECK (key = '[0]')")
    queue.drain()
    assert queue.history() == []
    if queue.kind == "rows_are_messages":
        assert queue.execute("SELECT count(*) FROM job") == 0
    else:
        assert queue.execute("SELECT count(*) FROM job WHERE status = 'completed'") == 3
        assert queue.execute("SELECT count(*) FROM job WHERE status = 'failed'") == 2
    (record,) = [record for record in caplog.records if record.event == "history_failed"]
    assert record.levelno == logging.WARNING
    assert "violates check constraint" in record.getMessage()
    assert len(keys) == 5


def test_a_deferred_constraint_costs_no_settlement(queue: HistoryQueue, log: pytest.LogCaptureFixture) -> None:
    """The commit finds it violated, when the savepoint of the INSERT is released. Only the history loses rows."""
    queue.execute("ALTER TABLE sqlaqueue_attempt ADD CONSTRAINT one UNIQUE (queue) DEFERRABLE INITIALLY DEFERRED")
    queue.enqueue(None)
    queue.drain()
    assert queue.outcomes() == [(1, "completed")]
    queue.enqueue(None, "write", "raise", "fail", None)
    done = {"completed": 4, "failed": 2} if queue.kind != "rows_are_messages" else {}

    def states() -> dict[str, int]:
        with queue.engine.connect() as connection:
            found = connection.execute(sa.text("SELECT status, count(*) FROM job GROUP BY 1"))
            return {status: number for status, number in found}  # noqa: C416 - rows are no pairs for mypy

    with queue.running():
        if queue.kind == "rows_are_messages":
            wait_until(lambda: queue.execute("SELECT count(*) FROM job") == 0)
        else:
            wait_until(lambda: states() == done)
    assert queue.outcomes() == [(1, "completed")]
    (record,) = [record for record in log.records if record.event == "history_failed"]
    assert 'violates unique constraint "one"' in record.getMessage()
    queue.execute("ALTER TABLE sqlaqueue_attempt DROP CONSTRAINT one")


def test_a_deferred_constraint_of_a_handler_is_its_error(leased: HistoryQueue) -> None:
    """It is told from one of the history, also when that has been violated before."""
    leased.execute("ALTER TABLE sqlaqueue_attempt ADD UNIQUE (error) DEFERRABLE INITIALLY DEFERRED")
    leased.execute("CREATE TABLE child (n int UNIQUE DEFERRABLE INITIALLY DEFERRED)")
    [key] = leased.enqueue(None, max_attempts=1)

    async def work(io: Any, job: Any) -> None:
        await io.execute(sa.text("INSERT INTO child VALUES (1), (1)"))

    leased.drain(work)
    assert leased.outcomes(key) == [(1, "failed")]


def test_a_locked_table_delays_a_settlement_for_a_moment(leased: HistoryQueue, log: pytest.LogCaptureFixture) -> None:
    """Their rows are locked by the settlement, so their leases are not extended while it waits."""
    leased.enqueue(None, "write")
    server = leased.server()
    with leased.engine.connect() as locking:
        # Its start reads the catalogue.
        server.consumer.on("claimed", lambda _: lock(locking))
        server.drain()
        assert leased.execute("SELECT count(*) FROM job WHERE status = 'completed'") == 2
    assert any("lock timeout" in record.getMessage() for record in log.records if record.event == "history_failed")


def lock(connection: sa.Connection) -> None:
    if not connection.in_transaction():
        connection.execute(sa.text("LOCK TABLE sqlaqueue_attempt IN SHARE MODE"))


def test_the_timeout_of_locks_is_that_of_the_transaction_again(leased: HistoryQueue) -> None:
    """A claim may follow in the same transaction."""
    leased.enqueue(None)
    context = make_context(leased.Job)
    with leased.sessions() as session:
        jobs = claim_all(session, leased)
        session.execute(sa.text("SET LOCAL lock_timeout = '7s'"))
        context.settler.settle(session, finish(context, jobs, None))
        assert session.scalar(sa.text("SHOW lock_timeout")) == "7s"
        session.commit()
    assert leased.outcomes() == [(1, "completed")]


def test_a_text_that_cannot_be_made(leased: HistoryQueue) -> None:
    class Broken(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    async def work(io: Any, job: Any) -> None:
        raise Broken

    leased.enqueue(None, max_attempts=1)
    leased.drain(work)
    (row,) = leased.history()
    assert row.error == "Broken: its text could not be made"
    assert leased.execute("SELECT status FROM job") == "failed"


def test_a_table_that_is_gone_while_jobs_run(leased: HistoryQueue) -> None:
    leased.enqueue(None, None)

    async def work(io: Any, job: Any) -> None:
        if job.id == 1:
            leased.execute("ALTER TABLE sqlaqueue_attempt RENAME TO gone")

    leased.drain(work)
    assert leased.execute("SELECT count(*) FROM job WHERE status = 'completed'") == 2


def test_a_table_that_is_missing_at_the_start(queue: HistoryQueue) -> None:
    queue.execute("DROP TABLE sqlaqueue_attempt")
    with pytest.raises(DatabaseNotReadyError, match="the table sqlaqueue_attempt"):
        queue.drain()


def test_a_conflict_is_not_the_fault_of_the_history(leased: HistoryQueue) -> None:
    """The transaction is lost, so the job runs again."""
    leased.enqueue("write")
    leased.execute(
        "CREATE FUNCTION conflict() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        "IF nextval('conflicts') = 1 THEN RAISE serialization_failure; END IF; RETURN NEW; END $$"
    )
    leased.execute("CREATE SEQUENCE conflicts")
    leased.execute(
        "CREATE TRIGGER conflict BEFORE INSERT ON sqlaqueue_attempt FOR EACH ROW EXECUTE FUNCTION conflict()"
    )
    with leased.running():
        # It is delayed for a moment, as after any conflict.
        wait_until(lambda: [outcome for _, outcome in leased.outcomes()] == ["released", "completed"])


# -- tracebacks -------------------------------------------------------------------------------------------------------


def test_a_long_traceback_keeps_its_beginning_and_its_end() -> None:
    def nested(depth: int) -> None:
        try:
            _ = {}["the cause"] if depth == 0 else nested(depth - 1)
        except Exception as error:
            raise ValueError(f"level {depth} {'x' * 200}") from error

    with pytest.raises(ValueError, match="level 100") as raised:
        nested(100)
    text = traceback_text(raised.value)
    assert text is not None
    assert TRACEBACK_LIMIT <= len(text) <= TRACEBACK_LIMIT + 50
    assert "KeyError: 'the cause'" in text
    assert "characters left out)" in text
    assert text.endswith(f"ValueError: level 100 {'x' * 200}\n")


def test_an_error_that_was_not_raised_has_no_traceback() -> None:
    assert traceback_text(ValueError("x")) is None


def test_threads_share_a_history(leased: HistoryQueue) -> None:
    """Several workers settle at the same time."""
    keys = leased.enqueue(*["write", None] * 20)
    barrier = threading.Event()

    async def work(io: Any, job: Any) -> None:
        barrier.set()
        await obey(io, job)

    leased.drain(work, concurrency=4)
    assert sorted(row.key[0] for row in leased.history()) == sorted(keys)
