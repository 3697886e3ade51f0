"""Whether the samples of a soak show a leak, and its table of figures."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

WARM_UP = 600.0
"""Seconds that are left out of the fits, at most a third of a piece: each connection fills its cache of statements."""

LIMITS = {"rss_mib": 8.0, "descriptors": 6.0, "threads": 6.0}
"""How much a line that is fitted to a figure may rise in an hour; in a shorter time as much."""

SHORTEST = 600.0
"""Seconds of a piece: a shorter one tells nothing about leaks."""

UNITS = {"rss_mib": "MiB", "descriptors": "descriptors", "threads": "threads"}

STOP_LIMIT = 30.0
"""Seconds after the grace period within which a worker that was told to stop has to end."""


@dataclass(frozen=True)
class Trend:
    """The line that is fitted to a figure of one process in one piece."""

    process: str
    figure: str
    first: float
    last: float
    hours: float

    @property
    def rises(self) -> float:
        return self.last - self.first

    @property
    def is_leak(self) -> bool:
        return self.rises > LIMITS[self.figure] * max(self.hours, 1.0)

    def __str__(self) -> str:
        return (
            f"{self.process}: {UNITS[self.figure]} rose from {self.first:.1f} to {self.last:.1f} in "
            f"{self.hours * 60:.0f} minutes"
        )


def fit(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the values of the least-squares line at the first and at the last point."""
    n = len(points)
    mean_x, mean_y = sum(x for x, _ in points) / n, sum(y for _, y in points) / n
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0
    return mean_y + slope * (points[0][0] - mean_x), mean_y + slope * (points[-1][0] - mean_x)


def trends(lines: Iterable[dict[str, Any]]) -> list[Trend]:
    """Fit a line to each figure of each process in each piece."""
    points: dict[tuple[int, str, str], list[tuple[float, float]]] = defaultdict(list)
    for line in lines:
        for process, figures in line.get("processes", {}).items():
            for figure, value in figures.items():
                points[line["piece"], process, figure].append((line["at"], value))
    found = []
    for (_, process, figure), all_points in points.items():
        end = all_points[-1][0]
        warm = [point for point in all_points if point[0] >= min(WARM_UP, end / 3)]
        if len(warm) > 2:
            first, last = fit(warm)
            found.append(Trend(process, figure, first, last, (warm[-1][0] - warm[0][0]) / 3600))
    return found


def faults_of(ended: dict[str, Any], lines: Sequence[dict[str, Any]]) -> list[str]:
    """Return what is wrong with a piece: jobs lost or run twice, slow stops, leaks.

    :param ended: the line with the end of the piece.
    """
    wrong = [f"lost: {each}" for each in ended["lost"]] + [f"its effect came twice: {each}" for each in ended["twice"]]
    wrong += ended["unexpected"]
    wrong += [f"open jobs of {each} at the end: {n}" for each, n in ended["left"].items()]
    for line in lines:
        if line["what"] == "stop" and line["seconds"] > line["grace"] + STOP_LIMIT:
            wrong.append(f"{line['process']} took {line['seconds']:.0f} s to stop, its grace is {line['grace']:.0f} s")
    if ended["plan"]["seconds"] >= SHORTEST:
        wrong += [f"leak? {trend}" for trend in trends(lines) if trend.is_leak]
    return wrong


# -- the table ---------------------------------------------------------------------------------------------------------


def quantile(values: Iterable[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else 0.0


def table(lines: Sequence[dict[str, Any]]) -> str:
    """Return the figures of all pieces that have ended, as a table in Markdown."""
    ended = [line for line in lines if line["what"] == "ended"]
    pieces = {line["piece"] for line in ended}
    lines = [line for line in lines if line["piece"] in pieces]
    samples = [line for line in lines if line["what"] == "sample"]
    stops = [line["seconds"] for line in lines if line["what"] == "stop"]
    faults = [line for line in lines if line["what"] == "fault"]
    latencies = [line["latency"] for line in samples if line["latency"] and line["latency"][0] is not None]
    hours = sum(line["at"] for line in ended) / 3600
    rows = [
        ("hours, in pieces", f"{hours:.2f}, {len(ended)}"),
        ("jobs done", f"{sum(line['done'] for line in ended):,}"),
        ("jobs cancelled", f"{sum(line['cancelled'] for line in ended):,}"),
        ("jobs lost", f"{sum(len(line['lost']) for line in ended)}"),
        ("effects twice", f"{sum(len(line['twice']) for line in ended)}"),
        ("faults", f"{len(faults)}: {_by_kind(faults)}"),
        ("graceful stops; median and longest, s", _stops(stops)),
        ("latency, median of the samples' p50 and p99, ms", _latency(latencies, 0.5)),
        ("latency, worst tenth of the samples' p50 and p99, ms", _latency(latencies, 0.9)),
        ("connections, median and most", _middle_and_most(line["connections"] for line in samples)),
        ("dead rows, median and most", _middle_and_most(_sum(line, "dead") for line in samples)),
        ("tables, MiB, median and most", _middle_and_most(_sum(line, "table_bytes") / 2**20 for line in samples)),
        ("indexes, MiB, median and most", _middle_and_most(_sum(line, "index_bytes") / 2**20 for line in samples)),
    ]
    kept = [trend for trend in trends(samples) if trend.figure != "threads"]
    rows += [
        (f"{each.process}: {UNITS[each.figure]}, line from, to", f"{each.first:.1f}, {each.last:.1f}") for each in kept
    ]
    return "\n".join(["| | |", "| --- | --: |", *(f"| {name} | {value} |" for name, value in rows)])


def _by_kind(faults: Sequence[dict[str, Any]]) -> str:
    counts: dict[str, int] = defaultdict(int)
    for fault in faults:
        counts[fault["kind"]] += 1
    return ", ".join(f"{number} {kind}" for kind, number in sorted(counts.items()))


def _stops(seconds: Sequence[float]) -> str:
    return f"{len(seconds)}; {quantile(seconds, 0.5):.1f}, {max(seconds, default=0.0):.1f}"


def _latency(latencies: Sequence[Sequence[float]], share: float) -> str:
    halves, ends = [each[0] for each in latencies], [each[1] for each in latencies]
    return f"{quantile(halves, share) * 1000:,.0f}, {quantile(ends, share) * 1000:,.0f}"


def _middle_and_most(values: Iterable[float]) -> str:
    all_values = [*values]
    return f"{quantile(all_values, 0.5):,.0f}, {max(all_values, default=0):,.0f}"


def _sum(line: dict[str, Any], figure: str) -> float:
    return float(sum(each[figure] for each in line["tables"].values()))
