"""Whether the clock of this machine and that of the server agree."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime

from sqlaqueue.admin.diagnosis.examination import Examination
from sqlaqueue.admin.diagnosis.finding import Finding
from sqlaqueue.postgresql.server import server_time

_MEASUREMENTS = 5


def _utc_now() -> datetime:
    return datetime.now(UTC)


def check_clock(examination: Examination, now: Callable[[], datetime] = _utc_now) -> Iterator[Finding]:
    """Find a difference between the clocks that the duration of a round trip cannot explain.

    Thresholds: ``clock_difference``, ``clock_difference_critical``.

    :param now: the clock of this machine.
    """
    difference, uncertainty = min((_measure(examination, now) for _ in range(_MEASUREMENTS)), key=lambda each: each[1])
    certain = abs(difference) - uncertainty
    limits = examination.thresholds
    if certain <= limits.clock_difference.total_seconds():
        return
    direction = "ahead of" if difference > 0 else "behind"
    later = "later" if difference > 0 else "earlier"
    yield Finding(
        severity="critical" if certain > limits.clock_difference_critical.total_seconds() else "warning",
        code="clock_difference",
        queue=None,
        summary=f"The clock of this machine is {abs(difference):.1f} s {direction} the clock of the database server.",
        consequence=(
            f"A time that a program of this machine computes, such as run_at, is due that much {later} than meant. "
            "Leases, retries and schedules go by the server's clock: if that is the wrong one, they end or begin too "
            "early or too late when it is corrected."
        ),
        fixes=(
            "sudo timedatectl set-ntp true  # on the machine whose clock is wrong",
            "sudo chronyc makestep  # the same where chrony runs",
        ),
        facts={"seconds": difference, "uncertainty": uncertainty},
    )


def _measure(examination: Examination, now: Callable[[], datetime]) -> tuple[float, float]:
    """Return how many seconds this machine is ahead, and how far off that may be."""
    began, here = time.monotonic(), now()
    there = server_time(examination.connection)
    half = (time.monotonic() - began) / 2
    return (here - there).total_seconds() + half, half
