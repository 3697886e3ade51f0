"""The arithmetic of the report."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks.report import Sample, join, quantile, read, summarise, write
from tests.benchmarks.systems import SYSTEMS
from tests.benchmarks.workloads import WORKLOADS, cases_of, participants

pytestmark = pytest.mark.once

REFERENCES = {("drain", "1 process"): "raw"}


def samples(*values: tuple[int, str, float]) -> list[Sample]:
    return [Sample(run, "drain", "1 process", who, "jobs_per_second", value) for run, who, value in values]


def test_ratios_are_taken_within_a_run() -> None:
    # The machine was half as fast in the second run, which affects the ratio of the medians, but not that within runs.
    measured = samples(
        (0, "raw", 100), (0, "ours", 80), (1, "raw", 50), (1, "ours", 40), (2, "raw", 100), (2, "ours", 70)
    )
    raw, ours = summarise(measured, REFERENCES)
    assert (raw.ratio, ours.ratio) == (1.0, 0.8)
    assert (ours.median, ours.least, ours.most, ours.runs) == (70, 40, 80, 3)


def test_a_run_without_the_reference_has_no_ratio() -> None:
    (ours,) = summarise(samples((0, "ours", 80)), REFERENCES)
    assert ours.ratio is None


def test_the_spread_is_relative_to_the_median() -> None:
    (ours,) = summarise(samples((0, "ours", 80), (1, "ours", 100), (2, "ours", 120)), {})
    assert ours.spread == pytest.approx(0.4)


@pytest.mark.parametrize(("share", "expected"), [(0.5, 50), (0.99, 99), (1.0, 100), (0.001, 1), (0.0, 1)])
def test_quantiles(share: float, expected: float) -> None:
    assert quantile(list(range(100, 0, -1)), share) == expected


def test_no_values_have_no_quantile() -> None:
    with pytest.raises(ValueError, match="nothing was measured"):
        quantile([], 0.5)


def test_results_are_read_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "results" / "one.json"
    write(path, {"cores": 2}, samples((0, "raw", 100), (0, "ours", 80)), REFERENCES)
    about, summaries = read(path)
    assert about == {"cores": 2}
    assert [(one.system, one.median, one.ratio) for one in summaries] == [("raw", 100, 1.0), ("ours", 80, 0.8)]


def test_the_runs_of_several_files_have_consecutive_numbers(tmp_path: Path) -> None:
    for number, value in enumerate((80, 60)):
        write(tmp_path / f"{number}.json", {}, samples((0, "raw", 100), (0, "ours", value)), REFERENCES)
    joined, references = join([tmp_path / "0.json", tmp_path / "1.json"])
    ours = summarise(joined, references)[1]
    assert (ours.runs, ours.median, ours.ratio) == (2, 70, pytest.approx(0.7))


def test_every_case_includes_several_systems_and_its_reference() -> None:
    for workload in WORKLOADS:
        for case in cases_of(workload):
            included = [system.name for system in participants(workload, case, SYSTEMS.values())]
            assert len(included) > 1, (workload, case.name)
            assert case.reference in included, (workload, case.name)


def test_systems_with_flow_control_take_part_in_its_workloads_only() -> None:
    for workload in WORKLOADS:
        for case in cases_of(workload):
            for system in participants(workload, case, SYSTEMS.values()):
                assert ("flow" in system.options) == workload.startswith("flow"), (workload, system.name)
