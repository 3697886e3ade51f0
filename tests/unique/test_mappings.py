"""``enqueue()`` of instances with relationships, inheritance, defaults and composite keys, also unusual ones."""

from __future__ import annotations

import enum
import uuid
import warnings
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.ext.mutable import MutableDict
from sqlalchemy.ext.orderinglist import ordering_list
from sqlalchemy.orm import (
    DeclarativeBase,
    DynamicMapped,
    Mapped,
    MappedAsDataclass,
    Session,
    attribute_keyed_dict,
    composite,
    mapped_column,
    relationship,
    validates,
)

from sqlaqueue import QueueConfig, QueueMixin, Unique, claim, enqueue
from sqlaqueue.exc import StatementError


@pytest.fixture(autouse=True)
def tables(engine: sa.Engine) -> None:
    Base.metadata.create_all(engine)
    DataBase.metadata.create_all(engine)


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
    jobs: Mapped[list[Email]] = relationship(back_populates="customer", cascade="all, delete-orphan")


class Email(QueueMixin, Base):
    __tablename__ = "email"
    __queue__ = QueueConfig(unique=Unique("customer_id", "kind"))
    id: Mapped[int] = mapped_column(primary_key=True)
    customer_id: Mapped[int] = mapped_column(sa.ForeignKey("customer.id"))
    kind: Mapped[str]
    customer: Mapped[Customer] = relationship(back_populates="jobs")
    files: Mapped[list[Attachment]] = relationship(back_populates="job", cascade="all, delete-orphan")

    @validates("customer")
    def check_customer(self, _: str, value: Any) -> Any:
        assert value is not None
        return value


class Attachment(Base):
    __tablename__ = "attachment"
    id: Mapped[int] = mapped_column(primary_key=True)
    job_id: Mapped[int] = mapped_column(sa.ForeignKey("email.id"))
    name: Mapped[str]
    job: Mapped[Email] = relationship(back_populates="files")


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


def test_a_new_parent_is_inserted_first(session: Session) -> None:
    customer = Customer(name="new")
    first, second = Email(customer=customer, kind="a"), Email(customer=customer, kind="a")
    result = enqueue(session, [first, second])
    assert [(each.job, each.created) for each in result] == [(first, True), (first, False)]
    assert first.customer is customer
    assert customer.jobs == [first]
    assert second.customer is customer
    session.commit()
    assert first.customer_id == customer.id
    assert session.scalar(sa.select(sa.func.count()).select_from(Email)) == 1


def test_a_parent_whose_collection_is_loaded(session: Session) -> None:
    customer = Customer(name="old")
    session.add(customer)
    session.commit()
    assert customer.jobs == []
    job = Email(kind="a")
    customer.jobs.append(job)
    assert enqueue(session, job) == [(job, True)]
    duplicate = Email(kind="a")
    customer.jobs.append(duplicate)
    assert enqueue(session, duplicate) == [(job, False)]
    session.commit()
    assert customer.jobs == [job]
    assert session.scalar(sa.select(sa.func.count()).select_from(Email)) == 1


def test_children_are_inserted_with_a_created_job_only(session: Session) -> None:
    customer = Customer(name="new")
    first = Email(customer=customer, kind="a", files=[Attachment(name="1"), Attachment(name="2")])
    second = Email(customer=customer, kind="a", files=[Attachment(name="3")])
    session.add(second)
    enqueue(session, [first, second])
    assert [each.name for each in second.files] == ["3"]
    session.commit()
    assert [each.name for each in first.files] == ["1", "2"]
    assert session.scalars(sa.select(Attachment.name).order_by(Attachment.name)).all() == ["1", "2"]


def test_replace_refuses_children(session: Session) -> None:
    customer = Customer(name="new")
    enqueue(session, Email(customer=customer, kind="a"))
    session.commit()
    job = Email(customer=customer, kind="a", files=[Attachment(name="1")])
    with pytest.raises(StatementError, match="only its columns move"):
        enqueue(session, [Email(customer=customer, kind="b"), job], on_duplicate="replace")
    session.commit()
    assert session.scalars(sa.select(Email.kind)).all() == ["a"]


def test_inheritance(session: Session) -> None:
    key, other = uuid.uuid4(), uuid.uuid4()
    leaf, branch, node = Leaf(key=key, size=5), Branch(key=other), Node(key=key, color=Color.BLUE)
    more = [Leaf(key=uuid.uuid4()) for _ in range(3)]
    duplicate = Branch(key=key)
    result = enqueue(session, [leaf, branch, node, *more, duplicate])
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


