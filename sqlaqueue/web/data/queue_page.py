"""Everything about one queue: its depth, who works on it and its schedules; what has finished, and how long it took."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy.orm import Session

from sqlaqueue.admin.schedules import ScheduleInfo
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.web.data.durations import Durations, read_durations
from sqlaqueue.web.data.failed_jobs import FailureKinds, read_failure_kinds
from sqlaqueue.web.data.finished_jobs import find_finished_jobs
from sqlaqueue.web.data.overview import QueueState, read_state
from sqlaqueue.web.data.parts import Part
from sqlaqueue.web.data.queue_reader import Memory, QueueReader
from sqlaqueue.web.data.schedules import read_schedules
from sqlaqueue.web.data.throughput import Span, Throughput, read_throughput
from sqlaqueue.web.data.unavailable import Unavailable


@dataclass(frozen=True, kw_only=True)
class QueuePresent:
    """The result of :func:`read_present`."""

    state: QueueState
    schedules: Part[list[ScheduleInfo]]


@dataclass(frozen=True, kw_only=True)
class QueuePast:
    """The result of :func:`read_past`."""

    throughput: Part[Throughput | Unavailable]
    durations: Part[Durations]
    failures: Part[FailureKinds | Unavailable]


def read_present(session: Session, spec: QueueSpec, memory: Memory) -> QueuePresent:
    """Return the present state of a queue; each part that cannot be read has its problem instead."""
    reader = QueueReader.begin(session, spec, memory)
    state = read_state(reader)
    return QueuePresent(state=state, schedules=reader.part(lambda: read_schedules(session, spec, [spec.name])))


def read_past(session: Session, spec: QueueSpec, span: Span, memory: Memory, *, shows_errors: bool = True) -> QueuePast:
    """Return what is known about the finished jobs of a queue; each part that cannot be read has its problem instead.

    :param shows_errors: whether the texts of errors may be read.
    """
    reader = QueueReader.begin(session, spec, memory)
    found = reader.part(lambda: find_finished_jobs(reader))
    source = found.value
    if source is None:
        problem = found.problem
        return QueuePast(
            throughput=Part(problem=problem), durations=Part(problem=problem), failures=Part(problem=problem)
        )
    hidden = Unavailable(reason="The texts of errors are redacted.")
    failures: Part[FailureKinds | Unavailable]
    throughput = reader.part(lambda: read_throughput(reader, span, source=source))
    durations = reader.part(lambda: read_durations(reader, source))
    failures = reader.part(lambda: read_failure_kinds(reader, source) if shows_errors else hidden)
    return QueuePast(throughput=throughput, durations=durations, failures=failures)
