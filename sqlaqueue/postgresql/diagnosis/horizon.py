"""What holds the xmin horizon of this database: VACUUM keeps all rows that died after it.

For the rows of ordinary tables, the server takes the oldest of these: the transaction id and the snapshot of each
session and prepared transaction of the same database, the xmin of each replication slot, and that of each standby.
"""

from __future__ import annotations

import sqlalchemy as sa

from sqlaqueue.postgresql.diagnosis.sessions import SESSION, open_transaction
from sqlaqueue.queue.server_facts import HorizonHolders, PreparedTransaction, ReplicationSlot, Standby

# A session that waits for a lock goes on when the holder of the lock has ended, which is to be found instead. The
# server ignores the snapshot of a VACUUM. A worker of a parallel query has the snapshot of its leader. A walsender
# is listed as a standby.
_SESSIONS = sa.text(f"""
    SELECT {SESSION}
    FROM pg_stat_activity AS a
    WHERE a.datname = current_database() AND a.pid <> pg_backend_pid() AND a.usename IS NOT NULL
      AND (a.backend_xid IS NOT NULL OR a.backend_xmin IS NOT NULL)
      AND coalesce(a.backend_type, '') NOT IN ('autovacuum worker', 'parallel worker')
      AND a.wait_event_type IS DISTINCT FROM 'Lock'
      AND NOT EXISTS (SELECT FROM pg_stat_replication AS r WHERE r.pid = a.pid)
      AND NOT EXISTS (SELECT FROM pg_stat_progress_vacuum AS v WHERE v.pid = a.pid)
    ORDER BY age DESC, a.pid
""")  # noqa: S608 - the columns are a constant

_HIDDEN = sa.text("""
    SELECT count(*) FROM pg_stat_activity AS a
    WHERE a.datname = current_database() AND a.usename IS NOT NULL
      AND a.backend_type IS NULL AND a.state IS NULL AND a.xact_start IS NULL
""")

_PREPARED = sa.text("""
    SELECT p.gid, p.owner::text AS owner, p.prepared AS since,
           extract(epoch FROM clock_timestamp() - p.prepared)::float8 AS seconds, age(p.transaction) AS age
    FROM pg_prepared_xacts AS p WHERE p.database = current_database()
    ORDER BY age DESC, p.gid
""")

# to_jsonb() gives NULL for a column that this version of PostgreSQL does not have.
_SLOTS = sa.text("""
    SELECT s.slot_name::text AS name, s.slot_type AS kind, s.database::text AS database, s.active_pid,
           age(s.xmin) AS age, age(s.catalog_xmin) AS catalog_age, i.inactive_since,
           extract(epoch FROM clock_timestamp() - i.inactive_since)::float8 AS inactive_seconds,
           (CASE WHEN NOT pg_is_in_recovery() THEN pg_wal_lsn_diff(pg_current_wal_lsn(), s.restart_lsn) END)::bigint
             AS wal_bytes
    FROM pg_replication_slots AS s
    CROSS JOIN LATERAL (
      SELECT CASE WHEN NOT s.active THEN CAST(to_jsonb(s) ->> 'inactive_since' AS timestamptz) END
    ) AS i (inactive_since)
    WHERE s.xmin IS NOT NULL OR s.catalog_xmin IS NOT NULL
    ORDER BY greatest(age(s.xmin), age(s.catalog_xmin)) DESC, s.slot_name
""")

_STANDBYS = sa.text("""
    SELECT r.pid, coalesce(r.application_name, '') AS application, host(r.client_addr) AS client,
           age(r.backend_xmin) AS age
    FROM pg_stat_replication AS r WHERE r.backend_xmin IS NOT NULL
    ORDER BY age DESC, r.pid
""")


def horizon_holders(connection: sa.Connection) -> HorizonHolders:
    """Return all that keeps VACUUM from removing dead rows."""
    return HorizonHolders(
        sessions=[open_transaction(row) for row in connection.execute(_SESSIONS)],
        prepared=[PreparedTransaction(**row) for row in connection.execute(_PREPARED).mappings()],
        slots=[ReplicationSlot(**row) for row in connection.execute(_SLOTS).mappings()],
        standbys=[Standby(**row) for row in connection.execute(_STANDBYS).mappings()],
        hidden=connection.scalar(_HIDDEN) or 0,
    )
