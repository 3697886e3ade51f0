"""What faults have done to jobs: which were lost, ran twice or late, from the commits and the records of the runs.

The producer reports each commit that the database has acknowledged, and handlers record their runs in files, see
:class:`~docs.benchmarks.systems.protocol.RunLog`. Both are by one clock. So nothing here comes from the tables of the
queue, or from a connection that a fault can break.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from docs.benchmarks.runs import Run

LATE = 2.0
"""Seconds after which a committed job that no handler has finished is late."""


class Outcome:
    """What has become of the jobs of one measurement.

    :param committed: the number of each job whose commit was acknowledged, and when.
    :param recorded: the runs of all processes; one that a fault has cut off has an infinite end.
    """

    def __init__(self, committed: Mapping[int, float], recorded: Iterable[Run]) -> None:
        self.committed = committed
        self._times: Counter[int] = Counter()
        self._first_end: dict[int, float] = {}
        self.cut_off = 0
        """The number of runs that a fault has interrupted, which shows that it has struck."""
        for run in recorded:
            if run.end < math.inf:
                self._times[run.number] += 1
                self._first_end[run.number] = min(run.end, self._first_end.get(run.number, math.inf))
            else:
                self.cut_off += 1

    @property
    def lost(self) -> int:
        """The number of committed jobs that no handler has finished."""
        return sum(number not in self._first_end for number in self.committed)

    @property
    def twice(self) -> int:
        """The number of jobs whose handler has finished more than once."""
        return sum(times > 1 for times in self._times.values())

    @property
    def longest_wait(self) -> float:
        """The longest time in seconds from a commit to the first finished run; infinite if a job was lost."""
        return max(self._waits().values(), default=0.0)

    def recovery(self, faults: Sequence[float]) -> float:
        """Return the longest time in seconds from a fault until the end of a late job; infinite if a job was lost.

        The fault of a late job is the last one before it became late, or else the first one. 0 if no job was late
        after its fault.
        """
        longest = 0.0
        for number, wait in self._waits().items():
            if wait > LATE:
                became_late = self.committed[number] + LATE
                fault = max((one for one in faults if one <= became_late), default=faults[0])
                longest = max(longest, self._end_of(number) - fault)
        return longest

    def finished(self, begin: float, end: float) -> int:
        """Return how many jobs were finished for the first time within a period."""
        return sum(begin <= at < end for at in self._first_end.values())

    def _waits(self) -> dict[int, float]:
        return {number: self._end_of(number) - at for number, at in self.committed.items()}

    def _end_of(self, number: int) -> float:
        return self._first_end.get(number, math.inf)
