"""What is known about a job and its queue, for the functions that make reasons of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from sqlaqueue.admin.job_listing import JobInfo
from sqlaqueue.flow_control.held_back import HeldBackBy
from sqlaqueue.queue.run import Key, key_text
from sqlaqueue.queue.spec import QueueSpec

MOST_COUNTED = 1000
"""Number of jobs up to which those before a job are counted."""


@dataclass(frozen=True, kw_only=True)
class LiveConsumer:
    """A Consumer that has sent a heartbeat recently."""

    name: str
    listening: bool
    running: Sequence[Sequence[str]]
    """The keys of the jobs whose handlers were running."""
    claimed: int
    """The number of its other claimed jobs."""
    unclaimable: Sequence[tuple[list[str], str]] = ()
    """The jobs that it cannot claim, each with its key as texts and the error."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What was read about one job. A fact that does not apply to the job, or was not needed, has its default."""

    spec: QueueSpec
    key: Any
    """The key as it was given: a value, or a tuple for a composite key."""
    info: JobInfo | None
    """The job; None if there is none."""
    row: Mapping[str, Any] = field(default_factory=dict)
    """The values of its row, by column name."""
    paused_since: datetime | None = None
    """When the queue was paused; None if it is not."""
    due_in: float | None = None
    """The seconds until the job is due, negative if it is; None if it has no time."""
    lease_left: float | None = None
    """The seconds until its lease ends, negative if it has expired; None if it has none."""
    consumers: Sequence[LiveConsumer] | None = None
    """The live Consumers of the queue; None if they are not known."""
    claimed_here: bool = False
    """Whether the session's own transaction holds the job."""
    written_here: bool = False
    """Whether the session's transaction, which is not committed, has written the row."""
    locked: bool | None = False
    """Whether another transaction has locked the pending job; None if the role or the session may not lock it."""
    has_message: bool = True
    """Whether the pending job has a message, if the strategy needs one."""
    quarantined: bool = False
    """Whether its last worker died."""
    waits_for_twin: bool = False
    """Whether it waits until a twin does not count any more."""
    twin: JobInfo | None = None
    """The twin that counts, of a job that waits for it or has finished; None if there is none."""
    held_back: Sequence[HeldBackBy] = ()
    """What holds the due job back, of the limits, rates and the order of its queue."""
    before: int = 0
    """The number of due jobs with an earlier place in the claim order, at most :data:`MOST_COUNTED`."""

    @property
    def state(self) -> str | None:
        """The name of the job's state; None if there is no such job."""
        return None if self.info is None else self.info.state

    @property
    def is_due(self) -> bool:
        """Whether the job is pending, and its time has come."""
        return self.state == "pending" and (self.due_in is None or self.due_in <= 0)

    @property
    def is_held(self) -> bool:
        """Whether a transaction holds the pending job."""
        return self.state == "pending" and (self.claimed_here or bool(self.locked))

    @property
    def may_be_claimed(self) -> bool:
        """Whether the next claim could take the job, as far as its row tells."""
        return self.is_due and not self.is_held and self.has_message

    def runners(self) -> list[str]:
        """Return the names of the live Consumers that were running the job at their last heartbeats."""
        return [each.name for each in self.consumers or () if self._key_texts in map(list, each.running)]

    def refused_by(self) -> list[tuple[str, str]]:
        """Return the names of the live Consumers that cannot claim the job, each with the error."""
        return [
            (each.name, error)
            for each in self.consumers or ()
            for key, error in each.unclaimable
            if key == self._key_texts
        ]

    @property
    def _key_texts(self) -> list[str]:
        return [] if self.info is None else list(map(str, self.info.key))


def unclaimable_jobs(consumer: Any) -> list[tuple[list[str], str]]:
    """Return the keys, as texts, of the jobs that a live Consumer cannot claim, each with the error.

    :param consumer: a row of ``consumers()``; whatever another program has written there.
    """
    listed = consumer.unclaimable if isinstance(consumer.unclaimable, list) else []
    return [
        ([str(part) for part in one["key"]], str(one.get("error")))
        for one in listed
        if isinstance(one, dict) and isinstance(one.get("key"), list)
    ]


def text_of(key: Key | Any) -> str:
    """Return a key as text; one that is given as a text is one already."""
    return key_text(key) if isinstance(key, tuple | list) else str(key)
