"""Measure how many jobs a second two Consumers complete, on plain PostgreSQL and on each placement of Citus.

``python -m tests.citus.rates BIN_DIR [JOBS] [ROUNDS]`` drains ``JOBS`` jobs with two processes and prints the median of
the rounds, which go through all placements one after the other. A loop of two plain statements drains as many beside.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import sqlalchemy as sa
from sqlalchemy.orm import sessionmaker

from sqlaqueue import Consumer, Distribution
from tests.citus.cluster import CitusDatabase, Cluster, major_version, running
from tests.citus.conftest import schema_in
from tests.citus.models import TENANTS, create, models_for
from tests.servers import SETTINGS, Server

BATCH = 100
PROCESSES = 2


@dataclass(frozen=True)
class Part:
    """What one process drains."""

    url: str
    dsn: str
    placement: str
    tenants: tuple[int, ...] = ()


@contextlib.contextmanager
def tables(database: CitusDatabase, placement: str, *, sharded: bool) -> Iterator[CitusDatabase]:
    """Create the tables in a schema."""
    with schema_in(database, sharded=sharded) as own:
        engine = sa.create_engine(own.url())
        create(engine, placement)
        engine.dispose()
        yield own


def part(database: CitusDatabase, placement: str, tenants: tuple[int, ...] = ()) -> Part:
    return Part(database.url(), database.dsn, placement, tenants)


def enqueue(one: Part, jobs: int, first: int) -> float:
    """Insert jobs in transactions of 1,000, and return the seconds that it took.

    :param first: the first key. Workers cannot draw keys of type integer from a sequence.
    """
    engine = sa.create_engine(one.url)
    sessions, job = sessionmaker(engine), models_for(one.placement).job
    began = time.perf_counter()
    for start in range(first, first + jobs, 1000):
        with sessions() as session:
            for key in range(start, start + 1000):
                values = {"tenant": one.tenants[key % len(one.tenants)]} if one.tenants else {}
                session.add(job(id=key, **values))
            session.commit()
    took = time.perf_counter() - began
    engine.dispose()
    return took


def drain(one: Part, ready: Any, ended: Any) -> None:
    """Drain with a Consumer, in a process of its own."""
    engine = sa.create_engine(one.url, pool_size=3)
    options: dict[str, Any] = {"batch_size": BATCH}
    if one.tenants:
        options["distribution"] = Distribution("tenant", one.tenants)
    consumer = Consumer(models_for(one.placement).job, lambda session, job: None, sessionmaker(engine), **options)
    ready.wait()
    ended.put(consumer.drain())
    engine.dispose()


RAW_CLAIM = """
UPDATE job SET status = 'processing', attempts = attempts + 1, lease_expires_at = now() + interval '1 minute'
WHERE {where} id = ANY (ARRAY(
  SELECT id FROM job WHERE {where} status = 'pending' AND run_at <= now() ORDER BY priority, run_at, id LIMIT {batch}
  FOR NO KEY UPDATE SKIP LOCKED))
