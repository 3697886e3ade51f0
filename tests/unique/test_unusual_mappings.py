"""``enqueue()`` of classes with unusual relationships and columns leaves what a flush would leave."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.ext.mutable import MutableDict
from sqlalchemy.ext.orderinglist import ordering_list
from sqlalchemy.orm import (
    DeclarativeBase,
    DynamicMapped,
    Mapped,
    Session,
    attribute_keyed_dict,
    composite,
    mapped_column,
    relationship,
)

from sqlaqueue import QueueConfig, QueueMixin, Unique, enqueue
from sqlaqueue.exc import StatementError


@pytest.fixture(autouse=True)
def no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


class Base(DeclarativeBase):
    pass


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


@pytest.fixture(autouse=True)
def tables(engine: sa.Engine) -> None:
    Base.metadata.create_all(engine)


def test_collections_without_backrefs(engine: sa.Engine) -> None:
    with Session(engine) as session:
        job = Job(
            key="a",
            tags=[Tag(name="t")],
            files=[File(name="f", pages=[Page()])],
            by_name={"n": Named(name="n")},
        )
        twin = Job(key="a", tags=[Tag(name="u")], files=[File(name="g")], by_name={"m": Named(name="m")})
        assert enqueue(session, [job, twin]) == [(job, True), (job, False)]
        assert (len(twin.tags), twin.files[0].name, list(twin.by_name)) == (1, "g", ["m"])
        session.commit()
        assert ([each.name for each in job.tags], [each.name for each in job.files]) == (["t"], ["f"])
        assert (list(job.by_name), len(job.files[0].pages)) == (["n"], 1)
        assert session.scalars(sa.select(Tag.name)).all() == ["t"]


def test_objects_of_the_session_stay_in_it(engine: sa.Engine) -> None:
    with Session(engine) as session:
        enqueue(session, Job(key="a"))
        session.commit()
        tag, twin = Tag(name="of the application"), Job(key="a", files=[File(name="f", pages=[Page()])])
        twin.tags.append(tag)
        session.add_all([tag, twin])
        assert not enqueue(session, twin)[0].created
        session.commit()
        assert session.scalars(sa.select(Tag.name)).all() == ["of the application"]
        assert session.scalars(sa.select(File)).all() == []


def test_objects_that_cannot_wait_are_refused(engine: sa.Engine) -> None:
    with Session(engine) as session:
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


def test_columns(engine: sa.Engine) -> None:
    with Session(engine) as session:
        job = Job(key="a", at=Point(1, 2))
        enqueue(session, job)
        assert (job.version, job.from_made, job.at) == (1, "from made", Point(1, 2))
        job.data["a"] = 1
        session.commit()
        assert (job.version, job.data) == (2, {"a": 1})
        enqueue(session, Job(key="a", made="again"), on_twin="replace")
        assert (job.version, job.from_made, job.data) == (3, "from again", {})
        assert job.updated == "updated"
        session.commit()
        job.made = "by the application"
        session.commit()
        assert job.version == 4
        with pytest.raises(StatementError, match=r"Job\.key = 'abcdeXYZ': the column holds 5 characters"):
            enqueue(session, Job(key="abcdeXYZ"))


def test_the_last_parent_counts_in_one_call(engine: sa.Engine) -> None:
    with Session(engine) as session:
        first, last = Owner(name="first"), Owner(name="last")
        result = enqueue(session, [Job(key="a", owner=first), Job(key="a", owner=last)], on_twin="replace")
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


def test_lists_in_jsonb_and_keys_of_subclasses(engine: sa.Engine) -> None:
    values: list[Any] = [5, [5], [6, 7], [["x"], ["y"], "y"], {"a": [1]}, "5"]
    with Session(engine) as session:
        first = enqueue(session, [Child(key=each) for each in values])
        assert all(each.created for each in first)
        session.commit()
        assert [each.job for each in enqueue(session, [Root(key=each) for each in values])] == [
            each.job for each in first
        ]
        assert all(each.job.child_id == each.job.id for each in first)


def test_a_job_in_a_state_that_does_not_count(engine: sa.Engine) -> None:
    with Session(engine) as session:
        jobs = [Job(key="a", status="completed"), Job(key="a"), Job(key="a", status="failed")]
        assert [each.created for each in enqueue(session, jobs)] == [True, True, True]
        session.commit()


def test_a_subclass_of_a_subclass(engine: sa.Engine) -> None:
    with Session(engine) as session:
        jobs = [Great(key=1), Grandchild(key=2), Great(key=3)]
        assert all(each.created for each in enqueue(session, jobs))
        session.commit()
        assert all(each.grandchild_id == each.child_id == each.id for each in jobs)


def test_an_instance_with_a_new_parent_after_a_rollback(engine: sa.Engine) -> None:
    with Session(engine) as session:
        owner = Owner(name="o")
        job = Job(key="a", owner=owner, files=[File(name="f")])
        for _ in range(2):
            enqueue(session, job)
            session.rollback()
        assert enqueue(session, job) == [(job, True)]
        assert job.owner is owner
        session.commit()
        assert (job.owner_id, [each.name for each in job.files]) == (owner.id, ["f"])


def test_siblings_in_one_call(engine: sa.Engine) -> None:
    with Session(engine) as session:
        owner = Owner(name="o")
        jobs = [Job(key=key, owner=owner) for key in "aab"]
        assert [each.created for each in enqueue(session, jobs)] == [True, False, True]
        session.commit()
        assert owner.jobs == [jobs[0], jobs[2]]


def test_a_collection_that_numbers_its_members(engine: sa.Engine) -> None:
    with Session(engine) as session:
        job, twin = Job(key="a", steps=[Step(), Step(), Step()]), Job(key="a", steps=[Step(), Step()])
        enqueue(session, [job, twin])
        session.commit()
        assert ([each.place for each in job.steps], [each.place for each in twin.steps]) == ([0, 1, 2], [0, 1])
