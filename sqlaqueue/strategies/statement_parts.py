"""The parts of which claim strategies make their statements: to pick, lock, compare and order rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import InstrumentedAttribute

from sqlaqueue._typing import AnySelect
from sqlaqueue.queue.names import TURN
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.queue.strategy_protocol import ScanRange
from sqlaqueue.strategies.parts.columns import column_of, named, named_in


class StatementParts:
    """The methods that a :class:`~sqlaqueue.strategies.base.ClaimStrategy` inherits to make its statements."""

    @staticmethod
    def pick(spec: QueueSpec, candidates: AnySelect, *columns: sa.Column[Any]) -> AnySelect:
        """Return ``candidates`` reduced to ``columns`` of the model's table.

        Keys are selected as attributes of the entity, for which the ORM adds the discriminator of a single-table
        subclass.
        """
        entity = candidates.column_descriptions[0]["entity"]
        mapper = sa.inspect(entity)
        attributes: list[InstrumentedAttribute[Any] | sa.Column[Any]] = [
            getattr(entity, mapper.get_property_by_column(column).key) if column in spec.keys else column
            for column in columns
        ]
        return candidates.with_only_columns(*attributes, maintain_column_froms=True)

    @staticmethod
    def first_due(
        spec: QueueSpec, waiting: AnySelect, scanned: sa.FromClause, limit: Any, scan_range: ScanRange | None
    ) -> AnySelect:
        """Return the first due rows of ``waiting`` in claim order, by the columns of ``scanned``."""
        run_at = spec.columns.get("run_at")
        order = [scanned.c[column.key] for column in spec.claim_order]
        due = spec.due(None if run_at is None else scanned.c[run_at.key])
        part = () if scan_range is None else (scan_range(order),)
        return waiting.where(*due, *part).order_by(*order).limit(limit)

    @staticmethod
    def lock(spec: QueueSpec, rows: AnySelect, *others: sa.FromClause, skip_locked: bool = True) -> AnySelect:
        """Return ``rows`` with the model's table locked, then ``others``, and no other table.

        ``FOR NO KEY UPDATE``: a plain ``FOR UPDATE`` conflicts with the key share lock that the foreign key of a child
        row takes, and SKIP LOCKED would silently pass over such a job.
        """
        return rows.with_for_update(of=[spec.table, *others], skip_locked=skip_locked, key_share=True)

    @classmethod
    def among(
        cls, spec: QueueSpec, columns: Sequence[sa.ColumnElement[Any]], picked: AnySelect | sa.CTE
    ) -> sa.ColumnElement[bool]:
        """Return the condition that the key in ``columns`` is among ``picked``, which is executed exactly once.

        A nested loop can execute a locking subquery under IN several times, and each time it locks other rows. An
        uncorrelated ``ARRAY(SELECT ..)`` is executed once and uses the primary key's index even under a generic plan,
        and from PostgreSQL 17 on reads each page of it once for all keys. A comparison of composite keys with an array
        would scan the table, so these join a CTE; its locking clause keeps it from being inlined.
        """
        if len(spec.keys) == 1:
            keys = sa.select(column_of(picked, spec.keys[0])) if isinstance(picked, sa.CTE) else picked
            # Without correlate(None) a filter on a second table would be correlated with the UPDATE's own.
            return columns[0] == sa.any_(sa.func.array(keys.correlate(None).scalar_subquery()))
        return cls.same_key(spec, columns, picked if isinstance(picked, sa.CTE) else picked.cte("sqlaqueue_picked"))

    @staticmethod
    def same_key(
        spec: QueueSpec, columns: Sequence[sa.ColumnElement[Any]], rows: sa.FromClause
    ) -> sa.ColumnElement[bool]:
        """Return the condition that the key in ``columns`` is that of a row in ``rows``."""
        return sa.and_(*(column == column_of(rows, key) for column, key in zip(columns, spec.keys, strict=True)))

    @staticmethod
    def with_insert(spec: QueueSpec, verb: sa.Update | sa.Delete | sa.Insert, other: sa.Insert) -> AnySelect:
        """Return one statement that executes both, and selects the keys that ``verb`` changed.

        Both are CTEs of a SELECT: SQLAlchemy drops the RETURNING of an UPDATE with an INSERT among its CTEs.
        """
        changed = verb.returning(*named(spec.keys)).cte("sqlaqueue_changed")
        return sa.select(*changed.c).add_cte(other.cte("sqlaqueue_other"))

    @classmethod
    def in_claim_order(cls, spec: QueueSpec, claimed: sa.FromClause, picked: sa.CTE | None = None) -> AnySelect:
        """Return all rows of ``claimed`` in claim order, which neither RETURNING nor a locking scan guarantees.

        :param picked: the rows of which they were made. Where keys take turns, they have the order of the turns.
        """
        turns = claimed if picked is None else picked
        order = [turns.c[TURN]] if TURN in turns.c else named_in(claimed, spec.claim_order)
        is_apart = TURN in turns.c and picked is not None
        rows = claimed.join(turns, cls.same_key(spec, named_in(claimed, spec.keys), turns)) if is_apart else claimed
        return sa.select(*claimed.c).select_from(rows).order_by(*order)

    @staticmethod
    def once_each(spec: QueueSpec, candidates: AnySelect, claimed: sa.CTE) -> sa.FromClause:
        """Return ``claimed`` without duplicates: a second table in the filter may match a job several times."""
        tables = candidates.get_final_froms()
        if len(tables) == 1 and not isinstance(tables[0], sa.Join):
            return claimed
        time = sa.func.row_number().over(partition_by=[column_of(claimed, key) for key in spec.keys])
        counted = sa.select(*claimed.c, time.label("sqlaqueue_time")).subquery("sqlaqueue_counted")
        once = sa.select(*(column_of(counted, column) for column in claimed.c)).where(counted.c.sqlaqueue_time == 1)
        return once.subquery("sqlaqueue_once_each")
