"""Every work load with every contestant, in turn: contestant after contestant, and all of that again."""

from __future__ import annotations

import os
import platform
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.benchmarks import environments, report
from tests.benchmarks.contestants import CONTESTANTS, TUNED, Contestant
from tests.benchmarks.match import ContestantError, Match
from tests.benchmarks.server import BenchServer, bench_server
from tests.benchmarks.workloads import FULL, SMALL, Case, Size, cases_of


@dataclass
class Session:
    """One call of the benchmarks.

    :param output: the file of the results; it is written after each run, so that what has been measured is not lost.
    """

    size: Size
    output: Path
    samples: list[report.Sample] = field(default_factory=list)
    references: dict[tuple[str, str], str] = field(default_factory=dict)
    versions: dict[str, dict[str, str]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    about: dict[str, Any] = field(default_factory=dict)

    def measure(self, server: BenchServer, run: int, workload: str, case: Case, contestant: Contestant) -> None:
        """Measure one contestant in one case; one that fails is reported, and the others go on."""
        label = f"{workload}, {case.name}, {contestant.name}"
        begun = time.monotonic()
        try:
            with Match.on(server, contestant) as match:
                self.versions[contestant.environment] = match.versions
                figures = case.run(match, self.size)
        except ContestantError as error:
            self.failures.append(f"{label}: {error}")
            print(f"  {label}: FAILED\n{error}", flush=True)
            return
        except Exception:  # noqa: BLE001 - hours of measuring are not thrown away for one case
            self.failures.append(f"{label}: {traceback.format_exc()}")
            print(f"  {label}: FAILED\n{traceback.format_exc()}", flush=True)
            return
        if figures is None:
            return
        self.samples += [
            report.Sample(run, workload, case.name, contestant.name, figure, value) for figure, value in figures.items()
        ]
        said = ", ".join(f"{figure} {value:,.4g}" for figure, value in figures.items())
        print(f"  {label}: {said} ({time.monotonic() - begun:.1f} s)", flush=True)

    def write(self) -> None:
        """Write what has been measured so far."""
        about = {**self.about, "versions": self.versions, "failures": self.failures}
        report.write(self.output, about, self.samples, self.references)


def run(
    workloads: Sequence[str],
    chosen: Callable[[Contestant], bool],
    *,
    cases: Callable[[Case], bool] = lambda case: True,
    repeat: int,
    small: bool,
    postgres: int | None,
    output: Path,
    consumer: dict[str, Any] | None = None,
) -> list[str]:
    """Run the work loads; return what failed.

    :param consumer: other arguments than `TUNED` for a Consumer at its best.
    """
    size = SMALL if small else FULL
    session = Session(size, output)
    contestants = environments.available(one for one in CONTESTANTS.values() if chosen(one))
    if consumer is not None:
        contestants = [_driven_otherwise(one, consumer) for one in contestants]
    with bench_server(postgres) as server:
        session.about = about(server, size, repeat) | {"tuned": TUNED if consumer is None else consumer}
        for number in range(repeat):
            for workload in workloads:
                for case in filter(cases, cases_of(workload)):
                    session.references[workload, case.name] = case.reference
                    print(f"run {number + 1} of {repeat}: {workload}, {case.name}", flush=True)
                    for contestant in filter(case.takes, contestants):
                        session.measure(server, number, workload, case, contestant)
                    session.write()
    return session.failures


def _driven_otherwise(contestant: Contestant, consumer: dict[str, Any]) -> Contestant:
    if contestant.family != "sqlaqueue" or not contestant.tuned:
        return contestant
    return replace(contestant, options={**contestant.options, "consumer": consumer, "together": {}})


def about(server: BenchServer, size: Size, repeat: int) -> dict[str, Any]:
    """Return what a reader has to know to make sense of the figures."""
    memory = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal"))
    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "factor": size.factor,
        "repeat": repeat,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(int(memory.split()[1]) / 2**20),
        "machine": platform.machine(),
        "python": environments.python_version(),
        "server": server.settings(),
    }
