"""Tables that Citus places where no Consumer can serve them are refused at its start, with what to do."""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, sessionmaker

from sqlaqueue import Consumer, Distribution, Fair, Limit, QueueConfig, QueueMixin, Schedule, Unique
from sqlaqueue.exc import ConfigurationError, DatabaseNotReadyError
from sqlaqueue.mapping.mixin import spec_of
from sqlaqueue.postgresql.placement import misplaced
from tests.citus.models import DISTRIBUTE, execute, job_class, placed

pytestmark = pytest.mark.once

TENANT = Distribution("tenant", [1, 2])


def refusal(engine: sa.Engine, job: Any, **options: Any) -> str:
    """Return why a Consumer does not start."""
    consumer = Consumer(job, lambda session, job: None, sessionmaker(engine), **options)
    with pytest.raises(DatabaseNotReadyError) as caught:
        consumer.drain()
    text = str(caught.value)
    assert "\n" not in text
    assert text.startswith("Job: ")
    return text


def test_a_reference_table(engine: sa.Engine) -> None:
    job = placed(engine, job_class(), "SELECT create_reference_table('job')")
    assert "job is a reference table of Citus, of which each claim and each insert waits" in refusal(engine, job)


def test_a_distributed_table_without_values(engine: sa.Engine) -> None:
    job = placed(engine, job_class(), *DISTRIBUTE)
    assert "give the Consumer distribution=Distribution('tenant', values)" in refusal(engine, job)


def test_a_filter_is_not_enough(engine: sa.Engine) -> None:
    """A claim with it would work, but neither a rescue nor the extension of leases."""
    job = placed(engine, job_class(), *DISTRIBUTE)
    assert "distribution=Distribution('tenant', values)" in refusal(engine, sa.select(job).where(job.tenant == 1))


def test_another_column(engine: sa.Engine) -> None:
    job = placed(engine, job_class(), *DISTRIBUTE)
    text = refusal(engine, job, distribution=Distribution("id", [1]))
    assert "job is distributed by tenant, but the Consumer has Distribution('id'); give it distribution=" in text
    execute(engine, text.partition("or execute ")[2])
    Consumer(job, lambda session, job: None, sessionmaker(engine), distribution=Distribution("id", [1])).drain()


def test_an_attribute_of_another_name_than_its_column(engine: sa.Engine) -> None:
    class Base(DeclarativeBase):
        pass

    class Job(QueueMixin, Base):
        __tablename__ = "job"
        __queue__ = QueueConfig(strategy="update_status", notify=False)
        id: Mapped[int] = mapped_column(primary_key=True)
        customer: Mapped[int] = mapped_column("tenant", primary_key=True)

    placed(engine, Job, *DISTRIBUTE)
    assert "distribution=Distribution('customer', values)" in refusal(engine, Job)
    text = refusal(engine, Job, distribution=Distribution("id", [1]))
    assert "give it distribution=Distribution('customer', values)" in text


def test_a_local_table_with_values(engine: sa.Engine) -> None:
    job = placed(engine, job_class())
    text = refusal(engine, job, distribution=TENANT)
    assert "job is not distributed by a column; execute SELECT create_distributed_table('job', 'tenant'), or" in text
    assert text.endswith("leave the argument out")


def test_a_local_table_with_values_and_triggers(engine: sa.Engine) -> None:
    job = placed(engine, job_class(notify=True))
    assert "use QueueConfig(notify=False), migrate, as Citus" in refusal(engine, job, distribution=TENANT)


def test_a_refused_start_logs_no_statement(engine: sa.Engine, caplog: pytest.LogCaptureFixture) -> None:
    """A rescue that runs beside the check of the start fails as well, and says nothing of the fix."""
    job = placed(engine, job_class(), *DISTRIBUTE)
    for _ in range(5):
        refusal(engine, job)
    assert "maintenance" not in caplog.text


