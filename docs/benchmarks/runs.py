"""What a limit, an order or a rate has admitted too many, from the times at which handlers began and ended.

The handlers record these times themselves (:class:`~docs.benchmarks.systems.protocol.RunLog`), in all processes by the
same clock, so the result says what ran, and not what the rows of the queue say.
"""

from __future__ import annotations

import math
import struct
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from docs.benchmarks.systems.protocol import RUN_RECORD


@dataclass(frozen=True)
class Run:
    """One call of a handler.

    :param number: of the job, in the order of enqueueing.
    :param begin: seconds by a clock that all processes share; ``end`` likewise.
    """

    key: int
    number: int
    begin: float
    end: float


def read(directory: Path, killed: float) -> list[Run]:
    """Read what the processes of a workload have recorded.

    :param killed: when a process was killed. Unfinished runs that began before have ended then; others have not ended.
    """
    record = struct.Struct(RUN_RECORD)
    found = []
    for path in directory.iterdir():
        # The file is as large as the largest number of runs; the records end with the first empty one.
        for key, number, begin, end in record.iter_unpack(path.read_bytes()):
            if not begin:
                break
            found.append(Run(key, number, begin, end or (killed if begin <= killed else math.inf)))
    return found


def by_key(runs: Iterable[Run], *, per_key: bool = True) -> dict[int, list[Run]]:
    """Return the runs of each key; all as those of one key if there is no limit of each."""
    keyed: dict[int, list[Run]] = defaultdict(list)
    for run in runs:
        keyed[run.key if per_key else 0].append(run)
    return keyed


def too_many(runs: Iterable[Run], flow: Mapping[str, Any]) -> float | None:
    """Return how many too many a system has admitted at worst, 0 if none; None if there is no limit to exceed.

    Of a limit and an order it is the largest number of runs at once of one key, less the limit. Of a rate it is the
    largest number that began within any period, less those that may begin in it.

    :param flow: what the system was configured with, see `FLOW` in :mod:`docs.benchmarks.systems`.
    """
    keyed = by_key(runs, per_key=flow["per_key"])
    match flow["kind"]:
        case "limit" | "order":
            return max(max(at_once(some) for some in keyed.values()) - flow["most"], 0)
        case "rate":
            return max(above_rate([run.begin for run in some], flow["most"], flow["most"]) for some in keyed.values())
        case _:
            return None


def at_once(runs: Iterable[Run]) -> int:
    """Return the largest number of runs at the same time; one that begins when another one ends follows it."""
    marks = [(run.begin, 1) for run in runs] + [(run.end, -1) for run in runs]
    most = now = 0
    for _, change in sorted(marks):
        now += change
        most = max(most, now)
    return most


def above_rate(begins: Iterable[float], per_second: float, burst: int) -> int:
    """Return by how many the beginnings exceed ``burst + per_second * t`` in the worst of all periods ``t``."""
    level, last, highest = 0.0, -math.inf, 0.0
    for begin in sorted(begins):
        level = max(level - (begin - last) * per_second, 0.0) + 1
        last = begin
        highest = max(highest, level)
    return max(math.ceil(highest - burst - 1e-6), 0)


def out_of_order(runs: Iterable[Run]) -> int:
    """Return how many runs began before an earlier job of their key had ended, or after a later one had begun.

    Only for jobs that run once.
    """
    count = 0
    for some in by_key(runs).values():
        by_number = sorted(some, key=lambda run: run.number)
        count += sum(later.begin < earlier.end for earlier, later in pairwise(by_number))
    return count
