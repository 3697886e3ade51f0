"""An open snapshot: jobs arrive at a steady rate while another transaction keeps dead rows from being removed.

``python -m docs.benchmarks snapshot`` measures each strategy for half an hour and the peers for ten minutes, appends a
line of JSON to its output for each minute, and then writes the table and the picture. A system that is measured again
replaces its lines.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psycopg

from docs.benchmarks import installations
from docs.benchmarks.report import quantile
from docs.benchmarks.run import about
from docs.benchmarks.server import BenchServer, bench_server
from docs.benchmarks.system_under_test import Program, SystemUnderTest, Workers
from docs.benchmarks.systems import STRATEGIES, SYSTEMS, System
from docs.benchmarks.tables import BLOCK, PAGE, measured_on, significant
from docs.benchmarks.workloads import FULL

RATE = 800
"""Jobs a second."""

STEP = 0.1
"""Seconds between two transactions that enqueue."""

OURS = [f"sqlaqueue {strategy} sync delete (defaults)" for strategy in STRATEGIES]
PEERS = ["graphile-worker (tuned)", "pgqueuer (tuned)"]

PICTURE = PAGE.parents[1] / "_static" / "snapshot.svg"
FIGURES = PICTURE.with_suffix(".jsonl")

# All tables, also those of the side: an open snapshot keeps their dead rows as well.
SIZES = """
SELECT coalesce(sum(n_dead_tup), 0), coalesce(sum(pg_table_size(relid)), 0), coalesce(sum(pg_indexes_size(relid)), 0)
FROM pg_stat_user_tables
"""


@dataclass(frozen=True)
class Minute:
    """The figures of one minute.

    :param minute: minutes from the start to the end of this one.
    :param rate: jobs that were handled a second.
    :param due: due jobs that are not finished, at the end.
    :param oldest: seconds for which the oldest of them has been due.
    :param p99: seconds from when a job was sent to its handler, which 99 % of the jobs of this minute did not exceed.
    :param cpu: the share of one core that the server has used.
    :param held: for how many transactions the snapshot has been open.
    """

    minute: float
    rate: float
    sent: float
    due: int
    oldest: float
    p99: float
    cpu: float
    dead: int
    table_mib: float
    index_mib: float
    held: int


class SteadyLoad:
    """Enqueues jobs at a rate; after a delay the missing ones follow.

    :param rate: jobs a second.
    """

    def __init__(self, sut: SystemUnderTest, rate: float) -> None:
        self._sut, self._rate, self._start = sut, rate, time.perf_counter()
        self._asked, self._running = 0, 0
        self._enqueuer: Program | None = None

    @property
    def sent(self) -> int:
        """How many jobs have been enqueued, without those of the request that is being executed."""
        return self._asked - self._running

    def go_on(self) -> None:
        """Request the jobs of the next second, if the last request is done."""
        if self._enqueuer is not None:
            if not self._enqueuer.has_event("enqueued"):
                return
            self._enqueuer.wait_for("enqueued")
        wanted = int((time.perf_counter() - self._start + 1) * self._rate) - self._asked
        if wanted <= 0:
            self._enqueuer, self._running = None, 0
            return
        # Two seconds at most: a system that falls behind is not sent one huge transaction.
        jobs = min(wanted, int(2 * self._rate))
        chunk = max(int(self._rate * STEP), 1)
        self._enqueuer = self._sut.request_enqueue(jobs, chunk=chunk, way="bulk", interval=STEP)
        self._asked, self._running = self._asked + jobs, jobs


def measure(sut: SystemUnderTest, *, minutes: float, rate: float = RATE, every: float = 60.0) -> Iterator[Minute]:
    """Let jobs arrive while a snapshot is open, and yield the figures of each minute.

    :param every: the number of seconds that take the place of a minute.
    """
    with psycopg.connect(sut.url) as holder, sut.workers(handler="stamp") as workers:
        holder.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        holder.execute("SELECT 1")
        sampler = _Sampler(sut, workers, holder.info.backend_pid)
        workers.go()
        load, start, number = SteadyLoad(sut, rate), time.perf_counter(), 0
        while number * every < minutes * 60:
            number += 1
            while time.perf_counter() < start + number * every:
                load.go_on()
                workers.check()
                time.sleep(0.02)
            yield sampler.sample(load.sent)
        holder.rollback()


class _Sampler:
    """Reads the figures of a minute."""

    def __init__(self, sut: SystemUnderTest, workers: Workers, holder: int) -> None:
        self._sut, self._workers, self._holder = sut, workers, holder
        self._start = self._before = time.perf_counter()
        self._jobs, self._sent, self._cpu = 0, 0, sut.server.cpu()

    def sample(self, sent: int) -> Minute:
        # First what the queries below would change.
        now, jobs, cpu = time.perf_counter(), self._workers.jobs, self._sut.server.cpu()
        waits = [at - begin for begin, at in self._workers.take_stamps()]
        seconds = now - self._before
        dead, table, index = self._sut.row(SIZES)
        due, oldest = self._sut.row(self._sut.statements["due"] or "")
        [held] = self._sut.row(f"SELECT age(backend_xmin) FROM pg_stat_activity WHERE pid = {self._holder}")
        found = Minute(
            minute=(now - self._start) / 60,
            rate=(jobs - self._jobs) / seconds,
            sent=(sent - self._sent) / seconds,
            due=int(due),
            oldest=float(oldest or 0),
            p99=quantile(waits, 0.99) if waits else 0.0,
            cpu=(cpu - self._cpu) / seconds,
            dead=int(dead),
            table_mib=int(table) / 2**20,
            index_mib=int(index) / 2**20,
            held=int(held or 0),
        )
        self._before, self._jobs, self._sent, self._cpu = now, jobs, sent, cpu
        return found


# -- the command -------------------------------------------------------------------------------------------------------


def run(
    output: Path,
    *,
    minutes: float,
    peer_minutes: float,
    rate: float,
    every: float,
    only: Sequence[str],
    postgres: int | None,
) -> int:
    """Measure the systems one after the other; return the number of those that failed."""
    output.parent.mkdir(parents=True, exist_ok=True)
    names = [name for name in (*OURS, *PEERS) if not only or name.startswith(tuple(only))]
    failed = 0
    for system in installations.available([SYSTEMS[name] for name in names]):
        length = peer_minutes if system.name in PEERS else minutes
        print(f"{system.name}: {length:g} minutes at {rate:g} jobs a second", flush=True)
        kept = [line for line in read(output) if line["system"] != system.name]
        output.write_text("".join(json.dumps(line) + "\n" for line in kept))
        # A server for each: what one leaves behind must not slow down the next.
        with bench_server(postgres) as server:
            try:
                _measure(server, system, output, minutes=length, rate=rate, every=every)
            except Exception as error:  # noqa: BLE001 - the other systems are measured nevertheless
                failed += 1
                print(f"  FAILED: {error}", flush=True)
    return failed


def _measure(server: BenchServer, system: System, output: Path, *, minutes: float, rate: float, every: float) -> None:
    with SystemUnderTest.on(server, system) as sut, output.open("a") as file:
        info = about(server, FULL, repeat=1) | {"versions": {system.environment: sut.versions}}
        file.write(json.dumps({"system": system.name, "about": info}) + "\n")
        for minute in measure(sut, minutes=minutes, rate=rate, every=every):
            file.write(json.dumps({"system": system.name, **asdict(minute)}) + "\n")
            file.flush()
            text = ", ".join(f"{name} {value:,.4g}" for name, value in asdict(minute).items())
            print(f"  {text}", flush=True)


def read(path: Path) -> list[dict[str, Any]]:
    """Return the lines of all systems."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


