"""The record of a claim: the jobs that it has admitted so far, in settings of the transaction.

One statement admits several jobs of a key, and its snapshots do not show what it has admitted itself. Each setting
begins with the token of the claim, so that the next claim of a transaction finds no record of its own. Behind it are
numbers, each between two commas, which the functions of :mod:`sqlaqueue.postgresql.ddl.admission` count: the hash of
each job, and of each of its keys with the number of the check. A key behind an exclamation mark is full.

A setting is searched from its beginning, so a number is in one of many settings, by its remainder. In a single one the
time of a claim would grow with the square of its size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import sqlalchemy as sa

from sqlaqueue.postgresql.flow_functions import RECORD, RECORD_PARTS
from sqlaqueue.postgresql.key_hash import key_hash
from sqlaqueue.queue.spec import QueueSpec

_TEXT = sa.Text()


class _NumberedKey(Protocol):
    @property
    def number(self) -> int: ...
    def name(self, what: str) -> str: ...


def order_name(column: sa.Column[Any]) -> str:
    """Return the name under which a claim has a column of the claim order, or of the order within a key."""
    return f"sqlaqueue_by_{column.key}"


@dataclass(frozen=True, eq=False)
class ClaimRecord:
    """The record of one claim.

    :param token: identifies the claim; it differs for each execution.
    """

    spec: QueueSpec
    token: Any

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
