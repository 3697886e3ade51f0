"""What a worker process sends to its supervisor: that it has started, and its health again and again.

A module of its own, as the module that a worker process executes must not have been imported before.
"""

from __future__ import annotations

from collections.abc import Collection

from sqlaqueue.consumer.health import Health

STARTED = b"!"
"""Sent to the supervisor when the Consumers start."""

STUCK, ALIVE, READY = b"0", b"1", b"2"
"""Sent again and again: the health of the Consumers together."""

REPORT_INTERVAL = 1.0
"""Seconds between two reports of the health."""


def health_byte(healths: Collection[Health]) -> bytes:
    """Return the worst health, as it is sent to the supervisor."""
    if not all(each.alive for each in healths):
        return STUCK
    return READY if healths and all(each.ready for each in healths) else ALIVE
