"""Run every workload with every system in turn, several times."""

from __future__ import annotations

import os
import platform
import subprocess
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from docs.benchmarks import commits, installations, report, writing
from docs.benchmarks.server import BenchServer, bench_server
from docs.benchmarks.system_under_test import SystemFailedError, SystemUnderTest
from docs.benchmarks.systems import STRATEGIES, SYSTEMS, TUNED, System
from docs.benchmarks.workloads import FULL, SMALL, WORKLOADS, Case, Size, cases_of, participants

OWN: dict[str, Any] = {"writing": writing, "commits": commits}
"""Workloads that run in this process. Each has the names of its cases and systems, and measures one of both."""

FULL_WORKLOADS = (*(workload for workload in WORKLOADS if workload != "faults"), *OWN)
"""What is measured without a choice. The workload ``faults`` has a command and a page of its own."""

QUICK_WORKLOADS = ("drain", "enqueue", "latency", "writing", "commits")
QUICK_SYSTEMS = (
    "raw delete 100",
    "raw listen",
    *(f"sqlaqueue {strategy} sync keep (defaults)" for strategy in STRATEGIES),
    "sqlalchemy plain",
    "pgqueuer (tuned)",
    "graphile-worker (tuned)",
)
"""What is measured in twenty minutes."""


@dataclass
class Recorder:
    """Runs cases, and records their results.

    :param output: the file of the results, which is written after each case.
    """

    size: Size
    output: Path
    samples: list[report.Sample] = field(default_factory=list)
    references: dict[tuple[str, str], str] = field(default_factory=dict)
    versions: dict[str, dict[str, str]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    about: dict[str, Any] = field(default_factory=dict)

    def measure(self, server: BenchServer, run: int, workload: str, case: Case, system: System) -> None:
        """Run one case with one system; a failure is recorded, and does not stop the benchmark."""

        def figures() -> dict[str, float] | None:
            with SystemUnderTest.on(server, system) as sut:
                self.versions[system.environment] = sut.versions
                return case.run(sut, self.size)

        self._record(run, workload, case.name, system.name, figures)

    def measure_own(self, server: BenchServer, run: int, workload: str, wanted: Callable[[str], bool]) -> None:
        """Run the cases of a workload that has systems of its own."""
        own = OWN[workload]
        for case in filter(wanted, own.CASES):
            self.references[workload, case] = next(iter(own.SYSTEMS))
            for system in own.SYSTEMS:
                self._record(run, workload, case, system, partial(own.measure, server, case, system, self.size.factor))

    def _record(
        self, run: int, workload: str, case: str, system: str, measure: Callable[[], dict[str, float] | None]
    ) -> None:
        label = f"{workload}, {case}, {system}"
        start = time.monotonic()
        try:
            figures = measure()
        except SystemFailedError as error:
            self.failures.append(f"{label}: {error}")
            print(f"  {label}: FAILED\n{error}", flush=True)
            return
        except Exception:  # noqa: BLE001 - one failure must not end a run of hours
            self.failures.append(f"{label}: {traceback.format_exc()}")
            print(f"  {label}: FAILED\n{traceback.format_exc()}", flush=True)
            return
        if figures is None:
            return
        self.samples += [report.Sample(run, workload, case, system, figure, value) for figure, value in figures.items()]
        text = ", ".join(f"{figure} {value:,.4g}" for figure, value in figures.items())
        print(f"  {label}: {text} ({time.monotonic() - start:.1f} s)", flush=True)

    def write(self) -> None:
        """Write the results so far."""
        about = {**self.about, "versions": self.versions, "failures": self.failures}
        report.write(self.output, about, self.samples, self.references)


def run(
    workloads: Sequence[str],
    selected: Callable[[System], bool],
    *,
    cases: Callable[[str], bool] = lambda case: True,
    repeat: int,
    small: bool,
    postgres: int | None,
    output: Path,
    consumer: dict[str, Any] | None = None,
) -> list[str]:
    """Run workloads; return the failures.

    :param consumer: arguments of tuned Consumers, instead of `TUNED`.
    """
    size = SMALL if small else FULL
    recorder = Recorder(size, output)
    systems = installations.available(one for one in SYSTEMS.values() if selected(one))
    if consumer is not None:
        systems = [_with_consumer_arguments(one, consumer) for one in systems]
    with bench_server(postgres) as server:
        recorder.about = about(server, size, repeat) | {"tuned": TUNED if consumer is None else consumer}
        for number in range(repeat):
            for workload in workloads:
                if workload in OWN:
                    recorder.measure_own(server, number, workload, cases)
                    recorder.write()
                    continue
                for case in (each for each in cases_of(workload) if cases(each.name)):
                    recorder.references[workload, case.name] = case.reference
                    print(f"run {number + 1} of {repeat}: {workload}, {case.name}", flush=True)
                    for system in participants(workload, case, systems):
                        recorder.measure(server, number, workload, case, system)
                    recorder.write()
    return recorder.failures


def _with_consumer_arguments(system: System, consumer: dict[str, Any]) -> System:
    if system.family != "sqlaqueue" or not system.tuned:
        return system
    return replace(system, options={**system.options, "consumer": consumer, "several_processes": {}})


def _commit() -> str:
    """Return the commit that is measured; empty outside of a checkout."""
    command = ["/usr/bin/env", "git", "-C", str(installations.ROOT), "rev-parse", "--short=8", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def about(server: BenchServer, size: Size, repeat: int) -> dict[str, Any]:
    """Return a description of the machine, the server and the settings."""
    memory = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal"))
    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "commit": _commit(),
        "factor": size.factor,
        "repeat": repeat,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(int(memory.split()[1]) / 2**20),
        "machine": platform.machine(),
        "load": [round(one, 2) for one in os.getloadavg()],
        "python": installations.python_version(),
        "server": server.settings(),
    }
