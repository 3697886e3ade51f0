"""Worker processes that are started again when they end, as a process manager does."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Self

from docs.benchmarks.system_under_test import Program

RESTART_AFTER = 1.0
"""Seconds from the end of a process to its restart, whether it was killed or has ended by itself."""
_LOOK_EVERY = 0.02


@dataclass
class _Place:
    """Holds one process, or the time at which it is started again."""

    number: int
    program: Program | None = None
    start_at: float = 0.0


@dataclass
class Crew:
    """A number of worker processes.

    :param start: starts the process with a number.
    """

    start: Callable[[int], Program]
    size: int
    exits: list[str] = field(default_factory=list)
    """The errors with which processes have ended by themselves, of each the last line."""

    def __post_init__(self) -> None:
        self._places = [_Place(number) for number in range(self.size)]

    @contextlib.contextmanager
    def running(self) -> Iterator[Self]:
        """Start the processes, wait until they run, and end them afterwards."""
        try:
            for place in self._places:
                place.program = self.start(place.number)
            for place in self._places:
                assert place.program is not None
                place.program.wait_for("ready")
                place.program.send("go")
            yield self
        finally:
            for place in self._places:
                if place.program is not None:
                    place.program.end()

    def kill(self, number: int) -> None:
        """Kill one process, if it runs."""
        place = self._places[number]
        if place.program is not None:
            self._free(place)

    def until(self, moment: float) -> None:
        """Wait until a moment of `time.perf_counter`, and start processes that have ended."""
        while time.perf_counter() < moment:
            self.tend()
            time.sleep(_LOOK_EVERY)

    def tend(self) -> None:
        """Start processes that have ended, and let those that are ready go."""
        for place in self._places:
            if place.program is None:
                if time.perf_counter() >= place.start_at:
                    place.program = self.start(place.number)
            elif place.program.has_ended:
                self.exits.append(place.program.last_error())
                self._free(place)
            elif place.program.has_event("ready"):
                place.program.wait_for("ready")
                # It may have ended meanwhile, which the next look finds.
                with contextlib.suppress(BrokenPipeError):
                    place.program.send("go")

    @staticmethod
    def _free(place: _Place) -> None:
        assert place.program is not None
        place.program.end()
        place.program, place.start_at = None, time.perf_counter() + RESTART_AFTER
