"""``enqueue()`` of instances with relationships, inheritance, defaults, and composite keys."""

from __future__ import annotations

import enum
import uuid
import warnings
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql
from sqlalchemy.orm import DeclarativeBase, Mapped, MappedAsDataclass, Session, mapped_column, relationship, validates

from sqlaqueue import QueueConfig, QueueMixin, Unique, claim, enqueue
from sqlaqueue.exc import StatementError


@pytest.fixture(autouse=True)
def no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


class Base(DeclarativeBase):
    pass


class Customer(Base):
    __tablename__ = "customer"
    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str]
    jobs: Mapped[list[Job]] = relationship(back_populates="customer", cascade="all, delete-orphan")


class Job(QueueMixin, Base):
    __tablename__ = "job"
    __queue__ = QueueConfig(unique=Unique("customer_id", "kind"))
    id: Mapped[int] = mapped_column(primary_key=True)
    customer_id: Mapped[int] = mapped_column(sa.ForeignKey("customer.id"))
    kind: Mapped[str]
    customer: Mapped[Customer] = relationship(back_populates="jobs")
    files: Mapped[list[File]] = relationship(back_populates="job", cascade="all, delete-orphan")

    @validates("customer")
    def check_customer(self, _: str, value: Any) -> Any:
        assert value is not None
        return value


class File(Base):
    __tablename__ = "file"
    id: Mapped[int] = mapped_column(primary_key=True)
    job_id: Mapped[int] = mapped_column(sa.ForeignKey("job.id"))
    name: Mapped[str]
    job: Mapped[Job] = relationship(back_populates="files")


class Color(enum.Enum):
    RED = 1
    BLUE = 2


class Node(QueueMixin, Base):
    __tablename__ = "node"
    __queue__ = QueueConfig(unique=Unique("key", "color"))
    id: Mapped[int] = mapped_column(primary_key=True)
    type: Mapped[str]
    key: Mapped[uuid.UUID]
    color: Mapped[Color] = mapped_column(default=Color.RED)
    label: Mapped[str] = mapped_column(default=lambda context: f"{context.get_current_parameters()['color']}")
    __mapper_args__: ClassVar[dict[str, Any]] = {"polymorphic_on": "type", "polymorphic_identity": "node"}


class Leaf(Node):
    __tablename__ = "leaf"
    id: Mapped[int] = mapped_column(sa.ForeignKey("node.id"), primary_key=True)
    size: Mapped[int] = mapped_column(default=3)
    made_at: Mapped[Any] = mapped_column(sa.DateTime(timezone=True), server_default=sa.func.now())
    __mapper_args__: ClassVar[dict[str, Any]] = {"polymorphic_identity": "leaf"}


class Branch(Node):
    length: Mapped[int | None] = mapped_column(default=4)
    __mapper_args__: ClassVar[dict[str, Any]] = {"polymorphic_identity": "branch"}


class Pair(QueueMixin, Base):
    __tablename__ = "pair"
    __queue__ = QueueConfig(unique=Unique("data", "name"))
    left: Mapped[int] = mapped_column(primary_key=True)
    right: Mapped[uuid.UUID] = mapped_column(primary_key=True, server_default=sa.func.gen_random_uuid())
    name: Mapped[str] = mapped_column(sa.CHAR(5))
    data: Mapped[dict[str, Any]] = mapped_column(postgresql.JSONB)


class Optional(QueueMixin, Base):
    __tablename__ = "optional"
    __queue__ = QueueConfig(unique=Unique("number", "ident", nulls_distinct=False))
    id: Mapped[int] = mapped_column(primary_key=True)
    number: Mapped[int | None]
    ident: Mapped[uuid.UUID | None]


class DataBase(MappedAsDataclass, DeclarativeBase):
    pass


class Data(QueueMixin, DataBase):
    __tablename__ = "data"
    __queue__ = QueueConfig(unique=Unique("key"), strategy="delete_returning")
    id: Mapped[int] = mapped_column(primary_key=True, init=False)
    key: Mapped[str]


