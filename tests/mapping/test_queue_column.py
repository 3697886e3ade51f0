"""Queue attributes declared by queue_column()."""

import enum
from typing import Any

import pytest
import sqlalchemy as sa
import sqlmodel
from sqlalchemy.orm import DeclarativeBase, Mapped, MappedAsDataclass, Session, mapped_column, registry

from sqlaqueue import QueueConfig, QueueMixin, States, claim, complete, queue_column
from sqlaqueue.exc import ConfigurationError
from sqlaqueue.mapping.mixin import spec_of
from tests.mapping.tidy import created

pytestmark = pytest.mark.once

CONFIG = QueueConfig(columns={"status": "queue_status"}, states=States(pending="ready"))


class Life(enum.Enum):
    DRAFT = "d"
    PENDING = "p"
    PROCESSING = "r"
    COMPLETED = "c"


def plain() -> type[Any]:
    class Base(DeclarativeBase):
        pass

    class Order(QueueMixin, Base):
        __tablename__ = "orders"
        __queue__ = CONFIG
        id: Mapped[int] = mapped_column(primary_key=True)
        status: Mapped[int | None]
        queue_status: Mapped[str] = queue_column("status")
        importance: Mapped[int] = queue_column("priority")

    return Order


def from_an_abstract_base() -> type[Any]:
    class Base(DeclarativeBase):
        pass

    class Prioritised:
        importance: Mapped[int] = queue_column("priority")

    class Job(QueueMixin, Prioritised, Base):
        __abstract__ = True
        __queue__ = CONFIG
        queue_status: Mapped[str] = queue_column("status")
        status: Mapped[int | None]

    class Order(Job):
        __tablename__ = "orders"
        id: Mapped[int] = mapped_column(primary_key=True)

    return Order


def dataclass() -> type[Any]:
    class Base(MappedAsDataclass, DeclarativeBase):
        pass

    class Order(QueueMixin, Base):
        __tablename__ = "orders"
        __queue__ = CONFIG
        id: Mapped[int] = mapped_column(primary_key=True, init=False)
        queue_status: Mapped[str] = queue_column("status")
        importance: Mapped[int] = queue_column("priority")
        status: Mapped[int | None] = mapped_column(default=None)

    return Order


def decorated() -> type[Any]:
    @registry().mapped_as_dataclass
    class Order(QueueMixin):
        __tablename__ = "orders"
        __queue__ = CONFIG
        id: Mapped[int] = mapped_column(primary_key=True, init=False)
        queue_status: Mapped[str] = queue_column("status")
        importance: Mapped[int] = queue_column("priority")
        status: Mapped[int | None] = mapped_column(default=None)

    return Order


def sql_model() -> type[Any]:
    class Base(sqlmodel.SQLModel, registry=registry()):
        importance: int = queue_column("priority")

    class Order(QueueMixin, Base, table=True):
        __tablename__ = "orders"
        __queue__ = CONFIG
        id: int | None = sqlmodel.Field(default=None, primary_key=True)
        status: int | None = None
        queue_status: str = queue_column("status")

    return Order


def table() -> list[Any]:
    return [sa.Column("id", sa.Integer, primary_key=True), sa.Column("status", sa.Integer)]


def given_table() -> type[Any]:
    class Base(DeclarativeBase):
        pass

    class Order(QueueMixin, Base):
        __queue__ = CONFIG
        __table__ = sa.Table("orders", Base.metadata, *table())
        queue_status: Mapped[str] = queue_column("status")
        importance: Mapped[int] = queue_column("priority")

    return Order


def imperative() -> type[Any]:
    class Order(QueueMixin):
        __queue__ = CONFIG
        queue_status: Mapped[str] = queue_column("status")
        importance: Mapped[int] = queue_column("priority")

    mapper_registry = registry()
    mapper_registry.map_imperatively(Order, sa.Table("orders", mapper_registry.metadata, *table()))
    return Order


