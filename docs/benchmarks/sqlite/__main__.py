"""``python -m docs.benchmarks.sqlite`` prints the table of SQLite in docs/evidence/engines.md."""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from docs.benchmarks.beside_raw.measures import Case, Parts, cell, drains, enqueues, latency, medians, polled
from docs.benchmarks.sqlite.sides import LibrarySqlite, RawSqlite


@contextlib.contextmanager
def file(side: type[RawSqlite | LibrarySqlite], synchronous: str) -> Iterator[Parts]:
    """Create a file."""
    with tempfile.TemporaryDirectory() as directory:
        made = side(Path(directory) / "jobs.db", synchronous)
        made.create()
        yield [made]


def cases(jobs: int) -> Iterator[tuple[str, Case]]:
    """Return what is measured."""
    singles = min(100, jobs // 10)
    yield from drains(jobs, 20, (1, 2, 4))
    yield from enqueues(jobs)
    yield "commit to handler in one process, median, ms", partial(latency, jobs=singles)
    yield from polled(singles)


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m docs.benchmarks.sqlite", description=__doc__)
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    say = sys.stdout.write
    say("| | `synchronous` | sqlite3 alone | sqlaqueue | ratio |\n| --- | --- | --- | --- | --- |\n")
    for name, case in cases(options.jobs):
        for mode in ("FULL", "NORMAL"):
            sides = [partial(file, side, mode) for side in (RawSqlite, LibrarySqlite)]
            alone, ours = medians(case, sides, options.repeat)
            say(f"| {name} | `{mode}` | {cell(name, alone)} | {cell(name, ours)} | {ours / alone:.2f} |\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
