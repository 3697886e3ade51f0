"""Claims see every way to insert a pending row and to edit it."""

from __future__ import annotations

import io
from datetime import timedelta
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql

from sqlaqueue import complete, fail, reconcile
from sqlaqueue.testing.conformance.queue_under_test import QueueUnderTest, needs, numbers_of


def _columns(queue: QueueUnderTest) -> str:
    return ", ".join(queue.values(0))


def _row(queue: QueueUnderTest, number: int) -> str:
    return ", ".join(f"'{value}'" for value in queue.values(number).values())


class EnqueueConformance:
    """Writes by the ORM, by bulk inserts and by plain SQL."""

    def test_session_add(self, queue: QueueUnderTest) -> None:
        """The jobs are claimable after the caller's commit, not before."""
        with queue.session() as session:
            session.add_all([queue.Job(**queue.values(number)) for number in range(3)])
            session.flush()
            assert queue.claimable() == []
            session.commit()
        assert sorted(queue.claimable()) == [0, 1, 2]

    def test_a_job_can_be_claimed_in_the_transaction_that_added_it(self, queue: QueueUnderTest) -> None:
        """A transaction sees its own jobs, as it sees any of its writes."""
        with queue.session() as session:
            session.add(queue.Job(**queue.values(0)))
            session.flush()
            assert numbers_of(queue.claim(session)) == [0]

    def test_a_rolled_back_job_is_never_claimed(self, queue: QueueUnderTest) -> None:
        """Not even a message remains."""
        with queue.session() as session:
            session.add(queue.Job(**queue.values(0)))
            session.flush()
            session.rollback()
        assert queue.claimable() == []

    def test_bulk_insert(self, queue: QueueUnderTest) -> None:
        """By an INSERT of the ORM, and of the table."""
        with queue.session() as session:
            session.execute(sa.insert(queue.Job), [queue.values(n) for n in range(20)])
            table = queue.Job.__table__
            session.execute(sa.insert(table), [queue.values(n) for n in range(20, 40)])
            session.commit()
        assert sorted(queue.claimable()) == list(range(40))

    def test_insert_from_select(self, queue: QueueUnderTest) -> None:
        """One statement inserts many jobs."""
        table = queue.Job.__table__
        counted = sa.select(sa.literal(100).label("number")).cte("counted", recursive=True)
        counted = counted.union_all(sa.select(counted.c.number + 1).where(counted.c.number < 119))
        numbers = counted.c.number
        keys = {"tenant": sa.literal("c"), "id": numbers} if queue.composite else {"id": numbers}
        rows = sa.select(*keys.values(), numbers)
        queue.execute(sa.insert(table).from_select([*keys, "number"], rows))
        assert sorted(queue.claimable()) == list(range(100, 120))

    def test_plain_sql(self, queue: QueueUnderTest) -> None:
        """Columns without a value get the database's defaults."""
        for number in range(3):
            queue.execute(f"INSERT INTO conformance_job ({_columns(queue)}) VALUES ({_row(queue, number)})")
        with queue.session() as session:
            assert [job.attempts for job in queue.claim(session)] == [1, 1, 1]

    def test_copy(self, queue: QueueUnderTest) -> None:
        """COPY bypasses all events of SQLAlchemy."""
        lines = "".join("\t".join(map(str, queue.values(n).values())) + "\n" for n in range(30))
        command = f"COPY conformance_job ({_columns(queue)}) FROM STDIN"
        _copy(queue, command, lines)
        assert sorted(queue.claimable()) == list(range(30))

    def test_on_conflict_do_nothing(self, queue: QueueUnderTest) -> None:
        """An existing key adds no second job."""
        queue.enqueue(2)
        insert = postgresql.insert(queue.Job.__table__).on_conflict_do_nothing()
        queue.execute(insert.values([queue.values(number) for number in range(4)]))
        assert sorted(queue.claimable()) == [0, 1, 2, 3]

    def test_on_conflict_do_update(self, queue: QueueUnderTest) -> None:
        """A finished job becomes pending, and a pending one stays pending; both are claimable once."""
        queue.enqueue(2)
        if queue.keeps_rows:
            queue.run(complete, 0)
        insert = postgresql.insert(queue.Job.__table__)
        insert = insert.values([queue.values(number) for number in range(3)])
        changes: dict[str, Any] = {"status": "pending"} if queue.has_status else {"payload": "x"}
        keys = [key.name for key in queue.Job.__table__.primary_key]
        queue.execute(insert.on_conflict_do_update(index_elements=keys, set_=changes))
        assert sorted(queue.claimable()) == [0, 1, 2]

    def test_merge(self, queue: QueueUnderTest) -> None:
        """MERGE inserts and updates jobs."""
        queue.enqueue([0, 1], priority=1)
        keys = " AND ".join(f"job.{key.name} = new.{key.name}" for key in queue.Job.__table__.primary_key)
        names = list(queue.values(0))
        rows = ", ".join(f"({_row(queue, number)})" for number in (1, 2))
        casts = ", ".join("text" if name == "tenant" else "int" for name in names).split(", ")
        new = ", ".join(f"new.{name}::{cast}" for name, cast in zip(names, casts, strict=True))
        keys = keys.replace("new.id", "new.id::int")
        queue.execute(
            f"MERGE INTO conformance_job AS job USING (VALUES {rows}) AS new ({_columns(queue)})"
            f" ON {keys} WHEN MATCHED THEN UPDATE SET priority = 0"
            f" WHEN NOT MATCHED THEN INSERT ({_columns(queue)}) VALUES ({new})"
        )
        assert sorted(queue.claimable()) == [0, 1, 2]
        assert queue.order()[-1] == 0

    @needs(status=True)
    def test_a_row_inserted_as_finished_is_not_claimed(self, queue: QueueUnderTest) -> None:
        """An import of finished rows starts no run."""
        for number, status in enumerate(["completed", "failed", "cancelled"]):
            queue.enqueue([number], status=status)
        assert queue.claimable() == []

    @needs(status=True)
    def test_requeueing_by_plain_sql(self, queue: QueueUnderTest) -> None:
        """An UPDATE of the status makes a job claimable, whatever its attempts."""
        queue.enqueue(3)
        queue.run(fail, 0, 1)
        queue.execute("UPDATE conformance_job SET status = 'pending' WHERE number = 0")
        assert sorted(queue.claimable()) == [0, 2]
        queue.run(complete, 0)
        assert queue.state(0) == "completed"

    @needs(status=True)
    def test_finishing_by_plain_sql(self, queue: QueueUnderTest) -> None:
        """An UPDATE of the status of one job, or of all, takes them out of the queue."""
        queue.enqueue(4)
        queue.execute("UPDATE conformance_job SET status = 'cancelled' WHERE number = 0")
        assert sorted(queue.claimable()) == [1, 2, 3]
        queue.execute("UPDATE conformance_job SET status = 'completed'")
        assert queue.claimable() == []

    def test_deleting_by_plain_sql(self, queue: QueueUnderTest) -> None:
        """A deleted row is not claimed, and its key can be used again."""
        queue.enqueue(3)
        queue.execute("DELETE FROM conformance_job WHERE number IN (0, 1)")
        assert queue.claimable() == [2]
        queue.enqueue([0])
        assert sorted(queue.claimable()) == [0, 2]

    def test_a_deleted_job_leaves_no_message(self, queue: QueueUnderTest) -> None:
        """``reconcile()`` finds nothing to repair."""
        queue.enqueue(3)
        queue.execute(sa.delete(queue.Job).where(queue.Job.number == 0))
        with queue.session() as session:
            assert session.scalars(reconcile(queue.Job)).all() == []

    def test_truncate(self, queue: QueueUnderTest) -> None:
        """The queue is empty afterwards, and works."""
        queue.enqueue(3)
        queue.execute("TRUNCATE conformance_job CASCADE")
        assert queue.claimable() == []
        queue.enqueue(2)
        assert sorted(queue.claimable()) == [0, 1]

    def test_an_edited_priority_reaches_the_claim(self, queue: QueueUnderTest) -> None:
        """By plain SQL, for one job and for many."""
        queue.enqueue([0, 2, 4, 6])
        queue.execute("UPDATE conformance_job SET priority = -1 WHERE number = 6")
        assert queue.order() == [6, 0, 2, 4]
        queue.execute("UPDATE conformance_job SET priority = -number")
        assert queue.order() == [6, 4, 2, 0]

    def test_an_edited_time_reaches_the_claim(self, queue: QueueUnderTest) -> None:
        """A job can be postponed and be brought forward."""
        queue.enqueue([0, 2, 4])
        some, now = sa.update(queue.Job), sa.func.now()
        queue.execute(some.where(queue.Job.number == 0).values(run_at=now + timedelta(days=1)))
        assert queue.claimable() == [2, 4]
        queue.execute(some.where(queue.Job.number.in_([0, 4])).values(run_at=now - timedelta(days=1)))
        assert queue.order() == [0, 4, 2]

    def test_an_edited_key_reaches_the_claim(self, queue: QueueUnderTest) -> None:
        """Also when two jobs swap their keys in one statement."""
        queue.enqueue([0, 2, 4])
        queue.execute("UPDATE conformance_job SET id = id + 1000 WHERE number = 0")
        with queue.session() as session:
            jobs = queue.claim(session)
            assert numbers_of(jobs) == [0, 2, 4]
            assert len(session.scalars(complete(jobs)).all()) == 3
            session.commit()
        assert queue.claimable() == []

    def test_keys_and_priorities_edited_in_one_statement(self, queue: QueueUnderTest) -> None:
        """Every job takes the key of another one."""
        queue.enqueue([0, 2, 4])
        step = 1 if queue.composite else 2
        # Unique keys are checked row by row, so the keys are negative in between.
        with queue.engine.begin() as connection:
            for text in ("id = -id - 1", f"id = -id - 1 + {step}, priority = -number"):
                connection.execute(sa.text(f"UPDATE conformance_job SET {text}"))
        assert queue.order() == [4, 2, 0]


def _copy(queue: QueueUnderTest, command: str, lines: str) -> None:
    connection = queue.engine.raw_connection()
    try:
        cursor: Any = connection.cursor()
        if hasattr(cursor, "copy_expert"):
            cursor.copy_expert(command, io.StringIO(lines))
        else:
            with cursor.copy(command) as copy:
                copy.write(lines)
        connection.commit()
    finally:
        connection.close()
