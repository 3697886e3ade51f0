"""A queue on plain psycopg, and the same with sqlaqueue, on one place of its tables."""

from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass
from typing import Any

import psycopg
import sqlalchemy as sa

from docs.benchmarks.beside_raw.sides import LibrarySide, RawSide
from sqlaqueue import Distribution
from tests.citus.cluster import CitusDatabase
from tests.citus.models import models_for
from tests.consumer.models import Models, models

KEYS = itertools.count(1)
"""The keys of jobs, which only one process enqueues. Workers cannot draw keys of type integer from a sequence."""

CLAIM = """
UPDATE job SET status = 'processing', attempts = attempts + 1, lease_expires_at = now() + interval '1 minute'
WHERE {where} id = ANY (ARRAY(
  SELECT id FROM job WHERE {where} status = 'pending' AND run_at <= now() ORDER BY priority, run_at, id LIMIT %s
  FOR NO KEY UPDATE SKIP LOCKED))
RETURNING id
"""
COMPLETE = """
UPDATE job SET status = 'completed', finished_at = now(), lease_expires_at = NULL WHERE {where} id = ANY (%s)
"""


@dataclass(frozen=True)
class Place:
    """Where the tables are.

    :param tenants: the values that a process serves; none if the table is not distributed.
    :param notify: workers are notified of new jobs.
    """

    database: CitusDatabase
    tenants: tuple[int, ...] = ()
    notify: bool = False

    @property
    def models(self) -> Models:
        return models_for("distributed" if self.tenants else "schema") if not self.notify else models("update_status")

    def new_keys(self, number: int) -> list[dict[str, int]]:
        """Return the keys of new jobs."""
        keys = itertools.islice(KEYS, number)
        if not self.tenants:
            return [{"id": key} for key in keys]
        return [{"tenant": self.tenants[key % len(self.tenants)], "id": key} for key in keys]


@dataclass
class RawPostgreSQL(RawSide):
    """Two plain statements for each batch."""

    place: Place

    def __post_init__(self) -> None:
        self._conditions = [f"tenant = {tenant} AND" for tenant in self.place.tenants] or [""]

    def connect(self) -> psycopg.Connection[Any]:
        return psycopg.connect(self.place.database.dsn)

    def insert(self, connection: Any, number: int) -> None:
        keys = self.place.new_keys(number)
        row = f"({', '.join(['%s'] * len(keys[0]))}, 'x')"
        statement = f"INSERT INTO job ({', '.join(keys[0])}, payload) VALUES {', '.join([row] * number)}"
        connection.execute(statement, [value for key in keys for value in key.values()])
        if self.place.notify:
            connection.execute("SELECT pg_notify('raw', '')")

    def claim(self, connection: Any, limit: int) -> list[int]:
        for _ in self._conditions:
            keys = [key for (key,) in connection.execute(CLAIM.format(where=self._conditions[0]), [limit])]
            if keys:
                return keys
            connection.commit()
            # The jobs of the next tenant, until it has none as well.
            self._conditions.append(self._conditions.pop(0))
        return []

    def complete(self, connection: Any, keys: list[int]) -> None:
        connection.execute(COMPLETE.format(where=self._conditions[0]), [keys])

    def wait(self, connection: Any, wake: threading.Event, seconds: float | None) -> None:
        if not self.place.notify:
            super().wait(connection, wake, seconds)
            return
        connection.execute("LISTEN raw")
        connection.commit()
        for _ in connection.notifies(timeout=1, stop_after=1):
            pass


@dataclass(frozen=True)
class LibraryPostgreSQL(LibrarySide):
    """The same with the library."""

    place: Place

    @property
    def model(self) -> Any:
        return self.place.models.job

    @property
    def options(self) -> dict[str, Any]:
        return {"distribution": Distribution("tenant", self.place.tenants)} if self.place.tenants else {}

    def connect(self) -> sa.Engine:
        return sa.create_engine(self.place.database.url())

    def new(self) -> Any:
        return self.model(payload="x", **self.place.new_keys(1)[0])
