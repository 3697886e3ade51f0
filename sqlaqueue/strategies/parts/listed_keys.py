"""Jobs by a list of their keys, in place of a range."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from sqlaqueue.queue.run import Key
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.queue.strategy_protocol import KeyRange


@dataclass(frozen=True)
class ListedKeys(KeyRange):
    """Some jobs by their keys."""

    spec: QueueSpec | None = None
    keys: Sequence[Key] = ()

    def holds(self, columns: Sequence[sa.ColumnElement[Any]]) -> sa.ColumnElement[bool]:
        """Return the condition that the key in ``columns`` is one of these."""
        return sa.true() if self.spec is None else self.spec.key_in(columns, self.keys)
