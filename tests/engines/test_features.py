"""Unique jobs, schedules, histories, waiting, and the functions for operators and for tests, on each engine."""

from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
import sqlalchemy as sa
from opentelemetry.sdk.trace import TracerProvider
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session, mapped_column

from sqlaqueue import (
    ConcurrencyLimit,
    Constant,
    Consumer,
    JobExists,
    Schedule,
    Tick,
    Unique,
    cancel,
    claim,
    complete,
    enqueue,
    extend,
    fail,
    release,
    requeue,
    rescue,
    retry,
    wait,
)
from sqlaqueue.admin import JobFilter, QueueAdmin, ScheduleAdmin, doctor
from sqlaqueue.consumer.pace import Intervals
from sqlaqueue.telemetry import current_traceparent
from sqlaqueue.testing import crash, drain, enqueued, fire_schedules, run_job, travel
from tests.engines.conftest import Sessions
from tests.flow_control.models import claim_and_commit, ids, insert, make_queue, of_customers
from tests.models import make_job
from tests.programs import DEADLINE, wait_until

pytestmark = pytest.mark.once


def unique(*arguments: str, **options: Any) -> Any:
    """Return a class that is unique by ``key``, a text of a length that an index of MariaDB could not have."""
    attributes = {"key": mapped_column(sa.Text()), "note": mapped_column(sa.String(50))}
    return make_job(attributes=attributes, max_attempts=3, unique=Unique("key", *arguments, **options))


Order = unique()
Mail = unique(states=("pending",))
Waiting = unique(states=("pending",), on_return="wait")
Hourly = unique(within=timedelta(hours=1), states=("pending", "processing", "completed"))
Plain = make_job(max_attempts=1)
Pair = make_job(attributes={"site": mapped_column(sa.String(20), primary_key=True, default="a")})
Kept = make_job(
    max_attempts=2, attempt_history=timedelta(days=1), retention={"completed": timedelta(days=1)}, retry=Constant(0)
)
Scheduled = make_job(attributes={"title": mapped_column(sa.String(50))})
Leased = make_job(lease=1)

EVERY_SECOND = Schedule("orders", Order, every=1, values={"key": "scheduled"})
HOURLY = Schedule("hourly", Scheduled, every=timedelta(hours=1), values={"title": "due"})


def created(session: Session, jobs: Any, **options: Any) -> list[bool]:
    return [each.created for each in enqueue(session, jobs, **options)]


def states(session: Session, model: Any) -> dict[int, str]:
    rows = session.execute(sa.select(model.__table__.c.id, model.__table__.c.status)).all()
    session.rollback()
    return {row[0]: row[1] for row in rows}


def do_nothing(session: Session, job: object) -> None:
    """Handle a job by doing nothing."""


# -- enqueue() ---------------------------------------------------------------------------------------------------------


def test_a_job_is_created_once(sessions: Sessions) -> None:
    with sessions(Order)() as session:
        first = Order(key="a", note="first")
        assert enqueue(session, first) == [(first, True)]
        assert first.id is not None
        assert first.attempts == 0
        session.commit()
        assert enqueue(session, Order(key="a")) == [(first, False)]
        session.commit()
        assert len(states(session, Order)) == 1


def test_the_answers_are_in_order(sessions: Sessions) -> None:
    with sessions(Order)() as session:
        session.add(Order(id=7, key="c"))
        session.commit()
        jobs = [Order(key=key) for key in "bcabza"]
        result = enqueue(session, jobs)
        assert [each.created for each in result] == [True, False, True, False, True, False]
        assert result[1].job.id == 7
        assert result[3].job is jobs[0]
        assert result[5].job is jobs[2]
        session.commit()


def test_on_duplicate_raise_inserts_nothing(sessions: Sessions) -> None:
    with sessions(Order)() as session:
        [(existing, _)] = enqueue(session, Order(key="b"), on_duplicate="raise")
        jobs = [Order(key="a"), Order(key="b")]
        with pytest.raises(JobExists, match=r": Job with key='b' exists") as raised:
            enqueue(session, jobs, on_duplicate="raise")
        assert (raised.value.job, raised.value.existing) == (jobs[1], existing)
        session.commit()
        assert len(states(session, Order)) == 1


