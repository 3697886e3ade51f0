"""The results as pictures: for each table one, with the runs' least and most beside each median."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

from docs.benchmarks import report
from docs.benchmarks.report import Summary
from docs.benchmarks.tables import TABLES, Column

# The plots are files, so no window is needed.
mpl.use("svg")

from matplotlib import pyplot as plt

OURS, PEERS = "#2b6cb0", "#a0aec0"


def draw(results: Iterable[Path], directory: Path) -> list[Path]:
    """Plot each table that has results; return the files."""
    samples, references = report.join(path for path in results if path.exists())
    summaries = report.summarise(samples, references)
    directory.mkdir(parents=True, exist_ok=True)
    drawn = []
    for name, columns in TABLES.items():
        there = [(column, _of(column, summaries)) for column in columns]
        there = [(column, found) for column, found in there if found]
        if there:
            path = directory / f"{name}.svg"
            _draw(there, path)
            drawn.append(path)
    return drawn


def _of(column: Column, summaries: Sequence[Summary]) -> list[Summary]:
    wanted = (column.workload, column.case, column.figure)
    return [one for one in summaries if (one.workload, one.case, one.figure) == wanted]


def _draw(columns: Sequence[tuple[Column, list[Summary]]], path: Path) -> None:
    height = max(len(found) for _, found in columns)
    figure, axes = plt.subplots(
        1, len(columns), figsize=(5.5 * len(columns), 1.2 + 0.28 * height), squeeze=False, layout="constrained"
    )
    for axis, (column, found) in zip(axes[0], columns, strict=True):
        _bars(axis, column, sorted(found, key=lambda one: one.median))
    figure.savefig(path)
    plt.close(figure)


def _bars(axis: Any, column: Column, found: Sequence[Summary]) -> None:
    medians = [one.median for one in found]
    ends = [[one.median - one.least for one in found], [one.most - one.median for one in found]]
    colours = [OURS if one.system.startswith("sqlaqueue") else PEERS for one in found]
    axis.barh([one.system for one in found], medians, xerr=ends, color=colours, error_kw={"linewidth": 0.8})
    for place, value in enumerate(medians):
        axis.annotate(f" {column.show(value)}", (value, place), va="center", fontsize=7)
    axis.set_title(f"{column.workload}: {column.head}", fontsize=9)
    axis.tick_params(labelsize=7)
    axis.margins(x=0.15)
