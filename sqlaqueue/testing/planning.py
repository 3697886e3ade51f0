"""A claim takes what it should under every plan that PostgreSQL may choose.

A subquery with LIMIT and a lock that a join runs again takes other rows each time. Which plan it takes to
see that depends on statistics, settings and versions, so the planner is pushed from one plan to the next.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue import cancel, claim, complete, extend, fail, purge, reconcile, requeue, rescue, retry
from sqlaqueue.queue.backend import backend
from sqlaqueue.testing.queue import ALL, QueueUnderTest

N = 3
"""Jobs to claim under each plan."""

_SWITCHES = """
SELECT name FROM pg_settings WHERE name ~ '^enable_' AND setting = 'on' AND name !~ 'parallel|gather|async' ORDER BY 1
"""
"""Those that are on, but for what never is in the plan of a statement that locks or changes rows."""

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
    """Each switch of the planner by itself, then those that together leave only one way to join."""
    yield ()
    with queue.engine.connect() as connection:
        known = connection.scalars(sa.text(_SWITCHES)).all()
    yield from ((name,) for name in known)
    yield from (names for names in _COMBINATIONS if set(names) <= set(known))


def _prepare_at_once(session: Session) -> None:
    """Let the driver prepare statements when they first come: only those can have a generic plan."""
    driver: Any = session.connection().connection.driver_connection
    if hasattr(driver, "prepare_threshold"):
        driver.prepare_threshold = 0


class PlanningConformance:
    """With and without a second table in the filter, with and without statistics."""

    @pytest.mark.parametrize("cache", ["force_custom_plan", "force_generic_plan"])
    @pytest.mark.parametrize("filtered", [False, True], ids=["all-jobs", "second-table"])
    def test_a_claim_is_right_under_every_plan(self, queue: QueueUnderTest, cache: str, *, filtered: bool) -> None:
        """Exactly n jobs, in order, and nobody else's view of the others is changed."""
        self._enqueue(queue)
        for table in queue.models.base.metadata.sorted_tables:
            queue.execute(f"ANALYZE {table.name}")
        self._check(queue, cache, filtered=filtered)

    @pytest.mark.parametrize("cache", ["force_custom_plan", "force_generic_plan"])
    @pytest.mark.parametrize("filtered", [False, True], ids=["all-jobs", "second-table"])
    def test_a_claim_is_right_without_statistics(self, queue: QueueUnderTest, cache: str, *, filtered: bool) -> None:
        """A table that nobody has analysed is planned for as if it were of some usual size."""
        queue.create()
        for table in queue.models.base.metadata.sorted_tables:
            queue.execute(f"ALTER TABLE {table.name} SET (autovacuum_enabled = off)")
        self._enqueue(queue)
        self._check(queue, cache, filtered=filtered)

    @staticmethod
    def _enqueue(queue: QueueUnderTest) -> None:
        # A scan of the table must not happen to come in the order of the queue, nor in the opposite one.
        for number in range(40):
            queue.enqueue([number], owner_id=1 + number % 2, priority=7 * number % 40)

    @staticmethod
    def _check(queue: QueueUnderTest, cache: str, *, filtered: bool) -> None:
        # Two tables side by side, since such a subquery may be taken for one about the outer statement's row.
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
                # What the claim has locked or written beyond the jobs that it returned.
                left = len(another.scalars(claim(queue.Job, ALL)).all())
                assert left == 40 - N, f"{left} of {40 - N} others are left without {switched_off}"

    def test_no_plan_is_kept_from_when_the_table_was_small(self, queue: QueueUnderTest) -> None:
        """For a few rows it is cheap to read the table and to compare each with each; the same plan is endless later.

        PostgreSQL keeps a plan from the sixth execution of a prepared statement on, if it finds it cheap. It may do so
        for a claim of a few jobs.
        """
        queue.enqueue(60 * backend().claims.FEW)
        kept = sa.text("SELECT statement FROM pg_prepared_statements WHERE generic_plans > 0")
        name, some_key = queue.Job.__table__.name, next(iter(queue.Job.__table__.primary_key))
        nobody = sa.select(queue.Job).where(sa.cast(some_key, sa.Text()) == "nobody's")
        reads_jobs = re.compile(rf"(FROM|UPDATE|JOIN)\s+(sqlaqueue_message_)?{name}\b(?!\s+WHERE false)")
        with queue.session() as session:
            _prepare_at_once(session)
            earlier = set(session.scalars(kept))
            for _ in range(12):
                jobs = queue.claim(session, 3 * backend().claims.FEW)
                done, failed, again = jobs[::3], jobs[1::3], jobs[2::3]
                ends = [extend(again, lease=60), complete(done), fail(failed), retry(again, delay=60)]
                tending = [rescue(queue.Job), reconcile(queue.Job), purge(queue.Job, limit=1)]
                for verb in (*ends, *tending, cancel(nobody), requeue(nobody)):
                    session.execute(verb)
                session.commit()
            texts = set(session.scalars(kept)) - earlier
        assert [text for text in texts if reads_jobs.search(text)] == []
