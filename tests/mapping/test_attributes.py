"""Which attributes of a class are the queue's: those named like a role, adopted ones, and those of queue_column()."""

import enum
from collections.abc import Callable
from datetime import datetime
from typing import Any, Optional

import pytest
import sqlalchemy as sa
import sqlmodel
from sqlalchemy.ext.declarative import DeferredReflection
from sqlalchemy.orm import (
    DeclarativeBase,
    Mapped,
    MappedAsDataclass,
    Session,
    declared_attr,
    mapped_column,
    registry,
    relationship,
)

from sqlaqueue import InOrder, QueueConfig, QueueMixin, States, claim, complete, fail, queue_column
from sqlaqueue.exc import ConfigurationError
from sqlaqueue.mapping.mixin import spec_of
from tests.mapping.conftest import created
from tests.models import STRATEGIES, new_base

MakeModel = Callable[[QueueConfig], type[Any]]


def annotated(config: QueueConfig) -> type[Any]:
    class Order(QueueMixin, new_base()):
        __tablename__ = "orders"
        __queue__ = config
        id: Mapped[int] = mapped_column(primary_key=True)
        status: Mapped[str] = mapped_column(default="draft")

    return Order


def base_first(config: QueueConfig) -> type[Any]:
    class Order(new_base(), QueueMixin):
        __tablename__ = "orders"
        __queue__ = config
        id: Mapped[int] = mapped_column(primary_key=True)
        status: Mapped[str] = mapped_column("state_of_order", default="draft")

    return Order


def annotation_only(config: QueueConfig) -> type[Any]:
    class Order(QueueMixin, new_base()):
        __tablename__ = "orders"
        __queue__ = config
        id: Mapped[int] = mapped_column(primary_key=True)
        status: Mapped[str | None]

    return Order


def from_another_mixin(config: QueueConfig) -> type[Any]:
    class HasStatus:
        @declared_attr
        def status(cls) -> Mapped[str]:  # noqa: N805 - SQLAlchemy calls it with the class
            return mapped_column(default="draft")

    class Order(QueueMixin, HasStatus, new_base()):
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
    base = new_base()

    class Order(QueueMixin, base):
        __queue__ = config
        __table__ = sa.Table(
            "orders",
            base.metadata,
            sa.Column("id", sa.Integer, primary_key=True),
            sa.Column("status", sa.Text, default="draft"),
        )

    return Order


def imperative(config: QueueConfig, column: str = "status") -> type[Any]:
    class Order(QueueMixin):
        __queue__ = config

    mapper_registry = registry()
    table = sa.Table(
        "orders",
        mapper_registry.metadata,
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column(column, sa.Text, default="draft"),
    )
    mapper_registry.map_imperatively(Order, table, properties={} if column == "status" else {"status": table.c[column]})
    return Order


def imperative_property(config: QueueConfig) -> type[Any]:
    return imperative(config, "state_of_order")


WAYS = [annotated, base_first, annotation_only, from_another_mixin, dataclass, decorated, sql_model, given_table]
every_way = pytest.mark.parametrize("make", [*WAYS, imperative, imperative_property], ids=lambda make: make.__name__)
of_every_strategy = pytest.mark.parametrize("strategy", STRATEGIES)
once = pytest.mark.once


def order(config: QueueConfig | None = None, **attributes: Any) -> Any:
    """Map a class with a key and these attributes."""
    key = mapped_column(sa.Integer, primary_key=True)
    body = {"__tablename__": "orders", "__module__": __name__, "__queue__": config or QueueConfig(), "id": key}
    return type("Order", (QueueMixin, new_base()), body | attributes)


@every_way
def test_an_attribute_with_the_name_of_a_role_is_refused_with_both_fixes(make: MakeModel) -> None:
    with pytest.raises(ConfigurationError) as refused:
        make(QueueConfig())
    message = str(refused.value)
    assert "Order.status has the name of a queue attribute. To use it as the queue's status, set " in message
    assert "QueueConfig(columns={'status': 'status'})" in message
    assert "QueueConfig(columns={'status': 'queue_status'})" in message


@pytest.mark.few(4)
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


@pytest.mark.few(4)
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
    with pytest.raises(ConfigurationError, match=rf"Order\.{role} has the name .* 'queue_{role}'"):
        order(**{role: mapped_column(sa.Text)})


