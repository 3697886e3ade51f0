"""One execution of a job: :class:`Run`."""

from __future__ import annotations

import csv
import io
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from typing import Any, Protocol
from uuid import UUID

from sqlalchemy.orm import SessionTransaction

# -- keys --------------------------------------------------------------------------------------------------------------
# Primary keys of jobs: their type, their text, and how runs are grouped by claim.


Key = tuple[Any, ...]
"""The primary key of one job: a tuple even if the table's key is one column."""


class _ClaimedRun(Protocol):
    @property
    def key(self) -> Key: ...
    @property
    def token(self) -> Any: ...


def key_text(given: Any) -> str:
    """Return a key as text, unique among the keys of its queue: ``5``, or ``5,de`` for a composite key.

    The option ``--key`` of the command line accepts this text.

    :param given: the parts of the key, or the value of a key of one column.
    """
    key = key_tuple(given)
    if len(key) == 1:
        return str(key[0])
    # CSV quotes a part that contains a comma, so that two keys never have the same text.
    line = io.StringIO()
    csv.writer(line).writerow(map(str, key))
    return line.getvalue().removesuffix("\r\n")


def key_value(key: Sequence[Any]) -> Any:
    """Return the value of a key of one column, or the tuple of a composite key."""
    return key[0] if len(key) == 1 else tuple(key)


def key_tuple(value: Any) -> Key:
    """Return the parts of a key that is given as a value, or as its parts already."""
    return tuple(value) if isinstance(value, Sequence) and not isinstance(value, str | bytes) else (value,)


def keys_from(returned: Iterable[Any], width: int) -> list[Key]:
    """Return as tuples the keys that a statement returned: plain values where the key has a ``width`` of 1."""
    return [(value,) for value in returned] if width == 1 else [tuple(row) for row in returned]


def keys_by_token(runs: Iterable[_ClaimedRun]) -> dict[Any, list[Key]]:
    """Return the keys of runs, grouped by the token of the claim that started them."""
    claims: dict[Any, list[Key]] = {}
    # Runs of one claim are mostly neighbours, and comparing two tokens is cheaper than hashing one.
    for token, some in groupby(runs, key=attrgetter("token")):
        claims.setdefault(token, []).extend([run.key for run in some])
    return claims


class CopiedTransaction:
    """Placeholder for a transaction in the copy of an instance, since a transaction cannot be copied."""

    is_active = False


@dataclass(slots=True, eq=False)
class Run:
    """One execution of one job, from its claim on; stored beside the instance.

    It keeps the token of the claim. The instance's own ``lease_token`` is loaded again after a commit, and would then
    be the token of the worker that has taken the job over.
    """

    key: Key
    token: UUID | str | None
    attempt: int
    """The number of the attempt, from 1; always 1 if the model does not count attempts."""
    max_attempts: int
    transaction: SessionTransaction | CopiedTransaction | None = None
    """The transaction that holds the job, under strategies that hold one."""
    by_consumer: bool = False
    """Whether a Consumer executes the job and will settle the run."""
    savepoint: SessionTransaction | None = None
    """The innermost savepoint at the time of the claim. Rolling it back undoes the claim."""
    isolated: bool = False
    """Whether the job was claimed alone, because it may have crashed a worker or a connection."""
    claimed_at: float = field(default_factory=time.monotonic)
    """The time of the claim, by the monotonic clock of this process."""
    handler_started_at: float | None = None
    """The time at which the handler was called, by the same clock; None before."""
    calls: int = 0
    """How often the handler was called: again for a job of a batch that has failed as a whole."""
    duration: float | None = None
    """The seconds that the handler took; None before it returned."""
    due_at: float | None = None
    """When the job was due, by the same clock; None if that is not known, and in a queue without statistics."""
    part: tuple[Any, ...] | None = None
    """The key of the job, see :mod:`sqlaqueue.flow_control.freed`, until its end is known there."""
    traceparent: str | None = None
    """The trace of the transaction that enqueued the job, see :mod:`sqlaqueue.queue.roles`."""
    worker: str | None = None
    """The worker that ran the job, if another one settles the run; None for the one that settles it."""
    notes: dict[str, Any] | None = None
    """What middleware has noted for event listeners; None for nothing."""

    def copied(self, *, held: bool) -> Run:
        """Return the run for a copy of the instance.

        :param held: whether a transaction, rather than a lease, holds the job.
        """
        return Run(self.key, self.token, self.attempt, self.max_attempts, CopiedTransaction() if held else None)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without times of this process's clock."""
        return Run, (self.key, self.token, self.attempt, self.max_attempts, self.transaction)
