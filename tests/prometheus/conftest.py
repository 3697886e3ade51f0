"""A queue of each kind, or two, in an empty database; and what collectors say: values of gauges by name and labels."""

from collections.abc import Iterable
from typing import Any

import pytest
import sqlalchemy as sa
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from sqlaqueue import QueueConfig, QueueMixin
from sqlaqueue.prometheus import QueueCollector, WorkerMetrics
from tests.admin.models import Setup
from tests.shared_database import engine, shared
from tests.unique.models import KINDS

__all__ = ["engine", "setup", "shared"]


Values = dict[tuple[str, ...], float]

STATEMENT_TIMEOUT = 30.0
"""Seconds that a statement may take on a machine that does much else."""

_workers = CollectorRegistry()
WorkerMetrics(_workers)
WORKER_METRICS = {family.name: family.type for family in _workers.collect()}
"""The metrics of workers, as the families are named, with their types."""


def collect(engine: sa.Engine, *models: Any, **options: Any) -> Values:
    """Return the values of a collector by the gauge's name, without its prefix, and the values of its labels."""
    options = {"statement_timeout": STATEMENT_TIMEOUT, **options}
    registry = CollectorRegistry()
    registry.register(QueueCollector(models, sessionmaker(engine), **options))
    return values(registry.collect())


def parse(text: str) -> Values:
    """Return the same from the text format."""
    return values(text_string_to_metric_families(text))


def values(families: Iterable[Any]) -> Values:
    found: Values = {}
    for family in families:
        for sample in family.samples:
            key = (sample.name.removeprefix("sqlaqueue_"), *sample.labels.values())
            assert key not in found, "a series is exported twice"
            found[key] = sample.value
    return found


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


@pytest.fixture(params=KINDS)
def setup(engine: sa.Engine, request: pytest.FixtureRequest) -> Setup:
    return Setup.of(engine, request.param, unique=None)


@pytest.fixture
def two(engine: sa.Engine) -> tuple[Any, Any]:
    """Two queues, each with a job."""
    models = make_two()
    models[0].metadata.create_all(engine)
    with Session(engine) as session:
        session.add_all([models[0](), models[1]()])
        session.commit()
    return models
