"""Reads one queue in the transaction of a page, by indexes only unless a table is small."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeAlias, TypeVar

import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue.admin.jobs import bind_arguments
from sqlaqueue.postgresql.plans import explain
from sqlaqueue.postgresql.server import table_statistics
from sqlaqueue.queue.spec import QueueSpec, clock
from sqlaqueue.web.data.parts import Part, attempt_part

T = TypeVar("T")

_LOCK_TIMEOUT = "500ms"
"""For how long a statement waits for a lock: a table is locked for a moment, or for long."""

GIVE_UP_AFTER = 0.4
"""The seconds after which a part that fails is the last one: the others would most likely wait as long, for the same
lock or the same server."""

SMALL_TABLE = 8 * 1024**2
"""The size in bytes up to which a table is read whole; that takes a few milliseconds."""

_PLANS = {"enable_bitmapscan": "off", "enable_seqscan": "off", "enable_sort": "off", "jit": "off"}
"""With them the first entries of an index are read in its order wherever there is such an index, whatever the planner's
statistics say. Where there is none, the cost of the plan would make the server compile it, which takes long."""

_INDEX_SCANS = {"Index Scan", "Index Only Scan"}
_SORTS = {"Sort", "Incremental Sort"}


REMEMBERED = 60.0
"""For how many seconds it is remembered which indexes there are, and whether a table is small."""

Memory: TypeAlias = dict[tuple[str, str], tuple[float, bool]]
"""What is remembered of the queues of one dashboard: until when, and the answer, by queue and question."""


@dataclass
class QueueReader:
    """One queue, in a read-only transaction with a statement timeout."""

    session: Session
    spec: QueueSpec
    now: datetime
    """The server's clock when the reader was made."""
    memory: Memory
    has_given_up: bool = False

    @classmethod
    def begin(cls, session: Session, spec: QueueSpec, memory: Memory | None = None) -> QueueReader:
        """Return the reader of a queue, and set what it needs until the end of the transaction.

        :param memory: what is remembered from one page to the next.
        """
        settings = {**_PLANS, "lock_timeout": _LOCK_TIMEOUT}
        calls = [sa.func.set_config(name, value, sa.true()) for name, value in settings.items()]
        row: Any = session.execute(sa.select(clock(), *calls), bind_arguments=bind_arguments(spec.model)).one()
        return cls(session, spec, row[0].astimezone(UTC), {} if memory is None else memory)

    def part(self, read: Callable[[], T]) -> Part[T]:
        """Return what ``read`` returns, or its problem."""
        if self.has_given_up:
            return Part(problem="This was not read, since what came before took too long.")
        began = time.monotonic()
        part = attempt_part(self.session, lambda _: read())
        self.has_given_up = bool(part.problem) and time.monotonic() > began + GIVE_UP_AFTER
        return part

    @property
    def connection(self) -> sa.Connection:
        """The connection to the queue's database."""
        return self.session.connection(bind_arguments=bind_arguments(self.spec.model))

    def execute(self, statement: Any) -> Any:
        """Execute a statement in the queue's database."""
        return self.session.execute(statement, bind_arguments=bind_arguments(self.spec.model))

    @property
    def is_small(self) -> bool:
        """Whether the table of jobs is so small that it may be read whole."""
        return self._remembered("small", self._is_small)

    def is_bounded(self, question: str, statement: Any) -> bool:
        """Return whether a SELECT with a LIMIT reads no more rows than it returns, by its plan.

        Every table is read by an index, in its order; no row is read that is left out afterwards, and none is sorted.

        :param question: a name of the statement, by which the answer is remembered.
        """
        return self._remembered(question, lambda: self._is_bounded(statement))

    def _remembered(self, question: str, ask: Callable[[], bool]) -> bool:
        key, now = (self.spec.name, question), time.monotonic()
        until, answer = self.memory.get(key, (0.0, False))
        if until < now:
            answer = ask()
            self.memory[key] = now + REMEMBERED, answer
        return answer

    def _is_small(self) -> bool:
        sizes = table_statistics(self.connection, self.spec.table)
        return sum(each.size for each in sizes) <= SMALL_TABLE

    def _is_bounded(self, statement: Any) -> bool:
        plan = explain(self.connection, statement)
        for node in plan.root.nodes():
            if node.relation is not None and (node.kind not in _INDEX_SCANS or node.filtered):
                return False
            if node.kind in _SORTS:
                return False
        return True
