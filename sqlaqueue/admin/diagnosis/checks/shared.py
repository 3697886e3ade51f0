"""What several checks read: live Consumers, and numbers of rows up to a limit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from sqlaqueue._typing import AnySelect
from sqlaqueue.admin.diagnosis.examination import Examination
from sqlaqueue.queue.names import CONSUMERS
from sqlaqueue.queue.spec import QueueSpec, clock
from sqlaqueue.statements.verbs import consumers

MOST = 1000
"""Number of rows up to which they are counted."""


def at_most(rows: AnySelect) -> AnySelect:
    """Return the first rows of a SELECT, one more than are counted."""
    limited: AnySelect = rows.limit(MOST + 1)
    return limited


def counted(connection: sa.Connection, rows: AnySelect) -> int:
    """Return the number of rows of a SELECT, up to :data:`MOST` and one."""
    number: int = connection.execute(
        sa.select(sa.func.count()).select_from(at_most(rows).subquery("sqlaqueue_first"))
    ).scalar_one()
    return number


def number_text(number: int, one: str, several: str = "") -> str:
    """Return a number of rows that was counted up to the limit, such as ``2 jobs``."""
    return f"1 {one}" if number == 1 else f"{f'more than {MOST}' if number > MOST else number} {several or f'{one}s'}"


def alive_text(consumers: int) -> str:
    """Return how many Consumers are alive, as a clause."""
    return "1 Consumer is alive" if consumers == 1 else f"{consumers} Consumers are alive"


def live_consumers(examination: Examination, spec: QueueSpec) -> Sequence[Any]:
    """Return the Consumers of a queue that are alive, as ``consumers()`` does, with the seconds since they started."""
    if CONSUMERS not in spec.side_tables:
        return []
    age = sa.extract("epoch", clock() - spec.side_tables[CONSUMERS].c.created_at)
    query = consumers(spec.model).add_columns(sa.cast(age, sa.Double()).label("age"))
    return examination.connection.execute(query).all()
