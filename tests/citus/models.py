"""The queues of these tests, and the DDL that places their tables."""

from functools import cache
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Mapped, mapped_column

from sqlaqueue import Constant, QueueConfig, QueueMixin
from tests.consumer.models import Models, models
from tests.models import new_base

TENANTS = 4

DISTRIBUTE = (
    "SELECT create_distributed_table('job', 'tenant')",
    "SELECT create_reference_table('sqlaqueue_control')",
    # So that Consumers which are connected to a worker find it.
    "SELECT citus_add_local_table_to_metadata('sqlaqueue_consumer')",
)


def tenant_of(key: int) -> int:
    """Return the value by which a job is distributed."""
    return key % TENANTS


@cache
def distributed_models(**config: Any) -> Models:
    """Return the models of ``tests.consumer`` with a key that contains the column that distributes the jobs."""
    base = new_base()

    class Job(QueueMixin, base):
        __tablename__ = "job"
        __queue__ = QueueConfig(
            **{"strategy": "update_status", "max_attempts": 3, "notify": False, "retry": Constant(delay=0), **config}
        )
        id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
        tenant: Mapped[int] = mapped_column(
            primary_key=True, default=lambda context: tenant_of(context.get_current_parameters()["id"])
        )
        payload: Mapped[str | None]

    class Effect(base):
        __tablename__ = "effect"
        id: Mapped[int] = mapped_column(primary_key=True)
        job: Mapped[int]
        note: Mapped[str | None]

    return Models(base, Job, None, Effect)


def models_for(placement: str) -> Models:
    """Return the models for tables that are ``distributed``, or in a ``schema`` on one worker."""
    return distributed_models() if placement == "distributed" else models("update_status", notify=False)


def create(engine: sa.Engine, placement: str) -> Models:
    """Create the tables of :func:`models_for`."""
    found = models_for(placement)
    found.base.metadata.create_all(engine)
    if placement == "distributed":
        execute(engine, *DISTRIBUTE)
    return found


def execute(engine: sa.Engine, *statements: str) -> None:
    """Execute statements, each in a transaction of its own."""
    for statement in statements:
        with engine.begin() as connection:
            connection.exec_driver_sql(statement)


def job_class(**config: Any) -> Any:
    """Return a queue without a payload, whose key contains the column ``tenant``."""

    class Job(QueueMixin, new_base()):
        __tablename__ = "job"
        __queue__ = QueueConfig(**{"strategy": "update_status", "notify": False, **config})
        id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
        tenant: Mapped[int] = mapped_column(primary_key=True)

    return Job


def placed(engine: sa.Engine, job: Any, *statements: str) -> Any:
    job.metadata.create_all(engine)
    execute(engine, *statements)
    return job
