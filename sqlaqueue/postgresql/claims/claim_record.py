"""The record of a claim: the jobs that it has admitted so far, in a setting of the transaction.

One statement admits several jobs of a key, and its snapshots do not show what it has admitted itself. The setting
begins with the token of the claim, so that the next claim of a transaction finds no record of its own. Behind it are
numbers, each between two commas, which the functions of :mod:`sqlaqueue.postgresql.ddl.admission` count: the hash of
each job, and of each of its keys with the number of the check. A key behind an exclamation mark is full.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import sqlalchemy as sa

from sqlaqueue.postgresql.flow_functions import RECORD
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

    @property
    def _setting(self) -> sa.ColumnElement[str]:
        return sa.func.current_setting(RECORD, sa.true(), type_=_TEXT)

    def _job(self, rows: sa.FromClause) -> sa.ColumnElement[int]:
        return key_hash([rows.c[order_name(key)] for key in self.spec.keys])

    def has(self, rows: sa.FromClause) -> sa.ColumnElement[bool]:
        """Return the condition that the job of a row is in the record."""
        number = _between_commas(self._job(rows))
        mine = sa.func.starts_with(self._setting, self.claim, type_=sa.Boolean())
        return sa.func.coalesce(sa.and_(mine, sa.func.strpos(self._setting, number) > 0), sa.false())

    def with_job(self, rows: sa.FromClause, keys: Sequence[_NumberedKey], *, itself: bool) -> sa.ColumnElement[str]:
        """Return the call that adds the keys of a job to the record, and returns the record.

        :param itself: whether the job is added as well.
        """
        numbers = [sa.func.hashint8extended(rows.c[key.name("key")], key.number) for key in keys]
        added = [_between_commas(number) for number in [*([self._job(rows)] if itself else []), *numbers]]
        mine = sa.func.starts_with(self._setting, self.claim, type_=sa.Boolean())
        before = sa.case((mine, self._setting), else_=self.claim)
        return sa.func.set_config(RECORD, sa.func.concat(before, *added), sa.true(), type_=_TEXT)


def _between_commas(number: sa.ColumnElement[int]) -> sa.ColumnElement[str]:
    """Return a number as the record has it; NULL for NULL."""
    text = sa.cast(number, _TEXT)
    return sa.literal_column("','", _TEXT).concat(text).concat(sa.literal_column("','", _TEXT))
