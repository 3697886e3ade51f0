"""All queues at a glance: what waits, runs and fails, and who works on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy.orm import Session

from sqlaqueue.admin.changes import consumers, paused
from sqlaqueue.admin.state import Depth, KeyAtLimit, depth, keys_at_limit
from sqlaqueue.queue.names import CONSUMERS, CONTROL
from sqlaqueue.queue.run import key_text
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.web.data.failed_jobs import CappedCount, count_failed
from sqlaqueue.web.data.parts import Part
from sqlaqueue.web.data.queue_reader import Memory, QueueReader
from sqlaqueue.web.data.throughput import MINUTES, Throughput, read_throughput
from sqlaqueue.web.data.unavailable import Unavailable

COUNT_LIMIT = 10_000
"""The number up to which pending, due and running jobs are counted."""

RECENT = 5_000
"""The number of finished jobs that are read at most for the throughput of the last minutes."""


@dataclass(frozen=True, kw_only=True)
class LiveConsumer:
    """A Consumer whose heartbeat has not expired."""

    name: str | None
    host: str
    pid: int
    version: str
    started_at: datetime
    heartbeat_at: datetime
    is_listening: bool
    """Whether notifications wake it; otherwise it only polls."""
    running: Sequence[str]
    """The keys of the jobs that it ran at its last heartbeat, as texts."""
    claimed: int
    """The number of its other claimed jobs."""


@dataclass(frozen=True, kw_only=True)
class QueueState:
    """What a queue holds now, and who works on it."""

    depth: Part[Depth]
    failed: Part[CappedCount | Unavailable]
    paused: Part[bool]
    consumers: Part[Sequence[LiveConsumer]]
    at_limit: Part[Sequence[KeyAtLimit]]


@dataclass(frozen=True, kw_only=True)
class QueueOverview:
    """One queue in the list of all."""

    queue: str
    strategy: str
    state: QueueState
    throughput: Part[Throughput | Unavailable]


def read_overview(session: Session, spec: QueueSpec, memory: Memory | None = None) -> QueueOverview:
    """Return one queue for the list of all; each part that cannot be read has its problem instead."""
    reader = QueueReader.begin(session, spec, memory)
    return QueueOverview(
        queue=spec.name,
        strategy=spec.strategy.name,
        state=read_state(reader),
        throughput=reader.part(lambda: read_throughput(reader, MINUTES, limit=RECENT)),
    )


def read_state(reader: QueueReader) -> QueueState:
    """Return what a queue holds now."""
    session, spec = reader.session, reader.spec
    return QueueState(
        depth=reader.part(lambda: depth(session, spec.model, limit=COUNT_LIMIT)),
        failed=reader.part(lambda: count_failed(reader)),
        paused=reader.part(lambda: CONTROL in spec.side_tables and paused(session, spec.model)),
        consumers=reader.part(lambda: read_consumers(reader)),
        at_limit=reader.part(lambda: [*keys_at_limit(session, spec)]),
    )


def read_consumers(reader: QueueReader) -> list[LiveConsumer]:
    """Return the live Consumers of a queue, the oldest first."""
    if CONSUMERS not in reader.spec.side_tables:
        return []
    return [_consumer(row) for row in consumers(reader.session, reader.spec.model)]


def _consumer(row: Any) -> LiveConsumer:
    return LiveConsumer(
        name=row.name,
        host=row.host,
        pid=row.pid,
        version=row.version,
        started_at=row.created_at,
        heartbeat_at=row.heartbeat_at,
        is_listening=row.listening,
        running=[key_text(key) for key in row.running],
        claimed=row.claimed,
    )
