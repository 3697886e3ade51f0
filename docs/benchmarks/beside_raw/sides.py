"""What is compared: a queue that is written by hand, and the same with the library."""

from __future__ import annotations

import contextlib
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session, sessionmaker

from sqlaqueue import Consumer, claim, complete


class Side(ABC):
    """A queue in one database. It is pickled for other processes."""

    @abstractmethod
    def connect(self) -> Any:
        """Return what enqueues: a connection or an engine."""

    @abstractmethod
    def enqueue(self, connection: Any, number: int, batch: int) -> None:
        """Add jobs, in transactions of ``batch`` jobs."""

    @abstractmethod
    def enqueue_one(self, connection: Any) -> float:
        """Add a job, and return when its COMMIT was sent, by ``time.monotonic()``."""

    @abstractmethod
    def drain(self, batch: int) -> int:
        """Run all jobs with an empty handler, and return how many."""

    @abstractmethod
    def serving(
        self, begun: Callable[[], None], poll_interval: float | None
    ) -> AbstractContextManager[Callable[[], None]]:
        """Call ``begun`` for each job, in a thread; yield what is to be called after a commit in this process.

        :param poll_interval: seconds; None if it begins by a notification only.
        """


class RawSide(Side):
    """A loop without the library: it claims a batch and completes it, in one short transaction each."""

    @abstractmethod
    def insert(self, connection: Any, number: int) -> None:
        """Insert jobs, without a commit."""

    @abstractmethod
    def claim(self, connection: Any, limit: int) -> list[Any]:
        """Claim jobs without a commit, and return their keys."""

    @abstractmethod
    def complete(self, connection: Any, keys: list[Any]) -> None:
        """Complete jobs, without a commit."""

    def wait(self, connection: Any, wake: threading.Event, seconds: float | None) -> None:
        """Wait for a call of what :meth:`serving` yields, at the most for some seconds."""
        wake.wait(seconds)
        wake.clear()

    def enqueue(self, connection: Any, number: int, batch: int) -> None:
        for start in range(0, number, batch):
            self.insert(connection, min(batch, number - start))
            connection.commit()

    def enqueue_one(self, connection: Any) -> float:
        self.insert(connection, 1)
        sent = time.monotonic()
        connection.commit()
        return sent

    def drain(self, batch: int) -> int:
        done = 0
        with contextlib.closing(self.connect()) as connection:
            while number := self._run(connection, batch):
                done += number
        return done

    def _run(self, connection: Any, batch: int, begun: Callable[[], None] = lambda: None) -> int:
        keys = self.claim(connection, batch)
        connection.commit()
        if keys:
            begun()
            self.complete(connection, keys)
            connection.commit()
        return len(keys)

    @contextlib.contextmanager
    def serving(self, begun: Callable[[], None], poll_interval: float | None) -> Iterator[Callable[[], None]]:
        wake, ended = threading.Event(), threading.Event()

        def serve() -> None:
            with contextlib.closing(self.connect()) as connection:
                while not ended.is_set():
                    while self._run(connection, 1, begun):
                        pass
                    self.wait(connection, wake, poll_interval)

        thread = threading.Thread(target=serve)
        thread.start()
        yield wake.set
        ended.set()
        wake.set()
        thread.join()


class LibrarySide(Side):
    """A model, a session and a Consumer."""

    model: Any
    """The class of the jobs."""

    @abstractmethod
    def connect(self) -> sa.Engine:
        """Return an engine."""

    def new(self) -> Any:
        """Return a job."""
        return self.model(payload="x")

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of the Consumer."""
        return {}

    def enqueue(self, connection: sa.Engine, number: int, batch: int) -> None:
        for start in range(0, number, batch):
            with Session(connection) as session:
                session.add_all([self.new() for _ in range(min(batch, number - start))])
                session.commit()

    def enqueue_one(self, connection: sa.Engine) -> float:
        with Session(connection) as session:
            session.add(self.new())
            session.flush()
            sent = time.monotonic()
            session.commit()
        return sent

    def drain(self, batch: int) -> int:
        with self._consumer(lambda session, job: None, batch_size=batch) as consumer:
            return consumer.drain()

    @contextlib.contextmanager
    def serving(self, begun: Callable[[], None], poll_interval: float | None) -> Iterator[Callable[[], None]]:
        def handle(session: Session, job: Any) -> None:
            begun()

        with self._consumer(handle, batch_size=1, poll_interval=poll_interval or 3600) as consumer, consumer:
            yield lambda: None

    @contextlib.contextmanager
    def _consumer(self, handler: Callable[[Session, Any], None], **options: Any) -> Iterator[Consumer[Any]]:
        engine = self.connect()
        yield Consumer(self.model, handler, sessionmaker(engine), **(self.options | options))
        engine.dispose()


class VerbsSide(LibrarySide):
    """The statements of the library, in a loop without a Consumer."""

    def drain(self, batch: int) -> int:
        engine, done = self.connect(), 0
        with Session(engine) as session:
            while jobs := session.scalars(claim(self.model, batch)).all():
                session.commit()
                session.execute(complete(jobs))
                session.commit()
                done += len(jobs)
        engine.dispose()
        return done
