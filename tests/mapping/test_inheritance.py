"""Queues with inheritance: claims of the base class and of subclasses."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, selectin_polymorphic

from sqlaqueue import QueueConfig, QueueMixin, cancel, claim, complete, extend, fail, purge, reconcile, requeue, rescue
from sqlaqueue.exc import ConfigurationError, StatementError
from tests.mapping.conftest import created
from tests.models import STRATEGIES, add, new_base

OWN_MESSAGE = QueueConfig(strategy="delete_returning", rows_are_messages=True)


@pytest.fixture(
    params=[*(QueueConfig(strategy=strategy) for strategy in STRATEGIES), OWN_MESSAGE], ids=[*STRATEGIES, "own message"]
)
def config(request: pytest.FixtureRequest) -> Any:
    return request.param


def polymorphic(identity: str, **options: Any) -> dict[str, Any]:
    return {"polymorphic_identity": identity, **options}


# -- one table ---------------------------------------------------------------------------------------------------------


class Hierarchy:
    """Job, its subclass Letter and that one's subclass Parcel, in one table."""

    def __init__(self, config: QueueConfig, **options: Any) -> None:
        base = new_base()

        class Job(QueueMixin, base):
            __tablename__ = "job"
            __queue__ = config
            __mapper_args__ = polymorphic("job", polymorphic_on="kind", **options)
            id: Mapped[int] = mapped_column(primary_key=True)
            kind: Mapped[str]

        class Letter(Job):
            __mapper_args__ = polymorphic("letter")
            address: Mapped[str | None]

        class Parcel(Letter):
            __mapper_args__ = polymorphic("parcel")
            weight: Mapped[int | None]

        self.metadata, self.Job, self.Letter, self.Parcel = base.metadata, Job, Letter, Parcel

    def jobs(self) -> list[Any]:
        return [
            self.Job(id=1),
            self.Letter(id=2, address="Rome"),
            self.Parcel(id=3, address="Oslo", weight=7),
            self.Job(id=4),
        ]


@pytest.fixture
def hierarchy(config: QueueConfig, engine: sa.Engine) -> Iterator[Hierarchy]:
    hierarchy = Hierarchy(config)
    with created(engine, hierarchy.metadata):
        with Session(engine) as session:
            session.add_all(hierarchy.jobs())
            session.commit()
        yield hierarchy


def claimed(session: Session, target: Any) -> dict[int, type[Any]]:
    return {job.id: type(job) for job in session.execute(claim(target, 10)).scalars()}


def test_claiming_the_base_returns_instances_of_subclasses(hierarchy: Hierarchy, engine: sa.Engine) -> None:
    h = hierarchy
    with Session(engine) as session:
        assert claimed(session, h.Job) == {1: h.Job, 2: h.Letter, 3: h.Parcel, 4: h.Job}


def test_claiming_a_subclass_returns_only_its_instances(hierarchy: Hierarchy, engine: sa.Engine) -> None:
    h = hierarchy
    with Session(engine) as session:
        assert claimed(session, h.Parcel) == {3: h.Parcel}
        session.rollback()
        assert claimed(session, h.Letter) == {2: h.Letter, 3: h.Parcel}
        session.rollback()
        assert claimed(session, sa.select(h.Letter).where(h.Letter.address != "Oslo")) == {2: h.Letter}
        session.rollback()
        assert claimed(session, sa.select(h.Job).where(h.Parcel.weight > 5)) == {3: h.Parcel}


def test_columns_of_subclasses_are_loaded_by_the_claim(hierarchy: Hierarchy, engine: sa.Engine) -> None:
    with Session(engine) as session:
        statements = []
        sa.event.listen(engine, "before_cursor_execute", lambda *arguments: statements.append(arguments[2]))
        jobs = session.execute(claim(hierarchy.Job, 10)).scalars().all()
        assert [(job.address, job.weight) for job in jobs[2:3]] == [("Oslo", 7)]
        assert jobs[1].address == "Rome"
        assert len(statements) == 1


def test_subclasses_share_the_queue(hierarchy: Hierarchy, engine: sa.Engine) -> None:
    h = hierarchy
    assert h.Parcel.__queue__ is h.Job.__queue__
    with Session(engine) as session:
        jobs = session.execute(claim(h.Job, 10)).scalars().all()
        assert session.scalars(extend(jobs)).all() == [1, 2, 3, 4]
        assert session.scalars(fail(jobs)).all() == [1, 2, 3, 4]
        session.commit()
    with Session(engine) as session:
        assert session.scalars(requeue(h.Letter)).all() == [2, 3]
        session.commit()
        assert session.scalars(cancel(sa.select(h.Letter).where(h.Letter.address == "Rome"))).all() == [2]
        session.commit()
        (parcel,) = session.execute(claim(h.Job, 10)).scalars().all()
        assert session.scalars(complete(parcel)).all() == [3]
        session.commit()
        assert set(session.scalars(purge(h.Letter)).all()) == {2, 3} - (
            {3} if "status" not in h.Job.__table__.c else set()
        )
        session.commit()
        assert set(session.scalars(purge(h.Job)).all()) == {1, 4}
        session.commit()


