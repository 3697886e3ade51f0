"""The server itself: version, settings, clock, and its queue of notifications."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import closing
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import ARRAY

from sqlaqueue.postgresql import facts
from sqlaqueue.postgresql.catalog_text import SESSION, index_oids, open_transaction, partitions, table_oid

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


def server_state(connection: sa.Connection) -> facts.ServerState:
    settings = {row.name: facts.Setting(**row._mapping) for row in connection.execute(_READ_SETTINGS)}  # noqa: SLF001 - its public name begins so
    state: Any = connection.execute(_STATE).mappings().one()
    primary = connection.execute(_PRIMARY).one_or_none()
    address: tuple[str, int] | None = None if primary is None else (primary.host, primary.port)
    return facts.ServerState(**state, settings=settings, primary=address)


def server_time(connection: sa.Connection) -> datetime:
    now: datetime = connection.execute(sa.select(sa.func.clock_timestamp())).scalar_one()
    return now


def notification_queue(connection: sa.Connection) -> facts.NotificationQueue:
    usage: float = connection.execute(sa.select(sa.func.pg_notification_queue_usage())).scalar_one()
    oldest = connection.execute(_OLDEST).one_or_none()
    return facts.NotificationQueue(usage=usage, oldest=None if oldest is None else open_transaction(oldest))


# Where the current role may not see the type of a process, the name of a role tells clients from the server's own.
_GROUPS = sa.text("""
    SELECT a.usename::text AS role, coalesce(a.application_name, '') AS application, count(*) AS number,
           CASE WHEN bool_or(a.backend_type IS NULL) THEN NULL
             ELSE count(*) FILTER (WHERE a.state = 'idle' AND a.pid <> pg_backend_pid()
               AND a.state_change < clock_timestamp() - make_interval(secs => :idle_for)) END AS idle
    FROM pg_stat_activity AS a
    WHERE a.usename IS NOT NULL AND coalesce(a.backend_type, 'client backend') = 'client backend'
    GROUP BY 1, 2 ORDER BY number DESC, 1, 2
""")

_LIMIT = sa.text("""
    SELECT sum(CASE name WHEN 'max_connections' THEN setting::int ELSE -setting::int END)::int FROM pg_settings
    WHERE name IN ('max_connections', 'superuser_reserved_connections', 'reserved_connections')
""")


def connections(connection: sa.Connection, idle_for: float) -> facts.Connections:
    """Return the connections to the server; after ``idle_for`` seconds a session counts as idle."""
    groups = [facts.ConnectionGroup(**row) for row in connection.execute(_GROUPS, {"idle_for": idle_for}).mappings()]
    limit: int = connection.execute(_LIMIT).scalar_one()
    return facts.Connections(used=sum(group.number for group in groups), limit=limit, groups=groups)


def backend_pid(connection: sa.Connection) -> int:
    pid: int = connection.execute(sa.select(sa.func.pg_backend_pid())).scalar_one()
    return pid


def announced_pid(connection: sa.Connection) -> int | None:
    """Return the process id that the driver was told when it connected; None if the driver does not say."""
    driver: Any = connection.connection.driver_connection
    if hasattr(driver, "get_server_pid"):
        pid: int = driver.get_server_pid()  # asyncpg
        return pid
    return getattr(getattr(driver, "info", None), "backend_pid", None)  # psycopg and psycopg2


def probe_backends(engine: sa.Engine) -> Sequence[int]:
    """Return the process ids of three transactions, the first and the last of one further connection.

    The second transaction belongs to another connection. It begins between the two others, and takes the server
    connection that a pooler has got back from the first.
    """
    # Pools of their own: the engine's may have no connection left.
    pools = engine.pool.recreate(), engine.pool.recreate()
    try:
        with closing(pools[0].connect()) as first, closing(pools[1].connect()) as second:
            before = _pid(first)
            first.rollback()
            return [before, _pid(second), _pid(first)]
    finally:
        for pool in pools:
            pool.dispose()


def _pid(connection: Any) -> int:
    cursor = connection.cursor()
    try:
        cursor.execute("SELECT pg_backend_pid()")
        pid: int = cursor.fetchone()[0]
    finally:
        cursor.close()
    return pid


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


def horizon_holders(connection: sa.Connection) -> facts.HorizonHolders:
    """Return what holds the xmin horizon of this database: VACUUM keeps all rows that died after it.

    For the rows of ordinary tables, the server takes the oldest of these: the transaction id and the snapshot of each
    session and prepared transaction of the same database, the xmin of each replication slot, and that of each standby.
    """
    return facts.HorizonHolders(
        sessions=[open_transaction(row) for row in connection.execute(_SESSIONS)],
        prepared=[facts.PreparedTransaction(**row) for row in connection.execute(_PREPARED).mappings()],
        slots=[facts.ReplicationSlot(**row) for row in connection.execute(_SLOTS).mappings()],
        standbys=[facts.Standby(**row) for row in connection.execute(_STANDBYS).mappings()],
        hidden=connection.scalar(_HIDDEN) or 0,
    )


# A default that calls nextval() depends on the sequence, whether the column owns it or not; the sequence of an identity
# column depends on the column. pg_sequence_last_value() is NULL until the first number.
_SEQUENCES = sa.text("""
    SELECT format('%I.%I', n.nspname, c.relname) AS "table", format('%I.%I', m.nspname, q.relname) AS sequence,
           quote_ident(a.attname) AS "column", format_type(a.atttypid, NULL) AS column_type,
           format_type(s.seqtypid, NULL) AS sequence_type, a.attidentity <> '' AS identity,
           CASE WHEN has_sequence_privilege(q.oid, 'USAGE, SELECT') THEN pg_sequence_last_value(q.oid) END AS last,
           s.seqmax AS sequence_limit,
           CASE a.atttypid WHEN 'int2'::regtype THEN 32767 WHEN 'int4'::regtype THEN 2147483647
             ELSE 9223372036854775807 END AS column_limit
    FROM pg_class AS c
    JOIN pg_namespace AS n ON n.oid = c.relnamespace
    JOIN pg_index AS x ON x.indrelid = c.oid AND x.indisprimary
    JOIN pg_attribute AS a ON a.attrelid = c.oid AND a.attnum = ANY (x.indkey::int2[])
    JOIN pg_depend AS d ON a.attidentity <> '' AND d.classid = 'pg_class'::regclass AND d.deptype = 'i'
           AND d.refclassid = 'pg_class'::regclass AND d.refobjid = c.oid AND d.refobjsubid = a.attnum
         OR a.attidentity = '' AND d.classid = 'pg_attrdef'::regclass AND d.refclassid = 'pg_class'::regclass
           AND d.objid = (SELECT e.oid FROM pg_attrdef AS e WHERE e.adrelid = c.oid AND e.adnum = a.attnum)
    JOIN pg_sequence AS s ON s.seqrelid = CASE a.attidentity WHEN '' THEN d.refobjid ELSE d.objid END
    JOIN pg_class AS q ON q.oid = s.seqrelid
    JOIN pg_namespace AS m ON m.oid = q.relnamespace
    WHERE c.oid = CAST(CAST(:oid AS bigint) AS oid) AND s.seqincrement > 0 AND NOT s.seqcycle
      AND a.atttypid IN ('int2'::regtype, 'int4'::regtype, 'int8'::regtype)
    ORDER BY a.attnum
