"""The workloads: a module for each, with a list of `Case`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module

from docs.benchmarks.system_under_test import SystemUnderTest
from docs.benchmarks.systems import System

WORKLOADS = ("drain", "enqueue", "latency", "backlog", "horizon", "scale", "flow", "flow_claims", "faults")

NAMED = ("flow", "flow_claims", "faults")
"""Workloads of systems that name them: other systems take no part, and those take part in no other one."""

Figures = dict[str, float]


@dataclass(frozen=True)
class Size:
    """The size of a benchmark.

    :param factor: 1 for published figures, less for a test; multiplies the numbers of a case.
    :param limit: seconds after which a slow system is stopped, and measured by the jobs that it has handled.
    """

    factor: float
    limit: float

    def jobs(self, number: int) -> int:
        """Return a number of jobs at this size."""
        return max(int(number * self.factor), 50)

    def seconds(self, number: float) -> float:
        """Return a duration at this size."""
        return max(number * self.factor, 1.5)


FULL = Size(1.0, 60.0)
SMALL = Size(0.005, 10.0)


@dataclass(frozen=True)
class Case:
    """One measurement.

    :param name: unique within its workload.
    :param run: measures a system with an empty schema; returns None if the system does not support the case.
    :param includes: whether a system takes part.
    :param reference: the name of the system for the ratios.
    """

    name: str
    run: Callable[[SystemUnderTest, Size], Figures | None]
    includes: Callable[[System], bool] = lambda system: True
    reference: str = "raw delete 100"


def cases_of(workload: str) -> Sequence[Case]:
    """Return the cases of a workload."""
    cases: Sequence[Case] = import_module(f"{__name__}.{workload}").CASES
    return cases


def participants(workload: str, case: Case, systems: Iterable[System]) -> list[System]:
    """Return the systems that take part in a case."""
    is_named = workload in NAMED
    taking_part = [one for one in systems if (workload in one.workloads if is_named else not one.workloads)]
    return [one for one in taking_part if case.includes(one)]
