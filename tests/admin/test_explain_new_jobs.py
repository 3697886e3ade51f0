"""``admin.explain_job()`` of new instances: whether a twin keeps them from being enqueued."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, relationship

from sqlaqueue import QueueConfig, QueueMixin, Unique, admin, claim, enqueue
from tests.admin.models import Setup, make_rows
from tests.unique.models import KINDS


def explain(setup: Setup, job: Any) -> tuple[str, str]:
    with Session(setup.engine) as session:
        explanation = admin.explain_job(session, job)
        assert job not in session
        assert (explanation.key, explanation.state) == (None, "new")
        [reason] = explanation.reasons
        return reason.code, reason.text


@pytest.mark.parametrize("kind", KINDS)
def test_a_twin(engine: sa.Engine, kind: str) -> None:
    setup = Setup.of(engine, kind)
    setup.add(setup.model(id=5, key="a"))
    code, text = explain(setup, setup.model(key="a"))
    assert code == "twin"
    assert text.startswith("Job 5 has key='a' as well and is pending, enqueued at ")
    code, text = explain(setup, setup.model(key="b"))
    assert code == "ready"
    assert "No job with key='b' counts" in text
    setup.add(setup.model(id=6, key=None))
    code, text = explain(setup, setup.model(key=None))
    assert code == "ready"
    assert "a None in key=None" in text
    with Session(engine) as session:
        # What it says is so.
        assert [one.created for one in enqueue(session, [setup.model(key="a"), setup.model(key="b")])] == [False, True]


def test_a_running_twin(engine: sa.Engine) -> None:
    setup = Setup.of(engine, "update_status")
    setup.add(setup.model(id=5, key="a"))
    with Session(engine) as session:
        session.scalars(claim(setup.model, 1)).all()
        session.commit()
    assert "is processing" in explain(setup, setup.model(key="a"))[1]


def test_nulls_that_do_not_differ(engine: sa.Engine) -> None:
    setup = Setup.of(engine, "update_status", unique=Unique("key", nulls_distinct=False))
    setup.add(setup.model(id=5))
    code, text = explain(setup, setup.model())
    assert (code, text[:22]) == ("twin", "Job 5 has key=None as ")


def test_a_period(engine: sa.Engine) -> None:
    setup = Setup.of(engine, "update_status", unique=Unique("key", per=timedelta(days=36500)))
    setup.add(setup.model(id=5, key="a"))
    job = setup.model(key="a")
    code, text = explain(setup, job)
    assert code == "twin"
    assert "or the period of 36500 days, 0:00:00 is over" in text
    # Nothing was set on the instance.
    assert "created_at" not in job.__dict__
    assert explain(setup, setup.model(key="a", created_at=datetime(1950, 1, 1, tzinfo=UTC)))[0] == "ready"


def test_a_queue_without_unique_jobs(engine: sa.Engine) -> None:
    row = make_rows()
    code, text = explain(Setup(engine, row), row(year=1, name="a"))
    assert code == "ready"
    assert "has no QueueConfig(unique=...)" in text


def test_defaults_and_relationships_count(engine: sa.Engine) -> None:
    class Base(DeclarativeBase):
        pass

    class Customer(Base):
        __tablename__ = "customer"
        id: Mapped[int] = mapped_column(primary_key=True)

    class Reminder(QueueMixin, Base):
        __tablename__ = "reminder"
        __queue__ = QueueConfig(unique=Unique("customer_id", "kind"))
        id: Mapped[int] = mapped_column(primary_key=True)
        customer_id: Mapped[int] = mapped_column(sa.ForeignKey("customer.id"))
        kind: Mapped[str] = mapped_column(default="invoice")
        customer: Mapped[Customer] = relationship()

    Base.metadata.create_all(engine)
    with Session(engine) as session:
        customer = Customer(id=7)
        session.add(customer)
        session.flush()
        session.add(Reminder(id=3, customer_id=7))
        session.commit()
        job = Reminder(customer=customer)
        [reason] = admin.explain_job(session, job).reasons
        assert reason.code == "twin"
        assert "Job 3 has customer_id=7, kind='invoice' as well" in reason.text
        assert "kind" not in job.__dict__
        assert list(session.new) == []