def test_replace_in_two_tables(session: Session) -> None:
    key = uuid.uuid4()
    enqueue(session, Leaf(key=key, size=5, label="one"))
    session.commit()
    [(leaf, _)] = enqueue(session, Leaf(key=key, size=6, label="two"), on_duplicate="replace")
    assert (leaf.size, leaf.label) == (6, "two")
    enqueue(session, Leaf(key=key), on_duplicate="replace")
    assert (leaf.size, leaf.label) == (3, "Color.RED")
    with pytest.raises(StatementError, match="this Branch is a duplicate of one of the class Leaf"):
        enqueue(session, Branch(key=key), on_duplicate="replace")
    second = uuid.uuid4()
    result = enqueue(session, [Leaf(key=second, size=1), Leaf(key=second, size=2)], on_duplicate="replace")
    assert result[0].job.size == 2
    session.commit()
    assert session.scalar(sa.select(Leaf.size).where(Leaf.key == second)) == 2


def test_composite_keys_and_values_that_the_server_compares(session: Session) -> None:
    first = Pair(left=1, name="abc", data={"a": 1, "b": [2]})
    second = Pair(left=2, name="abc ", data={"b": [2], "a": 1})
    third = Pair(left=3, name="abc ", data={"b": 2})
    result = enqueue(session, [first, second, third])
    assert [(each.job.left, each.created) for each in result] == [(1, True), (1, False), (3, True)]
    assert isinstance(first.right, uuid.UUID)
    session.commit()
    [(again, created)] = enqueue(session, Pair(left=4, name="abc", data={"a": 1, "b": [2]}))
    assert (again, created) == (first, False)
    [(again, _)] = enqueue(session, Pair(left=4, name="abc  ", data={"b": 2}, priority=3), on_duplicate="replace")
    assert (again.left, again.priority) == (3, 3)


def test_dataclasses(session: Session) -> None:
    first = Data(key="a")
    assert enqueue(session, [first, Data(key="a")]) == [(first, True), (first, False)]
    session.commit()
    assert session.scalars(claim(Data, 9)).all() == [first]


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


def test_values_that_are_sql(session: Session) -> None:
    jobs = [Leaf(key=uuid.uuid4(), priority=sa.select(sa.literal(number)).scalar_subquery()) for number in range(3)]
    assert all(each.created for each in enqueue(session, jobs))
    session.commit()
    assert [job.priority for job in jobs] == [0, 1, 2]


def test_nulls_of_numbers_and_uuids(session: Session) -> None:
    ident = uuid.uuid4()
    values: list[dict[str, Any]] = [{}, {"number": 1}, {"ident": ident}, {"number": 1, "ident": ident}]
    first = enqueue(session, [Optional(**each) for each in values])
    assert all(each.created for each in first)
    second = enqueue(session, [Optional(**each) for each in values])
    assert [(each.job, each.created) for each in second] == [(each.job, False) for each in first]


# -- ``enqueue()`` of classes with unusual relationships and columns leaves what a flush would leave ---------------

tagged = sa.Table(
    "tagged",
    Base.metadata,
    sa.Column("job_id", sa.ForeignKey("job.id"), primary_key=True),
    sa.Column("tag_id", sa.ForeignKey("tag.id"), primary_key=True),
)


class Tag(Base):
    __tablename__ = "tag"
    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str]


class Point:
    def __init__(self, x: int, y: int) -> None:
        self.x, self.y = x, y

    def __composite_values__(self) -> tuple[int, int]:
        return self.x, self.y

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Point) and (self.x, self.y) == (other.x, other.y)

    def __hash__(self) -> int:
        return hash((self.x, self.y))


class Owner(Base):
    __tablename__ = "owner"
    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str]
    jobs: Mapped[list[Job]] = relationship(back_populates="owner")


class Job(QueueMixin, Base):
    __tablename__ = "job"
    __queue__ = QueueConfig(unique=Unique("key"))
    id: Mapped[int] = mapped_column(primary_key=True)
    key: Mapped[str] = mapped_column(sa.String(5))
    version: Mapped[int] = mapped_column()
    data: Mapped[dict[str, Any]] = mapped_column(MutableDict.as_mutable(JSONB), server_default="{}")
    x: Mapped[int | None]
    y: Mapped[int | None]
    at: Mapped[Point] = composite("x", "y")
    made: Mapped[str] = mapped_column(default="made")
    from_made: Mapped[str] = mapped_column(default=lambda context: f"from {context.current_parameters['made']}")
    updated: Mapped[str] = mapped_column(sa.String, onupdate="updated", server_default="new")
    owner_id: Mapped[int | None] = mapped_column(sa.ForeignKey("owner.id"))
    owner: Mapped[Owner | None] = relationship(back_populates="jobs")
    parent_id: Mapped[int | None] = mapped_column(sa.ForeignKey("job.id"))
    parent: Mapped[Job | None] = relationship(remote_side="Job.id")
    tags: Mapped[list[Tag]] = relationship(secondary=tagged)
    files: Mapped[list[File]] = relationship(cascade="all, delete-orphan")
    by_name: Mapped[dict[str, Named]] = relationship(collection_class=attribute_keyed_dict("name"))
    steps: Mapped[list[Step]] = relationship(order_by="Step.place", collection_class=ordering_list("place"))
    logs: DynamicMapped[Log] = relationship()
    __mapper_args__: ClassVar[dict[str, Any]] = {"version_id_col": version}


