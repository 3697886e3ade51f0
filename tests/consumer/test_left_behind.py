"""Runs that another process has left behind when it was killed: they are settled once, unless they have ended."""

import time
import uuid
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session, sessionmaker

from sqlaqueue import Constant, Consumer, claim
from sqlaqueue.admin import QueueAdmin
from sqlaqueue.consumer.held import settle_alone
from sqlaqueue.consumer.in_flight import Deaths, KnownDeath, LeftBehind
from sqlaqueue.consumer.outcomes import FinishedRun
from sqlaqueue.consumer.quarantine import JournalEntry
from sqlaqueue.exc import JobTimeout
from sqlaqueue.mapping.mixin import spec_of
from sqlaqueue.mapping.runs import run_of
from sqlaqueue.queue.names import CRASH_JOURNAL
from sqlaqueue.queue.run import Run
from tests.contexts import make_context
from tests.models import create, insert, make_job, read

KINDS = ["update_status", "batch_select", "delete_returning"]
DEAD = "elsewhere:7"
LATE = JobTimeout("it hung, and its process was killed")


@pytest.fixture(params=KINDS)
def model(request: pytest.FixtureRequest, engine: sa.Engine) -> Any:
    later = Constant(delay=3600, jitter=0)
    return create(engine, make_job(request.param, max_attempts=3, retry=later, attempt_history=timedelta(days=1)))


def journal(engine: sa.Engine, model: Any, *starts: int) -> None:
    """Write what workers have left in the crash journal: first the one that is known to be dead, then others."""
    table = spec_of(model).side_tables[CRASH_JOURNAL]
    workers = [DEAD, *(f"elsewhere:{number}" for number in range(10, 20))]
    with engine.begin() as connection:
        for worker, number in zip(workers, starts, strict=False):
            row = {"id": uuid.uuid4(), "queue": "job", "keys": ["1"], "starts": number, "worker": worker}
            connection.execute(sa.insert(table).values(row))


def die(engine: sa.Engine, model: Any, *, attempt: int = 1, starts: tuple[int, ...] = (1,)) -> Run:
    """Leave job 1 as a process does that dies while its handler runs, and return the run."""
    insert(engine, model, 1)
    token = None
    if spec_of(model).strategy.holds_transaction:
        journal(engine, model, *starts)
    else:
        with Session(engine) as session:
            run = run_of(session.scalars(claim(model, 1)).one())
            session.commit()
        assert run is not None
        token = run.token
    # Not at 0.0, which is when the machine started: if that is more than a day ago, its attempt would be deleted.
    started = time.monotonic() - 2.0
    return Run((1,), token, attempt, 3, handler_started_at=started, duration=2.0, worker=DEAD)


def drain(engine: sa.Engine, model: Any, *left: LeftBehind, death: KnownDeath | None = None) -> tuple[int, list[str]]:
    """Drain the queue; return how many handlers were called, and the events."""
    calls, events = list[object](), list[str]()
    consumer = Consumer(model, lambda session, job: calls.append(job), sessionmaker(engine), concurrency=4, timeout=9)
    deaths = Deaths()
    if death is not None:
        # While this process starts.
        deaths.add("1", death)
    consumer.isolate(deaths)
    deaths.left_behind = left
    consumer.on("retried", lambda event: events.append(f"{event.name} {event.attempt}"))
    consumer.on("failed", lambda event: events.append(f"{event.name} {event.attempt}"))
    consumer.on("lease_lost", lambda event: events.append(event.name))
    consumer.drain()
    assert (consumer.settings.concurrency, consumer.settings.batch_size, consumer.settings.timeout) == (1, 1, None)
    return len(calls), events


def journal_rows(engine: sa.Engine, model: Any) -> int:
    table = spec_of(model).side_tables.get(CRASH_JOURNAL)
    with engine.connect() as connection:
        return 0 if table is None else len(connection.execute(sa.select(table)).all())


def test_it_is_retried_as_after_any_error(engine: sa.Engine, model: Any) -> None:
    """The attempt counts, and the history names the worker that has run it."""
    run = die(engine, model)
    assert drain(engine, model, LeftBehind(run, LATE)) == (0, ["retried 1"])
    assert read(engine, model, "attempts") == {1: 1}
    assert read(engine, model, "last_error") == {1: f"JobTimeout: {LATE}"}
    with Session(engine) as session:
        (attempt,) = QueueAdmin(session, model).attempts(1)
    assert (attempt.attempt, attempt.outcome, attempt.worker) == (1, "retried", DEAD)
    assert attempt.seconds == pytest.approx(2)
    assert journal_rows(engine, model) == 0


