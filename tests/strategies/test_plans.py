"""The plan of a claim reads only the rows that it claims, however large the table, with and without statistics."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from sqlaqueue import claim
from sqlaqueue.testing import QueueUnderTest
from tests.strategies.explain import CUSTOM, GENERIC, QUEUES, buffers_of, explain, nodes_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    import sqlalchemy as sa


N = 10
FEW_BLOCKS = 200
"""What a claim of N jobs may touch; the tables of the large queues have thousands."""


class Size(NamedTuple):
    waiting: int
    finished: int


SIZES = {
    "empty": Size(0, 0),
    "small": Size(1_000, 0),
    "idle": Size(0, 100_000),
    "large": Size(100_000, 100_000),
}


@pytest.fixture(scope="class", params=QUEUES)
def tables(engine: sa.Engine, request: pytest.FixtureRequest) -> QueueUnderTest:
    strategy, columns, composite = QUEUES[request.param]
    return QueueUnderTest(engine, strategy, columns, composite=composite)


@pytest.fixture(scope="class", params=SIZES)
def size(request: pytest.FixtureRequest) -> Size:
    return SIZES[request.param]


@pytest.fixture(scope="class")
def filled(tables: QueueUnderTest, size: Size) -> Iterator[QueueUnderTest]:
    """Return a queue of this size, without autovacuum."""
    with tables as queue:
        for table in queue.models.base.metadata.sorted_tables:
            queue.execute(f"ALTER TABLE {table.name} SET (autovacuum_enabled = off)")
        if queue.has_status:
            _fill(queue, range(size.finished), "status", "'completed'")
        _fill(queue, range(size.finished, size.finished + size.waiting), "priority", "i % 5")
        yield queue


def _fill(queue: QueueUnderTest, numbers: range, column: str, value: str) -> None:
    keys = {"tenant": "'a'", "id": "i"} if queue.composite else {"id": "i"}
    columns = keys | {"number": "i", column: value}
    queue.execute(
        f"INSERT INTO conformance_job ({', '.join(columns)}) SELECT {', '.join(columns.values())}"
        f" FROM generate_series({numbers.start}, {numbers.stop} - 1) AS i"
    )


class TestPlans:
    @pytest.mark.each_value
    def test_a_claim_reads_only_the_rows_that_it_claims(self, filled: QueueUnderTest, size: Size) -> None:
        """With and without statistics, with a custom and a generic plan."""
        for analysed in (False, True):
            for table in filled.models.base.metadata.sorted_tables if analysed else ():
                filled.execute(f"ANALYZE {table.name}")
            for cache in (CUSTOM, GENERIC):
                plan = explain(filled.engine, claim(filled.Job, N), {}, cache)
                self._check(plan, size, f"{cache}, {analysed=}")

    @staticmethod
    def _check(plan: dict[str, Any], size: Size, circumstances: str) -> None:
        assert plan["Actual Rows"] == min(N, size.waiting)
        blocks = buffers_of(plan)
        assert blocks <= FEW_BLOCKS, f"{blocks} blocks with {circumstances}"
        if size.finished and size.waiting:
            used = {node.get("Index Name", "") for node in nodes_of(plan)}
            assert any(name.endswith("_claim") for name in used), f"{used} with {circumstances}"
