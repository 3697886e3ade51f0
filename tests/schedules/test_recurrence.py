"""When a schedule ticks; no database."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta

import pytest

from sqlaqueue.exc import ConfigurationError
from sqlaqueue.schedules import recurrence as module
from sqlaqueue.schedules.recurrence import MOST, Recurrence, due_ticks, zone
from tests.schedules.clock_changes import PAGE, page

START = datetime(2026, 1, 1, tzinfo=UTC)
MINUTE, HOUR, DAY = timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)
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


@pytest.mark.once
def test_the_page_about_clock_changes_is_what_the_code_does() -> None:
    assert PAGE.read_text() == "\n".join(page()) + "\n"


@pytest.mark.once
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


@pytest.mark.once
def test_an_interval_goes_by_elapsed_time() -> None:
    recurrence = every(DAY, datetime(2026, 3, 28, 12, 0, 0, 700_000, tzinfo=UTC))
    first = recurrence.after(datetime(2026, 3, 28, 12, 0, 0, 700_000, tzinfo=UTC))
    assert first == datetime(2026, 3, 29, 12, tzinfo=UTC)
    assert recurrence.after(first) == datetime(2026, 3, 30, 12, tzinfo=UTC)


@pytest.mark.once
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


@pytest.mark.once
def test_without_the_library_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "cronsim", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'sqlaqueue\[cron\]'"):
        cron("0 3 * * *").check()
    every(MINUTE).check()


@pytest.mark.once
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


@pytest.mark.once
@pytest.mark.parametrize(
    ("alias", "tick"),
    [("@hourly", START + HOUR), ("@Daily", START + DAY), ("@weekly", datetime(2026, 1, 4, tzinfo=UTC))],
)
def test_the_names_of_vixie_cron_are_understood(alias: str, tick: datetime) -> None:
    assert cron(alias).after(START) == tick


@pytest.mark.once
def test_in_words_and_rules() -> None:
    assert cron("0 3 * * *", "Europe/Berlin").in_words() == "at 03:00 every day, Europe/Berlin"
    assert every(MINUTE).rules() is None
    rules = cron("0 3 * * *").rules()
    assert rules is not None
    assert rules.startswith("cronsim ")
    assert "tzdata" in rules


@pytest.mark.once
def test_the_version_of_the_time_zones_is_found_without_those_of_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.zoneinfo, "TZPATH", ())
    assert module._tzdata_version()[:2] == "20"


# -- which ticks are fired -----------------------------------------------------------------------------------------


def due(recurrence: Recurrence, first: datetime, now: datetime, catch_up: int = 1, grace: timedelta = MINUTE):  # noqa: ANN201 - a helper
    return due_ticks(recurrence, first, now, grace=grace, catch_up=catch_up)


@pytest.mark.once
def test_before_the_tick_nothing_is_due() -> None:
    assert due(every(HOUR), START + HOUR, START) == ([], None, START + HOUR, None)


@pytest.mark.once
def test_a_tick_on_time_is_fired_and_the_next_one_follows_from_it() -> None:
    now = START + HOUR + timedelta(seconds=50)
    assert due(every(HOUR), START + HOUR, now, catch_up=0) == ([START + HOUR], START + HOUR, START + 2 * HOUR, None)


@pytest.mark.once
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


@pytest.mark.once
def test_a_tick_on_time_stands_for_those_that_were_missed() -> None:
    fired, *_ = due(every(HOUR), START + HOUR, START + DAY)
    assert fired == [START + DAY]
    fired, *_ = due(every(HOUR), START + HOUR, START + DAY, catch_up=3)
    assert fired == [START + hour * HOUR for hour in (22, 23, 24)]


@pytest.mark.once
def test_all_ticks_within_the_grace_are_fired() -> None:
    fired, *_ = due(every(MINUTE), START + MINUTE, START + 5 * MINUTE, grace=3 * MINUTE)
    assert fired == [START + each * MINUTE for each in (2, 3, 4, 5)]


@pytest.mark.once
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


@pytest.mark.once
def test_rare_ticks_are_found_however_far_back() -> None:
    now = datetime(2029, 6, 1, tzinfo=UTC)
    first = datetime(2020, 2, 29, tzinfo=UTC)
    fired, last, following, _ = due(cron("0 0 29 2 *"), first, now, 2)
    assert fired == [datetime(year, 2, 29, tzinfo=UTC) for year in (2024, 2028)]
    assert last == fired[-1]
    assert following == datetime(2032, 2, 29, tzinfo=UTC)


@pytest.mark.once
def test_a_stored_tick_that_other_rules_have_computed_is_fired() -> None:
    stored = START + timedelta(minutes=13)
    fired, *_ = due(every(HOUR), stored, START + 14 * MINUTE)
    assert fired == [stored]


def test_the_time_zone_of_a_schedule_is_one_of_the_system() -> None:
    assert zone("Europe/Berlin").key == "Europe/Berlin"
