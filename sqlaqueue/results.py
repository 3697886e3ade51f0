"""The result of waiting for a job: :class:`JobResult`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class JobResult(Generic[T]):
    """The state of a job, as returned by ``wait()``."""

    state: Literal["pending", "processing", "completed", "failed", "cancelled", "gone"]
    """``gone``: the row does not exist, or its status is not a value of the queue's states. If the queue deletes
    completed jobs, a job without a row counts as completed. ``wait()`` returns no job that is pending or processing."""
    job: T | None
    """The job, loaded again and detached; None if its row does not exist."""
    error: str | None = None
    """The last error. A completed job has one if an earlier attempt failed."""
