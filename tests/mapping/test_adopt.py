"""Existing tables as queues: QueueConfig(adopt=...) adds nothing, and rows_are_messages=True allows deleting rows."""

from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.declarative import DeferredReflection
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, relationship

from sqlaqueue import QueueConfig, QueueMixin, claim, complete
from sqlaqueue.exc import ConfigurationError
from sqlaqueue.mapping.mixin import spec_of
from sqlaqueue.queue.config import ROLES
from sqlaqueue.strategies.delete_row import DeleteRow
from sqlaqueue.strategies.existing_messages import ExistingMessages
from tests.mapping.test_attribute_names import MakeModel, every_way
from tests.mapping.tidy import created

once = pytest.mark.once


def model(config: QueueConfig, **attributes: Any) -> type[Any]:
    class Base(DeclarativeBase):
        pass

    body = {
        "__tablename__": "orders",
        "__queue__": config,
        "id": mapped_column(sa.Integer, primary_key=True),
        "state": mapped_column(sa.Text, default="pending"),
        "due": mapped_column("send_after", sa.DateTime(timezone=True)),
        "priority": mapped_column(sa.Text),
    }
    body = {name: value for name, value in {**body, **attributes}.items() if value is not None}
    return type("Order", (QueueMixin, Base), body)


@once
@every_way
@pytest.mark.parametrize("strategy", ["update_status", "delete_returning", "batch_select"])
def test_adopt_adds_no_columns(make: MakeModel, strategy: str) -> None:
    order = make(QueueConfig(strategy=strategy, adopt={"status": "status"}))
    table = sa.inspect(order).local_table
    assert table.c.keys() in (["id", "status"], ["id", "state_of_order"])
    assert spec_of(order).attributes == {"status": "status"}
    assert {column.info.get("sqlaqueue") for column in table.c} == {None}


@once
def test_adopt_ignores_attributes_that_are_not_named() -> None:
    order = model(QueueConfig(adopt={"status": "state", "run_at": "due"}))
    assert dict(spec_of(order).attributes) == {"status": "state", "run_at": "due"}
    assert order.__table__.c.keys() == ["id", "state", "send_after", "priority"]


def test_adopting_a_table_with_deferred_reflection(engine: sa.Engine) -> None:
    class Base(DeferredReflection, DeclarativeBase):
        __abstract__ = True

    class Order(QueueMixin, Base):
        __tablename__ = "orders"
        __queue__ = QueueConfig(strategy="delete_returning", adopt={"status": "status", "attempts": "tries"})

    there = sa.MetaData()
    columns = [sa.Column("id", sa.Integer, primary_key=True), sa.Column("tries", sa.Integer)]
    sa.Table("orders", there, *columns, sa.Column("status", sa.Text, server_default="pending"))
    there.create_all(engine)
    Base.prepare(engine)
    assert Order.__table__.c.keys() == ["id", "tries", "status"]
    there.drop_all(engine)
    with created(engine, Base.metadata), Session(engine) as session:
        session.execute(sa.insert(Order).values(status="pending"))
        session.execute(complete(session.scalars(claim(Order, 1)).one()))
        session.commit()
        assert session.execute(sa.select(Order.status, Order.tries)).all() == [("completed", 1)]


