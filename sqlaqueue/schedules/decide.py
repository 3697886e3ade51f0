"""What becomes of a due schedule: which of its ticks are fired, and when the next one is. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlaqueue.mapping.mixin import spec_of
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.schedules.conditions import PAUSED
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
        before: datetime | None = self.row["last_tick"]
        return self.due.last or before

    @property
    def rules(self) -> str | None:
        """The versions of the rules by which the next tick was computed."""
        before: str | None = self.row["rules"]
        return before if self.row["plan"] == PAUSED else recurrence_of(self.row).rules()

    @property
    def left_request(self) -> datetime | None:
        """The time of a requested run that is still to come; None if it was fired now, or there is none."""
        requested: datetime | None = self.row["run_requested_at"]
        return requested if requested is not None and requested > self.row["now"] else None


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
        first = _first(row, recurrence)
        if first is not None:
            due = due_ticks(recurrence, first, row["now"], grace=row["grace"], catch_up=row["catch_up"])
    # One at a time: the first would be unfinished when the second is fired.
    ticks = due.fired[-1:] if row["skip_unfinished"] else due.fired
    requested = row["run_requested_at"]
    if requested is not None and requested <= row["now"]:
        ticks = [*ticks, requested]
    return DueSchedule(row, model, due, list(dict.fromkeys(ticks)))


def _first(row: Mapping[Any, Any], recurrence: Recurrence) -> datetime | None:
    """Return the next tick of a schedule: the stored one, or a new one if the definition has changed since."""
    if row["planned_for"] == row["plan"]:
        stored: datetime | None = row["next_tick"]
        return stored
    # Nothing is fired for the time before it was created, changed or resumed; nor, when the clock has gone back, for a
    # time that has passed before.
    since = row["created_at"] if row["planned_for"] is None else row["now"]
    return recurrence.after(max(since, row["last_tick"] or since))
