"""What is recorded under strategies whose transaction holds the jobs: no row tells that such a job runs.

* ``hold()``, the function that locks a job with its slots, also stores in a setting of the transaction what it has
  admitted: the keys, the limits, and the snapshots before and after. The handler reads the setting.
* Each call of a handler writes a row of ``mark`` by a second connection, in autocommit, with the transaction of the
  claim and a snapshot. The transaction has its slots for as long as snapshots show it in progress. So the end of a run
  needs no record, and a worker that was killed is no special case: its run ends when the server ends the transaction.
"""

from __future__ import annotations

import threading
from typing import Any

import sqlalchemy as sa

APPLICATION = "marks"
"""The ``application_name`` of the connections that write marks; no fault ends them."""

_MARK = """
CREATE TABLE mark (
  seq bigserial PRIMARY KEY,
  job bigint, call text, xid bigint, transaction_began double precision, holds text, origin text,
  seen text DEFAULT pg_current_snapshot()::text,
  at double precision DEFAULT extract(epoch FROM clock_timestamp())
)
"""

_BEFORE = (
    "DECLARE\n  audit_seen text := pg_current_snapshot()::text;\n  audit_started timestamptz := clock_timestamp();\n"
)
_AFTER = """    PERFORM set_config('audit.holds', concat(current_setting('audit.holds', true), json_build_object(
      'job', sqlaqueue_job::json->0, 'limits', sqlaqueue_limits, 'keys', sqlaqueue_keys, 'most', sqlaqueue_most,
      'before', audit_seen, 'after', pg_current_snapshot(), 'began', extract(epoch FROM statement_timestamp()),
      'started', extract(epoch FROM audit_started), 'at', extract(epoch FROM clock_timestamp())), E'\\n'), true);
    RETURN true;
"""

_READ = sa.text("""
    SELECT pg_current_xact_id()::text::bigint AS xid, extract(epoch FROM now())::float8 AS transaction_began,
      coalesce(current_setting('audit.holds', true), '') AS holds
""")
_WRITE = sa.text("""
    INSERT INTO mark (job, call, xid, transaction_began, holds, origin)
    VALUES (:job, :call, :xid, :transaction_began, :holds, :origin)
""")


def install(engine: sa.Engine) -> None:
    """Create the table of marks, and have ``hold()`` record what it admits."""
    with engine.begin() as connection:
        connection.exec_driver_sql(_MARK)
        statement = "SELECT pg_get_functiondef(oid) FROM pg_proc WHERE starts_with(proname, 'sqlaqueue_hold_')"
        for text in connection.scalars(sa.text(statement)).all():
            changed = text
            for old, new in {"DECLARE\n": _BEFORE, "    RETURN true;\n": _AFTER}.items():
                assert changed.count(old) == 1, f"{old!r} is not once in {changed}"
                changed = changed.replace(old, new)
            # A percent sign would be a parameter of the driver.
            connection.exec_driver_sql(changed.replace("%", "%%"))


class Marks:
    """Writes the marks of one process, by a connection of its own."""

    def __init__(self, url: str, origin: str) -> None:
        self._engine = sa.create_engine(
            url, isolation_level="AUTOCOMMIT", pool_size=1, connect_args={"application_name": APPLICATION}
        )
        self._origin, self._lock = origin, threading.Lock()

    async def write(self, io: Any, job: int, call: str) -> None:
        """Record that a call of a handler begins.

        :param io: the session of the handler, in the transaction that holds the job.
        """
        held = (await io.execute(_READ)).one()
        with self._lock, self._engine.connect() as connection:
            connection.execute(_WRITE, {**held._mapping, "job": job, "call": call, "origin": self._origin})
