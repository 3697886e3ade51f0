"""Transactions that are driven step by step on connections of their own, while others wait for their locks."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

Step = str | Callable[[Session], Any]
APPLY = "SET CONSTRAINTS ALL IMMEDIATE"
"""Do at once what the commit would do, so that others are driven in the moment before the commit is visible."""
COMMIT, ROLLBACK = "COMMIT", "ROLLBACK"
DEADLINE = 15.0


class Actor:
    """A session whose steps are executed by a thread."""

    def __init__(self, engine: sa.Engine, isolation: str | None = None) -> None:
        options: Any = {"isolation_level": isolation} if isolation else {}
        self._connection = engine.connect().execution_options(**options)
        self.pid = self._connection.scalar(sa.text("SELECT pg_backend_pid()"))
        self._connection.rollback()
        self.session = Session(self._connection, expire_on_commit=False)
        self._thread = ThreadPoolExecutor(1)
        self._last: Future[None] | None = None
        self.error: str | None = None

    def begin(self) -> None:
        self.error = None

    def submit(self, step: Step) -> None:
        self._last = self._thread.submit(self._execute, step)

    def _execute(self, step: Step) -> None:
        if self.error:
            return
        try:
            if step == COMMIT:
                self.session.commit()
            elif step == ROLLBACK:
                self.session.rollback()
            elif isinstance(step, str):
                self.session.execute(sa.text(step))
            else:
                step(self.session)
        except DBAPIError as error:
            self.error = str(getattr(error.orig, "sqlstate", None)) + ": " + str(error.orig).splitlines()[0]
            self.session.rollback()

    def has_done(self, timeout: float = 0) -> bool:
        if self._last is None:
            return True
        try:
            self._last.result(timeout)
        except TimeoutError:
            return False
        return True

    def close(self) -> None:
        self._thread.shutdown()
        self.session.close()
        self._connection.close()


class Driver:
    """Two or three actors, and a connection that sees whether one of them waits for another."""

    def __init__(self, engine: sa.Engine, isolations: Mapping[str, str | None]) -> None:
        self.actors = {name: Actor(engine, isolation) for name, isolation in isolations.items()}
        self.watcher = engine.execution_options(isolation_level="AUTOCOMMIT").connect()

    def close(self) -> None:
        for actor in self.actors.values():
            actor.close()
        self.watcher.close()

    def is_blocked(self, actor: Actor, step: Step = "a step") -> bool:
        """Return once the last step of an actor has ended (False), or it waits for another (True)."""
        end = time.monotonic() + DEADLINE
        while not actor.has_done(0.001):
            found = self.watcher.scalar(sa.text(f"SELECT cardinality(pg_blocking_pids({actor.pid})) > 0"))
            if found and not actor.has_done():
                return True
            assert time.monotonic() < end, f"{step} neither ends nor waits"
        return False

    def drive(self, programs: Mapping[str, Sequence[Step]], order: str) -> list[str]:
        """Execute the steps in an order of the names of the actors; return the errors.

        The steps of an actor that waits for another one follow as soon as it goes on.
        """
        left = {name: list(steps) for name, steps in programs.items()}
        for name in left:
            self.actors[name].begin()
        for name in order:
            actor = self.actors[name]
            step = left[name].pop(0)
            actor.submit(step)
            self.is_blocked(actor, step)
        assert not any(left.values()), "the order leaves steps out"
        for name in left:
            assert self.actors[name].has_done(DEADLINE), f"{name} waits for ever"
        return [error for name in left if (error := self.actors[name].error)]


@contextmanager
def driving(engine: sa.Engine, **isolations: str | None) -> Iterator[Driver]:
    driver = Driver(engine, isolations)
    try:
        yield driver
    finally:
        driver.close()


def interleavings(first: int, second: int) -> Iterator[str]:
    """Return all orders of so many steps of A and of B."""
    if not first or not second:
        yield "A" * first + "B" * second
        return
    yield from ("A" + rest for rest in interleavings(first - 1, second))
    yield from ("B" + rest for rest in interleavings(first, second - 1))
