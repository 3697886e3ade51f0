"""Notifications within one process, for engines whose server sends none, and how jobs of other processes are noticed.

Notifications reach the Consumers and callers of this process whose engine has the same database. What other processes
commit is found by a thread that looks for due jobs several times a second, for all idle Consumers of the process and
database. A look is a hint, as a notification is: it starts a poll, and claims nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol

import sqlalchemy as sa
from sqlalchemy import event

from sqlaqueue.engines.waits import waits_no_more
from sqlaqueue.log import fields, logger
from sqlaqueue.notify_payloads import Signal
from sqlaqueue.postgresql.ddl import queue_of
from sqlaqueue.postgresql.schedule_tables import SCHEDULE_CHANNEL
from sqlaqueue.postgresql.triggers import channel_of
from sqlaqueue.queue.names import SCHEDULE
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.sql.engine import OURS, OWN_WORK, engine_of, notes_written_rows

_PENDING = "sqlaqueue_notifications"
_PORT = 3306

_Deliver = Callable[[str, str], None]
_subscribers: dict[object, list[_Deliver]] = {}
_lock = threading.Lock()


def database_of(engine: sa.Engine) -> object:
    """Return what identifies the database of an engine within this process."""
    url, name = engine.url, engine.url.database
    if engine.dialect.name != "sqlite":
        # Without the user, the driver and its options, which differ from engine to engine.
        return url.host or "localhost", url.port or _PORT, url.query.get("unix_socket"), name
    if not name or ":memory:" in name or "mode=memory" in str(url):
        return id(engine.dialect)
    # With uri=true it is a URI, such as file:jobs.db or file:///var/jobs.db.
    return os.path.realpath(re.sub("^file:(//(localhost)?(?=/))?", "", name) if "uri" in url.query else name)


def subscribe(
    engine: sa.Engine, deliver: _Deliver, watched: tuple[QueueSpec, IdleConsumer] | None = None
) -> Callable[[], Watcher | None]:
    """Call ``deliver(channel, text)`` for each notification of an engine's database; return what ends this.

    :param watched: a queue and its Consumer, if jobs of other processes are to be looked for while that is idle.
    :return: a function that ends the subscription. It returns the watcher that ends with it, if it was the last one.
    """
    database = database_of(engine)
    # A database in memory has no other process, and the file that creator= opens is not known.
    is_watched = watched is not None and not isinstance(database, int)
    with _lock:
        _subscribers.setdefault(database, []).append(deliver)
        if watched is not None and is_watched:
            watcher = _watchers.get(database) or Watcher(database)
            watcher.add(engine, *watched, deliver)
            if database not in _watchers:
                _watchers[database] = watcher
                watcher.thread.start()

    def end() -> Watcher | None:
        with _lock:
            delivers = _subscribers.get(database, [])
            # A forked child has none of its parent's.
            if deliver in delivers:
                delivers.remove(deliver)
            watcher = _watchers.get(database) if is_watched else None
            if watcher is None or watcher.remove(deliver):
                return None
            del _watchers[database]
            watcher.stop()
            return watcher

    return end


def notify_within_process(engine: sa.Engine) -> None:
    """Notify the subscribers of an engine's database after each commit of a transaction that has sent something."""
    dialect, database = engine.dialect, database_of(engine)
    commit = dialect.do_commit

    def do_commit(connection: Any) -> None:
        commit(connection)
        info: Any = getattr(connection, "info", {})
        for channel, text in dict.fromkeys(info.pop(_PENDING, ())):
            with _lock:
                delivers = [*_subscribers.get(database, ())]
            for deliver in delivers:
                deliver(channel, text)

    dialect.do_commit = do_commit  # type: ignore[method-assign, assignment] # of this engine only

    @event.listens_for(engine, "after_cursor_execute")
    def changed(
        connection: sa.Connection, cursor: Any, statement: str, parameters: Any, context: Any, executemany: bool
    ) -> None:
        if context is None or not (context.isinsert or context.isupdate) or OWN_WORK.get():
            return
        channel = _channel_of_change(context)
        if channel is not None:
            send(connection.connection.info, channel, Signal.POLL)

    @event.listens_for(engine, "rollback")
    def forget(connection: sa.Connection) -> None:
        # A connection that was lost has its info no more.
        if not connection.invalidated:
            connection.connection.info.pop(_PENDING, None)


