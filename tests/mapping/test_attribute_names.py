"""A class with an attribute named like a role must say whether it is the queue's."""

from collections.abc import Callable
from datetime import datetime
from typing import Any

import pytest
import sqlalchemy as sa
import sqlmodel
from sqlalchemy.orm import (
    DeclarativeBase,
    Mapped,
    MappedAsDataclass,
    Session,
    declared_attr,
    mapped_column,
    registry,
)

from sqlaqueue import QueueConfig, QueueMixin, claim, complete, fail
from sqlaqueue.exc import ConfigurationError
from tests.mapping.tidy import created

MakeModel = Callable[[QueueConfig], type[Any]]


def annotated(config: QueueConfig) -> type[Any]:
    class Base(DeclarativeBase):
        pass

    class Order(QueueMixin, Base):
        __tablename__ = "orders"
        __queue__ = config

        id: Mapped[int] = mapped_column(primary_key=True)
        status: Mapped[str] = mapped_column(default="draft")

    return Order


def base_first(config: QueueConfig) -> type[Any]:
    class Base(DeclarativeBase):
        pass

    class Order(Base, QueueMixin):
        __tablename__ = "orders"
        __queue__ = config

        id: Mapped[int] = mapped_column(primary_key=True)
        status: Mapped[str] = mapped_column("state_of_order", default="draft")

    return Order


def annotation_only(config: QueueConfig) -> type[Any]:
    class Base(DeclarativeBase):
        pass

    class Order(QueueMixin, Base):
        __tablename__ = "orders"
        __queue__ = config

        id: Mapped[int] = mapped_column(primary_key=True)
        status: Mapped[str | None]

    return Order


def from_another_mixin(config: QueueConfig) -> type[Any]:
    class Base(DeclarativeBase):
        pass

    class HasStatus:
        @declared_attr
        def status(cls) -> Mapped[str]:  # noqa: N805 - SQLAlchemy calls it with the class
            return mapped_column(default="draft")

    class Order(QueueMixin, HasStatus, Base):
        __tablename__ = "orders"
        __queue__ = config

        id: Mapped[int] = mapped_column(primary_key=True)

    return Order


def dataclass(config: QueueConfig) -> type[Any]:
    class Base(MappedAsDataclass, DeclarativeBase):
        pass

    class Order(QueueMixin, Base):
        __tablename__ = "orders"
        __queue__ = config

        id: Mapped[int] = mapped_column(primary_key=True, init=False)
        status: Mapped[str] = mapped_column(default="draft")

    return Order


def decorated(config: QueueConfig) -> type[Any]:
    @registry().mapped
    class Order(QueueMixin):
        __tablename__ = "orders"
        __queue__ = config

        id: Mapped[int] = mapped_column(primary_key=True)
        status: Mapped[str] = mapped_column(default="draft")

    return Order


def sql_model(config: QueueConfig) -> type[Any]:
    class Base(sqlmodel.SQLModel, registry=registry()):
        pass

    class Order(QueueMixin, Base, table=True):
        __queue__ = config

        id: int | None = sqlmodel.Field(default=None, primary_key=True)
        status: str = "draft"

    return Order


def given_table(config: QueueConfig) -> type[Any]:
    class Base(DeclarativeBase):
        pass

    class Order(QueueMixin, Base):
        __queue__ = config
        __table__ = sa.Table(
            "orders",
            Base.metadata,
            sa.Column("id", sa.Integer, primary_key=True),
            sa.Column("status", sa.Text, default="draft"),
        )

    return Order


def imperative(config: QueueConfig) -> type[Any]:
    class Order(QueueMixin):
        __queue__ = config

    mapper_registry = registry()
    table = sa.Table(
        "orders",
        mapper_registry.metadata,
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("status", sa.Text, default="draft"),
    )
    mapper_registry.map_imperatively(Order, table)
    return Order


def imperative_property(config: QueueConfig) -> type[Any]:
    class Order(QueueMixin):
        __queue__ = config

    mapper_registry = registry()
    table = sa.Table(
        "orders",
        mapper_registry.metadata,
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("state_of_order", sa.Text, default="draft"),
    )
    mapper_registry.map_imperatively(Order, table, properties={"status": table.c.state_of_order})
    return Order


ALL = (
    annotated,
    base_first,
    annotation_only,
    from_another_mixin,
    dataclass,
    decorated,
    sql_model,
    given_table,
    imperative,
    imperative_property,
)
every_way = pytest.mark.parametrize("make", ALL, ids=lambda make: make.__name__)
of_every_strategy = pytest.mark.parametrize("strategy", ["update_status", "delete_returning", "batch_select"])


