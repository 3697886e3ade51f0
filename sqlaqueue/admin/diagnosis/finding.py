"""The result of an examination: :class:`Finding`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

Severity = Literal["critical", "warning", "notice"]
"""``critical``: jobs do not run, are lost or run twice, now or soon. ``warning``: the queue is slower than it should
be, or will be critical if nothing is done. ``notice``: worth knowing."""

SEVERITIES: tuple[Severity, ...] = get_args(Severity)
"""The worst first."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something that is wrong with a queue or its server."""

    severity: Severity
    code: str
    """What was found, as a word for programs, such as ``missing_index``."""
    queue: str | None
    """The name of the queue; None for a finding about the server or the connection."""
    summary: str
    """What is wrong, in one sentence."""
    consequence: str = ""
    """Why it matters, in one sentence."""
    fixes: tuple[str, ...] = ()
    """What repairs it. Each one repairs it by itself, and the first is to be tried first. It is a shell command, or SQL
    statements that end with a semicolon: to be executed one by one, not in one transaction."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """The values that were measured, for programs."""
