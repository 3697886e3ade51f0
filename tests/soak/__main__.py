"""``python -m tests.soak HOURS``: run all features for hours under random faults, and look for leaks.

The soak consists of pieces, each with new processes and the same database. The samples and the server are in a
directory. A soak that was interrupted, even by SIGKILL, goes on with ``--continue DIRECTORY``: the piece that was cut
off is left out of the table. At the end it prints what is wrong, and writes the table and the picture.
"""

import argparse
import os
import platform
import secrets
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from tests.servers import _usable as usable
from tests.servers import choose_versions, find_installations, give_away
from tests.soak import verdict
from tests.soak.run import Plan, run_piece, server_in
from tests.soak.samples import SampleFile, read

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "evidence" / "soak.md"
PICTURE = ROOT / "docs" / "_static" / "soak.svg"
LONGEST_DIRECTORY = 70
"""The path of a socket has at most 107 characters."""


def main() -> int:
    """Run the pieces that are left, print the verdict, and return 1 if something is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("hours", type=float, nargs="?", help="how long in all, without the ends of the pieces")
    parser.add_argument("--minutes-a-piece", type=float, default=60, help="how long the same processes live")
    parser.add_argument("--rate", type=float, default=100, help="jobs a second")
    parser.add_argument("--sample-every", type=float, default=5, help="seconds between samples")
    parser.add_argument("--fault-every", type=float, nargs=2, default=(20, 60), help="least and most seconds")
    parser.add_argument("--seed", type=int, help="the seed of the first piece; the following ones count from there")
    parser.add_argument("--postgres", default="newest", help="the major version of the server")
    parser.add_argument("--continue", type=Path, dest="directory", help="the directory of a soak that goes on")
    parser.add_argument("--publish", action="store_true", help="write the table and the picture into docs")
    arguments = parser.parse_args()
    if arguments.hours is None and arguments.directory is None:
        parser.error("give the number of hours, or --continue DIRECTORY to judge and draw what there is")
    if arguments.hours is not None and arguments.hours <= 0:
        parser.error(f"hours {arguments.hours:g}: give a number of hours above 0")
    if arguments.rate <= 0:
        parser.error(f"--rate: use a number above 0, not {arguments.rate:g}")
    if not 0 < arguments.fault_every[0] <= arguments.fault_every[1]:
        parser.error("--fault-every: give the least number of seconds first, such as --fault-every 20 60")
    directory = arguments.directory or Path(tempfile.mkdtemp(prefix="sqlaqueue-soak-", dir="/tmp"))
    if len(str(directory.absolute())) > LONGEST_DIRECTORY:
        parser.error(
            f"{directory}: use a path of at most {LONGEST_DIRECTORY} characters, as it has the server's socket"
        )
    if arguments.hours:
        print(f"the samples are in {directory}", flush=True)
        _run_pieces(arguments, directory)
    return _judge(directory, publish=arguments.publish)


def _run_pieces(arguments: Any, directory: Path) -> None:
    directory.mkdir(exist_ok=True)
    give_away(directory)
    path, installed = directory / "samples.jsonl", find_installations()
    [version] = choose_versions(arguments.postgres, installed)
    with server_in(directory, version, usable(installed[version], directory)) as server:
        while (left := arguments.hours * 3600 - _seconds_of(path)) > 1:
            piece = 1 + max((line["piece"] for line in read(path)), default=-1)
            seed = secrets.randbelow(10**6) if arguments.seed is None else arguments.seed + piece
            seconds = min(arguments.minutes_a_piece * 60, left)
            faults = tuple(arguments.fault_every)
            plan = Plan(seconds, arguments.rate, arguments.sample_every, faults, seed)
            print(f"piece {piece}: {seconds / 60:.1f} minutes from seed {seed}", flush=True)
            run_piece(directory, server, SampleFile(path, piece), plan)


def _seconds_of(path: Path) -> float:
    """Return how long the pieces that have ended were planned for."""
    return sum(line["plan"]["seconds"] for line in read(path) if line["what"] == "ended")


def _judge(directory: Path, *, publish: bool) -> int:
    lines = [*read(directory / "samples.jsonl")]
    ended = [line for line in lines if line["what"] == "ended"]
    if not ended:
        print(f"{directory}: no piece has ended, so there is nothing to judge")
        return 1
    wrong = []
    for end in ended:
        wrong += verdict.faults_of(end, [line for line in lines if line["piece"] == end["piece"]])
    table = verdict.table(lines)
    print(table)
    print("\n".join(wrong) or "nothing is wrong")
    _draw(lines, directory / "soak.svg")
    if publish:
        _draw(lines, PICTURE)
        picture = "![Memory, descriptors, rates and sizes over time](../_static/soak.svg)"
        _publish(f"{_about(ended)}\n\n{table}\n\n{picture}")
    return 1 if wrong else 0


def _about(ended: list[dict[str, Any]]) -> str:
    """Return the sentence about when, where and how hard."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    plans = [end["plan"] for end in ended]
    pieces = ", ".join(f"{plan['seconds'] / 60:.0f} minutes from seed {plan['seed']}" for plan in plans)
    machine = f"{os.cpu_count()} cores, {memory:.0f} GiB"
    versions = f"Python {platform.python_version()}, SQLAlchemy {metadata.version('sqlalchemy')}"
    load = f"{plans[0]['rate']:g} jobs a second; {pieces}"
    return f"Measured on {time.strftime('%Y-%m-%d')}: {machine}, {versions}; {load}."


def _publish(text: str) -> None:
    """Write the figures into the page."""
    before, mark, rest = PAGE.read_text().partition("<!-- table: soak -->\n")
    PAGE.write_text(f"{before}{mark}{text}\n<!-- /table -->{rest.partition('<!-- /table -->')[2]}")


def _draw(lines: list[dict[str, Any]], path: Path) -> None:
    try:
        from tests.soak.picture import draw  # noqa: PLC0415 - a soak without it is still judged
    except ModuleNotFoundError:
        print("matplotlib is not installed, so nothing is drawn; `nox -s soak` installs it")
        return
    draw(lines, path)
    print(path)


if __name__ == "__main__":
    sys.exit(main())
