"""Samples and their summaries: medians over runs, and ratios within a run."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Sample:
    """One figure of one system in one run."""

    run: int
    workload: str
    case: str
    system: str
    figure: str
    value: float


@dataclass(frozen=True)
class Summary:
    """One figure of one system over all runs.

    :param ratio: the median of the ratios to the reference in the same run; None without a reference.
    """

    workload: str
    case: str
    system: str
    figure: str
    runs: int
    median: float
    least: float
    most: float
    ratio: float | None

    @property
    def spread(self) -> float:
        """The range of the runs relative to the median."""
        return (self.most - self.least) / self.median if self.median else 0.0


def quantile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that is not exceeded by at least a share of the values."""
    ordered = sorted(values)
    if not ordered:
        msg = "nothing was measured, so there is no quantile"
        raise ValueError(msg)
    position = max(0, min(len(ordered) - 1, -int(-share * len(ordered) // 1) - 1))
    return ordered[position]


def summarise(samples: Iterable[Sample], references: dict[tuple[str, str], str]) -> list[Summary]:
    """Summarise samples, in the order in which systems first appear.

    :param references: the reference system of each workload and case, for the ratios.
    """
    values: dict[tuple[str, str, str, str], dict[int, float]] = defaultdict(dict)
    for sample in samples:
        values[sample.workload, sample.case, sample.system, sample.figure][sample.run] = sample.value
    summaries = []
    for (workload, case, system, figure), by_run in values.items():
        reference = values.get((workload, case, references.get((workload, case), ""), figure), {})
        ratios = [value / reference[run] for run, value in by_run.items() if reference.get(run)]
        summaries.append(
            Summary(
                workload,
                case,
                system,
                figure,
                len(by_run),
                statistics.median(by_run.values()),
                min(by_run.values()),
                max(by_run.values()),
                statistics.median(ratios) if ratios else None,
            )
        )
    return summaries


def write(path: Path, about: dict[str, Any], samples: Sequence[Sample], references: dict[tuple[str, str], str]) -> None:
    """Write samples and summaries as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    result = {
        "about": about,
        "references": [[workload, case, name] for (workload, case), name in references.items()],
        "summaries": [asdict(summary) for summary in summarise(samples, references)],
        "samples": [asdict(sample) for sample in samples],
    }
    path.write_text(json.dumps(result, indent=1) + "\n")


def read(path: Path) -> tuple[dict[str, Any], list[Summary]]:
    """Read the file of `write`; return the description of the runs, and the summaries."""
    result = json.loads(path.read_text())
    return result["about"], [Summary(**summary) for summary in result["summaries"]]


def join(paths: Iterable[Path]) -> tuple[list[Sample], dict[tuple[str, str], str]]:
    """Read the samples of several files, with consecutive numbers of runs."""
    samples: list[Sample] = []
    references: dict[tuple[str, str], str] = {}
    for path in paths:
        result = json.loads(path.read_text())
        first_run = max((sample.run for sample in samples), default=-1) + 1
        samples += [Sample(**{**sample, "run": sample["run"] + first_run}) for sample in result["samples"]]
        references |= {(workload, case): name for workload, case, name in result["references"]}
    return samples, references
