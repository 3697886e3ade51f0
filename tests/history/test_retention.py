"""Attempts are deleted after the time of ``QueueConfig(attempt_history=...)``, and no others."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa

from sqlaqueue.consumer import pace
from sqlaqueue.consumer.maintenance.cleanup import delete_batch
from sqlaqueue.consumer.maintenance.state import BATCH, MAINTAINERS, Walk
from sqlaqueue.consumer.notifications.polls import Peers
from tests.contexts import settings_of
from tests.history.queues import HistoryQueue
from tests.programs import wait_until

KEPT = timedelta(days=14)


@pytest.fixture(autouse=True)
def frequent_deletions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "RETENTION", 0.05)


def add(queue: HistoryQueue, number: int, days: float, name: str = "job") -> None:
    """Add attempts that ended some days ago, the first one earliest."""
    queue.execute(
        "INSERT INTO sqlaqueue_attempt (queue, key, attempt, ended_at, outcome) "
        f"SELECT '{name}', jsonb_build_array(n), 1, now() - interval '{days} days' + n * interval '1 ms', 'completed' "
        f"FROM generate_series(1, {number}) AS n"
    )


def left(queue: HistoryQueue) -> list[tuple[str, int]]:
    with queue.engine.connect() as connection:
        number = sa.func.count().label("number")
        found = sa.select(queue.attempt.c.queue, number).group_by(queue.attempt.c.queue).order_by(queue.attempt.c.queue)
        return [(row.queue, row.number) for row in connection.execute(found)]


def test_old_attempts_of_the_queue_are_deleted(mixed: HistoryQueue) -> None:
    add(mixed, 2 * BATCH + 20, 15)
    add(mixed, 30, 13)
    add(mixed, 40, 1000, name="other")
    with mixed.running():
        wait_until(lambda: left(mixed) == [("job", 30), ("other", 40)])


def test_attempts_that_become_old_are_deleted(leased: HistoryQueue) -> None:
    with leased.running():
        wait_until(lambda: leased.execute("SELECT count(*) FROM sqlaqueue_consumer") == 1)
        for _ in range(2):
            add(leased, 5, (KEPT - timedelta(seconds=0.5)) / timedelta(days=1))
            assert left(leased) == [("job", 5)]
            wait_until(lambda: left(leased) == [])


def test_only_the_first_consumers_delete(leased: HistoryQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Peers, "rank", MAINTAINERS)
    add(leased, 5, 15)
    leased.enqueue(None)
    with leased.running():
        wait_until(lambda: leased.execute("SELECT count(*) FROM job WHERE status = 'completed'") == 1)
    assert left(leased) == [("job", 6)]


def test_a_locked_attempt_is_passed_over(leased: HistoryQueue) -> None:
    add(leased, 10, 15)
    with leased.sessions() as other, leased.sessions() as session:
        other.execute(sa.text("SELECT FROM sqlaqueue_attempt WHERE key = '[3]' FOR UPDATE"))
        ended, _ = delete_batch(session, settings_of(leased.Job), Walk("attempt", KEPT))
        assert len(ended) == 9
        other.rollback()


@pytest.mark.parametrize("analyzed", [False, True])
def test_a_batch_reads_a_few_pages(leased: HistoryQueue, *, analyzed: bool) -> None:
    leased.execute("ALTER TABLE sqlaqueue_attempt SET (autovacuum_enabled = off)")
    add(leased, 50_000, 5)
    add(leased, 10, 15)
    if analyzed:
        leased.execute("ANALYZE sqlaqueue_attempt")
    plans: list[Any] = []

    @sa.event.listens_for(leased.engine, "before_cursor_execute", retval=True)
    def explain(_: Any, cursor: Any, statement: str, parameters: Any, *__: Any) -> tuple[str, Any]:
        if statement.startswith("DELETE"):
            cursor.execute(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {statement}", parameters)
            plans.append(cursor.fetchone()[0][0]["Plan"])
        return statement, parameters

    with leased.sessions() as session:
        delete_batch(session, settings_of(leased.Job), Walk("attempt", KEPT))
    (plan,) = plans
    assert plan["Shared Hit Blocks"] + plan["Shared Read Blocks"] < 150, plan
    assert left(leased) == [("job", 50_000)]
