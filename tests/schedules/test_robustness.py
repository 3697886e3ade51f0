"""Broken, slow and locked schedules, changes between two looks, and a clock that was wrong."""

from __future__ import annotations

import threading
import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from sqlaqueue import QueueMixin, Schedule, Scheduler, tick_of
from sqlaqueue.consumer.core.driver import drive
from sqlaqueue.consumer.core.effects import ExecuteInOwnSession
from sqlaqueue.consumer.schedules import fire_schedules
from sqlaqueue.consumer.schedules.firing_process import FiringProcess
from sqlaqueue.schedules import fire as fire_module
from sqlaqueue.schedules.declare import declare
from sqlaqueue.schedules.group import schedule_groups
from sqlaqueue.schedules.look import look
from sqlaqueue.schedules.upkeep import delete_old_ticks
from sqlaqueue.write_routing import execute as execute_operation
from tests.schedules.models import (
    DAY,
    HOUR,
    MINUTE,
    count_jobs,
    create,
    execute,
    fire_due,
    hourly,
    make_report,
    pass_time,
    start,
    stored,
    ticks_in,
)

if TYPE_CHECKING:
    from tests.servers import Database


class Process:
    """A process that fires schedules, one turn at a time, and counts its transactions and statements."""

    def __init__(self, engine: sa.Engine, schedules: list[Any]) -> None:
        self.engine = sa.create_engine(engine.url)
        self.process = FiringProcess(schedule_groups(schedules, "x"), lambda: None, lambda engine, state: None)
        self.transactions = 0
        self.statements: list[str] = []
        sa.event.listen(self.engine, "before_cursor_execute", lambda c, cursor, text, *_: self.statements.append(text))
        self.run(fire_schedules._start(self.process))
        self.transactions = 0
        self.statements.clear()

    def run(self, routine: Any) -> Any:
        return drive(routine, self._perform)

    def turn(self) -> float:
        """Fire what is due, and return the pause until the next look."""
        pause: float = self.run(fire_schedules._turn(self.process))
        return pause

    @property
    def failing(self) -> list[str]:
        return self.process.states[0].failing

    def _perform(self, effect: ExecuteInOwnSession) -> Any:
        self.transactions += 1
        with Session(self.engine) as session:
            return execute_operation(session, effect.operation, effect.arguments)


@pytest.fixture
def processes(engine: sa.Engine) -> Any:
    made: list[Process] = []

    def make(*schedules: Any) -> Process:
        made.append(Process(engine, list(schedules)))
        return made[-1]

    yield make
    for process in made:
        process.engine.dispose()


def test_what_is_wrong_with_one_schedule_costs_the_others_nothing(engine: sa.Engine, processes: Any) -> None:
    report = make_report()

    def make(tick: Any) -> Any:
        raise SystemExit(3)

    schedules = [hourly(report, f"s{number}") for number in range(30)] + [hourly(report, "raises", make=make)]
    create(engine, report)
    process = processes(*schedules)
    process.turn()
    execute(engine, "UPDATE sqlaqueue_schedule SET cron = 'x', every = NULL WHERE name = 's7'")
    pass_time(engine, HOUR)
    process.transactions = 0
    process.turn()
    assert count_jobs(engine, report) == 29
    assert process.failing == ["raises", "s7"]
    assert "SystemExit(3)" in stored(engine, "raises")["last_error"]
    # Two looks, one firing and a second that finds no more, and a record of each failure.
    assert process.transactions == 6


def test_what_the_server_refuses_is_found_by_halving(engine: sa.Engine, processes: Any) -> None:
    report = make_report()
    schedules = [hourly(report, f"s{number:02}") for number in range(64)]
    create(engine, report)
    process = processes(*schedules)
    process.turn()
    execute(engine, """UPDATE sqlaqueue_schedule SET values = '{"kind": null}' WHERE name = 's40'""")
    pass_time(engine, HOUR)
    process.transactions = 0
    process.turn()
    assert count_jobs(engine, report) == 63
    assert process.failing == ["s40"]
    assert process.transactions < 24
    assert 20 < process.process.states[0].until_retry() <= 30


