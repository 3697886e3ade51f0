"""A loop on sqlite3 without a library: it claims a batch, and sets it to completed, in one short transaction each."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path

TABLE = """
CREATE TABLE job (
  id integer PRIMARY KEY, payload text, status text NOT NULL DEFAULT 'pending', priority integer NOT NULL DEFAULT 0,
  run_at text NOT NULL, attempts integer NOT NULL DEFAULT 0, lease_token text, lease_expires_at text, finished_at text
)
"""
INDEXES = (
    "CREATE INDEX job_claim ON job (priority, run_at, id) WHERE status = 'pending'",
    "CREATE INDEX job_lease ON job (lease_expires_at) WHERE status = 'processing'",
)
NOW = "strftime('%Y-%m-%d %H:%M:%f', 'now')"
CLAIM = f"""
UPDATE job SET status = 'processing', attempts = attempts + 1, lease_token = ?,
  lease_expires_at = strftime('%Y-%m-%d %H:%M:%f', 'now', '+60 seconds')
WHERE id IN (
  SELECT id FROM job WHERE status = 'pending' AND run_at <= {NOW} ORDER BY priority, run_at, id LIMIT ?
) RETURNING id, payload
"""
COMPLETE = f"""
UPDATE job SET status = 'completed', finished_at = {NOW}, lease_token = NULL, lease_expires_at = NULL
WHERE id IN (SELECT value FROM json_each(?)) AND lease_token = ? AND status = 'processing'
"""
INSERT = f"INSERT INTO job (payload, run_at) VALUES (?, {NOW})"


def connect(path: Path, synchronous: str) -> sqlite3.Connection:
    """Return a connection as prepare() sets it up."""
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    for pragma in ("busy_timeout = 30000", "journal_mode = WAL", f"synchronous = {synchronous}"):
        connection.execute(f"PRAGMA {pragma}")
    return connection


def create(path: Path) -> None:
    """Create the table."""
    connection = connect(path, "NORMAL")
    for statement in (TABLE, *INDEXES):
        connection.execute(statement)
    connection.close()


def enqueue(connection: sqlite3.Connection, number: int, batch: int) -> None:
    """Insert jobs, in transactions of ``batch`` jobs."""
    for start in range(0, number, batch):
        connection.execute("BEGIN IMMEDIATE")
        connection.executemany(INSERT, [("x",)] * min(batch, number - start))
        connection.execute("COMMIT")


def claim(connection: sqlite3.Connection, limit: int) -> list[int]:
    """Claim up to ``limit`` jobs, and return their keys."""
    connection.execute("BEGIN IMMEDIATE")
    rows = connection.execute(CLAIM, ("token", limit)).fetchall()
    connection.execute("COMMIT")
    return [row[0] for row in rows]


def complete(connection: sqlite3.Connection, keys: list[int]) -> None:
    """Complete jobs."""
    connection.execute("BEGIN IMMEDIATE")
    connection.execute(COMPLETE, (str(keys), "token"))
    connection.execute("COMMIT")


def drain(path: Path, synchronous: str, batch: int) -> int:
    """Run all jobs, and return how many."""
    connection, done = connect(path, synchronous), 0
    while keys := claim(connection, batch):
        complete(connection, keys)
        done += len(keys)
    connection.close()
    return done


def serve(path: Path, synchronous: str, wake: threading.Event, begun: Callable[[], None], number: int) -> None:
    """Run ``number`` jobs, one by one, each when ``wake`` is set."""
    connection = connect(path, synchronous)
    for _ in range(number):
        wake.wait()
        wake.clear()
        while not (keys := claim(connection, 1)):
            time.sleep(0.001)
        begun()
        complete(connection, keys)
    connection.close()
