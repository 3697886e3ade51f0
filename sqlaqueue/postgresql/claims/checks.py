"""What may hold a job back: one check for each limit, rate and order of a queue, in the terms of a claim's columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from sqlaqueue.flow_control.controls import FlowControl, JobKey, KeyLimit, KeyOrder, KeyRate
from sqlaqueue.postgresql.claims.claim_record import order_name
from sqlaqueue.postgresql.flow_functions import RATE_FUNCTION, capacity_function, head_function
from sqlaqueue.postgresql.function_calls import call
from sqlaqueue.queue.backend import RATE, backend
from sqlaqueue.queue.spec import QueueSpec

_INTEGER = sa.Integer()
_ONE, _ZERO = (sa.literal_column(text, _INTEGER) for text in "10")


@dataclass(frozen=True, eq=False)
class Check:
    """One of them. Its columns in a claim end in its number.

    ``sqlaqueue_key_0`` is the hash of a job's key, NULL if the job is not concerned; ``sqlaqueue_most_0``, how many
    jobs of the key may run, NULL for any number; ``sqlaqueue_free_0``, how many
    more now; ``sqlaqueue_room_0``, the same before the key is locked.
    """

    number: int
    job_key: JobKey

    def name(self, what: str) -> str:
        """Return the name of one of its columns."""
        return f"sqlaqueue_{what}_{self.number}"

    @property
    def spec(self) -> QueueSpec:
        """The queue."""
        return self.job_key.spec

    @property
    def most(self) -> sa.ColumnElement[int]:
        """How many jobs of the key may run, from the columns of the table."""
        raise NotImplementedError

    @property
    def _number(self) -> sa.ColumnElement[int]:
        return sa.literal_column(str(self.number), _INTEGER)

    @property
    def columns(self) -> list[sa.ColumnElement[Any]]:
        """What a candidate has for it."""
        key, most = self.job_key.of(self.spec.table), self.most
        return [key.label(self.name("key")), most.label(self.name("most"))]

    def capacity(
        self, rows: sa.FromClause, claim: sa.ColumnElement[str], lock: sa.ColumnElement[bool]
    ) -> sa.ColumnElement[int]:
        """Return how many jobs of a candidate's key may be admitted now."""
        raise NotImplementedError

    def free(self, rows: sa.FromClause, claim: sa.ColumnElement[str], *, lock: bool) -> sa.ColumnElement[int]:
        """Return the same, or NULL for any number.

        :param lock: whether to lock the key; otherwise the number is uncertain.
        """
        concerned = sa.and_(rows.c[self.name("key")].is_not(None), rows.c[self.name("most")].is_not(None))
        free = self.capacity(rows, claim, sa.true() if lock else sa.false())
        return sa.case((concerned, free)).label(self.name("free" if lock else "room"))

    def allows(self, rows: sa.FromClause, *, lock: bool) -> sa.ColumnElement[bool]:
        """Return the condition that a candidate may be admitted."""
        free = rows.c[self.name("free" if lock else "room")]
        return sa.or_(free.is_(None), free > _ZERO)


class LimitCheck(Check):
    """No more jobs of a key run at once than its limit is."""

    job_key: KeyLimit

    @property
    def most(self) -> sa.ColumnElement[int]:
        """The limit."""
        return self.job_key.most

    def capacity(
        self, rows: sa.FromClause, claim: sa.ColumnElement[str], lock: sa.ColumnElement[bool]
    ) -> sa.ColumnElement[int]:
        """Return how many more may run."""
        arguments = claim, self._number, rows.c[self.name("key")], rows.c[self.name("most")], lock
        return call(capacity_function(self.job_key), self.spec.table, *arguments, type_=_INTEGER)


class OrderCheck(Check):
    """Only the head of a key runs."""

    job_key: KeyOrder

    @property
    def most(self) -> sa.ColumnElement[int]:
        """One."""
        return _ONE

    def capacity(
        self, rows: sa.FromClause, claim: sa.ColumnElement[str], lock: sa.ColumnElement[bool]
    ) -> sa.ColumnElement[int]:
        """Return one for the head."""
        mine = backend().side_tables.key_text(rows.c[order_name(key)] for key in self.spec.keys)
        arguments = claim, self._number, rows.c[self.name("key")], mine, lock
        head = call(head_function(self.job_key), self.spec.table, *arguments, type_=sa.Text())
        return sa.case((head.is_not(None), _ONE), else_=_ZERO)


class RateCheck(Check):
    """No more jobs of a key begin than its rate allows."""

    job_key: KeyRate

    @property
    def most(self) -> sa.ColumnElement[int]:
        """The burst."""
        return sa.literal_column(str(self.job_key.config.burst), _INTEGER)

    def capacity(
        self, rows: sa.FromClause, claim: sa.ColumnElement[str], lock: sa.ColumnElement[bool]
    ) -> sa.ColumnElement[int]:
        """Return how many may begin."""
        rate, key = self.job_key, rows.c[self.name("key")]
        named = [sa.literal(text, sa.Text()) for text in (self.spec.name, rate.name)]
        numbers: Any = sa.literal(rate.interval, sa.Double()), sa.literal(rate.config.burst, _INTEGER)
        return call(
            RATE_FUNCTION, self.spec.side_tables[RATE], claim, self._number, *named, key, *numbers, lock, type_=_INTEGER
        )


def checks_of(flow: FlowControl) -> list[Check]:
    """Return the checks of a queue: those without a lock of long duration first."""
    return list(_checks_of(flow))


def _checks_of(flow: FlowControl) -> Iterator[Check]:
    kinds: list[tuple[type[Check], Sequence[JobKey]]] = [
        (OrderCheck, [] if flow.order is None else [flow.order]),
        (LimitCheck, flow.limits),
        (RateCheck, flow.rates),
    ]
    all_keys = [(kind, key) for kind, keys in kinds for key in keys]
    for number, (kind, key) in enumerate(all_keys):
        yield kind(number, key)