def test_polymorphic_loading_options_do_not_affect_claims(engine: sa.Engine) -> None:
    h = Hierarchy(QueueConfig(), with_polymorphic="*")
    with created(engine, h.metadata), Session(engine) as session:
        session.add_all(h.jobs())
        session.commit()
        jobs = session.execute(claim(h.Job, 10)).scalars().all()
        assert [type(job) for job in jobs] == [h.Job, h.Letter, h.Parcel, h.Job]
        assert jobs[2].weight == 7


def test_a_config_for_a_subclass_is_refused() -> None:
    h = Hierarchy(QueueConfig())
    with pytest.raises(ConfigurationError, match=r"Fax\.__queue__: a subclass shares the queue of Job; set it there"):

        class Fax(h.Job):
            __mapper_args__ = polymorphic("fax")
            __queue__ = QueueConfig(max_attempts=2)


# -- joined tables -----------------------------------------------------------------------------------------------------


class JoinedHierarchy:
    """Job and its subclass Letter, in joined tables."""

    def __init__(self, config: QueueConfig, **options: Any) -> None:
        base = new_base()

        class Job(QueueMixin, base):
            __tablename__ = "job"
            __queue__ = config
            __mapper_args__ = polymorphic("job", polymorphic_on="kind", **options)
            id: Mapped[int] = mapped_column(primary_key=True)
            kind: Mapped[str]

        class Letter(Job):
            __tablename__ = "letter"
            __mapper_args__ = polymorphic("letter")
            id: Mapped[int] = mapped_column(sa.ForeignKey(Job.id), primary_key=True)
            address: Mapped[str]

        self.metadata, self.Job, self.Letter = base.metadata, Job, Letter


@pytest.fixture(params=STRATEGIES)
def joined(request: pytest.FixtureRequest, engine: sa.Engine) -> Iterator[JoinedHierarchy]:
    hierarchy = JoinedHierarchy(QueueConfig(strategy=request.param))
    with created(engine, hierarchy.metadata):
        add(engine, hierarchy.Job(), hierarchy.Letter(address="Rome"), hierarchy.Letter(address="Oslo"))
        yield hierarchy


def test_claiming_the_base_of_joined_tables(joined: JoinedHierarchy, engine: sa.Engine) -> None:
    with Session(engine) as session:
        jobs = session.execute(claim(joined.Job, 10)).scalars().all()
        assert [type(job) for job in jobs] == [joined.Job, joined.Letter, joined.Letter]
        assert [job.address for job in jobs[1:]] == ["Rome", "Oslo"]
        assert session.scalars(complete(jobs[1])).all() == [jobs[1].id]
        session.commit()
        assert jobs[1].status == "completed"
        assert jobs[0].status != "completed"


def test_selectin_polymorphic_loads_the_joined_tables_at_once(joined: JoinedHierarchy, engine: sa.Engine) -> None:
    option = selectin_polymorphic(joined.Job, [joined.Letter])
    for statement in (claim(joined.Job, 10).options(option), claim(sa.select(joined.Job).options(option), 10)):
        with Session(engine) as session:
            jobs = session.execute(statement).scalars().all()
            assert not any("address" in sa.inspect(job).unloaded for job in jobs)
            session.rollback()


@pytest.mark.parametrize("verb", [claim, cancel, requeue, rescue, purge, reconcile], ids=lambda verb: verb.__name__)
def test_a_verb_on_the_child_of_joined_tables_is_refused(verb: Callable[..., Any]) -> None:
    h = JoinedHierarchy(QueueConfig())
    arguments = [5] if verb is claim else []
    fix = rf"{verb.__name__}\(Letter\): .* \(joined inheritance\), .* use {verb.__name__}\(Job\), which returns"
    with pytest.raises(StatementError, match=fix):
        verb(h.Letter, *arguments)
    with pytest.raises(StatementError, match=fix):
        verb(sa.select(h.Letter), *arguments)


def test_the_base_is_claimed_with_a_condition_on_the_child(joined: JoinedHierarchy, engine: sa.Engine) -> None:
    in_rome = sa.exists().where(joined.Letter.__table__.c.id == joined.Job.id, joined.Letter.address == "Rome")
    with Session(engine) as session:
        (job,) = session.execute(claim(sa.select(joined.Job).where(in_rome), 10)).scalars().all()
        assert job.address == "Rome"


