"""What a Schedule refuses when it is made, which tables it declares, and when it ticks; no database."""

import decimal
import enum
import random
import uuid
from collections.abc import Sequence
from datetime import UTC, date, datetime, time, timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, MappedAsDataclass, mapped_column, relationship, sessionmaker

from sqlaqueue import AsyncScheduler, Consumer, QueueConfig, QueueMixin, Schedule, Scheduler
from sqlaqueue.exc import ConfigurationError, NotAQueueError
from sqlaqueue.schedules import recurrence as module
from sqlaqueue.schedules.recurrence import MOST, Recurrence, due_ticks
from sqlaqueue.schedules.schedule import from_json, schedule_groups
from tests.schedules.clock_changes import PAGE, page
from tests.schedules.models import DAY, HOUR, MINUTE, hourly, make_report

pytestmark = pytest.mark.once


class Colour(enum.Enum):
    RED = 1


class Base(DeclarativeBase):
    type_annotation_map = {dict[str, Any]: sa.JSON}  # noqa: RUF012 - as SQLAlchemy reads it


class Customer(Base):
    __tablename__ = "customer"
    id: Mapped[int] = mapped_column(primary_key=True)


class Export(QueueMixin, Base):
    __tablename__ = "export"
    id: Mapped[int] = mapped_column(primary_key=True)
    kind: Mapped[str]
    customer_id: Mapped[int | None] = mapped_column(sa.ForeignKey("customer.id"))
    customer: Mapped[Customer | None] = relationship()
    when: Mapped[datetime | None] = mapped_column("moment")
    day: Mapped[date | None]
    clock: Mapped[time | None]
    span: Mapped[timedelta | None]
    price: Mapped[decimal.Decimal | None]
    token: Mapped[uuid.UUID | None]
    colour: Mapped[Colour | None]
    data: Mapped[dict[str, Any] | None]
    blob: Mapped[bytes | None]
    ratio: Mapped[float | None]
    active: Mapped[bool | None]


VALUES: dict[str, Any] = {
    "kind": "x",
    "customer_id": 2**60,
    "when": datetime(2026, 1, 2, 3, 4, 5, 678, tzinfo=UTC),
    "day": date(2026, 1, 2),
    "clock": time(3, 4),
    "span": timedelta(days=1, microseconds=5),
    "price": decimal.Decimal("12.50"),
    "token": uuid.UUID(int=7),
    "colour": Colour.RED,
    "data": {"a": [1, None, {"b": 0.1}]},
    "ratio": 0.1,
    "active": True,
    "priority": 3,
}


def test_values_are_stored_as_json_and_read_as_they_were() -> None:
    schedule = Schedule("x", Export, every=HOUR, values=VALUES)
    assert from_json(schedule.spec, sa.inspect(Export), schedule.values) == VALUES
    assert schedule.values["colour"] == "RED"
    assert schedule.columns()["queue"] == "export"


def test_the_tables_belong_to_the_metadata_from_then_on() -> None:
    report = make_report.__wrapped__()
    assert not [name for name in report.metadata.tables if name in {"sqlaqueue_schedule", "sqlaqueue_tick"}]
    hourly(report)
    hourly(report, "other")
    assert {"sqlaqueue_schedule", "sqlaqueue_tick"} <= report.metadata.tables.keys()


