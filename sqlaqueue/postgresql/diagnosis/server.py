"""The server itself: version, settings, clock, and its queue of notifications."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import ARRAY

from sqlaqueue.postgresql.diagnosis.sessions import SESSION, open_transaction
from sqlaqueue.queue.server_facts import NotificationQueue, ServerState, Setting

_SETTINGS = (
    "autovacuum",
    "autovacuum_analyze_scale_factor",
    "autovacuum_analyze_threshold",
    "autovacuum_freeze_max_age",
    "autovacuum_multixact_freeze_max_age",
    "autovacuum_vacuum_max_threshold",
    "autovacuum_vacuum_scale_factor",
    "autovacuum_vacuum_threshold",
    "default_transaction_read_only",
    "fsync",
    "full_page_writes",
    "max_connections",
    "max_locks_per_transaction",
    "max_prepared_transactions",
    "synchronous_commit",
    "track_counts",
)

_READ_SETTINGS = sa.text("""
    SELECT name, setting AS value, source FROM pg_settings WHERE name = ANY (CAST(:names AS text[]))
""").bindparams(sa.bindparam("names", [*_SETTINGS], type_=ARRAY(sa.Text())))

_STATE = sa.text("""
    SELECT current_setting('server_version_num')::int AS version, pg_is_in_recovery() AS in_recovery,
           current_database()::text AS database, current_user::text AS role,
           coalesce(host(inet_server_addr()),
                    split_part((SELECT setting FROM pg_settings WHERE name = 'unix_socket_directories'), ',', 1))
             AS address,
           coalesce(inet_server_port(), current_setting('port')::int) AS port
""")

_PRIMARY = sa.text("""
    SELECT sender_host AS host, sender_port AS port FROM pg_stat_wal_receiver
    WHERE sender_host IS NOT NULL AND sender_port IS NOT NULL
""")

# A listener receives nothing within a transaction, and the queue keeps what its slowest listener has not received.
_OLDEST = sa.text(f"""
    SELECT {SESSION}
    FROM pg_stat_activity AS a
    WHERE a.backend_type = 'client backend' AND a.xact_start IS NOT NULL AND a.pid <> pg_backend_pid()
    ORDER BY a.xact_start LIMIT 1
""")  # noqa: S608 - the columns are a constant


def server_state(connection: sa.Connection) -> ServerState:
    """Return the server's version, settings and address."""
    settings = {row.name: Setting(**row._mapping) for row in connection.execute(_READ_SETTINGS)}  # noqa: SLF001 - its public name begins so
    state: Any = connection.execute(_STATE).mappings().one()
    primary = connection.execute(_PRIMARY).one_or_none()
    address: tuple[str, int] | None = None if primary is None else (primary.host, primary.port)
    return ServerState(**state, settings=settings, primary=address)


def server_time(connection: sa.Connection) -> datetime:
    """Return the server's clock at this moment."""
    now: datetime = connection.execute(sa.select(sa.func.clock_timestamp())).scalar_one()
    return now


def notification_queue(connection: sa.Connection) -> NotificationQueue:
    """Return the fill of the notification queue."""
    usage: float = connection.execute(sa.select(sa.func.pg_notification_queue_usage())).scalar_one()
    oldest = connection.execute(_OLDEST).one_or_none()
    return NotificationQueue(usage=usage, oldest=None if oldest is None else open_transaction(oldest))
