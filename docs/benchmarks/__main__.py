"""``python -m docs.benchmarks``: run the benchmarks, and write the tables and plots of the results."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path

from docs.benchmarks.installations import HOME
from docs.benchmarks.run import FULL_WORKLOADS, OWN, QUICK_SYSTEMS, QUICK_WORKLOADS, run
from docs.benchmarks.systems import SYSTEMS
from docs.benchmarks.tables import PAGE
from docs.benchmarks.workloads import WORKLOADS

RESULTS = HOME / "results.json"


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m docs.benchmarks", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    run = commands.add_parser("run", help="run the benchmarks")
    run.add_argument("what", nargs="?", choices=["all", "quick"], default="all", help="quick: a choice, once")
    run.add_argument(
        "--workload", action="append", choices=(*WORKLOADS, *OWN), help="a workload; may be repeated; all by default"
    )
    run.add_argument(
        "--only", action="append", default=[], help="only systems whose name has this prefix; may be repeated"
    )
    run.add_argument(
        "--without", action="append", default=[], help="no systems whose name has this prefix; may be repeated"
    )
    run.add_argument("--case", action="append", default=[], help="only this case; may be repeated")
    run.add_argument("--repeat", type=int, help="3 by default, and 1 for quick")
    run.add_argument("--small", action="store_true", help="run a fraction of each workload, as a test")
    run.add_argument("--postgres", type=int, help="major version of PostgreSQL; the newest by default")
    run.add_argument("--consumer", type=json.loads, help="arguments of the Consumer for sqlaqueue (tuned), as JSON")
    run.add_argument("--output", type=Path, default=RESULTS)

    commands.add_parser("list", help="list the systems")

    tables = commands.add_parser("tables", help="fill the tables of docs/evidence/benchmarks.md")
    tables.add_argument("results", type=Path, nargs="*", default=[RESULTS])
    tables.add_argument("--page", type=Path, default=PAGE)

    faults = commands.add_parser("faults", help="put systems under faults, and fill docs/evidence/faults-compared.md")
    faults.add_argument("--case", action="append", default=[], help="only this case; may be repeated")
    faults.add_argument(
        "--only", action="append", default=[], help="only systems whose name has this prefix; may be repeated"
    )
    faults.add_argument("--repeat", type=int, default=1, help="1 by default; the tables have the medians")
    faults.add_argument("--quick", action="store_true", help="a few seconds of each case, as a test; fills no table")
    faults.add_argument("--postgres", type=int, help="major version of PostgreSQL; the newest by default")
    faults.add_argument("--output", type=Path, default=HOME / "faults.json")

    plots = commands.add_parser("plots", help="plot the results")
    plots.add_argument("results", type=Path, nargs="*", default=[RESULTS])
    plots.add_argument("--directory", type=Path, default=HOME / "plots")

    telemetry = commands.add_parser("telemetry", help="measure what telemetry costs a job")
    telemetry.add_argument("--jobs", type=int, default=5000)
    telemetry.add_argument("--rounds", type=int, default=7)
    telemetry.add_argument("--postgres", type=int, help="major version of PostgreSQL; the newest by default")
    history = commands.add_parser("history", help="measure the costs of an attempt history")
    history.add_argument("--rounds", type=int, default=5)
    snapshot = commands.add_parser("snapshot", help="measure a steady load while a snapshot is open")
    snapshot.add_argument("--minutes", type=float, default=30, help="for how long each strategy runs")
    snapshot.add_argument("--peer-minutes", type=float, default=10, help="for how long each other queue runs")
    snapshot.add_argument("--rate", type=float, default=800, help="jobs a second")
    snapshot.add_argument("--every", type=float, default=60, help="seconds between two lines of the result")
    snapshot.add_argument("--only", action="append", default=[], help="only systems with this prefix; may be repeated")
    snapshot.add_argument("--postgres", type=int, help="major version of PostgreSQL; the newest by default")
    snapshot.add_argument("--output", type=Path, default=HOME / "snapshot.jsonl")
    snapshot.add_argument("--publish", action="store_true", help="write the table and the picture into docs")
    dashboard = commands.add_parser("dashboard", help="measure the pages of a list of jobs in a large table")
    dashboard.add_argument("--rows", type=int, default=1_000_000)

    arguments = parser.parse_args()
    return int(globals()[f"_{arguments.command}"](arguments) or 0)


def _run(arguments: argparse.Namespace) -> int:
    quick = arguments.what == "quick"
    only = arguments.only or (QUICK_SYSTEMS if quick else [])

    def selected(system: object) -> bool:
        name = getattr(system, "name", "")
        return (not only or name.startswith(tuple(only))) and not name.startswith(tuple(arguments.without))

    failures = run(
        arguments.workload or (QUICK_WORKLOADS if quick else FULL_WORKLOADS),
        selected,
        cases=lambda case: case in arguments.case if arguments.case else not (quick and case == "50 idle workers"),
        repeat=arguments.repeat or (1 if quick else 3),
        small=arguments.small,
        postgres=arguments.postgres,
        output=arguments.output,
        consumer=arguments.consumer,
    )
    print(f"\n{len(failures)} failures; the results are in {arguments.output}")
    if importlib.util.find_spec("matplotlib"):
        _draw([arguments.output], arguments.output.parent / "plots")
    return 1 if failures else 0


def _list(_: argparse.Namespace) -> None:
    for system in SYSTEMS.values():
        print(f"{system.name:50} {' '.join(system.requirements)}")


def _tables(arguments: argparse.Namespace) -> None:
    from docs.benchmarks.tables import fill

    fill(arguments.results, arguments.page)


def _faults(arguments: argparse.Namespace) -> int:
    from docs.benchmarks.tables import FAULTS_PAGE, fill

    failures = run(
        ["faults"],
        lambda system: "faults" in system.workloads and system.name.startswith(tuple(arguments.only) or ""),
        cases=lambda case: case in arguments.case if arguments.case else True,
        repeat=arguments.repeat,
        small=arguments.quick,
        postgres=arguments.postgres,
        output=arguments.output,
    )
    print(f"\n{len(failures)} failures; the results are in {arguments.output}")
    if not arguments.quick:
        fill([arguments.output], FAULTS_PAGE)
        print(f"the tables are in {FAULTS_PAGE}")
    return 1 if failures else 0


def _plots(arguments: argparse.Namespace) -> None:
    _draw(arguments.results, arguments.directory)


def _draw(results: list[Path], directory: Path) -> None:
    from docs.benchmarks.plots import draw

    for path in draw(results, directory):
        print(path)


def _telemetry(arguments: argparse.Namespace) -> None:
    from docs.benchmarks.server import bench_server
    from docs.benchmarks.telemetry import measure, table

    with bench_server(arguments.postgres) as server, server.database() as url:
        print(table(measure(url, jobs=arguments.jobs, rounds=arguments.rounds)))


def _history(arguments: argparse.Namespace) -> int:
    from docs.benchmarks.history import main as measure

    return measure(rounds=arguments.rounds)


def _snapshot(arguments: argparse.Namespace) -> int:
    from docs.benchmarks import snapshot

    failed = snapshot.run(
        arguments.output,
        minutes=arguments.minutes,
        peer_minutes=arguments.peer_minutes,
        rate=arguments.rate,
        every=arguments.every,
        only=arguments.only,
        postgres=arguments.postgres,
    )
    lines = snapshot.read(arguments.output)
    print(snapshot.table(lines))
    if importlib.util.find_spec("matplotlib"):
        snapshot.draw(lines, arguments.output.with_suffix(".svg"))
        if arguments.publish:
            snapshot.publish(lines)
    return 1 if failed else 0


def _dashboard(arguments: argparse.Namespace) -> int:
    from docs.benchmarks.dashboard import main as measure

    return measure(rows=arguments.rows)


if __name__ == "__main__":
    sys.exit(main())
