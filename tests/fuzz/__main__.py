"""Try many random inputs: ``python -m tests.fuzz --inputs 1000000 --seed 1 [TARGET...]``."""

import argparse
import itertools
import math
import random
import sys
import time

from tests.fuzz.mutations import Mutator
from tests.fuzz.targets import TARGETS
from tests.fuzz.trial import problem_of

MOST_SHOWN = 10


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"some of: {', '.join(TARGETS)}; all by default")
    parser.add_argument("--inputs", type=int, default=100_000, help="how many, for all targets together")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    options = parser.parse_args()
    names = options.targets or list(TARGETS)
    if unknown := set(names) - set(TARGETS):
        parser.error(f"there is no target {', '.join(sorted(unknown))}")
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
        began = time.process_time()
        problem, is_accepted = problem_of(target, text)
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
