"""Makes the job of a tick."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from contextvars import copy_context
from datetime import datetime, timedelta
from typing import Any

import sqlalchemy as sa

from sqlaqueue.exc import ConfigurationError
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.schedules.attribute_values import from_json
from sqlaqueue.schedules.decide import DueSchedule
from sqlaqueue.schedules.tick import Tick


def make_job(schedule: DueSchedule, at: datetime, factories: Mapping[str, Callable[..., Any]]) -> Any:
    """Return the job of a tick, a new instance.

    :param factories: the functions ``make`` of the program by their stored names.
    :raises ConfigurationError: if the stored values, or what ``make`` returns, make no job.
    """
    row, model, spec = schedule.row, schedule.model, schedule.spec
    values = from_json(spec, sa.inspect(model), row["values"])
    if row["factory"] is None:
        job = model(**values)
    else:
        try:
            # What it sets in context variables must not reach the next one.
            job = copy_context().run(factories[row["factory"]], Tick(schedule.name, at, row["now"] - at))
        except SystemExit as error:
            msg = f"make= of the schedule {schedule.name!r} raised {error!r}"
            raise ConfigurationError(msg) from error
        if not isinstance(job, model) or not sa.inspect(job).transient:
            msg = f"make= of the schedule {schedule.name!r} returned {job!r}, and not a new {model.__name__}"
            raise ConfigurationError(msg)
        for attribute, value in values.items():
            setattr(job, attribute, value)
    run_at = spec.attributes.get("run_at")
    if run_at is not None and getattr(job, run_at, None) is None:
        # A run that was requested is due at once.
        jitter = timedelta(0) if at == row["run_requested_at"] else jitter_of(schedule.name, at, row["jitter"])
        setattr(job, run_at, _due(spec, at + jitter))
    return job


def jitter_of(name: str, tick: datetime, longest: timedelta) -> timedelta:
    """Return how much later than its tick a job is due: the same in every process, and spread evenly over ticks."""
    digest = hashlib.sha256(f"{name}|{tick.timestamp()}".encode()).digest()
    return longest * (int.from_bytes(digest[:8]) / 2**64)


def _due(spec: QueueSpec, moment: datetime) -> Any:
    column = spec.columns["run_at"]
    if getattr(column.type, "timezone", False):
        return moment
    # The server converts it to the time zone of the session, as it does when it compares the column with the clock.
    return sa.cast(sa.literal(moment, sa.DateTime(timezone=True)), column.type)