def test_a_queue_class_declares_them_as_well() -> None:
    report = make_report.__wrapped__()
    Consumer(report, lambda session, job: None, sessionmaker(), schedules=[report])
    assert "sqlaqueue_tick" in report.metadata.tables


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "give either cron= or every="),
        ({"cron": "0 3 * * *", "every": 5}, "give either cron= or every="),
        ({"cron": "0 0 30 2 *"}, "cron='0 0 30 2 *': bad day-of-month"),
        ({"cron": "0 3 * * *", "timezone": "Mars"}, "timezone='Mars'"),
        ({"every": 0.5}, "the shortest interval is one second"),
        ({"every": "5 min"}, "every= must be seconds or a timedelta"),
        ({"every": -5}, "every= must be seconds"),
        ({"every": 5, "jitter": -1}, "jitter= must be seconds"),
        ({"every": 5, "misfire_grace": "x"}, "misfire_grace= must be seconds"),
        ({"every": 5, "catch_up": "newest"}, "catch_up='newest': give 'skip', 'latest', 'all', or a number from 0"),
        ({"every": 5, "catch_up": 1001}, "catch_up=1001"),
        ({"every": 5, "catch_up": True}, "catch_up=True"),
        ({"every": 5, "values": {}}, "Export.kind cannot be NULL and has no default; give values={'kind': ...}"),
        ({"every": 5, "values": {"knd": 1}}, "Export has no column attribute 'knd'; it has id, kind"),
        ({"every": 5, "values": {"customer": 1}}, "Export has no column attribute 'customer'"),
        ({"every": 5, "values": {"status": "x"}}, "Export.status belongs to the queue"),
        ({"every": 5, "values": {"blob": b"x"}}, "b'x' cannot be stored as JSON"),
        ({"every": 5, "values": {"day": "2026-01-01"}}, "'2026-01-01' cannot be stored as JSON and read again"),
        ({"every": 5, "values": {"ratio": float("nan")}}, "nan cannot be stored"),
        ({"every": 5, "values": {"data": {1: 2}}}, "cannot be stored as JSON"),
        ({"every": 5, "make": 5}, "make=5: give a function make(tick)"),
        ({"every": 5, "make": lambda: None}, "cannot be called with a tick: too many positional arguments"),
        ({"every": 5, "make": lambda tick, other: None}, "cannot be called with a tick: missing a required argument"),
        ({"cron": 5}, "cron=5: give a text, such as '0 3 * * *'"),
        ({"every": 5, "skip_unfinished": "yes"}, "skip_unfinished='yes': give True or False"),
        ({"every": 5, "values": {"kind": None}}, "values={'kind': None}: Export.kind cannot be NULL"),
        ({"every": 5, "values": [1]}, "values=[1]: give a dict of attributes"),
        ({"every": 5, "values": {"kind": "a\0b"}}, "cannot be stored as JSON"),
        ({"every": 5, "values": {"kind": "\ud800"}}, "cannot be stored as JSON"),
        ({"every": 5, "values": {"kind": "x", "ratio": 1e23}}, "1e+23 cannot be stored as JSON"),
        ({"every": 5, "values": {"kind": "x", "data": {"a": [1e300]}}}, "cannot be stored as JSON"),
        (
            {"every": 5, "misfire_grace": 0, "catch_up": "skip"},
            "misfire_grace=0 with catch_up='skip' would fire nothing",
        ),
        ({"every": timedelta(days=40000)}, "every=datetime.timedelta(days=40000): give a hundred years at most"),
        ({"every": 5, "misfire_grace": 1e11}, "misfire_grace=100000000000.0: give a hundred years at most"),
        ({"every": 5, "jitter": 1e13}, "jitter="),
        ({"every": timedelta.max}, "every="),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(options: dict[str, Any], text: str) -> None:
    options = {"values": {"kind": "x"}, **options}
    with pytest.raises(ConfigurationError) as raised:
        Schedule("nightly", Export, **options)
    assert str(raised.value).startswith("Schedule('nightly', Export): ")
    assert text in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_coroutine_function_is_refused() -> None:
    async def make(tick: Any) -> Any: ...

    with pytest.raises(ConfigurationError, match="is a coroutine function, which is not awaited"):
        Schedule("x", Export, every=5, make=make)


@pytest.mark.parametrize("name", ["", " ", 5, "a\0b"])
def test_a_schedule_needs_a_name(name: Any) -> None:
    with pytest.raises(ConfigurationError, match="give it a name"):
        Schedule(name, Export, every=5, values={"kind": "x"})


def test_a_schedule_needs_a_queue() -> None:
    with pytest.raises(NotAQueueError, match="Customer is not a queue"):
        Schedule("x", Customer, every=5)


def test_jitter_needs_a_due_time() -> None:
    report = make_report(columns={"run_at": None})
    with pytest.raises(ConfigurationError, match="jitter= needs the queue attribute 'run_at'"):
        hourly(report, jitter=5)


def test_defaults_of_a_dataclass_count() -> None:
    class Other(MappedAsDataclass, DeclarativeBase):
        pass

    class Task(QueueMixin, Other):
        __tablename__ = "task"
        id: Mapped[int] = mapped_column(primary_key=True, init=False)
        kind: Mapped[str] = mapped_column(default="x")

    class Note(QueueMixin, Other):
        __tablename__ = "note"
        id: Mapped[int] = mapped_column(primary_key=True, init=False)
        text: Mapped[str | None]

    assert Schedule("x", Task, every=5).values == {}
    with pytest.raises(ConfigurationError, match="missing a required argument: 'text'; give values="):
        Schedule("x", Note, every=5)
    assert Schedule("x", Note, every=5, values={"text": None}).values == {"text": None}