def test_a_job_of_a_child_is_cancelled_and_requeued(joined: JoinedHierarchy, engine: sa.Engine) -> None:
    with Session(engine) as session:
        letters = session.scalars(sa.select(joined.Letter)).all()
        assert session.scalars(cancel(letters)).all() == [letter.id for letter in letters]
        session.commit()
        assert session.scalars(requeue(letters[0])).all() == [letters[0].id]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_claiming_a_base_with_polymorphic_all(strategy: str, engine: sa.Engine) -> None:
    h = JoinedHierarchy(QueueConfig(strategy=strategy), with_polymorphic="*")
    with created(engine, h.metadata), Session(engine) as session:
        session.add_all([h.Job(), h.Letter(address="Rome")])
        session.commit()
        jobs = session.execute(claim(h.Job, 10)).scalars().all()
        assert [type(job) for job in jobs] == [h.Job, h.Letter]
        assert jobs[1].address == "Rome"
        session.execute(fail(jobs))
        session.commit()
        assert session.scalars(requeue(sa.select(h.Job).where(h.Job.id == jobs[0].id))).all() == [jobs[0].id]


def test_a_child_that_defines_an_attribute_of_the_queue_is_refused() -> None:
    h = JoinedHierarchy(QueueConfig())
    with (
        pytest.warns(sa.exc.SAWarning, match="Implicitly combining"),
        pytest.raises(ConfigurationError, match=r"Fax\.status: the queue of Job has an attribute of this name; rename"),
    ):

        class Fax(h.Job):
            __tablename__ = "fax"
            __mapper_args__ = polymorphic("fax")
            id: Mapped[int] = mapped_column(sa.ForeignKey(h.Job.id), primary_key=True)
            status: Mapped[str]


# -- refused hierarchies -----------------------------------------------------------------------------------------------


class Plain(DeclarativeBase):
    pass


class Animal(Plain):
    __tablename__ = "animal"
    __mapper_args__ = polymorphic("animal", polymorphic_on="kind")
    id: Mapped[int] = mapped_column(primary_key=True)
    kind: Mapped[str]


def test_a_queue_that_inherits_from_a_mapped_class_is_refused() -> None:
    key = mapped_column(sa.ForeignKey(Animal.id), primary_key=True)
    for name, body in (("Dog", {}), ("Cat", {"__tablename__": "cat", "id": key})):
        with pytest.raises(
            ConfigurationError, match=rf"{name} inherits from Animal, which is mapped and not a queue: let Animal"
        ):
            type(name, (QueueMixin, Animal), {**body, "__mapper_args__": polymorphic(name)})


def test_a_queue_with_concrete_inheritance_from_another_class(config: QueueConfig, engine: sa.Engine) -> None:
    base = new_base()

    class Person(base):
        __tablename__ = "person"
        id: Mapped[int] = mapped_column(primary_key=True)
        name: Mapped[str | None]

    class Guest(QueueMixin, Person):
        __tablename__ = "guest"
        __queue__ = config
        __mapper_args__ = polymorphic("guest", concrete=True)
        id: Mapped[int] = mapped_column(primary_key=True)
        name: Mapped[str | None]

    assert Person.__table__.c.keys() == ["id", "name"]
    with created(engine, base.metadata), Session(engine) as session:
        session.add_all([Person(), Guest(name="Ada"), Guest(name="Bob")])
        session.commit()
        first, second = session.scalars(claim(Guest, 5)).all()
        session.execute(complete(first))
        session.execute(fail(second))
        session.commit()
        assert session.scalars(requeue(Guest)).all()[-1:] == [2]
        session.commit()
        assert [guest.name for guest in session.scalars(claim(sa.select(Guest).where(Guest.id == 2), 5))] == ["Bob"]


def test_concrete_inheritance_from_a_queue_is_refused() -> None:
    h = Hierarchy(QueueConfig())
    with pytest.raises(ConfigurationError, match=r"Fax inherits from the queue Job .* \(concrete inheritance\)"):

        class Fax(h.Job):
            __tablename__ = "fax"
            __mapper_args__ = polymorphic("fax", concrete=True)
            id: Mapped[int] = mapped_column(primary_key=True)


def test_a_queue_mapped_to_a_join_is_refused() -> None:
    base = new_base()
    left = sa.Table("a", base.metadata, sa.Column("id", sa.Integer, primary_key=True))
    right = sa.Table("b", base.metadata, sa.Column("a_id", sa.ForeignKey(left.c.id), primary_key=True))
    with pytest.raises(ConfigurationError, match=r"Job is mapped to .*; a queue needs a table of its own"):

        class Job(QueueMixin, base):
            __table__ = left.join(right)
            id = sa.orm.column_property(left.c.id, right.c.a_id)
