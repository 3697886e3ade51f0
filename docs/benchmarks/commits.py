"""Commits of an application that enqueues, beside the same without the trigger that wakes Consumers.

    python -m docs.benchmarks run --workload commits

Sessions of pgbench insert one job in each transaction, with and without the trigger, in turn. Consumers run in
processes of their own, with a handler that does nothing. They poll twenty times a second as well, so that they keep up
without the trigger. Each measurement begins with an empty queue.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import re
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import Any

import psycopg
import sqlalchemy as sa
from sqlalchemy.orm import sessionmaker

from docs.benchmarks.server import BenchServer
from docs.benchmarks.systems.sqlaqueue_consumer import make_model
from sqlaqueue import Consumer
from sqlaqueue.mapping.mixin import spec_of
from sqlaqueue.notify_payloads import PENDING
from sqlaqueue.postgresql.triggers import PREFIX, channel_of

CASES = {"16 sessions": 16, "64 sessions": 64}
SYSTEMS = {"no Consumer": 0, "1 Consumer": 1, "8 Consumers": 8}
PAIRS, SECONDS = 5, 3.0

_SPAWN = multiprocessing.get_context("spawn")


def measure(server: BenchServer, case: str, system: str, factor: float = 1.0) -> dict[str, float]:
    """Return the commits a second, the median of the ratios of pairs, and the notifications of a thousand commits."""
    seconds, pairs = max(factor * SECONDS, 1.0), PAIRS if factor == 1 else 1
    model = _model()
    with server.database() as url:
        engine = sa.create_engine(url.replace("postgresql:", "postgresql+psycopg:"))
        model.metadata.create_all(engine)
        found = list[tuple[float, float, int]]()
        with _consumers(url, SYSTEMS[system]), tempfile.NamedTemporaryFile("w", suffix=".sql") as script:
            script.write(_insert())
            script.flush()
            for number in range(pairs):
                rates = dict[bool, float]()
                notified = 0
                for triggers in (True, False) if number % 2 else (False, True):
                    _empty(engine, model, consumed=SYSTEMS[system] > 0, triggers=triggers)
                    server.checkpoint()
                    with _counted(url, model) as count:
                        rates[triggers] = _pgbench(server, url, script.name, CASES[case], seconds)
                    notified += count[0] if triggers else 0
                found.append((rates[True], rates[True] / rates[False], notified))
        engine.dispose()
    commits = statistics.median(rate for rate, _, _ in found)
    return {
        "commits_per_second": commits,
        "kept": statistics.median(ratio for _, ratio, _ in found),
        "notifications": statistics.median(1000 * number / (rate * seconds) for rate, _, number in found),
    }


def _model() -> Any:
    return make_model({"strategy": "update_status", "on_complete": "delete"})


def _insert() -> str:
    columns = {"recipient": "'a'", "subject": "'b'", "note": "'c'", "reference": "'d'", "language": "'en'"}
    columns |= {"account": "1", "amount": "1", "share": "0.5", "urgent": "false", "sent": "0"}
    return f"INSERT INTO {_model().__tablename__} ({', '.join(columns)}) VALUES ({', '.join(columns.values())});\n"


def _serve(url: str, started: Any) -> None:
    engine = sa.create_engine(url.replace("postgresql:", "postgresql+psycopg:"))
    consumer = Consumer(_model(), _nothing, sessionmaker(engine), concurrency=1, poll_interval=0.05)
    threading.Thread(target=lambda: (time.sleep(3), started.set()), daemon=True).start()
    consumer.run()


def _nothing(session: Any, job: Any) -> None:
    pass


@contextlib.contextmanager
def _consumers(url: str, number: int) -> Iterator[None]:
    started = [_SPAWN.Event() for _ in range(number)]
    processes = [_SPAWN.Process(target=_serve, args=(url, each)) for each in started]
    for process in processes:
        process.start()
    try:
        for each in started:
            assert each.wait(60), "a Consumer has not started"
        yield
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.join()


def _empty(engine: sa.Engine, model: Any, *, consumed: bool, triggers: bool) -> None:
    table = model.__tablename__
    with engine.connect() as connection:
        while consumed and connection.scalar(sa.text(f"SELECT EXISTS (SELECT FROM {table})")):
            time.sleep(0.1)
            connection.rollback()
        connection.rollback()
        wakes = (
            "SELECT tgname FROM pg_trigger WHERE tgrelid = cast(:table AS regclass) AND starts_with(tgname, :prefix)"
        )
        names = connection.scalars(sa.text(wakes), {"table": table, "prefix": PREFIX})
        for name in names.all():
            connection.exec_driver_sql(f'ALTER TABLE {table} {"ENABLE" if triggers else "DISABLE"} TRIGGER "{name}"')
        if not consumed:
            connection.exec_driver_sql(f"TRUNCATE {table}")
        connection.commit()


@contextlib.contextmanager
def _counted(url: str, model: Any) -> Iterator[list[int]]:
    """Count the announcements of jobs that arrive in a block."""
    count, ended = [0], threading.Event()
    listening = psycopg.connect(url, autocommit=True)
    listening.execute(f'LISTEN "{channel_of(spec_of(model))}"'.encode())

    def receive() -> None:
        while not ended.is_set():
            count[0] += sum(each.payload.startswith(PENDING) for each in listening.notifies(timeout=0.2))

    thread = threading.Thread(target=receive)
    thread.start()
    try:
        yield count
    finally:
        time.sleep(0.3)
        ended.set()
        thread.join()
        listening.close()


def _pgbench(server: BenchServer, url: str, script: str, sessions: int, seconds: float) -> float:
    command = [server.programs / "pgbench", "-n", "-M", "prepared", "-c", sessions, "-j", 2, "-T", round(seconds)]
    done = subprocess.run([*map(str, command), "-f", script, url], capture_output=True, text=True, check=True)
    found = re.search(r"tps = ([\d.]+)", done.stdout)
    assert found is not None, done.stdout + done.stderr
    return float(found[1])
