"""The options of a worker process, in a form that can be sent to another process."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any, Self


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """The options of ``sqlaqueue worker``."""

    targets: list[str]
    handlers: list[str] = field(default_factory=list)
    """``--handler``: the handlers of the queue classes among the targets, in order."""
    url: str | None = None
    consumer_options: dict[str, Any] = field(default_factory=dict)
    """Arguments for the Consumers of queue classes; durations in seconds."""
    from_command_line: list[str] = field(default_factory=list)
    """The options given on the command line. It is an error if they have no effect; a setting may have none."""
    drain: bool = False
    http: str | None = None
    """``--http``: the address of the endpoint; of several processes, the supervisor's."""
    otel: bool = False
    measured: bool = False
    """Whether to measure the Consumers: there is an endpoint, in this process or in the supervisor."""
    log_level: str | None = None

    def to_json(self) -> str:
        """Return the options as one line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the options that :meth:`to_json` wrote."""
        return cls(**json.loads(text))
