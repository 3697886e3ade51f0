"""Write the results into the tables of docs/evidence/benchmarks.md and docs/evidence/faults-compared.md.

A table is between ``<!-- table: NAME -->`` and ``<!-- /table -->``, and is replaced if there are results for it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from docs.benchmarks import report
from docs.benchmarks.report import Summary
from docs.benchmarks.systems import SYSTEMS

BLOCK = re.compile(r"(<!-- table: ([\w-]+) -->\n)(.*?)(<!-- /table -->)", re.DOTALL)

PAGE = Path(__file__).parents[1] / "evidence" / "benchmarks.md"
FAULTS_PAGE = PAGE.with_name("faults-compared.md")
COSTS = Path(__file__).parents[2] / "tests" / "benchmarks" / "costs.json"


@dataclass(frozen=True)
class Column:
    """A column of a table: one figure of one case.

    :param ratio: whether to show the ratio to the reference as well.
    :param show: formats a value.
    :param worst: whether to show the largest value of all runs instead of the median, as one loss is a loss.
    """

    head: str
    workload: str
    case: str
    figure: str
    show: Callable[[float], str]
    ratio: bool = False
    worst: bool = False


def significant(value: float) -> str:
    """Format a number with three significant digits, and a comma for thousands."""
    rounded = float(f"{value:.3g}")
    if abs(rounded) < 1:
        return f"{rounded:g}"
    return f"{rounded:,.{max(3 - len(str(int(abs(rounded)))), 0)}f}"


def whole(value: float) -> str:
    """Format a whole number."""
    return f"{value:.0f}"


def seconds(value: float) -> str:
    """Format a duration in seconds; an infinite one has no end."""
    return "never" if value == math.inf else f"{value:.1f}"


TABLES: dict[str, Sequence[Column]] = {
    "drain": [
        Column("1 process", "drain", "1 process", "jobs_per_second", significant, ratio=True),
        Column("2 processes", "drain", "2 processes", "jobs_per_second", significant, ratio=True),
        Column("server, µs a job", "drain", "1 process", "server_us_per_job", significant),
        Column("client, µs a job", "drain", "1 process", "client_us_per_job", significant),
        Column("WAL, bytes a job", "drain", "1 process", "wal_bytes_per_job", significant),
        Column("connections", "drain", "1 process", "connections", whole),
    ],
    "writing": [
        column
        for case in ("concurrency 1", "concurrency 8")
        for column in (
            Column(f"{case}, jobs/s", "writing", case, "jobs_per_second", significant, ratio=True),
            Column("client, µs a job", "writing", case, "client_us_per_job", significant),
            Column("server, µs a job", "writing", case, "server_us_per_job", significant),
        )
    ],
    "commits": [
        column
        for case in ("16 sessions", "64 sessions")
        for column in (
            Column(f"{case}, commits/s", "commits", case, "commits_per_second", significant),
            Column("kept", "commits", case, "kept", "{:.0%}".format),
            Column("notifications of 1,000", "commits", case, "notifications", significant),
        )
    ],
    "enqueue": [
        Column("one by one", "enqueue", "one by one", "rows_per_second", significant, ratio=True),
        Column("in chunks of 1,000", "enqueue", "in chunks", "rows_per_second", significant, ratio=True),
        Column("WAL, bytes a job", "enqueue", "in chunks", "wal_bytes_per_row", significant),
    ],
    "enqueue-orm": [
        Column("`add_all()`", "enqueue", "add_all", "rows_per_second", significant, ratio=True),
        Column("`insert()`", "enqueue", "insert", "rows_per_second", significant, ratio=True),
        Column("COPY", "enqueue", "copy", "rows_per_second", significant, ratio=True),
    ],
    "latency": [
        Column("idle, p50 ms", "latency", "idle", "p50_ms", significant, ratio=True),
        Column("idle, p99 ms", "latency", "idle", "p99_ms", significant),
        Column("the call itself, p50 ms", "latency", "idle", "enqueueing_p50_ms", significant),
        Column("1,000 jobs/s, p50 ms", "latency", "1,000 jobs/s, 8 workers", "p50_ms", significant),
        Column("1,000 jobs/s, p99 ms", "latency", "1,000 jobs/s, 8 workers", "p99_ms", significant),
    ],
    "idle": [
        Column("clients, ms of CPU a second", "latency", "50 idle workers", "client_ms_per_second", significant),
        Column("server, ms of CPU a second", "latency", "50 idle workers", "server_ms_per_second", significant),
        Column("connections", "latency", "50 idle workers", "connections", whole),
    ],
    "backlog": [
        Column(name, "backlog", name, "jobs_per_second", significant)
        for name in (
            "100 k ready",
            "1 M ready",
            "10 M ready",
            "1 M future, more urgent",
            "1 M finished",
            "1,000 priorities",
            "not analysed",
            "100 k after idling",
            "10 k locked at the head",
        )
    ],
    "claims": [
        column
        for name in ("100 k ready", "1 M ready", "10 M ready", "1 M future, more urgent", "1 M finished")
        for column in (
            Column(f"{name}: buffers", "backlog", name, "claim_buffers", significant),
            Column("ms", "backlog", name, "claim_ms", significant),
        )
    ],
    "horizon": [
        Column("first 10 s", "horizon", "60 s", "first_jobs_per_second", significant),
        Column("last 10 s", "horizon", "60 s", "last_jobs_per_second", significant),
        Column("kept", "horizon", "60 s", "kept", "{:.0%}".format),
        Column("kept without it", "horizon", "60 s without it", "kept", "{:.0%}".format),
    ],
    "scale": [
        Column(f"{number} processes", "scale", f"{number} processes", "jobs_per_second", significant)
        for number in (1, 2, 4, 8)
    ]
    + [
        Column("500 handlers of 50 ms", "scale", "500 handlers of 50 ms", "jobs_per_second", significant),
        Column("MiB after 100 k jobs", "scale", "1 M jobs", "early_mib", significant),
        Column("MiB after 1 M jobs", "scale", "1 M jobs", "late_mib", significant),
    ],
    "flow": [
        column
        for name in ("1 process of 1 thread", "2 processes of 4 threads")
        for column in (
            Column(name, "flow", name, "jobs_per_second", significant),
            Column("without", "flow", name, "plain_jobs_per_second", significant),
            Column("kept", "flow", name, "ratio", "{:.0%}".format),
            Column("too many", "flow", name, "too_many", whole),
        )
    ]
    + [
        Column("server, µs a job", "flow", "1 process of 1 thread", "server_us_per_job", significant),
        Column("without", "flow", "1 process of 1 thread", "plain_server_us_per_job", significant),
        Column("client, µs a job", "flow", "1 process of 1 thread", "client_us_per_job", significant),
        Column("without", "flow", "1 process of 1 thread", "plain_client_us_per_job", significant),
    ],
    "flow-admitted": [
        Column("jobs/s", "flow", "3 keys, handlers of 2 ms", "jobs_per_second", significant),
        Column("too many", "flow", "3 keys, handlers of 2 ms", "too_many", whole),
        Column("too many without", "flow", "3 keys, handlers of 2 ms", "plain_too_many", whole),
        Column("out of order", "flow", "3 keys, handlers of 2 ms", "out_of_order", whole),
        Column("killed: too many", "flow", "a process is killed", "too_many", whole),
        Column("ran twice", "flow", "a process is killed", "ran_twice", whole),
        Column("not run", "flow", "a process is killed", "not_run", whole),
        Column("jobs/s at the end", "flow", "a process is killed", "last_jobs_per_second", significant),
    ],
    "flow-claims": [
        column
        for name in ("10 k keys wait", "1 M dead entries of drained keys")
        for column in (
            Column(f"{name}: first, buffers", "flow_claims", name, "first_buffers", significant),
            Column("ms", "flow_claims", name, "first_ms", significant),
            Column("next, buffers", "flow_claims", name, "buffers", significant),
            Column("ms", "flow_claims", name, "ms", significant),
        )
    ],
    "flow-full": [
        Column("jobs", "flow_claims", "10 k keys, all but 10 at their limit", "jobs", whole),
        Column("buffers", "flow_claims", "10 k keys, all but 10 at their limit", "buffers", significant),
        Column("ms", "flow_claims", "10 k keys, all but 10 at their limit", "ms", significant),
        Column(
            "without room, buffers", "flow_claims", "10 k keys, all but 10 at their limit", "idle_buffers", significant
        ),
        Column("ms", "flow_claims", "10 k keys, all but 10 at their limit", "idle_ms", significant),
    ],
}
"""The columns of each table of `PAGE`, by its name."""

FAULT_TABLES: dict[str, Sequence[Column]] = {
    f"faults-{case.replace(' ', '-')}": [
        Column("lost", "faults", case, "lost", whole, worst=True),
        Column("twice", "faults", case, "twice", whole, worst=True),
        Column("not marked", "faults", case, "unfinished", whole, worst=True),
        Column("recovery, s", "faults", case, "recovery_s", seconds, worst=True),
        Column("longest wait, s", "faults", case, "longest_wait_s", seconds, worst=True),
        Column("rate kept", "faults", case, "kept", "{:.0%}".format),
        Column("exits", "faults", case, "exits", whole),
        Column(struck.replace("_", " "), "faults", case, struck, whole),
        Column("jobs", "faults", case, "committed", whole),
    ]
    for case, struck in {
        "processes killed": "cut_off",
        "sessions terminated": "terminated",
        "server crashed": "cut_off",
        "connections refused": "terminated",
    }.items()
} | {
    "faults-open-snapshot": [
        Column("first 10 s, jobs/s", "faults", "open snapshot", "first_jobs_per_second", significant),
        Column("last 10 s, jobs/s", "faults", "open snapshot", "last_jobs_per_second", significant),
        Column("rate kept", "faults", "open snapshot", "kept", "{:.0%}".format),
    ],
}
"""The columns of each table of `FAULTS_PAGE`, by its name."""


def fill(results: Iterable[Path], page: Path) -> None:
    """Replace the tables of a page."""
    paths = [path for path in results if path.exists()]
    samples, references = report.join(paths)
    summaries = report.summarise(samples, references)
    made = {name: table(columns, summaries) for name, columns in (TABLES | FAULT_TABLES).items()}
    made |= {"costs": costs_table(), "faults-settings": settings_table()}
    for name, subject in {"about": "", "flow-about": "flow", "faults-about": "faults"}.items():
        made[name] = about([path for path in paths if subject_of(path) == subject])

    def replaced(block: re.Match[str]) -> str:
        # The table of the snapshot is written by its own command.
        text = made.get(block[2])
        return f"{block[1]}{text}\n{block[4]}" if text else block[0]

    page.write_text(BLOCK.sub(replaced, page.read_text()))


def table(columns: Sequence[Column], summaries: Sequence[Summary]) -> str:
    """Return a table with a row for each system that has a figure in it; empty without any."""
    found = {(one.workload, one.case, one.figure, one.system): one for one in summaries}
    there = [column for column in columns if any(key[:3] == _of(column) for key in found)]
    wanted = {_of(column) for column in there}
    names = list(dict.fromkeys(key[3] for key in found if key[:3] in wanted))
    if not names:
        return ""
    lines = [_line(["", *(column.head for column in there)]), _line(["---", *("--:" for _ in there)])]
    lines += [_line([name, *(_cell(column, found.get((*_of(column), name))) for column in there)]) for name in names]
    return "\n".join(lines)


def _of(column: Column) -> tuple[str, str, str]:
    return column.workload, column.case, column.figure


def _cell(column: Column, summary: Summary | None) -> str:
    if summary is None:
        return ""
    ratio = f" ({summary.ratio:.2f})" if column.ratio and summary.ratio is not None else ""
    return column.show(summary.most if column.worst else summary.median) + ratio


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def costs_table() -> str:
    """Return the table of costs.json."""
    heads = {
        "statements": "statements",
        "round_trips": "round trips",
        "wal_bytes": "WAL bytes",
        "dead_rows": "dead rows",
    }
    lines = [_line(["a job", *heads.values()]), _line(["---", *("--:" for _ in heads)])]
    for name, counts in json.loads(COSTS.read_text())["costs"].items():
        cells = [f"{float(f'{counts[what]:.2g}'):,g}" if what in counts else "" for what in heads]
        lines.append(_line([name, *cells]))
    return "\n".join(lines)


def settings_table() -> str:
    """Return the table of the systems that are put under faults, and their settings."""
    lines = [_line(["", "settings"]), _line(["---", "---"])]
    lines += [_line([system.name, system.fair]) for system in SYSTEMS.values() if "faults" in system.workloads]
    return "\n".join(lines)


def subject_of(results: Path) -> str:
    """Return the subject of a file whose results have a description of their own: ``flow``, ``faults`` or none."""
    measured = {sample["workload"] for sample in json.loads(results.read_text())["samples"]}
    subjects = {workload.partition("_")[0] for workload in measured}
    only = subjects.pop() if len(subjects) == 1 else ""
    return only if only in {"flow", "faults"} else ""


def about(results: Sequence[Path]) -> str:
    """Return a description of the machine, the server and the versions; empty without results.

    If there are several files, the machine and the server are those of the last one.
    """
    if not results:
        return ""
    infos = [json.loads(path.read_text())["about"] for path in results]
    if len(infos) == 1:
        runs = "1 run" if infos[0]["repeat"] == 1 else f"{infos[0]['repeat']} alternating runs"
    else:
        numbers = sorted({summary.runs for summary in report.summarise(*report.join(results))})
        runs = f"{' to '.join(dict.fromkeys(str(one) for one in (numbers[0], numbers[-1])))} alternating runs"
    return measured_on(infos, runs)


def measured_on(infos: Sequence[Mapping[str, Any]], runs: str) -> str:
    """Return a description of the last date, machine and server, and of all versions.

    :param runs: how many runs there were.
    """
    info = infos[-1]
    server = info["server"]
    versions = {name: version for one in infos for of in one["versions"].values() for name, version in of.items()}
    if info.get("commit"):
        versions["sqlaqueue"] = f"{versions.get('sqlaqueue', '')} ({info['commit']})"
    named = ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))
    same = ", ".join(f"{name} {value}" for name, value in server.items() if name != "server_version")
    return (
        f"Measured on {info['date']}: {info['cores']} cores, {info['memory_gib']} GiB, PostgreSQL "
        f"{server['server_version']} on loopback ({same}), Python {info['python']}; {runs}.\n"
        f"Versions: {named}."
    )
