"""Why a claim under flow control found nothing, and when the next one may find something."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

_CONTENDED = 0.005, 0.025
"""Seconds until the next claim when another transaction had locked a key: as long as a claim takes, and not the same
for all."""


def contended() -> float:
    """Return in how many seconds to claim again when another transaction was faster."""
    return random.uniform(*_CONTENDED)  # noqa: S311 - only to spread claims over time


@dataclass(frozen=True, slots=True)
class HeldBack:
    """The state after a claim.

    :param due: whether a job is due that was held back, so that the end of a run may let it begin.
    :param retry_in: seconds until the next claim may find something though no run ends; None if only a run's end helps.
    """

    due: bool = False
    retry_in: float | None = None

    @classmethod
    def of(cls, row: Any) -> HeldBack:
        """Return what the row of :func:`sqlaqueue.flow_control.held_back.held_back` says."""
        was_contended, due, seconds = row
        waits = [] if seconds is None else [max(float(seconds), 0.0)]
        if was_contended:
            waits.append(contended())
        return cls(bool(due), min(waits) if due and waits else None)

    @property
    def looks_again(self) -> HeldBack:
        """Return the same with another claim soon.

        Where a claim's transaction holds slots, a claim takes those of one limit before it knows that another limit has
        none, and releases them then. A claim that looks meanwhile finds them taken, and no run ends that would wake it.
        """
        return replace(self, retry_in=contended()) if self.due and self.retry_in is None else self


NOTHING = HeldBack()
"""A claim found jobs, or none is due."""
