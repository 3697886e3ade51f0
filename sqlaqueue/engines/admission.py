"""Flow control in steps: the jobs that a claim takes, the first ones that no limit, rate or order holds back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from sqlaqueue._typing import AnySelect
from sqlaqueue.queue.run import Key
from sqlaqueue.queue.strategy_protocol import ClaimRequest
from sqlaqueue.sql.engine import OtherEngine


class Admission:
    """The claims of one statement under flow control."""

    def __init__(self, engine: OtherEngine, request: ClaimRequest, waiting: AnySelect) -> None: ...

    def keys(self, connection: sa.Connection, given: Mapping[str, Any]) -> list[Key]:
        raise NotImplementedError

    def in_order(self, rows: Any, keys: Sequence[Key]) -> Any:
        return rows