def test_a_locked_table_delays_only_its_own_queue(engine: sa.Engine, processes: Any) -> None:
    report = make_report()

    class Other(QueueMixin, report.__bases__[1]):  # type: ignore[misc, name-defined] # the base of the test's own class
        __tablename__ = "other"
        id: Mapped[int] = mapped_column(primary_key=True)

    schedules = [hourly(report, f"s{number}") for number in range(20)] + [Schedule("other", Other, every=HOUR)]
    create(engine, report)
    process = processes(*schedules)
    process.turn()
    pass_time(engine, HOUR)
    with engine.begin() as connection:
        connection.execute(sa.text("LOCK report IN ACCESS EXCLUSIVE MODE"))
        began = time.monotonic()
        process.turn()
        took = time.monotonic() - began
    assert len(ticks_in(engine, "other")) == 1
    assert len(process.failing) == 20
    # One wait of half a second for all of them together, and one for the queue: not one for each schedule.
    assert took < 5
    assert count_jobs(engine, report) == 0


def test_a_slow_function_is_called_alone(engine: sa.Engine, processes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    report = make_report()

    def make(tick: Any) -> Any:
        time.sleep(0.2)
        return report(kind="slow")

    schedules = [hourly(report, "a"), hourly(report, "slow", make=make, values={}), hourly(report, "z")]
    create(engine, report)
    process = processes(*schedules)
    process.turn()
    monkeypatch.setattr(fire_module, "_SLOW", 0.1)
    pass_time(engine, HOUR)
    process.turn()
    assert [len(ticks_in(engine, name)) for name in ("a", "slow", "z")] == [1, 1, 1]
    assert process.process.states[0].slow == {"slow"}
    monkeypatch.setattr(fire_module, "_TOO_SLOW", 0.1)
    pass_time(engine, HOUR)
    process.turn()
    assert [len(ticks_in(engine, name)) for name in ("a", "slow", "z")] == [2, 1, 2]
    assert process.failing == ["slow"]
    assert "make= took" in stored(engine, "slow")["last_error"]


@pytest.mark.parametrize(
    ("edits", "ticks"),
    [
        (["every = '10 min'"], 3),
        (["cron = '@yearly', every = NULL", "cron = NULL, every = '10 min'"], 3),
        (["paused_at = now()", "every = '10 min', paused_at = NULL"], 3),
        (["every = '1 day', timezone = 'Europe/Rome'"], 0),
    ],
)
def test_no_tick_between_a_change_and_its_notice_is_lost(engine: sa.Engine, edits: list[str], ticks: int) -> None:
    report = make_report()
    schedules = [hourly(report, catch_up="all")]
    create(engine, report)
    start(engine, schedules)
    fire_due(engine, schedules)
    for edit in edits:
        execute(engine, f"UPDATE sqlaqueue_schedule SET {edit}")
    pass_time(engine, 31 * MINUTE)
    assert len(fire_due(engine, schedules)) == ticks


def test_a_tick_that_was_due_before_the_change_is_fired(engine: sa.Engine) -> None:
    report = make_report()
    schedules = [hourly(report)]
    create(engine, report)
    start(engine, schedules)
    fire_due(engine, schedules)
    pass_time(engine, HOUR)
    due = stored(engine)["next_tick"]
    execute(engine, "UPDATE sqlaqueue_schedule SET cron = '@yearly', every = NULL")
    assert [fired.tick for fired in fire_due(engine, schedules)] == [due]
    assert stored(engine)["next_tick"] > due + HOUR
    # Not of one that was paused meanwhile.
    execute(engine, "UPDATE sqlaqueue_schedule SET cron = NULL, every = '1 hour'")
    fire_due(engine, schedules)
    pass_time(engine, HOUR)
    execute(engine, "UPDATE sqlaqueue_schedule SET paused_at = now()")
    execute(engine, "UPDATE sqlaqueue_schedule SET paused_at = NULL")
    assert fire_due(engine, schedules) == []


def test_a_change_and_its_reversal_are_noticed(engine: sa.Engine) -> None:
    report = make_report()
    schedules = [hourly(report, catch_up="all")]
    create(engine, report)
    start(engine, schedules)
    fire_due(engine, schedules)
    execute(engine, "UPDATE sqlaqueue_schedule SET paused_at = now()")
    pass_time(engine, 3 * HOUR)
    execute(engine, "UPDATE sqlaqueue_schedule SET paused_at = NULL")
    assert fire_due(engine, schedules) == []
    assert stored(engine)["next_tick"] > datetime.now(UTC)


def test_without_the_trigger_a_change_counts_from_its_notice(engine: sa.Engine) -> None:
    report = make_report()
    schedules = [hourly(report, catch_up="all")]
    create(engine, report)
    start(engine, schedules)
    fire_due(engine, schedules)
    execute(engine, "ALTER TABLE sqlaqueue_schedule DISABLE TRIGGER USER")
    execute(engine, "UPDATE sqlaqueue_schedule SET every = '1 min'")
    pass_time(engine, 30 * MINUTE)
    assert fire_due(engine, schedules) == []
    assert stored(engine)["edited_at"] is None


def test_a_next_tick_that_was_deleted_is_computed_again(engine: sa.Engine) -> None:
    report = make_report()
    schedules = [hourly(report)]
    create(engine, report)
    start(engine, schedules)
    fire_due(engine, schedules)
    execute(engine, "UPDATE sqlaqueue_schedule SET next_tick = NULL")
    assert fire_due(engine, schedules) == []
    assert stored(engine)["next_tick"] > datetime.now(UTC)


def test_a_clock_that_was_far_ahead(engine: sa.Engine) -> None:
    report = make_report()
    schedules = [hourly(report)]
    create(engine, report)
    start(engine, schedules)
    pass_time(engine, HOUR)
    [first] = fire_due(engine, schedules)
    execute(
        engine, "UPDATE sqlaqueue_schedule SET last_tick = now() + interval '40 years', next_tick = now() + '41 years'"
    )
    assert fire_due(engine, schedules) == []
    row = stored(engine)
    assert row["last_tick"] is None
    assert row["next_tick"] - datetime.now(UTC) <= HOUR
    pass_time(engine, HOUR)
    [second] = fire_due(engine, schedules)
    assert second.tick == first.tick
    # Of an hour ahead, the ticks that were fired then are not fired again.
    execute(engine, "UPDATE sqlaqueue_schedule SET last_tick = now() + interval '1 h', next_tick = now() + '2 h'")
    assert fire_due(engine, schedules) == []
    assert stored(engine)["next_tick"] > datetime.now(UTC) + HOUR


@pytest.mark.parametrize(
    "change",
    [
        *(
            f"{name} = '{value}'"
            for name in ("next_tick", "last_tick", "paused_at", "run_requested_at", "created_at")
            for value in ("infinity", "-infinity", "20000-01-01")
        ),
        *(f"{name} = '{value}'" for name in ("grace", "jitter", "every") for value in ("10000 years", "-1 second")),
        "catch_up = -1",
        "catch_up = 1001",
        "every = '0.5 s'",
        "cron = '* * * * *'",
        "every = NULL",
    ],
)
def test_the_server_refuses_what_no_process_could_read(engine: sa.Engine, change: str) -> None:
    report = make_report()
    schedules = [hourly(report)]
    create(engine, report)
    start(engine, schedules)
    with pytest.raises(IntegrityError, match="ck_sqlaqueue_schedule_"):
        execute(engine, f"UPDATE sqlaqueue_schedule SET {change}")


def test_a_locked_schedule_is_declared_later(shared: Database, engine: sa.Engine) -> None:
    report = make_report()
    old = [hourly(report, name) for name in "abc"]
    create(engine, report)
    start(engine, old)
    new = [hourly(report, name, values={"kind": "new"}) for name in "abc"]
    [group] = schedule_groups(new, "x")
    with engine.begin() as connection, Session(engine) as session:
        connection.execute(sa.text("UPDATE sqlaqueue_schedule SET paused_at = now() WHERE name = 'b'"))
        session.connection(execution_options={"isolation_level": "AUTOCOMMIT"}).execute(
            sa.text("SET lock_timeout = 200")
        )
        written, kept, failed = declare(session, group)
    assert (written, kept, failed) == (["a", "c"], [], ["b"])
    with engine.connect() as connection:
        connection.execute(sa.text("SELECT 1 FROM sqlaqueue_schedule WHERE name = 'b' FOR UPDATE"))
        with Scheduler(sessionmaker(engine), new):
            time.sleep(1.5)
            connection.rollback()
            until = time.monotonic() + 20
            while stored(engine, "b")["values"] != {"kind": "new"}:
                assert time.monotonic() < until
                time.sleep(0.05)


def test_it_stops_while_its_table_is_locked(shared: Database, engine: sa.Engine) -> None:
    report = make_report()
    schedules = [hourly(report)]
    create(engine, report)
    with engine.connect() as connection:
        scheduler = Scheduler(sessionmaker(engine), schedules)
        connection.execute(sa.text("LOCK sqlaqueue_schedule IN ACCESS EXCLUSIVE MODE"))
        with scheduler:
            time.sleep(0.7)
            began = time.monotonic()
        assert time.monotonic() - began < 5
    assert not [thread for thread in threading.enumerate() if "schedul" in thread.name]


def test_two_groups_of_schedules_are_apart(engine: sa.Engine, processes: Any) -> None:
    models = []
    for schema in ("one", "two"):

        class Base(DeclarativeBase):
            metadata = sa.MetaData(schema=schema)

        class Job(QueueMixin, Base):
            __tablename__ = "job"
            id: Mapped[int] = mapped_column(primary_key=True)
            kind: Mapped[str | None]

        models.append(Job)
        execute(engine, f"CREATE SCHEMA {schema}")
    schedules = [Schedule("same", model, every=HOUR) for model in models]
    for model in models:
        create(engine, model)
    try:
        process = processes(*schedules)
        process.turn()
        execute(engine, "UPDATE one.sqlaqueue_schedule SET every = NULL, cron = 'x'")
        for schema in ("one", "two"):
            execute(engine, f"UPDATE {schema}.sqlaqueue_schedule SET next_tick = now()")
            execute(
                engine,
                f"INSERT INTO {schema}.sqlaqueue_tick (schedule, tick, queue, fired_at) "
                "VALUES ('gone', now(), 'job', now() - interval '9 days')",
            )
        first, second = process.process.states
        first.clean_up_at = second.clean_up_at = 0
        process.turn()
        assert (first.failing, second.failing) == (["same"], [])
        with engine.connect() as connection:
            counts = [
                connection.scalar(sa.text(f"SELECT count(*) FROM {name}.sqlaqueue_tick")) for name in ("one", "two")
            ]
        assert counts == [0, 1]
    finally:
        execute(engine, "DROP SCHEMA one CASCADE; DROP SCHEMA two CASCADE")


def test_a_requested_run_is_newer_than_all_ticks(engine: sa.Engine) -> None:
    report = make_report()
    schedules = [hourly(report, jitter=1000, skip_unfinished=True)]
    create(engine, report)
    start(engine, schedules)
    pass_time(engine, HOUR)
    [first] = fire_due(engine, schedules)
    execute(engine, "UPDATE sqlaqueue_schedule SET run_requested_at = last_tick")
    [skipped] = fire_due(engine, schedules)
    assert skipped.tick > first.tick
    assert skipped.key is None
    execute(engine, "DELETE FROM report")
    execute(engine, "UPDATE sqlaqueue_schedule SET run_requested_at = now() - interval '1 year'")
    [third] = fire_due(engine, schedules)
    assert third.tick > skipped.tick
    assert third.key is not None


def test_a_requested_run_is_due_at_once(engine: sa.Engine) -> None:
    report = make_report()
    schedules = [hourly(report, jitter=10**6)]
    create(engine, report)
    start(engine, schedules)
    execute(engine, "UPDATE sqlaqueue_schedule SET run_requested_at = now()")
    fire_due(engine, schedules)
    with Session(engine) as session:
        assert session.scalars(sa.select(report.run_at)).one() < datetime.now(UTC)


def test_a_key_that_is_used_again_has_the_newest_tick(engine: sa.Engine) -> None:
    report = make_report()
    schedules = [hourly(report)]
    create(engine, report)
    start(engine, schedules)
    ticks = []
    for _ in range(2):
        pass_time(engine, HOUR)
        ticks += [fired.tick for fired in fire_due(engine, schedules)]
        if len(ticks) == 1:
            execute(engine, "TRUNCATE report RESTART IDENTITY")
    with Session(engine) as session:
        tick = tick_of(session, session.scalars(sa.select(report)).one())
        assert tick is not None
        assert tick.at == ticks[1]


def test_a_key_with_a_moment_is_found_from_any_time_zone(engine: sa.Engine) -> None:
    class Base(DeclarativeBase):
        pass

    class Slot(QueueMixin, Base):
        __tablename__ = "slot"
        at: Mapped[datetime] = mapped_column(
            sa.DateTime(timezone=True), primary_key=True, default=lambda: datetime.now(UTC)
        )
        part: Mapped[int] = mapped_column(primary_key=True, default=1)

    schedules = [Schedule("hourly", Slot, every=HOUR, skip_unfinished=True)]
    create(engine, Slot)
    start(engine, schedules)
    pass_time(engine, HOUR)
    fire_due(engine, schedules)
    abroad = sa.create_engine(engine.url, connect_args={"options": "-c timezone=Asia/Kolkata"})
    with Session(abroad) as session:
        assert tick_of(session, session.scalars(sa.select(Slot)).one()) is not None
    pass_time(engine, HOUR)
    assert [fired.key for fired in fire_due(abroad, schedules)] == [None]
    abroad.dispose()


def test_the_tick_of_a_job_that_runs_for_weeks_is_kept(engine: sa.Engine) -> None:
    report = make_report()
    schedules = [hourly(report, skip_unfinished=True, every=MINUTE, grace=DAY)]
    create(engine, report)
    start(engine, schedules)
    pass_time(engine, MINUTE)
    [first] = fire_due(engine, schedules)
    execute(
        engine,
        "INSERT INTO sqlaqueue_tick (schedule, tick, queue, fired_at) SELECT 'hourly', tick + n * interval '1 min', "
        "'report', now() FROM sqlaqueue_tick, generate_series(1, 150) n",
    )
    pass_time(engine, 10 * DAY)
    [group] = schedule_groups(schedules, "x")
    with Session(engine) as session:
        assert delete_old_ticks(session, group) == 50
    assert ticks_in(engine)[0][1] == list(first.key or ())
    assert [fired.key for fired in fire_due(engine, schedules)] == [None]


def test_a_schedule_of_no_class_is_reported_before_it_is_planned(engine: sa.Engine) -> None:
    report = make_report()
    [group] = schedule_groups([hourly(report)], "x")
    create(engine, report)
    execute(engine, "INSERT INTO sqlaqueue_schedule (name, queue, every) VALUES ('gone', 'reprot', '1 hour')")
    with Session(engine) as session:
        assert look(session, group).unknown == []
        pass_time(engine, 2 * MINUTE)
        assert look(session, group).unknown == ["gone"]


def test_a_firing_does_not_wait_for_long(engine: sa.Engine, processes: Any) -> None:
    report = make_report()
    create(engine, report)
    schedules = [hourly(report)]
    create(engine, report)
    process = processes(*schedules)
    process.turn()
    assert "set_config" in process.statements[0]
    with engine.begin() as connection:
        connection.execute(sa.text("LOCK sqlaqueue_schedule IN ACCESS EXCLUSIVE MODE"))
        began = time.monotonic()
        with pytest.raises(DBAPIError, match="lock timeout"):
            process.turn()
        assert time.monotonic() - began < 5
    assert timedelta(0) < stored(engine)["next_tick"] - datetime.now(UTC) <= HOUR
