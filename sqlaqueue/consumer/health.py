"""Whether a Consumer is alive, and whether it is ready: two questions with different consequences.

A service manager restarts a worker that is not alive. A worker that is not ready is left alone: a restart would not
bring its database back.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from sqlaqueue.consumer.context import ConsumerContext

STUCK_AFTER = 180.0
"""Seconds without a round of the maintenance loop after which a Consumer is stuck. An idle loop sleeps for up to 60."""

UNANSWERED_AFTER = 15.0
"""Seconds for which the maintenance loop waits for the database, after which a Consumer is not ready. It is alive."""


@dataclass(frozen=True, kw_only=True)
class Health:
    """The health of a Consumer, see :meth:`Consumer.health() <sqlaqueue.Consumer.health>`."""

    alive: bool
    """Whether it runs, and its maintenance loop goes on or waits for the database: that is no reason to restart it.

    It is false if something waits for the database far longer than it may, although a new connection is answered.
    """
    ready: bool
    """Whether it claims jobs: its first claim has succeeded, the database answers, and it is not stopping."""
    problems: tuple[str, ...] = ()
    """Why it is not alive or not ready, in words."""


def health_of(context: ConsumerContext | None) -> Health:
    """Return the health of a Consumer.

    :param context: its run; None if it is not running.
    """
    if context is None:
        return Health(alive=False, ready=False, problems=("it is not running",))
    # Read first: the loop sets it to None after it has set the other one.
    waiting_since, now = context.waits_for_database_since, time.monotonic()
    silent = now - context.maintained_at
    if waiting_since is None and silent > STUCK_AFTER:
        problem = f"its maintenance loop has not run for {silent:.0f} seconds"
        return Health(alive=False, ready=False, problems=(problem,))
    deadlines = context.deadlines
    if deadlines is not None and deadlines.is_stuck:
        problem = f"it waits for the database for more than {deadlines.longest:.0f} seconds, which answers others"
        return Health(alive=False, ready=False, problems=(problem,))
    problems = []
    if context.stopping:
        problems.append("it is stopping")
    elif context.intervals.failures:
        number = context.intervals.failures
        problems.append("the last claim has failed" if number == 1 else f"the last {number} claims have failed")
    elif not context.has_claimed:
        problems.append("it has not claimed yet")
    if waiting_since is not None and now - waiting_since > UNANSWERED_AFTER:
        problems.append(f"its maintenance has waited for the database for {now - waiting_since:.0f} seconds")
    return Health(alive=True, ready=not problems, problems=tuple(problems))