# -- the table and the picture -----------------------------------------------------------------------------------------


def by_system(lines: Iterable[Mapping[str, Any]]) -> dict[str, list[Minute]]:
    """Return the minutes of each system, in the order of the table."""
    found: dict[str, list[Minute]] = {name: [] for name in (*OURS, *PEERS)}
    for line in lines:
        values = dict(line)
        name = values.pop("system")
        if "about" not in values:
            found[name].append(Minute(**values))
    return {name: minutes for name, minutes in found.items() if minutes}


def table(lines: Iterable[Mapping[str, Any]]) -> str:
    """Return some minutes of each system as a table in Markdown: the first, the last, and the last that all have."""
    heads = [
        "minute",
        "jobs/s",
        "due",
        "oldest, s",
        "p99, s",
        "server, cores",
        "dead rows",
        "tables, MiB",
        "indexes, MiB",
    ]
    rows = ["| | " + " | ".join(heads) + " |", "| --- |" + " --: |" * len(heads)]
    measured = by_system(lines)
    common = min(map(len, measured.values()), default=0)
    for name, minutes in measured.items():
        for one in dict.fromkeys((minutes[0], minutes[common - 1], minutes[-1])):
            figures = [one.oldest, one.p99, one.cpu, one.dead, one.table_mib, one.index_mib]
            cells = [f"{one.minute:.3g}", significant(one.rate), str(one.due), *map(significant, figures)]
            rows.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(rows)


def block(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return when and with what the systems were measured, the table and the picture."""
    infos = [line["about"] for line in lines if "about" in line]
    picture = f"![Rate, backlog, CPU and dead rows over time](../_static/{PICTURE.name})"
    figures = f"[The figures of each minute](../_static/{FIGURES.name})"
    return f"{measured_on(infos, '1 run')}\n\n{table(lines)}\n\n{picture}\n\n{figures}"


def publish(lines: Sequence[Mapping[str, Any]]) -> None:
    """Write the table, the picture and the figures into the documentation."""
    draw(lines, PICTURE)
    FIGURES.write_text("".join(json.dumps(line) + "\n" for line in lines))
    blocks = {"snapshot": block(lines)}
    PAGE.write_text(BLOCK.sub(lambda b: f"{b[1]}{blocks[b[2]]}\n{b[4]}" if b[2] in blocks else b[0], PAGE.read_text()))


CHARTS = (
    ("rate", "jobs a second", "linear"),
    ("due", "due jobs", "symlog"),
    ("cpu", "cores used by the server", "linear"),
    ("dead", "dead rows", "linear"),
)


def draw(lines: Iterable[Mapping[str, Any]], path: Path) -> None:
    """Draw the figures over time, a line for each system."""
    import matplotlib as mpl

    # The picture is a file, so no window is needed.
    mpl.use("svg")
    from matplotlib import pyplot as plt

    colours = dict(zip((*OURS, *PEERS), ("#2b6cb0", "#2c7a7b", "#6b46c1", "#c05621", "#718096"), strict=True))
    figure, axes = plt.subplots(2, 2, figsize=(9, 6), sharex=True, layout="constrained", facecolor="white")
    for axis, (name, title, scale) in zip(axes.flat, CHARTS, strict=True):
        for system, minutes in by_system(lines).items():
            values = [getattr(minute, name) for minute in minutes]
            axis.plot([minute.minute for minute in minutes], values, color=colours[system], label=system, linewidth=1.3)
        axis.set_yscale(scale)
        axis.set_ylim(bottom=0)
        axis.set_title(title, fontsize=9, loc="left")
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    for axis in axes[-1]:
        axis.set_xlabel("minutes with an open snapshot", fontsize=8)
    figure.legend(
        *axes.flat[0].get_legend_handles_labels(), fontsize=8, frameon=False, loc="outside lower center", ncols=2
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
