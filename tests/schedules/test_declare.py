"""What a program writes when it starts, what is changed at run time, and which privileges it needs."""

import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from sqlaqueue import QueueMixin, Schedule, Scheduler
from sqlaqueue.admin import ScheduleAdmin, schedules
from sqlaqueue.consumer.maintenance.firing import check_tables
from sqlaqueue.exc import DatabaseNotReadyError, StatementError
from sqlaqueue.schedules import store
from sqlaqueue.schedules.fire import fire
from sqlaqueue.schedules.schedule import schedule_groups
from sqlaqueue.schedules.store import declare, delete_old_ticks, moved_ticks, record_failure
from tests.schedules.models import (
    DAY,
    HOUR,
    MINUTE,
    execute,
    fire_due,
    hourly,
    pass_time,
    prepared,
    start,
    started,
    stored,
    ticks_in,
)
from tests.schedules.test_schedule import VALUES, Base, Export
from tests.servers import Database


def test_a_definition_is_written_once(engine: sa.Engine, session: Session) -> None:
    Base.metadata.create_all(engine)
    values = {name: value for name, value in VALUES.items() if name != "customer_id"}
    schedules = [
        Schedule(
            "all", Export, cron="0 3 * * *", timezone="Europe/Berlin", values=values, jitter=0.1, misfire_grace=DAY
        ),
        Schedule("span", Export, every=timedelta(days=400, seconds=1, milliseconds=1), values={"kind": "x"}),
    ]
    Base.metadata.create_all(engine)
    assert start(engine, schedules) == (["all", "span"], [])
    before = stored(engine, "all")
    assert start(engine, schedules) == ([], [])
    assert start(engine, schedules, reset=True) == ([], [])
    assert stored(engine, "all") == before
    assert {info.origin for info in ScheduleAdmin(session, Export).list()} == {"program"}


def test_a_changed_program_is_written_and_keeps_the_next_tick(engine: sa.Engine, report: Any) -> None:
    first = hourly(report)
    started(engine, first)
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


def test_what_was_changed_at_run_time_is_kept(engine: sa.Engine, report: Any) -> None:
    first, second = hourly(report), hourly(report, values={"kind": "new"})
    started(engine, first)
    execute(engine, "UPDATE sqlaqueue_schedule SET every = '5 min'")
    assert start(engine, [first]) == ([], [])
    assert start(engine, [second]) == ([], ["hourly"])
    assert stored(engine)["every"] == 5 * MINUTE
    assert stored(engine)["values"] == {"kind": "sales"}
    # Told once; a reset takes what the program says now.
    assert start(engine, [second]) == ([], [])
    with Session(engine) as session:
        admin = ScheduleAdmin(session, report)
        assert admin.get("hourly").origin == "edited"
        admin.reset("hourly")
        assert admin.get("hourly").origin == "program"
    assert (stored(engine)["every"], stored(engine)["values"]) == (HOUR, {"kind": "new"})
    execute(engine, "UPDATE sqlaqueue_schedule SET every = '5 min'")
    assert start(engine, [second], reset=True) == (["hourly"], [])
    assert stored(engine)["every"] == HOUR


def test_a_change_that_was_taken_over_into_the_program_is_no_longer_one(engine: sa.Engine, report: Any) -> None:
    first, second = hourly(report), hourly(report, every=5 * MINUTE)
    started(engine, first)
    execute(engine, "UPDATE sqlaqueue_schedule SET every = '5 min'")
    assert start(engine, [second]) == (["hourly"], [])
    assert start(engine, [first]) == (["hourly"], [])


def test_a_schedule_that_was_added_at_run_time_is_kept(engine: sa.Engine, report: Any) -> None:
    schedule = hourly(report)
    report.metadata.create_all(engine)
    execute(engine, "INSERT INTO sqlaqueue_schedule (name, queue, cron) VALUES ('hourly', 'report', '0 0 * * *')")
    assert start(engine, [schedule]) == ([], ["hourly"])
    assert stored(engine)["cron"] == "0 0 * * *"


