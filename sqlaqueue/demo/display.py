"""What the demo prints: a live line of progress on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.text import Text

_WINDOW = 2.0
"""Seconds over which the rate is measured."""

_NOW_AND_THEN = 1.0
"""Seconds between two lines where nothing can be redrawn."""

_LONGEST_LIST = 20


class Display:
    """Prints what goes on.

    :param console: where to.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = console.is_terminal and not console.is_dumb_terminal
        self._progress: Progress | None = None
        self._task = TaskID(0)
        self._total = 0
        self._samples: deque[tuple[float, int]] = deque()
        self._said_at = 0.0

    def say(self, text: str = "", style: str = "") -> None:
        """Print a line, above the progress if that is shown."""
        console = self._console if self._progress is None else self._progress.console
        # As it stands: a name of a file may look like markup, and a line that is cut is hard to search for.
        console.print(Text(text, style), soft_wrap=True)

    def say_list(self, lines: Sequence[str]) -> None:
        """Print lines below another, if there are not too many."""
        for line in lines[:_LONGEST_LIST]:
            self.say(f"    {line}")
        if len(lines) > _LONGEST_LIST:
            self.say(f"    and {len(lines) - _LONGEST_LIST} more")

    @contextmanager
    def progress(self, title: str, total: int) -> Iterator[None]:
        """Show progress while the block runs."""
        self._total, self._said_at = total, time.monotonic()
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
        """Show how far the jobs are."""
        now = time.monotonic()
        pending = max(0, self._total - done - failed - running)
        rate = self._rate(now, done + failed)
        counts = f"{pending} pending, {running} running, {done} done, {failed} failed, {rate:.0f} jobs/s"
        if self._progress is not None:
            self._progress.update(self._task, completed=done + failed, counts=counts)
        elif now - self._said_at >= _NOW_AND_THEN:
            self._said_at = now
            self.say(f"  {counts}")

    def _rate(self, now: float, ended: int) -> float:
        self._samples.append((now, ended))
        while now - self._samples[0][0] > _WINDOW and len(self._samples) > 2:  # noqa: PLR2004 - a rate needs two
            self._samples.popleft()
        (began, before), (until, after) = self._samples[0], self._samples[-1]
        return (after - before) / (until - began) if until > began else 0.0
