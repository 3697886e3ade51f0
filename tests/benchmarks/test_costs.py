"""The costs of a job that do not depend on the machine: statements, round trips, WAL and dead rows.

They are counted while a Consumer runs, between the ends of two batches, so that startup and shutdown are not included.
Full page writes and autovacuum are off, as they depend on time.

- *Statements* are those that SQLAlchemy sends, without BEGIN and COMMIT.
- *Round trips* are the ReadyForQuery messages of the protocol, including those for BEGIN, COMMIT and PREPARE.
- *WAL bytes* are the difference of two positions in the WAL.
- *Dead rows* are updates and deletes of the job, and of the side tables of the strategy.
"""

import contextlib
import itertools
import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import psycopg
import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session, sessionmaker

from docs.benchmarks.systems import STRATEGIES
from docs.benchmarks.systems.protocol import payloads
from docs.benchmarks.systems.sqlaqueue_consumer import make_model
from docs.benchmarks.tables import PAGE, fill
from sqlaqueue import Consumer
from sqlaqueue.consumer.in_flight import CompletionBuffer
from sqlaqueue.consumer.maintenance import handlers_running
from tests import servers
from tests.servers import Database, Server

pytestmark = pytest.mark.once

ADVICE = "To accept the new counts, run `python -m tests.benchmarks costs --write`."

FILE = Path(__file__).with_name("costs.json")
TOLERANCES = {"statements": 0.02, "round_trips": 0.02, "wal_bytes": 0.03, "dead_rows": 0.02}
"""The relative tolerance of each count. The WAL depends on page splits of indexes."""
MAINTENANCE = {"statements": 2, "round_trips": 7}
"""The absolute tolerance of each count, for a heartbeat or a rescue while counting.

Each is a statement with its BEGIN and COMMIT, and one more round trip to prepare it.
"""
Counts = dict[str, float]


@dataclass(frozen=True)
class Drain:
    """A drain whose costs are counted.

    :param batches: number of batches; counting starts after the third one and ends before the last two.
    :param uses_session: whether the handler executes a statement.
    """

    strategy: str
    on_complete: str
    batch: int
    batches: int
    uses_session: bool = False

    @property
    def name(self) -> str:
        """Its name in costs.json."""
        return f"{self.strategy}, {self.on_complete}, batches of {self.batch}{', session used' * self.uses_session}"


DRAINS = [
    Drain(strategy, on_complete, batch, batches)
    for strategy in STRATEGIES
    for on_complete, batch, batches in (("keep", 1, 65), ("keep", 10, 35), ("keep", 100, 15), ("delete", 100, 15))
] + [Drain(strategy, "keep", 10, 35, uses_session=True) for strategy in STRATEGIES]
ENQUEUEING = {"in one transaction": 1000, "one by one": 100}


class Counter:
    """Counts the costs of an engine's connections, from `begin` to `end`."""

    def __init__(self, engine: sa.Engine, database: Database) -> None:
        self._engine = engine
        self._admin = database.connect()
        self._traces: list[Any] = []
        self._statements = 0
        self._before: tuple[int, int, int] = (0, 0, 0)
        sa.event.listen(engine, "connect", self._trace)
        sa.event.listen(engine, "before_cursor_execute", self._count)

    def _trace(self, connection: psycopg.Connection[Any], _: Any) -> None:
        file = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the counter
        connection.pgconn.trace(file.fileno())
        self._traces.append(file)

    def _count(self, *_: Any) -> None:
        self._statements += 1

    def _now(self) -> tuple[int, int, int]:
        (position,) = self._admin.execute("SELECT pg_current_wal_insert_lsn() - '0/0'").fetchone() or (0,)
        trips = 0
        for file in self._traces:
            trips += Path(f"/dev/fd/{file.fileno()}").read_bytes().count(b"\tReadyForQuery\t")
        return self._statements, trips, int(position)

    def begin(self) -> None:
        """Start counting."""
        self._before = self._now()

    def end(self) -> Counts:
        """Return the counts since `begin`."""
        counts = (after - before for before, after in zip(self._before, self._now(), strict=True))
        return dict(zip(("statements", "round_trips", "wal_bytes"), map(float, counts), strict=True))

    def close(self) -> None:
        """Stop counting."""
        sa.event.remove(self._engine, "connect", self._trace)
        sa.event.remove(self._engine, "before_cursor_execute", self._count)
        self._admin.close()
        for file in self._traces:
            file.close()


