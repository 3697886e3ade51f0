"""The ticks of a schedule: the moments at which a cron expression or an interval wants a job.

Cron expressions are computed by `cronsim <https://github.com/cuu508/cronsim>`_, which follows Debian's cron where the
clock changes: a fixed time that does not exist moves to the end of the gap, one that exists twice is meant once, and an
expression with ``*`` in its minutes or hours goes by elapsed time.
"""

from __future__ import annotations

import difflib
import functools
import importlib.util
import zoneinfo
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from importlib import metadata
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import sqlalchemy as sa

from sqlaqueue.exc import ConfigurationError
from sqlaqueue.mapping.mixin import QueueMixin, queue_spec
from sqlaqueue.postgresql.schedule_tables import schedule_tables
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.texts import duration_text

_ALIASES = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
}
_FIRST_SPAN = timedelta(minutes=1)
_WITH_SECONDS, _SECONDS = 6, {str(second) for second in range(60)}


@dataclass(frozen=True)
class Recurrence:
    """When a schedule ticks.

    :param cron: a cron expression of five fields, or six with seconds first; None for an interval.
    :param every: the interval; None for a cron expression.
    :param timezone: the time zone of the cron expression.
    :param origin: the moment from which an interval is counted, by its second; in UTC, as all moments here: the sum
        of a moment of another zone and an interval goes by the clock of that zone.
    """

    cron: str | None
    every: timedelta | None
    timezone: str
    origin: datetime

    def check(self) -> None:
        """Refuse a recurrence without ticks."""
        if (self.cron is None) == (self.every is None):
            msg = "give either cron= or every="
            raise ConfigurationError(msg)
        if self.every is not None:
            if self.every < timedelta(seconds=1):
                msg = f"every={self.every!r}: the shortest interval is one second"
                raise ConfigurationError(msg)
            zone(self.timezone)
        elif self.after(self.origin) is None:
            msg = f"cron={self.cron!r}: no date of the next 50 years matches"
            raise ConfigurationError(msg)

    def after(self, moment: datetime) -> datetime | None:
        """Return the first tick after ``moment``; None without an error.

        :raises ConfigurationError: for an invalid expression or time zone.
        """
        return next(self._ticks(moment), None)

    def newest(self, first: datetime, until: datetime, since: datetime, number: int, most: int) -> list[datetime]:
        """Return the newest ticks from ``first``, which is one, to ``until``, in order.

        These are all ticks from ``since`` on, and before it as many as make ``number``; but no more than ``most``.
        After a long time without firing, the ticks before these are not computed.
        """
        span = _FIRST_SPAN
        while True:
            start = until - span
            whole = start <= first
            ticks = takewhile(lambda tick: tick <= until, self._ticks(first if whole else start))
            found = deque[datetime]((*([first] if whole else []), *ticks), maxlen=most)
            if whole or len(found) == most or (start < since and len(found) >= number):
                return list(found)
            span *= 4

    def in_words(self) -> str:
        if self.every is not None:
            return f"every {duration_text(self.every.total_seconds())}"
        words: str = self._parsed(self._expression, datetime.now(zone(self.timezone))).explain()
        return f"{words[:1].lower()}{words[1:]}, {self.timezone}"

    def rules(self) -> str | None:
        """Return the versions of the rules that the ticks follow; None for an interval, which follows none."""
        return None if self.cron is None else current_rules()

    @property
    def _expression(self) -> str:
        cron = (self.cron or "").strip()
        return _ALIASES.get(cron.lower(), cron)

    def _parsed(self, expression: str, moment: datetime) -> Any:
        try:
            import cronsim as library  # noqa: PLC0415 - intervals do without it
        except ModuleNotFoundError:
            msg = "cron= needs cronsim: pip install 'sqlaqueue[cron]'; every= does without it"
            raise ConfigurationError(msg) from None
        try:
            return library.CronSim(expression, moment)
        except library.CronSimError as error:
            reason = str(error)
            msg = f"cron={self.cron!r}: {reason[:1].lower()}{reason[1:]}; write it as minute hour day month weekday"
            raise ConfigurationError(msg) from None
        except ValueError:
            msg = f"cron={self.cron!r}: a number has too many digits; write it as minute hour day month weekday"
            raise ConfigurationError(msg) from None

    def _ticks(self, after: datetime) -> Iterator[datetime]:
        if self.every is not None:
            origin = self.origin.replace(microsecond=0)
            tick = origin + self.every * ((after - origin) // self.every + 1)
            while True:
                yield tick
                tick += self.every
        local, fields = zone(self.timezone), self._expression.split()
        # With a fixed second, the library applies no rules for the days when the clock changes.
        second = int(fields.pop(0)) if len(fields) == _WITH_SECONDS and fields[0] in _SECONDS else 0
        ticks = self._parsed(" ".join(fields), (after - _FIRST_SPAN).astimezone(local))
        # In an hour that the clock repeats, the library may return a time of the first pass during the second one.
        for tick in ticks:
            moment = tick.astimezone(UTC) + timedelta(seconds=second)
            if moment > after:
                yield moment


def zone(name: str) -> zoneinfo.ZoneInfo:
    try:
        return zoneinfo.ZoneInfo(name)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError, TypeError, RecursionError):  # the last for many a /
        known = zoneinfo.available_timezones()
        close = difflib.get_close_matches(str(name), known, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ", such as 'Europe/Berlin'"
        if not known:
            hint = "; this system has no time zones: pip install tzdata"
        msg = f"timezone={name!r}: this is not the name of a time zone{hint}"
        raise ConfigurationError(msg) from None


@functools.cache
def current_rules() -> str:
    """Return the versions of the cron library and of the time zone data, where it can be known."""
    if importlib.util.find_spec("cronsim") is None:
        return "none"
    return f"cronsim {metadata.version('cronsim')}, tzdata {_tzdata_version()}"


def _tzdata_version() -> str:
    for directory in zoneinfo.TZPATH:
        path = Path(directory) / "tzdata.zi"
        if path.is_file():
            with path.open(encoding="utf-8") as file:
                return file.readline().removeprefix("# version ").strip()
        if (Path(directory) / "UTC").is_file():
            return "of the system"
    try:
        return metadata.version("tzdata")
    except metadata.PackageNotFoundError:
        return "unknown"


# -- due ticks ---------------------------------------------------------------------------------------------------------

MOST = 1000
"""How many ticks of a schedule are fired at once, at most."""

USUAL_GRACE = timedelta(minutes=1)
"""The age from which a tick counts as missed, for a schedule without a grace of its own."""


def grace_of(misfire_grace: timedelta | None) -> timedelta:
    """Return the age from which a tick of a schedule counts as missed in any case."""
    return USUAL_GRACE if misfire_grace is None else misfire_grace


class DueTicks(NamedTuple):
    """The result of a look at a schedule."""

    fired: list[datetime]
    """The ticks to fire, in order."""
    last: datetime | None
    """The newest tick that has passed, fired or not; None if none has."""
    next: datetime | None
    """The tick after it; None without an error."""
    missed: datetime | None
    """The first tick that is passed over; None if none is."""


def due_ticks(
    recurrence: Recurrence, first: datetime, now: datetime, *, misfire_grace: timedelta | None, catch_up: int
) -> DueTicks:
    """Return what to do about the ticks from ``first``, the next one of a schedule, until now.

    A tick older than ``misfire_grace`` was missed; if that is None, also one after which another tick has passed. All
    others are fired, and of the newest ``catch_up`` ticks also those that were missed.
    """
    if first > now:
        return DueTicks([], None, first, None)
    oldest = now - grace_of(misfire_grace)
    ticks = recurrence.newest(first, now, oldest, max(catch_up, 1), MOST)
    on_time = sum(tick >= oldest for tick in (ticks[-1:] if misfire_grace is None else ticks))
    number = max(on_time, min(catch_up, len(ticks)))
    fired = ticks[len(ticks) - number :]
    missed = None if fired and fired[0] == first else first
    return DueTicks(fired, ticks[-1], recurrence.after(ticks[-1]), missed)


class ScheduleTables(NamedTuple):
    """The tables for the schedules of all queues in one MetaData and schema."""

    schedules: sa.Table
    ticks: sa.Table
    metadata: sa.MetaData
    schema: str | None

    @classmethod
    def declare(cls, spec: QueueSpec) -> ScheduleTables:
        """Return the tables for the schedules of a queue, and add them to its MetaData, so that they are created."""
        metadata, schema = spec.table.metadata, spec.table.schema
        return cls(*schedule_tables(metadata, schema), metadata, schema)

    @classmethod
    def look_up(cls, spec: QueueSpec) -> ScheduleTables:
        """Return these tables for statements, and leave the MetaData as it is: schedules may be another process's."""
        metadata, schema = spec.table.metadata, spec.table.schema
        return cls(*_separate_tables(schema), metadata, schema)

    def classes(self) -> dict[tuple[str, str], type[Any]]:
        """Return the mapped classes that schedules may name, by the names of queue and class.

        An empty name of a class stands for the class of the queue.
        """
        found: dict[tuple[str, str], type[Any]] = {}
        classes: list[type[Any]] = [QueueMixin]
        while classes:
            cls = classes.pop(0)
            classes += cls.__subclasses__()
            spec = queue_spec(cls)
            if spec is None or spec.table.metadata is not self.metadata or spec.table.schema != self.schema:
                continue
            if sa.inspect(cls, raiseerr=False) is not None:
                found.setdefault((spec.name, cls.__name__), cls)
                found.setdefault((spec.name, ""), spec.model)
        return found


def in_utc(row: Mapping[Any, Any]) -> dict[str, Any]:
    """Return a row of these tables with its moments in UTC; drivers return them in the time zone of the session."""
    return {name: value.astimezone(UTC) if isinstance(value, datetime) else value for name, value in row.items()}


@functools.cache
def _separate_tables(schema: str | None) -> tuple[sa.Table, sa.Table]:
    return schedule_tables(sa.MetaData(), schema)