def test_an_attribute_that_is_not_a_column_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"Order\.status has the name of a queue attribute"):
        order(status=property(lambda order: "draft"))
    with pytest.raises(ConfigurationError, match=r"not a column of the table orders; define Order\.status as a column"):
        order(QueueConfig(columns={"status": "status"}), status=property(lambda order: "draft"))


def test_lease_roles_are_free_under_strategies_that_hold_a_transaction() -> None:
    of_the_application = mapped_column(sa.Text, nullable=False)
    columns = order(QueueConfig(strategy="batch_select"), claimed_by=of_the_application).__table__.c
    assert "lease_token" not in columns
    assert not columns.claimed_by.nullable


@pytest.mark.parametrize("strategy", ["update_status", "batch_select"])
def test_leaving_out_a_required_role_is_refused(strategy: str) -> None:
    said = rf"Order: strategy \"{strategy}\" needs .*'status'; remove 'status': None"
    with pytest.raises(ConfigurationError, match=said):
        order(QueueConfig(strategy=strategy, columns={"status": None}))


def test_a_domain_status_and_created_at_of_other_types(engine: sa.Engine) -> None:
    config = QueueConfig(columns={"status": "queue_status", "created_at": "enqueued_at"})
    model = order(config, status=mapped_column(sa.Integer, default=7), created_at=mapped_column(sa.DateTime))
    with created(engine, model.metadata), Session(engine) as session:
        session.add(model())
        session.commit()
        (job,) = session.execute(claim(model, 5)).scalars().all()
        session.execute(fail(job))
        session.commit()
        assert (job.status, job.created_at, job.queue_status) == (7, None, "failed")
        assert job.enqueued_at is not None


# -- QueueConfig(adopt=...) adds nothing to an existing table ----------------------------------------------------------


def existing() -> dict[str, Any]:
    """Return attributes of a table that was there before the queue."""
    return {
        "state": mapped_column(sa.Text, default="pending"),
        "due": mapped_column("send_after", sa.DateTime(timezone=True)),
        "priority": mapped_column(sa.Text),
    }


@once
@every_way
@of_every_strategy
def test_adopt_adds_no_columns(make: MakeModel, strategy: str) -> None:
    model = make(QueueConfig(strategy=strategy, adopt={"status": "status"}))
    table = sa.inspect(model).local_table
    assert table.c.keys() in (["id", "status"], ["id", "state_of_order"])
    assert spec_of(model).attributes == {"status": "status"}
    assert {column.info.get("sqlaqueue") for column in table.c} == {None}


@once
def test_adopt_ignores_attributes_that_are_not_named() -> None:
    model = order(QueueConfig(adopt={"status": "state", "run_at": "due"}), **existing())
    assert dict(spec_of(model).attributes) == {"status": "state", "run_at": "due"}
    assert model.__table__.c.keys() == ["id", "state", "send_after", "priority"]


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
    parent = {
        "parent_id": mapped_column(sa.ForeignKey("orders.id")),
        "parent": relationship("Order", remote_side="Order.id"),
    }
    with pytest.raises(ConfigurationError, match=said):
        order(QueueConfig(adopt=adopt), **existing(), **parent, name=property(lambda order: "x"))


@once
def test_the_primary_key_may_be_named_by_the_mapping() -> None:
    base = new_base()

    class Order(QueueMixin, base):
        __table__ = sa.Table(
            "orders",
            base.metadata,
            sa.Column("id", sa.Integer, primary_key=True),
            sa.Column("status", sa.Text, primary_key=True),
        )
        __queue__ = QueueConfig(adopt={"status": "status"})
        __mapper_args__: Any = {"primary_key": [__table__.c.id]}  # noqa: RUF012 - as SQLAlchemy reads it

    assert [key.name for key in spec_of(Order).keys] == ["id"]
    with pytest.raises(ConfigurationError, match=r"Order\.status is part of the primary key \(id, status\)"):
        order(QueueConfig(adopt={"status": "status"}), status=mapped_column(sa.Text, primary_key=True))


@once
def test_a_config_is_inherited() -> None:
    class Stated:
        state: Mapped[str]

    class Task(QueueMixin, Stated, new_base()):
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


# -- queue_column() declares an attribute ------------------------------------------------------------------------------

CONFIG = QueueConfig(columns={"status": "queue_status"}, states=States(pending="ready"))


class Life(enum.Enum):
    DRAFT = "d"
    PENDING = "p"
    PROCESSING = "r"
    COMPLETED = "c"


