"""A pair of sockets by which threads and signal handlers wake a thread."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket

from sqlaqueue.exc import HandlerMisuseError

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
        self._files = self._identities()

    def _identities(self) -> list[tuple[int, int]]:
        found = [os.fstat(end.fileno()) for end in (self._sender, self._receiver)]
        return [(each.st_dev, each.st_ino) for each in found]

    @property
    def is_intact(self) -> bool:
        """Whether its sockets are open; a handler may have closed them by ``os.closerange()``.

        Their numbers may belong to a connection by then, from which nothing must be read here.
        """
        try:
            return self._identities() == self._files
        except OSError:
            return False

    def wake(self) -> None:
        """Wake the thread that waits, or that waits next."""
        if self.is_intact:
            with contextlib.suppress(OSError):
                self._sender.send(b"!")

    def wait(self, seconds: float, *descriptors: int) -> bool:
        """Wait until :meth:`wake` is called or a descriptor can be read; return False if the time passed instead.

        :raises HandlerMisuseError: if its sockets were closed.
        """
        self.check()
        with _Selector() as selector:
            for descriptor in (self._receiver.fileno(), *descriptors):
                selector.register(descriptor, selectors.EVENT_READ)
            ready = bool(selector.select(seconds))
        self.check()
        with contextlib.suppress(OSError):
            self._receiver.recv(4096)
        return ready

    def check(self) -> None:
        """Refuse to go on without the sockets.

        :raises HandlerMisuseError: if they were closed, and with them probably the connections to the database.
        """
        if not self.is_intact:
            msg = (
                "a handler has closed file descriptors that it had not opened, as os.closerange() does; this process "
                "cannot use its connections any more, and its jobs run again in another one"
            )
            raise HandlerMisuseError(msg)

    def close(self) -> None:
        """Close the sockets; :meth:`wake` does nothing from now on."""
        if not self.is_intact:
            # The numbers may belong to others.
            self._sender.detach()
            self._receiver.detach()
        self._sender.close()
        self._receiver.close()
