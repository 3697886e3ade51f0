"""SIGTERM and SIGINT stop all Consumers of a process; the program's own signal handlers are called as well."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

_NUMBERS = (signal.SIGTERM, signal.SIGINT)


class SignalHandlers:
    """The signal handlers of this process, installed while a Consumer that handles signals runs in its main thread."""

    def __init__(self) -> None:
        self._stops: list[Callable[[], None]] = []
        self._in_main = 0
        self._before: dict[signal.Signals, Any] = {}
        """The handlers that were installed before."""
        self._installed: dict[signal.Signals, Any] = {}
        """The handlers that this object installed last."""
        self._forking = threading.local()
        self._raised: BaseException | None = None
        """What a handler of the program has raised."""
        self.received: str | None = None
        """The name of the signal that has stopped the Consumers; None if there was none."""
        self.next_signal_aborts = True
        """Whether a second signal ends the process at once; otherwise the program's handler is called."""

    @contextmanager
    def stop_on_signal(self, stop: Callable[[], None], *, wanted: bool = True) -> Iterator[None]:
        """Call ``stop`` when a signal arrives within this block; then raise what the program's handler has raised.

        :param wanted: False leaves signals to the program.
        """
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
            self._raise()

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

    def _raise(self) -> None:
        error, self._raised = self._raised, None
        if error is not None:
            raise error

    def before_fork(self) -> None:
        """Block signals: Python would lose one that reaches the child before it is initialized."""
        if self._in_main:
            self._forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _NUMBERS)

    def after_fork(self) -> None:
        """Unblock signals."""
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
