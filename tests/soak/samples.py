"""What is measured every few seconds: the processes that are never killed, and the database.

A sample is one line of JSON in ``samples.jsonl``, with the number of its piece and the seconds since the piece began. A
fault is a line too.
"""

import contextlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
from psycopg import IsolationLevel
from psycopg.rows import dict_row

from tests.soak.queues import QUEUES

SETTLED_AFTER = 30
"""Seconds after which the checker looks at a job that has no effect yet."""

MATCH = """
WITH taken AS (DELETE FROM soak_effect RETURNING queue, job, due, at),
counted AS (SELECT queue, job, count(*) AS runs FROM taken GROUP BY queue, job),
matched AS (DELETE FROM soak_expected e USING counted c WHERE (e.queue, e.job) = (c.queue, c.job)
            RETURNING e.queue, e.job),
twice AS (SELECT queue, job FROM counted c WHERE runs > 1 OR NOT EXISTS
          (SELECT FROM matched m WHERE (m.queue, m.job) = (c.queue, c.job))),
late AS (SELECT percentile_cont(ARRAY[0.5, 0.99, 1]) WITHIN GROUP (ORDER BY extract(epoch FROM at - due)) AS s
         FROM taken WHERE due IS NOT NULL)
SELECT (SELECT count(*) FROM taken) AS done,
       (SELECT coalesce(json_agg(queue || ' ' || job), '[]') FROM twice) AS twice,
       late.s AS latency
FROM late
"""

# A row is cancelled for longer than retention needs to delete it; a job whose row is gone has completed.
DECIDED = """
SELECT e.job, j.status FROM soak_expected e LEFT JOIN "{table}" j ON j.id = e.job
WHERE e.queue = '{table}' AND e.at < clock_timestamp() - make_interval(secs => {seconds})
AND (j.id IS NULL OR j.status IN ('completed', 'cancelled'))
"""

TABLES = """
SELECT relname AS name, n_dead_tup AS dead, n_live_tup AS live, pg_table_size(relid) AS table_bytes,
       pg_indexes_size(relid) AS index_bytes
FROM pg_stat_user_tables WHERE relname NOT LIKE 'soak%' AND pg_table_size(relid) > 0
"""


@dataclass
class Checked:
    """What the checker has found so far."""

    done: int = 0
    cancelled: int = 0
    lost: list[str] = field(default_factory=list)
    twice: list[str] = field(default_factory=list)


class Checker:
    """Matches the jobs that were enqueued with their effects, by SQL, so that nothing has to be remembered."""

    def __init__(self, dsn: str) -> None:
        self._dsn, self.checked = dsn, Checked()

    def look(self) -> dict[str, Any]:
        """Match what has come, and return the figures of the database.

        :raises psycopg.Error: while the server does not answer.
        """
        with psycopg.connect(self._dsn, row_factory=dict_row) as connection:
            # One snapshot: a job that has completed in it has had its effect matched.
            connection.isolation_level = IsolationLevel.REPEATABLE_READ
            [found] = connection.execute(MATCH)
            found["open"] = self._decide(connection)
            connection.commit()
            # Only what is committed is counted: the connection may have ended before.
            self.checked.done += found["done"]
            self.checked.twice += found["twice"]
            found["tables"] = {row.pop("name"): row for row in connection.execute(TABLES)}
            activity = "SELECT count(*) AS n FROM pg_stat_activity WHERE backend_type = 'client backend'"
            [row] = connection.execute(activity)
            # Without this one.
            found["connections"] = row["n"] - 1
        found["twice"] = len(found["twice"])
        return found

    def _decide(self, connection: psycopg.Connection[Any]) -> int:
        """Look at jobs that have had no effect for some time; return the number of open jobs."""
        cancelled = []
        for model in QUEUES:
            table = model.__tablename__
            for row in connection.execute(DECIDED.format(table=table, seconds=SETTLED_AFTER)).fetchall():
                if row["status"] == "cancelled":
                    cancelled.append((table, row["job"]))
                else:
                    self.checked.lost.append(f"{table} {row['job']}: {row['status'] or 'no row'}, without its effect")
                connection.execute("DELETE FROM soak_expected WHERE (queue, job) = (%s, %s)", (table, row["job"]))
        self.checked.cancelled += len(cancelled)
        [row] = connection.execute("SELECT count(*) AS n FROM soak_expected")
        return int(row["n"])


# -- processes ---------------------------------------------------------------------------------------------------------


def look_at(pid: int) -> dict[str, float] | None:
    """Return the memory, the descriptors and the threads of a process; None if it has ended."""
    with contextlib.suppress(OSError):
        process = Path(f"/proc/{pid}")
        resident = int(process.joinpath("statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return {
            "rss_mib": resident / 2**20,
            "descriptors": len([*process.joinpath("fd").iterdir()]),
            "threads": len([*process.joinpath("task").iterdir()]),
        }
    return None


# -- the file ----------------------------------------------------------------------------------------------------------


class SampleFile:
    """Appends samples and faults of one piece.

    :param piece: the number of the piece, from 0.
    """

    def __init__(self, path: Path, piece: int) -> None:
        self._path, self._piece, self._start = path, piece, time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds since the piece began."""
        return time.monotonic() - self._start

    def write(self, what: str, values: Mapping[str, Any]) -> None:
        line = {"what": what, "piece": self._piece, "at": round(self.seconds, 2), **values}
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def read(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a file; the last one may be cut off, if the soak was killed."""
    with contextlib.suppress(FileNotFoundError), path.open() as file:
        for line in file:
            with contextlib.suppress(json.JSONDecodeError):
                yield json.loads(line)
