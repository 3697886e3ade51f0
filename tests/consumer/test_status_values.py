"""Tables that have no status value for one of the states in which a run may end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from sqlaqueue import Cancel, Consumer, QueueConfig, QueueMixin, States
from sqlaqueue.exc import ConfigurationError
from tests.consumer.models import STRATEGIES
from tests.models import shared

if TYPE_CHECKING:
    from tests.servers import Database


@shared
def make_job(**config: Any) -> Any:
    class Base(DeclarativeBase):
        pass

    class Job(QueueMixin, Base):
        __tablename__ = "job"
        __queue__ = QueueConfig(**config)
        id: Mapped[int] = mapped_column(primary_key=True)

    return Job


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_without_a_status_value_for_it_a_cancelled_job_is_failed(database: Database, strategy: str) -> None:
    job = make_job(strategy=strategy, states=States(cancelled=None))
    engine = sa.create_engine(database.url())
    job.metadata.create_all(engine)

    def handler(session: Session, one: Any) -> None:
        if one.id == 1:
            raise Cancel("not needed")

    with Session(engine) as session:
        session.add_all([job(), job()])
        session.commit()
        Consumer(job, handler, sessionmaker(engine)).drain()
        found = session.execute(sa.select(job.status, job.last_error).order_by(job.id)).all()
    assert found == [("failed", "not needed"), ("completed", None)]
    engine.dispose()


@pytest.mark.once
@pytest.mark.parametrize("state", ["failed", "completed"])
def test_a_consumer_needs_status_values_for_the_outcomes_of_runs(state: str) -> None:
    job = make_job(states=States(**{state: None}))
    with pytest.raises(
        ConfigurationError, match=rf"Job has no value for the state .*{state}.*States\({state}=\.\.\.\)"
    ):
        Consumer(job, print, sessionmaker())


@pytest.mark.once
def test_where_completed_jobs_are_deleted_it_needs_no_value_for_them() -> None:
    Consumer(make_job(states=States(completed=None), on_complete="delete"), print, sessionmaker())
