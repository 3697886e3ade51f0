"""What a program writes when it starts, and what was changed at run time."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue import Schedule, admin
from sqlaqueue.schedules import store
from sqlaqueue.schedules.schedule import schedule_groups
from sqlaqueue.schedules.store import declare, delete_old_ticks, moved_ticks, record_failure
from tests.schedules.models import (
    DAY,
    HOUR,
    MINUTE,
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
from tests.schedules.test_definition import VALUES, Base, Export


def test_a_definition_is_written_once(engine: sa.Engine) -> None:
    Base.metadata.create_all(engine)
    values = {name: value for name, value in VALUES.items() if name != "customer_id"}
    schedules = [
        Schedule("all", Export, cron="0 3 * * *", timezone="Europe/Berlin", values=values, jitter=0.1, grace=DAY),
        Schedule("span", Export, every=timedelta(days=400, seconds=1, milliseconds=1), values={"kind": "x"}),
    ]
    Base.metadata.create_all(engine)
    assert start(engine, schedules) == (["all", "span"], [])
    before = stored(engine, "all")
    assert start(engine, schedules) == ([], [])
    assert start(engine, schedules, reset=True) == ([], [])
    assert stored(engine, "all") == before
    with Session(engine) as session:
        assert {info.origin for info in admin.schedules(session, Export)} == {"program"}


def test_a_changed_program_is_written_and_keeps_the_next_tick(engine: sa.Engine) -> None:
    report = make_report()
    first = hourly(report)
    create(engine, report)
    start(engine, [first])
    fire_due(engine, [first])
    next_tick = stored(engine)["next_tick"]
    second = hourly(report, values={"kind": "other"})
    assert start(engine, [second]) == (["hourly"], [])
    assert fire_due(engine, [second]) == []
    assert stored(engine)["values"] == {"kind": "other"}
    assert stored(engine)["next_tick"] == next_tick
    # An older version that starts again writes its own.
    assert start(engine, [first]) == (["hourly"], [])
    assert start(engine, [hourly(report, every=MINUTE)]) == (["hourly"], [])
    fire_due(engine, [first])
    assert stored(engine)["next_tick"] < next_tick


def test_what_was_changed_at_run_time_is_kept(engine: sa.Engine) -> None:
    report = make_report()
    create(engine, report)
    first, second = hourly(report), hourly(report, values={"kind": "new"})
    create(engine, report)
    start(engine, [first])
    execute(engine, "UPDATE sqlaqueue_schedule SET every = '5 min'")
    assert start(engine, [first]) == ([], [])
    assert start(engine, [second]) == ([], ["hourly"])
    assert stored(engine)["every"] == 5 * MINUTE
    assert stored(engine)["values"] == {"kind": "sales"}
    # Told once; a reset takes what the program says now.
    assert start(engine, [second]) == ([], [])
    with Session(engine) as session:
        assert admin.schedule(session, report, "hourly").origin == "edited"
        admin.reset_schedule(session, report, "hourly")
        assert admin.schedule(session, report, "hourly").origin == "program"
    assert (stored(engine)["every"], stored(engine)["values"]) == (HOUR, {"kind": "new"})
    execute(engine, "UPDATE sqlaqueue_schedule SET every = '5 min'")
    assert start(engine, [second], reset=True) == (["hourly"], [])
    assert stored(engine)["every"] == HOUR


def test_a_change_that_was_taken_over_into_the_program_is_no_longer_one(engine: sa.Engine) -> None:
    report = make_report()
    first, second = hourly(report), hourly(report, every=5 * MINUTE)
    create(engine, report)
    start(engine, [first])
    execute(engine, "UPDATE sqlaqueue_schedule SET every = '5 min'")
    assert start(engine, [second]) == (["hourly"], [])
    assert start(engine, [first]) == (["hourly"], [])


def test_a_schedule_that_was_added_at_run_time_is_kept(engine: sa.Engine) -> None:
    report = make_report()
    schedule = hourly(report)
    create(engine, report)
    execute(engine, "INSERT INTO sqlaqueue_schedule (name, queue, cron) VALUES ('hourly', 'report', '0 0 * * *')")
    assert start(engine, [schedule]) == ([], ["hourly"])
    assert stored(engine)["cron"] == "0 0 * * *"


def test_a_program_deletes_no_schedule_and_no_pause(engine: sa.Engine) -> None:
    report = make_report()
    first, other = hourly(report), hourly(report, "other")
    create(engine, report)
    start(engine, [first, other])
    execute(engine, "UPDATE sqlaqueue_schedule SET paused_at = now()")
    start(engine, [hourly(report, values={"kind": "new"})], reset=True)
    assert stored(engine)["paused_at"] is not None
    assert stored(engine, "other")["paused_at"] is not None


def test_two_processes_that_start_together(engine: sa.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    report = make_report()
    old, new = hourly(report), hourly(report, values={"kind": "new"})
    create(engine, report)
    start(engine, [old])
    [group] = schedule_groups([new], "x")
    edited = False

    def edit(*_: Any) -> None:
        nonlocal edited
        if not edited:
            edited = True
            execute(engine, "UPDATE sqlaqueue_schedule SET every = '5 min'")

    with Session(engine) as session:
        # After it was read, and before it is written.
        sa.event.listen(engine, "after_cursor_execute", edit)
        assert declare(session, group) == ([], [], ["hourly"])
        sa.event.remove(engine, "after_cursor_execute", edit)
    assert stored(engine)["every"] == 5 * MINUTE
    assert stored(engine)["values"] == {"kind": "sales"}


def test_ticks_that_an_upgrade_moves_are_reported(engine: sa.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    report = make_report()
    schedules = [
        hourly(report, "kept", every=None, cron="0 * * * *"),
        hourly(report, "moved", every=None, cron="30 * * * *"),
        hourly(report, "interval"),
    ]
    create(engine, report)
    start(engine, schedules)
    fire_due(engine, schedules)
    [group] = schedule_groups(schedules, "x")
    with Session(engine) as session:
        assert moved_ticks(session, group) == []
        monkeypatch.setattr(store, "current_rules", lambda: "cronsim 99, tzdata 2099a")
        assert moved_ticks(session, group) == []
        before = stored(engine, "moved")["next_tick"]
        # As the old rules would have computed it.
        execute(
            engine,
            "UPDATE sqlaqueue_schedule SET next_tick = next_tick + interval '7 min' WHERE name = 'moved'",
        )
        [moved] = moved_ticks(session, group)
    assert (moved.schedule, moved.rules, moved.computed) == ("moved", "cronsim 99, tzdata 2099a", before)
    assert moved.next_tick == before + 7 * MINUTE


def test_old_ticks_are_deleted_and_the_newest_never(engine: sa.Engine) -> None:
    report = make_report()
    schedules = [hourly(report, catch_up="all"), hourly(report, "rare", every=100 * DAY)]
    create(engine, report)
    start(engine, schedules)
    pass_time(engine, 150 * HOUR)
    fire_due(engine, schedules)
    pass_time(engine, 100 * DAY)
    fire_due(engine, schedules, only=["rare"])
    execute(
        engine,
        "INSERT INTO sqlaqueue_tick (schedule, tick, queue, fired_at) VALUES "
        "('gone', now(), 'report', now() - interval '8 days'), ('gone', now() + '1 s', 'report', now())",
    )
    pass_time(engine, 8 * DAY)
    execute(
        engine, "UPDATE sqlaqueue_tick SET fired_at = now() WHERE schedule = 'gone' AND tick > now() - '8 d'::interval"
    )
    [group] = schedule_groups(schedules, "x")
    kept = ticks_in(engine)[-100:]
    with Session(engine) as session:
        assert delete_old_ticks(session, group) == 51
        assert delete_old_ticks(session, group) == 0
    assert ticks_in(engine) == kept
    assert len(ticks_in(engine, "rare")) == 1
    assert len(ticks_in(engine, "gone")) == 1


def test_a_failure_is_recorded_once_and_cleared_by_a_firing(engine: sa.Engine) -> None:
    report = make_report()
    schedules = [hourly(report)]
    create(engine, report)
    start(engine, schedules)
    [group] = schedule_groups(schedules, "x")
    with Session(engine) as session:
        record_failure(session, group, name="hourly", error="ValueError: no")
    assert stored(engine)["last_error"] == "ValueError: no"
    fire_due(engine, schedules)
    assert stored(engine)["last_error"] is None