""")


def key_sequences(connection: sa.Connection, table: sa.Table) -> Sequence[facts.KeySequence]:
    found = connection.execute(_SEQUENCES, {"oid": table_oid(connection, table)}).mappings()
    return [facts.KeySequence(**row) for row in found]


# A session that waits itself is not the one to be ended.
_BLOCKERS = sa.text(f"""
    SELECT {SESSION}, w.waiting, w.seconds_waited, w.tables
    FROM (
      SELECT b.pid, count(DISTINCT l.pid) AS waiting, array_agg(DISTINCT c.relname::text) AS tables,
             max(extract(epoch FROM clock_timestamp() - l.waitstart))::float8 AS seconds_waited
      FROM pg_locks AS l JOIN pg_class AS c ON c.oid = l.relation
      CROSS JOIN LATERAL unnest(pg_blocking_pids(l.pid)) AS b (pid)
      WHERE NOT l.granted AND l.locktype = 'relation' AND l.relation::bigint = ANY (:tables)
        AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
      GROUP BY b.pid
    ) AS w
    JOIN pg_stat_activity AS a ON a.pid = w.pid
    WHERE cardinality(pg_blocking_pids(a.pid)) = 0
    ORDER BY w.waiting DESC, a.pid
""")  # noqa: S608 - the columns are a constant


def blockers(connection: sa.Connection, tables: Sequence[sa.Table]) -> list[facts.Blocker]:
    oids = [oid for table in tables if (oid := table_oid(connection, table)) is not None]
    query = _BLOCKERS.bindparams(sa.bindparam("tables", oids, type_=sa.ARRAY(sa.BigInteger())))
    return [
        facts.Blocker(
            session=open_transaction(row), waiting=row.waiting, seconds=row.seconds_waited or 0.0, tables=row.tables
        )
        for row in connection.execute(query)
    ]


# The planner multiplies the rows of a page with the pages of today.
_TABLES = sa.text("""
    SELECT format('%I.%I', n.nspname, c.relname) AS name, c.reltuples::float8 AS rows,
           CASE WHEN c.reltuples < 0 OR c.relpages = 0 THEN c.reltuples::float8
                ELSE c.reltuples / c.relpages * ceil(z.size::float8 / current_setting('block_size')::int) END
             AS planned_rows,
           z.size, coalesce(c.reloptions, '{}')::text[] AS options,
           coalesce(s.n_live_tup, 0) AS live, coalesce(s.n_dead_tup, 0) AS dead,
           coalesce(s.n_mod_since_analyze, 0) AS changed,
           m.last_vacuum, extract(epoch FROM clock_timestamp() - m.last_vacuum)::float8 AS since_vacuum,
           m.last_analyze, extract(epoch FROM clock_timestamp() - m.last_analyze)::float8 AS since_analyze,
           age(c.relfrozenxid) AS xid_age, mxid_age(c.relminmxid) AS multixact_age,
           v.pid AS vacuum_pid, v.phase AS vacuum_phase
    FROM pg_class AS c
    JOIN pg_namespace AS n ON n.oid = c.relnamespace
    CROSS JOIN LATERAL (SELECT pg_relation_size(c.oid)) AS z (size)
    LEFT JOIN pg_stat_all_tables AS s ON s.relid = c.oid
    LEFT JOIN pg_stat_progress_vacuum AS v ON v.relid = c.oid AND v.datname = current_database()
    CROSS JOIN LATERAL (
      SELECT greatest(s.last_vacuum, s.last_autovacuum), greatest(s.last_analyze, s.last_autoanalyze)
    ) AS m (last_vacuum, last_analyze)
    WHERE c.oid = ANY (CAST(CAST(:oids AS bigint[]) AS oid[])) AND c.relkind IN ('r', 'm')
    ORDER BY n.nspname, c.relname
