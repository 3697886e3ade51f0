"""One firing: which jobs it enqueues, which ticks it writes, when the next one is; also in a test's transaction."""

import uuid
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Mapped, Session, mapped_column, scoped_session, sessionmaker

from sqlaqueue import Consumer, QueueMixin, Schedule, Tick, Unique
from sqlaqueue.exc import ConfigurationError, NotAQueueError, StatementError
from sqlaqueue.schedules.fire import jitter_of
from sqlaqueue.schedules.recurrence import zone
from sqlaqueue.schedules.schedule import BATCH
from sqlaqueue.testing import async_fire_schedules, async_travel, drain, enqueued, fire_schedules, travel
from tests.models import make_job
from tests.schedules.models import (
    DAY,
    HOUR,
    KINDS,
    MINUTE,
    count_jobs,
    execute,
    fire_due,
    hourly,
    make_report,
    pass_time,
    prepared,
    start,
    started,
    stored,
    ticks_in,
)
from tests.servers import Database


@pytest.mark.parametrize("kind", KINDS)
def test_each_tick_gets_one_job(engine: sa.Engine, kind: str) -> None:
    report = make_report(kind)
    schedules = prepared(
        engine, hourly(report, values={"kind": "sales", "day": date(2026, 1, 2), "token": uuid.UUID(int=7)})
    )
    assert start(engine, schedules) == (["hourly"], [])
    assert fire_due(engine, schedules) == []
    created = stored(engine)["created_at"].replace(microsecond=0)
    assert stored(engine)["next_tick"] == created + HOUR
    pass_time(engine, HOUR)
    [fired] = fire_due(engine, schedules)
    assert fired.tick == created
    assert fired.late >= timedelta(0)
    with Session(engine) as session:
        [job] = session.scalars(sa.select(report)).all()
        assert (job.kind, job.day, job.token) == ("sales", date(2026, 1, 2), uuid.UUID(int=7))
        assert job.run_at == created
        tick = Tick.of(session, job)
        assert tick is not None
        assert (tick.schedule, tick.at) == ("hourly", created)
        assert timedelta(0) < tick.late < MINUTE
    assert ticks_in(engine) == [(created, [fired.key[0] if fired.key else None])]
    assert (stored(engine)["last_tick"], stored(engine)["next_tick"]) == (created, created + HOUR)
    assert fire_due(engine, schedules) == []
    ran: list[Any] = []

    def handle(session: Session, job: Any) -> None:
        ran.append((job.kind, Tick.of(session, job)))

    assert Consumer(report, handle, sessionmaker(engine)).drain() == 1
    assert [(each, tick and tick.at) for each, tick in ran] == [("sales", created)]


def test_a_function_makes_the_job_of_a_tick(engine: sa.Engine, session: Session) -> None:
    report, seen = make_report(), []

    def make(tick: Tick) -> Any:
        seen.append(tick)
        return report(kind="made", day=tick.at.date(), run_at=tick.at + DAY)

    schedules = started(engine, hourly(report, make=make, values={"token": uuid.UUID(int=1)}))
    pass_time(engine, HOUR)
    [fired] = fire_due(engine, schedules)
    [tick] = seen
    assert (tick.schedule, tick.at, tick.late) == ("hourly", fired.tick, fired.late)
    job = session.scalars(sa.select(report)).one()
    assert (job.kind, job.day, job.token) == ("made", fired.tick.date(), uuid.UUID(int=1))
    assert job.run_at == fired.tick + DAY


def test_the_definition_is_read_at_each_firing(engine: sa.Engine, report: Any, session: Session) -> None:
    schedules = started(engine, hourly(report))
    execute(engine, """UPDATE sqlaqueue_schedule SET "values" = '{"kind": "edited"}', every = '30 min'""")
    assert fire_due(engine, schedules) == []
    pass_time(engine, 30 * MINUTE)
    assert len(fire_due(engine, schedules)) == 1
    assert session.scalars(sa.select(report.kind)).one() == "edited"


def test_an_edited_definition_fires_nothing_for_the_time_before(engine: sa.Engine, report: Any) -> None:
    schedules = started(engine, hourly(report, catch_up="all"))
    fire_due(engine, schedules)
    pass_time(engine, 30 * MINUTE)
    execute(engine, "UPDATE sqlaqueue_schedule SET every = '1 min'")
    assert fire_due(engine, schedules) == []
    row = stored(engine)
    assert timedelta(0) < row["next_tick"] - datetime.now(UTC) <= MINUTE


