"""Psycopg without a library: claim with SKIP LOCKED, then delete the row or mark it as finished."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

import psycopg

from docs.benchmarks.systems.protocol import Adapter, Meter, main, version_of

TABLE = """
CREATE TABLE job (
  id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  queue text NOT NULL DEFAULT 'default',
  status smallint NOT NULL DEFAULT 0,
  priority smallint NOT NULL DEFAULT 0,
  run_at timestamptz NOT NULL DEFAULT now(),
  attempts integer NOT NULL DEFAULT 0,
  payload jsonb NOT NULL,
  created_at timestamptz NOT NULL DEFAULT now(),
  locked_until timestamptz,
  finished_at timestamptz
);
CREATE INDEX job_waiting ON job (queue, priority, run_at, id) WHERE status = 0;
"""

PICK = """
SELECT id FROM job WHERE queue = 'default' AND status = 0 AND run_at <= now()
ORDER BY priority, run_at, id LIMIT %s FOR NO KEY UPDATE SKIP LOCKED
"""

CLAIM = f"""
WITH picked AS ({PICK})
UPDATE job SET status = 1, attempts = attempts + 1, locked_until = now() + interval '1 minute'
FROM picked WHERE job.id = picked.id RETURNING job.id, job.payload
"""

ENDINGS = {
    "delete": "DELETE FROM job WHERE id = ANY(%s) AND status = 1",
    "update": "UPDATE job SET status = 2, finished_at = now() WHERE id = ANY(%s) AND status = 1",
}

INSERT = """
INSERT INTO job (payload, priority, run_at)
SELECT unnest(%s::jsonb[]), %s, now() + %s * interval '1 second'
"""


class Raw(Adapter):
    """Runs a queue of one table and two statements."""

    def prepare(self) -> Any:
        with psycopg.connect(self.url) as connection:
            connection.execute(TABLE)
        remaining = "SELECT 1 FROM job WHERE status < 2 AND run_at <= now()"
        statements = {
            "finish": "UPDATE job SET status = 2, finished_at = now()",
            "lock": "SELECT 1 FROM job WHERE status = 0 ORDER BY priority, run_at, id LIMIT 1 FOR UPDATE",
        }
        return remaining, version_of("psycopg"), statements

    def open(self) -> None:
        self._connection = psycopg.connect(self.url)

    def enqueue(self, jobs: list[dict[str, Any]], request: Mapping[str, Any]) -> None:
        values = request.get("priority", 0), request.get("delay", 0.0)
        if request["way"] == "copy":
            with self._connection.cursor().copy("COPY job (payload) FROM STDIN") as copy:
                for job in jobs:
                    copy.write_row((json.dumps(job),))
        else:
            self._connection.execute(INSERT, ([json.dumps(job) for job in jobs], *values))
        if self.options.get("listen"):
            self._connection.execute("NOTIFY job")
        self._connection.commit()

    def work(self, meter: Meter) -> None:
        batch, ending = self.options["batch"], ENDINGS[self.options["ending"]]
        # It listens in autocommit mode, as notifications arrive between transactions.
        listens = bool(self.options.get("listen"))
        with psycopg.connect(self.url, autocommit=listens) as connection:
            if listens:
                connection.execute("LISTEN job")
            meter.wait_for_go()
            while True:
                rows = connection.execute(CLAIM, (batch,)).fetchall()
                connection.commit()
                for _, payload in rows:
                    meter.handle(payload)
                if rows:
                    connection.execute(ending, ([key for key, _ in rows],))
                    connection.commit()
                elif listens:
                    for _ in connection.notifies(timeout=5.0, stop_after=1):
                        pass
                else:
                    time.sleep(0.05)


if __name__ == "__main__":
    main(Raw)
