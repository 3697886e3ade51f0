"""The statements that a block of a test sends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa


@contextmanager
def sent_statements(engine: sa.Engine) -> Iterator[list[tuple[str, Any]]]:
    """Collect the statements that are sent, with their parameters."""
    sent: list[tuple[str, Any]] = []

    def remember(_: Any, __: Any, statement: str, parameters: Any, *___: Any) -> None:
        sent.append((statement, parameters))

    sa.event.listen(engine, "before_cursor_execute", remember)
    try:
        yield sent
    finally:
        sa.event.remove(engine, "before_cursor_execute", remember)
