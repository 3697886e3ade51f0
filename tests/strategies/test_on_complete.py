"""Queues that delete completed jobs."""

from __future__ import annotations

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from sqlaqueue import QueueConfig, QueueMixin, claim, complete, extend, fail, reconcile, rescue


@pytest.mark.parametrize("strategy", ["update_status", "batch_select", "delete_returning"])
def test_a_completed_job_is_deleted(engine: sa.Engine, strategy: str) -> None:
    class Base(DeclarativeBase):
        pass

    class Job(QueueMixin, Base):
        __tablename__ = "job"
        __queue__ = QueueConfig(strategy=strategy, on_complete="delete")
        id: Mapped[int] = mapped_column(primary_key=True)

    Base.metadata.create_all(engine)
    with Session(engine) as session:
        session.add_all([Job(id=number) for number in range(3)])
        session.commit()
        first, second = session.scalars(claim(Job, 2)).all()
        assert session.scalars(complete(first)).all() == [0]
        assert session.scalars(complete(first)).all() == []
        assert session.scalars(fail(second)).all() == [1]
        session.commit()
        assert session.scalars(sa.select(Job.id).order_by(Job.id)).all() == [1, 2]
        assert session.scalars(reconcile(Job)).all() == []
        session.commit()
    Base.metadata.drop_all(engine)


def test_a_late_result_deletes_nothing(engine: sa.Engine) -> None:
    class Base(DeclarativeBase):
        pass

    class Job(QueueMixin, Base):
        __tablename__ = "job"
        __queue__ = QueueConfig(strategy="update_status", on_complete="delete")
        id: Mapped[int] = mapped_column(primary_key=True)

    Base.metadata.create_all(engine)
    with Session(engine) as session, Session(engine) as thief:
        session.add(Job(id=1))
        session.commit()
        late = session.scalars(claim(Job, 1)).all()
        session.commit()
        session.execute(extend(late, lease=0))
        session.execute(rescue(Job))
        session.commit()
        (job,) = thief.scalars(claim(Job, 1)).all()
        thief.commit()
        assert session.scalars(complete(late)).all() == []
        session.commit()
        assert thief.scalars(complete(job)).all() == [1]
        thief.commit()
    Base.metadata.drop_all(engine)