def make_one(_: Any) -> Any:
    return Export(kind="x")


@pytest.mark.parametrize(
    ("schedules", "text"),
    [
        ("nightly", "give a list of Schedules"),
        ([5], "this is no Schedule, and no queue class"),
        ([hourly(make_report.__wrapped__())] * 2 + [hourly(make_report.__wrapped__())], None),
    ],
)
def test_what_is_no_list_of_schedules_is_refused(schedules: Any, text: str | None) -> None:
    if text is None:
        assert len(schedule_groups(schedules, "x")) == 2
        return
    for make in (Scheduler, AsyncScheduler):
        with pytest.raises(ConfigurationError, match=text):
            make(sessionmaker(), schedules)
    with pytest.raises(ConfigurationError, match=text):
        Consumer(Export, lambda session, job: None, sessionmaker(), schedules=schedules)


def test_a_scheduler_needs_schedules() -> None:
    with pytest.raises(ConfigurationError, match="give at least one Schedule"):
        Scheduler(sessionmaker(), [])


def test_names_and_functions_have_to_differ() -> None:
    report = make_report()
    with pytest.raises(ConfigurationError, match="two schedules have the name 'hourly'"):
        schedule_groups([hourly(report), hourly(report)], "x")
    first, second = hourly(report, "a", make=lambda tick: report()), hourly(report, "b", make=lambda tick: report())
    with pytest.raises(ConfigurationError, match=r"Schedule\('b'\): make= has the name .*<lambda>"):
        schedule_groups([first, second], "x")
    shared = [Schedule(name, Export, every=5, make=make_one) for name in "ab"]
    assert len(schedule_groups(shared, "x")) == 1


def test_a_table_that_a_key_refers_to_may_be_imported_later() -> None:
    class Later(DeclarativeBase):
        pass

    class Report(QueueMixin, Later):
        __tablename__ = "report"
        id: Mapped[int] = mapped_column(primary_key=True)
        kind: Mapped[str]
        customer_id: Mapped[int | None] = mapped_column(sa.ForeignKey("customer.id"))

    assert Schedule("nightly", Report, every=HOUR, values={"kind": "x"}).model is Report


def test_a_schema_has_tables_of_its_own() -> None:
    class Elsewhere(QueueMixin, Base):
        __tablename__ = "elsewhere"
        __table_args__ = {"schema": "other"}  # noqa: RUF012 - as SQLAlchemy reads it
        __queue__ = QueueConfig()
        id: Mapped[int] = mapped_column(primary_key=True)

    groups = schedule_groups([hourly(Export, values={"kind": "x"}), Schedule("y", Elsewhere, every=5)], "x")
    assert [group.tables.schedules.fullname for group in groups] == ["sqlaqueue_schedule", "other.sqlaqueue_schedule"]
    assert ("elsewhere", "") not in groups[0].tables.classes()
    assert ("other.elsewhere", "Elsewhere") in groups[1].tables.classes()


# -- when a schedule ticks --------------------------------------------------------------------------------------------

START = datetime(2026, 1, 1, tzinfo=UTC)
CHANGING = [
    ("Europe/Berlin", datetime(2026, 3, 29, tzinfo=UTC)),
    ("Europe/Berlin", datetime(2026, 10, 25, tzinfo=UTC)),
    ("America/New_York", datetime(2026, 3, 8, tzinfo=UTC)),
    ("America/New_York", datetime(2026, 11, 1, tzinfo=UTC)),
    ("Australia/Lord_Howe", datetime(2026, 4, 4, tzinfo=UTC)),
    ("Australia/Lord_Howe", datetime(2026, 10, 3, tzinfo=UTC)),
    ("America/Santiago", datetime(2026, 4, 5, tzinfo=UTC)),
    ("America/Santiago", datetime(2026, 9, 6, tzinfo=UTC)),
    ("Africa/Cairo", datetime(2026, 4, 23, tzinfo=UTC)),
]


def cron(expression: str, timezone: str = "UTC") -> Recurrence:
    return Recurrence(expression, None, timezone, START)


def every(span: timedelta, origin: datetime = START) -> Recurrence:
    return Recurrence(None, span, "UTC", origin)


def test_the_page_about_clock_changes_is_what_the_code_does() -> None:
    assert PAGE.read_text() == "\n".join(page()) + "\n"


