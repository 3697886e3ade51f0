"""A claim is correct under every plan that PostgreSQL may choose.

A subquery with LIMIT and a lock locks other rows each time that a join executes it. Which plan does so depends on
statistics, settings and versions, so these tests disable the planner's methods in turn.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue import cancel, claim, complete, extend, fail, purge, reconcile, requeue, rescue, retry
from sqlaqueue.postgresql.claim_scan import FEW
from sqlaqueue.testing.conformance.queue_under_test import ALL, QueueUnderTest

N = 3
"""Jobs to claim under each plan."""

_SWITCHES = """
SELECT name FROM pg_settings WHERE name ~ '^enable_' AND setting = 'on' AND name !~ 'parallel|gather|async' ORDER BY 1
"""
"""The settings that are on, except those that do not apply to statements which lock or change rows."""

_COMBINATIONS = [
    ("enable_hashjoin", "enable_mergejoin"),
    ("enable_hashjoin", "enable_mergejoin", "enable_material"),
    ("enable_hashjoin", "enable_mergejoin", "enable_material", "enable_memoize"),
    ("enable_hashjoin", "enable_mergejoin", "enable_material", "enable_hashagg", "enable_sort"),
    ("enable_hashjoin", "enable_mergejoin", "enable_material", "enable_indexscan", "enable_bitmapscan"),
    ("enable_nestloop", "enable_mergejoin"),
    ("enable_nestloop", "enable_hashjoin"),
    ("enable_indexscan", "enable_indexonlyscan", "enable_bitmapscan"),
]


def _plans(queue: QueueUnderTest) -> Iterator[tuple[str, ...]]:
    """Disable each planner method by itself, then combinations that leave one kind of join."""
    yield ()
    with queue.engine.connect() as connection:
        known = connection.scalars(sa.text(_SWITCHES)).all()
    yield from ((name,) for name in known)
    yield from (names for names in _COMBINATIONS if set(names) <= set(known))


def _prepare_at_once(session: Session) -> None:
    """Let the driver prepare statements on first use: only prepared ones can have a generic plan."""
    driver: Any = session.connection().connection.driver_connection
    if hasattr(driver, "prepare_threshold"):
        driver.prepare_threshold = 0


class QueryPlanConformance:
    """With and without a second table in the filter, with and without statistics."""

    @pytest.mark.parametrize("cache", ["force_custom_plan", "force_generic_plan"])
    @pytest.mark.parametrize("filtered", [False, True], ids=["all-jobs", "second-table"])
    def test_a_claim_is_correct_under_every_plan(self, queue: QueueUnderTest, cache: str, *, filtered: bool) -> None:
        """Exactly n jobs, in order, and no lock on any other."""
        self._enqueue(queue)
        for table in queue.models.base.metadata.sorted_tables:
            queue.execute(f"ANALYZE {table.name}")
        self._check(queue, cache, filtered=filtered)

    @pytest.mark.parametrize("cache", ["force_custom_plan", "force_generic_plan"])
    @pytest.mark.parametrize("filtered", [False, True], ids=["all-jobs", "second-table"])
    def test_a_claim_is_correct_without_statistics(self, queue: QueueUnderTest, cache: str, *, filtered: bool) -> None:
        """Without ANALYZE the planner assumes a default size of the table."""
        queue.create()
        for table in queue.models.base.metadata.sorted_tables:
            queue.execute(f"ALTER TABLE {table.name} SET (autovacuum_enabled = off)")
        self._enqueue(queue)
        self._check(queue, cache, filtered=filtered)

    @staticmethod
    def _enqueue(queue: QueueUnderTest) -> None:
        # The order of the rows in the table is neither the claim order nor its reverse.
        for number in range(40):
            queue.enqueue([number], owner_id=1 + number % 2, priority=7 * number % 40)

    @staticmethod
    def _check(queue: QueueUnderTest, cache: str, *, filtered: bool) -> None:
        # Two tables in FROM: SQLAlchemy may correlate such a subquery with the outer statement.
        of_vips = sa.and_(queue.Job.owner_id == queue.Owner.id, queue.Owner.vip)
        wanted = sa.select(queue.Job).where(of_vips if filtered else sa.true())
        order = [number for number in queue.claimable() if number % 2 == 0 or not filtered]
        for switched_off in _plans(queue):
            with queue.session() as session, queue.session() as another:
                _prepare_at_once(session)
                session.execute(sa.text(f"SET LOCAL plan_cache_mode = {cache}"))
                for name in switched_off:
                    session.execute(sa.text(f"SET LOCAL {name} = off"))
                jobs = session.scalars(claim(wanted, N)).all()
                claimed = [job.number for job in jobs]
                assert claimed == order[:N], f"claimed {claimed} without {switched_off}"
                # The claim must not have locked or written any other job.
                left = len(another.scalars(claim(queue.Job, ALL)).all())
                assert left == 40 - N, f"{left} of {40 - N} others are left without {switched_off}"

    def test_no_plan_of_a_small_table_is_reused(self, queue: QueueUnderTest) -> None:
        """A plan that reads a small table and compares each row with each is very slow once the table has grown.

        PostgreSQL may keep a generic plan from the sixth execution of a prepared statement on. A claim of a few jobs
        may have one.
        """
        queue.enqueue(60 * FEW)
        kept = sa.text("SELECT statement FROM pg_prepared_statements WHERE generic_plans > 0")
        name, some_key = queue.Job.__table__.name, next(iter(queue.Job.__table__.primary_key))
        nobody = sa.select(queue.Job).where(sa.cast(some_key, sa.Text()) == "nobody's")
        reads_jobs = re.compile(rf"(FROM|UPDATE|JOIN)\s+(sqlaqueue_message_)?{name}\b(?!\s+WHERE false)")
        with queue.engine.connect() as connection, queue.session(on=connection) as session:
            _prepare_at_once(session)
            earlier = set(session.scalars(kept))
            for _ in range(12):
                jobs = queue.claim(session, 3 * FEW)
                done, failed, again = jobs[::3], jobs[1::3], jobs[2::3]
                ends = [extend(again, lease=60), complete(done), fail(failed), retry(again, delay=60)]
                maintenance = [rescue(queue.Job), reconcile(queue.Job), purge(queue.Job, limit=1)]
                for verb in (*ends, *maintenance, cancel(nobody), requeue(nobody)):
                    session.execute(verb)
                session.commit()
            texts = set(session.scalars(kept)) - earlier
        assert [text for text in texts if reads_jobs.search(text)] == []