@once
@pytest.mark.parametrize(
    ("adopt", "said"),
    [
        (
            {"status": "stat"},
            r"Order: QueueConfig\(adopt=\{'status': 'stat'\}\) names .* does not exist; .*mean 'state'\?",
        ),
        ({"status": "state", "run_at": "send_after"}, "the column send_after is the attribute 'due'"),
        ({"status": "parent"}, "not a column of the table orders; the columns of orders are id, state, due, priority"),
        ({"status": "name"}, "not a column of the table orders"),
        ({"run_at": "due"}, r"\"update_status\" needs .*'status'; name its column .*\(adopt=\{'status': ...\}\)"),
        ({"status": "id"}, r"Order\.id is part of the primary key \(id\), .* as 'status' it changes"),
        ({"status": "state", "run_at": "id"}, r"Order\.id is part of the primary key \(id\), .* as 'run_at'"),
    ],
)
def test_adopting_an_invalid_attribute_is_refused(adopt: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        model(
            QueueConfig(adopt=adopt),
            parent_id=mapped_column("parent_id", sa.ForeignKey("orders.id")),
            parent=relationship("Order", remote_side="Order.id"),
            name=property(lambda order: "x"),
        )


@once
def test_the_primary_key_may_be_named_by_the_mapping() -> None:
    class Base(DeclarativeBase):
        pass

    class Order(QueueMixin, Base):
        __table__ = sa.Table(
            "orders",
            Base.metadata,
            sa.Column("id", sa.Integer, primary_key=True),
            sa.Column("status", sa.Text, primary_key=True),
        )
        __queue__ = QueueConfig(adopt={"status": "status"})
        __mapper_args__: Any = {"primary_key": [__table__.c.id]}  # noqa: RUF012 - as SQLAlchemy reads it

    assert [key.name for key in spec_of(Order).keys] == ["id"]
    with pytest.raises(ConfigurationError, match=r"Order\.status is part of the primary key \(id, status\)"):
        model(QueueConfig(adopt={"status": "status"}), status=mapped_column(sa.Text, primary_key=True))


@once
def test_a_config_is_inherited() -> None:
    class Base(DeclarativeBase):
        pass

    class Stated:
        state: Mapped[str]

    class Task(QueueMixin, Stated, Base):
        __abstract__ = True
        __queue__ = QueueConfig(adopt={"status": "state"})
        id: Mapped[int] = mapped_column(primary_key=True)

    class Call(Task):
        __tablename__ = "call"

    class Letter(Task):
        __tablename__ = "letter"
        __queue__ = QueueConfig(adopt={"status": "state", "attempts": "tries"})
        tries: Mapped[int]

    assert dict(spec_of(Call).attributes) == {"status": "state"}
    assert dict(spec_of(Letter).attributes) == {"status": "state", "attempts": "tries"}
    assert Call.__table__.c.keys() == ["id", "state"]


# -- rows that a claim deletes -----------------------------------------------------------------------------------------

OTHERS = {role: None for role in ROLES if role != "status"}
MISTAKES: dict[str, dict[str, Any]] = {
    "the wrong order": {"columns": {"status": "state", **dict.fromkeys(ROLES)}},
    "left out": {"columns": {"status": None}},
    "nothing named": {"adopt": {}},
    "something else named": {"adopt": {"run_at": "due"}},
}


@once
@pytest.mark.parametrize("mistake", MISTAKES)
def test_deleting_rows_needs_rows_are_messages(mistake: str) -> None:
    columns = MISTAKES[mistake]
    fix = "adopt={'status': ...}" if "adopt" in columns else "remove 'status': None from QueueConfig(columns=...)"
    with pytest.raises(ConfigurationError) as refused:
        model(QueueConfig(strategy="delete_returning", **columns), priority=None)
    assert str(refused.value).startswith("Order: without the queue attribute 'status' a claim")
    assert fix in str(refused.value)
    assert "QueueConfig(rows_are_messages=True)" in str(refused.value)


@once
@pytest.mark.parametrize("columns", [{}, {"columns": OTHERS}, {"columns": {"status": None, **OTHERS}}, {"adopt": {}}])
def test_rows_are_messages_has_no_status(columns: dict[str, Any]) -> None:
    order = model(QueueConfig(strategy="delete_returning", rows_are_messages=True, **columns), priority=None)
    spec = spec_of(order)
    assert isinstance(spec.strategy, DeleteRow)
    assert bool(spec.attributes) is (columns == {})
    assert not spec.has("status")


@once
@pytest.mark.parametrize("strategy", ["update_status", "batch_select", ExistingMessages(sa.Table, job="id")], ids=str)
def test_rows_are_messages_is_refused_for_strategies_that_keep_rows(strategy: Any) -> None:
    said = r"Order: QueueConfig\(rows_are_messages=True\): the strategy .* does not delete the rows"
    with pytest.raises(ConfigurationError, match=said):
        model(QueueConfig(strategy=strategy, rows_are_messages=True), priority=None)


@once
def test_a_strategy_that_always_deletes_rows_needs_rows_are_messages() -> None:
    with pytest.raises(ConfigurationError, match=r"Order: .*rows_are_messages=True"):
        model(QueueConfig(strategy=DeleteRow(), columns={"status": None}), priority=None)