class File(Base):
    __tablename__ = "file"
    id: Mapped[int] = mapped_column(primary_key=True)
    job_id: Mapped[int] = mapped_column(sa.ForeignKey("job.id"))
    name: Mapped[str]
    pages: Mapped[list[Page]] = relationship()


class Page(Base):
    __tablename__ = "page"
    id: Mapped[int] = mapped_column(primary_key=True)
    file_id: Mapped[int] = mapped_column(sa.ForeignKey("file.id"))


class Step(Base):
    __tablename__ = "step"
    id: Mapped[int] = mapped_column(primary_key=True)
    job_id: Mapped[int] = mapped_column(sa.ForeignKey("job.id"))
    place: Mapped[int]


class Named(Base):
    __tablename__ = "named"
    id: Mapped[int] = mapped_column(primary_key=True)
    job_id: Mapped[int] = mapped_column(sa.ForeignKey("job.id"))
    name: Mapped[str]


class Log(Base):
    __tablename__ = "log"
    id: Mapped[int] = mapped_column(primary_key=True)
    job_id: Mapped[int] = mapped_column(sa.ForeignKey("job.id"))


class Audit(Base):
    __tablename__ = "audit"
    id: Mapped[int] = mapped_column(primary_key=True)
    job_id: Mapped[int | None] = mapped_column(sa.ForeignKey("job.id"))
    job: Mapped[Job | None] = relationship()


class Root(QueueMixin, Base):
    __tablename__ = "root"
    __queue__ = QueueConfig(unique=Unique("key"))
    id: Mapped[int] = mapped_column(primary_key=True)
    type: Mapped[str]
    key: Mapped[Any] = mapped_column(JSONB)
    __mapper_args__: ClassVar[dict[str, Any]] = {"polymorphic_on": "type", "polymorphic_identity": "root"}


class Child(Root):
    __tablename__ = "child"
    child_id: Mapped[int] = mapped_column(sa.ForeignKey("root.id"), primary_key=True)
    __mapper_args__: ClassVar[dict[str, Any]] = {"polymorphic_identity": "child"}


class Grandchild(Child):
    __tablename__ = "grandchild"
    grandchild_id: Mapped[int] = mapped_column(sa.ForeignKey("child.child_id"), primary_key=True)
    __mapper_args__: ClassVar[dict[str, Any]] = {"polymorphic_identity": "grandchild"}


class Great(Grandchild):
    __tablename__ = "great"
    grandchild_id: Mapped[int] = mapped_column(sa.ForeignKey("grandchild.grandchild_id"), primary_key=True)
    __mapper_args__: ClassVar[dict[str, Any]] = {"polymorphic_identity": "great"}


def test_collections_without_backrefs(session: Session) -> None:
    job = Job(key="a", tags=[Tag(name="t")], files=[File(name="f", pages=[Page()])], by_name={"n": Named(name="n")})
    duplicate = Job(key="a", tags=[Tag(name="u")], files=[File(name="g")], by_name={"m": Named(name="m")})
    assert enqueue(session, [job, duplicate]) == [(job, True), (job, False)]
    assert (len(duplicate.tags), duplicate.files[0].name, list(duplicate.by_name)) == (1, "g", ["m"])
    session.commit()
    assert ([each.name for each in job.tags], [each.name for each in job.files]) == (["t"], ["f"])
    assert (list(job.by_name), len(job.files[0].pages)) == (["n"], 1)
    assert session.scalars(sa.select(Tag.name)).all() == ["t"]


def test_objects_of_the_session_stay_in_it(session: Session) -> None:
    enqueue(session, Job(key="a"))
    session.commit()
    tag, duplicate = Tag(name="of the application"), Job(key="a", files=[File(name="f", pages=[Page()])])
    duplicate.tags.append(tag)
    session.add_all([tag, duplicate])
    assert not enqueue(session, duplicate)[0].created
    session.commit()
    assert session.scalars(sa.select(Tag.name)).all() == ["of the application"]
    assert session.scalars(sa.select(File)).all() == []


