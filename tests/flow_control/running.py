"""Handlers that record what runs, and Consumers in threads."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.orm import Session, sessionmaker

from sqlaqueue import Consumer

LONG = 30.0
"""Seconds after which a test gives up."""


class Handlers:
    """Handlers that record what runs, and wait until they are let go."""

    def __init__(self, *, wait: bool = False) -> None:
        self._lock, self._gate = threading.Lock(), threading.Event()
        self.running: Counter[Any] = Counter()
        self.most: Counter[Any] = Counter()
        self.begun: dict[Any, list[int]] = defaultdict(list)
        self.moments: list[float] = []
        if not wait:
            self._gate.set()

    def __call__(self, session: Session, job: Any) -> None:
        key = job.customer_id
        with self._lock:
            self.moments.append(time.monotonic())
            self.begun[key].append(job.id)
            self.running[key] += 1
            self.most[key] = max(self.most[key], self.running[key])
        self._gate.wait(LONG)
        time.sleep(0.002)
        with self._lock:
            self.running[key] -= 1

    def let_go(self) -> None:
        """Let the handlers end."""
        self._gate.set()


def wait_for(condition: Any, seconds: float = LONG) -> None:
    """Wait until a condition is true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "timeout"
        time.sleep(0.01)


def unfinished(engine: sa.Engine, job: Any) -> int:
    """Return how many jobs are not completed."""
    table = job.__table__
    left = [table.c.status != "completed"] if "status" in table.c else []
    with engine.connect() as connection:
        return connection.scalar(sa.select(sa.func.count()).select_from(table).where(*left)) or 0


@contextlib.contextmanager
def consumers(engine: sa.Engine, job: Any, handler: Any, number: int, **options: Any) -> Iterator[None]:
    """Run Consumers until the end of the block."""
    with contextlib.ExitStack() as stack:
        for each in range(number):
            consumer = Consumer(job, handler, sessionmaker(engine), signals=False, name=str(each), **options)
            stack.enter_context(consumer)
        yield


class Looks:
    """Counts how often a Consumer asks why its claim has found nothing."""

    def __init__(self) -> None:
        self.number = 0
        self._last = 0.0

    def executed(self, connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        """Count a statement."""
        if statement.startswith("SELECT coalesce(current_setting("):
            self.number, self._last = self.number + 1, time.monotonic()

    def is_idle(self) -> bool:
        """Return whether the Consumer has found nothing, and waits; at its start it claims several times."""
        return self.number > 0 and time.monotonic() - self._last > 0.5


@contextlib.contextmanager
def looks(engine: sa.Engine) -> Iterator[Looks]:
    """Count within the block."""
    counted = Looks()
    event.listen(engine, "after_cursor_execute", counted.executed)
    try:
        yield counted
    finally:
        event.remove(engine, "after_cursor_execute", counted.executed)
