"""Configurations of unique queues: what is refused, with which message, and which index the others get."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, relationship
from sqlalchemy.schema import CreateIndex

from sqlaqueue import QueueConfig, QueueMixin, States, Unique
from sqlaqueue.exc import ConfigurationError
from sqlaqueue.strategies.unique_key import index_name
from tests.unique.models import make_job

DAY = timedelta(days=1)
ENDED = ("pending", "processing", "completed")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Unique, r"Unique\(\): give the names of attributes"),
        (lambda: Unique("a", 1), r"Unique\('a', 1\): give the names of attributes"),  # type: ignore[arg-type] # wrong on purpose
        (lambda: Unique("a", "a"), "the attribute 'a' is named twice"),
        (lambda: Unique("a", states="pending"), "use a tuple of states"),
        (lambda: Unique("a", states=("pending", "done")), "there is no state 'done'; use some of pending, processing"),
        (lambda: Unique("a", states=("processing",)), '"pending" must be among them'),
        (lambda: Unique("a", states=("pending", "failed")), 'add "processing"'),
        (lambda: Unique("a", within=0), r"Unique\(within=0\): use from one second to 100 years"),
        (lambda: Unique("a", within=timedelta(days=36601)), "use from one second to 100 years"),
        (lambda: Unique("a", within="1h"), r"Unique\(within='1h'\) must be seconds or a timedelta"),  # type: ignore[arg-type] # wrong on purpose
        (lambda: Unique("a", nulls_distinct=1), "use True or False"),  # type: ignore[arg-type] # wrong on purpose
        (lambda: Unique("a", on_return="fail"), 'use "cancel" or "wait"'),  # type: ignore[arg-type] # wrong on purpose
        (lambda: QueueConfig(unique="key"), r"QueueConfig\(unique='key'\): use sqlaqueue.Unique"),  # type: ignore[arg-type] # wrong on purpose
    ],
)
def test_wrong_arguments(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make()


@pytest.mark.parametrize(
    ("kind", "unique", "options", "message"),
    [
        ("update_status", Unique("kex"), {}, r"Job: Unique\('kex'\): there is no such attribute .* did you mean 'key'"),
        ("update_status", Unique("status"), {}, "Job.status is the status of the queue, which changes"),
        ("update_status", Unique("run_at"), {}, "Job.run_at is the run_at of the queue"),
        ("batch_select", Unique("key", states=("pending",)), {}, 'under the strategy "batch_select" a running job'),
        (
            "delete_returning",
            Unique("key", states=("pending",)),
            {},
            'still reads as pending.*use strategy="update_status"',
        ),
        ("rows_are_messages", Unique("key", states=("pending",)), {}, "the claim deletes the row"),
        ("rows_are_messages", Unique("key", on_return="wait"), {}, "has no row in which it could wait"),
        (
            "update_status",
            Unique("key", states=ENDED),
            {"on_complete": "delete"},
            'on_complete="delete" deletes the row',
        ),
        (
            "update_status",
            Unique("key", states=ENDED),
            {"retention": {"completed": DAY}},
            "jobs count indefinitely without within=",
        ),
        (
            "update_status",
            Unique("key", states=ENDED, within=2 * DAY),
            {"retention": {"completed": DAY}},
            "within= is 2 days",
        ),
        ("update_status", Unique("key", states=(*ENDED, "cancelled")), {}, "a cancelled job counts as well"),
        ("update_status", Unique("key"), {"states": States(cancelled=None)}, "there is no status value for that"),
        (
            "update_status",
            Unique("key", states=ENDED),
            {"states": States(completed=None)},
            "no status value for 'completed'",
        ),
        (
            "update_status",
            Unique("key", within=DAY),
            {"columns": {"created_at": None}},
            "needs the queue attribute 'created_at'",
        ),
        (
            "update_status",
            Unique("key", states=("pending",), on_return="wait"),
            {"columns": {"lease_expires_at": None}},
            "waits with an expired lease, and Job leaves out lease_expires_at",
        ),
    ],
)
def test_what_a_queue_cannot_keep(kind: str, unique: Unique, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make_job(kind, unique, **options)


class Wrapped(sa.types.TypeDecorator[Any]):
    impl = sa.JSON
    cache_ok = True


@pytest.mark.parametrize(
    ("type_", "message"),
    [(sa.JSON(), "use JSONB"), (Wrapped(), "use JSONB"), (sa.ARRAY(sa.Integer), "use a text or JSONB")],
)
def test_types_that_cannot_be_compared(type_: Any, message: str) -> None:
    class Base(DeclarativeBase):
        pass

    with pytest.raises(ConfigurationError, match=message):

        class Job(QueueMixin, Base):
            __tablename__ = "job"
            __queue__ = QueueConfig(unique=Unique("data"))
            id: Mapped[int] = mapped_column(primary_key=True)
            data: Mapped[Any] = mapped_column(type_)


def test_a_relationship() -> None:
    class Base(DeclarativeBase):
        pass

    class Customer(Base):
        __tablename__ = "customer"
        id: Mapped[int] = mapped_column(primary_key=True)

    with pytest.raises(ConfigurationError, match="of a relationship, name the attributes of its foreign key"):

        class Job(QueueMixin, Base):
            __tablename__ = "job"
            __queue__ = QueueConfig(unique=Unique("customer"))
            id: Mapped[int] = mapped_column(primary_key=True)
            customer_id: Mapped[int] = mapped_column(sa.ForeignKey("customer.id"))
            customer: Mapped[Any] = relationship(Customer)


@pytest.mark.parametrize(
    ("kind", "unique", "definition"),
    [
        ("update_status", Unique("key"), "(key) WHERE status = 'pending' OR status = 'processing'"),
        ("update_status", Unique("key", "note", states=("pending",)), "(key, note) WHERE status = 'pending'"),
        ("batch_select", Unique("key", nulls_distinct=False), "(key) NULLS NOT DISTINCT WHERE status"),
        ("rows_are_messages", Unique("key"), "(key)"),
        (
            "update_status",
            Unique("key", within=timedelta(days=1, seconds=0.5)),
            "(key, date_bin('24:00:00.5'::interval, created_at, to_timestamp(345600::double precision))) WHERE",
        ),
    ],
)
def test_the_index(kind: str, unique: Unique, definition: str) -> None:
    table = make_job(kind, unique).__table__
    (index,) = [each for each in table.indexes if each.name == index_name(table)]
    text = str(CreateIndex(index).compile(dialect=postgresql.dialect()))  # type: ignore[no-untyped-call] # of SQLAlchemy
    assert text.startswith(f"CREATE UNIQUE INDEX ix_job_queue_unique ON job {definition}")


def test_states_in_another_order_are_the_same_configuration() -> None:
    assert Unique("key", states=["processing", "pending"]) == Unique("key")


def test_jobs_are_kept_for_as_long_as_they_count() -> None:
    make_job("update_status", Unique("key", states=ENDED, within=DAY), retention={"completed": DAY})


def test_a_status_without_a_value_for_running_jobs() -> None:
    """Under a strategy that never writes it, it need not have one."""
    table = make_job("batch_select", states=States(processing=None)).__table__
    (index,) = [each for each in table.indexes if each.name == index_name(table)]
    assert str(index.dialect_options["postgresql"]["where"]) == "job.status = 'pending'"