def _channel_of_change(context: Any) -> str | None:
    """Return the channel of the queue whose jobs an INSERT or UPDATE has made pending; None for any other."""
    table = getattr(getattr(context.compiled, "compile_state", None), "dml_table", None)
    if table is not None and table.name == SCHEDULE:
        return SCHEDULE_CHANNEL
    spec = None if table is None else queue_of(table)
    if spec is None:
        return None
    # The end of any run may make room for another job.
    if context.isupdate and OURS in context.execution_options and spec.has("status") and not spec.flow_rules:
        # A settlement by a Consumer, which knows itself when the job is due again, or a verb of the program.
        state = context.compiled_parameters[0].get(spec.columns["status"].key)
        if state != spec.status_value("pending"):
            return None
    return channel_of(spec)


def send(info: Any, channel: str, text: str) -> None:
    """Send a notification when the transaction of a connection is committed.

    :param info: the ``info`` of the connection.
    """
    info.setdefault(_PENDING, []).append((channel, str(text)))


def _after_fork_in_child() -> None:
    """Forget the subscribers of the parent process, and the lock, which a thread may have that is missing here."""
    global _lock  # noqa: PLW0603 - nothing else replaces it
    _lock = threading.Lock()
    _subscribers.clear()
    _watchers.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)


def note_before_inserts(engine: sa.Engine, key: str, read: Callable[[sa.Connection, sa.Table, str], Any]) -> None:
    """Note something before the first INSERT of a transaction into the table of a queue.

    The functions of :mod:`sqlaqueue.testing` ask for it: PostgreSQL keeps a transaction with each row, and other
    databases do not. The note is taken only in a program that has imported that module: its tables are those of tests.

    :param key: the key of the notes in the ``info`` of the connection, by the names of tables with their schemas.
    :param read: returns what is noted, given the table and its quoted name in the database.
    """

    @event.listens_for(engine, "before_cursor_execute")
    def note(
        connection: sa.Connection, cursor: Any, statement: str, parameters: Any, context: Any, executemany: bool
    ) -> None:
        if not (notes_written_rows() and context is not None and context.isinsert):
            return
        table = getattr(getattr(context.compiled, "compile_state", None), "dml_table", None)
        if table is None or queue_of(table) is None:
            return
        notes = connection.connection.info.setdefault(key, {})
        if table.fullname not in notes:
            schemas = context.execution_options.get("schema_translate_map") or {}
            preparer = connection.dialect.identifier_preparer
            schema, name = schemas.get(table.schema, table.schema), preparer.quote(table.name)
            quoted = name if schema is None else f"{preparer.quote_schema(schema)}.{name}"
            notes[table.fullname] = read(connection, table, quoted)

    @event.listens_for(engine, "commit")
    @event.listens_for(engine, "rollback")
    def forget(connection: sa.Connection) -> None:
        # A connection that was lost has its info no more.
        if not connection.invalidated:
            connection.connection.info.pop(key, None)


# -- jobs of other processes -------------------------------------------------------------------------------------------
# The server tells nothing of what others commit, so a thread looks for due jobs. One read of the first entry of the
# claim's index is cheaper than anything by which a program could announce its jobs: a counter that each transaction
# changes would let them wait for each other, and plain SQL would not change it. ``PRAGMA data_version`` would cost as
# much as that read, and says neither which queue has changed nor that a job has become due.

LOOK = 0.05
"""Seconds between two looks."""

_LONGEST_PAUSE = 1.0
"""The most seconds between two looks at a queue whose due jobs no idle Consumer of this process claims.

They belong to other Consumers, or the queue is paused.
"""

_SHARE = 10
"""The pause after looks is at least so many times as long as they took, as after many jobs of a later time."""

_MOST_PRIORITIES = 20
"""How many priorities one look reads; the others are left to polls. Some programs give each job one of its own."""

_REPLY_TIMEOUT = 10
"""Seconds for the reply to a look: a connection without one may be half open."""

_FILE_CHECK = 20
"""Looks between two checks of whether the file is still the same one."""

_FIRST_DELAY, _LONGEST_DELAY = 0.2, 30.0
"""Seconds before a lost connection is replaced, and at most."""


class IdleConsumer(Protocol):
    """What the watcher asks a Consumer."""

    waits: int
    """How many of its workers wait for the next poll."""
    found: bool
    """Whether its last poll has found jobs."""
    has_polled: bool
    """Whether the database has answered a poll."""