def test_on_duplicate_replace(sessions: Sessions) -> None:
    later = datetime.now(UTC) + timedelta(hours=1)
    with sessions(Order)() as session:
        [(first, _)] = enqueue(session, Order(key="a", note="first", priority=5))
        session.commit()
        assert enqueue(session, Order(key="a", note="second", run_at=later), on_duplicate="replace") == [(first, False)]
        session.commit()
        assert (first.note, first.priority, first.run_at) == ("second", 0, later)
        enqueue(session, Order(key="a", note="third", run_at=None), on_duplicate="replace_keep_time")
        session.commit()
        assert (first.note, first.run_at) == ("third", later)
        enqueue(session, Order(key="a"), on_duplicate="replace")
        assert session.scalars(sa.select(Order.run_at <= sa.func.now())).all() == [True]


def test_null_keys_have_no_duplicates(sessions: Sessions) -> None:
    with sessions(Order)() as session:
        assert created(session, [Order(), Order(), Order(key="a")]) == [True] * 3
        session.commit()
        assert created(session, Order()) == [True]


def test_a_period(sessions: Sessions) -> None:
    noon = datetime(2026, 3, 1, 14, tzinfo=timezone(timedelta(hours=2)))
    with sessions(Hourly)() as session:
        moments = [noon + timedelta(minutes=minute) for minute in (0, 59, 59.999, 60, -1, 61, -60)]
        jobs = [Hourly(key="noon", created_at=moment) for moment in moments]
        assert created(session, jobs) == [True, False, False, True, True, False, False]
        assert created(session, [Hourly(key="now"), Hourly(key="now")]) == [True, False]
        session.commit()


@pytest.mark.parametrize(("model", "counts"), [(Order, False), (Hourly, True)], ids=["unfinished", "all"])
def test_a_finished_job_counts_if_configured(sessions: Sessions, model: Any, *, counts: bool) -> None:
    with sessions(model)() as session:
        enqueue(session, model(key="a"))
        session.commit()
        session.execute(complete(session.scalars(claim(model, 1)).all()))
        session.commit()
        assert created(session, model(key="a")) == [not counts]


def test_every_way_to_write_a_duplicate_is_refused(sessions: Sessions) -> None:
    ways: list[Callable[[Session], Any]] = [
        lambda session: session.add_all([Order(key="b"), Order(key="b")]) or session.flush(),  # type: ignore[func-returns-value] # both are called
        lambda session: session.execute(sa.insert(Order), [{"key": "b"}, {"key": "a"}]),
        lambda session: session.execute(sa.text("INSERT INTO job (`key`) VALUES ('a')")),
        lambda session: session.execute(sa.update(Order).where(Order.id == 2).values(key="a")),
        lambda session: session.execute(sa.text("UPDATE job SET status = 'pending' WHERE id = 3")),
    ]
    with sessions(Order)() as session:
        session.add_all([Order(id=1, key="a"), Order(id=2, key="c"), Order(id=3, key="a", status="failed")])
        session.commit()
        for way in ways:
            with pytest.raises(IntegrityError, match=r"ix_job_queue_unique|job\.key"):
                way(session)
            session.rollback()
        session.execute(sa.text("UPDATE job SET `key` = 'A' WHERE id = 2"))
        session.execute(cancel(sa.select(Order).where(Order.id == 1)))
        session.execute(sa.text("UPDATE job SET status = 'pending' WHERE id = 3"))
        session.commit()
        assert states(session, Order) == {1: "cancelled", 2: "pending", 3: "pending"}


# -- jobs that come back beside a duplicate ----------------------------------------------------------------------------


END_RUN: dict[str, Callable[[Session, Any, Any], Any]] = {
    "retry": lambda session, _, jobs: session.execute(retry(jobs, error="again")).all(),
    "release": lambda session, _, jobs: session.execute(release(jobs, delay=1)).all(),
    "rescue": lambda session, job, jobs: session.execute(extend(jobs, lease=0)) and session.execute(rescue(job)).all(),
}


