"""Everything about one queue: its depth, what has finished, how long it took, who works on it, and its schedules."""

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
class QueueDetails:
    """The result of :func:`read_queue`."""

    state: QueueState
    throughput: Part[Throughput | Unavailable]
    durations: Part[Durations]
    failures: Part[FailureKinds | Unavailable]
    schedules: Part[list[ScheduleInfo]]


def read_queue(
    session: Session, spec: QueueSpec, span: Span, memory: Memory, *, shows_errors: bool = True
) -> QueueDetails:
    """Return everything about one queue; each part that cannot be read has its problem instead.

    :param shows_errors: whether the texts of errors may be read.
    """
    reader = QueueReader.begin(session, spec, memory)
    state = read_state(reader)
    found = reader.part(lambda: find_finished_jobs(reader))
    source = found.value
    failures: Part[FailureKinds | Unavailable]
    if source is None:
        throughput: Part[Throughput | Unavailable] = Part(problem=found.problem)
        durations: Part[Durations] = Part(problem=found.problem)
        failures = Part(problem=found.problem)
    else:
        throughput = reader.part(lambda: read_throughput(reader, span, source=source))
        durations = reader.part(lambda: read_durations(reader, source))
        hidden = Unavailable(reason="The texts of errors are redacted.")
        failures = reader.part(lambda: read_failure_kinds(reader, source) if shows_errors else hidden)
    schedules = reader.part(lambda: read_schedules(session, spec, [spec.name]))
    return QueueDetails(state=state, throughput=throughput, durations=durations, failures=failures, schedules=schedules)