def plain() -> type[Any]:
    class Order(QueueMixin, new_base()):
        __tablename__ = "orders"
        __queue__ = CONFIG
        id: Mapped[int] = mapped_column(primary_key=True)
        status: Mapped[int | None]
        queue_status: Mapped[str] = queue_column("status")
        importance: Mapped[int] = queue_column("priority")

    return Order


def from_an_abstract_base() -> type[Any]:
    class Prioritised:
        importance: Mapped[int] = queue_column("priority")

    class Job(QueueMixin, Prioritised, new_base()):
        __abstract__ = True
        __queue__ = CONFIG
        queue_status: Mapped[str] = queue_column("status")
        status: Mapped[int | None]

    class Order(Job):
        __tablename__ = "orders"
        id: Mapped[int] = mapped_column(primary_key=True)

    return Order


def declared_dataclass() -> type[Any]:
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


def declared_decorated() -> type[Any]:
    @registry().mapped_as_dataclass
    class Order(QueueMixin):
        __tablename__ = "orders"
        __queue__ = CONFIG
        id: Mapped[int] = mapped_column(primary_key=True, init=False)
        queue_status: Mapped[str] = queue_column("status")
        importance: Mapped[int] = queue_column("priority")
        status: Mapped[int | None] = mapped_column(default=None)

    return Order


def declared_sql_model() -> type[Any]:
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


def declared_given_table() -> type[Any]:
    base = new_base()

    class Order(QueueMixin, base):
        __queue__ = CONFIG
        __table__ = sa.Table("orders", base.metadata, *table())
        queue_status: Mapped[str] = queue_column("status")
        importance: Mapped[int] = queue_column("priority")

    return Order


def declared_imperative() -> type[Any]:
    class Order(QueueMixin):
        __queue__ = CONFIG
        queue_status: Mapped[str] = queue_column("status")
        importance: Mapped[int] = queue_column("priority")

    mapper_registry = registry()
    mapper_registry.map_imperatively(Order, sa.Table("orders", mapper_registry.metadata, *table()))
    return Order


@pytest.mark.once
@pytest.mark.parametrize(
    "make",
    [
        plain,
        from_an_abstract_base,
        declared_dataclass,
        declared_decorated,
        declared_sql_model,
        declared_given_table,
        declared_imperative,
    ],
)
def test_queue_column_adds_the_column(make: Any, engine: sa.Engine) -> None:
    model = make()
    columns = spec_of(model).table.c
    assert (columns.queue_status.info["sqlaqueue"], columns.importance.info["sqlaqueue"]) == ("status", "priority")
    assert "priority" not in columns
    assert not columns.queue_status.nullable
    with created(engine, spec_of(model).table.metadata), Session(engine) as session:
        session.add_all([model(), model(importance=-1, status=7)])
        session.commit()
        (first,) = session.scalars(claim(model, 1))
        session.execute(complete(first))
        session.commit()
        assert (first.importance, first.status, first.queue_status) == (-1, 7, "completed")
        assert session.scalars(sa.text("SELECT queue_status FROM orders WHERE importance = 0")).all() == ["ready"]


@once
@pytest.mark.parametrize("declared", [queue_column("status"), queue_column("status", sa.Enum(Life))])
def test_a_declared_status_may_be_an_enum(declared: Any) -> None:
    model = order(status=declared, __annotations__={"status": "Mapped[Life]"})
    status = model.__table__.c.status
    assert (status.type.enum_class, status.default.arg) == (Life, Life.PENDING)
    states = spec_of(model).config.states
    assert (states.completed, states.failed) == (Life.COMPLETED, None)


@once
@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"columns": {"status": "state"}}, r"Order\.one = queue_column\('status'\): .* contradicts .*'state'\}\)"),
        ({"columns": {"status": None}}, r"contradicts QueueConfig\(columns=\{'status': None\}\)"),
        ({"strategy": "delete_returning", "rows_are_messages": True}, r"contradicts QueueConfig\(rows_are_messages\)"),
        ({"adopt": {"status": "one"}}, r"Order\.one = .*adopt=.* adds no columns.*adopt=\{'status': 'one'"),
        ({"columns": {"priority": "one"}}, "the attribute 'one' has two roles"),
    ],
)
def test_a_declaration_that_contradicts_the_config_is_refused(config: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        order(QueueConfig(**config), one=queue_column("status"))


@once
def test_declaring_a_role_twice_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"Order: queue_column\('status'\) declares 'one' and 'two'"):
        order(one=queue_column("status"), two=queue_column("status"))
    with pytest.raises(ConfigurationError, match=r"queue_column\('prority'\): .*; did you mean 'priority'\?"):
        queue_column("prority")


