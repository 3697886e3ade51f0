"""Broken, slow and locked schedules, changes between two looks, and a clock that was wrong."""

import threading
import time
import uuid
from itertools import pairwise
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from sqlaqueue import QueueMixin, Schedule, Scheduler
from sqlaqueue.consumer.core.effects import ExecuteInOwnSession, drive
from sqlaqueue.consumer.maintenance import firing
from sqlaqueue.consumer.maintenance.firing import FiringProcess
from sqlaqueue.schedules import fire as fire_module
from sqlaqueue.schedules.schedule import schedule_groups
from sqlaqueue.schedules.store import look
from sqlaqueue.sessions import execute as execute_operation
from tests.programs import wait_until
from tests.schedules.models import (
    HOUR,
    MINUTE,
    count_jobs,
    execute,
    hourly,
    make_report,
    pass_time,
    prepared,
    start,
    stored,
    ticks_in,
)
from tests.schedules.test_processes import running
from tests.servers import Database


class Process:
    """A process that fires schedules, one turn at a time, and counts its transactions and statements."""

    def __init__(self, engine: sa.Engine, schedules: list[Any]) -> None:
        self.engine = sa.create_engine(engine.url)
        self.process = FiringProcess(schedule_groups(schedules, "x"), lambda: None, lambda engine, state: None)
        self.transactions = 0
        self.statements: list[str] = []
        sa.event.listen(self.engine, "before_cursor_execute", lambda c, cursor, text, *_: self.statements.append(text))
        self.turn()
        self.transactions = 0
        self.statements.clear()

    def run(self, routine: Any) -> Any:
        return drive(routine, self._perform)

    def turn(self) -> None:
        for state in self.process.states:
            self.run(firing._turn(self.process, state))

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
        schedules[0].model.metadata.create_all(engine)
        made.append(Process(engine, list(schedules)))
        return made[-1]

    yield make
    for process in made:
        process.engine.dispose()


def test_what_is_wrong_with_one_schedule_costs_the_others_nothing(
    engine: sa.Engine, report: Any, processes: Any
) -> None:
    def make(tick: Any) -> Any:
        raise SystemExit(3)

    process = processes(*(hourly(report, f"s{number}") for number in range(30)), hourly(report, "raises", make=make))
    execute(engine, "UPDATE sqlaqueue_schedule SET cron = 'x', every = NULL WHERE name = 's7'")
    pass_time(engine, HOUR)
    process.transactions = 0
    process.turn()
    assert count_jobs(engine, report) == 29
    assert process.failing == ["raises", "s7"]
    assert "SystemExit(3)" in stored(engine, "raises")["last_error"]
    # Two looks, one firing and a second that finds no more, and a record of each failure.
    assert process.transactions == 6


def test_a_database_that_cannot_store_a_text(shared: Database, caplog: pytest.LogCaptureFixture) -> None:
    """An error is recorded with escapes, a schedule with such a text is named, and the others are fired."""
    report, name = make_report(), f"latin1_{uuid.uuid4().hex[:8]}"

    def make(tick: Any) -> Any:
        raise ValueError("5 €")

    schedules = [hourly(report), hourly(report, "raises", make=make), hourly(report, "euro", values={"kind": "€"})]
    with shared.connect() as connection:
        connection.execute(f"CREATE DATABASE {name} ENCODING 'LATIN1' LOCALE 'C' TEMPLATE template0".encode())
    engine = sa.create_engine(Database(shared.server, name).url())
    try:
        report.metadata.create_all(engine)
        process = Process(engine, schedules)
        pass_time(engine, HOUR)
        process.turn()
        assert count_jobs(engine, report) == 1
        assert process.failing == ["raises"]
        assert stored(engine, "raises")["last_error"].endswith("5 \\u20ac")
        assert "'euro' cannot be fired" in caplog.text
        process.engine.dispose()
    finally:
        engine.dispose()
        with shared.connect() as connection:
            connection.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())


