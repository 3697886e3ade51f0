"""SIGTERM and SIGINT stop the Consumers of a process: all of them, once. The host's own handlers are called as well."""

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
    """The signal handlers of this process, there as long as a Consumer that answers signals runs in its main thread."""

    def __init__(self) -> None:
        self._stops: list[Callable[[], None]] = []
        self._in_main = 0
        self._before: dict[signal.Signals, Any] = {}
        """The handlers that were there before."""
        self._installed: dict[signal.Signals, Any] = {}
        """The handlers that have been set here last."""
        self._forking = threading.local()
        self._raised: BaseException | None = None
        """What a handler of the host has raised."""
        self.received: str | None = None
        """The name of the signal that stops the Consumers which are there now."""
        self.next_signal_aborts = True
        """Whether a second signal ends the process at once; else the host answers it."""

    @contextmanager
    def stop_on_signal(self, stop: Callable[[], None], *, wanted: bool = True) -> Iterator[None]:
        """Have ``stop`` called when a signal arrives.

        :param wanted: False leaves signals to the host.
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
            if self._in_main == 1:
                # Not by the event loop: two Consumers in one loop would take the handlers away from each other.
                self._before = {number: signal.signal(number, self._ring) for number in _NUMBERS}
                self._raised = None
                self._installed = dict.fromkeys(_NUMBERS, self._ring)
        try:
            yield
        finally:
            self._stops.remove(stop)
            if in_main:
                self._in_main -= 1
                if self._in_main == 0:
                    self._restore()
        if in_main and self._in_main == 0:
            self._raise()

    def _ring(self, number: int, frame: FrameType | None) -> None:
        """Stop all, and call the host's handler.

        The next signal, whichever it is, is the host's, or ends the process at once where the host has no handler.
        """
        for either in _NUMBERS:
            before = self._before[either]
            self._install(either, before if _is_of_host(before) else signal.SIG_DFL)
        host = self._before[signal.Signals(number)]
        # Each Consumer logs it with its counts: the lock of a log's handler may be held by the thread that is
        # interrupted here.
        self.received, self.next_signal_aborts = signal.Signals(number).name, not _is_of_host(host)
        for stop in list(self._stops):
            stop()
        if _is_of_host(host):
            try:
                host(number, frame)
            except BaseException as error:  # noqa: BLE001 - sys.exit() in it must not cut the grace period short
                self._raised = error

    def _install(self, number: signal.Signals, handler: Any) -> None:
        signal.signal(number, handler)
        self._installed[number] = handler

    def _restore(self) -> None:
        for number, handler in self._before.items():
            # A host that has set its handler in the meantime would lose it.
            if signal.getsignal(number) == self._installed[number]:
                # None: somebody has set it without Python's knowledge, and only they could set it again.
                signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _raise(self) -> None:
        error, self._raised = self._raised, None
        if error is not None:
            raise error

    def before_fork(self) -> None:
        """Hold signals back: Python forgets one that reaches a copy before it has got ready."""
        if self._in_main:
            self._forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _NUMBERS)

    def after_fork(self) -> None:
        """Let them through."""
        mask, self._forking.mask = getattr(self._forking, "mask", None), None
        if mask is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def leave_copy(self) -> None:
        """Give signals back in a copy of this process, which runs no Consumer: its parent ends it by SIGTERM."""
        self._stops.clear()
        if self._in_main:
            self._in_main = 0
            self._restore()
        self.after_fork()


def _is_of_host(handler: Any) -> bool:
    """Return whether a signal handler is the host's own: not the system's, Python's or that of asyncio.run().

    The latter two raise KeyboardInterrupt or cancel the main task, which would cut the grace period short.
    """
    if not callable(handler) or handler is signal.default_int_handler:
        return False
    owner = getattr(handler.func, "__self__", None) if isinstance(handler, partial) else None
    return not isinstance(owner, asyncio.Runner)


signal_handlers = SignalHandlers()
os.register_at_fork(
    before=signal_handlers.before_fork,
    after_in_parent=signal_handlers.after_fork,
    after_in_child=signal_handlers.leave_copy,
)
