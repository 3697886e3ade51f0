"""A queue gets another strategy by a migration; pending and running jobs remain jobs."""

from __future__ import annotations

import threading
from itertools import permutations
from typing import TYPE_CHECKING, Any

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import ProgrammingError
from sqlalchemy.orm import Session

from sqlaqueue import QueueConfig, claim, complete, reconcile
from tests.migrations.models import enqueue, order, run_all, statuses
from tests.migrations.project import Project, dump
from tests.models import STRATEGIES

if TYPE_CHECKING:
    from pathlib import Path

    from tests.servers import Database


def project_of(model: type[Any], database: Database, directory: Path) -> Project:
    return Project(directory=directory, database=database, metadata=model.metadata)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        # Strategies with leases are the difficult ones.
        pytest.param(*pair, marks=() if "update_status" in pair else pytest.mark.thorough)
        for pair in permutations(STRATEGIES, 2)
    ],
)
def test_pending_jobs_stay_pending_in_both_directions(
    database: Database, engine: sa.Engine, tmp_path: Path, old: str, new: str
) -> None:
    before, after = order(QueueConfig(strategy=old)), order(QueueConfig(strategy=new))
    project = project_of(before, database, tmp_path)
    project.revise("create")
    project.upgrade()
    enqueue(engine, before, "done", priority=-1)
    enqueue(engine, before, "1", "2")
    with Session(engine) as session:
        session.execute(complete(session.scalars(claim(before, 1)).all()))
        session.commit()
    schema = dump(database)
    project.metadata = after.metadata
    project.revise("switch")
    project.upgrade()
    project.check()
    enqueue(engine, after, "3")
    with Session(engine) as session:
        assert session.scalars(reconcile(after)).all() == []
    with Session(engine) as session:
        assert [job.article for job in session.scalars(claim(after, 2))] == ["1", "2"]
        session.rollback()
    project.downgrade()
    assert dump(database) == schema
    with Session(engine) as session:
        assert session.scalars(reconcile(before)).all() == []
    assert run_all(engine, before) == ["1", "2", "3"]
    assert statuses(engine) == dict.fromkeys(["1", "2", "3", "done"], "completed")


@pytest.mark.parametrize("new", ["delete_returning", "batch_select"])
def test_a_leased_job_is_released(database: Database, engine: sa.Engine, tmp_path: Path, new: str) -> None:
    before, after = order(QueueConfig()), order(QueueConfig(strategy=new))
    project = project_of(before, database, tmp_path)
    project.revise("create")
    project.upgrade()
    enqueue(engine, before, "1")
    enqueue(engine, before, "of the application", status="processing")
    with Session(engine, expire_on_commit=False) as session:
        jobs = session.scalars(claim(before, 1)).all()
        session.commit()
        project.metadata = after.metadata
        text = project.revise("switch")
        assert "op.release_queue_jobs(" in text
        project.upgrade()
        # A processing row without a lease belongs to the application and is left alone.
        assert statuses(engine) == {"1": "pending", "of the application": "processing"}
        # The old consumer can no longer settle the job, so its writes are rolled back.
        with pytest.raises(ProgrammingError, match="lease_token"):
            session.execute(complete(jobs))
    with Session(engine) as session:
        (job,) = session.scalars(claim(after, 1)).all()
        assert (job.article, job.attempts) == ("1", 1)
        session.execute(complete([job]))
        session.commit()
    assert statuses(engine) == {"1": "completed", "of the application": "processing"}


@pytest.mark.parametrize("old", ["delete_returning", pytest.param("batch_select", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("without", [None, "lease_expires_at"])
def test_a_downgrade_to_a_strategy_without_leases_releases_jobs(
    database: Database, engine: sa.Engine, tmp_path: Path, old: str, without: str | None
) -> None:
    leases = QueueConfig(columns={without: None} if without else {})
    before, after = order(QueueConfig(strategy=old)), order(leases)
    project = project_of(before, database, tmp_path)
    project.revise("create")
    project.upgrade()
    project.metadata = after.metadata
    project.revise("switch")
    project.upgrade()
    enqueue(engine, after, "1")
    enqueue(engine, after, "of the application", status="processing")
    with Session(engine) as session:
        session.scalars(claim(after, 1)).all()
        session.commit()
    project.downgrade()
    assert statuses(engine) == {"1": "pending", "of the application": "processing"}
    assert run_all(engine, before) == ["1"]
    # The same by a new migration, also if the queue has no lease_expires_at.
    project.upgrade()
    with Session(engine) as session:
        session.execute(sa.update(after).where(after.article == "1").values(status="pending"))
        session.scalars(claim(after, 1)).all()
        session.commit()
    project.metadata = before.metadata
    project.revise("and back")
    project.upgrade()
    project.check()
    assert statuses(engine) == {"1": "pending", "of the application": "processing"}


@pytest.mark.parametrize("old", ["delete_returning", "batch_select"])
def test_the_migration_waits_for_open_batches(database: Database, engine: sa.Engine, tmp_path: Path, old: str) -> None:
    before, after = order(QueueConfig(strategy=old)), order(QueueConfig())
    project = project_of(before, database, tmp_path)
    project.revise("create")
    project.upgrade()
    enqueue(engine, before, "1", "2")
    project.metadata = after.metadata
    project.revise("switch")
    with Session(engine) as session:
        jobs = session.scalars(claim(before, 1)).all()
        migration = threading.Thread(target=project.upgrade)
        migration.start()
        # It tries again and again to lock the table, so other sessions can write meanwhile.
        enqueue(engine, before, "3")
        session.execute(complete(jobs))
        session.commit()
    migration.join(60)
    assert not migration.is_alive()
    assert statuses(engine) == {"1": "completed", "2": "pending", "3": "pending"}
    assert run_all(engine, after) == ["2", "3"]


def test_a_removed_queue_keeps_its_rows(database: Database, engine: sa.Engine, tmp_path: Path) -> None:
    before, after = order(QueueConfig(strategy="delete_returning")), order(None)
    project = project_of(before, database, tmp_path)
    project.revise("create")
    project.upgrade()
    enqueue(engine, before, "1", "2")
    project.metadata = after.metadata
    project.revise("no queue")
    project.upgrade()
    project.check()
    assert "sqlaqueue" not in dump(database)
    with pytest.raises(Exception, match="existing_rows"):
        project.downgrade()
    project.edit("existing_rows=...", "existing_rows='completed'")
    project.downgrade()
    assert statuses(engine) == {"1": "completed", "2": "completed"}
    assert run_all(engine, before) == []
    enqueue(engine, before, "3")
    assert run_all(engine, before) == ["3"]


def test_dropping_the_status_asks_about_existing_rows(database: Database, engine: sa.Engine, tmp_path: Path) -> None:
    before = order(QueueConfig())
    after = order(QueueConfig(strategy="delete_returning", rows_are_messages=True))
    project = project_of(before, database, tmp_path)
    project.revise("create")
    project.upgrade()
    enqueue(engine, before, "1")
    assert run_all(engine, before) == ["1"]
    project.metadata = after.metadata
    project.revise("own messages")
    with pytest.raises(Exception, match="each row of the table is a job"):
        project.upgrade()
    with engine.begin() as connection:
        connection.execute(sa.text("DELETE FROM orders WHERE status = 'completed'"))
    enqueue(engine, before, "2")
    project.edit("existing_rows=...", "existing_rows='pending'")
    project.upgrade()
    project.check()
    assert run_all(engine, after) == ["2"]