@pytest.mark.parametrize("values", [["x"], [None], lambda: 5, lambda: [1, "x"], lambda: [1 // 0]])
def test_values_that_no_row_has(engine: sa.Engine, values: Any) -> None:
    """Each claim would fail, and be tried again for ever."""
    job = placed(engine, job_class(), *DISTRIBUTE)
    with pytest.raises(ConfigurationError, match=r"Distribution\('tenant', values\): "):
        Consumer(
            job, lambda session, job: None, sessionmaker(engine), distribution=Distribution("tenant", values)
        ).drain()


def test_a_local_control_table_beside_a_distributed_one(engine: sa.Engine) -> None:
    job = placed(engine, job_class(), DISTRIBUTE[0])
    assert "SELECT create_reference_table('sqlaqueue_control')" in refusal(engine, job, distribution=TENANT)


def test_heartbeats_that_wait_for_each_other(engine: sa.Engine) -> None:
    job = placed(
        engine,
        job_class(),
        *DISTRIBUTE,
        "SELECT undistribute_table('sqlaqueue_consumer')",
        "SELECT create_reference_table('sqlaqueue_consumer')",
    )
    assert "SELECT undistribute_table('sqlaqueue_consumer')" in refusal(engine, job, distribution=TENANT)


@pytest.mark.parametrize("kind", ["reference", "distributed"])
def test_side_tables_elsewhere_than_a_local_table(engine: sa.Engine, kind: str) -> None:
    place = {
        "reference": "SELECT create_reference_table('sqlaqueue_control')",
        "distributed": "SELECT create_distributed_table('sqlaqueue_control', 'queue')",
    }
    job = placed(engine, job_class(), place[kind])
    text = refusal(engine, job)
    assert f"sqlaqueue_control is {'a reference table' if kind == 'reference' else 'distributed by queue'}" in text
    assert "create both as local tables" in text


@pytest.mark.parametrize(
    ("option", "config"),
    [
        ("strategy='batch_select'", {"strategy": "batch_select"}),
        ("strategy='delete_returning'", {"strategy": "delete_returning"}),
        ("notify=True", {"notify": True}),
        ("unique", {"unique": Unique("tenant")}),
        ("of limits in QueueConfig", {"limits": [Limit(1)]}),
        ("of limits and fair in QueueConfig", {"limits": [Limit(1)], "fair": Fair("tenant")}),
        ("attempt_history", {"attempt_history": 3600}),
    ],
)
def test_options_on_shards(engine: sa.Engine, sharded_engine: sa.Engine, option: str, config: dict[str, Any]) -> None:
    """The tables are those of a plain queue: Citus itself refuses some of the triggers."""
    placed(sharded_engine, job_class())
    placed(engine, job_class(), *DISTRIBUTE)
    spec = spec_of(job_class(**config))
    for each, on_shard in ((sharded_engine, spec), (engine, spec.for_shard("tenant", 1))):
        with each.connect() as connection:
            text = misplaced(connection, on_shard)
        assert text is not None
        assert text.startswith("Job: job is on shards of Citus")
        assert option in text


def test_triggers_in_a_distributed_schema(sharded_engine: sa.Engine) -> None:
    with pytest.raises(
        DatabaseNotReadyError, match=r"^job: Citus creates no triggers .* use QueueConfig.notify=False."
    ):
        job_class(notify=True).metadata.create_all(sharded_engine)
    with pytest.raises(DatabaseNotReadyError, match=r'QueueConfig\(strategy="update_status", notify=False\)'):
        job_class(strategy="delete_returning").metadata.create_all(sharded_engine)


def test_schedules_in_a_distributed_schema(sharded_engine: sa.Engine) -> None:
    job = job_class()
    Schedule("hourly", job, every=3600, values={"id": 1, "tenant": 1})
    with pytest.raises(DatabaseNotReadyError, match=r"^sqlaqueue_schedule: Citus creates no triggers .* no schedules"):
        job.metadata.create_all(sharded_engine)
