"""From which values on something is a finding: :class:`Thresholds`."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta


@dataclass(frozen=True, kw_only=True)
class Thresholds:
    """The limits of an examination; each check names those that it uses."""

    statement_timeout: timedelta = timedelta(seconds=5)
    """The longest time for one statement of the examination."""
