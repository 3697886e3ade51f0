"""Psycopg without a library: claim with SKIP LOCKED, then delete the row or mark it as finished.

With the option ``one`` each thread runs one job at a time. ``locked``: the row is locked while the handler runs.
``deleted first``: the row is deleted and committed before, so that a crash loses the job. The second one is there to
show that a lost job is found.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
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

LOCK_ONE = """
SELECT id, payload FROM job WHERE queue = 'default' AND status = 0 AND run_at <= now()
ORDER BY priority, run_at, id LIMIT 1 FOR UPDATE SKIP LOCKED
"""

TAKE_ONE = f"DELETE FROM job USING ({LOCK_ONE}) AS picked WHERE job.id = picked.id RETURNING job.id, job.payload"

POLL_EVERY = 0.1
"""Seconds between two looks of an idle thread that runs one job at a time."""

RECONNECT_AFTER = 0.5
"""Seconds from a lost connection to the next attempt to connect."""

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

    def reopen(self) -> None:
        self._connection.close()
        self.open()

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
        if "one" in self.options:
            self._run_one_by_one(meter)
        else:
            self._run_batches(meter)

    def _run_one_by_one(self, meter: Meter) -> None:
        """Run one job in each transaction, with a connection for each thread."""
        meter.wait_for_go()
        handle = self._delete_and_handle if self.options["one"] == "deleted first" else self._lock_and_handle
        threads = [
            threading.Thread(target=self._keep_running, args=(handle, meter))
            for _ in range(self.options.get("concurrency", 1))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _keep_running(self, handle: Callable[[Any, Meter], bool], meter: Meter) -> None:
        while True:
            try:
                with psycopg.connect(self.url) as connection:
                    while True:
                        if not handle(connection, meter):
                            time.sleep(POLL_EVERY)
            except psycopg.OperationalError:
                time.sleep(RECONNECT_AFTER)

    @staticmethod
    def _lock_and_handle(connection: Any, meter: Meter) -> bool:
        """Hold the lock of a row while its handler runs, then delete the row; return whether there was a job."""
        with connection.transaction():
            row = connection.execute(LOCK_ONE).fetchone()
            if row is None:
                return False
            meter.handle(row[1])
            connection.execute("DELETE FROM job WHERE id = %s", (row[0],))
            return True

    @staticmethod
    def _delete_and_handle(connection: Any, meter: Meter) -> bool:
        """Delete a row, commit, and run its handler: what a crash interrupts is lost."""
        with connection.transaction():
            row = connection.execute(TAKE_ONE).fetchone()
        if row is None:
            return False
        meter.handle(row[1])
        return True

    def _run_batches(self, meter: Meter) -> None:
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