@contextlib.contextmanager
def without_haste() -> Iterator[None]:
    """Release no job that waits, and settle no run before its worker does: both need other statements.

    A slow machine would have maintenance do so.
    """
    with (
        mock.patch.multiple(handlers_running, LATE=600.0, LONGEST_IN_BUFFER=600.0),
        mock.patch.object(CompletionBuffer, "is_overdue", return_value=False),
    ):
        yield


def count_drain(database: Database, drain: Drain) -> Counts:
    """Count the costs of a job in a drain."""
    with _queue(database, {"strategy": drain.strategy, "on_complete": drain.on_complete}) as (engine, model):
        jobs = drain.batch * drain.batches
        with Session(engine) as session:
            session.add_all(model(**job) for job in payloads(jobs))
            session.commit()
        engine.dispose()
        before = _dead_rows(database)
        counter = Counter(engine, database)

        def handle(session: Session, _: Any) -> None:
            if drain.uses_session:
                session.execute(sa.text("SELECT 1"))

        consumer: Consumer[Any] = Consumer(model, handle, sessionmaker(engine), batch_size=drain.batch)

        counts: Counts = {}
        ended = itertools.count(1)

        def completed(_: Any) -> None:
            number = next(ended)
            if number == 3 * drain.batch:
                counter.begin()
            elif number == (drain.batches - 2) * drain.batch:
                counts.update(counter.end())

        consumer.on("completed", completed)
        with without_haste():
            assert consumer.drain() == jobs
        engine.dispose()
        counter.close()
        between = (drain.batches - 5) * drain.batch
        dead = _dead_rows(database) - before
    return {"jobs": between, **{what: number / between for what, number in counts.items()}, "dead_rows": dead / jobs}


def count_enqueueing(database: Database, options: dict[str, Any], way: str) -> Counts:
    """Count the costs of enqueueing a job."""
    jobs = ENQUEUEING[way]
    with _queue(database, options) as (engine, model):
        engine.dispose()
        counter = Counter(engine, database)
        with Session(engine) as session:
            # First allocate pages and prepare statements.
            session.add_all(model(**job) for job in payloads(jobs))
            session.commit()
            counter.begin()
            for chunk in [payloads(jobs)] if way == "in one transaction" else [payloads(1)] * jobs:
                session.add_all(model(**job) for job in chunk)
                session.commit()
            counts = counter.end()
        engine.dispose()
        counter.close()
    return {"jobs": jobs, **{what: number / jobs for what, number in counts.items()}}


@contextlib.contextmanager
def _queue(database: Database, options: dict[str, Any]) -> Iterator[tuple[sa.Engine, Any]]:
    """Create a queue in an empty database, and drop it afterwards."""
    model = make_model(options)
    engine = sa.create_engine(database.url("psycopg"))
    model.metadata.create_all(engine)
    try:
        yield engine, model
    finally:
        model.metadata.drop_all(engine)
        engine.dispose()


def _dead_rows(database: Database) -> int:
    """Return the number of dead rows, without those of heartbeats."""
    with database.connect() as connection:
        # Backends report their statistics when they exit.
        others = "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        while connection.execute(others).fetchone():
            time.sleep(0.005)
        dead = """
            SELECT coalesce(sum(n_tup_upd + n_tup_del), 0) FROM pg_stat_user_tables
            WHERE relname <> 'sqlaqueue_consumer'
        """
        return int((connection.execute(dead).fetchone() or (0,))[0])


def count_all(server: Server) -> dict[str, Counts]:
    """Count the costs of all cases.

    :param server: used by this function only, as it changes its settings.
    """
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        connection.execute("ALTER SYSTEM SET autovacuum = off")
        connection.execute("SELECT pg_reload_conf()")
    found: dict[str, Counts] = {}
    for drain in DRAINS:
        with server.database() as database:
            found[drain.name] = count_drain(database, drain)
    for name, options in _enqueued().items():
        for way in ENQUEUEING:
            with server.database() as database:
                found[f"{name}, enqueued {way}"] = count_enqueueing(database, options, way)
    return {name: {what: round(number, 4) for what, number in counts.items()} for name, counts in found.items()}


