"""A queue of one strategy with one kind of Consumer, and what tests do with them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from multiprocessing.context import ForkServerProcess
from typing import Any, Self, get_args

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import sessionmaker

from sqlaqueue import AsyncConsumer, Consumer, JobEvent
from sqlaqueue.consumer.core.events import EventName
from sqlaqueue.mapping.mixin import spec_of
from sqlaqueue.postgresql.triggers import channel_of, lock_numbers
from tests.consumer import worker
from tests.consumer.models import DEADLINE, Handler, Models, for_async, for_sync, models, prepared
from tests.programs import FORKS, wait_until
from tests.servers import Database

LATER = 600.0
"""Seconds that no test waits for."""


async def nothing(io: Any, job: Any) -> None:
    """Handle a job by doing nothing."""


def noting(seen: list[Any], what: Callable[[Any, Any], Any]) -> Handler:
    """Return a handler that only adds to a list what a function makes of its arguments."""

    async def note(io: Any, job: Any) -> None:
        seen.append(what(io, job))

    return note


class Gate:
    """A handler that waits until the test lets it go on; its first calls may raise errors then.

    :param first: what each call does before that.
    """

    def __init__(self, *errors: BaseException, first: Handler = nothing) -> None:
        self._begun, self._permits, self._opened = threading.Semaphore(0), threading.Semaphore(0), threading.Event()
        self._lock, self._errors, self._first = threading.Lock(), [*errors], first
        self.calls = self.running = self.most = 0
        """How many calls there were, how many run, and how many ran at once."""

    async def __call__(self, io: Any, job: Any) -> None:
        with self._lock:
            self.calls += 1
            self.running += 1
            self.most = max(self.most, self.running)
        try:
            await self._first(io, job)
            self._begun.release()
            await io.wait_for(lambda: self._opened.is_set() or self._permits.acquire(blocking=False))
        finally:
            with self._lock:
                self.running -= 1
        if self._errors:
            raise self._errors.pop(0)

    def await_call(self, times: int = 1) -> None:
        """Wait until the handler is called, once more for each time that this was waited for."""
        for _ in range(times):
            assert self._begun.acquire(timeout=2 * DEADLINE), "the handler was not called"

    def let_go(self, calls: int = 1) -> None:
        """Let some calls go on."""
        self._permits.release(calls)

    def open(self) -> None:
        """Let all calls go on, also those to come."""
        self._opened.set()


Action = Handler | BaseException


def for_some(actions: Mapping[Any, Action], first: Handler = nothing) -> Handler:
    """Return a handler that also handles some jobs, named by key or payload, in another way, or raises an error then."""

    async def handle(io: Any, job: Any) -> None:
        key, payload = job.id, job.payload
        await first(io, job)
        action = actions.get(key, actions.get(payload))
        if isinstance(action, BaseException):
            raise action
        if action is not None:
            await action(io, job)

    return handle


class Bench:
    """A database with the queue of one strategy, to be worked on by Consumers of one API, sync or async."""

    def __init__(
        self,
        database: Database,
        strategy: str,
        api: str = "sync",
        *,
        notify: bool = True,
        made: Models | None = None,
        engine: sa.Engine | None = None,
    ) -> None:
        self.database, self.strategy, self.api = database, strategy, api
        self.models = made or models(strategy, notify=notify)
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

    def execute(self, *statements: Any, **parameters: Any) -> Any:
        """Execute statements in a transaction and commit; return the first value of the last, if there is one."""
        with self.engine.begin() as connection:
            for each in statements:
                result = connection.execute(sa.text(each) if isinstance(each, str) else each, parameters)
            return result.scalar() if result.returns_rows else result.rowcount

    def in_session(self, statement: Any) -> Any:
        """Execute a statement in a session and commit; return its rows, if it has any."""
        with self.sessions() as session:
            result = session.execute(statement)
            found = result.all() if getattr(result, "returns_rows", True) else None
            session.commit()
            return found

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

    async def work(self, io: Any, job: Any) -> None:
        """Handle a job by an effect."""
        await io.execute(self.effect(job.id))

    def doing(self, actions: Mapping[Any, Action]) -> Handler:
        """Return a handler with an effect, and with other actions for some jobs: see :func:`for_some`."""
        return for_some(actions, self.work)

    def failing(self, error: BaseException) -> Handler:
        async def fail(io: Any, job: Any) -> None:
            await self.work(io, job)
            raise error

        return fail

    def effect(self, key: int, note: str | None = None) -> Any:
        return sa.insert(self.Effect).values(job=key, note=note)

    def expect(
        self,
        states: Mapping[str, int] | None = None,
        *,
        attempts: Mapping[int, int] | int | None = None,
        effects: Mapping[int, int] | Collection[int] | int | None = None,
    ) -> None:
        """Assert what has become of the jobs, and that nothing is left over.

        A number stands for that of each job; and for ``effects`` keys without numbers for one of each of these.
        """
        found, expected = dict[str, Any](), dict[str, Any]()
        for name, given in (("states", states), ("attempts", attempts), ("effects", effects)):
            if given is not None:
                found[name] = getattr(self, name)()
                if isinstance(given, int):
                    expected[name] = dict.fromkeys(found[name] or ["a job"], given)
                else:
                    expected[name] = given if isinstance(given, Mapping) else dict.fromkeys(given, 1)
        assert found == expected, f"{found}, not {expected}"
        self.assert_tidy()

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

    def consumer(self, handler: Handler = nothing, *, model: Any = None, **options: Any) -> Server:
        """Return a Consumer of this API; the options are those of a :class:`Server` and its Consumer."""
        return Server(self.database, self.api, self.Job if model is None else model, handler, **options)

    def worker(self, handler: str, **options: Any) -> Worker:
        """Return a process with a Consumer, whose handler is a function of :mod:`tests.consumer.worker`."""
        return Worker(self.database, self.strategy, self.api, handler, options)


class Server:
    """A Consumer of one API on an engine of its own, with a record of its events.

    :param url: of the engine; by default that of the database, for the driver that most tests use.
    :param engine: options of the engine, whose pool is as large as the Consumer needs it.
    :param session: options of the maker of sessions; ``class_`` is a class of ``Session`` for both APIs.
    """

    def __init__(
        self,
        database: Any,
        api: str,
        model: Any,
        handler: Handler | Mapping[Any, Handler] = nothing,
        *,
        url: str | None = None,
        engine: Mapping[str, Any] | None = None,
        session: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.database, self.api = database, api
        self.events: list[JobEvent] = []
        self.error: BaseException | None = None
        self.finished, self.given_up = threading.Event(), threading.Event()
        self.engine: Any
        self.session: Any
        self.consumer: Any
        options = {"poll_interval": 0.2, "grace": 20} | options
        given = dict(engine or {})
        if "poolclass" not in given:
            # Named, since before SQLAlchemy 2.0.38 aiosqlite had no pool.
            kind = sa.QueuePool if api == "sync" else sa.AsyncAdaptedQueuePool
            given = {"poolclass": kind, "pool_size": options.get("concurrency", 1) + 1} | given
        if api == "sync":
            self.engine = prepared(sa.create_engine(url or database.url(), **given))
            self.session = sessionmaker(self.engine, **session or {})
        else:
            self.engine = prepared(create_async_engine(url or database.url("asyncpg"), **given))
            makes = {"sync_session_class" if name == "class_" else name: it for name, it in (session or {}).items()}
            self.session = async_sessionmaker(self.engine, **makes)
        self.consumer = self._make(model, handler, options)
        for name in get_args(EventName):
            self.consumer.on(name, self.events.append)

    def _make(self, model: Any, handler: Any, options: Mapping[str, Any]) -> Any:
        adapt: Any = for_sync if self.api == "sync" else for_async
        if isinstance(handler, Mapping):
            adapted = {kind: adapt(each, self.given_up) for kind, each in handler.items()}
        else:
            adapted = adapt(handler, self.given_up)
        return (Consumer if self.api == "sync" else AsyncConsumer)(model, adapted, self.session, **options)

    @property
    def sync_engine(self) -> sa.Engine:
        engine: sa.Engine = getattr(self.engine, "sync_engine", self.engine)
        return engine

    @property
    def context(self) -> Any:
        """That of the Consumer while it runs."""
        return self.consumer._context

    def told(self, *names: str) -> Counter[str] | list[int]:
        """Return how often each event happened, or the keys of the jobs to which those named happened."""
        if not names:
            return Counter(event.name for event in list(self.events))
        return [event.key[0] for event in list(self.events) if event.name in names]

    def errors(self, *names: str) -> list[Any]:
        return [event.error for event in list(self.events) if event.name in names]

    def run(self) -> None:
        self._serve("run")

    def drain(self) -> int:
        return int(self._serve("drain"))

    def _call(self, verb: str) -> Any:
        return getattr(self.consumer, verb)()

    def _serve(self, verb: str) -> Any:
        if self.api == "async":
            return asyncio.run(self.serve(verb))
        try:
            return self._call(verb)
        finally:
            self.engine.dispose()

    async def serve(self, verb: str = "run") -> Any:
        """Run an AsyncConsumer in this event loop."""
        try:
            return await self._call(verb)
        finally:
            await self.engine.dispose()

    def drain_again(self) -> int:
        """Drain while it runs in another thread, or after; the pool is not this one's to close."""
        found = self.consumer.drain()
        return int(asyncio.run(found) if asyncio.iscoroutine(found) else found)

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
        wait_until(lambda: self.context is not None or self.finished.is_set())
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


