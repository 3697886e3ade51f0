"""The ticks of both days of a year on which the clock changes, for each kind of schedule.

    python -m tests.schedules.clock_changes

writes docs/evidence/clock-changes.md, with which the tests compare.
"""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

from sqlaqueue.schedules.recurrence import Recurrence, zone

PAGE = Path(__file__).parents[2] / "docs" / "evidence" / "clock-changes.md"
ZONE = "Europe/Berlin"
DAYS = {
    "29 March 2026: at 02:00 the clock moves to 03:00": datetime(2026, 3, 28, 23, tzinfo=UTC),
    "25 October 2026: at 03:00 the clock moves back to 02:00": datetime(2026, 10, 24, 22, tzinfo=UTC),
}
HOURS = 5
KINDS: dict[str, tuple[str, str | None, timedelta | None]] = {
    "a fixed time": ('`cron="30 2 * * *"`', "30 2 * * *", None),
    "several fixed times": ('`cron="30 1-3 * * *"`', "30 1-3 * * *", None),
    "every 20 minutes": ('`cron="*/20 * * * *"`', "*/20 * * * *", None),
    "every second hour": ('`cron="0 */2 * * *"`', "0 */2 * * *", None),
    "an interval": ("`every=timedelta(minutes=45)`", None, timedelta(minutes=45)),
}


def ticks(kind: str, start: datetime) -> list[datetime]:
    """Return the ticks of the first hours of a day, each computed from the one before, as they are fired."""
    _, cron, every = KINDS[kind]
    recurrence = Recurrence(cron, every, ZONE, start)
    found, last = [], start - timedelta(seconds=1)
    while (tick := recurrence.after(last)) is not None and tick < start + timedelta(hours=HOURS):
        found.append(tick)
        last = tick
    return found


def page() -> Iterator[str]:
    """Yield the lines of the page."""
    yield "# Schedules on the days when the clock changes"
    yield ""
    yield (
        f"When schedules in the time zone {ZONE} tick on the two days of 2026 on which the clock changes: the first "
        f"{HOURS} hours of each day. [Schedules](../schedules.md#time-zones) explains the rules. A test compares this "
        "page with the code."
    )
    for day, start in DAYS.items():
        yield ""
        yield f"## {day}"
        for kind, (written, _, _) in KINDS.items():
            yield ""
            yield f"{kind.capitalize()}, {written}:"
            yield ""
            yield "| local time | UTC |"
            yield "| --- | --- |"
            for tick in ticks(kind, start):
                yield f"| {tick.astimezone(zone(ZONE)):%H:%M %Z} | {tick:%H:%M} |"


if __name__ == "__main__":
    PAGE.write_text("\n".join(page()) + "\n")
