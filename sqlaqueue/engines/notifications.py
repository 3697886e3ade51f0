"""Notifications within one process, for engines whose server sends none.

They reach the Consumers and callers of this process whose engine has the same database. Those of other processes find
new jobs by polling.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event

from sqlaqueue.notify_payloads import Signal
from sqlaqueue.postgresql.ddl import queue_of
from sqlaqueue.postgresql.schedule_tables import SCHEDULE_CHANNEL
from sqlaqueue.postgresql.triggers import channel_of
from sqlaqueue.queue.names import SCHEDULE
from sqlaqueue.sql.engine import OURS, OWN_WORK, notes_written_rows

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


def subscribe(engine: sa.Engine, deliver: _Deliver) -> Callable[[], None]:
    """Call ``deliver(channel, text)`` for each notification of an engine's database; return what ends this."""
    database = database_of(engine)
    with _lock:
        _subscribers.setdefault(database, []).append(deliver)

    def end() -> None:
        with _lock:
            delivers = _subscribers.get(database, [])
            # A forked child has none of its parent's.
            if deliver in delivers:
                delivers.remove(deliver)

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
    if context.isupdate and OURS in context.execution_options and not spec.flow_rules:
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
