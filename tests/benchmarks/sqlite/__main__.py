"""``python -m tests.benchmarks.sqlite`` prints the table of docs/sqlite.md."""

from __future__ import annotations

import argparse
import sys

from tests.benchmarks.sqlite.measure import cases, measure


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.sqlite", description=__doc__)
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    say = sys.stdout.write
    say("| | `synchronous` | sqlite3 alone | sqlaqueue | ratio |\n| --- | --- | --- | --- | --- |\n")
    for name, case in cases(options.jobs):
        for mode in ("FULL", "NORMAL"):
            alone, ours = measure(case, mode, options.repeat)
            digits = 2 if "ms" in name else 0
            say(f"| {name} | `{mode}` | {alone:,.{digits}f} | {ours:,.{digits}f} | {ours / alone:.2f} |\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
