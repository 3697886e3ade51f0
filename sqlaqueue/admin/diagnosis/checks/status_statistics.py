"""Whether the planner knows that a queue has pending jobs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import sqlalchemy as sa

from sqlaqueue.admin.diagnosis.examination import Examination
from sqlaqueue.admin.diagnosis.finding import Finding
from sqlaqueue.postgresql.catalog_text import table_name
from sqlaqueue.postgresql.server import common_values


def check_status_statistics(examination: Examination) -> Iterator[Finding]:
    """Find queues with many pending jobs, of which the statistics of the status say that there are none.

    It counts pending jobs up to a limit, so it is made only with ``deep``. Threshold: ``changed_rows``.
    """
    if not examination.deep:
        return
    connection, most = examination.connection, examination.thresholds.changed_rows
    for spec in examination.specs:
        if not spec.has("status"):
            continue
        common = common_values(connection, spec.columns["status"])
        pending = connection.scalar(sa.select(sa.cast(spec.literal("pending"), sa.Text)))
        # Without common values there are no statistics, or each status is unique.
        if not common or pending in common:
            continue
        some: sa.Select[Any] = (
            sa.select(sa.literal_column("1")).select_from(spec.table).where(spec.in_state("pending")).limit(most + 1)
        )
        number = connection.execute(
            sa.select(sa.func.count()).select_from(some.subquery("sqlaqueue_some"))
        ).scalar_one()
        if number <= most:
            continue
        yield Finding(
            severity="warning",
            code="status_statistics",
            queue=spec.name,
            summary=(
                f"The table {spec.table.fullname} has more than {most} pending jobs, and the planner's statistics know "
                f"only these values of {spec.columns['status'].name}: {', '.join(common)}."
            ),
            consequence="The server plans for few pending jobs, so a claim may have a plan that reads all of them.",
            fixes=(f"ANALYZE {table_name(connection, spec.table)};",),
            facts={"values": [*common], "pending_more_than": most},
        )
