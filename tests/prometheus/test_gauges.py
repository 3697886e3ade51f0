"""Every gauge, against a prepared database."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from sqlaqueue import Limit, QueueConfig, QueueMixin, Unique, admin, claim, complete
from sqlaqueue.prometheus.queues import GAUGES
from tests.admin.models import HELD, Setup
from tests.prometheus.values import collect
from tests.schedules.models import create, hourly, make_report, start
from tests.unique.models import make_job

NOW = datetime.now(UTC)
AGO, LATER = NOW - timedelta(hours=1), NOW + timedelta(days=1)


def kind_of(setup: Setup) -> str:
    return "rows" if "sqlaqueue_dead_letter" in setup.model.metadata.tables else "status"


def test_an_empty_queue(setup: Setup) -> None:
    found = collect(setup.engine, setup.model)
    assert found.pop(("scrape_duration_seconds", "job")) >= 0
    has_leases = setup.model.__queue__.strategy == "update_status"
    assert found == {
        ("jobs", "job", "pending"): 0,
        ("due_jobs", "job"): 0,
        ("oldest_due_job_age_seconds", "job"): 0,
        ("running_jobs", "job"): 0,
        ("consumers", "job"): 0,
        ("consumers_listening", "job"): 0,
        ("paused", "job"): 0,
        ("keys_at_limit", "job"): 0,
        ("missing_indexes", "job"): 0,
        ("scrape_success", "job"): 1,
        **({("jobs", "job", "processing"): 0, ("expired_leases", "job"): 0} if has_leases else {}),
    }


def test_pending_and_due_jobs(setup: Setup) -> None:
    setup.add(setup.model(run_at=AGO), setup.model(run_at=AGO + timedelta(minutes=30)), setup.model(run_at=LATER))
    found = collect(setup.engine, setup.model)
    assert found["jobs", "job", "pending"] == 3
    assert found["due_jobs", "job"] == 2
    age = datetime.now(UTC) - AGO
    assert 3600 <= found["oldest_due_job_age_seconds", "job"] <= age.total_seconds()


def test_the_oldest_due_job_is_found_among_all_priorities(engine: sa.Engine) -> None:
    setup = Setup.of(engine, "update_status", unique=None)
    setup.add(setup.model(priority=0), setup.model(priority=1, run_at=LATER), setup.model(priority=7, run_at=AGO))
    found = collect(engine, setup.model)
    assert found["due_jobs", "job"] == 2
    assert found["oldest_due_job_age_seconds", "job"] >= 3600


def test_unfinished_jobs_are_counted_up_to_a_limit(setup: Setup) -> None:
    setup.add(*(setup.model(run_at=AGO + timedelta(seconds=number)) for number in range(12)))
    found = collect(setup.engine, setup.model, count_limit=5)
    assert found["jobs", "job", "pending"] == found["due_jobs", "job"] == 5
    assert found["oldest_due_job_age_seconds", "job"] >= 3600
    assert collect(setup.engine, setup.model, count_limit=12)["due_jobs", "job"] == 12


def test_the_limit_is_that_of_all_priorities(engine: sa.Engine) -> None:
    setup = Setup.of(engine, "update_status", unique=None)
    setup.add(*(setup.model(priority=number % 3, run_at=AGO) for number in range(12)))
    assert collect(engine, setup.model, count_limit=5)["due_jobs", "job"] == 5


def test_running_jobs_and_expired_leases(engine: sa.Engine) -> None:
    setup = Setup.of(engine, "update_status", unique=None)
    setup.add(*(setup.model() for _ in range(4)))
    with Session(engine) as session:
        assert len(session.scalars(claim(setup.model, 3)).all()) == 3
        session.commit()
    setup.execute("UPDATE job SET lease_expires_at = now() - interval '1 s' WHERE id = 2")
    found = collect(engine, setup.model)
    assert found["jobs", "job", "pending"] == 1
    assert found["jobs", "job", "processing"] == found["running_jobs", "job"] == 3
    assert found["expired_leases", "job"] == 1
    assert collect(engine, setup.model, count_limit=2)["running_jobs", "job"] == 2


@pytest.mark.parametrize("kind", HELD)
def test_jobs_of_an_open_transaction_run_as_heartbeats_say(engine: sa.Engine, kind: str) -> None:
    setup = Setup.of(engine, kind, unique=None)
    setup.add(setup.model(), setup.model())
    setup.add_consumer(running=[["1"]])
    with Session(engine) as session:
        assert len(session.scalars(claim(setup.model, 1)).all()) == 1
        found = collect(engine, setup.model)
    assert found["jobs", "job", "pending"] == found["due_jobs", "job"] == 2
    assert found["running_jobs", "job"] == 1


def test_jobs_that_wait_for_a_twin_are_not_running(engine: sa.Engine) -> None:
    setup = Setup(engine, make_job("update_status", Unique("key", on_return="wait", states=("pending",))))
    setup.add(setup.model(key="a"))
    setup.execute("UPDATE job SET status = 'processing', lease_expires_at = to_timestamp(0)")
    found = collect(engine, setup.model)
    assert found["jobs", "job", "processing"] == 1
    assert found["running_jobs", "job"] == found["expired_leases", "job"] == 0


def test_consumers(setup: Setup) -> None:
    setup.add_consumer("web:1")
    setup.add_consumer("web:2", listening=False)
    setup.add_consumer("web:3")
    setup.execute("UPDATE sqlaqueue_consumer SET expires_at = now() - interval '1 s' WHERE id = 'web:3'")
    found = collect(setup.engine, setup.model)
    assert (found["consumers", "job"], found["consumers_listening", "job"]) == (2, 1)


def test_a_paused_queue(setup: Setup) -> None:
    with Session(setup.engine) as session:
        admin.pause(session, setup.model)
    assert collect(setup.engine, setup.model)["paused", "job"] == 1


def test_finished_jobs_are_counted_only_if_asked_for(setup: Setup) -> None:
    setup.add(*(setup.model() for _ in range(3)))
    with Session(setup.engine) as session:
        admin.cancel(session, sa.select(setup.model).where(setup.model.id == 3))
        session.execute(complete(session.scalars(claim(setup.model, 1)).all()))
        session.commit()
    states = {key[2]: value for key, value in collect(setup.engine, setup.model).items() if key[0] == "jobs"}
    assert states.pop("processing", 0) == 0
    assert states == {"pending": 1}
    states = {
        key[2]: value for key, value in collect(setup.engine, setup.model, finished=True).items() if key[0] == "jobs"
    }
    assert states.pop("processing", 0) == 0
    completed = {} if kind_of(setup) == "rows" else {"completed": 1}
    assert states == {"pending": 1, "failed": 0, "cancelled": 1} | completed


def test_keys_at_their_limit(engine: sa.Engine) -> None:
    setup = Setup(engine, make_job("update_status", None, limits=[Limit(1, per="key")]))
    setup.add(*(setup.model(key=key) for key in "aabbc"))
    with Session(engine) as session:
        assert len(session.scalars(claim(sa.select(setup.model).where(setup.model.key != "c"), 10)).all()) == 2
        session.commit()
    assert collect(engine, setup.model)["keys_at_limit", "job"] == 2


def test_missing_indexes(engine: sa.Engine) -> None:
    setup = Setup.of(engine, "update_status")
    setup.execute("DROP INDEX ix_job_queue_claim")
    setup.execute("DROP INDEX ix_job_queue_lease")
    assert collect(engine, setup.model)["missing_indexes", "job"] == 2


def test_schedules(engine: sa.Engine) -> None:
    model = make_report()
    nightly, weekly = hourly(model, "nightly"), hourly(model, "weekly")
    create(engine, model)
    start(engine, [nightly, weekly])
    with engine.begin() as connection:
        connection.exec_driver_sql(
            "UPDATE sqlaqueue_schedule SET next_tick = now() - interval '2 hours' WHERE name = 'nightly'"
        )
    with Session(engine) as session:
        admin.pause_schedule(session, model, "weekly")
    found = collect(engine, model)
    assert 7200 <= found["schedule_late_seconds", "report", "nightly"] < 7300
    assert found["schedule_paused", "report", "nightly"] == 0
    assert found["schedule_late_seconds", "report", "weekly"] == 0
    assert found["schedule_paused", "report", "weekly"] == 1


def make_two() -> tuple[Any, Any]:
    class Base(DeclarativeBase):
        pass

    class First(QueueMixin, Base):
        __tablename__ = "first"
        __queue__ = QueueConfig()
        id: Mapped[int] = mapped_column(primary_key=True)

    class Second(QueueMixin, Base):
        __tablename__ = "second"
        __queue__ = QueueConfig(strategy="batch_select")
        id: Mapped[int] = mapped_column(primary_key=True)

    return First, Second


def test_schedules_of_two_queues_in_one_table_are_exported_once(engine: sa.Engine) -> None:
    first, second = make_two()
    schedules = [hourly(first, "a", values={}), hourly(second, "b", values={})]
    create(engine, first)
    start(engine, schedules)
    found = collect(engine, first, second)
    assert {key[1:] for key in found if key[0] == "schedule_paused"} == {("first", "a"), ("second", "b")}


def test_all_gauges_are_tested() -> None:
    here = Path(__file__).read_text(encoding="utf-8")
    missing = [each.name for each in GAUGES if f'"{each.name.removeprefix("sqlaqueue_")}"' not in here]
    assert missing == []


ROLES = ("priority", "run_at", "created_at")


@pytest.mark.parametrize("left_out", [("priority",), ("run_at",), ("run_at", "created_at"), ROLES])
@pytest.mark.parametrize("kind", ["update_status", "batch_select", "delete_returning", "rows_are_messages"])
def test_models_that_leave_attributes_out(engine: sa.Engine, kind: str, left_out: tuple[str, ...]) -> None:
    setup = Setup(engine, make_job(kind, None, columns=dict.fromkeys(left_out)))
    setup.add(setup.model(), setup.model())
    found = collect(engine, setup.model)
    assert found["scrape_success", "job"] == 1
    assert found["jobs", "job", "pending"] == found["due_jobs", "job"] == 2
    # Without a time of the jobs there is no age; a zero would be wrong.
    assert (("oldest_due_job_age_seconds", "job") in found) == (not {"run_at", "created_at"} <= set(left_out))


@pytest.mark.parametrize("kind", ["update_status", "delete_returning"])
def test_columns_that_may_be_null(engine: sa.Engine, kind: str) -> None:
    class Base(DeclarativeBase):
        pass

    class Job(QueueMixin, Base):
        __tablename__ = "job"
        __queue__ = QueueConfig(strategy=kind, adopt={"status": "state", "run_at": "due", "priority": "rank"})
        id: Mapped[int] = mapped_column(primary_key=True)
        state: Mapped[str] = mapped_column(default="pending")
        due: Mapped[datetime | None] = mapped_column(sa.DateTime(timezone=True))
        rank: Mapped[int | None]
        lease_expires_at: Mapped[datetime | None]

    setup = Setup(engine, Job)
    setup.add(Job(), Job(rank=1), Job(due=AGO), Job(due=AGO, rank=2), Job(due=LATER), Job(due=LATER, rank=3))
    found = collect(engine, Job)
    assert (found["jobs", "job", "pending"], found["due_jobs", "job"]) == (6, 4)
    assert found["oldest_due_job_age_seconds", "job"] >= 3600
