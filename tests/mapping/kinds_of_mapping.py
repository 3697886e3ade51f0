"""Kinds of models: the ways to map a class."""

from typing import Any, ClassVar

import sqlalchemy as sa
import sqlmodel
from sqlalchemy.orm import (
    DeclarativeBase,
    DeclarativeBaseNoMeta,
    Mapped,
    MappedAsDataclass,
    declarative_base,
    declared_attr,
    mapped_column,
    registry,
)

from sqlaqueue import QueueMixin
from tests.mapping.kind import Built, MakeConfig, kind


@kind()
def plain(queue: MakeConfig) -> Built:
    class Base(DeclarativeBase):
        pass

    class Job(QueueMixin, Base):
        __tablename__ = "job"
        __queue__ = queue()

        id: Mapped[int] = mapped_column(primary_key=True)
        payload: Mapped[str]

    return Built(model=Job)


@kind()
def base_before_mixin(queue: MakeConfig) -> Built:
    class Base(DeclarativeBase):
        pass

    class Job(Base, QueueMixin):
        __tablename__ = "job"
        __queue__ = queue()

        id: Mapped[int] = mapped_column(primary_key=True)
        payload: Mapped[str]

    return Built(model=Job)


@kind()
def without_metaclass(queue: MakeConfig) -> Built:
    class Base(DeclarativeBaseNoMeta):
        pass

    class Job(QueueMixin, Base):
        __tablename__ = "job"
        __queue__ = queue()

        id: Mapped[int] = mapped_column(primary_key=True)
        payload: Mapped[str]

    return Built(model=Job)


@kind()
def old_declarative_base(queue: MakeConfig) -> Built:
    Base: Any = declarative_base()  # noqa: N806 - the usual name

    class Job(QueueMixin, Base):
        __tablename__ = "job"
        __queue__ = queue()

        id = sa.Column(sa.Integer, primary_key=True)
        payload = sa.Column(sa.Text, nullable=False)

    return Built(model=Job)


@kind()
def queue_in_base(queue: MakeConfig) -> Built:
    class Base(QueueMixin, DeclarativeBase):
        __queue__ = queue()

        id: Mapped[int] = mapped_column(primary_key=True)

        @declared_attr.directive
        def __tablename__(cls) -> str:  # noqa: N805 - SQLAlchemy calls it with the class
            return cls.__name__.lower()

    class Job(Base):
        payload: Mapped[str]

    return Built(model=Job)


@kind()
def abstract_base(queue: MakeConfig) -> Built:
    class Base(DeclarativeBase):
        pass

    class JobBase(QueueMixin, Base):
        __abstract__ = True
        __queue__ = queue()

        id: Mapped[int] = mapped_column(primary_key=True)

    class Job(JobBase):
        __tablename__ = "job"

        payload: Mapped[str]

    return Built(model=Job)


@kind()
def unmapped_mixin(queue: MakeConfig) -> Built:
    class Base(DeclarativeBase):
        pass

    class JobMixin(QueueMixin):
        __tablename__ = "job"
        __queue__ = queue()

        id: Mapped[int] = mapped_column(primary_key=True)

    class Job(JobMixin, Base):
        payload: Mapped[str]

    return Built(model=Job)


@kind()
def given_table(queue: MakeConfig) -> Built:
    class Base(DeclarativeBase):
        pass

    class Job(QueueMixin, Base):
        __queue__ = queue()
        __table__ = sa.Table(
            "job",
            Base.metadata,
            sa.Column("id", sa.Integer, primary_key=True),
            sa.Column("payload", sa.Text, nullable=False),
        )

    return Built(model=Job)


class PlainObject:
    """A plain class for imperative mapping."""

    def __init__(self, **values: Any) -> None:
        for name, value in values.items():
            setattr(self, name, value)


@kind()
def imperative(queue: MakeConfig) -> Built:
    class Job(QueueMixin, PlainObject):
        __queue__ = queue()

    mapper_registry = registry()
    table = sa.Table(
        "job",
        mapper_registry.metadata,
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("payload", sa.Text, nullable=False),
    )
    mapper_registry.map_imperatively(Job, table)
    return Built(model=Job)


@kind()
def imperative_with_properties(queue: MakeConfig) -> Built:
    class Job(QueueMixin, PlainObject):
        __queue__ = queue(columns={"status": "state", "priority": "priority"})

    mapper_registry = registry()
    table = sa.Table(
        "job",
        mapper_registry.metadata,
        sa.Column("job_id", sa.Integer, primary_key=True),
        sa.Column("job_payload", sa.Text, nullable=False),
        sa.Column("job_state", sa.Text, nullable=False, server_default="pending"),
        sa.Column("urgency", sa.Integer, nullable=False, server_default="0"),
    )
    properties = {
        "id": table.c.job_id,
        "payload": table.c.job_payload,
        "state": table.c.job_state,
        "priority": table.c.urgency,
    }
    mapper_registry.map_imperatively(Job, table, properties=properties)
    return Built(model=Job)


