"""The costs of an attempt history: the same jobs are drained without it and with it, in turn, on one server.

A case names a strategy and what the handler does. An empty handler lets many runs be settled together. One that uses
its session has each run settled by itself, in its own transaction. One that raises has an error and a traceback stored.

- *Seconds* are those of the drain, *CPU* is that of the Consumer's process and of the server. Both include other
  work of the machine in part, so that the figures are medians of differences and ratios within a round.
- *WAL bytes* are the difference of two positions in the WAL. Full page writes and autovacuum are off.
"""

from __future__ import annotations

import logging
import os
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session, sessionmaker

from docs.benchmarks.server import BenchServer, bench_server
from docs.benchmarks.systems import STRATEGIES
from docs.benchmarks.systems.protocol import payloads
from docs.benchmarks.systems.sqlaqueue_consumer import make_model
from sqlaqueue import Consumer, Fail, copy_in

KEPT = 14 * 86400.0
SETTINGS = "autovacuum = off\nfull_page_writes = off"


def do_nothing(_: Session, __: Any) -> None:
    """Return at once."""


def use_session(session: Session, _: Any) -> None:
    """Execute a statement."""
    session.execute(sa.text("SELECT 1"))


def fail(_: Session, __: Any) -> None:
    """Fail."""
    raise Fail("an amount cannot be negative")


@dataclass(frozen=True)
class Case:
    """One comparison.

    :param name: unique.
    :param jobs: how many jobs are drained.
    """

    name: str
    strategy: str
    handler: Any
    jobs: int


CASES = [
    *(Case(f"{strategy}, settled together", strategy, do_nothing, 10_000) for strategy in STRATEGIES),
    Case("update_status, settled one by one", "update_status", use_session, 1_500),
    Case("update_status, failed", "update_status", fail, 3_000),
]


@dataclass(frozen=True)
class Figures:
    """What one drain took, for each job."""

    seconds: float
    client_cpu: float
    server_cpu: float
    wal_bytes: float


@dataclass(frozen=True)
class Comparison:
    """The medians of several rounds.

    :param ratio: the rate with the history, relative to that without.
    :param more_us: how many microseconds longer a job takes.
    :param cpu_without: the microseconds of CPU of the Consumer and the server for a job without the history.
    :param cpu_with: the same with it.
    """

    ratio: float
    more_us: float
    cpu_without: float
    cpu_with: float
    wal_without: float
    wal_with: float


def drain(server: BenchServer, case: Case, *, history: bool, factor: float = 1.0) -> Figures:
    """Drain the jobs of a case in a database of their own."""
    options = {"strategy": case.strategy, "on_complete": "keep", **({"history": KEPT} if history else {})}
    model, jobs = make_model(options), max(int(case.jobs * factor), 20)
    with server.database() as url:
        engine = sa.create_engine(url.replace("postgresql:", "postgresql+psycopg:"))
        model.metadata.create_all(engine)
        with Session(engine) as session:
            copy_in(session, model, payloads(jobs))
            session.commit()
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.execute(sa.text("VACUUM ANALYZE"))
        server.checkpoint()
        consumer: Consumer[Any] = Consumer(model, case.handler, sessionmaker(engine))
        before = _now(server, engine)
        consumer.drain()
        after = _now(server, engine)
        engine.dispose()
    return Figures(*((end - begin) / jobs for begin, end in zip(before, after, strict=True)))


def _now(server: BenchServer, engine: sa.Engine) -> tuple[float, float, float, float]:
    with engine.connect() as connection:
        wal = connection.execute(sa.text("SELECT pg_current_wal_insert_lsn() - '0/0'")).scalar_one()
    return time.perf_counter(), time.process_time(), server.cpu(), float(wal)


def compare(server: BenchServer, case: Case, rounds: int, *, factor: float = 1.0) -> Comparison:
    """Drain without and with the history in turn; which is first changes from round to round."""
    pairs = []
    for number in range(rounds):
        found = {history: drain(server, case, history=history, factor=factor) for history in _order(number)}
        pairs.append((found[False], found[True]))
    return Comparison(
        ratio=statistics.median(without.seconds / kept.seconds for without, kept in pairs),
        more_us=statistics.median(kept.seconds - without.seconds for without, kept in pairs) * 1e6,
        cpu_without=statistics.median(without.client_cpu + without.server_cpu for without, _ in pairs) * 1e6,
        cpu_with=statistics.median(kept.client_cpu + kept.server_cpu for _, kept in pairs) * 1e6,
        wal_without=statistics.median(without.wal_bytes for without, _ in pairs),
        wal_with=statistics.median(kept.wal_bytes for _, kept in pairs),
    )


def _order(number: int) -> Iterator[bool]:
    yield number % 2 == 1
    yield number % 2 == 0


def main(*, rounds: int) -> int:
    """Run all cases, and print a table for docs/evidence/attempt-history.md."""
    # A log of each failure would be most of what it measures.
    logging.getLogger("sqlaqueue").setLevel(logging.CRITICAL)
    print("| case | rate, with to without | more µs a job | CPU µs a job | WAL bytes a job |")
    print("| --- | --- | --- | --- | --- |")
    loads = [os.getloadavg()[0]]
    with bench_server(more=SETTINGS) as server:
        for case in CASES:
            found = compare(server, case, rounds)
            loads.append(os.getloadavg()[0])
            print(
                f"| {case.name} | {found.ratio:.2f} | {found.more_us:.0f} | {found.cpu_without:.0f} → "
                f"{found.cpu_with:.0f} | {found.wal_without:.0f} → {found.wal_with:.0f} |",
                flush=True,
            )
        print(f"\n{server.settings()}, {rounds} rounds, {len(os.sched_getaffinity(0))} cores")
    print(f"load averages before and after each case: {', '.join(f'{load:.1f}' for load in loads)}")
    return 0