@pytest.mark.parametrize("model", [Mail, Waiting], ids=["cancel", "wait"])
@pytest.mark.parametrize("end", END_RUN)
def test_a_run_ends_beside_a_duplicate(sessions: Sessions, model: Any, end: str) -> None:
    with sessions(model)() as session:
        session.add_all([model(id=1, key="a"), model(id=2, key="b")])
        session.commit()
        claimed = session.scalars(claim(model, 2)).all()
        session.commit()
        assert enqueue(session, model(id=3, key="a"))[0].created
        # No duplicate.
        assert enqueue(session, model(id=4, key="A"))[0].created
        session.commit()
        assert sorted(END_RUN[end](session, model, claimed)) == [(1, "3"), (2, None)]
        session.commit()
        first, second = claimed
        assert (second.status, second.lease_expires_at) == ("pending", None)
        if model is Mail:
            error = "duplicate of job 3\nagain" if end == "retry" else "duplicate of job 3"
            assert (first.status, first.last_error, first.lease_token) == ("cancelled", error, None)
            return
        assert first.status == "processing"
        assert session.execute(rescue(model)).all() == []
        session.commit()
        (duplicate,) = session.scalars(claim(sa.select(model).where(model.id == 3), 1)).all()
        session.commit()
        assert session.execute(rescue(model)).all() == [(1, None)]
        session.commit()
        assert first.status == "pending"
        assert session.scalars(complete(duplicate)).all() == [3]
        session.commit()


def test_the_newest_of_failed_duplicates_comes_back(sessions: Sessions) -> None:
    with sessions(Order)() as session:
        for number, key in enumerate(["a", "a", "A", None, None, "x" * 3000, "x" * 3000 + "y"], start=1):
            session.add(Order(id=number, key=key))
            session.commit()
            session.execute(fail(session.scalars(claim(Order, 1)).all(), error="failed"))
            session.commit()
        assert sorted(session.execute(requeue(Order)).all()) == [
            (1, False),
            *((number, True) for number in range(2, 8)),
        ]
        session.commit()
        ended = QueueAdmin(session, Order).jobs(JobFilter(states=("cancelled",)))
        assert [(each.key, each.last_error) for each in ended] == [(1, "duplicate of job 2\nfailed")]
        # Now the duplicate is pending.
        assert session.execute(requeue(sa.select(Order).where(Order.id == 1))).all() == [(1, False)]
        done = QueueAdmin(session, Order).requeue(JobFilter(states=("cancelled",)))
        assert (int(done), dict(done.duplicates)) == (0, {1: "2"})


ERRORS = {
    "ValueError: no": "ValueError",
    "ValueError:": "ValueError",
    "shop.errors.Late: it was\nlate": "shop.errors.Late",
    "_Own:\nno": "_Own",
    "order 1: no stock": "other",
    "9lives: no": "other",
    "a:b": "other",
    "": "",
    None: "",
}


@pytest.mark.parametrize("kind", sorted({*ERRORS.values()}))
def test_jobs_are_selected_by_the_kind_of_their_error(sessions: Sessions, kind: str) -> None:
    with sessions(Plain)() as session:
        session.add_all(Plain(status="failed", last_error=error) for error in ERRORS)
        session.commit()
        admin = QueueAdmin(session, Plain)
        assert {group.kind: group.count for group in admin.failures()} == Counter(ERRORS.values())
        assert admin.purge(JobFilter(states=("failed",), error=kind)) == list(ERRORS.values()).count(kind)
        left = session.scalars(sa.select(Plain.last_error)).all()
        assert {*left} == {error for error in ERRORS if ERRORS[error] != kind}


def test_jobs_are_selected_by_their_age_in_seconds(sessions: Sessions) -> None:
    with sessions(Plain)() as session:
        for seconds in (10, 100):
            session.add(Plain(status="failed", finished_at=datetime.now(UTC) - timedelta(seconds=seconds)))
        session.commit()
        admin = QueueAdmin(session, Plain)
        assert admin.count(JobFilter(older_than=50)) == admin.count(JobFilter(newer_than=50.5)) == {"failed": 1}
        assert admin.count(JobFilter(older_than=5)) == {"failed": 2}


