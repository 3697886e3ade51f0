"""What is measured: one file a workload, each a list of `Case`, tried with each contestant in turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module

from tests.benchmarks.contestants import Contestant
from tests.benchmarks.match import Match

WORKLOADS = ("drain", "enqueue", "latency", "backlog", "horizon", "scale")

Figures = dict[str, float]


@dataclass(frozen=True)
class Size:
    """How much of everything: the numbers of a case are those of the full size, times ``factor``.

    :param factor: 1 for the figures that are published, a hundredth to see that all of it works.
    :param limit: seconds after which a slow contestant is measured by what it has done.
    """

    factor: float
    limit: float

    def jobs(self, number: int) -> int:
        """Return a number of jobs at this size, in round batches."""
        return max(int(number * self.factor), 50)

    def seconds(self, number: float) -> float:
        """Return a duration at this size."""
        return max(number * self.factor, 1.5)


FULL = Size(1.0, 60.0)
SMALL = Size(0.005, 10.0)


@dataclass(frozen=True)
class Case:
    """One thing that is measured.

    :param name: unique within its workload.
    :param run: measures a contestant that has a schema and no jobs; None if it cannot be asked that.
    :param takes: which contestants take part.
    :param reference: whose figures the others' are divided by: the beginning of a name.
    """

    name: str
    run: Callable[[Match, Size], Figures | None]
    takes: Callable[[Contestant], bool] = lambda contestant: True
    reference: str = "raw delete 100"


def cases_of(workload: str) -> Sequence[Case]:
    """Return the cases of a workload."""
    cases: Sequence[Case] = import_module(f"{__name__}.{workload}").CASES
    return cases
