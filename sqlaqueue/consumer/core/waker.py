"""A bell that any thread can ring, and a signal's handler as well."""

from __future__ import annotations

import contextlib
import selectors
import socket


class Waker:
    """Wakes the one thread that waits for it.

    It is a pair of sockets and no event: a thread that waits for an event holds the event's lock now and then, and a
    signal's handler that runs in this very thread could not set it. Besides, one can wait for a connection as well.
    """

    def __init__(self) -> None:
        self._bell, self._rung = socket.socketpair()
        for end in (self._bell, self._rung):
            end.settimeout(0)

    def wake(self) -> None:
        """Wake the thread that waits, or will wait next."""
        with contextlib.suppress(OSError):
            self._bell.send(b"!")

    def wait(self, seconds: float, *descriptors: int) -> bool:
        """Wait until it is rung, or something can be read; return whether that was so."""
        with selectors.DefaultSelector() as selector:
            for descriptor in (self._rung.fileno(), *descriptors):
                selector.register(descriptor, selectors.EVENT_READ)
            ready = bool(selector.select(seconds))
        with contextlib.suppress(OSError):
            self._rung.recv(4096)
        return ready

    def close(self) -> None:
        """Give the sockets back; who rings from now on rings in vain."""
        self._bell.close()
        self._rung.close()
