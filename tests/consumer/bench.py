"""A queue of one strategy with one kind of Consumer, and what tests do with them."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, get_args

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import sessionmaker

from sqlaqueue import AsyncConsumer, Consumer, JobEvent
from sqlaqueue.consumer.core.events import EventName
from sqlaqueue.mapping.mixin import spec_of
from tests.consumer.handler_io import DEADLINE, Handler, for_async, for_sync
from tests.consumer.models import models
from tests.consumer.processes import Worker, wait_until
from tests.servers import Database


async def nothing(io: Any, job: Any) -> None:
    """Handle a job by doing nothing."""


class Bench:
    """A database with the queue of one strategy, to be worked on by Consumers of one API, sync or async."""

    def __init__(
        self,
        database: Database,
        strategy: str,
        api: str = "sync",
        *,
        notify: bool = True,
        engine: sa.Engine | None = None,
    ) -> None:
        self.database, self.strategy, self.api = database, strategy, api
        self.models = models(strategy, notify=notify)
        self.Job, self.Owner, self.Effect = self.models.job, self.models.owner, self.models.effect
        self.held = strategy != "update_status"
        """Whether an open transaction holds claimed jobs, not a lease."""
        self.has_status = strategy != "own_message"
        # No pool: what the tests of a lost database do to connections must not be seen here.
        self.engine = engine or sa.create_engine(database.url(), poolclass=sa.NullPool)
        self.sessions = sessionmaker(self.engine)

    # -- the tables ------------------------------------------------------------------------------------------

    def create(self) -> None:
        self.models.base.metadata.create_all(self.engine)

    def clear(self) -> None:
        """Empty all tables; a thread that a test has left behind may still use them."""
        tables = ", ".join(f'"{table.name}"' for table in self.models.base.metadata.tables.values())
        self.execute(f"TRUNCATE {tables} RESTART IDENTITY")

    def enqueue(self, n: int = 1, **values: Any) -> list[int]:
        """Add jobs and return their keys, in the order in which they will be claimed."""
        with self.sessions() as session:
            jobs = [self.Job(**values) for _ in range(n)]
            session.add_all(jobs)
            session.commit()
            return [job.id for job in jobs]

    def execute(self, statement: Any, **parameters: Any) -> Any:
        """Execute something by itself and commit; return the first value, if there is one."""
        with self.engine.begin() as connection:
            result = connection.execute(sa.text(statement) if isinstance(statement, str) else statement, parameters)
            return result.scalar() if result.returns_rows else result.rowcount

    def snapshot(self) -> sa.Connection:
        """Return a connection whose next transaction reads from one snapshot."""
        return self.engine.connect().execution_options(isolation_level="REPEATABLE READ")

    def rows(self) -> dict[int, Any]:
        """Return the committed rows of all jobs by key."""
        table = self.Job.__table__
        with self.engine.connect() as connection:
            return {row.id: row for row in connection.execute(sa.select(table).order_by(table.c.id))}

    def row(self, key: int) -> Any:
        return self.rows()[key]

    def states(self) -> Counter[str]:
        """Return how many jobs are in which state; where rows have none, those that are left wait."""
        if self.has_status:
            return Counter(row.status for row in self.rows().values())
        return Counter({"pending": len(self.rows())}) + self.dead_letters()

    def dead_letters(self) -> Counter[str]:
        with self.engine.connect() as connection:
            return Counter(connection.scalars(sa.text("SELECT state FROM sqlaqueue_dead_letter")))

    def attempts(self) -> dict[int, int]:
        return {key: row.attempts for key, row in self.rows().items()}

    def effects(self) -> Counter[int]:
        """Return how often each job's handler has had an effect in the database."""
        with self.engine.connect() as connection:
            return Counter(connection.scalars(sa.select(self.Effect.__table__.c.job)))

    def effect(self, key: int, note: str | None = None) -> Any:
        """Return the statement by which a handler has an effect."""
        return sa.insert(self.Effect).values(job=key, note=note)

    def assert_tidy(self) -> None:
        """Assert that the crash journal is empty, and that messages and waiting jobs match."""
        if self.held:
            assert self.execute("SELECT count(*) FROM sqlaqueue_crash_journal") == 0, "the crash journal is not empty"
        messages = spec_of(self.Job).side_tables.get("messages")
        if messages is not None:
            with self.engine.connect() as connection:
                waiting = {key for key, row in self.rows().items() if row.status == "pending"}
                assert set(connection.scalars(sa.select(messages.c.id))) == waiting

    # -- the Consumers ---------------------------------------------------------------------------------------

    def consumer(
        self, handler: Handler = nothing, *, engine: Mapping[str, Any] | None = None, **options: Any
    ) -> Server:
        """Return a Consumer of this API; ``engine`` are options for its engine."""
        options = {"poll_interval": 0.05, "grace": 20} | options
        model = options.pop("model", self.Job)
        session = options.pop("session", {})
        if self.api == "sync":
            return SyncServer(self, model, handler, engine or {}, session, options)
        return AsyncServer(self, model, handler, engine or {}, session, options)

    def worker(self, handler: str, **options: Any) -> Worker:
        """Return a process with a Consumer, whose handler is a function of :mod:`tests.consumer.handlers`."""
        return Worker(self.database, self.strategy, self.api, handler, options)