@pytest.mark.parametrize(("timezone", "day"), CHANGING)
@pytest.mark.parametrize("expression", ["*/7 * * * *", "30 * * * *", "15 0-4 * * *", "0 0 * * *", "*/10 1-3 * * *"])
def test_ticks_increase_wherever_they_are_computed_from(timezone: str, day: datetime, expression: str) -> None:
    recurrence = cron(expression, timezone)
    start = day - 12 * HOUR
    whole = recurrence.newest(start, start + 2 * DAY, start, 1, 1000)[1:]
    assert whole == sorted(set(whole))
    dice = random.Random(1)
    for _ in range(40):
        since = start + timedelta(seconds=dice.randrange(2 * 86400 - 100))
        tick = recurrence.after(since)
        assert tick is not None
        assert tick > since
        if tick <= whole[-1] and since >= whole[0]:
            # Of a fixed time within the repeated hour only the first pass counts.
            assert tick in whole


def test_an_interval_goes_by_elapsed_time() -> None:
    recurrence = every(DAY, datetime(2026, 3, 28, 12, 0, 0, 700_000, tzinfo=UTC))
    first = recurrence.after(datetime(2026, 3, 28, 12, 0, 0, 700_000, tzinfo=UTC))
    assert first == datetime(2026, 3, 29, 12, tzinfo=UTC)
    assert recurrence.after(first) == datetime(2026, 3, 30, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (cron("61 * * * *"), "cron='61 * * * *': bad minute"),
        (cron("0 0 30 2 *"), "cron='0 0 30 2 *': bad day-of-month"),
        (cron("* * *"), "wrong number of fields"),
        (cron("@fortnightly"), "wrong number of fields"),
        (cron(""), "wrong number of fields"),
        (
            cron("0 3 * * *", "Europe/Berln"),
            "timezone='Europe/Berln': this is not the name of a time zone; did you mean 'Europe/Berlin'?",
        ),
        (cron("0 3 * * *", "Europe"), "timezone='Europe': this is not the name"),
        (cron("0 3 * * *", "../etc/passwd"), "this is not the name"),
        (every(timedelta(milliseconds=900)), "the shortest interval is one second"),
        (Recurrence("* * * * *", MINUTE, "UTC", START), "give either cron= or every="),
        (Recurrence(None, None, "UTC", START), "give either cron= or every="),
        (Recurrence(None, MINUTE, "nowhere", START), "timezone='nowhere'"),
    ],
)
def test_what_has_no_ticks_is_refused_in_one_line(wrong: Recurrence, text: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        wrong.check()
    assert text in str(raised.value)
    assert "\n" not in str(raised.value)


def test_without_the_library_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "cronsim", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'sqlaqueue\[cron\]'"):
        cron("0 3 * * *").check()
    every(MINUTE).check()


@pytest.mark.parametrize("day", [datetime(2026, 3, 28, 23, tzinfo=UTC), datetime(2026, 10, 24, 22, tzinfo=UTC)])
def test_a_fixed_second_changes_no_rule(day: datetime) -> None:
    minutes, seconds = (
        cron(text, "Europe/Berlin").newest(day, day + 3 * DAY, day, 1, 99)[1:]
        for text in ("30 2 * * *", "7 30 2 * * *")
    )
    assert [tick + timedelta(seconds=7) for tick in minutes] == seconds
    assert len(seconds) == 3
    start = seconds[0] - timedelta(seconds=3)
    assert cron("7 30 2 * * *", "Europe/Berlin").after(start) == seconds[0]
    assert cron("7 30 2 * * *", "Europe/Berlin").after(seconds[0]) == seconds[1]


@pytest.mark.parametrize(
    ("alias", "tick"),
    [("@hourly", START + HOUR), ("@Daily", START + DAY), ("@weekly", datetime(2026, 1, 4, tzinfo=UTC))],
)
def test_the_names_of_vixie_cron_are_understood(alias: str, tick: datetime) -> None:
    assert cron(alias).after(START) == tick


def test_in_words_and_rules() -> None:
    assert cron("0 3 * * *", "Europe/Berlin").in_words() == "at 03:00 every day, Europe/Berlin"
    assert every(MINUTE).rules() is None
    rules = cron("0 3 * * *").rules()
    assert rules is not None
    assert rules.startswith("cronsim ")
    assert "tzdata" in rules


def test_the_version_of_the_time_zones_is_found_without_those_of_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.zoneinfo, "TZPATH", ())
    assert module._tzdata_version()[:2] == "20"


