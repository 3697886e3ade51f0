"""What :mod:`sqlaqueue.admin.diagnosis` needs from the database, a part of :mod:`sqlaqueue.queue.backend`."""

from __future__ import annotations

from typing import Protocol

from sqlaqueue.queue.server_facts import ServerFacts


class Diagnosis(ServerFacts, Protocol):
    """What is wrong with queues and their server."""
