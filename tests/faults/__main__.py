"""``python -m tests.faults --minutes 10 --seed 1``: run random rounds of a queue under flow control.

The exit code is 1 if one fails.
"""

import argparse
import contextlib
import itertools
import secrets
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from tests.faults.key_queues import HELD, draw, strategy_of
from tests.faults.key_rounds import Result, run_round
from tests.servers import choose_versions, find_installations, running


@dataclass(frozen=True)
class GivenDatabase:
    """An empty database on a server that runs already."""

    base: sa.URL
    name: str

    def url(self, driver: str = "psycopg") -> str:
        """Return what ``create_engine`` and ``create_async_engine`` take."""
        url = self.base.set(drivername=f"postgresql+{driver}", database=self.name)
        return url.render_as_string(hide_password=False)


@contextlib.contextmanager
def on_server(url: str) -> Iterator[GivenDatabase]:
    """Create a database beside the one of ``url``, and drop it at the end."""
    base = sa.make_url(url).set(drivername="postgresql+psycopg")
    engine = sa.create_engine(base, isolation_level="AUTOCOMMIT")
    name = f"test_{secrets.token_hex(6)}"
    with engine.connect() as connection:
        connection.exec_driver_sql(f"CREATE DATABASE {name}")
        try:
            yield GivenDatabase(base, name)
        finally:
            connection.exec_driver_sql(f"DROP DATABASE {name} WITH (FORCE)")
    engine.dispose()


def main() -> int:
    """Run rounds until the time is over, print each, and the totals."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1, help="for how long new rounds begin")
    parser.add_argument("--rounds", type=int, default=sys.maxsize, help="the most rounds")
    parser.add_argument("--seed", type=int, help="the seed of the first round; the following ones count from there")
    parser.add_argument("--postgres", default="newest", help="the major version of a server to start")
    parser.add_argument("--url", help="a database of a running server instead, which creates the databases of rounds")
    parser.add_argument("--strategies", default="", help="only seeds of these strategies, separated by commas, or held")
    parser.add_argument("--keep", type=Path, help="a directory for what was recorded in rounds that fail")
    arguments = parser.parse_args()
    seed = secrets.randbelow(10**6) if arguments.seed is None else arguments.seed
    with contextlib.ExitStack() as stack:
        if arguments.url:
            return _run(arguments, seed, lambda: on_server(arguments.url))
        [version] = choose_versions(arguments.postgres, find_installations())
        server = stack.enter_context(running([version])).shared(version)
        return _run(arguments, seed, server.database)


def _run(arguments: Any, seed: int, database: Any) -> int:
    end, rounds, failed, totals = time.monotonic() + arguments.minutes * 60, 0, [], Counter[str]()
    strategies = ",".join(HELD) if arguments.strategies == "held" else arguments.strategies
    wanted = [name for name in strategies.split(",") if name]
    seeds = (each for each in itertools.count(seed) if not wanted or strategy_of(each) in wanted)
    while time.monotonic() < end and rounds < arguments.rounds:
        result = _one(next(seeds), database(), arguments.keep)
        sys.stdout.write(f"{result}\n")
        sys.stdout.flush()
        rounds += 1
        totals += result.counts
        failed += [result.configuration.seed] if result.violations else []
    counts = " ".join(f"{name}={number}" for name, number in sorted(totals.items()))
    sys.stdout.write(f"{rounds} rounds from seed {seed}, {len(failed)} failed {failed}; {counts}\n")
    return 1 if failed else 0


def _one(seed: int, database: AbstractContextManager[Any], keep: Path | None) -> Result:
    configuration = draw(seed)
    with database as fresh:
        try:
            return run_round(configuration, fresh, keep)
        except AssertionError as error:
            if keep is not None:
                (keep / f"seed-{seed}.txt").write_text("\n".join([str(error), *getattr(error, "__notes__", ())]))
            return Result(configuration, {"processes": [str(error)]})


if __name__ == "__main__":
    sys.exit(main())
