"""Schedulers and Consumers that run: they fire, obey changes, survive errors, and stop."""

import asyncio
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from sqlaqueue import AsyncConsumer, AsyncScheduler, Consumer, Schedule, Scheduler
from sqlaqueue.admin import QueueAdmin, ScheduleAdmin
from sqlaqueue.consumer import pace
from sqlaqueue.consumer.maintenance import firing
from sqlaqueue.consumer.maintenance.firing import POLL_INTERVAL, FiringProcess, GroupState
from sqlaqueue.exc import ConfigurationError, DatabaseNotReadyError
from sqlaqueue.notify_payloads import Heartbeat, Signal
from sqlaqueue.schedules.schedule import schedule_groups
from tests.faults.proxy import Proxy
from tests.programs import wait_until
from tests.schedules.models import HOUR, count_jobs, execute, hourly, make_report, pass_time, prepared, stored, ticks_in
from tests.servers import Database

SECOND = {"every": None, "cron": "* * * * * *"}
ADD = """
INSERT INTO sqlaqueue_schedule (name, queue, cron, values)
VALUES ('added', 'report', '* * * * * *', '{"kind": "added"}')
"""


@contextmanager
def running(kind: str, url: str, model: Any, schedules: list[Any], driver: str = "psycopg") -> Iterator[None]:
    """Fire schedules in the background, by a Scheduler or a Consumer, sync or async."""
    if not kind.startswith("async"):
        engine = sa.create_engine(url)
        sessions = sessionmaker(engine)
        process: Any = Scheduler(sessions, schedules)
        if kind == "consumer":
            process = Consumer(model, lambda session, job: None, sessions, schedules=schedules)
        try:
            with process:
                yield
        finally:
            engine.dispose()
        return
    stop, failed = threading.Event(), []

    async def handle(session: Any, job: Any) -> None: ...

    async def main() -> None:
        engine = create_async_engine(url)
        sessions = async_sessionmaker(engine)
        process: Any = AsyncScheduler(sessions, schedules)
        if kind == "async consumer":
            process = AsyncConsumer(model, handle, sessions, schedules=schedules)
        try:
            async with process:
                while not stop.is_set():
                    await asyncio.sleep(0.02)
        finally:
            await engine.dispose()

    def run() -> None:
        try:
            asyncio.run(main())
        except BaseException as error:  # noqa: BLE001 - it is raised below
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        if failed:
            raise failed[0]


WAYS = [
    ("scheduler", "psycopg"),
    pytest.param("scheduler", "psycopg2", marks=pytest.mark.thorough),
    ("consumer", "psycopg"),
    ("async scheduler", "asyncpg"),
    pytest.param("async consumer", "psycopg", marks=pytest.mark.thorough),
]


