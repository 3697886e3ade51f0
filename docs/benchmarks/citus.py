"""``python -m docs.benchmarks.citus BIN_DIR`` prints the table of Citus in docs/evidence/engines.md.

It measures a loop of plain statements and the library, on plain PostgreSQL and on each placement of Citus, in turns.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import sqlalchemy as sa

from docs.benchmarks.beside_raw.measures import Case, Make, Parts, cell, drains, enqueues, latency, medians, polled
from docs.benchmarks.beside_raw.sides import LibrarySide, RawSide
from sqlaqueue.citus import Distribution
from tests.citus.cluster import CitusDatabase, Cluster, major_version, running
from tests.citus.conftest import schema_in
from tests.citus.models import DISTRIBUTE, TENANTS, execute, models_for
from tests.consumer.models import Models, models
from tests.servers import SETTINGS, Server

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterator

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


@contextlib.contextmanager
def plain(bin_directory: Path, home: Path) -> Iterator[CitusDatabase]:
    """Start a PostgreSQL without Citus."""
    server = Server(major_version(bin_directory), bin_directory, home / "plain").create(SETTINGS)
    try:
        yield CitusDatabase.of_url(server.url())
    finally:
        server.remove()


@contextlib.contextmanager
def emptied(side: type[RawPostgreSQL | LibraryPostgreSQL], places: list[Place], tables: set[str]) -> Iterator[Parts]:
    """Delete the jobs of the measurement before."""
    for url in tables:
        engine = sa.create_engine(url)
        execute(engine, "TRUNCATE job")
        engine.dispose()
    yield [side(place) for place in places]


class Placements:
    """The tables of all placements, until the end of a stack."""

    def __init__(self, stack: contextlib.ExitStack, plain_database: CitusDatabase, citus: CitusDatabase) -> None:
        self._stack, self._plain, self._citus = stack, plain_database, citus

    def table(self, where: CitusDatabase, *, sharded: bool = False, notify: bool = False) -> Place:
        """Create a table in a schema."""
        # Without Citus, the setting that shards a schema is a word without a meaning.
        own = self._stack.enter_context(schema_in(where, sharded=sharded))
        return self._created(Place(own, notify=notify))

    def distributed(self) -> list[Place]:
        """Create a distributed table, whose tenants are divided among two processes."""
        own = self._stack.enter_context(schema_in(self._citus, sharded=False))
        halves = [Place(own, tuple(range(first, TENANTS, 2))) for first in (0, 1)]
        self._created(halves[0], *DISTRIBUTE)
        return halves

    def _created(self, place: Place, *statements: str) -> Place:
        engine = sa.create_engine(place.database.url())
        place.models.base.metadata.create_all(engine)
        execute(engine, *statements)
        engine.dispose()
        return place

    def polling(self) -> dict[str, tuple[Make, Make]]:
        """Return the two sides of each placement."""
        schemas = [self.table(self._citus, sharded=True) for _ in range(2)]
        urls = {place.database.url() for place in schemas}
        straight = [Place(place.database.node_of("job")) for place in schemas]
        return {
            "plain PostgreSQL": sides([self.table(self._plain)]),
            "local table on the coordinator": sides([self.table(self._citus)]),
            "two schemas, by the coordinator": sides(schemas),
            "two schemas, straight at their workers": sides(straight, urls),
            "distributed table, by the coordinator": sides(self.distributed()),
        }

    def notified(self) -> dict[str, tuple[Make, Make]]:
        """Return the two sides of those whose workers can be notified."""
        return {
            "plain PostgreSQL": sides([self.table(self._plain, notify=True)]),
            "local table on the coordinator": sides([self.table(self._citus, notify=True)]),
        }


def sides(places: list[Place], tables: set[str] | None = None) -> tuple[Make, Make]:
    """Return both sides of a placement.

    :param tables: the URLs by which the tables are emptied, if they are others.
    """
    tables = tables or {place.database.url() for place in places}
    return partial(emptied, RawPostgreSQL, places, tables), partial(emptied, LibraryPostgreSQL, places, tables)


def report(name: str, case: Case, placements: dict[str, tuple[Make, Make]], repeat: int) -> None:
    """Measure a case on all placements in turns, and print the rows."""
    found = medians(case, [side for both in placements.values() for side in both], repeat)
    for number, placement in enumerate(placements):
        alone, ours = found[2 * number : 2 * number + 2]
        cells = (f"{cell(name, value)} ({value / of:.2f})" for value, of in zip((alone, ours), found[:2], strict=True))
        sys.stdout.write(f"| {name} | {placement} | {' | '.join(cells)} | {ours / alone:.2f} |\n")
    sys.stdout.flush()


def measure(cluster: Cluster, bin_directory: Path, jobs: int, repeat: int) -> None:
    """Print the rows of all cases."""
    singles = min(25, jobs // 10)
    with (
        cluster.database() as database,
        plain(bin_directory, cluster.coordinator.directory.parent) as plain_database,
        contextlib.ExitStack() as stack,
    ):
        placements = Placements(stack, plain_database, database)
        polling, notified = placements.polling(), placements.notified()
        for name, case in (*enqueues(jobs), *drains(jobs, 100, (2,)), *polled(singles)):
            report(name, case, polling, repeat)
        name = "commit to handler in another process that is notified, median, ms"
        report(name, partial(latency, jobs=singles, elsewhere=True), notified, repeat)


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m docs.benchmarks.citus", description=__doc__)
    parser.add_argument("bin_directory", metavar="BIN_DIR", type=Path)
    parser.add_argument("--jobs", type=int, default=8_000)
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    sys.stdout.write("| | placement | psycopg alone | sqlaqueue | ratio |\n| --- | --- | --- | --- | --- |\n")
    with running(options.bin_directory) as cluster:
        measure(cluster, options.bin_directory, options.jobs, options.repeat)


if __name__ == "__main__":
    main()
