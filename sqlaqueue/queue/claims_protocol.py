"""What the library needs from the database for claims, a part of :mod:`sqlaqueue.queue.backend`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import sqlalchemy as sa
from sqlalchemy.sql.selectable import NamedFromClause

from sqlaqueue._typing import AnySelect
from sqlaqueue.queue.strategy_protocol import ClaimRequest, ScanRange, Spec


class Claims(Protocol):
    """Scans of the claim order, and the plans that the server makes for them."""

    FEW: int
    """The server may keep the plan of a claim of up to this many jobs."""

    def by_priority(self, order: Sequence[sa.ColumnElement[Any]], /) -> sa.ColumnElement[bool]:
        """The scan range of a claim that scans one priority after another."""
        ...

    def from_cursor(self, spec: Spec) -> ScanRange:
        """Return the scan range of due jobs from a cursor on."""
        ...

    def cursor_at(self, spec: Spec, job: Any) -> Mapping[str, Any] | None:
        """Return the parameters of a claim that begins at a claimed instance; None when no claim can."""
        ...

    def take(
        self,
        request: ClaimRequest,
        waiting: AnySelect,
        scanned: sa.FromClause,
        *others: sa.FromClause,
        lock_rows: Any,
        first_due: Any,
    ) -> sa.CTE:
        """Return the first due rows of ``waiting`` in claim order, locked together with those of ``others``."""
        ...

    def upcoming_times(
        self, spec: Spec, scanned: sa.FromClause, conditions: Sequence[sa.ColumnElement[bool]], limit: int
    ) -> AnySelect:
        """Return when the next rows of ``scanned`` will be due, in seconds since 1970."""
        ...

    def due_since(self, spec: Spec, pending: sa.FromClause, limit: int) -> sa.CompoundSelect[Any]:
        """Return since when due jobs of ``pending`` have been due, up to ``limit`` of each priority, in ``since``."""
        ...

    def due_keys(
        self,
        spec: Spec,
        scanned: sa.FromClause,
        keys: Sequence[sa.ColumnElement[Any]],
        conditions: Sequence[sa.ColumnElement[bool]],
        *,
        at: sa.ColumnElement[Any],
        limit: int,
    ) -> tuple[AnySelect, AnySelect]:
        """Return the keys of due rows, up to ``limit``, and whether there are priorities that were not read."""
        ...

    def planned_anew(self) -> sa.ColumnElement[bool]:
        """Return a condition that is always true, and makes the server plan each execution."""
        ...

    def planned_anew_for_many(self, limit: sa.ColumnElement[Any]) -> sa.ColumnElement[bool]:
        """Return the same for a claim of more than :attr:`FEW` jobs."""
        ...

    def was_contended(self) -> sa.ColumnElement[bool]:
        """Return the condition that an earlier claim of this transaction has passed over a locked key."""
        ...

    def reservation(self, spec: Spec, chosen: sa.ColumnElement[bool]) -> tuple[AnySelect, Sequence[sa.Insert]]:
        """Return the statements that reserve beginnings of jobs for a held strategy.

        The first locks the keys of the chosen jobs in all rates, and selects for each job its primary key, and for each
        rate its hash and how many jobs of that may begin. The others, one for each rate, record as many beginnings of a
        key as the bound array ``sqlaqueue_begun`` has its hash.
        """
        ...

    def transaction_id(self) -> sa.ColumnElement[str]:
        """Return the identity of the current transaction."""
        ...

    def was_committed(self, transaction: Any) -> sa.ColumnElement[bool]:
        """Return the condition that the transaction of this identity was committed."""
        ...

    def row_version(self, rows: NamedFromClause) -> sa.ColumnElement[str]:
        """Return a text that changes whenever a row of a table, or of an alias of it, is written."""
        ...

    def written_here(self, rows: NamedFromClause) -> sa.ColumnElement[bool]:
        """Return the condition that the current transaction has written a row of an aliased table."""
        ...
