"""The output of the demo: a progress bar on a terminal, a line each second elsewhere."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.text import Text

from sqlaqueue.texts import printable

_RATE_WINDOW = 2.0
"""Seconds over which the rate is measured."""

_LINE_INTERVAL = 1.0
"""Seconds between two lines of progress without a terminal."""

_MAX_LISTED = 20


class Display:
    """Prints messages and progress.

    :param console: prints them.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = console.is_terminal and not console.is_dumb_terminal
        self._progress: Progress | None = None
        self._task = TaskID(0)
        self._total = 0
        self._samples: deque[tuple[float, int]] = deque()
        self._printed_at = 0.0

    def print(self, text: str = "", style: str = "") -> None:
        """Print a line, above the progress bar if there is one."""
        console = self._console if self._progress is None else self._progress.console
        # Without markup, as a file name may look like it; without line breaks, so that lines can be searched.
        console.print(Text("\n".join(map(printable, text.split("\n"))), style), soft_wrap=True)

    def print_list(self, lines: Sequence[str]) -> None:
        """Print indented lines, up to a maximum."""
        for line in lines[:_MAX_LISTED]:
            self.print(f"    {line}")
        if len(lines) > _MAX_LISTED:
            self.print(f"    and {len(lines) - _MAX_LISTED} more")

    @contextmanager
    def progress(self, title: str, total: int) -> Iterator[None]:
        """Show progress during the block."""
        self._total, self._printed_at = total, time.monotonic()
        self._samples.clear()
        if not self._live:
            yield
            return
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[counts]}"))
        with Progress(*columns, console=self._console) as progress:
            self._task = progress.add_task(title, total=total, counts="")
            self._progress = progress
            try:
                yield
            finally:
                self._progress = None

    def update(self, done: int, failed: int, running: int) -> None:
        """Show how many jobs are in each state."""
        now = time.monotonic()
        pending = max(0, self._total - done - failed - running)
        rate = self._rate(now, done + failed)
        counts = f"{pending} pending, {running} running, {done} done, {failed} failed, {rate:.0f} jobs/s"
        if self._progress is not None:
            self._progress.update(self._task, completed=done + failed, counts=counts)
        elif now - self._printed_at >= _LINE_INTERVAL:
            self._printed_at = now
            self.print(f"  {counts}")

    def _rate(self, now: float, ended: int) -> float:
        self._samples.append((now, ended))
        while now - self._samples[0][0] > _RATE_WINDOW and len(self._samples) > 2:  # noqa: PLR2004 - a rate needs two samples
            self._samples.popleft()
        (start, before), (end, after) = self._samples[0], self._samples[-1]
        return (after - before) / (end - start) if end > start else 0.0
