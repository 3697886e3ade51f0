"""The slots that transactions hold, for reports; :mod:`sqlaqueue.postgresql.ddl.hold` locks them."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import OID

from sqlaqueue.flow_control.controls import JobKey
from sqlaqueue.postgresql.catalog.table_id import TableId, system_table
from sqlaqueue.postgresql.flow_functions import SLOT_BITS, slot_text

_BIGINT = sa.BigInteger()
_WITHOUT_NUMBER = sa.literal_column(str(-(1 << SLOT_BITS)), _BIGINT)


def held_slots() -> sa.FromClause:
    """Return the slots without their numbers, each with the number of transactions that hold it."""
    locks = system_table("pg_locks", "locktype", "database", "classid", "objid", "objsubid", "virtualtransaction").c
    databases = system_table("pg_database", "oid", "datname").c
    here = sa.select(databases.oid).where(databases.datname == sa.func.current_database()).scalar_subquery()
    upper, lower = sa.cast(locks.classid, _BIGINT), sa.cast(locks.objid, _BIGINT)
    whole = upper.op("<<")(sa.literal_column("32")).op("|")(lower)
    slot: Any = sa.type_coerce(whole, _BIGINT).op("&")(_WITHOUT_NUMBER).label("slot")
    number = sa.func.count(locks.virtualtransaction.distinct()).label("number")
    # One key of 64 bits has the 1 there; two keys of 32 bits have a 2.
    mine = sa.and_(locks.locktype == "advisory", locks.objsubid == sa.literal_column("1"), locks.database == here)
    return sa.select(slot, number).where(mine).group_by(slot).cte("sqlaqueue_slots")


def slot_of(key: JobKey, hashed: sa.ColumnElement[int]) -> sa.ColumnElement[int]:
    """Return the slot of a key, from its hash."""
    table = sa.cast(sa.cast(TableId(key.spec.table), OID()), _BIGINT)
    seed = sa.func.hashtextextended(slot_text(key), table)
    slot: Any = sa.func.hashint8extended(hashed, seed, type_=_BIGINT)
    return sa.type_coerce(slot.op("&")(_WITHOUT_NUMBER), _BIGINT)
