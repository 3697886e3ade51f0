"""``python -m tests.benchmarks``: run the benchmarks, and make of the results what is published."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path

from tests.benchmarks.contestants import CONTESTANTS
from tests.benchmarks.environments import HOME
from tests.benchmarks.tables import PAGE
from tests.benchmarks.workloads import WORKLOADS

RESULTS = HOME / "results.json"


def main() -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    run = commands.add_parser("run", help="measure")
    run.add_argument("--workload", action="append", choices=WORKLOADS, help="one of several; all by default")
    run.add_argument("--only", action="append", default=[], help="contestants whose name begins like this")
    run.add_argument(
        "--without", action="append", default=[], help="contestants whose name begins like this are left out"
    )
    run.add_argument("--case", action="append", default=[], help="cases by their name")
    run.add_argument("--repeat", type=int, default=3)
    run.add_argument("--small", action="store_true", help="a fraction of everything: to see that it works")
    run.add_argument("--postgres", type=int, help="the major version of the server; the newest by default")
    run.add_argument("--consumer", type=json.loads, help="other arguments for sqlaqueue (tuned), as JSON")
    run.add_argument("--output", type=Path, default=RESULTS)

    commands.add_parser("list", help="print the contestants")

    tables = commands.add_parser("tables", help="fill the tables of docs/performance.md")
    tables.add_argument("results", type=Path, nargs="*", default=[RESULTS])
    tables.add_argument("--page", type=Path, default=PAGE)

    plots = commands.add_parser("plots", help="draw the results")
    plots.add_argument("results", type=Path, nargs="*", default=[RESULTS])
    plots.add_argument("--directory", type=Path, default=HOME / "plots")

    costs = commands.add_parser("costs", help="count what a job costs, and compare with costs.json")
    costs.add_argument("--write", action="store_true", help="make these counts the ones to compare with")

    plain = commands.add_parser("plain", help="compare the SQL of a plain queue with that on file")
    plain.add_argument("--write", action="store_true", help="put what is sent now on file")

    arguments = parser.parse_args()
    return int(globals()[f"_{arguments.command}"](arguments) or 0)


def _run(arguments: argparse.Namespace) -> int:
    from tests.benchmarks.run import run

    def chosen(contestant: object) -> bool:
        name = getattr(contestant, "name", "")
        wanted = not arguments.only or name.startswith(tuple(arguments.only))
        return wanted and not (arguments.without and name.startswith(tuple(arguments.without)))

    failures = run(
        arguments.workload or WORKLOADS,
        chosen,
        cases=lambda case: not arguments.case or case.name in arguments.case,
        repeat=arguments.repeat,
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
    for contestant in CONTESTANTS.values():
        print(f"{contestant.name:50} {' '.join(contestant.requirements)}")


def _tables(arguments: argparse.Namespace) -> None:
    from tests.benchmarks.tables import fill

    fill(arguments.results, arguments.page)


def _plots(arguments: argparse.Namespace) -> None:
    _draw(arguments.results, arguments.directory)


def _draw(results: list[Path], directory: Path) -> None:
    from tests.benchmarks.plots import draw

    for path in draw(results, directory):
        print(path)


def _costs(arguments: argparse.Namespace) -> int:
    from tests.benchmarks.costs import main as count

    return count(write=arguments.write)


def _plain(arguments: argparse.Namespace) -> int:
    from tests.benchmarks.statements import main as compare

    return compare(write=arguments.write)


if __name__ == "__main__":
    sys.exit(main())