# -- which ticks are fired -----------------------------------------------------------------------------------------


def due(recurrence: Recurrence, first: datetime, now: datetime, catch_up: int = 1, grace: timedelta | None = MINUTE):  # noqa: ANN201 - a helper
    return due_ticks(recurrence, first, now, misfire_grace=grace, catch_up=catch_up)


def test_before_the_tick_nothing_is_due() -> None:
    assert due(every(HOUR), START + HOUR, START) == ([], None, START + HOUR, None)


def test_a_tick_on_time_is_fired_and_the_next_one_follows_from_it() -> None:
    now = START + HOUR + timedelta(seconds=50)
    assert due(every(HOUR), START + HOUR, now, catch_up=0) == ([START + HOUR], START + HOUR, START + 2 * HOUR, None)


@pytest.mark.parametrize(
    ("catch_up", "hours"),
    [(0, []), (1, [24]), (2, [23, 24]), (MOST, range(1, 25))],
    ids=["skip", "latest", "two", "all"],
)
def test_after_a_day_without_processes(catch_up: int, hours: range) -> None:
    now = START + DAY + 30 * MINUTE
    fired, last, following, missed = due(every(HOUR), START + HOUR, now, catch_up)
    assert fired == [START + hour * HOUR for hour in hours]
    assert (last, following) == (START + DAY, START + DAY + HOUR)
    assert missed == (None if catch_up == MOST else START + HOUR)


def test_a_tick_on_time_stands_for_those_that_were_missed() -> None:
    fired, *_ = due(every(HOUR), START + HOUR, START + DAY)
    assert fired == [START + DAY]
    fired, *_ = due(every(HOUR), START + HOUR, START + DAY, catch_up=3)
    assert fired == [START + hour * HOUR for hour in (22, 23, 24)]


def test_all_ticks_within_the_grace_are_fired() -> None:
    fired, *_ = due(every(MINUTE), START + MINUTE, START + 5 * MINUTE, grace=3 * MINUTE)
    assert fired == [START + each * MINUTE for each in (2, 3, 4, 5)]


@pytest.mark.parametrize(("catch_up", "numbers"), [(0, [2]), (1, [2]), (2, [1, 2]), (MOST, [0, 1, 2])])
def test_without_a_grace_the_next_tick_ends_that_of_a_tick(catch_up: int, numbers: Sequence[int]) -> None:
    tens = timedelta(seconds=10)
    fired, *_ = due(every(tens), START, START + 2 * tens, catch_up, grace=None)
    assert fired == [START + number * tens for number in numbers]
    # With seconds, a cron expression has ticks of different distances.
    fired, *_ = due(cron("0,1 * * * * *"), START, START + timedelta(seconds=30), grace=None)
    assert fired == [START + timedelta(seconds=1)]


def test_without_a_grace_a_tick_older_than_a_minute_was_missed() -> None:
    assert due(every(HOUR), START, START + MINUTE, 0, grace=None).fired == [START]
    assert due(every(HOUR), START, START + MINUTE + timedelta(seconds=1), 0, grace=None).fired == []


def test_no_more_than_the_most_are_fired_and_the_rest_is_not_even_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    computed = 0
    ticks = Recurrence._ticks

    def counted(self: Recurrence, after: datetime):  # noqa: ANN202 - a generator
        nonlocal computed
        for tick in ticks(self, after):
            computed += 1
            yield tick

    monkeypatch.setattr(Recurrence, "_ticks", counted)
    now = START + 365 * DAY
    fired, last, following, missed = due(cron("* * * * * *"), START, now, MOST)
    assert len(fired) == MOST
    assert fired[-1] == last == now
    assert following == now + timedelta(seconds=1)
    assert missed == START
    assert computed < 20 * MOST


def test_rare_ticks_are_found_however_far_back() -> None:
    now = datetime(2029, 6, 1, tzinfo=UTC)
    first = datetime(2020, 2, 29, tzinfo=UTC)
    fired, last, following, _ = due(cron("0 0 29 2 *"), first, now, 2)
    assert fired == [datetime(year, 2, 29, tzinfo=UTC) for year in (2024, 2028)]
    assert last == fired[-1]
    assert following == datetime(2032, 2, 29, tzinfo=UTC)


def test_a_stored_tick_that_other_rules_have_computed_is_fired() -> None:
    stored = START + timedelta(minutes=13)
    fired, *_ = due(every(HOUR), stored, START + 14 * MINUTE)
    assert fired == [stored]
