"""SIGTERM and SIGINT stop the Consumers of a process: all of them, once."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

logger = logging.getLogger("sqlaqueue")

_NUMBERS = (signal.SIGTERM, signal.SIGINT)


class _Doorbell:
    """The signal handlers of this process, there as long as a Consumer runs in its main thread."""

    def __init__(self) -> None:
        self._stops: list[Callable[[], None]] = []
        self._in_main = 0
        self._before: dict[signal.Signals, Any] = {}

    @contextmanager
    def answered_by(self, stop: Callable[[], None]) -> Iterator[None]:
        """Have ``stop`` called when a signal arrives."""
        in_main = threading.current_thread() is threading.main_thread()
        self._stops.append(stop)
        if in_main:
            self._in_main += 1
            if self._in_main == 1:
                # Not by the event loop: two Consumers in one loop would take the handlers away from each other.
                self._before = {number: signal.signal(number, self._ring) for number in _NUMBERS}
        try:
            yield
        finally:
            self._stops.remove(stop)
            if in_main:
                self._in_main -= 1
                if self._in_main == 0:
                    for number, handler in self._before.items():
                        # None: somebody has set it without Python's knowledge, and only they could set it again.
                        signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _ring(self, number: int, _: FrameType | None) -> None:
        """Stop all; leave the next signal, whichever it is, to the operating system: it ends the process at once."""
        for either in _NUMBERS:
            signal.signal(either, signal.SIG_DFL)
        for stop in list(self._stops):
            stop()
        logger.info("%s: stopping", signal.Signals(number).name)


doorbell = _Doorbell()