def test_it_costs_no_attempt_if_the_job_is_not_to_blame(engine: sa.Engine, model: Any) -> None:
    run = die(engine, model)
    assert drain(engine, model, LeftBehind(run, None)) == (1, [])
    assert read(engine, model, "attempts") == {1: 1}
    assert read(engine, model) == {1: "completed"}


def test_earlier_deaths_count_as_well(engine: sa.Engine, model: Any) -> None:
    """Those that only the journal knows. Under a lease the row has counted them."""
    run = die(engine, model, attempt=3, starts=(1, 1, 1))
    assert drain(engine, model, LeftBehind(run, LATE)) == (0, ["failed 3"])
    assert read(engine, model) == {1: "failed"}
    if spec_of(model).strategy.holds_transaction:
        assert read(engine, model, "attempts") == {1: 3}
    assert journal_rows(engine, model) == 0


def test_a_run_that_has_ended_is_left_alone(engine: sa.Engine, model: Any) -> None:
    """Its process has settled it at the last moment, and the job is pending again."""
    run = die(engine, model, starts=())
    if not spec_of(model).strategy.holds_transaction:
        with engine.begin() as connection:
            connection.execute(sa.update(model.__table__).values(status="pending", lease_token=None, attempts=0))
    assert drain(engine, model, LeftBehind(run, LATE)) == (1, [])
    assert read(engine, model) == {1: "completed"}
    assert read(engine, model, "attempts") == {1: 1}


@pytest.mark.parametrize("model", KINDS[1:], indirect=True)
def test_a_run_that_ends_while_it_is_looked_at_is_left_alone(engine: sa.Engine, model: Any) -> None:
    """Its journal entry was read, and is gone when the job could be claimed."""
    run = die(engine, model)
    context = make_context(model)
    finished = FinishedRun(run, context.outcome_rules.outcome(LATE, run))
    entry = JournalEntry(("1",), solely_responsible=True)
    with Session(engine) as session:
        assert settle_alone(session, context, finished, entry, fenced=True) is None
    assert read(engine, model, "attempts") == {1: 0}


@pytest.mark.parametrize("model", KINDS[1:], indirect=True)
def test_a_job_that_another_process_claims_first_is_settled_there(engine: sa.Engine, model: Any) -> None:
    """It is free as soon as its process is dead. The reason is known here, and its delay holds."""
    die(engine, model)
    death = KnownDeath(LATE, 2.0, DEAD, 1)
    assert drain(engine, model, death=death) == (0, ["retried 1"])
    assert read(engine, model, "last_error") == {1: f"JobTimeout: {LATE}"}
    with Session(engine) as session:
        (attempt,) = QueueAdmin(session, model).attempts(1)
    assert (attempt.attempt, attempt.worker, round(attempt.seconds or 0)) == (1, DEAD, 2)


@pytest.mark.parametrize("model", KINDS[1:], indirect=True)
def test_an_earlier_death_is_no_reason_for_a_later_one(engine: sa.Engine, model: Any) -> None:
    """The first attempt was settled elsewhere; that of the second one is unknown, and counts in the journal."""
    die(engine, model, attempt=2, starts=(1, 1))
    assert drain(engine, model, death=KnownDeath(LATE, 2.0, DEAD, 1)) == (1, [])
    assert read(engine, model, "attempts") == {1: 3}


@pytest.mark.parametrize("model", KINDS[1:], indirect=True)
def test_a_run_after_which_another_one_has_begun_is_left_to_the_journal(engine: sa.Engine, model: Any) -> None:
    """Another process has claimed the job, counted this death, and died as well before this run was settled."""
    run = die(engine, model, attempt=1, starts=(1, 1))
    assert drain(engine, model, LeftBehind(run, LATE)) == (1, [])
    assert read(engine, model, "attempts") == {1: 3}


@pytest.mark.parametrize("model", KINDS[1:], indirect=True)
def test_a_job_that_another_process_runs_is_left_to_it(engine: sa.Engine, model: Any) -> None:
    """The journal has counted the death for it."""
    run = die(engine, model)
    with Session(engine) as session:
        assert session.scalars(claim(model, 1)).one_or_none() is not None
        assert drain(engine, model, LeftBehind(run, LATE)) == (0, [])
    assert journal_rows(engine, model) == 1


def test_a_death_is_known_for_a_moment() -> None:
    now = 0.0
    deaths, death = Deaths(now=lambda: now), KnownDeath(LATE, 2.0, DEAD, 1)
    deaths.add("1", death)
    deaths.add("2", death)
    assert deaths.take("3") is None
    assert [deaths.take("1"), deaths.take("1")] == [death, None]
    now = 31.0
    assert deaths.take("2") is None