def test_the_first_look_may_come_late(engine: sa.Engine, report: Any) -> None:
    schedules = started(engine, hourly(report, catch_up="all"))
    pass_time(engine, 3 * HOUR)
    assert len(fire_due(engine, schedules)) == 3


@pytest.mark.parametrize(
    ("options", "number"),
    [({}, 1), ({"catch_up": "skip"}, 1), ({"catch_up": "all"}, 2), ({"misfire_grace": MINUTE}, 2)],
    ids=str,
)
def test_after_twenty_seconds_without_a_process(
    engine: sa.Engine, report: Any, options: dict[str, Any], number: int
) -> None:
    """A short interval fires one late job by default; several, which have waited a short time, if it is told to."""
    schedules = started(engine, hourly(report, every=timedelta(seconds=10), **options))
    fire_due(engine, schedules)
    pass_time(engine, timedelta(seconds=21))
    fired = fire_due(engine, schedules)
    assert (len(fired), count_jobs(engine, report)) == (number, number)
    assert fired[-1].late < timedelta(seconds=10)


def test_an_edited_short_interval_fires_the_newest_tick_only(engine: sa.Engine, report: Any) -> None:
    """A tick of the former definition is one of those that the next tick ends."""
    schedules = started(engine, hourly(report, every=timedelta(seconds=30)))
    fire_due(engine, schedules)
    pass_time(engine, timedelta(seconds=32))
    execute(engine, "UPDATE sqlaqueue_schedule SET every = '5 sec'")
    pass_time(engine, timedelta(seconds=18))
    [fired] = fire_due(engine, schedules)
    assert fired.late < timedelta(seconds=5)


def test_with_a_grace_the_tick_before_an_edit_is_fired_as_well(engine: sa.Engine, report: Any) -> None:
    schedules = started(engine, hourly(report, every=timedelta(seconds=30), misfire_grace=MINUTE))
    fire_due(engine, schedules)
    pass_time(engine, timedelta(seconds=32))
    execute(engine, "UPDATE sqlaqueue_schedule SET every = '5 sec'")
    pass_time(engine, timedelta(seconds=18))
    before, *others = fire_due(engine, schedules)
    assert len(others) >= 3
    assert before.tick + timedelta(seconds=5) >= others[0].tick
    assert before.late >= timedelta(seconds=20) > others[0].late


def test_a_paused_schedule_passes_over_its_ticks(engine: sa.Engine, report: Any) -> None:
    schedules = started(engine, hourly(report, catch_up="all"))
    fire_due(engine, schedules)
    execute(engine, "UPDATE sqlaqueue_schedule SET paused_at = now()")
    pass_time(engine, 2 * HOUR)
    assert fire_due(engine, schedules) == []
    assert stored(engine)["next_tick"] is None
    execute(engine, "UPDATE sqlaqueue_schedule SET paused_at = NULL")
    assert fire_due(engine, schedules) == []
    pass_time(engine, HOUR)
    assert len(fire_due(engine, schedules)) == 1


@pytest.mark.parametrize("paused", [False, True])
def test_a_requested_run_is_fired_beside_the_ticks(engine: sa.Engine, report: Any, *, paused: bool) -> None:
    schedules = started(engine, hourly(report))
    fire_due(engine, schedules)
    if paused:
        execute(engine, "UPDATE sqlaqueue_schedule SET paused_at = now()")
        fire_due(engine, schedules)
    before = stored(engine)
    execute(engine, "UPDATE sqlaqueue_schedule SET run_requested_at = now()")
    requested = stored(engine)["run_requested_at"]
    assert [fired.tick for fired in fire_due(engine, schedules)] == [requested]
    assert fire_due(engine, schedules) == []
    changed = {"planned_at": None, "last_job": None}
    assert stored(engine) | changed == before | changed
    execute(engine, "UPDATE sqlaqueue_schedule SET run_requested_at = now() + interval '1 hour'")
    assert fire_due(engine, schedules) == []
    assert stored(engine)["run_requested_at"] is not None
    assert count_jobs(engine, report) == 1