""").bindparams(sa.bindparam("oids", type_=ARRAY(sa.BigInteger())))

# An entry has a header of 8 bytes, a line pointer of 4, and is padded to a multiple of 8.
_INDEXES = sa.text("""
    SELECT format('%I.%I', n.nspname, c.relname) AS name, pg_relation_size(c.oid) AS size,
           c.reltuples::float8 AS rows,
           (SELECT 16 + coalesce(sum(ceil(coalesce(s.avg_width, greatest(a.attlen, 8)) / 8.0) * 8), 8)
            FROM pg_attribute AS a
            LEFT JOIN pg_attribute AS t
              ON t.attrelid = x.indrelid AND t.attnum = x.indkey[a.attnum - 1] AND t.attnum > 0
            LEFT JOIN pg_class AS r ON r.oid = x.indrelid
            LEFT JOIN pg_namespace AS q ON q.oid = r.relnamespace
            LEFT JOIN pg_stats AS s
              ON s.schemaname = q.nspname AND s.tablename = r.relname AND s.attname = t.attname AND NOT s.inherited
            WHERE a.attrelid = c.oid)::int AS entry_width
    FROM pg_class AS c
    JOIN pg_namespace AS n ON n.oid = c.relnamespace
    JOIN pg_index AS x ON x.indexrelid = c.oid
    JOIN pg_am AS m ON m.oid = c.relam AND m.amname = 'btree'
    WHERE c.oid = ANY (CAST(CAST(:oids AS bigint[]) AS oid[]))
    ORDER BY n.nspname, c.relname
""").bindparams(sa.bindparam("oids", type_=ARRAY(sa.BigInteger())))

_COMMON = sa.text("""
    SELECT CAST(CAST(s.most_common_vals AS text) AS text[])
    FROM pg_stats AS s
    JOIN pg_class AS c ON c.relname = s.tablename
    JOIN pg_namespace AS n ON n.oid = c.relnamespace AND n.nspname = s.schemaname
    WHERE c.oid = CAST(CAST(:oid AS bigint) AS oid) AND s.attname = :column
    ORDER BY s.inherited DESC LIMIT 1
""")


def table_statistics(connection: sa.Connection, table: sa.Table) -> Sequence[facts.TableStatistics]:
    """Return the statistics of a table, or of each of its partitions; none if the table does not exist."""
    oid = table_oid(connection, table)
    oids = partitions(connection, [] if oid is None else [oid])
    rows: Any = connection.execute(_TABLES, {"oids": [*oids]}).mappings() if oids else ()
    return [
        facts.TableStatistics(**{**row, "options": dict(option.split("=", 1) for option in row["options"])})
        for row in rows
    ]


def index_sizes(connection: sa.Connection, table: sa.Table, indexes: Iterable[sa.Index]) -> Sequence[facts.IndexSize]:
    """Return the sizes of some indexes of a table by their names, or of each of their partitions, if they exist."""
    names = [str(index.name) for index in indexes]
    oids = partitions(connection, index_oids(connection, table, names)) if names else []
    return (
        [facts.IndexSize(**row) for row in connection.execute(_INDEXES, {"oids": [*oids]}).mappings()] if oids else []
    )


def common_values(connection: sa.Connection, column: sa.Column[Any]) -> Sequence[str] | None:
    """Return the most common values of a column by its statistics, as texts; None if there are no statistics."""
    oid = table_oid(connection, column.table)
    row = connection.execute(_COMMON, {"oid": oid, "column": column.name}).one_or_none()
    return None if row is None else row[0] or []


def read_only(connection: sa.Connection, *, statement_timeout: str, lock_timeout: str) -> None:
    """Make the transaction read-only and limit its statements, until the savepoint is rolled back."""
    settings = {"transaction_read_only": "on", "statement_timeout": statement_timeout, "lock_timeout": lock_timeout}
    connection.execute(sa.select(*(sa.func.set_config(name, value, sa.true()) for name, value in settings.items())))