def test_explain_job_names_the_duplicate(sessions: Sessions) -> None:
    with sessions(Order)() as session:
        session.add(Order(id=7, key="a"))
        session.commit()
        found = str(QueueAdmin(session, Order).explain(Order(key="a")))
        assert "7" in found
        assert "duplicate" in found


def test_a_consumer_retries_beside_a_duplicate(sessions: Sessions) -> None:
    """The handler enqueues its own successor, and its retry meets it."""
    make_session = sessions(Mail)

    def handle(session: Session, job: Any) -> None:
        if job.id == 1:
            with make_session() as other:
                enqueue(other, Mail(key="a"))
                other.commit()
            raise RuntimeError("again")

    with make_session() as session:
        session.add(Mail(id=1, key="a"))
        session.commit()
        Consumer(Mail, handle, make_session).drain()
        found = states(session, Mail)
        assert found.pop(1) == "cancelled"
        assert [*found.values()] == ["completed"]


def test_an_idle_consumer_rescues(sessions: Sessions, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does between its heartbeats: no listener wakes it for a rescue."""
    monkeypatch.setattr(Intervals, "heartbeat", lambda *_: 600.0)
    make_session = sessions(Leased)
    with Consumer(Leased, do_nothing, make_session), make_session() as session:
        session.add(Leased(id=1))
        session.commit()
        wait_until(lambda: states(session, Leased) == {1: "completed"})
        session.add(Leased(id=2))
        session.flush()
        assert session.scalars(claim(Leased, 1)).one().id == 2
        session.commit()
        wait_until(lambda: states(session, Leased) == {1: "completed", 2: "completed"}, seconds=30)


def test_a_job_that_comes_back_waits_for_its_duplicate(sessions: Sessions) -> None:
    ran: list[int] = []
    make_session = sessions(Waiting)

    def handle(_: Session, job: Any) -> None:
        ran.append(job.id)
        if ran == [1]:
            with make_session() as session:
                enqueue(session, [Waiting(key="a")])
                session.commit()
            raise ValueError("come back")

    with make_session() as session:
        enqueue(session, [Waiting(key="a")])
        session.commit()
        Consumer(Waiting, handle, make_session, retry=Constant(0)).drain()
        # The first waits until a rescue finds that its duplicate has gone, which may be before the end or at the end.
        assert states(session, Waiting) in [
            {1: state, 2: "completed"} for state in ("processing", "pending", "completed")
        ]
        session.execute(rescue(Waiting))
        session.commit()
        Consumer(Waiting, handle, make_session).drain()
        assert (ran, states(session, Waiting)) == ([1, 2, 1], {1: "completed", 2: "completed"})


# -- histories, retention and schedules --------------------------------------------------------------------------------


def test_attempts_are_kept_and_finished_jobs_deleted(sessions: Sessions) -> None:
    make_session = sessions(Kept)

    def handle(_: Session, job: Any) -> None:
        if job.attempts == 1:
            raise ValueError("not yet")

    with make_session() as session:
        session.add(Kept(id=1))
        session.commit()
        Consumer(Kept, handle, make_session).drain()
        attempts = QueueAdmin(session, Kept).attempts(1)
        assert [(each.attempt, each.outcome) for each in attempts] == [(2, "completed"), (1, "retried")]
        travel(session, timedelta(days=2))
        session.commit()
        with Consumer(Kept, handle, make_session):
            wait_until(lambda: not states(session, Kept), "the job is deleted")
            wait_until(lambda: not _attempts(session), "its attempts are deleted")


def _attempts(session: Session) -> int:
    found = session.execute(sa.select(sa.func.count()).select_from(Kept.metadata.tables["sqlaqueue_attempt"])).scalar()
    session.rollback()
    return found or 0


def _schedule(session: Session) -> Any:
    found = next(iter(ScheduleAdmin(session, Scheduled).list()), None)
    session.rollback()
    return found


def test_a_schedule_is_fired_once_for_each_tick(sessions: Sessions) -> None:
    ticks: list[tuple[Tick | None, str]] = []
    make_session = sessions(Scheduled)

    def handle(session: Session, job: Any) -> None:
        ticks.append((Tick.of(session, job), job.title))

    with make_session() as session:
        with Consumer(Scheduled, handle, make_session, schedules=[HOURLY]):
            wait_until(lambda: _schedule(session) is not None, "the schedule is stored")
        travel(session, timedelta(hours=3))
        session.commit()
        with Consumer(Scheduled, handle, make_session, schedules=[HOURLY]):
            wait_until(lambda: ticks, "the schedule is fired")
    assert [(tick is not None and tick.schedule, title) for tick, title in ticks] == [("hourly", "due")]


def test_schedules_are_changed_by_operators(sessions: Sessions) -> None:
    with sessions(Scheduled)() as session:
        fire_schedules(session, [HOURLY])
        session.commit()
        before = _schedule(session)
        admin = ScheduleAdmin(session, Scheduled)
        admin.pause("hourly")
        session.commit()
        stored = session.execute(sa.text("SELECT edited_at, next_tick, paused_at FROM sqlaqueue_schedule")).one()
        assert stored.next_tick is None
        assert None not in {stored.edited_at, stored.paused_at}
        assert _schedule(session).next_tick is None
        admin.resume("hourly")
        admin.edit("hourly", every=timedelta(minutes=5))
        session.commit()
        assert (before.every, _schedule(session).every) == (timedelta(hours=1), timedelta(minutes=5))
        with pytest.raises(sa.exc.DBAPIError):
            session.execute(sa.text("UPDATE sqlaqueue_schedule SET every = 0.5"))


def test_another_program_changes_a_schedule(sessions: Sessions) -> None:
    """The database has a trigger that records when, without a function of the library."""
    with sessions(Scheduled)() as session:
        fire_schedules(session, [HOURLY])
        session.commit()
        plain = sa.create_engine(session.get_bind().engine.url)
    with plain.begin() as connection:
        connection.execute(sa.text("UPDATE sqlaqueue_schedule SET every = 60"))
        assert connection.scalar(sa.text("SELECT edited_at IS NOT NULL FROM sqlaqueue_schedule")) == 1
    plain.dispose()


def test_a_schedule_enqueues_no_duplicate(sessions: Sessions) -> None:
    with sessions(Order)() as session:
        fired = []
        for _ in range(3):
            fired.append(len(fire_schedules(session, [EVERY_SECOND])))
            travel(session, 10)
        # The first call stores the schedule, and fires it if a second has begun meanwhile.
        assert sorted(fired) == [0, 0, 1]
        assert session.scalars(sa.select(Order.key)).all() == ["scheduled"]
        assert enqueue(session, Order(key="scheduled"))[0].created is False


# -- waiting, operators, tests of an application -----------------------------------------------------------------------


def test_a_caller_waits_for_its_job(sessions: Sessions) -> None:
    make_session = sessions(Plain)
    with make_session() as session:
        job = Plain()
        session.add(job)
        session.commit()
    with Consumer(Plain, do_nothing, make_session, poll_interval=0.1):
        assert wait(make_session, job, timeout=DEADLINE).state == "completed"


def test_operators_see_and_change_jobs(sessions: Sessions) -> None:
    make_session = sessions(Plain)

    def handle(_: Session, job: Any) -> None:
        if job.id % 2:
            raise ValueError("odd")

    with make_session() as session:
        session.add_all([Plain(id=n) for n in range(1, 7)])
        session.commit()
        Consumer(Plain, handle, make_session).drain()
        session.add_all([Plain(id=7), Plain(id=8)])
        session.commit()
        admin = QueueAdmin(session, Plain)
        stats = admin.stats()
        assert (stats.due, stats.states) == (2, {**stats.states, "pending": 2, "failed": 3, "completed": 3})
        assert stats.missing_indexes == []
        assert [group.count for group in admin.failures()] == [3]
        assert {job.state for job in admin.jobs()} == {"pending", "failed", "completed"}
        assert "pending" in str(admin.explain(7))
        assert admin.explain(7).reasons
        admin.pause()
        session.commit()
        assert session.scalars(claim(Plain, 1)).all() == []
        admin.resume()
        assert admin.requeue(sa.select(Plain).where(Plain.id == 1)) == 1
        assert admin.cancel(sa.select(Plain).where(Plain.id > 6)).cancelled == [7, 8]
        session.commit()


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "left_out",
    [("run_at",), ("created_at",), ("finished_at",), ("run_at", "created_at", "finished_at"), ("priority", "attempts")],
    ids=",".join,
)
def test_operators_see_jobs_without_some_columns(sessions: Sessions, left_out: tuple[str, ...]) -> None:
    model = make_job(columns=dict.fromkeys(left_out))
    with sessions(model)() as session:
        session.add(model(payload="waits"))
        session.commit()
        admin = QueueAdmin(session, model)
        stats = admin.stats()
        assert (stats.due, stats.states["pending"]) == (1, 1)
        assert (stats.oldest_due is None) == ({"run_at", "created_at"} <= {*left_out})
        assert [job.state for job in admin.jobs()] == ["pending"]
        assert (admin.stats(finished=False).due, admin.depth().due) == (1, 1)
        assert {reason.code for reason in admin.explain(1).reasons} == {"no_consumer"}
        assert "check_failed" not in {finding.code for finding in doctor(session, model, deep=True)}


@pytest.mark.parametrize("model", [Plain, Pair], ids=["single-key", "composite-key"])
def test_only_the_jobs_of_a_tests_transaction_are_enqueued(sessions: Sessions, model: Any) -> None:
    with sessions(model)() as session:
        session.add(model(id=1, payload="before"))
        session.commit()
        assert not enqueued(session, model)
        session.add_all([model(id=2, payload="a"), model(id=3, payload="b")])
        session.flush()
        session.execute(sa.insert(model).values(id=4, payload="a"))
        assert [job.id for job in enqueued(session, model)] == [2, 3, 4]
        assert [job.id for job in enqueued(session, model, payload="a")] == [2, 4]
        session.rollback()
        assert not enqueued(session, model)


def test_jobs_run_in_the_session_of_a_test(sessions: Sessions) -> None:
    seen: list[int] = []

    def handle(_: Session, job: Any) -> None:
        seen.append(job.id)
        job.payload = "done"

    with sessions(Order)() as session:
        later = Order(id=3, run_at=sa.func.now() + sa.literal(timedelta(hours=1), sa.Interval()))
        session.add_all([Order(id=1), Order(id=2), later])
        session.flush()
        assert run_job(session, session.get_one(Order, 2), handle).state == "completed"
        crash(session, session.get_one(Order, 1))
        travel(session, timedelta(minutes=30))
        drain(session, Order, handle)
        assert seen == [2, 1]
        travel(session, timedelta(hours=1))
        drain(session, Order, handle)
        assert seen == [2, 1, 3]
        session.rollback()
        assert not session.scalars(sa.select(Order)).all()


def test_a_job_has_the_trace_in_which_it_was_enqueued(sessions: Sessions) -> None:
    model = make_job(extra_columns=("traceparent",))
    tracer = TracerProvider().get_tracer(__name__)
    with sessions(model)() as session:
        session.add(model())
        session.flush()
        with tracer.start_as_current_span("enqueue"):
            trace = current_traceparent()
            session.add(model())
            session.flush()
            session.execute(sa.insert(model), [{"payload": "bulk"}])
        assert session.scalars(sa.select(model.traceparent).order_by(model.id)).all() == [None, trace, trace]


# -- flow control ------------------------------------------------------------------------------------------------------


def test_a_claim_reads_few_jobs_of_a_key_without_room(engine: sa.Engine) -> None:
    """Those behind them are found, with a limit of their own as well."""
    job = make_queue(
        engine, of_customers(*[1] * 3000, most=1), flow_control=[ConcurrencyLimit("most", per="customer_id")]
    )
    insert(engine, job, [{"customer_id": key, "most": most} for key, most in ((2, 1), (1, None), (None, 1), (1, 4))])
    assert ids(claim_and_commit(engine, job, 1)) == [1]
    windows: list[str] = []
    sa.event.listen(engine, "before_cursor_execute", lambda *each: windows.append(each[2]))
    assert ids(claim_and_commit(engine, job, 10)) == [3001, 3002, 3003, 3004]
    assert len([each for each in windows if "ORDER BY" in each and "LIMIT" in each]) == 2
