"""Copies of this process that a handler makes by fork(): they share the connections, and must not serve the queue.

A copy that executes another program or ends itself in the handler is left alone, and so are the workers of
``multiprocessing``. One that comes back from the handler would settle the job, claim others and talk to the database on
the sockets of the original; it ends instead. Until then its copy of each socket that a handler's session uses is
replaced by a dead one, so that nothing it does reaches the server, and its engine begins with an empty pool.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import traceback
import weakref
from asyncio import AbstractEventLoop
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.orm import Session

from sqlaqueue.exc import HandlerMisuseError

_STATEMENTS = ("before_cursor_execute", "begin", "commit", "rollback", "savepoint", "rollback_savepoint")
"""The events of a connection by which something would be sent."""

_STANDARD_ERROR = 2


class ForkGuard:
    """Ends a copy of this process when it comes back to one run of a Consumer.

    :param queue: the queue's name.
    :param sessions: returns the sessions that handlers are using.
    """

    def __init__(self, queue: str, sessions: Callable[[], Iterable[Session]]) -> None:
        self.is_copy = False
        """This process is a copy of the one in which the run began; to ask for the process id takes longer."""
        self.handlers: Sequence[Any] = ()
        self._queue, self._sessions = queue, sessions
        self._pid = os.getpid()
        self._engine: sa.Engine | None = None
        self._loop: AbstractEventLoop | None = None
        self._thread = 0

    def watch(self, engine: sa.Engine, loop: AbstractEventLoop | None = None) -> None:
        """Watch for copies from now on.

        :param loop: the event loop that runs in this thread, where there is one.
        """
        self._engine, self._loop, self._thread = engine, loop, threading.get_ident()
        _guards.add(self)

    def cut_off(self) -> None:
        """Keep this process, which is a copy, from the database and from going on."""
        self.is_copy = True
        for session in [*self._sessions()]:
            _cut_off(session)
        if self._engine is not None:
            # Kept: to collect a connection of asyncpg would take its socket out of the original's selector as well.
            _kept.append(self._engine.pool)
            self._engine.dispose(close=False)
        if self._loop is not None and self._thread == threading.get_ident():
            # A handler that is suspended would let the loop go on with all other tasks, which read from their sockets.
            self._loop.call_soon(self.end_copy)
            ready = getattr(self._loop, "_ready", None)
            if ready is not None:
                ready.rotate(1)

    def end_copy(self, raised: BaseException | None = None) -> NoReturn:
        """End this process, which is a copy, at once: no exit handler, nor anything that is collected, must run.

        :param raised: what the handler raised.
        """
        names = " or ".join(str(getattr(each, "__qualname__", each)) for each in self.handlers)
        code, how = _exit_code(raised)
        lines = [] if raised is None or isinstance(raised, SystemExit) else traceback.format_exception(raised)
        lines.append(
            f"sqlaqueue: process {os.getpid()} is a copy of process {self._pid}, made by fork() while the handler "
            f"{names} of queue {self._queue!r} was running, and it came back {how}. It ends here with code {code}, "
            "because the connections belong to the original, which goes on with the job. Let the copy end in the "
            "handler by os._exit(), or use subprocess or multiprocessing, which do so.\n"
        )
        # Not by logging: a thread that this process does not have may hold the lock of a log's handler.
        with contextlib.suppress(OSError):
            os.write(_STANDARD_ERROR, "".join(lines).encode(errors="backslashreplace"))
        os._exit(code)


def _exit_code(raised: BaseException | None) -> tuple[int, str]:
    """Return the code with which Python would end a process, and how it came to its end."""
    if raised is None:
        return 0, "from it"
    if not isinstance(raised, SystemExit):
        return 1, f"from it with {type(raised).__name__}"
    if raised.code is None or isinstance(raised.code, int):
        return (raised.code or 0) & 0xFF, "from it by sys.exit()"
    return 1, f"from it by sys.exit({raised.code!r})"


def _cut_off(session: Session) -> None:
    """Have nothing that a handler does with its session in this copy reach the server."""

    def refuse(*_: Any) -> None:
        msg = (
            "this process is a copy that fork() made of the one in which the handler runs, and must not use the "
            "handler's session; make an engine and a session of its own in the copy, or leave it to the original"
        )
        raise HandlerMisuseError(msg)

    event.listen(session, "after_begin", refuse)
    for connection in _connections(session):
        if not connection.invalidated and not connection.closed:
            _blind(connection.connection.driver_connection)
        for name in _STATEMENTS:
            event.listen(connection, name, refuse)


def _connections(session: Session) -> Iterator[sa.Connection]:
    """Return the connections of all transactions that a session is in."""
    transaction = session.get_nested_transaction() or session.get_transaction()
    seen = set()
    while transaction is not None:
        for connection, *_ in transaction._connections.values():  # noqa: SLF001 - asking by session.connection() would begin one
            if connection not in seen:
                seen.add(connection)
                yield connection
        transaction = transaction.parent


def _blind(driver: Any) -> None:
    """Replace the socket of a connection by one whose other end is closed; the original's stays as it is."""
    transport = getattr(driver, "_transport", None)  # asyncpg has no fileno()
    number = driver.fileno() if transport is None else transport.get_extra_info("socket").fileno()
    mine, other = socket.socketpair()
    other.close()
    os.dup2(mine.fileno(), number, inheritable=False)
    mine.close()


_guards: weakref.WeakSet[ForkGuard] = weakref.WeakSet()
_kept: list[Any] = []


def _cut_off_all() -> None:
    for guard in [*_guards]:
        try:
            guard.cut_off()
        except Exception as error:  # noqa: BLE001 - the other runs are to be cut off all the same
            sys.stderr.write(f"sqlaqueue: a copy of this process may share a connection: {error!r}\n")


os.register_at_fork(after_in_child=_cut_off_all)
