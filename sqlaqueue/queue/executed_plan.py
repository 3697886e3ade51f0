"""The plan of a statement as the server reports it, in words of this library: :class:`StatementPlan`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Buffers:
    """How many pages of 8 kB a statement, or a part of its plan, has used."""

    hit: int = 0
    """Found in the server's memory."""
    read: int = 0
    """Read from the operating system or the disk."""
    dirtied: int = 0
    """Changed for the first time since they were written."""
    written: int = 0
    """Written, since memory was needed for other pages."""

    @property
    def used(self) -> int:
        """The number of pages that were looked at."""
        return self.hit + self.read


@dataclass(frozen=True, kw_only=True)
class PlanNode:
    """A step of a plan, with the steps from which it receives rows."""

    kind: str
    """Such as ``Index Scan``."""
    relation: str | None
    """The table that it reads or changes, without its schema."""
    index: str | None
    name: str
    """The name of the subplan or CTE that it belongs to; empty for none."""
    condition: str
    """By which entries of an index are found, or rows are joined; empty for none."""
    filtered: str
    """By which rows are left out after they were read; empty for none."""
    planned_rows: float
    """How many rows the planner expects, for each loop."""
    rows: float | None
    """How many rows it has returned, for each loop; None if the plan was not executed."""
    loops: float | None
    """How often it was executed; None as above."""
    removed: float
    """How many rows the filter has left out, for each loop."""
    milliseconds: float | None
    """For how long it ran, with the steps below, in all loops; None as above."""
    buffers: Buffers
    """With those of the steps below."""
    parts: Sequence[PlanNode]

    def nodes(self) -> Iterator[PlanNode]:
        """Yield this step and all below it."""
        yield self
        for part in self.parts:
            yield from part.nodes()


@dataclass(frozen=True, kw_only=True)
class StatementPlan:
    """The plan of a statement, executed or not."""

    sql: str
    """The statement, with its values."""
    root: PlanNode
    planning_milliseconds: float | None
    """None if the plan was not executed."""
    execution_milliseconds: float | None
    """The same."""
