"""The states of a job, and the values of the status column for them: :class:`States`."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, fields
from typing import Any

from sqlaqueue.exc import ConfigurationError

STATES = ("pending", "processing", "completed", "failed", "cancelled")
"""The states of a job."""

FINISHED = ("completed", "failed", "cancelled")
"""The states of a job that will not run again."""


@dataclass(frozen=True, kw_only=True)
class States:
    """The value of the ``status`` column for each state.

    For an existing table give its own values: texts, integers or enum members. None means that the table has no value
    for the state; operations that need the state then raise an error.

    :raises ConfigurationError: if two states have the same value.
    """

    pending: Any = "pending"
    processing: Any = "processing"
    completed: Any = "completed"
    failed: Any = "failed"
    cancelled: Any = "cancelled"

    def __post_init__(self) -> None:
        """Refuse values that do not identify a state."""
        if self.pending is None:
            msg = "States(pending=None): every queue needs a value for pending jobs"
            raise ConfigurationError(msg)
        seen: dict[Any, str] = {}
        for state, value in self.items():
            if value is None:
                continue
            if not isinstance(value, Hashable):
                msg = f"States({state}={value!r}): use a text, an integer or an enum member"
                raise ConfigurationError(msg)
            if value in seen:
                msg = (
                    f"States: {seen[value]} and {state} are both {value!r}; "
                    f"use a different value for each state, or None for {state}"
                )
                raise ConfigurationError(msg)
            seen[value] = state

    def items(self) -> list[tuple[str, Any]]:
        """Return the names of the states with their values."""
        return [(f.name, getattr(self, f.name)) for f in fields(self)]