@once
def test_queue_column_needs_the_mixin_as_first_base() -> None:
    class Fresh(DeclarativeBase):
        pass

    body = {"__tablename__": "orders", "id": mapped_column(sa.Integer, primary_key=True), "one": queue_column("status")}
    said = r"QueueMixin must be the first base, class Order\(QueueMixin, Fresh\)"
    with pytest.raises(ConfigurationError, match=said):
        type("Order", (Fresh, QueueMixin), body)


@once
def test_queue_column_in_a_subclass_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"Letter\.one = queue_column\(\.\.\.\): declare it in .*, Order"):
        type("Letter", (order(),), {"one": queue_column("status")})


# -- extra columns, and annotations that show them to type checkers ----------------------------------------------------

EXTRA = QueueConfig(extra_columns=("started_at", "traceparent"), columns={"started_at": "begun_at"})


def annotated_plain() -> type[Any]:
    class Order(QueueMixin, new_base()):
        __tablename__ = "orders"
        __queue__ = EXTRA
        id: Mapped[int] = mapped_column(primary_key=True)
        begun_at: Mapped[datetime | None]
        traceparent: Mapped[Optional[str]]  # noqa: UP045 - the older spelling is the same
        started_at: Mapped[int | None]

    return Order


def annotated_in_text() -> type[Any]:
    class Order(QueueMixin, new_base()):
        __tablename__ = "orders"
        __queue__ = EXTRA
        id: Mapped[int] = mapped_column(primary_key=True)
        begun_at: "Mapped[datetime | None]"
        traceparent: "Mapped[SomethingForTypeCheckers]"  # noqa: F821 - what is tested
        started_at: "Mapped[int | None]"

    return Order


def annotated_in_an_abstract_base() -> type[Any]:
    class Traced:
        traceparent: Mapped[str | None]

    class Job(QueueMixin, Traced, new_base()):
        __abstract__ = True
        __queue__ = EXTRA
        begun_at: Mapped[datetime | None]
        started_at: Mapped[int | None]

    class Order(Job):
        __tablename__ = "orders"
        id: Mapped[int] = mapped_column(primary_key=True)

    return Order


def annotated_dataclass() -> type[Any]:
    class Base(MappedAsDataclass, DeclarativeBase):
        pass

    class Order(QueueMixin, Base):
        __tablename__ = "orders"
        __queue__ = EXTRA
        id: Mapped[int] = mapped_column(primary_key=True, init=False)
        begun_at: Mapped[datetime | None]
        traceparent: Mapped[str | None]
        started_at: Mapped[int | None] = mapped_column(default=None)

    return Order


def annotated_decorated() -> type[Any]:
    @registry().mapped_as_dataclass
    class Order(QueueMixin):
        __tablename__ = "orders"
        __queue__ = EXTRA
        id: Mapped[int] = mapped_column(primary_key=True, init=False)
        begun_at: Mapped[datetime | None]
        traceparent: Mapped[str | None]
        started_at: Mapped[int | None] = mapped_column(default=None)

    return Order


def annotated_sql_model() -> type[Any]:
    class Base(sqlmodel.SQLModel, registry=registry()):
        traceparent: str | None

    class Order(QueueMixin, Base, table=True):
        __tablename__ = "orders"
        __queue__ = EXTRA
        id: int | None = sqlmodel.Field(default=None, primary_key=True)
        begun_at: datetime | None
        started_at: int | None = None

    return Order


def annotated_given_table() -> type[Any]:
    base = new_base()

    class Order(QueueMixin, base):
        __queue__ = EXTRA
        __table__ = sa.Table(
            "orders",
            base.metadata,
            sa.Column("id", sa.Integer, primary_key=True),
            sa.Column("started_at", sa.Integer),
        )
        begun_at: Mapped[datetime | None]
        traceparent: Mapped[str | None]

    return Order


def annotated_imperative() -> type[Any]:
    class Order(QueueMixin):
        __queue__ = EXTRA
        begun_at: datetime | None
        traceparent: str | None

    mapper_registry = registry()
    key, own = sa.Column("id", sa.Integer, primary_key=True), sa.Column("started_at", sa.Integer)
    mapper_registry.map_imperatively(Order, sa.Table("orders", mapper_registry.metadata, key, own))
    return Order


