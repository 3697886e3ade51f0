"""The configuration of flow control: what is refused, and how."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from sqlaqueue import Fair, Limit, Order, QueueConfig, QueueMixin, Rate, States
from sqlaqueue.exc import ConfigurationError
from tests.flow_control.models import make_job

REFUSED: list[tuple[Any, str]] = [
    (lambda: Limit(-1), r"Limit\(-1\): use an integer of 0 or more"),
    (lambda: Limit(most=True), r"Limit\(True\): use an integer"),
    (lambda: Limit(1.5), r"Limit\(1.5\): use an integer"),
    (lambda: Limit(None), r"Limit\(None\): use an integer"),
    (lambda: Limit(2**31), "use an integer"),
    (lambda: Limit("2"), r"Limit\('2'\): use an integer of 0 or more, the name of an attribute, or a scalar select"),
    (lambda: Limit(1, per=()), r"Limit\(per=\(\)\): name at least one attribute"),
    (lambda: Limit(1, per=("a", "a")), "the attribute 'a' is named twice"),
    (lambda: Limit(1, per=3), r"Limit\(per=3\): use the name of an attribute"),  # type: ignore[arg-type] # what is tested
    (lambda: Rate(0, every=1), r"Rate\(0\): use an integer of 1 or more"),
    (lambda: Rate(1, every=1, burst=0), r"Rate\(burst=0\): use an integer of 1 or more"),
    (lambda: Rate(1, every=0), r"Rate\(every=0\): use from one millisecond to one year"),
    (lambda: Rate(1, every=timedelta(days=400)), "use from one millisecond to one year"),
    (Order, r"Order\(\): give the name of an attribute"),
    (lambda: Order("a", by=""), r"Order\(by=''\): use the name of an attribute"),
    (lambda: Order("a", on_failure="stop"), r"Order\(on_failure='stop'\): use \"block\""),  # type: ignore[arg-type] # what is tested
    (Fair, r"Fair\(\): give the name of an attribute"),
    (lambda: Fair("a", weight=0), r"Fair\(weight=0\): use an integer of 1 or more"),
    (lambda: QueueConfig(limits=Limit(1)), r"QueueConfig\(limits=.*use a list"),  # type: ignore[arg-type] # what is tested
    (lambda: QueueConfig(rates=[Limit(1)]), r"QueueConfig\(rates=.*use a list"),  # type: ignore[list-item] # what is tested
    (lambda: QueueConfig(order="customer_id"), r"QueueConfig\(order='customer_id'\): use sqlaqueue.Order"),  # type: ignore[arg-type] # what is tested
    (lambda: QueueConfig(fair=Limit(1)), "use sqlaqueue.Fair"),  # type: ignore[arg-type] # what is tested
]


@pytest.mark.parametrize(("make", "message"), REFUSED)
def test_invalid_values_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make()


UNFIT: list[tuple[dict[str, Any], str]] = [
    (
        {"limits": [Limit(1, per="custmer_id")]},
        r"Job: Limit\(1, per='custmer_id'\): there is no such attribute.*customer_id",
    ),
    ({"limits": [Limit(1, per="status")]}, "Job.status is the status of the queue, which changes"),
    ({"limits": [Limit("mst", per="kind")]}, r"Job: Limit\('mst'\): there is no such attribute.*'most'"),
    ({"limits": [Limit("kind")]}, r"Job: Limit\('kind'\): Job.kind is no integer column"),
    ({"limits": [Limit(1, per="kind"), Limit(2, per="kind")]}, "two of them have the same key"),
    ({"rates": [Rate(1, every=1), Rate(2, every=1)]}, "two of them have the same key"),
    ({"order": Order("customer_id", by="most")}, "Job.most may be NULL, which has no place in an order"),
    ({"order": Order("customer_id", by="run_at")}, "Job.run_at is the run_at of the queue, which changes"),
    ({"order": Order("customer_id"), "columns": {"started_at": None}}, "needs the queue attribute 'started_at'"),
    (
        {"order": Order("customer_id", on_failure="cancel"), "states": States(cancelled=None)},
        "needs a status value for cancelled jobs",
    ),
    ({"fair": Fair("customer_id", weight="kind")}, r"Job: Fair\(weight='kind'\): Job.kind is no integer column"),
]


@pytest.mark.parametrize(("config", "message"), UNFIT)
def test_what_the_class_does_not_fit_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make_job(**config)


def test_a_priority_that_may_be_null_is_refused() -> None:
    class Base(DeclarativeBase):
        pass

    with pytest.raises(ConfigurationError, match="needs a priority that is never NULL"):

        class Job(QueueMixin, Base):
            __tablename__ = "job"
            __queue__ = QueueConfig(limits=[Limit(1)], columns={"priority": "urgency"})
            id: Mapped[int] = mapped_column(primary_key=True)
            urgency: Mapped[int | None]


def test_a_key_of_type_json_is_refused() -> None:
    class Base(DeclarativeBase):
        pass

    with pytest.raises(ConfigurationError, match="PostgreSQL compares no values of type JSON"):

        class Job(QueueMixin, Base):
            __tablename__ = "job"
            __queue__ = QueueConfig(limits=[Limit(1, per="payload")])
            id: Mapped[int] = mapped_column(primary_key=True)
            payload: Mapped[Any] = mapped_column(sa.JSON)
