"""Changes between two looks, a clock that was wrong, and what the server refuses."""

from __future__ import annotations

import sys
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from sqlaqueue import admin
from sqlaqueue.exc import StatementError
from sqlaqueue.schedules.fire import fire
from sqlaqueue.schedules.schedule import schedule_groups
from sqlaqueue.schedules.store import delete_old_ticks
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


def test_a_requested_run_is_fired_whatever_its_time(engine: sa.Engine) -> None:
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
    # The last job is the one that was enqueued last, not the one of the newest tick.
    for enqueued in (True, False):
        execute(engine, "UPDATE sqlaqueue_schedule SET run_requested_at = now() - interval '1 year'")
        [fired] = fire_due(engine, schedules)
        assert fired.tick < first.tick
        assert (fired.key is not None) is enqueued


def test_a_requested_run_is_due_at_once(engine: sa.Engine) -> None:
    report = make_report()
    schedules = [hourly(report, jitter=10**6)]
    create(engine, report)
    start(engine, schedules)
    execute(engine, "UPDATE sqlaqueue_schedule SET run_requested_at = now()")
    fire_due(engine, schedules)
    with Session(engine) as session:
        assert session.scalars(sa.select(report.run_at)).one() < datetime.now(UTC)


def test_a_job_may_run_for_longer_than_its_tick_is_kept(engine: sa.Engine) -> None:
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
        assert delete_old_ticks(session, group) == 51
    assert first.tick not in dict(ticks_in(engine))
    assert [fired.key for fired in fire_due(engine, schedules)] == [None]


def test_a_schedule_that_was_wrong_from_the_beginning(engine: sa.Engine) -> None:
    report = make_report()
    [group] = schedule_groups([hourly(report)], "x")
    create(engine, report)
    execute(
        engine,
        "INSERT INTO sqlaqueue_schedule (name, queue, cron, catch_up, values) "
        """VALUES ('wrong', 'report', '61 * * * *', 1000, '{"kind": "x"}')""",
    )
    with Session(engine) as session:
        assert [name for name, _ in fire(session, group).failed] == ["wrong"]
        info = admin.schedule(session, report, "wrong")
        assert info.words.startswith("cron='61 * * * *': bad minute")
        assert [each.name for each in admin.schedules(session, report)] == ["wrong"]
    pass_time(engine, 2 * HOUR)
    with Session(engine) as session:
        assert admin.schedule(session, report, "wrong").late is not None
        admin.edit_schedule(session, report, "wrong", cron="* * * * *")
    assert fire_due(engine, [report]) == []


admin_schedules = sys.modules["sqlaqueue.admin.schedules"]
"""The module; the package has a function of the same name."""


def test_an_edit_writes_what_it_changes(engine: sa.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    report = make_report()
    schedules = [hourly(report, "x", every=None, cron="@daily", timezone="Europe/Berlin")]
    create(engine, report)
    start(engine, schedules)
    read = admin_schedules._row

    def read_and_edit(*arguments: Any, **options: Any) -> Any:
        row = read(*arguments, **options)
        execute(engine, "UPDATE sqlaqueue_schedule SET grace = '5 min'")
        return row

    monkeypatch.setattr(admin_schedules, "_row", read_and_edit)
    with Session(engine) as session:
        admin.edit_schedule(session, report, "x", jitter=5)
        admin.edit_schedule(session, report, "x", every=60)
        with pytest.raises(StatementError, match="what can be changed is cron"):
            admin.edit_schedule(session, report, "x", name="y")
        with pytest.raises(StatementError, match=r"edit_schedule\(without changes\)"):
            admin.edit_schedule(session, report, "x")
    row = stored(engine, "x")
    assert (row["grace"], row["jitter"], row["every"]) == (5 * MINUTE, timedelta(seconds=5), MINUTE)
    assert (row["cron"], row["timezone"]) == (None, "Europe/Berlin")