def test_what_the_server_refuses_is_found_by_halving(engine: sa.Engine, report: Any, processes: Any) -> None:
    process = processes(*(hourly(report, f"s{number:02}") for number in range(64)))
    execute(engine, """UPDATE sqlaqueue_schedule SET values = '{"kind": null}' WHERE name = 's40'""")
    pass_time(engine, HOUR)
    process.transactions = 0
    process.turn()
    assert count_jobs(engine, report) == 63
    assert process.failing == ["s40"]
    assert process.transactions < 24
    assert 20 < process.process.states[0].until_retry() <= 30


def test_a_locked_table_delays_only_its_own_queue(engine: sa.Engine, report: Any, processes: Any) -> None:
    class Other(QueueMixin, report.__bases__[1]):  # type: ignore[misc, name-defined] # the base of the test's own class
        __tablename__ = "other"
        id: Mapped[int] = mapped_column(primary_key=True)

    process = processes(*(hourly(report, f"s{number}") for number in range(20)), Schedule("other", Other, every=HOUR))
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


def test_what_takes_long_ends_the_transaction(
    engine: sa.Engine, report: Any, processes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(tick: Any) -> Any:
        time.sleep(0.05)
        return report(kind="slow")

    slow = hourly(report, "slow", make=make, values={}, catch_up="all")
    process = processes(hourly(report, "a"), slow, hourly(report, "z"))
    monkeypatch.setattr(fire_module, "_MOST_SECONDS", 0.1)
    pass_time(engine, 9 * HOUR)
    execute(engine, "UPDATE sqlaqueue_schedule SET run_requested_at = now()")
    process.transactions = 0
    process.turn()
    assert [len(ticks_in(engine, name)) for name in ("a", "slow", "z")] == [2, 10, 2]
    assert process.transactions >= 5
    ticks = [tick for tick, _ in ticks_in(engine, "slow")][:9]
    assert [later - tick for tick, later in pairwise(ticks)] == [HOUR] * 8
    assert stored(engine, "slow")["run_requested_at"] is None
    monkeypatch.setattr(fire_module, "_TOO_SLOW", 0.04)
    pass_time(engine, HOUR)
    process.turn()
    assert [len(ticks_in(engine, name)) for name in ("a", "slow", "z")] == [3, 10, 3]
    assert process.failing == ["slow"]
    assert "make= took" in stored(engine, "slow")["last_error"]


def test_many_jobs_are_several_transactions(
    engine: sa.Engine, report: Any, processes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = processes(*(hourly(report, name, catch_up="all") for name in "abc"))
    monkeypatch.setattr(fire_module, "_MOST_JOBS", 10)
    pass_time(engine, 25 * HOUR)
    process.transactions = 0
    process.turn()
    assert [len(ticks_in(engine, name)) for name in "abc"] == [25, 25, 25]
    assert process.transactions >= 9


@pytest.mark.few(2)
@pytest.mark.parametrize("state", ["58P01", "40001", "57014", "23514", "53400"])
def test_an_error_that_only_one_schedule_meets_is_no_outage(
    engine: sa.Engine, report: Any, processes: Any, state: str
) -> None:
    schedules = prepared(engine, hourly(report, "good"), hourly(report, "bad", values={"kind": "bad"}))
    execute(
        engine,
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        f"RAISE EXCEPTION 'no' USING ERRCODE = '{state}'; END $$",
    )
    execute(
        engine,
        "CREATE TRIGGER refuse BEFORE INSERT ON report FOR EACH ROW WHEN (NEW.kind = 'bad') EXECUTE FUNCTION refuse()",
    )
    process = processes(*schedules)
    pass_time(engine, HOUR)
    process.turn()
    # A statement that was cancelled may concern all jobs of the queue.
    assert process.failing == (["bad", "good"] if state == "57014" else ["bad"])
    assert stored(engine, "bad")["last_error"] is not None


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
def test_a_locked_schedule_is_declared_later(shared: Database, engine: sa.Engine, report: Any, driver: Any) -> None:
    old = [hourly(report, name) for name in "abc"]
    report.metadata.create_all(engine)
    start(engine, old)
    new = [hourly(report, name, values={"kind": "new"}) for name in "abc"]
    kind = "scheduler" if driver == "psycopg" else "async scheduler"
    with engine.connect() as connection:
        connection.execute(sa.text("SELECT 1 FROM sqlaqueue_schedule WHERE name = 'b' FOR UPDATE"))
        with running(kind, shared.url(driver), report, new):
            wait_until(lambda: stored(engine, "c")["values"] == {"kind": "new"})
            execute(engine, "UPDATE sqlaqueue_schedule SET run_requested_at = now() WHERE name <> 'b'")
            wait_until(lambda: ticks_in(engine, "a") and ticks_in(engine, "c"))
            assert stored(engine, "b")["values"] == {"kind": "sales"}
            connection.rollback()
            wait_until(lambda: stored(engine, "b")["values"] == {"kind": "new"})


def test_it_stops_while_its_table_is_locked(shared: Database, engine: sa.Engine, report: Any) -> None:
    schedules = prepared(engine, hourly(report))
    with engine.connect() as connection:
        scheduler = Scheduler(sessionmaker(engine), schedules)
        connection.execute(sa.text("LOCK sqlaqueue_schedule IN ACCESS EXCLUSIVE MODE"))
        with scheduler:
            time.sleep(0.7)
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
        model.metadata.create_all(engine)
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
        # What is wrong with the tables of one group is no matter of the other.
        execute(engine, "DROP TABLE one.sqlaqueue_schedule")
        execute(engine, "UPDATE two.sqlaqueue_schedule SET run_requested_at = now()")
        process.turn()
        with engine.connect() as connection:
            assert connection.scalar(sa.text("SELECT count(*) FROM two.sqlaqueue_tick")) == 2
    finally:
        execute(engine, "DROP SCHEMA one CASCADE; DROP SCHEMA two CASCADE")


def test_a_schedule_of_no_class_is_reported_before_it_is_planned(
    engine: sa.Engine, report: Any, session: Session
) -> None:
    [group] = schedule_groups(prepared(engine, hourly(report)), "x")
    execute(engine, "INSERT INTO sqlaqueue_schedule (name, queue, every) VALUES ('gone', 'reprot', '1 hour')")
    assert look(session, group).unknown == []
    pass_time(engine, 2 * MINUTE)
    assert look(session, group).unknown == ["gone"]


def test_a_look_does_not_wait_for_long(
    engine: sa.Engine, report: Any, processes: Any, caplog: pytest.LogCaptureFixture
) -> None:
    process = processes(hourly(report))
    with engine.begin() as connection:
        connection.execute(sa.text("LOCK sqlaqueue_schedule IN ACCESS EXCLUSIVE MODE"))
        process.turn()
    assert "lock timeout" in caplog.text
    assert "[SQL" not in caplog.text


def test_a_schedule_that_was_repaired_is_reported_again(
    engine: sa.Engine, report: Any, processes: Any, caplog: pytest.LogCaptureFixture
) -> None:
    process = processes(hourly(report))
    [state] = process.process.states
    for times in (1, 2):
        execute(engine, "UPDATE sqlaqueue_schedule SET every = NULL, cron = 'x'")
        process.turn()
        assert caplog.text.count("cannot be fired") == times
        execute(engine, "UPDATE sqlaqueue_schedule SET every = '1 hour', cron = NULL")
        state._failures["hourly"].retry_at = 0
        process.turn()
        assert stored(engine)["last_error"] is None
        assert state.until_retry() == float("inf")


def test_a_slow_function_that_raises_is_called_once(
    engine: sa.Engine, processes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    report, calls = make_report(), []

    def make(tick: Any) -> Any:
        calls.append(tick)
        time.sleep(0.05)
        raise TimeoutError

    process = processes(*(hourly(report, name) for name in "abcdefgh"), hourly(report, "slow", make=make))
    # As if the server had ended the transaction, which has stood still for so long.
    monkeypatch.setattr(fire_module, "_TOO_SLOW", 0.04)
    pass_time(engine, HOUR)
    process.turn()
    assert len(calls) == 1
    assert "make= took" in stored(engine, "slow")["last_error"]
    assert count_jobs(engine, report) == 8
