"""Finished jobs are deleted after their retention, and nothing else is."""

import logging
from contextlib import AbstractContextManager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from sqlaqueue import Constant, QueueConfig, QueueMixin, claim
from sqlaqueue.consumer import pace
from sqlaqueue.consumer.maintenance import state
from sqlaqueue.consumer.maintenance.state import BATCH, FIRST_BATCH, MOST_SKIPPED, WALK, Deleted, Retention, Walk
from sqlaqueue.mapping.mixin import spec_of
from tests.consumer.bench import Bench, Server
from tests.consumer.models import Models
from tests.contexts import settings_of
from tests.programs import wait_until
from tests.servers import Database

DAY = timedelta(days=1)
KEPT = {"completed": 7 * DAY, "failed": 90 * DAY}


@pytest.fixture(autouse=True)
def long_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a deletion pause for longer than two seconds, as it does on a loaded machine: the server would end it."""
    monkeypatch.setattr(state, "_LONGEST", 30.0)


class Queue(Bench):
    """A queue with a retention, and tables that refer to it."""

    def __init__(self, database: Database, strategy: str, kept: dict[str, Any] | None = None, **config: Any) -> None:
        config |= {"strategy": strategy, "retention": KEPT if kept is None else kept, "retry": Constant(delay=0)}

        class Base(DeclarativeBase):
            pass

        class Job(QueueMixin, Base):
            __tablename__ = "job"
            __queue__ = QueueConfig(**config)
            id: Mapped[int] = mapped_column(primary_key=True)
            payload: Mapped[str | None]
            parent_id: Mapped[int | None] = mapped_column(sa.ForeignKey("job.id", ondelete="SET NULL"))

        class Child(Base):
            __tablename__ = "child"
            id: Mapped[int] = mapped_column(primary_key=True)
            job_id: Mapped[int | None] = mapped_column(sa.ForeignKey("job.id", name="child_of_job"), index=True)

        class Pet(Base):
            __tablename__ = "pet"
            id: Mapped[int] = mapped_column(primary_key=True)
            job_id: Mapped[int] = mapped_column(sa.ForeignKey("job.id", ondelete="CASCADE"), index=True)

        class Flea(Base):
            __tablename__ = "flea"
            id: Mapped[int] = mapped_column(primary_key=True)
            pet_id: Mapped[int] = mapped_column(sa.ForeignKey("pet.id", name="flea_of_pet"), index=True)

        super().__init__(database, strategy, made=Models(Base, Job))
        self.create()

    def add(self, count: int, status: str, days: float, payload: str = "") -> list[int]:
        """Add jobs that have been finished for some days, the first one for longest."""
        inserted = self.in_session(
            sa.text(f"""
                INSERT INTO job (status, finished_at, payload)
                SELECT '{status}', now() - interval '{days} days' + number * interval '1 ms', '{payload}'
                FROM generate_series(1, {count}) AS number RETURNING id
            """)
        )
        return sorted(key for (key,) in inserted)

    def left(self) -> set[int]:
        return {*self.rows()}

    def serve(self, api: str = "sync") -> AbstractContextManager[Server]:
        self.api = api
        return self.consumer().running()


@pytest.fixture(autouse=True)
def frequent_deletions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "RETENTION", 0.05)


@pytest.fixture
def queue(database: Database, strategy: str) -> Queue:
    return Queue(database, strategy)


@pytest.fixture
def leased(database: Database) -> Queue:
    return Queue(database, "update_status")


@pytest.mark.parametrize("api", ["sync", "async"])
def test_finished_jobs_are_deleted_after_their_retention(queue: Queue, api: str) -> None:
    queue.add(BATCH + 20, "completed", 8)
    queue.add(20, "failed", 91)
    stay = {
        *queue.add(20, "completed", 6),
        *queue.add(20, "failed", 89),
        *queue.add(20, "cancelled", 1000),
        *queue.add(3, "processing", 1000),
    }
    queue.execute("INSERT INTO job (status) VALUES ('completed')")
    stay |= {max(queue.left())}  # it is unknown for how long it has been finished
    with queue.serve(api):
        wait_until(lambda: queue.left() == stay)


def test_jobs_that_become_old_are_deleted(database: Database) -> None:
    """Jobs end, and become old while a Consumer runs."""
    queue = Queue(database, "update_status", {"completed": 1})
    queue.execute("INSERT INTO job (payload) SELECT 'x' FROM generate_series(1, 10)")
    with queue.serve():
        wait_until(lambda: queue.left() == set())


def test_a_backlog_is_deleted_in_a_few_batches(leased: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch is one DELETE, of which the Consumer reads one row, however many jobs it deletes."""
    # A batch stays as large on a loaded machine.
    monkeypatch.setattr(state, "_LONG", 600.0)
    young = leased.add(10, "completed", 6)
    number = sum(sizes := [500, 1000, 2000, 600])
    leased.add(number, "completed", 8)
    deleted, read = list[Deleted](), list[int]()
    delete = Retention.delete_batch

    def record(*arguments: Any) -> Deleted:
        deleted.append(delete(*arguments))
        return deleted[-1]

    monkeypatch.setattr(Retention, "delete_batch", record)
    server = leased.consumer()

    @sa.event.listens_for(server.sync_engine, "after_cursor_execute")
    def _count(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        if "DELETE FROM job" in statement:
            read.append(cursor.rowcount)

    with server.running():
        wait_until(lambda: leased.left() == {*young})
    # That of failed jobs finds nothing, each time.
    assert [each.number for each in deleted if each.number] == sizes
    assert read == [1] * len(deleted)


def test_messages_match_the_jobs_that_stay(database: Database) -> None:
    queue = Queue(database, "delete_returning")
    queue.add(10, "completed", 8)
    queue.execute("INSERT INTO job (run_at) SELECT now() + interval '1 day' FROM generate_series(1, 5)")
    with queue.serve():
        wait_until(lambda: len(queue.left()) == 5)
    assert queue.execute("SELECT count(*) FROM sqlaqueue_message_job JOIN job USING (id)") == 5
    assert queue.execute("SELECT count(*) FROM sqlaqueue_message_job") == 5


def test_dead_letters_are_deleted(database: Database) -> None:
    queue = Queue(database, "delete_returning", {"failed": 7 * DAY}, rows_are_messages=True)
    insert = "INSERT INTO sqlaqueue_dead_letter (queue, key, row, state, created_at) SELECT "
    queue.execute(
        insert
        + f"'job', jsonb_build_array(i), '{{}}', 'failed', now() - interval '8 days' FROM generate_series(1, {BATCH + 5}) i",
        insert + "'job', '[9001]', '{}', 'failed', now() - interval '6 days'",
        insert + "'job', '[9002]', '{}', 'cancelled', now() - interval '8 days'",
        insert + "'other', '[9003]', '{}', 'failed', now() - interval '8 days'",
    )
    with queue.serve():
        wait_until(lambda: queue.execute("SELECT count(*) FROM sqlaqueue_dead_letter") == 3)
    assert queue.execute("SELECT min((key -> 0)::int) FROM sqlaqueue_dead_letter") == 9001


def test_nothing_is_deleted_by_default(database: Database, strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(Retention, "delete_batch", refuse)
    queue = Queue(database, strategy, {})
    assert "ix_job_queue_finished" not in {index.name for index in queue.Job.__table__.indexes}
    queue.add(10, "completed", 10_000)
    with queue.serve() as serving:
        queue.execute("INSERT INTO job (payload) VALUES ('x')")
        wait_until(lambda: queue.execute("SELECT count(*) FROM job WHERE status = 'completed'") == 11)
        assert serving.context.has_claimed
    assert not Retention(spec_of(queue.Job)).walks


def test_a_job_with_references_stays_and_others_are_deleted(leased: Queue, caplog: Any) -> None:
    """Twice as many of them as are deleted at once are older than the others."""
    blocked = leased.add(2 * FIRST_BATCH, "completed", 9)
    leased.execute("INSERT INTO child (job_id) SELECT id FROM job")
    leased.add(FIRST_BATCH, "completed", 8)
    with leased.serve():
        wait_until(lambda: leased.left() == set(blocked))
        wait_until(lambda: "child_of_job" in caplog.text)
        leased.add(10, "completed", 7.5)
        # These are before the position of the walk.
        leased.execute("UPDATE job SET finished_at = now() - interval '7 days' + interval '0.5 s' WHERE id > 1500")
        wait_until(lambda: leased.left() == set(blocked))
    (warning,) = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
    assert f"Job: job {blocked[0]} is completed and older than 7 days" in warning
    assert (
        'the foreign key child_of_job of child refers to it and has no ON DELETE; give that foreign key ondelete="CASC'
        in warning
    )


def test_rows_that_are_deleted_with_a_job_do_not_keep_it(leased: Queue) -> None:
    leased.add(10, "completed", 8)
    leased.execute("INSERT INTO pet (job_id) SELECT id FROM job", "UPDATE job SET parent_id = id")
    with leased.serve():
        wait_until(lambda: leased.left() == set())


def test_a_job_whose_deletion_fails_is_skipped(leased: Queue, caplog: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that refers to it would be deleted with it, and cannot be: only trying shows that."""
    for name in ("BATCH", "FIRST_BATCH"):
        monkeypatch.setattr(state, name, 16)
    # The search takes many batches, and between two of them a Consumer pauses for nine times as long as one took.
    monkeypatch.setattr(pace.Intervals, "between_deletions", lambda _, busy: 0.01)
    jobs = leased.add(40, "completed", 8)
    blocked = {jobs[0], jobs[25], jobs[-1]}
    leased.execute(
        f"INSERT INTO pet (job_id) SELECT id FROM job WHERE id IN ({', '.join(map(str, blocked))})",
        "INSERT INTO flea (pet_id) SELECT id FROM pet",
    )
    with leased.serve():
        wait_until(lambda: leased.left() == blocked)
    warnings = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert f"Job: job {jobs[0]} is completed and older than 7 days, 0:00:00, and cannot be deleted" in warnings[0]
    assert "flea_of_pet" in warnings[0]


@pytest.mark.parametrize("moment", ["", ", finished_at = now() - interval '8 days'"])
def test_jobs_that_stay_without_an_error_keep_no_others(
    leased: Queue, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """A trigger keeps more of the oldest ones than are deleted at once."""
    for name in ("BATCH", "FIRST_BATCH"):
        monkeypatch.setattr(state, name, 4)
    kept = leased.add(9, "completed", 8, "keep")
    leased.add(9, "completed", 7.5)
    leased.execute(
        f"UPDATE job SET payload = payload{moment} WHERE payload = 'keep'",
        "CREATE FUNCTION keep() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$",
        "CREATE TRIGGER keep BEFORE DELETE ON job FOR EACH ROW WHEN (OLD.payload = 'keep') EXECUTE FUNCTION keep()",
    )
    with leased.serve():
        wait_until(lambda: leased.left() == set(kept))


def test_deletions_do_not_wait_for_locked_jobs(queue: Queue) -> None:
    held, *others = queue.add(10, "completed", 8)
    queue.execute("INSERT INTO job (payload) VALUES ('x')")
    with queue.sessions() as session, queue.database.connect() as other, other.transaction():
        other.execute(f"SELECT * FROM job WHERE id = {held} FOR UPDATE".encode())
        assert len(session.scalars(claim(queue.Job, 1)).all()) == 1
        with queue.serve():
            wait_until(lambda: queue.left().isdisjoint(others))
        assert held in queue.left()


def test_without_the_index_nothing_is_deleted(leased: Queue, caplog: Any) -> None:
    """As between a new version of the program and its migration."""
    leased.execute("DROP INDEX ix_job_queue_finished")
    leased.add(10, "completed", 8)
    with leased.serve():
        wait_until(lambda: "lacks the index ix_job_queue_finished" in caplog.text)
        leased.execute("INSERT INTO job (payload) VALUES ('x')")
        wait_until(lambda: leased.execute("SELECT count(*) FROM job WHERE status = 'completed'") == 11)
        spec = spec_of(leased.Job)
        (index,) = [index for index in spec.table.indexes if index.name == "ix_job_queue_finished"]
        index.create(leased.engine)
        wait_until(lambda: len(leased.left()) == 1)
    assert caplog.text.count("lacks the index") == 1


def delete_batch(queue: Queue, walk: Walk) -> Deleted:
    settings, retention = settings_of(queue.Job, batch_size=1), Retention(spec_of(queue.Job))
    with queue.sessions() as session:
        assert retention.inspect(session, settings)
        return retention.delete_batch(session, settings, walk)


@pytest.mark.parametrize("statistics", ["none", "right", "wrong"])
def test_a_batch_reads_a_few_pages_of_a_large_table(leased: Queue, statistics: str) -> None:
    leased.execute("ALTER TABLE job SET (autovacuum_enabled = off)")
    leased.add(50_000, "completed", 50 if statistics == "wrong" else 5)
    leased.execute("INSERT INTO child (job_id) SELECT id FROM job WHERE mod(id, 10) = 0")
    if statistics != "none":
        leased.execute("ANALYZE job, child")
    if statistics == "wrong":
        # The planner believes that all of them are old.
        leased.execute("UPDATE job SET finished_at = now() - interval '5 days'")
        with leased.database.connect() as connection:
            connection.execute("VACUUM job")
    plans: list[str] = []

    @sa.event.listens_for(leased.engine, "before_cursor_execute", retval=True)
    def _explain(connection: Any, cursor: Any, statement: str, parameters: Any, *_: Any) -> tuple[str, Any]:
        if "DELETE FROM" in statement:
            cursor.execute(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {statement}", parameters)
            plans.append(cursor.fetchone()[0][0]["Plan"])
        return statement, parameters

    assert delete_batch(leased, Walk("completed", 7 * DAY)).number == 0
    (plan,) = plans
    assert plan["Shared Hit Blocks"] + plan["Shared Read Blocks"] < 20


def test_the_oldest_jobs_are_deleted_first(leased: Queue) -> None:
    young, old = leased.add(3, "completed", 8), leased.add(3, "completed", 9)
    deleted, newest, *_ = delete_batch(leased, Walk("completed", 7 * DAY, limit=4))
    assert deleted == 4
    assert leased.left() == set(young[1:])
    assert newest is not None
    assert abs(newest - (datetime.now(UTC) - 8 * DAY)) < timedelta(minutes=5)
    assert old


def test_a_batch_is_brief(leased: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that deletes extends leases as well, so it does not wait for a slow trigger."""
    monkeypatch.setattr(state, "_LONGEST", 1.0)
    leased.add(3, "completed", 8)
    leased.execute(
        """
        CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS
        'BEGIN PERFORM pg_sleep(600); RETURN OLD; END'
        """,
        "CREATE TRIGGER slow BEFORE DELETE ON job FOR EACH ROW EXECUTE FUNCTION slow()",
    )
    with pytest.raises(sa.exc.OperationalError, match="statement timeout"):
        delete_batch(leased, Walk("completed", 7 * DAY))
    assert len(leased.left()) == 3


# -- the walk over finished jobs, without a database ---------------------------------------------------------------


@pytest.mark.once
def test_a_walk_ends_and_begins_again() -> None:
    walk = Walk("completed", DAY)
    now, first, last = 100.0, datetime(2030, 1, 1, tzinfo=UTC), datetime(2030, 1, 2, tzinfo=UTC)
    assert walk.begins_at <= now
    walk.begin(now)
    walk.record_batch(first, last, 0.01, more=True)
    assert walk.since == first, "there may be more jobs of the same age"
    walk.record_batch(first, last, 0.01, more=False)
    assert walk.since == last, "all jobs that were old enough have been processed"
    assert walk.end()
    assert not walk.end(), "references are logged once in a walk"
    assert walk.begins_at == now + WALK
    walk.begin(now + WALK)
    assert walk.since is None
    assert walk.end()


@pytest.mark.once
def test_batches_that_take_long_or_fail_become_smaller() -> None:
    walk = Walk("completed", DAY)
    limits = []
    for took in (0.01, 0.01, 0.01, 0.2, 0.01, 0.2, 10.0, 0.01):
        limits.append(walk.limit)
        walk.record_batch(None, None, took, more=True)
    assert limits == [500, 1000, 2000, 4000, 4000, 5000, 5000, 2500]
    assert (limits[0], walk.limit) == (FIRST_BATCH, BATCH), "one that takes 0.2 seconds is neither too large nor small"
    failures = 0
    while not walk.record_error():
        failures += 1
    assert walk.limit == 1
    assert 2**failures <= BATCH
    walk.record_batch(None, None, 0.01, more=True)
    assert walk.limit == 2


@pytest.mark.once
def test_more_jobs_than_can_be_remembered_are_skipped() -> None:
    walk = Walk("completed", DAY)
    moment = datetime(2030, 1, 1, tzinfo=UTC)
    for number in range(MOST_SKIPPED - 1):
        assert not walk.skip((number,), moment)
    assert walk.skip((MOST_SKIPPED,), moment), "a pause"
    assert walk.skipped == []
    assert walk.since is not None
    assert walk.since > moment