RETURNING id
"""
RAW_COMPLETE = "UPDATE job SET status = 'completed', finished_at = now() WHERE {where} id = ANY (%s)"


def drain_raw(one: Part, ready: Any, ended: Any) -> None:
    """Drain with two plain statements for each batch."""
    done = 0
    with psycopg.connect(one.dsn) as connection:
        ready.wait()
        for tenant in one.tenants or (None,):
            where = "" if tenant is None else f"tenant = {tenant} AND"
            claim, complete = (text.format(where=where, batch=BATCH) for text in (RAW_CLAIM, RAW_COMPLETE))
            while keys := [key for (key,) in connection.execute(claim.encode())]:
                connection.commit()
                connection.execute(complete.encode(), [keys])
                connection.commit()
                done += len(keys)
    ended.put(done)


def seconds_of(parts: list[Part], work: Callable[..., None], jobs: int) -> float:
    """Return how long processes need for all jobs, from the moment at which all are ready."""
    context = multiprocessing.get_context("spawn")
    ready, ended = context.Barrier(len(parts) + 1), context.Queue()
    processes = [context.Process(target=work, args=(one, ready, ended)) for one in parts]
    for process in processes:
        process.start()
    ready.wait()
    began = time.perf_counter()
    done = sum(ended.get(timeout=300) for _ in parts)
    took = time.perf_counter() - began
    for process in processes:
        process.join()
    if done != jobs:
        raise RuntimeError(f"{done} of {jobs} jobs were done")
    return took


@contextlib.contextmanager
def plain(bin_directory: Path, home: Path) -> Iterator[CitusDatabase]:
    """Start a PostgreSQL without Citus."""
    server = Server(major_version(bin_directory), bin_directory, home / "plain").create(SETTINGS)
    try:
        yield CitusDatabase.of_url(server.url())
    finally:
        server.remove()


Setup = Callable[[contextlib.ExitStack], list[Part]]


def placements(plain_database: CitusDatabase, database: CitusDatabase, cluster: Cluster) -> dict[str, Setup]:
    """Return how to create the tables of each placement."""
    halves = (tuple(range(0, TENANTS, 2)), tuple(range(1, TENANTS, 2)))

    def one_table(where: CitusDatabase, *, citus: bool) -> Setup:
        def setup(stack: contextlib.ExitStack) -> list[Part]:
            made = tables(where, "schema", sharded=False) if citus else plain_tables(where)
            return [part(stack.enter_context(made), "schema")] * PROCESSES

        return setup

    def schemas(stack: contextlib.ExitStack, *, straight: bool) -> list[Part]:
        found = []
        for _ in range(PROCESSES):
            own = stack.enter_context(tables(database, "schema", sharded=True))
            found.append(part(own.node_of("job") if straight else own, "schema"))
        return found

    def distributed(stack: contextlib.ExitStack) -> list[Part]:
        own = stack.enter_context(tables(database, "distributed", sharded=False))
        return [part(own, "distributed", half) for half in halves]

    return {
        "plain PostgreSQL": one_table(plain_database, citus=False),
        "local table on the coordinator": one_table(database, citus=True),
        "two schemas, by the coordinator": lambda stack: schemas(stack, straight=False),
        "two schemas, straight at their workers": lambda stack: schemas(stack, straight=True),
        "distributed table, by the coordinator": distributed,
    }


@contextlib.contextmanager
def plain_tables(database: CitusDatabase) -> Iterator[CitusDatabase]:
    engine = sa.create_engine(database.url())
    metadata = models_for("schema").base.metadata
    metadata.create_all(engine)
    yield database
    metadata.drop_all(engine)
    engine.dispose()


def measure(setup: Setup, jobs: int) -> tuple[float, float, float]:
    """Return how many jobs a second are enqueued, run by Consumers, and done by the plain loop."""
    rates = []
    for work in (drain, drain_raw):
        with contextlib.ExitStack() as stack:
            parts = setup(stack)
            each = jobs // len(parts)
            enqueueing = sum(enqueue(one, each, number * each) for number, one in enumerate(parts))
            rates.append(jobs / seconds_of(parts, work, each * len(parts)))
    return jobs / enqueueing, rates[0], rates[1]


def main() -> None:
    """Print the rates."""
    bin_directory = Path(sys.argv[1])
    jobs, rounds = (int(sys.argv[2]) if len(sys.argv) > 2 else 10_000), (int(sys.argv[3]) if len(sys.argv) > 3 else 3)
    with running(bin_directory) as cluster, cluster.database() as database:
        home = cluster.coordinator.directory.parent
        with plain(bin_directory, home) as plain_database:
            setups = placements(plain_database, database, cluster)
            measured: dict[str, list[tuple[float, float, float]]] = {name: [] for name in setups}
            for _ in range(rounds):
                for name, setup in setups.items():
                    measured[name].append(measure(setup, jobs))
    first: tuple[float, ...] = ()
    print("| placement | enqueued/s | Consumers, jobs/s | plain loop, jobs/s |")  # noqa: T201 - a command's output
    print("| --- | --- | --- | --- |")  # noqa: T201 - as above
    for name, found in measured.items():
        medians = tuple(statistics.median(values) for values in zip(*found, strict=True))
        first = first or medians
        cells = (f"{value:,.0f} ({value / of:.2f})" for value, of in zip(medians, first, strict=True))
        print(f"| {name} | {' | '.join(cells)} |")  # noqa: T201 - as above


if __name__ == "__main__":
    main()