@kind()
def decorated(queue: MakeConfig) -> Built:
    mapper_registry = registry()

    @mapper_registry.mapped
    class Job(QueueMixin):
        __tablename__ = "job"
        __queue__ = queue()

        id: Mapped[int] = mapped_column(primary_key=True)
        payload: Mapped[str]

    return Built(model=Job)


@kind()
def decorated_dataclass(queue: MakeConfig) -> Built:
    mapper_registry = registry()

    @mapper_registry.mapped_as_dataclass
    class Job(QueueMixin):
        __tablename__ = "job"
        __queue__ = queue()

        id: Mapped[int] = mapped_column(primary_key=True, init=False)
        payload: Mapped[str]

    return Built(model=Job)


@kind()
def dataclass(queue: MakeConfig) -> Built:
    class Base(MappedAsDataclass, DeclarativeBase):
        pass

    class Job(QueueMixin, Base):
        __tablename__ = "job"
        __queue__ = queue()

        id: Mapped[int] = mapped_column(primary_key=True, init=False)
        payload: Mapped[str]

    return Built(model=Job)


@kind()
def dataclass_with_abstract_base(queue: MakeConfig) -> Built:
    class Base(MappedAsDataclass, DeclarativeBase):
        pass

    class JobBase(QueueMixin, Base):
        __abstract__ = True
        __queue__ = queue(columns={"status": "state"})

        id: Mapped[int] = mapped_column(primary_key=True, init=False)

    class Job(JobBase):
        __tablename__ = "job"

        payload: Mapped[str]

    return Built(model=Job)


@kind()
def dataclass_for_one_model(queue: MakeConfig) -> Built:
    class Base(DeclarativeBase):
        pass

    class Job(QueueMixin, MappedAsDataclass, Base):
        __tablename__ = "job"
        __queue__ = queue()

        id: Mapped[int] = mapped_column(primary_key=True, init=False)
        payload: Mapped[str]

    return Built(model=Job)


@kind()
def sql_model(queue: MakeConfig) -> Built:
    class Base(sqlmodel.SQLModel, registry=registry()):
        pass

    class Job(QueueMixin, Base, table=True):
        __queue__ = queue()

        id: int | None = sqlmodel.Field(default=None, primary_key=True)
        payload: str

    return Built(model=Job)


@kind()
def sql_model_with_parent(queue: MakeConfig) -> Built:
    class Base(sqlmodel.SQLModel, registry=registry()):
        pass

    class JobBase(QueueMixin, Base):
        __queue__: ClassVar = queue()

        payload: str

    class Other(JobBase, table=True):
        id: int | None = sqlmodel.Field(default=None, primary_key=True)

    class Job(JobBase, table=True):
        id: int | None = sqlmodel.Field(default=None, primary_key=True)

    assert Other.__table__.c.status is not Job.__table__.c.status
    return Built(model=Job)


@kind()
def single_table_inheritance(queue: MakeConfig) -> Built:
    class Base(DeclarativeBase):
        pass

    class Job(QueueMixin, Base):
        __tablename__ = "job"
        __queue__ = queue()
        __mapper_args__: ClassVar = {"polymorphic_on": "kind", "polymorphic_identity": "job"}

        id: Mapped[int] = mapped_column(primary_key=True)
        kind: Mapped[str]
        payload: Mapped[str]

    class Letter(Job):
        __mapper_args__: ClassVar = {"polymorphic_identity": "letter"}

        address: Mapped[str | None]

    class Parcel(Letter):
        __mapper_args__: ClassVar = {"polymorphic_identity": "parcel"}

        weight: Mapped[int | None]

    classes = (Job, Letter, Parcel)
    return Built(model=Job, insert_into=lambda number: classes[number % 3])


@kind()
def joined_inheritance(queue: MakeConfig) -> Built:
    class Base(DeclarativeBase):
        pass

    class Job(QueueMixin, Base):
        __tablename__ = "job"
        __queue__ = queue()
        __mapper_args__: ClassVar = {"polymorphic_on": "kind", "polymorphic_identity": "job"}

        id: Mapped[int] = mapped_column(primary_key=True)
        kind: Mapped[str]
        payload: Mapped[str]

    class Letter(Job):
        __tablename__ = "letter"
        __mapper_args__: ClassVar = {"polymorphic_identity": "letter"}

        id: Mapped[int] = mapped_column(sa.ForeignKey(Job.id, ondelete="CASCADE"), primary_key=True)
        address: Mapped[str | None]

    classes = (Job, Letter)
    return Built(model=Job, insert_into=lambda number: classes[number % 2])