class Crowd(Server):
    """Consumers of a bench's queue that share an engine, run by ``run_all()``; its pool is as large as they need it."""

    def __init__(
        self, bench: Bench, *handlers: Handler, engine: Mapping[str, Any] | None = None, **options: Any
    ) -> None:
        given = {"pool_size": 2 * len(handlers), "max_overflow": 0, **(engine or {})}
        options = {"poll_interval": 0.05} | options
        super().__init__(bench.database, bench.api, bench.Job, handlers[0], engine=given, **options)
        self.consumers = [self.consumer, *(self._make(bench.Job, one, options) for one in handlers[1:])]

    def _call(self, verb: str) -> Any:
        return type(self.consumer).run_all(*self.consumers)

    def stop(self) -> None:
        for consumer in self.consumers:
            consumer.stop()

    def idle(self) -> Any:
        """Wait until all have begun; return the context of one that runs no job."""
        wait_until(lambda: all(one._context is not None for one in self.consumers))
        return next(one._context for one in self.consumers if not one._context.in_flight.busy())


class Worker:
    """A process with a Consumer; what it says on its standard output can be waited for.

    It rescues expired leases every ``rescue`` seconds, by default more often than usual; with ``restart`` it starts
    processes, a new one whenever one dies; with ``together`` several Consumers run as ``run_all()`` runs them.
    """

    def __init__(self, database: Database, strategy: str, api: str, handler: str, options: dict[str, Any]) -> None:
        options = {"poll_interval": 0.2, "grace": 20} | options
        given = {"consumers": 1, "restart": False, "together": False, "rescue": 0.2}
        order = {name: options.pop(name, value) for name, value in given.items()} | {
            "url": database.url("psycopg" if api == "sync" else "asyncpg"),
            "strategy": strategy,
            "api": api,
            "handler": handler,
            "options": options,
        }
        order["pool"] = order["consumers"] * (options.get("concurrency", 1) + 1)
        self.lines: list[str] = []
        (orders, self._orders), (self._words, words) = FORKS.Pipe(duplex=False), FORKS.Pipe(duplex=False)
        self.process: ForkServerProcess = FORKS.Process(target=worker.live, args=(order, orders, words))
        self.process.start()
        # The worker has copies of these; only the last one that is closed ends the pipe.
        orders.close()
        words.close()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with os.fdopen(os.dup(self._words.fileno())) as lines:
            for line in lines:
                self.lines.append(line.rstrip())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.join()
        # A child that hangs keeps the pipe open: what the test says of it is worth more than its last lines.
        self._reader.join(DEADLINE)
        self._orders.close()
        self._words.close()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    @property
    def has_ended(self) -> bool:
        return self.process.exitcode is not None

    def said(self, beginning: str) -> list[str]:
        """Return what follows ``beginning`` in each line that begins like that."""
        return [line.removeprefix(beginning).strip() for line in list(self.lines) if line.startswith(beginning)]

    def await_word(self, beginning: str, times: int = 1) -> None:
        """Wait until it has said something."""

        def was_said() -> bool:
            assert not self.has_ended or len(self.said(beginning)) >= times, "the worker ended before that"
            return len(self.said(beginning)) >= times

        wait_until(was_said, f"{beginning!r} from the worker")

    def write(self, line: str) -> None:
        """Say something to it."""
        os.write(self._orders.fileno(), f"{line}\n".encode())

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def await_end(self) -> int:
        """Wait for its end and return the exit code."""
        self.process.join(DEADLINE)
        assert self.process.exitcode is not None, "the worker does not end"
        self._reader.join(DEADLINE)
        assert not self._reader.is_alive(), "a child of the worker does not end"
        return self.process.exitcode


