"""The result of an explanation: :class:`Explanation`, which has a :class:`Reason` or several."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlaqueue.queue.run import key_text
from sqlaqueue.texts import printable

MISSING, NEW = "missing", "new"
"""The states of a job without a row, and of an instance that is not in the database."""


@dataclass(frozen=True)
class Reason:
    """One reason why a job does not run, or what there is to say about its state."""

    code: str
    """A stable identifier, such as ``paused``."""
    text: str
    """A sentence with the facts, and what to do about it."""


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """The result of :func:`~sqlaqueue.admin.explain_job`; ``str()`` returns it as lines of text."""

    queue: str
    key: Any
    """The key of the job, a tuple for a composite key; None for a new instance."""
    state: str
    """The name of the job's state; ``other`` for a status value that the queue does not use, ``missing`` if there is no
    such job, ``new`` for an instance that is not in the database."""
    reasons: tuple[Reason, ...]
    """The reasons, the most important one first; at least one."""

    def __str__(self) -> str:
        if self.state == NEW:
            head = f"{self.queue}: a new job"
        else:
            head = f"{self.queue} {key_text(self.key if isinstance(self.key, tuple) else (self.key,))} is {self.state}"
        lines = [head, *(f"  {reason.code}: {reason.text}" for reason in self.reasons)]
        return "\n".join(map(printable, lines))
