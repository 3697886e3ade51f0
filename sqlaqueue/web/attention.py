"""How many things need a look on other pages, as far as is known: for the links at the top and the first page."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlaqueue.admin.doctor.examination import Finding
from sqlaqueue.web.settings import Queue

_STATE = "attention"

EXAMINED_FOR = 60.0
"""Seconds after which the queues are examined again when the first page is asked for."""

SCHEDULES_READ_FOR = 10.0
"""Seconds after which the first page reads the schedules again."""


@dataclass(frozen=True)
class Attention:
    """What is known about some queues."""

    critical: int = 0
    """The number of critical findings of the doctor."""
    schedules: int = 0
    """The number of schedules that are late or cannot be fired."""


def attention_of(state: dict[str, Any], queues: Iterable[Queue]) -> Attention:
    """Return what is known; zeros before anything was examined.

    :param state: what a dashboard keeps between requests.
    :param queues: the queues that the user sees.
    """
    names = _names(queues)
    known = state.get(_STATE, {})
    return Attention(known.get(("critical", names), (0, 0.0))[0], known.get(("schedules", names), (0, 0.0))[0])


def remember_findings(state: dict[str, Any], queues: Iterable[Queue], findings: Sequence[Finding]) -> None:
    """Remember the result of an examination."""
    critical = sum(finding.severity == "critical" for finding in findings)
    state.setdefault(_STATE, {})["critical", _names(queues)] = (critical, time.monotonic())


def remember_schedules(state: dict[str, Any], queues: Iterable[Queue], number: int) -> None:
    """Remember how many schedules are late or cannot be fired."""
    state.setdefault(_STATE, {})["schedules", _names(queues)] = (number, time.monotonic())


def needs_schedules(state: dict[str, Any], queues: Iterable[Queue]) -> bool:
    """Return whether the schedules were read too long ago."""
    _, made_at = state.get(_STATE, {}).get(("schedules", _names(queues)), (0, float("-inf")))
    return bool(time.monotonic() - made_at >= SCHEDULES_READ_FOR)


def needs_examination(state: dict[str, Any], queues: Iterable[Queue]) -> bool:
    """Return whether the last examination was too long ago. If so, the caller makes one, and no other one does."""
    known: dict[Any, tuple[int, float]] = state.setdefault(_STATE, {})
    key, now = ("critical", _names(queues)), time.monotonic()
    number, made_at = known.get(key, (0, float("-inf")))
    if now - made_at < EXAMINED_FOR:
        return False
    known[key] = (number, now)
    return True


def _names(queues: Iterable[Queue]) -> tuple[str, ...]:
    return tuple(queue.name for queue in queues)
