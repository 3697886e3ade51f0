"""What a worker is to do, in values that can be sent to another process."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass, field
from typing import Any, Self


@dataclass(frozen=True, kw_only=True)
class Order:
    """What a worker is to do."""

    targets: list[str]
    handlers: list[str] = field(default_factory=list)
    """The functions for the targets that are classes, in their order."""
    url: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    """Options of Consumers, for the targets that are classes; spans of time in seconds."""
    said: list[str] = field(default_factory=list)
    """Which options somebody gave for this very call: it is an error when these have no effect."""
    drain: bool = False
    log_level: str | None = None

    def to_text(self) -> str:
        """Return it as one line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Return what :meth:`to_text` wrote."""
        return cls(**json.loads(text))


def begin_log(level: str | None) -> None:
    """Log to standard error, unless the application has said where its log goes.

    :param level: from which level on; None for INFO, or what the application has said.
    """
    number = logging.getLevelNamesMapping()[(level or "info").upper()]
    if not logging.getLogger().handlers:
        # What other libraries have to say below INFO is not what somebody wants to see here.
        root = max(number, logging.INFO)
        logging.basicConfig(level=root, format="%(asctime)s [%(process)d] %(levelname)s %(message)s")
        logging.getLogger("sqlaqueue").setLevel(number)
    elif level is not None:
        logging.getLogger("sqlaqueue").setLevel(number)
