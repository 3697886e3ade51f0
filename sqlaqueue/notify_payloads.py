"""The payloads of the notifications on a queue's channel. This docstring specifies their format.

A queue has one channel. Triggers, Consumers, statements of the application and callers of :func:`sqlaqueue.wait` send
on it; Consumers and callers of ``wait()`` listen. A payload is a list of words separated by single spaces, of which
the first gives its kind::

    pending <id> <count> <due> [more]   jobs became pending: their number, and when the first of them is due, in
                                        seconds since the epoch by the clock of the database; 0 means now. With
                                        ``more``, some are due later. The id of this announcement is that of the
                                        transaction.
    claimed <count> <id>...             jobs of these announcements were claimed. An announcement of jobs that were due
                                        later has the id ``<id>@<due>``. 1000000000 means all of them.
    heartbeat <consumer>                a Consumer wrote its heartbeat
    deregistered <consumer>             a Consumer ended
    poll                                poll now: a paused queue was resumed, or claimed jobs were released
    quarantined                         rescued jobs became pending, so that there may be quarantined ones
    rescued                             a Consumer has looked for jobs whose lease expired
    cancel_requested                    the cancellation of running jobs was requested
    consumer_requested                  a Consumer was asked to be quiet, to claim again, or to stop
    unwatched                           a Consumer that has polled for all of them, or was notified for all, has no
                                        capacity any more: another one watches the queue
    wait <waiter> <jobs>                a caller waits until these jobs are settled
    settled <jobs>                      these jobs, for which a caller waits, were settled

``pending`` is sent only while a Consumer waits for it: see :mod:`sqlaqueue.consumer.notifications.watch`. A due time is
a decimal number. Jobs are a JSON array of the texts of their keys (:func:`sqlaqueue.queue.run.key_text`).

Each notification is a hint. If one is lost, the jobs are found by the next poll; a receiver ignores a payload that it
cannot parse.
"""

from __future__ import annotations

import enum
import json
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

MAX_BYTES = 7_000
"""The length up to which payloads with a list of jobs are made; PostgreSQL takes fewer than 8,000 bytes."""

ALL_JOBS = 10**9
"""The count with which ``claimed`` says that no job of these announcements is left."""

PENDING, CLAIMED = "pending", "claimed"
"""The kinds that SQL builds as well: the wake trigger, and the statement of a claim."""

_HEARTBEAT, _DEREGISTERED, _WAIT, _SETTLED = "heartbeat", "deregistered", "wait", "settled"


class Signal(enum.StrEnum):
    """A payload that is one word."""

    POLL = "poll"
    QUARANTINED = "quarantined"
    RESCUED = "rescued"
    CANCEL_REQUESTED = "cancel_requested"
    CONSUMER_REQUESTED = "consumer_requested"
    UNWATCHED = "unwatched"


class Pending(NamedTuple):
    id: str
    number: int
    due: float = 0
    more: bool = False

    def __str__(self) -> str:
        return f"{PENDING} {self.id} {self.number} {self.due}{' more' * self.more}"


class Claimed(NamedTuple):
    number: int
    ids: Sequence[str]

    def __str__(self) -> str:
        return " ".join((CLAIMED, str(self.number), *self.ids))


class Heartbeat(NamedTuple):
    consumer: str

    def __str__(self) -> str:
        return f"{_HEARTBEAT} {self.consumer}"


class Deregistered(NamedTuple):
    consumer: str

    def __str__(self) -> str:
        return f"{_DEREGISTERED} {self.consumer}"


class WaitRequest(NamedTuple):
    waiter: str
    jobs: Sequence[str]

    def __str__(self) -> str:
        return f"{_WAIT} {self.waiter} {json.dumps(self.jobs)}"


class Settled(NamedTuple):
    jobs: Sequence[str]

    def __str__(self) -> str:
        return f"{_SETTLED} {json.dumps(self.jobs)}"


Payload = Pending | Claimed | Heartbeat | Deregistered | WaitRequest | Settled | Signal


def parse(text: str) -> Payload | None:
    """Return the payload that ``text`` is; None if it is none of these, as a newer version may send."""
    try:
        return _parse(text)
    except (ValueError, RecursionError):  # the second one for JSON that is too deep
        return None


def _parse(text: str) -> Payload | None:  # noqa: PLR0911 - one for each kind
    match text.split(" "):
        case ["pending", id_, count, due, *more] if math.isfinite(float(due)):
            return Pending(id_, int(count), float(due), more=bool(more))
        case ["claimed", count, *ids]:
            return Claimed(int(count), ids)
        case ["heartbeat", consumer]:
            return Heartbeat(consumer)
        case ["deregistered", consumer]:
            return Deregistered(consumer)
        case ["wait", waiter, _, *_]:
            return WaitRequest(waiter, _jobs(text.split(" ", 2)[2]))
        case ["settled", _, *_]:
            return Settled(_jobs(text.split(" ", 1)[1]))
        case [word]:
            return Signal(word)
    return None


def _jobs(text: str) -> list[str]:
    jobs = json.loads(text)
    if not isinstance(jobs, list) or not all(isinstance(job, str) for job in jobs):
        msg = "not an array of texts"
        raise ValueError(msg)
    return jobs


def settled_payloads(jobs: Sequence[str], reserve: int = 0) -> Iterator[Settled]:
    """Yield the payloads for jobs that were settled: as many as keep each short enough.

    :param reserve: the number of bytes to leave.
    """
    some: list[str] = []
    for job in jobs:
        if some and len(str(Settled([*some, job]))) + reserve > MAX_BYTES:
            yield Settled(some)
            some = []
        some.append(job)
    if some:
        yield Settled(some)