@pytest.mark.parametrize(
    "make", [plain, from_an_abstract_base, dataclass, decorated, sql_model, given_table, imperative]
)
def test_queue_column_adds_the_column(make: Any, engine: sa.Engine) -> None:
    order = make()
    columns = spec_of(order).table.c
    assert (columns.queue_status.info["sqlaqueue"], columns.importance.info["sqlaqueue"]) == ("status", "priority")
    assert "priority" not in columns
    assert not columns.queue_status.nullable
    with created(engine, spec_of(order).table.metadata), Session(engine) as session:
        session.add_all([order(), order(importance=-1, status=7)])
        session.commit()
        (first,) = session.scalars(claim(order, 1))
        session.execute(complete(first))
        session.commit()
        assert (first.importance, first.status, first.queue_status) == (-1, 7, "completed")
        assert session.scalars(sa.text("SELECT queue_status FROM orders WHERE importance = 0")).all() == ["ready"]


@pytest.mark.parametrize("declared", [queue_column("status"), queue_column("status", sa.Enum(Life))])
def test_a_declared_status_may_be_an_enum(declared: Any) -> None:
    class Fresh(DeclarativeBase):
        pass

    body = {
        "__tablename__": "orders",
        "__annotations__": {"status": "Mapped[Life]"},
        "__module__": __name__,
        "id": mapped_column(sa.Integer, primary_key=True),
        "status": declared,
    }
    order: Any = type("Order", (QueueMixin, Fresh), body)
    status = order.__table__.c.status
    assert (status.type.enum_class, status.default.arg) == (Life, Life.PENDING)
    states = spec_of(order).config.states
    assert (states.completed, states.failed) == (Life.COMPLETED, None)


def model(config: QueueConfig, *bases: Any, **attributes: Any) -> Any:
    class Fresh(DeclarativeBase):
        pass

    body = {"__tablename__": "orders", "__queue__": config, "id": mapped_column(sa.Integer, primary_key=True)}
    return type("Order", (QueueMixin, *bases, Fresh), {**body, **attributes})


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            QueueConfig(columns={"status": "state"}),
            r"Order\.one = queue_column\('status'\): .* contradicts .*'state'\}\)",
        ),
        (QueueConfig(columns={"status": None}), r"contradicts QueueConfig\(columns=\{'status': None\}\)"),
        (
            QueueConfig(strategy="delete_returning", rows_are_messages=True),
            r"contradicts QueueConfig\(rows_are_messages\)",
        ),
        (QueueConfig(adopt={"status": "one"}), r"Order\.one = .*adopt=.* adds no columns.*adopt=\{'status': 'one'"),
        (QueueConfig(columns={"priority": "one"}), "the attribute 'one' has two roles"),
    ],
)
def test_a_declaration_that_contradicts_the_config_is_refused(config: QueueConfig, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        model(config, one=queue_column("status"))


def test_declaring_a_role_twice_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"Order: queue_column\('status'\) declares 'one' and 'two'"):
        model(QueueConfig(), one=queue_column("status"), two=queue_column("status"))
    with pytest.raises(ConfigurationError, match=r"queue_column\('prority'\): .*; did you mean 'priority'\?"):
        queue_column("prority")


def test_queue_column_needs_the_mixin_as_first_base() -> None:
    class Fresh(DeclarativeBase):
        pass

    body = {"__tablename__": "orders", "id": mapped_column(sa.Integer, primary_key=True), "one": queue_column("status")}
    with pytest.raises(
        ConfigurationError, match=r"QueueMixin must be the first base, class Order\(QueueMixin, Fresh\)"
    ):
        type("Order", (Fresh, QueueMixin), body)


def test_queue_column_in_a_subclass_is_refused() -> None:
    order = model(QueueConfig())
    with pytest.raises(ConfigurationError, match=r"Letter\.one = queue_column\(\.\.\.\): declare it in .*, Order"):
        type("Letter", (order,), {"one": queue_column("status")})