@pytest.fixture
def tables(engine: sa.Engine) -> None:
    Base.metadata.create_all(engine)
    DataBase.metadata.create_all(engine)


@pytest.mark.usefixtures("tables")
def test_a_new_parent_is_inserted_first(engine: sa.Engine) -> None:
    with Session(engine) as session:
        customer = Customer(name="new")
        first, second = Job(customer=customer, kind="a"), Job(customer=customer, kind="a")
        result = enqueue(session, [first, second])
        assert [(each.job, each.created) for each in result] == [(first, True), (first, False)]
        assert first.customer is customer
        assert customer.jobs == [first]
        assert second.customer is customer
        session.commit()
        assert first.customer_id == customer.id
        assert session.scalar(sa.select(sa.func.count()).select_from(Job)) == 1


@pytest.mark.usefixtures("tables")
def test_a_parent_whose_collection_is_loaded(engine: sa.Engine) -> None:
    with Session(engine) as session:
        customer = Customer(name="old")
        session.add(customer)
        session.commit()
        assert customer.jobs == []
        job = Job(kind="a")
        customer.jobs.append(job)
        assert enqueue(session, job) == [(job, True)]
        twin = Job(kind="a")
        customer.jobs.append(twin)
        assert enqueue(session, twin) == [(job, False)]
        session.commit()
        assert customer.jobs == [job]
        assert session.scalar(sa.select(sa.func.count()).select_from(Job)) == 1


@pytest.mark.usefixtures("tables")
def test_children_are_inserted_with_a_created_job_only(engine: sa.Engine) -> None:
    with Session(engine) as session:
        customer = Customer(name="new")
        first = Job(customer=customer, kind="a", files=[File(name="1"), File(name="2")])
        second = Job(customer=customer, kind="a", files=[File(name="3")])
        session.add(second)
        enqueue(session, [first, second])
        assert [each.name for each in second.files] == ["3"]
        session.commit()
        assert [each.name for each in first.files] == ["1", "2"]
        assert session.scalars(sa.select(File.name).order_by(File.name)).all() == ["1", "2"]


@pytest.mark.usefixtures("tables")
def test_replace_refuses_children(engine: sa.Engine) -> None:
    with Session(engine) as session:
        customer = Customer(name="new")
        enqueue(session, Job(customer=customer, kind="a"))
        session.commit()
        job = Job(customer=customer, kind="a", files=[File(name="1")])
        with pytest.raises(StatementError, match="only its columns move"):
            enqueue(session, [Job(customer=customer, kind="b"), job], on_twin="replace")
        session.commit()
        assert session.scalars(sa.select(Job.kind)).all() == ["a"]


@pytest.mark.usefixtures("tables")
def test_inheritance(engine: sa.Engine) -> None:
    key, other = uuid.uuid4(), uuid.uuid4()
    with Session(engine) as session:
        leaf, branch, node = Leaf(key=key, size=5), Branch(key=other), Node(key=key, color=Color.BLUE)
        more = [Leaf(key=uuid.uuid4()) for _ in range(3)]
        twin = Branch(key=key)
        result = enqueue(session, [leaf, branch, node, *more, twin])
        assert [each.created for each in result] == [True] * 6 + [False]
        assert result[-1].job is leaf
        assert (leaf.size, more[0].size, branch.length, node.label) == (5, 3, 4, "Color.BLUE")
        assert leaf.made_at is not None
        session.commit()
        assert {type(each).__name__ for each in session.scalars(claim(Node, 9))} == {"Leaf", "Branch", "Node"}
        session.commit()
        session.expunge_all()
        [(found, created)] = enqueue(session, Leaf(key=key))
        assert (type(found), found.size, created) == (Leaf, 5, False)
        assert session.scalar(sa.select(sa.func.count()).select_from(Leaf)) == 4


