"""A pair of sockets by which threads and signal handlers wake a thread."""

from __future__ import annotations

import contextlib
import selectors
import socket

_Selector: type[selectors.BaseSelector] = getattr(selectors, "PollSelector", selectors.DefaultSelector)
"""Preferred since it opens no descriptor: a process that has too many files open must still be able to wait."""


class Waker:
    """Wakes the one thread that waits for it; it can wait for connections at the same time.

    A :class:`threading.Event` would not do: a waiting thread holds the event's lock now and then, and a signal handler
    that interrupts it there would deadlock in ``set()``.
    """

    def __init__(self) -> None:
        self._sender, self._receiver = socket.socketpair()
        for end in (self._sender, self._receiver):
            end.settimeout(0)

    def wake(self) -> None:
        """Wake the thread that waits, or that waits next."""
        with contextlib.suppress(OSError):
            self._sender.send(b"!")

    def wait(self, seconds: float, *descriptors: int) -> bool:
        """Wait until :meth:`wake` is called or a descriptor can be read; return False if the time passed instead."""
        with _Selector() as selector:
            for descriptor in (self._receiver.fileno(), *descriptors):
                selector.register(descriptor, selectors.EVENT_READ)
            ready = bool(selector.select(seconds))
        with contextlib.suppress(OSError):
            self._receiver.recv(4096)
        return ready

    def close(self) -> None:
        """Close the sockets; :meth:`wake` does nothing from now on."""
        self._sender.close()
        self._receiver.close()
