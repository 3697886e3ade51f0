"""What a worker process sends to its supervisor, in lines: that it has started, and its health again and again.

A module of its own, as the module that a worker process executes must not have been imported before.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict

from sqlaqueue.consumer.context import Health

STARTED = b"!"
"""The line that is sent to the supervisor when the Consumers start."""

REPORT_INTERVAL = 1.0
"""Seconds between two reports of the health."""


def health_report(healths: Mapping[str, Health]) -> bytes:
    """Return the health of the Consumers together, with the problems of each, as the line for the supervisor."""
    several = len(healths) > 1
    problems = [f"{name}: {text}" if several else text for name, each in healths.items() for text in each.problems]
    health = Health(
        alive=all(each.alive for each in healths.values()),
        ready=bool(healths) and all(each.ready for each in healths.values()),
        problems=tuple(problems) if healths else ("it is starting",),
    )
    return json.dumps(asdict(health)).encode()


def read_report(line: bytes) -> Health:
    """Return the health that a line of :func:`health_report` tells."""
    values = json.loads(line)
    return Health(alive=values["alive"], ready=values["ready"], problems=tuple(values["problems"]))
