"""Whether the claim index of a queue has grown far beyond its entries, and whether the planner knows pending jobs."""

from __future__ import annotations

from collections.abc import Iterator

import sqlalchemy as sa

from sqlaqueue.admin.diagnosis.examination import Examination
from sqlaqueue.admin.diagnosis.finding import Finding
from sqlaqueue.postgresql.server import index_sizes

_FILL = 0.7
"""Which part of a page of an index is used on average."""
_PAGE = 8192


def check_claim_indexes(examination: Examination) -> Iterator[Finding]:
    """Find indexes that are much larger than the entries that they had at the last VACUUM or ANALYZE.

    The size that they need is estimated: the number of entries, times their average width by the statistics of the
    columns, with pages that are 70 % full. Thresholds: ``index_bloat_factor``, ``index_bloat_size``.
    """
    limits = examination.thresholds
    for spec in examination.specs:
        for table in (spec.table, *spec.side_tables.values()):
            # The width of the hash of a key is in no statistics of a column.
            plain = (
                index for index in spec.claim_indexes if all(isinstance(each, sa.Column) for each in index.expressions)
            )
            indexes = [index for index in plain if index.table is table]
            for size in index_sizes(examination.connection, table, indexes):
                needed = max(size.rows, 0) * size.entry_width / _FILL + 2 * _PAGE
                # Before the first VACUUM or ANALYZE the number of entries is not known.
                if size.rows < 0 or size.size <= max(limits.index_bloat_size, limits.index_bloat_factor * needed):
                    continue
                yield Finding(
                    severity="notice",
                    code="index_bloat",
                    queue=spec.name,
                    summary=(
                        f"The index {size.name} has {size.size / 1024**2:.1f} MB for {size.rows:.0f} entries, which "
                        f"need about {needed / 1024**2:.1f} MB. That is an estimate: the entries at the last VACUUM or "
                        f"ANALYZE times {size.entry_width} bytes, in pages that are 70 % full."
                    ),
                    consequence="The index takes more memory than it should; claims and VACUUM may be slower.",
                    fixes=(f"REINDEX INDEX CONCURRENTLY {size.name};",),
                    facts={"index": size.name, "size": size.size, "needed": needed, "entries": size.rows},
                )
