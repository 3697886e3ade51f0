"""Try many random inputs: ``python -m tests.fuzz --inputs 1000000 --seed 1 [TARGET...]``."""

import argparse
import itertools
import math
import random
import signal
import sys
import time
from types import FrameType

from tests.fuzz.mutations import Mutator
from tests.fuzz.targets import TARGETS
from tests.fuzz.trial import problem_of

TIME_LIMIT = 5.0
"""Seconds of the processor for one input, which takes less than a millisecond."""

MOST_SHOWN = 10


class Hang(BaseException):
    """An input has taken too long. No parser catches this."""


def _hang(_number: int, _frame: FrameType | None) -> None:
    raise Hang


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"some of: {', '.join(TARGETS)}; all by default")
    parser.add_argument("--inputs", type=int, default=100_000, help="how many, for all targets together")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    options = parser.parse_args()
    names = options.targets or list(TARGETS)
    if unknown := set(names) - set(TARGETS):
        parser.error(f"there is no target {', '.join(sorted(unknown))}")
    signal.signal(signal.SIGVTALRM, _hang)
    whole, inputs, failures = sum(TARGETS[name].weight for name in names), 0, 0
    for name in names:
        share = math.ceil(options.inputs * TARGETS[name].weight / whole)
        inputs, failures = inputs + share, failures + _try(name, share, options.seed)
    print(f"{inputs:,} inputs, seed {options.seed}: {failures} failures")
    return min(failures, 1)


def _try(name: str, inputs: int, seed: int) -> int:
    """Try some inputs of one target, print what fails, and return how many do."""
    target, started = TARGETS[name], time.process_time()
    mutator = Mutator(random.Random(f"{seed} {name}"), target.corpus)
    accepted, slowest, failed = 0, 0.0, 0
    for text in itertools.islice(iter(mutator.input, None), inputs):
        signal.setitimer(signal.ITIMER_VIRTUAL, TIME_LIMIT)
        began = time.process_time()
        try:
            problem, is_accepted = problem_of(target, text)
        except Hang:
            problem, is_accepted = f"it takes more than {TIME_LIMIT} seconds", False
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        slowest = max(slowest, time.process_time() - began)
        accepted += is_accepted
        if problem:
            failed += 1
            if failed <= MOST_SHOWN:
                print(f"{name}, seed {seed}: {text[:120]!r}, {len(text)} characters: {problem}", flush=True)
    took = max(time.process_time() - started, 1e-9)
    print(
        f"{name}: {inputs:,} inputs, {accepted:,} of them valid, {failed} failures, {inputs / took:,.0f} a second, "
        f"the slowest took {slowest * 1000:.1f} ms",
        flush=True,
    )
    return failed


if __name__ == "__main__":
    sys.exit(main())