def test_a_tick_that_was_fired_is_never_fired_again(engine: sa.Engine, report: Any) -> None:
    schedules = started(engine, hourly(report, catch_up="all"))
    pass_time(engine, 3 * HOUR)
    fired = fire_due(engine, schedules)
    assert len(fired) == 3
    execute(engine, "UPDATE sqlaqueue_schedule SET next_tick = :tick, last_tick = NULL", tick=fired[0].tick)
    assert fire_due(engine, schedules) == []
    assert stored(engine)["next_tick"] == fired[-1].tick + HOUR
    # A schedule that is deleted and stored again has the ticks of the former one.
    row = stored(engine)
    execute(engine, "DELETE FROM sqlaqueue_schedule")
    start(engine, schedules)
    execute(engine, "UPDATE sqlaqueue_schedule SET created_at = :created", created=row["created_at"])
    assert fire_due(engine, schedules) == []
    assert count_jobs(engine, report) == 3


def test_the_key_of_a_tick_is_the_last_resort(engine: sa.Engine, report: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    schedules = started(engine, hourly(report, catch_up="all"))
    pass_time(engine, HOUR)
    [fired] = fire_due(engine, schedules)
    execute(engine, "UPDATE sqlaqueue_schedule SET next_tick = :tick, last_tick = NULL", tick=fired.tick)
    monkeypatch.setattr("sqlaqueue.schedules.fire._leave_out_fired", lambda *_: None)
    with pytest.raises(IntegrityError):
        fire_due(engine, schedules)
    assert count_jobs(engine, report) == 1


def test_the_job_the_tick_and_the_next_tick_are_one_transaction(
    engine: sa.Engine, report: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedules = started(engine, hourly(report))
    fire_due(engine, schedules)
    pass_time(engine, HOUR)
    before = stored(engine)

    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr("sqlaqueue.schedules.fire._move_on", fail)
        fire_due(engine, schedules)
    assert (stored(engine), ticks_in(engine), count_jobs(engine, report)) == (before, [], 0)
    assert len(fire_due(engine, schedules)) == 1


def test_what_another_process_has_locked_is_passed_over(engine: sa.Engine, report: Any) -> None:
    schedules = started(engine, hourly(report), hourly(report, "other"))
    pass_time(engine, HOUR)
    with engine.begin() as connection:
        connection.execute(sa.text("UPDATE sqlaqueue_schedule SET paused_at = now() WHERE name = 'hourly'"))
        assert [fired.schedule for fired in fire_due(engine, schedules)] == ["other"]
    assert fire_due(engine, schedules) == []


@pytest.mark.parametrize("kind", KINDS)
def test_skip_while_the_last_job_is_unfinished(engine: sa.Engine, kind: str) -> None:
    report = make_report(kind)
    schedules = started(engine, hourly(report, skip_unfinished=True, catch_up="all"))
    pass_time(engine, 3 * HOUR)
    # One for three missed ticks: after it the last job is unfinished.
    [first] = fire_due(engine, schedules)
    assert first.key is not None
    pass_time(engine, HOUR)
    [skipped] = fire_due(engine, schedules)
    assert (skipped.job, skipped.key) == (None, None)
    assert [key for _, key in ticks_in(engine)] == [[first.key[0]], None]
    Consumer(report, lambda session, job: None, sessionmaker(engine)).drain()
    pass_time(engine, HOUR)
    [third] = fire_due(engine, schedules)
    assert third.key is not None
    assert count_jobs(engine, report) == (1 if kind == "rows_are_messages" else 2)


def test_two_schedules_of_a_class_are_unfinished_apart(engine: sa.Engine, report: Any) -> None:
    schedules = started(engine, *(hourly(report, name, skip_unfinished=True) for name in ("one", "two")))
    execute(engine, "UPDATE sqlaqueue_schedule SET run_requested_at = now() WHERE name = 'one'")
    assert [fired.key is None for fired in fire_due(engine, schedules)] == [False]
    execute(engine, "UPDATE sqlaqueue_schedule SET run_requested_at = now()")
    found = {fired.schedule: fired.key is None for fired in fire_due(engine, schedules)}
    assert found == {"one": True, "two": False}


def test_a_duplicate_stands_for_the_job_of_a_unique_queue(engine: sa.Engine) -> None:
    report = make_report(unique=Unique("kind"))
    schedules = started(engine, hourly(report, catch_up="all"))
    pass_time(engine, 2 * HOUR)
    first, second = fire_due(engine, schedules)
    assert (first.key is None, second.key is None) == (False, True)
    assert count_jobs(engine, report) == 1


def test_jitter_moves_the_job_and_not_the_tick(engine: sa.Engine, report: Any) -> None:
    schedules = started(engine, *(hourly(report, name, jitter=600) for name in ("one", "two")))
    pass_time(engine, HOUR)
    fired = fire_due(engine, schedules)
    with Session(engine) as session:
        delays = {each.schedule: session.get_one(report, each.key).run_at - each.tick for each in fired}
    assert delays == {each.schedule: jitter_of(each.schedule, each.tick, 10 * MINUTE) for each in fired}
    assert delays["one"] != delays["two"]
    assert all(timedelta(0) <= delay < 10 * MINUTE for delay in delays.values())
    spread = [jitter_of("x", fired[0].tick + each * HOUR, HOUR) for each in range(400)]
    assert min(spread) < 6 * MINUTE
    assert max(spread) > 54 * MINUTE


def test_due_times_without_a_time_zone_are_those_of_the_session(engine: sa.Engine) -> None:
    due = mapped_column(sa.DateTime(timezone=False), server_default=sa.func.now())
    task = make_job(attributes={"due": due}, columns={"run_at": "due"})
    schedules = started(engine, Schedule("hourly", task, every=HOUR))
    pass_time(engine, HOUR)
    abroad = sa.create_engine(engine.url, connect_args={"options": "-c timezone=America/New_York"})
    [fired] = fire_due(abroad, schedules)
    with abroad.connect() as connection:
        due = connection.scalar(sa.text("SELECT due::timestamptz FROM job"))
    abroad.dispose()
    assert due == fired.tick


def test_the_time_zone_of_the_session_does_not_matter(engine: sa.Engine, report: Any) -> None:
    schedules = started(engine, Schedule("hourly", report, every=DAY, values={"kind": "x"}, catch_up="all"))
    # A week that contains a day of 25 hours there.
    created, now = datetime(2025, 10, 30, 12, tzinfo=UTC), datetime(2025, 11, 6, 12, tzinfo=UTC)
    execute(engine, "UPDATE sqlaqueue_schedule SET created_at = :created", created=created)
    abroad = sa.create_engine(engine.url, connect_args={"options": "-c timezone=America/New_York"})
    fired = fire_due(abroad, schedules)
    abroad.dispose()
    assert [each.tick for each in fired][:7] == [created + each * DAY for each in range(1, 8)]
    assert fired[6].tick == now


def test_schedules_of_all_classes_of_the_tables_are_fired(engine: sa.Engine, report: Any, session: Session) -> None:
    class Invoice(QueueMixin, report.__bases__[1]):  # type: ignore[misc, name-defined] # the base of the test's own class
        __tablename__ = "invoice"
        id: Mapped[str] = mapped_column(primary_key=True, default=lambda: uuid.uuid4().hex)
        part: Mapped[int] = mapped_column(primary_key=True, default=1)
        type: Mapped[str]
        __mapper_args__ = {"polymorphic_on": "type", "polymorphic_identity": "plain"}  # noqa: RUF012 - as SQLAlchemy reads it

    class Reminder(Invoice):
        __mapper_args__ = {"polymorphic_identity": "reminder"}  # noqa: RUF012 - as SQLAlchemy reads it
        level: Mapped[int | None]

    started(engine, hourly(report), Schedule("remind", Reminder, every=HOUR, values={"level": 3}))
    execute(engine, "INSERT INTO sqlaqueue_schedule (name, queue, every) VALUES ('added', 'invoice', '1 hour')")
    pass_time(engine, HOUR)
    found = {fired.schedule: fired for fired in fire_due(engine, [report])}
    assert found.keys() == {"hourly", "remind", "added"}
    assert session.get_one(Reminder, found["remind"].key).level == 3
    assert type(session.get_one(Invoice, found["added"].key)) is Invoice
    tick = Tick.of(session, session.get_one(Invoice, found["added"].key))
    assert tick is not None
    assert tick.schedule == "added"


def test_what_a_process_has_not_imported_stays_due(engine: sa.Engine, report: Any) -> None:
    def make(tick: Tick) -> Any:
        return report(kind="made")

    schedules = started(engine, hourly(report), hourly(report, "made", make=make))
    execute(engine, "INSERT INTO sqlaqueue_schedule (name, queue, every) VALUES ('gone', 'nowhere', '1 hour')")
    pass_time(engine, HOUR)
    assert [fired.schedule for fired in fire_due(engine, [report])] == ["hourly"]
    assert [fired.schedule for fired in fire_due(engine, schedules)] == ["made"]
    assert stored(engine, "gone")["next_tick"] is None


def test_one_transaction_fires_many(engine: sa.Engine, report: Any) -> None:
    names = [f"s{number}" for number in range(2 * BATCH + 10)]
    schedules = started(engine, *(hourly(report, name) for name in names))
    fire_due(engine, schedules)
    pass_time(engine, HOUR)
    statements: list[str] = []
    sa.event.listen(engine, "before_cursor_execute", lambda c, cursor, text, *_: statements.append(text))
    assert sorted(fired.schedule for fired in fire_due(engine, schedules)) == sorted(names)
    # For each hundred: limits, lock, ticks, jobs, ticks, schedules; further ones for long INSERTs.
    assert len(statements) <= 3 * 7


def test_the_time_zone_of_a_schedule_is_one_of_the_system() -> None:
    assert zone("Europe/Berlin").key == "Europe/Berlin"


# -- the tick of a job ---------------------------------------------------------------------------------------------


def test_a_job_of_no_schedule_has_no_tick(engine: sa.Engine, report: Any, session: Session) -> None:
    hourly(report)
    report.metadata.create_all(engine)
    job = report(kind="x")
    with pytest.raises(StatementError, match="is not in the database"):
        Tick.of(session, job)
    session.add(job)
    session.flush()
    assert Tick.of(session, job) is None
    with pytest.raises(NotAQueueError):
        Tick.of(session, object())
    with pytest.raises(ConfigurationError, match="an Engine"):
        Tick.of(engine, job)  # type: ignore[arg-type] # the point of the test


def test_a_process_that_knows_no_schedule_finds_the_tick(engine: sa.Engine) -> None:
    scheduled, report = make_report.__wrapped__(), make_report.__wrapped__()
    schedules = [hourly(scheduled)]
    scheduled.metadata.create_all(engine)
    start(engine, schedules)
    pass_time(engine, HOUR)
    fire_due(engine, schedules)
    with Session(engine) as session:
        assert isinstance(Tick.of(session, session.scalars(sa.select(report)).one()), Tick)
    assert "sqlaqueue_tick" not in report.metadata.tables


def test_jobs_of_two_queues_with_the_same_key_have_their_own_ticks(engine: sa.Engine, session: Session) -> None:
    models = [make_job(attributes={"__tablename__": name}) for name in ("daily", "weekly")]
    schedules = [started(engine, Schedule(each.__tablename__, each, every=HOUR)) for each in models]
    pass_time(engine, HOUR)
    assert [fired.key for of_one in schedules for fired in fire_due(engine, of_one)] == [(1,), (1,)]
    for model in models:
        tick = Tick.of(session, session.get_one(model, 1))
        assert tick is not None
        assert tick.schedule == model.__tablename__


def test_the_tick_is_read_where_a_session_of_a_scope_writes(engine: sa.Engine, report: Any, session: Session) -> None:
    started(engine, hourly(report))
    pass_time(engine, HOUR)
    fire_due(engine, [report])
    job = session.scalars(sa.select(report)).one()
    replica = sa.create_engine("postgresql+psycopg://nobody@127.0.0.1:1/")

    class Routing(Session):
        def get_bind(self, mapper: Any = None, *, clause: Any = None, **more: Any) -> sa.Engine:
            return engine if isinstance(clause, sa.Update) else replica

    for reading in (scoped_session(sessionmaker(class_=Routing)), Routing()):
        assert Tick.of(reading, job) is not None
        reading.close()


def test_a_key_that_is_used_again_has_the_newest_tick(engine: sa.Engine, report: Any, session: Session) -> None:
    schedules = started(engine, hourly(report))
    ticks = []
    for _ in range(2):
        pass_time(engine, HOUR)
        ticks += [fired.tick for fired in fire_due(engine, schedules)]
        if len(ticks) == 1:
            execute(engine, "TRUNCATE report RESTART IDENTITY")
    tick = Tick.of(session, session.scalars(sa.select(report)).one())
    assert tick is not None
    assert tick.at == ticks[1]


def test_a_key_with_a_moment_is_found_from_any_time_zone(engine: sa.Engine) -> None:
    moment = mapped_column(sa.DateTime(timezone=True), primary_key=True, default=lambda: datetime.now(UTC))
    slot = make_job(attributes={"id": moment, "part": mapped_column(sa.Integer, primary_key=True, default=1)})
    schedules = started(engine, Schedule("hourly", slot, every=HOUR, skip_unfinished=True))
    pass_time(engine, HOUR)
    fire_due(engine, schedules)
    abroad = sa.create_engine(engine.url, connect_args={"options": "-c timezone=Asia/Kolkata"})
    with Session(abroad) as session:
        tick = Tick.of(session, session.scalars(sa.select(slot)).one())
        assert tick is not None
        assert tick.at.tzinfo is UTC
    pass_time(engine, HOUR)
    assert [fired.key for fired in fire_due(abroad, schedules)] == [None]
    abroad.dispose()


# -- fire_schedules() fires in the test's transaction, and travel() lets time pass for schedules -------------------


@pytest.fixture(params=["update_status", "delete_returning", "rows_are_messages"])
def queue(request: pytest.FixtureRequest, engine: sa.Engine) -> Iterator[Any]:
    assert request.param in KINDS
    queue = make_report(request.param)
    hourly(queue)
    queue.metadata.create_all(engine)
    yield queue
    with engine.connect() as connection:
        for table in queue.metadata.sorted_tables:
            assert connection.scalar(sa.select(sa.func.count()).select_from(table)) == 0


def test_a_schedule_fires_when_its_time_has_come(session: Session, queue: Any) -> None:
    def make(tick: Tick) -> Any:
        return queue(kind="made", day=tick.at.date())

    far = (datetime.now(UTC).hour + 12) % 24
    schedules = [
        hourly(queue, catch_up="all"),
        hourly(queue, "daily", every=None, cron=f"0 {far} * * *", make=make, values={}),
    ]
    assert fire_schedules(session, schedules) == []
    travel(session, 59 * timedelta(minutes=1))
    assert fire_schedules(session, schedules) == []
    travel(session, 61)
    [job] = fire_schedules(session, schedules)
    assert job.kind == "sales"
    tick = Tick.of(session, job)
    assert tick is not None
    assert (tick.schedule, tick.late < timedelta(minutes=2)) == ("hourly", True)
    assert enqueued(session, queue) == [job]
    travel(session, DAY)
    kinds = [each.kind for each in fire_schedules(session, schedules)]
    assert sorted(kinds) == ["made"] + ["sales"] * 24
    assert drain(session, queue, lambda own, job: None) == 26


def test_settings_of_the_transaction_are_left_alone(session: Session, queue: Any) -> None:
    session.execute(sa.text("SET LOCAL lock_timeout = '77s'"))
    fire_schedules(session, [hourly(queue)])
    assert session.scalar(sa.text("SHOW lock_timeout")) == "77s"
    assert session.scalar(sa.text("SHOW idle_in_transaction_session_timeout")) == "0"


def test_what_is_stored_is_fired_as_well(engine: sa.Engine, queue: Any) -> None:
    with Session(engine) as session:
        session.execute(
            sa.text(
                "INSERT INTO sqlaqueue_schedule (name, queue, every, values, run_requested_at) "
                """VALUES ('x', 'report', '1 hour', '{"kind": "stored"}', now())"""
            )
        )
        assert [job.kind for job in fire_schedules(session, [queue])] == ["stored"]


def test_anything_else_is_refused(engine: sa.Engine, queue: Any) -> None:
    with pytest.raises(ConfigurationError, match="fire_schedules"):
        fire_schedules(engine, [hourly(queue)])  # type: ignore[arg-type] # the point of the test
    with Session(engine) as session, pytest.raises(ConfigurationError, match="this is no Schedule"):
        fire_schedules(session, [5])  # type: ignore[list-item] # the point of the test


async def test_in_async_code(engine: sa.Engine, shared: Database, queue: Any) -> None:
    own = create_async_engine(shared.url("asyncpg"))
    async with AsyncSession(own) as session:
        assert await async_fire_schedules(session, [hourly(queue)]) == []
        await async_travel(session, HOUR)
        [job] = await async_fire_schedules(session, [hourly(queue)])
        assert job.kind == "sales"
    await own.dispose()