class _WatchedQueue:
    """A queue that is watched, for one Consumer or more of this process."""

    def __init__(self, engine: sa.Engine, spec: QueueSpec) -> None:
        self.channel = channel_of(spec)
        self._engine, self._spec = engine, spec
        self.consumers: list[tuple[sa.Engine, IdleConsumer, _Deliver]] = []
        self.pause = self.next_look = 0.0

    @cached_property
    def _statements(self) -> tuple[Any, Any, Any]:
        """The statements that read the first pending job, the first of the next priority, and a job that has waited.

        They are compiled at the first look, as the dialect knows its default schema only once it has connected.
        """
        engine, spec = self._engine, self._spec
        priority, run_at = spec.columns.get("priority"), spec.columns.get("run_at")
        now: Any = sa.literal_column("UTC_TIMESTAMP(6)")
        if engine.dialect.name == "sqlite":
            now = sa.bindparam("now", type_=sa.String())
        is_due: Any = sa.literal_column("1") if run_at is None else run_at <= now
        if run_at is not None and run_at.nullable:
            is_due = sa.or_(is_due, run_at.is_(None))
        level: Any = sa.literal_column("0") if priority is None else priority
        order = [spec.columns[role] for role in spec.order_roles]
        # By the order of the claim's index, in which the first pending job of a priority is the one due first.
        pending = [spec.in_state("pending")] if spec.has("status") else []
        first = sa.select(is_due, level).where(*pending).order_by(*order).limit(1)
        schemas = _schemas_of(engine)
        options: Any = {"schema_translate_map": schemas, "render_schema_translate": True} if schemas else {}
        following = None
        if priority is not None and run_at is not None:
            above = first.where(priority > sa.bindparam("last", type_=sa.Integer()))
            following = above.compile(dialect=engine.dialect, **options)
        waited = None
        other: Any = engine_of(engine.dialect)
        if spec.waits:
            look: Any = sa.select(*spec.keys).where(waits_no_more(spec, other)).limit(1)
            waited = look.compile(dialect=engine.dialect, **options)
        return first.compile(dialect=engine.dialect, **options), following, waited

    def is_due(self, cursor: Any) -> bool:
        """Return whether a pending job is due, of one of the first priorities, or a job waits for others no more."""
        first, following, waited = self._statements
        values: dict[str, Any] = {"now": datetime.now(UTC).replace(tzinfo=None).isoformat(" ", "microseconds")}
        for number in range(_MOST_PRIORITIES):
            statement = following if number else first
            found = _rows(cursor, statement, values) if statement is not None else []
            if not found:
                break
            is_due, values["last"] = found[0]
            if is_due:
                return True
        return waited is not None and bool(_rows(cursor, waited, values))

    def look(self, cursor: Any) -> None:
        """Let the idle Consumers poll if a job is due."""
        idle = [
            (consumer, deliver) for _, consumer, deliver in self.consumers if consumer.waits and consumer.has_polled
        ]
        now = time.monotonic()
        if not idle or now < self.next_look:
            return
        if not self.is_due(cursor):
            self.pause = 0.0
            return
        self.pause = 0.0 if any(consumer.found for consumer, _ in idle) else min(2 * self.pause + LOOK, _LONGEST_PAUSE)
        self.next_look = now + self.pause
        for _, deliver in idle:
            deliver(self.channel, str(Signal.POLL))


def _rows(cursor: Any, statement: Any, values: dict[str, Any]) -> Any:
    """Return all rows of a compiled SELECT: a statement of SQLite that is not finished keeps its snapshot."""
    known = statement.construct_params(values)
    cursor.execute(str(statement), [known[name] for name in statement.positiontup] if statement.positional else known)
    return cursor.fetchall()


def _schemas_of(engine: sa.Engine) -> Any:
    """Return the schemas by which an engine replaces those of tables; None if it keeps them."""
    return engine.get_execution_options().get("schema_translate_map")