def test_a_program_deletes_no_schedule_and_no_pause(engine: sa.Engine, report: Any) -> None:
    first, other = hourly(report), hourly(report, "other")
    started(engine, first, other)
    execute(engine, "UPDATE sqlaqueue_schedule SET paused_at = now()")
    start(engine, [hourly(report, values={"kind": "new"})], reset=True)
    assert stored(engine)["paused_at"] is not None
    assert stored(engine, "other")["paused_at"] is not None


def test_two_processes_that_start_together(engine: sa.Engine, report: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = hourly(report), hourly(report, values={"kind": "new"})
    started(engine, old)
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


def test_ticks_that_an_upgrade_moves_are_reported(
    engine: sa.Engine, report: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedules = started(
        engine,
        hourly(report, "kept", every=None, cron="0 * * * *"),
        hourly(report, "moved", every=None, cron="30 * * * *"),
        hourly(report, "interval"),
    )
    fire_due(engine, schedules)
    [group] = schedule_groups(schedules, "x")
    with Session(engine) as session:
        assert moved_ticks(session, group) == []
        monkeypatch.setattr(store, "current_rules", lambda: "cronsim 99, tzdata 2099a")
        assert moved_ticks(session, group) == []
        before = stored(engine, "moved")["next_tick"]
        # As the old rules would have computed it.
        execute(engine, "UPDATE sqlaqueue_schedule SET next_tick = next_tick + interval '7 min' WHERE name = 'moved'")
        [moved] = moved_ticks(session, group)
    assert (moved.schedule, moved.rules, moved.computed) == ("moved", "cronsim 99, tzdata 2099a", before)
    assert moved.next_tick == before + 7 * MINUTE


def test_old_ticks_are_deleted_and_the_newest_never(engine: sa.Engine, report: Any) -> None:
    schedules = started(engine, hourly(report, catch_up="all"), hourly(report, "rare", every=100 * DAY))
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


def test_a_failure_is_recorded_once_and_cleared_by_a_firing(engine: sa.Engine, report: Any) -> None:
    schedules = started(engine, hourly(report))
    [group] = schedule_groups(schedules, "x")
    with Session(engine) as session:
        record_failure(session, group, name="hourly", error="ValueError: no")
    assert stored(engine)["last_error"] == "ValueError: no"
    fire_due(engine, schedules)
    assert stored(engine)["last_error"] is None


# -- changes between two looks, a clock that was wrong, and what the server refuses --------------------------------


@pytest.mark.parametrize(
    ("edits", "ticks"),
    [
        (["every = '10 min'"], 3),
        (["cron = '@yearly', every = NULL", "cron = NULL, every = '10 min'"], 3),
        (["paused_at = now()", "every = '10 min', paused_at = NULL"], 3),
        (["every = '1 day', timezone = 'Europe/Rome'"], 0),
    ],
)
def test_no_tick_between_a_change_and_its_notice_is_lost(
    engine: sa.Engine, report: Any, edits: list[str], ticks: int
) -> None:
    schedules = started(engine, hourly(report, catch_up="all"))
    fire_due(engine, schedules)
    for edit in edits:
        execute(engine, f"UPDATE sqlaqueue_schedule SET {edit}")
    pass_time(engine, 31 * MINUTE)
    assert len(fire_due(engine, schedules)) == ticks


def test_a_tick_that_was_due_before_the_change_is_fired(engine: sa.Engine, report: Any) -> None:
    schedules = started(engine, hourly(report))
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


def test_a_change_and_its_reversal_are_noticed(engine: sa.Engine, report: Any) -> None:
    schedules = started(engine, hourly(report, catch_up="all"))
    fire_due(engine, schedules)
    execute(engine, "UPDATE sqlaqueue_schedule SET paused_at = now()")
    pass_time(engine, 3 * HOUR)
    execute(engine, "UPDATE sqlaqueue_schedule SET paused_at = NULL")
    assert fire_due(engine, schedules) == []
    assert stored(engine)["next_tick"] > datetime.now(UTC)


def test_without_the_trigger_a_change_counts_from_its_notice(engine: sa.Engine, report: Any) -> None:
    schedules = started(engine, hourly(report, catch_up="all"))
    fire_due(engine, schedules)
    execute(engine, "ALTER TABLE sqlaqueue_schedule DISABLE TRIGGER USER")
    execute(engine, "UPDATE sqlaqueue_schedule SET every = '1 min'")
    pass_time(engine, 30 * MINUTE)
    assert fire_due(engine, schedules) == []
    assert stored(engine)["edited_at"] is None


def test_a_next_tick_that_was_deleted_is_computed_again(engine: sa.Engine, report: Any) -> None:
    schedules = started(engine, hourly(report))
    fire_due(engine, schedules)
    execute(engine, "UPDATE sqlaqueue_schedule SET next_tick = NULL")
    assert fire_due(engine, schedules) == []
    assert stored(engine)["next_tick"] > datetime.now(UTC)


def test_a_clock_that_was_far_ahead(engine: sa.Engine, report: Any) -> None:
    schedules = started(engine, hourly(report))
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


@pytest.mark.few(9)
@pytest.mark.parametrize(
    "change",
    [
        *(
            f"{name} = '{value}'"
            for name in ("next_tick", "last_tick", "paused_at", "run_requested_at", "created_at")
            for value in ("infinity", "-infinity", "20000-01-01")
        ),
        *(
            f"{name} = '{value}'"
            for name in ("misfire_grace", "jitter", "every")
            for value in ("10000 years", "-1 second")
        ),
        "catch_up = -1",
        "catch_up = 1001",
        "every = '0.5 s'",
        "cron = '* * * * *'",
        "every = NULL",
    ],
)
def test_the_server_refuses_what_no_process_could_read(engine: sa.Engine, report: Any, change: str) -> None:
    started(engine, hourly(report))
    with pytest.raises(IntegrityError, match="ck_sqlaqueue_schedule_"):
        execute(engine, f"UPDATE sqlaqueue_schedule SET {change}")


def test_a_requested_run_is_fired_whatever_its_time(engine: sa.Engine, report: Any) -> None:
    schedules = started(engine, hourly(report, jitter=1000, skip_unfinished=True))
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


def test_a_requested_run_is_due_at_once(engine: sa.Engine, report: Any, session: Session) -> None:
    schedules = started(engine, hourly(report, jitter=10**6))
    execute(engine, "UPDATE sqlaqueue_schedule SET run_requested_at = now()")
    fire_due(engine, schedules)
    assert session.scalars(sa.select(report.run_at)).one() < datetime.now(UTC)


def test_a_job_may_run_for_longer_than_its_tick_is_kept(engine: sa.Engine, report: Any) -> None:
    schedules = started(engine, hourly(report, skip_unfinished=True, every=MINUTE, misfire_grace=DAY))
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


def test_a_schedule_that_was_wrong_from_the_beginning(engine: sa.Engine, report: Any) -> None:
    [group] = schedule_groups(prepared(engine, hourly(report)), "x")
    execute(
        engine,
        "INSERT INTO sqlaqueue_schedule (name, queue, cron, catch_up, values) "
        """VALUES ('wrong', 'report', '61 * * * *', 1000, '{"kind": "x"}')""",
    )
    with Session(engine) as session:
        assert [name for name, _ in fire(session, group).failed] == ["wrong"]
        info = ScheduleAdmin(session, report).get("wrong")
        assert info.words.startswith("cron='61 * * * *': bad minute")
        assert [each.name for each in ScheduleAdmin(session, report).list()] == ["wrong"]
    pass_time(engine, 2 * HOUR)
    with Session(engine) as session:
        assert ScheduleAdmin(session, report).get("wrong").late is not None
        ScheduleAdmin(session, report).edit("wrong", cron="* * * * *")
    assert fire_due(engine, [report]) == []


@pytest.mark.parametrize(
    ("grace", "seconds", "is_late"),
    [("NULL", 30, False), ("NULL", 70, True), ("'10 sec'", 30, True), ("'90 sec'", 70, False)],
)
def test_a_schedule_is_late_when_the_grace_of_its_tick_is_over(
    engine: sa.Engine, report: Any, session: Session, grace: str, seconds: int, *, is_late: bool
) -> None:
    started(engine, hourly(report, "x"))
    execute(
        engine,
        f"UPDATE sqlaqueue_schedule SET misfire_grace = {grace}, next_tick = now() - interval '{seconds} sec'",
    )
    late = ScheduleAdmin(session, report).get("x").late
    assert (late is not None) == is_late
    assert late is None or late >= timedelta(seconds=seconds)


def test_an_edit_writes_what_it_changes(engine: sa.Engine, report: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    started(engine, hourly(report, "x", every=None, cron="@daily", timezone="Europe/Berlin"))
    read = schedules._row

    def read_and_edit(*arguments: Any, **options: Any) -> Any:
        row = read(*arguments, **options)
        execute(engine, "UPDATE sqlaqueue_schedule SET misfire_grace = '5 min'")
        return row

    monkeypatch.setattr(schedules, "_row", read_and_edit)
    with Session(engine) as session:
        admin = ScheduleAdmin(session, report)
        admin.edit("x", jitter=5)
        admin.edit("x", every=60)
        with pytest.raises(StatementError, match="what can be changed is cron"):
            admin.edit("x", name="y")
        with pytest.raises(StatementError, match="there are no changes"):
            admin.edit("x")
    row = stored(engine, "x")
    assert (row["misfire_grace"], row["jitter"], row["every"]) == (5 * MINUTE, timedelta(seconds=5), MINUTE)
    assert (row["cron"], row["timezone"]) == (None, "Europe/Berlin")


# -- a role with the privileges of docs/privileges.md fires schedules, and each missing one is named ---------------

PAGE = Path(__file__).parents[2] / "docs" / "privileges.md"


class EmailBase(DeclarativeBase):
    pass


class Email(QueueMixin, EmailBase):
    __tablename__ = "email"
    id: Mapped[int] = mapped_column(primary_key=True)
    to: Mapped[str]


REMINDER = Schedule("reminder", Email, every=HOUR, values={"to": "ada@example.com"}, skip_unfinished=True)


@pytest.fixture
def grants(engine: sa.Engine) -> Iterator[list[str]]:
    """Return the statements of the page for a role of this test."""
    EmailBase.metadata.create_all(engine)
    section = PAGE.read_text().partition("\n## Schedules\n")[2].partition("\n## ")[0]
    found = [line.rstrip(";") for line in section.splitlines() if line.startswith("GRANT ")]
    role = f"scheduler_{engine.url.database}"
    execute(engine, f"CREATE ROLE {role}")
    yield [statement.replace("TO scheduler", f"TO {role}") for statement in found]
    execute(engine, f"DROP OWNED BY {role}")
    execute(engine, f"DROP ROLE {role}")


def as_role(shared: Database) -> sa.Engine:
    options = f"-c role=scheduler_{shared.name}"
    return sa.create_engine(shared.url(), connect_args={"options": options}, poolclass=sa.NullPool)


@pytest.mark.once
def test_the_privileges_of_the_page_are_enough(shared: Database, engine: sa.Engine, grants: list[str]) -> None:
    execute(engine, "; ".join([*grants, f"GRANT USAGE ON SCHEMA public TO scheduler_{shared.name}"]))
    role = as_role(shared)
    start(role, [REMINDER])
    for _ in range(2):
        pass_time(engine, HOUR)
        assert len(fire_due(role, [REMINDER])) == 1
    [group] = schedule_groups([REMINDER], "x")
    with Session(role) as session:
        delete_old_ticks(session, group)
        assert ScheduleAdmin(session, Email).get("reminder").last_tick is not None
        session.commit()
        check_tables(session, group)
    with Scheduler(sessionmaker(role), [REMINDER]):
        pass


@pytest.mark.once
def test_each_missing_privilege_is_named(shared: Database, engine: sa.Engine, grants: list[str]) -> None:
    execute(engine, "; ".join([*grants, f"GRANT USAGE ON SCHEMA public TO scheduler_{shared.name}"]))
    scheduler = Scheduler(sessionmaker(as_role(shared)), [REMINDER])
    missing = 0
    for statement in grants:
        rights, where, role = re.fullmatch(r"GRANT (.+) ON (.+) TO (\w+)", statement).groups()  # type: ignore[union-attr] # each one matches
        for right in [rights] if "(" in rights else rights.split(", "):
            execute(engine, f"REVOKE {right} ON {where} FROM {role}")
            with pytest.raises(DatabaseNotReadyError, match="lacks privileges that it needs to fire") as found:
                scheduler.run()
            said = re.findall(r"GRANT .*? TO \w+", str(found.value))
            execute(engine, "; ".join(said))
            missing += len(said)
            with scheduler:
                pass
    assert missing == 9
