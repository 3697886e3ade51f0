"""The samples of a soak as one picture of small charts, with the faults as marks and the pieces apart."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

# The picture is a file, so no window is needed.
mpl.use("svg")

from matplotlib import pyplot as plt

COLOURS = ("#2b6cb0", "#c05621", "#2f855a", "#6b46c1", "#718096")
FAULT = "#e53e3e"
PROCESSES = {
    "sync": "worker, threads",
    "async": "worker, tasks",
    "producer": "producer",
    "operator": "operator",
    "monitor": "exporter, dashboard",
}
GAP = 1.0
"""Minutes between two pieces."""

Series = dict[str, Callable[[dict[str, Any]], float | None]]


def _of_process(role: str, figure: str) -> Callable[[dict[str, Any]], float | None]:
    return lambda line: line["processes"].get(role, {}).get(figure)


def _of_processes(figure: str) -> Series:
    return {label: _of_process(role, figure) for role, label in PROCESSES.items()}


def _of_tables(figure: str, share: float = 1.0) -> Series:
    return {"": lambda line: sum(each[figure] for each in line["tables"].values()) / share}


def _latency(place: int) -> Callable[[dict[str, Any]], float | None]:
    def read(line: dict[str, Any]) -> float | None:
        latency = line["latency"]
        return max(latency[place], 0.001) if latency and latency[place] is not None else None

    return read


CHARTS: list[tuple[str, Series, str]] = [
    ("memory of each process, MiB", _of_processes("rss_mib"), "linear"),
    ("descriptors of each process", _of_processes("descriptors"), "linear"),
    ("threads of each process", _of_processes("threads"), "linear"),
    ("connections of the server", {"": lambda line: line["connections"]}, "linear"),
    ("jobs a second", {"": lambda line: line["rate"]}, "linear"),
    ("seconds from due to start", {"p50": _latency(0), "p99": _latency(1)}, "log"),
    ("open jobs", {"": lambda line: line["open"]}, "linear"),
    ("dead rows", _of_tables("dead"), "linear"),
    ("tables, MiB", _of_tables("table_bytes", 2**20), "linear"),
    ("indexes, MiB", _of_tables("index_bytes", 2**20), "linear"),
]


def draw(lines: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the samples and faults of all pieces into an SVG."""
    lines = _on_one_axis(lines)
    samples = [line for line in lines if line["what"] == "sample"]
    faults = [line["minute"] for line in lines if line["what"] == "fault"]
    figure, axes = plt.subplots(5, 2, figsize=(9, 11), sharex=True, layout="constrained", facecolor="white")
    for axis, (title, series, scale) in zip(axes.flat, CHARTS, strict=True):
        for colour, (label, value) in zip(COLOURS, series.items(), strict=False):
            _line(axis, samples, value, colour=colour, label=label)
        for minute in faults:
            axis.axvline(minute, color=FAULT, linewidth=0.4, alpha=0.35, zorder=0)
        axis.set_yscale(scale)
        if scale == "linear":
            axis.set_ylim(bottom=0)
        axis.set_title(title, fontsize=9, loc="left")
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
        if len(series) > 1:
            axis.legend(fontsize=7, frameon=False, ncols=2 if len(series) > 2 else 1)
    for axis in axes[-1]:
        axis.set_xlabel("minutes; red lines are faults", fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def _on_one_axis(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Give each line its minute, with gaps between pieces, and each sample its rate."""
    made: list[dict[str, Any]] = []
    offset, before = 0.0, 0.0
    for line in lines:
        if made and line["piece"] != made[-1]["piece"]:
            offset, before = made[-1]["minute"] + GAP, 0.0
        placed = {**line, "minute": offset + line["at"] / 60}
        if line["what"] == "sample":
            placed["rate"] = line["done"] / (line["at"] - before)
            before = line["at"]
        made.append(placed)
    return made


def _line(
    axis: Any,
    samples: Sequence[dict[str, Any]],
    value: Callable[[dict[str, Any]], float | None],
    *,
    colour: str,
    label: str,
) -> None:
    """Draw one line for each piece."""
    for piece in dict.fromkeys(line["piece"] for line in samples):
        points = [(line["minute"], value(line)) for line in samples if line["piece"] == piece]
        there = [(minute, found) for minute, found in points if found is not None]
        if there:
            axis.plot(*zip(*there, strict=True), color=colour, linewidth=0.9, label=label)
        # One entry of the legend for all pieces.
        label = "_nolegend_"