class Watcher:
    """A thread with a connection of its own that looks for due jobs in the queues of one database.

    It ends when the last Consumer has ended. The connection is not one of the pool.
    """

    def __init__(self, database: object) -> None:
        self._database = database
        self._queues: dict[tuple[QueueSpec, str], _WatchedQueue] = {}
        """By the schemas as well, as engines may have different ones for a table."""
        self._failures = 0
        """How many connections in a row have failed before they proved to work."""
        self._ended = threading.Event()
        self.thread = threading.Thread(target=self._run, name="sqlaqueue-watcher", daemon=True)

    def add(self, engine: sa.Engine, spec: QueueSpec, consumer: IdleConsumer, deliver: _Deliver) -> None:
        """Watch a queue for a Consumer. The caller has the lock."""
        key = spec, repr(_schemas_of(engine))
        queue = self._queues.get(key) or _WatchedQueue(engine, spec)
        queue.consumers = [*queue.consumers, (engine, consumer, deliver)]
        # Another dict, as the thread iterates over this one.
        self._queues = {**self._queues, key: queue}

    def remove(self, deliver: _Deliver) -> bool:
        """Watch no more for a subscriber; return whether others are left. The caller has the lock."""
        for queue in self._queues.values():
            queue.consumers = [each for each in queue.consumers if each[-1] is not deliver]
        self._queues = {key: queue for key, queue in self._queues.items() if queue.consumers}
        return bool(self._queues)

    def stop(self) -> None:
        self._ended.set()

    def _run(self) -> None:
        pause = LOOK
        while not self._ended.wait(pause):
            engine, pause = self._engine(), LOOK
            if engine is None:
                continue
            try:
                if engine.dialect.is_async:
                    # In a loop of its own, as the one of the Consumer may be busy.
                    asyncio.run(_in_greenlet(partial(self._watch, engine)))
                else:
                    self._watch(engine)
            except Exception as error:  # noqa: BLE001 - Consumers poll meanwhile, and the next try may succeed
                self._failures += 1
                pause = min(_LONGEST_DELAY, _FIRST_DELAY * 2.0 ** min(self._failures, 10))
                if self._failures == 1:
                    kind = type(error).__name__
                    text = "cannot look for jobs of other processes, polling: %s: %s"
                    logger.warning(text, kind, error, extra=fields("listener_lost", error_kind=kind))

    def _engine(self) -> sa.Engine | None:
        """Return the engine of an idle Consumer; None while there is none.

        It has connected before. SQLAlchemy asks the server for its version by the first connection of an engine, and
        another pool would not wait for the answer.
        """
        consumers = [each for queue in self._queues.values() for each in queue.consumers]
        return next((engine for engine, consumer, _ in consumers if consumer.waits and consumer.has_polled), None)

    def _watch(self, engine: sa.Engine) -> None:
        with self._connection(engine) as cursor:
            looks, pause = 0, LOOK
            while not self._ended.wait(pause):
                began, looks = time.monotonic(), looks + 1
                for queue in self._queues.values():
                    queue.look(cursor)
                self._failures, pause = 0, max(LOOK, _SHARE * (time.monotonic() - began))
                if looks % _FILE_CHECK == 0:
                    self._check_file()

    @contextlib.contextmanager
    def _connection(self, engine: sa.Engine) -> Iterator[Any]:
        if isinstance(self._database, str):
            # SQLite would create another file.
            self._inode = Path(self._database).stat().st_ino
        # Another pool, which has the listeners of the engine's pool.
        pool: Any = engine.pool.recreate()
        connection = pool.connect()
        try:
            engine.dialect.set_isolation_level(connection.dbapi_connection, "AUTOCOMMIT")
            driver = connection.driver_connection
            if hasattr(driver, "_read_timeout"):
                # PyMySQL and asyncmy have no other access.
                driver._read_timeout = _REPLY_TIMEOUT  # noqa: SLF001 - see above
            cursor = connection.cursor()
            yield cursor
            cursor.close()
        except BaseException:
            connection.invalidate()
            raise
        else:
            connection.detach()
            connection.close()
        finally:
            pool.dispose()

    def _check_file(self) -> None:
        """Raise an error if the file was removed or replaced, so that the connection is closed."""
        if isinstance(self._database, str) and Path(self._database).stat().st_ino != self._inode:
            msg = f"{self._database} has been replaced by another file"
            raise FileNotFoundError(msg)


async def _in_greenlet(function: Callable[[], object]) -> None:
    from sqlalchemy.ext.asyncio import AsyncSession  # noqa: PLC0415 - needs greenlet, which sync code does not

    async with AsyncSession() as session:
        await session.run_sync(lambda _: function())


_watchers: dict[object, Watcher] = {}