@every_way
def test_an_attribute_with_the_name_of_a_role_is_refused_with_both_fixes(make: MakeModel) -> None:
    with pytest.raises(ConfigurationError) as refused:
        make(QueueConfig())
    message = str(refused.value)
    assert "Order.status has the name of a queue attribute" in message
    assert "QueueConfig(columns={'status': 'status'})" in message
    assert "QueueConfig(columns={'status': 'queue_status'})" in message


@every_way
def test_a_role_can_be_placed_on_another_attribute(make: MakeModel, engine: sa.Engine) -> None:
    model = make(QueueConfig(columns={"status": "queue_status"}))
    with created(engine, sa.inspect(model).local_table.metadata), Session(engine) as session:
        order = model()
        order.status = "shipped"
        session.add(order)
        session.commit()
        (claimed,) = session.execute(claim(model, 5)).scalars().all()
        session.execute(complete(claimed))
        session.commit()
        assert (claimed.status, claimed.queue_status) == ("shipped", "completed")


@every_way
@of_every_strategy
def test_an_attribute_of_the_class_can_be_used(make: MakeModel, strategy: str, engine: sa.Engine) -> None:
    model = make(QueueConfig(columns={"status": "status"}, strategy=strategy))
    with created(engine, sa.inspect(model).local_table.metadata), Session(engine) as session:
        draft, order = model(), model()
        draft.status, order.status = "draft", "pending"
        session.add_all([draft, order])
        session.commit()
        (claimed,) = session.execute(claim(model, 5)).scalars().all()
        assert claimed is order
        session.execute(fail(claimed))
        session.commit()
        assert (draft.status, order.status) == ("draft", "failed")


@pytest.mark.parametrize("role", ["created_at", "run_at", "attempts", "lease_token"])
def test_other_roles_are_refused_like_status(role: str) -> None:
    class Base(DeclarativeBase):
        pass

    body = {
        "__tablename__": "orders",
        "id": mapped_column(sa.Integer, primary_key=True),
        role: mapped_column(sa.Text),
    }
    with pytest.raises(ConfigurationError, match=rf"Order\.{role} has the name .* 'queue_{role}'"):
        type("Order", (QueueMixin, Base), body)


def test_an_attribute_that_is_not_a_column_is_refused() -> None:
    class Base(DeclarativeBase):
        pass

    with pytest.raises(ConfigurationError, match=r"Order\.status has the name of a queue attribute"):

        class Order(QueueMixin, Base):
            __tablename__ = "orders"

            id: Mapped[int] = mapped_column(primary_key=True)

            @property
            def status(self) -> str:
                return "draft"


def test_placing_a_role_on_an_attribute_that_is_not_a_column_is_refused() -> None:
    class Base(DeclarativeBase):
        pass

    with pytest.raises(ConfigurationError, match=r"not a column of the table orders; define Order\.status as a column"):

        class Order(QueueMixin, Base):
            __tablename__ = "orders"
            __queue__ = QueueConfig(columns={"status": "status"})

            id: Mapped[int] = mapped_column(primary_key=True)

            @property
            def status(self) -> str:
                return "draft"


def test_lease_roles_are_free_under_strategies_that_hold_a_transaction() -> None:
    class Base(DeclarativeBase):
        pass

    class Order(QueueMixin, Base):
        __tablename__ = "orders"
        __queue__ = QueueConfig(strategy="batch_select")

        id: Mapped[int] = mapped_column(primary_key=True)
        claimed_by: Mapped[str]
        """An attribute of the application."""

    assert "lease_token" not in Order.__table__.c
    assert not Order.__table__.c.claimed_by.nullable


@pytest.mark.parametrize("strategy", ["update_status", "batch_select"])
def test_leaving_out_a_required_role_is_refused(strategy: str) -> None:
    class Base(DeclarativeBase):
        pass

    with pytest.raises(
        ConfigurationError, match=rf"Order: strategy \"{strategy}\" needs .*'status'; remove 'status': None"
    ):

        class Order(QueueMixin, Base):
            __tablename__ = "orders"
            __queue__ = QueueConfig(strategy=strategy, columns={"status": None})

            id: Mapped[int] = mapped_column(primary_key=True)


def test_a_domain_status_and_created_at_of_other_types(engine: sa.Engine) -> None:
    class Base(DeclarativeBase):
        pass

    class Order(QueueMixin, Base):
        __tablename__ = "orders"
        __queue__ = QueueConfig(columns={"status": "queue_status", "created_at": "enqueued_at"})

        id: Mapped[int] = mapped_column(primary_key=True)
        status: Mapped[int] = mapped_column(default=7)
        created_at: Mapped[datetime | None]

    with created(engine, Base.metadata), Session(engine) as session:
        session.add(Order())
        session.commit()
        (order,) = session.execute(claim(Order, 5)).scalars().all()
        session.execute(fail(order))
        session.commit()
        assert (order.status, order.created_at, order.queue_status) == (7, None, "failed")
        assert order.enqueued_at is not None