class Server:
    """A Consumer with its engine and a record of its events."""

    consumer: Any

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.events: list[JobEvent] = []
        self.error: BaseException | None = None
        self.finished, self.given_up = threading.Event(), threading.Event()
        self.session: Any = None
        """The maker of sessions."""

    def _listen(self) -> None:
        for name in get_args(EventName):
            self.consumer.on(name, self.events.append)

    def told(self, *names: str) -> Counter[str] | list[int]:
        """Return how often each event happened, or the keys of the jobs to which those named happened."""
        if not names:
            return Counter(event.name for event in list(self.events))
        return [event.key[0] for event in list(self.events) if event.name in names]

    def run(self) -> None:
        raise NotImplementedError

    def drain(self) -> int:
        raise NotImplementedError

    def drain_again(self) -> int:
        """Drain while it runs in another thread, or after; the pool is not this one's to close."""
        found = self.consumer.drain()
        return asyncio.run(found) if asyncio.iscoroutine(found) else found

    def stop(self) -> None:
        self.consumer.stop()

    @contextlib.contextmanager
    def running(self) -> Iterator[Server]:
        """Serve in a thread; in the end stop, and raise what it raised."""
        self.finished.clear()

        def serve() -> None:
            try:
                self.run()
            except BaseException as error:  # noqa: BLE001 - for the test to see
                self.error = error
            finally:
                self.finished.set()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        # A stop before the beginning would have nothing to end.
        wait_until(lambda: self.consumer._context is not None or self.finished.is_set())
        try:
            yield self
        except BaseException:
            # A handler that waits on would outlive its test, and its connection be found unclosed in another one.
            self.given_up.set()
            raise
        finally:
            self.stop()
            assert self.finished.wait(DEADLINE), "the Consumer did not stop"
            thread.join()
        if self.error is not None:
            raise self.error


def pool_of(options: Mapping[str, Any], engine: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options for an engine; its pool is as large as a Consumer with ``options`` needs it."""
    size = {} if "poolclass" in engine else {"pool_size": options.get("concurrency", 1) + 1}
    return {**size, **engine}


class SyncServer(Server):
    def __init__(
        self, bench: Bench, model: Any, handler: Handler, engine: Mapping[str, Any], session: Any, options: Any
    ) -> None:
        super().__init__(bench)
        self.engine = sa.create_engine(bench.database.url(), **pool_of(options, engine))
        self.session = sessionmaker(self.engine, **session)
        self.consumer = Consumer(model, for_sync(handler, self.given_up), self.session, **options)
        self._listen()

    @property
    def sync_engine(self) -> sa.Engine:
        return self.engine

    def run(self) -> None:
        try:
            self.consumer.run()
        finally:
            self.engine.dispose()

    def drain(self) -> int:
        try:
            return self.consumer.drain()
        finally:
            self.engine.dispose()


class AsyncServer(Server):
    def __init__(
        self, bench: Bench, model: Any, handler: Handler, engine: Mapping[str, Any], session: Any, options: Any
    ) -> None:
        super().__init__(bench)
        url = bench.database.url("asyncpg")
        self.engine = create_async_engine(url, **pool_of(options, engine))
        self.session = async_sessionmaker(self.engine, **session)
        self.consumer = AsyncConsumer(model, for_async(handler, self.given_up), self.session, **options)
        self._listen()

    @property
    def sync_engine(self) -> sa.Engine:
        return self.engine.sync_engine

    async def _serve(self, verb: str) -> Any:
        try:
            return await getattr(self.consumer, verb)()
        finally:
            await self.engine.dispose()

    def run(self) -> None:
        asyncio.run(self._serve("run"))

    def drain(self) -> int:
        return asyncio.run(self._serve("drain"))