def is_listening(server: Server) -> bool:
    """Return whether it receives its own heartbeats, has told the other consumers so, and knows all upcoming jobs."""
    context = server.context
    if context is None or not context.polls.peers.listening or context.polls.wants_upcoming():
        return False
    with server.database.connect() as connection:
        row = connection.execute("SELECT listening FROM sqlaqueue_consumer WHERE id = %s", [context.id]).fetchone()
    return row is not None and row[0]


def idle(bench: Bench, **options: Any) -> Server:
    """Return a Consumer that finds new jobs by notifications only."""
    return bench.consumer(nothing, **{"poll_interval": LATER} | options)


def await_listening(*servers: Server) -> None:
    wait_until(lambda: all(map(is_listening, servers)), "that it receives its own heartbeat")


def listening_connections(bench: Bench) -> set[int]:
    """Return the numbers of the server's processes that listen."""
    others = "FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
    return set(
        bench.execute(f"SELECT array_agg(pid) {others} AND query ~ '^LISTEN|try_[a]dvisory_lock|[a]dvisory_unlock'")
        or ()
    )


def logged(log: Any, event: str) -> list[Any]:
    return [record for record in log.records if getattr(record, "event", "") == event]


@contextlib.contextmanager
def notifications(bench: Bench, first: str = "") -> Iterator[Callable[..., list[str]]]:
    """Yield a function that returns the payloads received since its last call, of one kind or of all."""
    with bench.database.connect() as connection:
        channel = channel_of(spec_of(bench.Job))
        connection.execute(f'LISTEN "{channel}"'.encode())
        # Enqueueing notifies while somebody holds this lock, as a Consumer that waits does.
        connection.execute("SELECT pg_try_advisory_lock(%s, %s)", lock_numbers(channel))

        def received(kind: str = first) -> list[str]:
            connection.execute("SELECT 1")
            return [each.payload for each in connection.notifies(timeout=0.1) if each.payload.startswith(kind)]

        yield received


def lose_at_commit(server: Server, bench: Any, when: str, *then: str, committed: bool) -> list[int]:
    """Let the first commit for which a statement finds rows lose its connection; return the backend, when it has.

    :param then: what to execute after that.
    :param committed: whether it takes place. By the time the driver asks for it, the connection is gone.
    """
    lost: list[int] = []

    @sa.event.listens_for(server.sync_engine, "commit")
    def commit(connection: sa.Connection) -> None:
        if not lost and connection.scalar(sa.text(when)):
            lost.append(connection.scalar(sa.text("SELECT pg_backend_pid()")) or 0)
            if committed:
                connection.exec_driver_sql("COMMIT")
            bench.execute("SELECT pg_terminate_backend(:pid, 10000)", pid=lost[0])
            for each in then:
                bench.execute(each)

    return lost
