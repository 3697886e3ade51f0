"""How threads break off what they wait for; tasks are cancelled."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from sqlalchemy.orm import Session

from sqlaqueue.serving.steps import Beside

_BROKEN_OFF = float("inf")
_LOOK_EVERY, _QUIET = 0.5, 2.0
"""Seconds between looks, and without any such statement after which nobody looks until there is one."""


class Patience:
    """The statements that may not wait for ever, and when to look for them.

    Whoever looks must wait for no database itself.

    :param ring: has somebody ask again when to look.
    """

    def __init__(self, ring: Callable[[], object]) -> None:
        self._lock, self._ring = threading.Lock(), ring
        self._deadlines: dict[Any, float] = {}
        self._used, self._looks = float("-inf"), False

    @contextlib.contextmanager
    def of(self, step: Beside, session: Session, bind: dict[str, Any]) -> Iterator[None]:
        """Have the statements of a step broken off when its patience is over.

        :param bind: says which connection it is, in a session that has several.
        """
        if step.patience is None:
            yield
            return
        connection = session.connection(bind_arguments=bind)
        driver = connection.connection.driver_connection
        with self._lock:
            self._used = time.monotonic()
            self._deadlines[driver] = self._used + step.patience
            looks, self._looks = self._looks, True
        if not looks:
            self._ring()
        try:
            yield
        finally:
            with self._lock:
                # The word may arrive late: whoever is given this connection next must not be broken off by it.
                if self._deadlines.pop(driver) == _BROKEN_OFF and not connection.closed:
                    connection.invalidate()

    def until_look(self) -> float:
        """Return the seconds until somebody should look; inf when it would ring first."""
        with self._lock:
            self._looks = bool(self._deadlines) or time.monotonic() - self._used < _QUIET
            return _LOOK_EVERY if self._looks else float("inf")

    def break_off(self) -> None:
        """End the statements whose time is over."""
        now = time.monotonic()
        with self._lock:
            for driver, deadline in self._deadlines.items():
                if deadline <= now:
                    self._deadlines[driver] = _BROKEN_OFF
                    driver.cancel()
