"""One row that cannot be loaded, or that a trigger keeps from being changed, keeps no other job from running."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

    from tests.sqlite.bench import SQLiteBench


def test_a_row_that_cannot_be_loaded(bench: SQLiteBench, caplog: pytest.LogCaptureFixture) -> None:
    bench.create()
    bench.enqueue(20)
    bench.execute("UPDATE job SET created_at = 'yesterday' WHERE id = 5")
    assert bench.consumer(concurrency=2).drain() == 19
    assert bench.execute("SELECT group_concat(id) FROM job WHERE status = 'pending'") == "5"
    assert [r.job_key for r in caplog.records if getattr(r, "event", None) == "job_unclaimable"] == [5]


def test_a_row_that_a_trigger_refuses_to_change(bench: SQLiteBench, caplog: pytest.LogCaptureFixture) -> None:
    bench.create()
    bench.enqueue(20)
    bench.execute("CREATE TRIGGER refuse BEFORE UPDATE ON job WHEN OLD.id = 5 BEGIN SELECT RAISE(ABORT, 'no'); END")
    assert bench.consumer(concurrency=2).drain() == 19
    assert bench.execute("SELECT group_concat(id) FROM job WHERE status = 'pending'") == "5"
    assert [r.job_key for r in caplog.records if getattr(r, "event", None) == "job_unclaimable"] == [5]
