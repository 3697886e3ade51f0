"""Claims under flow control by strategies whose transaction holds the jobs.

A function locks each candidate together with a slot of each of its keys (:mod:`sqlaqueue.postgresql.ddl.hold`), or
nothing. Rates are only looked at: the transaction may be rolled back after its jobs have begun, so a Consumer reserves
the beginnings in a transaction of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import ARRAY, OID, array

from sqlaqueue.postgresql.claims.admitted import Admitted
from sqlaqueue.postgresql.claims.checks import LimitCheck, OrderCheck, RateCheck
from sqlaqueue.postgresql.claims.claim_record import order_name
from sqlaqueue.postgresql.flow_functions import hold_function, slot_text
from sqlaqueue.postgresql.function_calls import call
from sqlaqueue.queue.backend import backend


class _RowPlace(sa.types.UserDefinedType[str]):
    cache_ok = True

    def get_col_spec(self, **_: Any) -> str:
        return "tid"


_HELD = "sqlaqueue_held"


class HeldAdmitted(Admitted):
    """The statement of one claim of a held strategy, in parts."""

    def _begun(self, rows: sa.CTE) -> list[sa.CTE]:
        return []

    def _places(self) -> list[sa.ColumnElement[Any]]:
        job, *messages = self._spec.strategy.locked_tables(self._spec)
        places = [("row", job, "ctid", _RowPlace()), ("part", job, "tableoid", OID())]
        places += [("message", table, "ctid", _RowPlace()) for table in messages]
        return [_system_column(table, name, type_).label(f"sqlaqueue_{what}") for what, table, name, type_ in places]

    def _checked(self, candidates: sa.FromClause) -> sa.FromClause:
        rows, before = candidates, self._not_before(candidates)
        for check in self._checks:
            if isinstance(check, RateCheck):
                looked = sa.select(*rows.c, check.free(rows, self._record.claim, lock=False)).where(*before)
                rows = looked.subquery(f"sqlaqueue_looked_{check.number}")
                before = [check.allows(rows, lock=False)]
        order = next((check for check in self._checks if isinstance(check, OrderCheck)), None)
        limits = [check for check in self._checks if isinstance(check, LimitCheck)]
        if order is not None or limits:
            job = backend().side_tables.key_text(rows.c[order_name(key)] for key in self._spec.keys)
            places = (rows.c[place.name] for place in self._places())
            held = call(
                hold_function(self._spec),
                self._spec.table,
                self._record.claim,
                *places,
                job,
                sa.cast(sa.null(), sa.BigInteger()) if order is None else rows.c[order.name("key")],
                sa.literal_column(str(limits[0].number if limits else 0), sa.Integer()),
                _array([sa.literal(slot_text(check.job_key), sa.Text()) for check in limits], sa.Text()),
                _array([rows.c[check.name("key")] for check in limits], sa.BigInteger()),
                _array([rows.c[check.name("most")] for check in limits], sa.Integer()),
                _array([sa.literal(check.job_key.changes) for check in limits], sa.Boolean()),
                type_=sa.Boolean(),
            )
            rows = sa.select(*rows.c, held.label(_HELD)).where(*before).subquery("sqlaqueue_looked")
            before = [rows.c[_HELD]]
        return sa.select(*rows.c).where(*before).subquery("sqlaqueue_checked")


def _array(values: Sequence[Any], type_: Any) -> sa.ColumnElement[Any]:
    # Without elements ARRAY[] has no type.
    return sa.cast(array(values), ARRAY(type_))


def _system_column(table: sa.Table, name: str, type_: Any) -> sa.ColumnClause[Any]:
    column: sa.ColumnClause[Any] = sa.column(name, type_)
    vars(column)["table"] = table
    return column