@pytest.mark.usefixtures("tables")
def test_replace_in_two_tables(engine: sa.Engine) -> None:
    key = uuid.uuid4()
    with Session(engine) as session:
        enqueue(session, Leaf(key=key, size=5, label="one"))
        session.commit()
        [(leaf, _)] = enqueue(session, Leaf(key=key, size=6, label="two"), on_twin="replace")
        assert (leaf.size, leaf.label) == (6, "two")
        enqueue(session, Leaf(key=key), on_twin="replace")
        assert (leaf.size, leaf.label) == (3, "Color.RED")
        with pytest.raises(StatementError, match="the twin of a Branch is a Leaf"):
            enqueue(session, Branch(key=key), on_twin="replace")
        second = uuid.uuid4()
        result = enqueue(session, [Leaf(key=second, size=1), Leaf(key=second, size=2)], on_twin="replace")
        assert result[0].job.size == 2
        session.commit()
        assert session.scalar(sa.select(Leaf.size).where(Leaf.key == second)) == 2


@pytest.mark.usefixtures("tables")
def test_composite_keys_and_values_that_the_server_compares(engine: sa.Engine) -> None:
    with Session(engine) as session:
        first = Pair(left=1, name="abc", data={"a": 1, "b": [2]})
        second = Pair(left=2, name="abc ", data={"b": [2], "a": 1})
        third = Pair(left=3, name="abc ", data={"b": 2})
        result = enqueue(session, [first, second, third])
        assert [(each.job.left, each.created) for each in result] == [(1, True), (1, False), (3, True)]
        assert isinstance(first.right, uuid.UUID)
        session.commit()
        [(again, created)] = enqueue(session, Pair(left=4, name="abc", data={"a": 1, "b": [2]}))
        assert (again, created) == (first, False)
        [(again, _)] = enqueue(session, Pair(left=4, name="abc  ", data={"b": 2}, priority=3), on_twin="replace")
        assert (again.left, again.priority) == (3, 3)


@pytest.mark.usefixtures("tables")
def test_dataclasses(engine: sa.Engine) -> None:
    with Session(engine) as session:
        first = Data(key="a")
        assert enqueue(session, [first, Data(key="a")]) == [(first, True), (first, False)]
        session.commit()
        assert session.scalars(claim(Data, 9)).all() == [first]


@pytest.mark.usefixtures("tables")
def test_events_of_the_mapper(engine: sa.Engine) -> None:
    seen: list[tuple[str, Any]] = []
    listeners: dict[str, Any] = {
        name: lambda _, connection, target, name=name: seen.append((name, target))
        for name in ("before_insert", "after_insert")
    }
    try:
        for name, listener in listeners.items():
            sa.event.listen(Node, name, listener, propagate=True)
        with Session(engine) as session:
            job = Leaf(key=uuid.uuid4())
            enqueue(session, job)
            enqueue(session, Leaf(key=job.key))
    finally:
        for name, listener in listeners.items():
            sa.event.remove(Node, name, listener)
    assert seen == [("before_insert", job), ("after_insert", job)]


@pytest.mark.usefixtures("tables")
def test_values_that_are_sql(engine: sa.Engine) -> None:
    with Session(engine) as session:
        jobs = [Leaf(key=uuid.uuid4(), priority=sa.select(sa.literal(number)).scalar_subquery()) for number in range(3)]
        assert all(each.created for each in enqueue(session, jobs))
        session.commit()
        assert [job.priority for job in jobs] == [0, 1, 2]


@pytest.mark.usefixtures("tables")
def test_nulls_of_numbers_and_uuids(engine: sa.Engine) -> None:
    ident = uuid.uuid4()
    values: list[dict[str, Any]] = [{}, {"number": 1}, {"ident": ident}, {"number": 1, "ident": ident}]
    with Session(engine) as session:
        first = enqueue(session, [Optional(**each) for each in values])
        assert all(each.created for each in first)
        second = enqueue(session, [Optional(**each) for each in values])
        assert [(each.job, each.created) for each in second] == [(each.job, False) for each in first]
