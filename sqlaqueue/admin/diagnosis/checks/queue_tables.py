"""The tables of the examined queues, each once, with the queue that a finding about it names."""

from __future__ import annotations

from collections.abc import Iterator

import sqlalchemy as sa

from sqlaqueue.admin.diagnosis.examination import Examination


def queue_tables(examination: Examination) -> Iterator[tuple[str | None, sa.Table]]:
    """Return the job tables, message tables and side tables; the name is None for a table of several queues."""
    names: dict[sa.Table, list[str]] = {}
    for spec in examination.specs:
        for table in dict.fromkeys((*spec.strategy.locked_tables(spec), *spec.side_tables.values())):
            names.setdefault(table, []).append(spec.name)
    for table, queues in names.items():
        yield queues[0] if len(queues) == 1 else None, table