@pytest.mark.few(1)
@pytest.mark.once
@pytest.mark.parametrize(("kind", "driver"), WAYS)
def test_schedules_are_fired_after_all_connections_went_silent(
    shared: Database, engine: sa.Engine, kind: str, driver: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a failover behind a proxy: a connection without a reply is given up."""
    monkeypatch.setattr(pace, "LONGEST_WAIT", 2.0)
    report = make_report()
    schedules = prepared(engine, hourly(report, **SECOND))
    with Proxy(shared) as proxy, running(kind, proxy.url(driver), report, schedules, driver):
        wait_until(lambda: count_jobs(engine, report))
        proxy.go_silent()
        fired = count_jobs(engine, report)
        wait_until(lambda: count_jobs(engine, report) > fired + 1)


@pytest.mark.few(1)
@pytest.mark.parametrize(("kind", "driver"), WAYS)
def test_changes_by_sql_are_obeyed(shared: Database, engine: sa.Engine, report: Any, kind: str, driver: Any) -> None:
    schedules = prepared(engine, hourly(report), hourly(report, "seconds", **SECOND))
    with running(kind, shared.url(driver), report, schedules):
        wait_until(lambda: ticks_in(engine, "seconds"))
        execute(engine, "UPDATE sqlaqueue_schedule SET paused_at = now() WHERE name = 'seconds'")
        # It is read when the next tick is fired, whatever notifications do.
        before = len(ticks_in(engine, "seconds"))
        for change in (
            "UPDATE sqlaqueue_schedule SET run_requested_at = now() WHERE name = 'hourly'",
            "UPDATE sqlaqueue_schedule SET every = NULL, cron = '* * * * * *' WHERE name = 'hourly'",
            ADD,
        ):
            name = "added" if "added" in change else "hourly"
            number, began = len(ticks_in(engine, name)), time.monotonic()
            execute(engine, change)
            wait_until(lambda name=name, number=number: len(ticks_in(engine, name)) > number)  # type: ignore[misc] # mypy cannot infer it
            assert time.monotonic() - began < POLL_INTERVAL
        assert len(ticks_in(engine, "seconds")) <= before + 1
        execute(engine, "UPDATE sqlaqueue_schedule SET paused_at = NULL WHERE name = 'seconds'")
        wait_until(lambda: len(ticks_in(engine, "seconds")) > before + 1)
    if kind.endswith("consumer"):
        with Session(engine) as session:
            assert QueueAdmin(session, report).stats().states["completed"] > 0


def test_several_processes_fire_each_tick_once(shared: Database, engine: sa.Engine, report: Any) -> None:
    schedules = prepared(engine, *(hourly(report, f"s{number}", **SECOND) for number in range(20)))
    with (
        running("scheduler", shared.url(), report, schedules),
        running("scheduler", shared.url(), report, schedules),
        running("async scheduler", shared.url("asyncpg"), report, schedules),
    ):
        wait_until(lambda: len(ticks_in(engine, "s19")) >= 3)
    keys = [tuple(key) for number in range(20) for _, key in ticks_in(engine, f"s{number}")]
    assert len(keys) == len(set(keys)) == count_jobs(engine, report)


def test_one_that_cannot_be_fired_does_not_stop_the_others(
    shared: Database, engine: sa.Engine, report: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def make(tick: Any) -> Any:
        raise ZeroDivisionError

    schedules = prepared(
        engine, hourly(report), hourly(report, "raises", make=make, **SECOND), hourly(report, "null", **SECOND)
    )
    with caplog.at_level(logging.WARNING, "sqlaqueue"), running("scheduler", shared.url(), report, schedules):
        wait_until(lambda: ticks_in(engine, "null"))
        execute(engine, """UPDATE sqlaqueue_schedule SET values = '{"kind": null}' WHERE name = 'null'""")
        execute(engine, "UPDATE sqlaqueue_schedule SET every = NULL, cron = 'x' WHERE name = 'hourly'")
        wait_until(lambda: stored(engine, "null")["last_error"] and stored(engine)["last_error"])
        execute(engine, ADD)
        wait_until(lambda: len(ticks_in(engine, "added")) >= 2)
        assert "ZeroDivisionError" in stored(engine, "raises")["last_error"]
        assert "cron='x'" in stored(engine)["last_error"]
        assert "NotNullViolation" in stored(engine, "null")["last_error"]
        # What is mended is fired at once, not after half a minute.
        execute(engine, """UPDATE sqlaqueue_schedule SET values = '{"kind": "y"}' WHERE name = 'null'""")
        wait_until(lambda: stored(engine, "null")["last_error"] is None)
    failures = [record for record in caplog.records if record.event == "schedule_failed"]  # type: ignore[attr-defined] # an extra
    assert {record.schedule for record in failures} == {"raises", "null", "hourly"}  # type: ignore[attr-defined] # an extra
    assert len(failures) < 20


def test_overdue_schedules_that_no_process_can_fire_are_reported_once(
    shared: Database, engine: sa.Engine, report: Any, session: Session, caplog: pytest.LogCaptureFixture
) -> None:
    report.metadata.create_all(engine)
    schedules = prepared(engine, hourly(report), hourly(report, "seconds", **SECOND))
    execute(
        engine,
        "INSERT INTO sqlaqueue_schedule (name, queue, every, next_tick) "
        "VALUES ('gone', 'nowhere', '1 hour', now() - interval '2 min')",
    )
    with caplog.at_level(logging.WARNING, "sqlaqueue"), running("scheduler", shared.url(), report, schedules):
        wait_until(lambda: len(ticks_in(engine, "seconds")) >= 3)
    [record] = [record for record in caplog.records if record.event == "schedule_unknown"]  # type: ignore[attr-defined] # an extra
    assert record.schedule == "gone"  # type: ignore[attr-defined] # an extra
    late = {info.name: info.late for info in ScheduleAdmin(session, report).list()}
    assert late["gone"] is not None
    assert late["hourly"] is None


def test_missed_ticks_are_logged(
    shared: Database, engine: sa.Engine, report: Any, caplog: pytest.LogCaptureFixture
) -> None:
    schedules = prepared(engine, hourly(report))
    with running("scheduler", shared.url(), report, schedules):
        wait_until(lambda: stored_or_none(engine) and stored(engine)["next_tick"])
    pass_time(engine, 5 * HOUR)
    with caplog.at_level(logging.DEBUG, "sqlaqueue"), running("scheduler", shared.url(), report, schedules):
        wait_until(lambda: ticks_in(engine))
    events = [record.event for record in caplog.records if record.name == "sqlaqueue"]  # type: ignore[attr-defined] # an extra
    assert [event for event in events if "tick" in event or "fired" in event] == ["ticks_missed", "schedule_fired"]


def stored_or_none(engine: sa.Engine) -> Any:
    with engine.connect() as connection:
        return connection.scalar(sa.text("SELECT count(*) FROM sqlaqueue_schedule"))


def test_what_the_database_lacks_is_named(shared: Database, engine: sa.Engine) -> None:
    report = make_report.__wrapped__()  # not one that other tests share: it has no schedule yet
    report.metadata.create_all(engine)
    schedules = [hourly(report)]
    with pytest.raises(DatabaseNotReadyError, match=r"a process that fires schedules needs: the table sqlaqueue_sche"):
        Scheduler(sessionmaker(engine), schedules).run()
    with pytest.raises(DatabaseNotReadyError, match="the table sqlaqueue_schedule"):
        Consumer(report, lambda session, job: None, sessionmaker(engine), schedules=schedules).run()
    report.metadata.create_all(engine)
    autocommit = sa.create_engine(engine.url, isolation_level="AUTOCOMMIT")
    with pytest.raises(ConfigurationError, match="AUTOCOMMIT"):
        Scheduler(sessionmaker(autocommit), schedules).run()
    autocommit.dispose()


def test_without_the_trigger_there_is_a_warning(
    shared: Database, engine: sa.Engine, report: Any, caplog: pytest.LogCaptureFixture
) -> None:
    schedules = prepared(engine, hourly(report, "seconds", **SECOND))
    execute(engine, "DROP TRIGGER sqlaqueue_schedule_insert ON sqlaqueue_schedule")
    with caplog.at_level(logging.WARNING, "sqlaqueue"), running("scheduler", shared.url(), report, schedules):
        wait_until(lambda: ticks_in(engine, "seconds"))
    assert "the trigger sqlaqueue_schedule_insert is " in caplog.text


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_strict_isolation_levels_do_not_matter(shared: Database, engine: sa.Engine, report: Any, level: Any) -> None:
    schedules = prepared(engine, *(hourly(report, f"s{number}", **SECOND) for number in range(5)))
    strict = sa.create_engine(shared.url(), isolation_level=level)
    with Scheduler(sessionmaker(strict), schedules), Scheduler(sessionmaker(strict), schedules):
        wait_until(lambda: len(ticks_in(engine, "s4")) >= 3)
    strict.dispose()
    keys = [tuple(key) for number in range(5) for _, key in ticks_in(engine, f"s{number}")]
    assert len(keys) == len(set(keys)) == count_jobs(engine, report)


def test_an_outage_of_the_database_is_survived(
    shared: Database, engine: sa.Engine, report: Any, caplog: pytest.LogCaptureFixture
) -> None:
    schedules = prepared(engine, hourly(report, "seconds", **SECOND))
    with running("scheduler", shared.url(), report, schedules):
        wait_until(lambda: ticks_in(engine, "seconds"))
        execute(
            engine,
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()",
        )
        number = len(ticks_in(engine, "seconds"))
        wait_until(lambda: len(ticks_in(engine, "seconds")) > number + 1)
        assert stored(engine, "seconds")["last_error"] is None


def test_a_thousand_schedules_cost_a_handful_of_statements(
    shared: Database, engine: sa.Engine, report: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedules = prepared(engine, *(hourly(report, f"s{number}") for number in range(1000)))
    counted, sleeps = sa.create_engine(shared.url()), []
    statements: list[str] = []

    def count(_: Any, __: Any, text: str, *___: Any) -> None:
        # A listener that has heard nothing for some seconds checks its connection.
        if text != "SELECT 1":
            statements.append(text)

    sa.event.listen(counted, "before_cursor_execute", count)
    turn = firing._turn

    def remember(process: FiringProcess, state: GroupState) -> Any:
        yield from turn(process, state)
        sleeps.append(state.look_at - time.monotonic())

    monkeypatch.setattr(firing, "_turn", remember)
    with Scheduler(sessionmaker(counted), schedules):
        wait_until(lambda: any(pause > 20 for pause in sleeps))
        first = -1
        # The notifications of its own declarations may arrive late, and cause one more look.
        while first != len(statements):
            first = len(statements)
            time.sleep(1)
        # One look each half minute, while the notification of the last one has arrived.
        for number in range(3):
            execute(engine, "SELECT pg_notify('sqlaqueue_schedule', 'poll')")
            wait_until(lambda number=number: len(statements) >= first + 3 * (number + 1))  # type: ignore[misc] # mypy cannot infer it
        time.sleep(0.2)
        # Its limits, the version of the tables, and the look itself.
        assert len(statements) == first + 9
        assert "sqlaqueue_schedule" in statements[-1]
    counted.dispose()


@pytest.mark.once
def test_a_process_trusts_notifications_that_it_has_received(monkeypatch: pytest.MonkeyPatch) -> None:
    now, woken = [0.0], []
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    [group] = schedule_groups([hourly(make_report())], "x")
    state = GroupState(group, lambda: woken.append(1))
    first = state.begin_look()
    assert first is not None
    assert not state.hears
    now[0] += POLL_INTERVAL
    second = state.begin_look()
    assert second not in {None, first}
    # One of another process, and one that is late.
    state.receive(Heartbeat("other.1"))
    state.receive(Heartbeat(first))
    assert not state.hears
    state.receive(Heartbeat(str(second)))
    assert state.hears
    assert state.longest_sleep() > POLL_INTERVAL
    now[0] += 10
    assert state.begin_look() is None
    now[0] += 15
    assert state.begin_look() is not None
    assert not state.hears
    assert state.longest_sleep() == POLL_INTERVAL
    assert woken == []
    state.listening_lost()
    assert woken == [1]


@pytest.mark.once
def test_what_fails_is_tried_later_and_later(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    [group] = schedule_groups([hourly(make_report())], "x")
    state = GroupState(group, lambda: None)
    assert state.until_retry() == float("inf")
    pauses = []
    for _ in range(7):
        assert state.failed("x", "no") == (now[0] == 0)
        assert state.failing == ["x"]
        pauses.append(state.until_retry())
        now[0] += state.until_retry()
        assert state.failing == []
    assert pauses == [30, 60, 120, 240, 480, 600, 600]
    state.failed("x", "yes")
    now[0] += 1
    # A change lets it be tried again, but not at once after the last try.
    state.receive(Signal.POLL)
    state.begin_look()
    assert state.until_retry() == 1
    state.moved("x")
    assert state.until_retry() == float("inf")
    assert state.failed("x", "yes")


@pytest.mark.parametrize(("kind", "driver"), WAYS)
def test_it_stops_at_once(shared: Database, engine: sa.Engine, report: Any, kind: str, driver: Any) -> None:
    schedules = prepared(engine, hourly(report))
    began = time.monotonic()
    with running(kind, shared.url(driver), report, schedules):
        pass
    assert time.monotonic() - began < POLL_INTERVAL
    names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if "schedul" in name]


def test_it_runs_once_at_a_time(engine: sa.Engine, report: Any) -> None:
    schedules = prepared(engine, hourly(report))
    scheduler = Scheduler(sessionmaker(engine), schedules)
    scheduler.stop()
    with scheduler, pytest.raises(ConfigurationError, match="is running already"):
        scheduler.run()


def test_an_error_in_the_background_is_raised_at_the_end(
    shared: Database, engine: sa.Engine, report: Any, caplog: pytest.LogCaptureFixture
) -> None:
    schedules = [Schedule("x", report, every=5, values={"kind": "x"})]
    for kind, driver in (("scheduler", "psycopg"), ("async scheduler", "asyncpg")):
        with (
            caplog.at_level(logging.ERROR, "sqlaqueue"),
            pytest.raises(DatabaseNotReadyError),
            running(kind, shared.url(driver), report, schedules),  # type: ignore[arg-type] # a driver
        ):
            wait_until(lambda: "it fires no more" in caplog.text)
        caplog.clear()
