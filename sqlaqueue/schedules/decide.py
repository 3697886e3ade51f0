"""What becomes of a due schedule: which of its ticks are fired, and when the next one is. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from sqlaqueue.mapping.mixin import spec_of
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.schedules.conditions import AHEAD, PAUSED
from sqlaqueue.schedules.due_ticks import DueTicks, due_ticks
from sqlaqueue.schedules.recurrence import Recurrence


@dataclass
class DueSchedule:
    """A locked row, and what is decided about it."""

    row: Mapping[Any, Any]
    model: type[Any]
    due: DueTicks
    ticks: list[datetime]
    """The ticks to fire, with the one that was requested by "run now"."""
    is_cut: bool = False
    """Whether ticks are left that are due as well."""

    def until(self, number: int) -> DueSchedule:
        """Return what becomes of it if only the first ticks are fired now; the others stay due."""
        due, following = self.due, self.ticks[number]
        if following in self.due.fired:
            due = due._replace(last=self.ticks[number - 1], next=following)
        return replace(self, due=due, ticks=self.ticks[:number], is_cut=True)

    @property
    def name(self) -> str:
        """The name of the schedule."""
        name: str = self.row["name"]
        return name

    @property
    def spec(self) -> QueueSpec:
        """The queue of its jobs."""
        return spec_of(self.model)

    @property
    def last_tick(self) -> datetime | None:
        """The newest tick that has passed."""
        return self.due.last or _last_tick(self.row)

    @property
    def rules(self) -> str | None:
        """The versions of the rules by which the next tick was computed."""
        before: str | None = self.row["rules"]
        return before if self.row["plan"] == PAUSED else recurrence_of(self.row).rules()

    @property
    def left_request(self) -> datetime | None:
        """The time of a requested run that is still to come; None if it was fired now, or there is none."""
        requested: datetime | None = self.row["run_requested_at"]
        return requested if requested is not None and (self.is_cut or requested > self.row["now"]) else None


def recurrence_of(row: Mapping[Any, Any]) -> Recurrence:
    """Return when a stored schedule ticks."""
    return Recurrence(row["cron"], row["every"], row["timezone"], row["created_at"])


def decide(row: Mapping[Any, Any], model: type[Any]) -> DueSchedule:
    """Return what becomes of a locked row.

    :raises ConfigurationError: if its definition, which may have been written by SQL, has no ticks.
    """
    due = DueTicks([], None, None, None)
    if row["plan"] != PAUSED:
        recurrence = recurrence_of(row)
        recurrence.check()
        due = _due(row, recurrence)
    # One at a time: the first would be unfinished when the second is fired.
    ticks = due.fired[-1:] if row["skip_unfinished"] else due.fired
    requested = row["run_requested_at"]
    if requested is not None and requested <= row["now"]:
        ticks = [*ticks, requested]
    return DueSchedule(row, model, due, list(dict.fromkeys(ticks)))


def _due(row: Mapping[Any, Any], recurrence: Recurrence) -> DueTicks:
    """Return what to do about the ticks of a schedule: from the stored one on, or from new ones if it was changed."""
    now, stored, last = row["now"], row["next_tick"], _last_tick(row)
    options = {"grace": row["grace"], "catch_up": row["catch_up"]}
    clock_was_wrong = last != row["last_tick"]
    if stored is not None and row["planned_for"] == row["plan"] and not clock_was_wrong:
        return due_ticks(recurrence, stored, now, **options)
    # Nothing is fired for the time before it was created, changed or resumed; nor, when the clock has gone back a
    # little, for a time that has passed before.
    since = row["created_at"] if row["planned_for"] is None and row["edited_at"] is None else _changed_at(row)
    first = recurrence.after(max(since, last or since))
    due = DueTicks([], None, None, None) if first is None else due_ticks(recurrence, first, now, **options)
    if stored is None or row["planned_for"] is None or clock_was_wrong or stored > min(since, now):
        return due
    # The former definition had a tick before the change, which was not fired yet.
    fires = now - stored <= row["grace"] or (row["catch_up"] > 0 and not due.fired)
    return due._replace(
        fired=[stored, *due.fired] if fires else due.fired,
        last=due.last or stored,
        missed=due.missed if fires else stored,
    )


def _last_tick(row: Mapping[Any, Any]) -> datetime | None:
    """Return the newest tick that has passed; None if it is far ahead, as the clock was wrong."""
    last: datetime | None = row["last_tick"]
    return None if last is not None and last > row["now"] + AHEAD else last


def _changed_at(row: Mapping[Any, Any]) -> datetime:
    """Return when a schedule was changed, which a trigger records; without it, now."""
    now: datetime = row["now"]
    edited, planned = row["edited_at"], row["planned_at"]
    if edited is None or (planned is not None and edited <= planned):
        return now
    changed: datetime = edited
    return min(changed, now)
