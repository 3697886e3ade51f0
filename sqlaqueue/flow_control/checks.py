"""What may hold a job back: one check for each limit, rate and order of a queue, in the terms of a claim's columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import sqlalchemy as sa

from sqlaqueue.flow_control.functions import RATE_FUNCTION, RECORD, RECORD_PARTS, capacity_function, head_function
from sqlaqueue.flow_control.keys import FlowControl, JobKey, KeyLimit, KeyOrder, KeyRate
from sqlaqueue.postgresql.ddl import call
from sqlaqueue.postgresql.side_tables import key_text
from sqlaqueue.queue.names import RATE
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.sql.types import key_hash

# -- claim record ------------------------------------------------------------------------------------------------------
# The record of a claim: the jobs that it has admitted so far, in settings of the transaction.
#
# One statement admits several jobs of a key, and its snapshots do not show what it has admitted itself. Each setting
# begins with the token of the claim, so that the next claim of a transaction finds no record of its own. Behind it
# are numbers, each between two commas, which the functions of :mod:`sqlaqueue.flow_control.functions` count: the hash
# of each job, and of each of its keys with the number of the check. A key behind an exclamation mark is full.
#
# A setting is searched from its beginning, so a number is in one of many settings, by its remainder. In a single one
# the time of a claim would grow with the square of its size.


_TEXT = sa.Text()


class _NumberedKey(Protocol):
    @property
    def number(self) -> int: ...
    def name(self, what: str) -> str: ...


def order_name(column: sa.Column[Any]) -> str:
    """Return the name under which a claim has a column of the claim order, or of the order within a key."""
    return f"sqlaqueue_by_{column.key}"


class ClaimRecord:
    """The record of one claim; its ``token`` differs for each execution."""

    def __init__(self, spec: QueueSpec, token: Any) -> None:
        self.spec, self.token = spec, token

    @property
    def claim(self) -> sa.ColumnElement[str]:
        """The text with which the record begins."""
        return sa.cast(self.token, _TEXT)

    def _job(self, rows: sa.FromClause) -> sa.ColumnElement[int]:
        return key_hash([rows.c[order_name(key)] for key in self.spec.keys])

    def has(self, rows: sa.FromClause) -> sa.ColumnElement[bool]:
        """Return the condition that the job of a row is in the record."""
        job = self._job(rows)
        setting = _setting(job)
        mine = sa.func.starts_with(setting, self.claim, type_=sa.Boolean())
        return sa.func.coalesce(sa.and_(mine, sa.func.strpos(setting, _between_commas(job)) > 0), sa.false())

    def with_job(
        self, rows: sa.FromClause, keys: Sequence[_NumberedKey], *, itself: bool, unlimited: bool
    ) -> sa.ColumnElement[int]:
        """Return the expression that adds the keys of a job to the record.

        :param itself: whether the job is added as well.
        :param unlimited: whether a key is added for a job that its limit does not concern.
        """
        added: list[tuple[sa.ColumnElement[int], sa.ColumnElement[int]]] = []
        if itself:
            added.append((self._job(rows), self._job(rows)))
        for key in keys:
            hashed: sa.ColumnElement[int] = rows.c[key.name("key")]
            if not unlimited:
                hashed = sa.case((rows.c[key.name("most")].is_not(None), hashed))
            added.append((hashed, sa.func.hashint8extended(hashed, key.number, type_=sa.BigInteger())))
        if not added:
            return sa.literal_column("0", sa.Integer())
        return sa.func.num_nonnulls(*(self._with(*each) for each in added), type_=sa.Integer())

    def _with(self, hashed: sa.ColumnElement[int], number: sa.ColumnElement[int]) -> sa.ColumnElement[str]:
        setting = _setting(hashed)
        mine = sa.func.starts_with(setting, self.claim, type_=sa.Boolean())
        text = sa.case((mine, setting), else_=self.claim).concat(_between_commas(number))
        return sa.case((hashed.is_not(None), sa.func.set_config(_name(hashed), text, sa.true(), type_=_TEXT)))


def _name(hashed: sa.ColumnElement[int]) -> sa.ColumnElement[str]:
    part = hashed.op("&")(sa.literal_column(str(RECORD_PARTS - 1), sa.BigInteger()))
    return sa.literal_column(f"'{RECORD}'", _TEXT).concat(sa.cast(part, _TEXT))


def _setting(hashed: sa.ColumnElement[int]) -> sa.ColumnElement[str]:
    return sa.func.current_setting(_name(hashed), sa.true(), type_=_TEXT)


def _between_commas(number: sa.ColumnElement[int]) -> sa.ColumnElement[str]:
    """Return a number as the record has it; NULL for NULL."""
    text = sa.cast(number, _TEXT)
    return sa.literal_column("','", _TEXT).concat(text).concat(sa.literal_column("','", _TEXT))


_INTEGER = sa.Integer()
_ONE, _ZERO = (sa.literal_column(text, _INTEGER) for text in "10")


class Check:
    """A limit, a rate or an order, as a claim checks it. Its columns in a claim end in its number.

    ``sqlaqueue_key_0`` is the hash of a job's key, NULL if the job is not concerned; ``sqlaqueue_most_0``, how many
    jobs of the key may run, NULL for any number; ``sqlaqueue_free_0``, how many more now; ``sqlaqueue_room_0``, how
    many more before the key is locked.
    """

    job_key: Any

    def __init__(self, number: int, job_key: JobKey) -> None:
        self.number, self.job_key = number, job_key

    def name(self, what: str) -> str:
        """Return the name of one of its columns."""
        return f"sqlaqueue_{what}_{self.number}"

    @property
    def spec(self) -> QueueSpec:
        spec: QueueSpec = self.job_key.spec
        return spec

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
        """Return how many jobs of a candidate's key may be admitted now; NULL for any number.

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
        return self.job_key.most

    def capacity(
        self, rows: sa.FromClause, claim: sa.ColumnElement[str], lock: sa.ColumnElement[bool]
    ) -> sa.ColumnElement[int]:
        arguments = claim, self._number, rows.c[self.name("key")], rows.c[self.name("most")], lock
        return call(capacity_function(self.job_key), self.spec.table, *arguments, type_=_INTEGER)


class OrderCheck(Check):
    """Only the head of a key runs."""

    job_key: KeyOrder

    @property
    def most(self) -> sa.ColumnElement[int]:
        return _ONE

    def capacity(
        self, rows: sa.FromClause, claim: sa.ColumnElement[str], lock: sa.ColumnElement[bool]
    ) -> sa.ColumnElement[int]:
        mine = key_text(rows.c[order_name(key)] for key in self.spec.keys)
        arguments = claim, self._number, rows.c[self.name("key")], mine, lock
        head = call(head_function(self.job_key), self.spec.table, *arguments, type_=sa.Text())
        return sa.case((head.is_not(None), _ONE), else_=_ZERO)


class RateCheck(Check):
    """No more jobs of a key begin than its rate allows."""

    job_key: KeyRate

    @property
    def most(self) -> sa.ColumnElement[int]:
        return sa.literal_column(str(self.job_key.config.burst), _INTEGER)

    def capacity(
        self, rows: sa.FromClause, claim: sa.ColumnElement[str], lock: sa.ColumnElement[bool]
    ) -> sa.ColumnElement[int]:
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