ANNOTATED = [
    annotated_plain,
    annotated_in_text,
    annotated_in_an_abstract_base,
    annotated_dataclass,
    annotated_decorated,
    annotated_sql_model,
    annotated_given_table,
    annotated_imperative,
]


@once
@pytest.mark.parametrize("make", ANNOTATED)
def test_an_annotation_without_a_value_stands_for_the_column_of_the_queue(make: Any, engine: sa.Engine) -> None:
    model = make()
    columns = spec_of(model).table.c
    assert (columns.begun_at.info["sqlaqueue"], columns.traceparent.info["sqlaqueue"]) == ("started_at", "traceparent")
    assert columns.begun_at.type.timezone
    assert columns.traceparent.server_default is not None
    with created(engine, spec_of(model).table.metadata), Session(engine) as session:
        session.add_all([model(), model(priority=1, started_at=7)])
        session.commit()
        (first,) = session.scalars(claim(model, 1))
        session.commit()
        assert (first.status, first.started_at, first.begun_at.tzinfo is None) == ("processing", None, False)


@once
def test_columns_are_the_same_with_and_without_annotations() -> None:
    def ddl(**attributes: Any) -> str:
        config = QueueConfig(extra_columns=["started_at", "traceparent"])
        return str(sa.schema.CreateTable(order(config, **attributes).__table__))

    annotations = {"started_at": Mapped[datetime | None], "traceparent": "Mapped[str | None]"}
    of_any_type = {"started_at": Mapped[Any], "traceparent": Any}
    declared = {"started_at": queue_column("started_at"), "traceparent": queue_column("traceparent")}
    assert sorted(ddl(__annotations__=annotations).splitlines()) == sorted(ddl().splitlines())
    assert sorted(ddl(__annotations__=of_any_type).splitlines()) == sorted(ddl().splitlines())
    assert sorted(ddl(**declared).splitlines()) == sorted(ddl().splitlines())


@once
def test_an_order_of_jobs_lets_the_class_annotate_its_column() -> None:
    config = QueueConfig(flow_control=[InOrder("customer")])
    model = order(config, customer=mapped_column(sa.Integer), __annotations__={"started_at": Mapped[datetime | None]})
    assert model.__table__.c.started_at.info["sqlaqueue"] == "started_at"


@once
def test_an_order_of_jobs_in_an_adopted_table_uses_the_annotated_column_of_the_class() -> None:
    """Nothing is added there, so an annotation without a value makes a column of the class."""
    roles = ("status", "priority", "run_at", "attempts", "lease_token", "lease_expires_at", "started_at")
    annotations = {
        **dict.fromkeys(("status", "lease_token"), Mapped[str]),
        **dict.fromkeys(("priority", "attempts", "customer"), Mapped[int]),
        **dict.fromkeys(("run_at", "lease_expires_at", "started_at"), Mapped[datetime | None]),
    }
    config = QueueConfig(adopt={role: role for role in roles}, flow_control=[InOrder("customer")])
    model = order(config, __annotations__=annotations)
    assert spec_of(model).columns["started_at"] is model.__table__.c.started_at
    assert "sqlaqueue" not in model.__table__.c.started_at.info


@once
def test_a_class_may_use_the_name_of_a_column_that_its_base_declares() -> None:
    class Shared(QueueMixin, new_base()):
        __abstract__ = True
        importance: Mapped[int] = queue_column("priority")

    class Order(Shared):
        __tablename__ = "orders"
        id: Mapped[int] = mapped_column(primary_key=True)
        importance: Mapped[str] = mapped_column(sa.Text)

    class Plain(Shared):
        __tablename__ = "plain"
        id: Mapped[int] = mapped_column(primary_key=True)

    assert [spec_of(model).attributes["priority"] for model in (Order, Plain)] == ["priority", "importance"]


@once
def test_an_attribute_that_is_no_extra_column_belongs_to_the_class() -> None:
    model = order(__annotations__={"started_at": Mapped[int], "traceparent": Mapped[bytes]})
    assert isinstance(model.__table__.c.started_at.type, sa.Integer)
    assert not spec_of(model).has("started_at")


@once
def test_a_column_of_the_class_can_be_the_extra_one() -> None:
    own = mapped_column("the_start", sa.DateTime(timezone=True))
    config = QueueConfig(extra_columns=("started_at",), columns={"started_at": "started_at"})
    model = order(config, started_at=own)
    assert spec_of(model).columns["started_at"] is model.__table__.c.the_start
    said = r"Order\.started_at has the name .* annotate it without a value.*columns=\{'started_at': 'started_at'\}"
    with pytest.raises(ConfigurationError, match=said):
        order(QueueConfig(extra_columns=("started_at",)), started_at=mapped_column(sa.DateTime(timezone=True)))