def _enqueued() -> dict[str, dict[str, Any]]:
    return {"no queue": {"plain": True}} | {
        strategy: {"strategy": strategy, "on_complete": "keep"} for strategy in STRATEGIES
    }


def increases(known: dict[str, Counts], found: dict[str, Counts], what: list[str]) -> list[str]:
    """Return the counts that have increased, or are new, as messages."""
    messages = []
    for name, counts in found.items():
        for each in what:
            if each not in counts:
                continue
            before, now = known.get(name, {}).get(each, 0.0), counts[each]
            if now > before * (1 + TOLERANCES[each]) + MAINTENANCE.get(each, 0) / counts["jobs"] + 1e-9:
                messages.append(f"{name}: {each} per job increased from {before:g} to {now:g}")
    return messages


def minimum(one: dict[str, Counts], other: dict[str, Counts]) -> dict[str, Counts]:
    """Return the smaller one of two values of each count."""
    return {name: {what: min(number, other[name][what]) for what, number in one[name].items()} for name in one}


def main(*, write: bool) -> int:
    """Count the costs and compare them with costs.json, or write that file."""
    (version,) = servers.choose_versions("newest", servers.find_installations())
    with servers.running([version]) as running, running.own(version) as server:
        found = count_all(server)
    known = json.loads(FILE.read_text())["costs"] if FILE.exists() else {}
    for name, counts in found.items():
        print(name)
        for what, number in counts.items():
            print(f"  {what:12} {known.get(name, {}).get(what, 0):>12g} -> {number:g}")
    if write:
        FILE.write_text(json.dumps({"postgres": version, "costs": found}, indent=1) + "\n")
        fill([], PAGE)
        return 0
    more = increases(known, found, list(TOLERANCES))
    print(*more, sep="\n")
    return 1 if more else 0


def test_the_costs_of_a_job_do_not_increase(postgres_server: Server) -> None:
    known = json.loads(FILE.read_text())
    # WAL and dead rows differ between versions of PostgreSQL; statements and round trips do not.
    same = postgres_server.version == known["postgres"]
    what = list(TOLERANCES) if same else ["statements", "round_trips"]
    found = count_all(postgres_server)
    if increases(known["costs"], found, what):
        # A pause of the machine may cause maintenance tasks while counting, but hardly twice.
        found = minimum(found, count_all(postgres_server))
    more = increases(known["costs"], found, what)
    assert not more, "\n".join([*more, ADVICE])


def test_the_file_has_all_counts() -> None:
    names = {drain.name for drain in DRAINS}
    assert names <= set(json.loads(FILE.read_text())["costs"])


def test_increases_are_reported() -> None:
    known = {"a": {"jobs": 100.0, "statements": 0.2, "wal_bytes": 500.0}}
    same = {"a": {"jobs": 100.0, "statements": 0.22, "wal_bytes": 514.0}}
    assert increases(known, same, ["statements", "wal_bytes"]) == []
    more = {"a": {"jobs": 100.0, "statements": 0.3, "wal_bytes": 600.0}}
    assert increases(known, more, ["statements", "wal_bytes"]) == [
        "a: statements per job increased from 0.2 to 0.3",
        "a: wal_bytes per job increased from 500 to 600",
    ]


def test_the_minimum_of_two_counts() -> None:
    one = {"a": {"jobs": 10.0, "statements": 2.0, "dead_rows": 1.0}}
    other = {"a": {"jobs": 10.0, "statements": 1.0, "dead_rows": 3.0}}
    assert minimum(one, other) == {"a": {"jobs": 10.0, "statements": 1.0, "dead_rows": 1.0}}


def test_new_counts_are_reported() -> None:
    assert increases({}, {"a": {"jobs": 1000.0, "wal_bytes": 1.0}}, ["wal_bytes"])
