"""Sessions that hold locks of a queue's tables for which other sessions wait."""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa

from sqlaqueue.postgresql.diagnosis.relations import table_oid
from sqlaqueue.postgresql.diagnosis.sessions import SESSION, open_transaction
from sqlaqueue.queue.server_facts import Blocker

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


def blockers(connection: sa.Connection, tables: Sequence[sa.Table]) -> list[Blocker]:
    """Return the sessions that hold locks of tables for which others wait."""
    oids = [oid for table in tables if (oid := table_oid(connection, table)) is not None]
    query = _BLOCKERS.bindparams(sa.bindparam("tables", oids, type_=sa.ARRAY(sa.BigInteger())))
    return [
        Blocker(
            session=open_transaction(row), waiting=row.waiting, seconds=row.seconds_waited or 0.0, tables=row.tables
        )
        for row in connection.execute(query)
    ]