@once
@pytest.mark.parametrize("annotation", [Mapped[int], Mapped[datetime], "Mapped[str | None]", datetime | int, int])
def test_an_annotation_of_another_type_is_refused(annotation: Any) -> None:
    said = (
        r"Order\.started_at is annotated with .*, but the started_at of the queue is datetime \| None; annotate it "
        r"Mapped\[datetime \| None\], or .*QueueConfig\(columns=\{'started_at': 'queue_started_at'\}\)"
    )
    with pytest.raises(ConfigurationError, match=said):
        order(QueueConfig(extra_columns=("started_at",)), __annotations__={"started_at": annotation})


@once
def test_an_annotation_needs_the_mixin_as_first_base() -> None:
    body = {
        "__tablename__": "orders",
        "__queue__": QueueConfig(extra_columns=("started_at",)),
        "__annotations__": {"started_at": Mapped[datetime | None]},
        "id": mapped_column(sa.Integer, primary_key=True),
    }
    with pytest.raises(ConfigurationError, match=r"must be the first base.*cannot be declared in the class"):
        type("Order", (new_base(), QueueMixin), body)


@once
def test_an_extra_column_that_a_strategy_with_leases_has_anyway_can_be_named_and_declared() -> None:
    for model in (
        order(QueueConfig(columns={"claimed_by": "worker"})),
        order(worker=queue_column("claimed_by")),
    ):
        assert spec_of(model).columns["claimed_by"] is model.__table__.c.worker


@once
@pytest.mark.parametrize("strategy", ["batch_select", "delete_returning"])
def test_a_strategy_without_leases_stores_the_worker_if_it_is_asked_for(strategy: Any) -> None:
    model = order(QueueConfig(strategy=strategy, extra_columns=("claimed_by",), columns={"claimed_by": "worker"}))
    assert spec_of(model).columns["claimed_by"] is model.__table__.c.worker
    assert not spec_of(order(QueueConfig(strategy=strategy))).has("claimed_by")


@once
@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            {"extra_columns": "started_at"},
            r"extra_columns='started_at'\): use a tuple of names, as in \('started_at',\)",
        ),
        ({"extra_columns": None}, r"extra_columns=None\): use a tuple of names, as in \('started_at',\)"),
        ({"extra_columns": ("startd_at",)}, r"'startd_at' is not a queue attribute; .*; did you mean 'started_at'\?"),
        ({"extra_columns": (3,)}, r"3 is not a queue attribute; use some of started_at, traceparent, claimed_by"),
        ({"extra_columns": ("status",)}, r"'status' is not optional; use some of started_at, traceparent, claimed_by"),
        ({"extra_columns": ("lease_token",)}, "'lease_token' is not optional"),
        ({"extra_columns": ("started_at", "started_at")}, "'started_at' is named twice; leave one of them out"),
        (
            {"extra_columns": ("started_at",), "adopt": {"status": "state"}},
            r"adopt= adds no columns; name the column of the table there, adopt=\{'started_at': \.\.\.\}",
        ),
        (
            {"extra_columns": ("started_at",), "columns": {"started_at": None}},
            r"contradicts columns=\{'started_at': None\}; leave out one of the two",
        ),
        (
            {"extra_columns": ("claimed_by",)},
            r"Order: .*\('claimed_by',\)\): with strategy='update_status' a queue has 'claimed_by' anyway; leave",
        ),
        (
            {"extra_columns": ("traceparent",), "columns": {"started_at": "begun_at"}},
            r"Order: .*'begun_at'\}\) names .* optional; add .*extra_columns=\('traceparent', 'started_at'\)\)",
        ),
        (
            {"strategy": "batch_select", "columns": {"claimed_by": "claimed_by"}},
            r"Order: .* add it with QueueConfig\(extra_columns=\('claimed_by',\)\)",
        ),
    ],
)
def test_wrong_extra_columns_are_refused_with_the_fix(config: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        order(QueueConfig(**config))


@once
def test_a_list_of_extra_columns_that_is_changed_later_changes_nothing() -> None:
    names: list[Any] = ["started_at"]
    config = QueueConfig(extra_columns=names)
    names.append("traceparent")
    assert config.extra_columns == ("started_at",)
