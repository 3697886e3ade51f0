"""PostgreSQL as the library's database: the implementation of :class:`sqlaqueue.queue.backend.Backend`."""

from __future__ import annotations

import sqlalchemy as sa

from sqlaqueue.postgresql import checks, claims, ddl, diagnosis, listing, side_tables
from sqlaqueue.postgresql.dialect_check import check_dialect, guarded
from sqlaqueue.postgresql.identifiers import object_name
from sqlaqueue.postgresql.inserts import insert_or_ignore, insert_or_replace, insert_unless
from sqlaqueue.postgresql.key_arrays import key_array, numbered_rows
from sqlaqueue.postgresql.key_hash import key_hash
from sqlaqueue.postgresql.notify import channel_of, notification
from sqlaqueue.postgresql.periods import period
from sqlaqueue.postgresql.session_settings import session_setting
from sqlaqueue.postgresql.sqlstate import sqlstate, violated_column, violated_constraint, violated_table
from sqlaqueue.postgresql.types import NEUTRAL
from sqlaqueue.queue.backend import Checks, Claims, Diagnosis, Listing, SideTables, Triggers, register_backend


class PostgreSQL:
    """The folders of this package, as the protocols that they implement."""

    dialect: sa.Dialect = NEUTRAL
    claims: Claims = claims
    triggers: Triggers = ddl
    side_tables: SideTables = side_tables
    checks: Checks = checks
    diagnosis: Diagnosis = diagnosis
    listing: Listing = listing
    check_dialect = staticmethod(check_dialect)
    guarded = staticmethod(guarded)
    channel_of = staticmethod(channel_of)
    notification = staticmethod(notification)
    object_name = staticmethod(object_name)
    key_array = staticmethod(key_array)
    key_hash = staticmethod(key_hash)
    numbered_rows = staticmethod(numbered_rows)
    insert_or_ignore = staticmethod(insert_or_ignore)
    insert_or_replace = staticmethod(insert_or_replace)
    insert_unless = staticmethod(insert_unless)
    period = staticmethod(period)
    session_setting = staticmethod(session_setting)
    sqlstate = staticmethod(sqlstate)
    violated_constraint = staticmethod(violated_constraint)
    violated_column = staticmethod(violated_column)
    violated_table = staticmethod(violated_table)


register_backend(PostgreSQL())