def test_objects_that_cannot_wait_are_refused(session: Session) -> None:
    [(job, _)] = enqueue(session, Job(key="a", files=[File(name="f")]))
    session.commit()
    with pytest.raises(StatementError, match=r"Job\.files has objects that are in the database"):
        enqueue(session, Job(key="b", files=[job.files[0]]))
    session.rollback()
    logged = Job(key="c")
    logged.logs.add(Log())
    with pytest.raises(
        StatementError, match=r"Job\.logs has objects, and its loader is .dynamic.; add them to the job"
    ):
        enqueue(session, logged)
    session.rollback()
    first = Job(key="c")
    with pytest.raises(StatementError, match=r"Job\.parent is another job of the same call"):
        enqueue(session, [first, Job(key="d", parent=first)])
    session.rollback()
    assert session.scalars(sa.select(File.job_id)).all() == [job.id]
    enqueue(session, Job(key="d", parent=job))
    mine = Job(key="e")
    session.add(Audit(job=mine))
    with pytest.raises(StatementError, match=r"Audit\.job in the session refers to a job that may not be inserted"):
        enqueue(session, mine)


def test_columns(session: Session) -> None:
    job = Job(key="a", at=Point(1, 2))
    enqueue(session, job)
    assert (job.version, job.from_made, job.at) == (1, "from made", Point(1, 2))
    job.data["a"] = 1
    session.commit()
    assert (job.version, job.data) == (2, {"a": 1})
    enqueue(session, Job(key="a", made="again"), on_duplicate="replace")
    assert (job.version, job.from_made, job.data) == (3, "from again", {})
    assert job.updated == "updated"
    session.commit()
    job.made = "by the application"
    session.commit()
    assert job.version == 4
    with pytest.raises(StatementError, match=r"Job\.key = 'abcdeXYZ': the column holds 5 characters"):
        enqueue(session, Job(key="abcdeXYZ"))


def test_the_last_parent_counts_in_one_call(session: Session) -> None:
    first, last = Owner(name="first"), Owner(name="last")
    result = enqueue(session, [Job(key="a", owner=first), Job(key="a", owner=last)], on_duplicate="replace")
    assert result[0].job.owner is last
    session.commit()
    assert result[1].job.owner is last


def test_listeners_see_relationships(engine: sa.Engine) -> None:
    seen = []

    def look(_: Any, __: Any, target: Job) -> None:
        assert target.owner is not None
        seen.append((target.owner.name, len(target.tags)))

    sa.event.listen(Job, "before_insert", look)
    try:
        with Session(engine) as session:
            owner = Owner(name="o")
            job = Job(key="a", owner=owner, tags=[Tag(name="t")])
            enqueue(session, job)
            assert job.owner is owner
    finally:
        sa.event.remove(Job, "before_insert", look)
    assert seen == [("o", 1)]


def test_lists_in_jsonb_and_keys_of_subclasses(session: Session) -> None:
    values: list[Any] = [5, [5], [6, 7], [["x"], ["y"], "y"], {"a": [1]}, "5"]
    first = enqueue(session, [Child(key=each) for each in values])
    assert all(each.created for each in first)
    session.commit()
    assert [each.job for each in enqueue(session, [Root(key=each) for each in values])] == [each.job for each in first]
    assert all(each.job.child_id == each.job.id for each in first)


def test_a_job_in_a_state_that_does_not_count(session: Session) -> None:
    jobs = [Job(key="a", status="completed"), Job(key="a"), Job(key="a", status="failed")]
    assert [each.created for each in enqueue(session, jobs)] == [True, True, True]
    session.commit()


def test_a_subclass_of_a_subclass(session: Session) -> None:
    jobs = [Great(key=1), Grandchild(key=2), Great(key=3)]
    assert all(each.created for each in enqueue(session, jobs))
    session.commit()
    assert all(each.grandchild_id == each.child_id == each.id for each in jobs)


def test_an_instance_with_a_new_parent_after_a_rollback(session: Session) -> None:
    owner = Owner(name="o")
    job = Job(key="a", owner=owner, files=[File(name="f")])
    for _ in range(2):
        enqueue(session, job)
        session.rollback()
    assert enqueue(session, job) == [(job, True)]
    assert job.owner is owner
    session.commit()
    assert (job.owner_id, [each.name for each in job.files]) == (owner.id, ["f"])


def test_siblings_in_one_call(session: Session) -> None:
    owner = Owner(name="o")
    jobs = [Job(key=key, owner=owner) for key in "aab"]
    assert [each.created for each in enqueue(session, jobs)] == [True, False, True]
    session.commit()
    assert owner.jobs == [jobs[0], jobs[2]]


def test_a_collection_that_numbers_its_members(session: Session) -> None:
    job, duplicate = Job(key="a", steps=[Step(), Step(), Step()]), Job(key="a", steps=[Step(), Step()])
    enqueue(session, [job, duplicate])
    session.commit()
    assert ([each.place for each in job.steps], [each.place for each in duplicate.steps]) == ([0, 1, 2], [0, 1])
