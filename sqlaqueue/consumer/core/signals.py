"""SIGTERM and SIGINT stop all Consumers of a process; the program's own signal handlers are called as well."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import threading
import traceback
import weakref
from asyncio import AbstractEventLoop
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any, NoReturn

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.orm import Session

from sqlaqueue.exc import HandlerMisuseError

_NUMBERS = (signal.SIGTERM, signal.SIGINT)


class SignalHandlers:
    """The signal handlers of this process, installed while a Consumer that handles signals runs in its main thread."""

    def __init__(self) -> None:
        self._stops: list[Callable[[], None]] = []
        self._in_main = 0
        self._before: dict[signal.Signals, Any] = {}
        self._installed: dict[signal.Signals, Any] = {}
        """The handlers that this object installed last."""
        self._forking = threading.local()
        self._raised: BaseException | None = None
        self.received: str | None = None
        """The name of the signal that has stopped the Consumers; None if there was none."""
        self.next_signal_aborts = True
        """Whether a second signal ends the process at once; otherwise the program's handler is called."""

    @contextmanager
    def stop_on_signal(self, stop: Callable[[], None], *, wanted: bool = True) -> Iterator[None]:
        """Call ``stop`` when a signal arrives in this block, if wanted; raise what the program's handler raised."""
        if not wanted:
            yield
            return
        in_main = threading.current_thread() is threading.main_thread()
        if not self._stops:
            self.received = None
        self._stops.append(stop)
        if in_main:
            self._in_main += 1
        try:
            if in_main and self._in_main == 1:
                self._install_all()
            yield
        finally:
            self._stops.remove(stop)
            if in_main:
                self._in_main -= 1
                if self._in_main == 0:
                    self._restore()
        if in_main and self._in_main == 0:
            error, self._raised = self._raised, None
            if error is not None:
                raise error

    def _install_all(self) -> None:
        # Not by the event loop, which keeps one handler per signal: two Consumers may share a loop.
        # All is recorded first, because a signal may arrive as soon as one handler is installed.
        self._before = {number: signal.getsignal(number) for number in _NUMBERS}
        self._raised = None
        self._installed = dict.fromkeys(_NUMBERS, self._handle)
        for number in _NUMBERS:
            signal.signal(number, self._handle)
        if any(handler != self._handle for handler in self._installed.values()):
            # A signal has arrived meanwhile, after which its handler was installed for the other one.
            self._leave_the_next_signal()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Stop all Consumers, and call the program's handler.

        The next signal of either kind calls only the program's handler, or ends the process at once if there is none.
        """
        self._leave_the_next_signal()
        before = self._before[signal.Signals(number)]
        # It is not logged here, as the interrupted thread may hold the lock of a log handler. Each Consumer logs it.
        self.received, self.next_signal_aborts = signal.Signals(number).name, not _is_custom(before)
        for stop in list(self._stops):
            stop()
        if _is_custom(before):
            try:
                before(number, frame)
            except BaseException as error:  # noqa: BLE001 - sys.exit() must not end the grace period
                self._raised = error

    def _leave_the_next_signal(self) -> None:
        for number, before in self._before.items():
            self._installed[number] = before if _is_custom(before) else signal.SIG_DFL
            signal.signal(number, self._installed[number])

    def _restore(self) -> None:
        for number, handler in self._before.items():
            # The program may have installed another handler in the meantime.
            if signal.getsignal(number) == self._installed[number]:
                # None: the handler was not installed by Python, which cannot install it again.
                signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def before_fork(self) -> None:
        """Block signals: Python would lose one that reaches the child before it is initialized."""
        if self._in_main:
            self._forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _NUMBERS)

    def after_fork(self) -> None:
        mask, self._forking.mask = getattr(self._forking, "mask", None), None
        if mask is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def after_fork_in_child(self) -> None:
        """Restore the handlers in a forked child, which runs no Consumer, so that its parent can end it by SIGTERM."""
        self._stops.clear()
        if self._in_main:
            self._in_main = 0
            self._restore()
        self.after_fork()


def _is_custom(handler: Any) -> bool:
    """Return whether a signal handler is the program's own: not the system's, Python's or that of asyncio.run().

    The last two raise KeyboardInterrupt or cancel the main task, which would end the grace period.
    """
    if not callable(handler) or handler is signal.default_int_handler:
        return False
    owner = getattr(handler.func, "__self__", None) if isinstance(handler, partial) else None
    return not isinstance(owner, asyncio.Runner)


signal_handlers = SignalHandlers()
os.register_at_fork(
    before=signal_handlers.before_fork,
    after_in_parent=signal_handlers.after_fork,
    after_in_child=signal_handlers.after_fork_in_child,
)


# -- fork guard --------------------------------------------------------------------------------------------------------
# A child that executes another program or exits within the handler is left alone, and so are the workers of
# ``multiprocessing``. A child that returns from the handler would settle the job, claim others and use the sockets of
# its parent, so it is ended. Until then each socket of a handler's session is replaced in the child by one that is
# closed at the other end, so that nothing reaches the server, and the engine gets an empty pool. A file of SQLite has
# no socket, so there it is the statements of the session that are refused.


_STATEMENTS = ("before_cursor_execute", "begin", "commit", "rollback", "savepoint", "rollback_savepoint")
"""The events of a connection before which nothing has been sent yet."""

_STANDARD_ERROR = 2


class ForkGuard:
    """Ends a forked child that returns from a handler, for one run; ``sessions`` returns those that handlers use."""

    def __init__(self, queue: str, sessions: Callable[[], Iterable[Session]]) -> None:
        self.is_child = False
        """This process is a forked child. Cheaper than to compare process ids at each step."""
        self.handlers: Sequence[Any] = ()
        self._queue, self._sessions = queue, sessions
        self._pid = os.getpid()
        self._engine: sa.Engine | None = None
        self._loop: AbstractEventLoop | None = None
        self._thread = 0

    def watch(self, engine: sa.Engine, loop: AbstractEventLoop | None = None) -> None:
        """Protect these connections from now on; ``loop`` is the event loop of this thread."""
        self._engine, self._loop, self._thread = engine, loop, threading.get_ident()
        _guards.add(self)

    def disconnect(self) -> None:
        """Disconnect this process, which is a child, from the database, and end it when its event loop goes on."""
        self.is_child = True
        for session in [*self._sessions()]:
            _disconnect(session)
        if self._engine is not None:
            # Kept: if a connection of asyncpg were collected, its socket would leave the parent's selector as well.
            _kept.append(self._engine.pool)
            self._engine.dispose(close=False)
        if self._loop is not None and self._thread == threading.get_ident():
            # If the handler awaits something, the loop must not run other tasks, which read from their sockets.
            self._loop.call_soon(self.end_child)
            ready = getattr(self._loop, "_ready", None)
            if ready is not None:
                ready.rotate(1)

    def end_child(self, raised: BaseException | None = None) -> NoReturn:
        """End this process, a child, without exit handlers and finalizers: they would use the connections."""
        names = " or ".join(str(getattr(each, "__qualname__", each)) for each in self.handlers)
        code, how = _exit_code(raised)
        lines = [] if raised is None or isinstance(raised, SystemExit) else traceback.format_exception(raised)
        lines.append(
            f"sqlaqueue: process {os.getpid()} was forked from process {self._pid} by the handler {names} of queue "
            f"{self._queue!r}, and {how}. It is ended with code {code}, because the connections belong to its parent, "
            "which continues the job. End a child process within the handler by os._exit(), or use subprocess or "
            "multiprocessing, which use it.\n"
        )
        # Not by logging: a thread that exists only in the parent may have held the lock of a log handler.
        with contextlib.suppress(OSError):
            os.write(_STANDARD_ERROR, "".join(lines).encode(errors="backslashreplace"))
        os._exit(code)


def _exit_code(raised: BaseException | None) -> tuple[int, str]:
    """Return the code with which Python would exit, and how the child left the handler."""
    if raised is None:
        return 0, "returned from it"
    if not isinstance(raised, SystemExit):
        return 1, f"raised {type(raised).__name__}"
    if raised.code is None or isinstance(raised.code, int):
        return (raised.code or 0) & 0xFF, "called sys.exit()"
    return 1, f"called sys.exit({raised.code!r})"


def _disconnect(session: Session) -> None:
    """Keep this child from reaching the server by a handler's session."""

    def refuse(*_: Any) -> None:
        msg = (
            "this process was forked from the one in which the handler runs, and must not use the handler's session; "
            "make an engine and a session in the child, or use the session in the parent only"
        )
        raise HandlerMisuseError(msg)

    event.listen(session, "after_begin", refuse)
    for connection in _connections(session):
        for name in _STATEMENTS:
            event.listen(connection, name, refuse)
        if not connection.invalidated and not connection.closed:
            number = _socket_of(connection.connection.driver_connection)
            if number is not None:
                _replace_socket(number)


def _connections(session: Session) -> Iterator[sa.Connection]:
    transaction = session.get_nested_transaction() or session.get_transaction()
    seen = set()
    while transaction is not None:
        for connection, *_ in transaction._connections.values():  # noqa: SLF001 - asking by session.connection() would begin one
            if connection not in seen:
                seen.add(connection)
                yield connection
        transaction = transaction.parent


def _socket_of(driver: Any) -> int | None:
    """Return the number of a connection's socket; None if it has none, as on SQLite."""
    if hasattr(driver, "fileno"):
        return int(driver.fileno())
    transport = getattr(driver, "_transport", None)
    if transport is not None:
        # Of asyncpg and asyncmy.
        return int(transport.get_extra_info("socket").fileno())
    plain = getattr(driver, "_sock", None)
    # Of PyMySQL, otherwise.
    return None if plain is None else int(plain.fileno())


def _replace_socket(number: int) -> None:
    mine, other = socket.socketpair()
    other.close()
    os.dup2(mine.fileno(), number, inheritable=False)
    mine.close()


_guards: weakref.WeakSet[ForkGuard] = weakref.WeakSet()
_kept: list[Any] = []


def _disconnect_all() -> None:
    for guard in [*_guards]:
        try:
            guard.disconnect()
        except Exception as error:  # noqa: BLE001 - the other runs have to be disconnected as well
            sys.stderr.write(f"sqlaqueue: a forked child may share a connection with its parent: {error!r}\n")


os.register_at_fork(after_in_child=_disconnect_all)
