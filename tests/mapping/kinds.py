"""The kinds of models of the test matrix: ways to map a class, types of columns, names, keys and schemas."""

import enum
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, ClassVar

import sqlalchemy as sa
import sqlmodel
from sqlalchemy.dialects import postgresql
from sqlalchemy.orm import (
    DeclarativeBase,
    DeclarativeBaseNoMeta,
    Mapped,
    MappedAsDataclass,
    declarative_base,
    declared_attr,
    mapped_column,
    registry,
    relationship,
)

from sqlaqueue import QueueMixin, States
from tests.mapping.conftest import KINDS, PHASES, MakeConfig, Phase, declare, kind, payload
from tests.models import new_base

__all__ = ["KINDS"]


# -- ways to map a class -----------------------------------------------------------------------------------------------


@kind()
def plain(queue: MakeConfig) -> Any:
    class Job(QueueMixin, new_base()):
        __tablename__ = "job"
        __queue__ = queue()
        id: Mapped[int] = mapped_column(primary_key=True)
        payload: Mapped[str]

    return Job


@kind()
def base_before_mixin(queue: MakeConfig) -> Any:
    class Job(new_base(), QueueMixin):
        __tablename__ = "job"
        __queue__ = queue()
        id: Mapped[int] = mapped_column(primary_key=True)
        payload: Mapped[str]

    return Job


@kind()
def without_metaclass(queue: MakeConfig) -> Any:
    class Base(DeclarativeBaseNoMeta):
        pass

    class Job(QueueMixin, Base):
        __tablename__ = "job"
        __queue__ = queue()
        id: Mapped[int] = mapped_column(primary_key=True)
        payload: Mapped[str]

    return Job


@kind()
def old_declarative_base(queue: MakeConfig) -> Any:
    Base: Any = declarative_base()  # noqa: N806 - the usual name

    class Job(QueueMixin, Base):
        __tablename__ = "job"
        __queue__ = queue()
        id = sa.Column(sa.Integer, primary_key=True)
        payload = sa.Column(sa.Text, nullable=False)

    return Job


@kind()
def queue_in_base(queue: MakeConfig) -> Any:
    class Base(QueueMixin, DeclarativeBase):
        __queue__ = queue()
        id: Mapped[int] = mapped_column(primary_key=True)

        @declared_attr.directive
        def __tablename__(cls) -> str:  # noqa: N805 - SQLAlchemy calls it with the class
            return cls.__name__.lower()

    class Job(Base):
        payload: Mapped[str]

    return Job


@kind()
def abstract_base(queue: MakeConfig) -> Any:
    class JobBase(QueueMixin, new_base()):
        __abstract__ = True
        __queue__ = queue()
        id: Mapped[int] = mapped_column(primary_key=True)

    class Job(JobBase):
        __tablename__ = "job"
        payload: Mapped[str]

    return Job


@kind()
def unmapped_mixin(queue: MakeConfig) -> Any:
    class JobMixin(QueueMixin):
        __tablename__ = "job"
        __queue__ = queue()
        id: Mapped[int] = mapped_column(primary_key=True)

    class Job(JobMixin, new_base()):
        payload: Mapped[str]

    return Job


@kind()
def given_table(queue: MakeConfig) -> Any:
    base = new_base()

    class Job(QueueMixin, base):
        __queue__ = queue()
        __table__ = sa.Table(
            "job",
            base.metadata,
            sa.Column("id", sa.Integer, primary_key=True),
            sa.Column("payload", sa.Text, nullable=False),
        )

    return Job


class PlainObject:
    def __init__(self, **values: Any) -> None:
        for name, value in values.items():
            setattr(self, name, value)


@kind()
def imperative(queue: MakeConfig) -> Any:
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
    return Job


@kind()
def imperative_with_properties(queue: MakeConfig) -> Any:
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
    return Job


@kind()
def decorated(queue: MakeConfig) -> Any:
    mapper_registry = registry()

    @mapper_registry.mapped
    class Job(QueueMixin):
        __tablename__ = "job"
        __queue__ = queue()
        id: Mapped[int] = mapped_column(primary_key=True)
        payload: Mapped[str]

    return Job


@kind()
def decorated_dataclass(queue: MakeConfig) -> Any:
    mapper_registry = registry()

    @mapper_registry.mapped_as_dataclass
    class Job(QueueMixin):
        __tablename__ = "job"
        __queue__ = queue()
        id: Mapped[int] = mapped_column(primary_key=True, init=False)
        payload: Mapped[str]

    return Job


@kind()
def dataclass(queue: MakeConfig) -> Any:
    class Base(MappedAsDataclass, DeclarativeBase):
        pass

    class Job(QueueMixin, Base):
        __tablename__ = "job"
        __queue__ = queue()
        id: Mapped[int] = mapped_column(primary_key=True, init=False)
        payload: Mapped[str]

    return Job


@kind()
def dataclass_with_abstract_base(queue: MakeConfig) -> Any:
    class Base(MappedAsDataclass, DeclarativeBase):
        pass

    class JobBase(QueueMixin, Base):
        __abstract__ = True
        __queue__ = queue(columns={"status": "state"})
        id: Mapped[int] = mapped_column(primary_key=True, init=False)

    class Job(JobBase):
        __tablename__ = "job"
        payload: Mapped[str]

    return Job


@kind()
def dataclass_for_one_model(queue: MakeConfig) -> Any:
    class Job(QueueMixin, MappedAsDataclass, new_base()):
        __tablename__ = "job"
        __queue__ = queue()
        id: Mapped[int] = mapped_column(primary_key=True, init=False)
        payload: Mapped[str]

    return Job


@kind()
def sql_model(queue: MakeConfig) -> Any:
    class Base(sqlmodel.SQLModel, registry=registry()):
        pass

    class Job(QueueMixin, Base, table=True):
        __queue__ = queue()
        id: int | None = sqlmodel.Field(default=None, primary_key=True)
        payload: str

    return Job


@kind()
def sql_model_with_parent(queue: MakeConfig) -> Any:
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
    return Job


@kind()
def single_table_inheritance(queue: MakeConfig) -> Any:
    class Job(QueueMixin, new_base()):
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

    return Job


@kind()
def joined_inheritance(queue: MakeConfig) -> Any:
    class Job(QueueMixin, new_base()):
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

    return Job


# -- types and values of the status, and other types -------------------------------------------------------------------


PHASE_VALUES = {state: phase.name for state, phase in PHASES.items() if isinstance(phase, enum.Enum)}
NUMBERS = States(pending=0, processing=1, completed=2, failed=-1, cancelled=-2)
NUMBER_VALUES = {state: str(number) for state, number in NUMBERS.items()}
OTHER_WORDS = States(pending="new_waiting", processing="it's running", completed="complete", failed="f", cancelled="c")
WORK = {"schema": "work"}


class LikeStates(enum.StrEnum):
    """An Enum whose members are named like the states."""

    pending = "p"
    processing = "r"
    completed = "c"
    failed = "f"
    cancelled = "x"


@kind()
def redefined_types(queue: MakeConfig) -> Any:
    class Base(DeclarativeBase):
        type_annotation_map: ClassVar = {
            str: sa.String(7),
            int: sa.BigInteger(),
            datetime: sa.Date(),
            uuid.UUID: sa.LargeBinary(),
        }

    class Job(QueueMixin, Base):
        __tablename__ = "job"
        __queue__ = queue()
        id: Mapped[int] = mapped_column(primary_key=True)
        payload: Mapped[str]

    return Job


@kind(status_values=PHASE_VALUES, schemas=("work",))
def enum_status(queue: MakeConfig) -> Any:
    return declare(queue(states=PHASES), __table_args__=WORK)


@kind(status_values=PHASE_VALUES, schemas=("tenant",), options={"schema_translate_map": {None: "tenant"}})
def enum_status_in_a_translated_schema(queue: MakeConfig) -> Any:
    return declare(queue(states=PHASES))


@kind(status_values={member.name: member.value for member in LikeStates})
def adopted_enum_status(queue: MakeConfig) -> Any:
    type_ = sa.Enum(LikeStates, values_callable=lambda members: [member.value for member in members], name="called")
    status = mapped_column(type_, nullable=False, default=LikeStates.pending)
    return declare(queue(columns={"status": "status"}), status=status)


@kind(status_values={"failed": "dead"})
def adopted_enum_of_words(queue: MakeConfig) -> Any:
    type_ = postgresql.ENUM("pending", "processing", "completed", "dead", "cancelled", name="job_state")
    status = mapped_column(type_, nullable=False, server_default="pending")
    return declare(queue(columns={"status": "status"}, states=States(failed="dead")), status=status)


@kind(status_values=PHASE_VALUES)
def adopted_enum_in_a_string(queue: MakeConfig) -> Any:
    status = mapped_column(sa.Enum(Phase, native_enum=False), nullable=False, default=Phase.NEW)
    return declare(queue(columns={"status": "status"}, states=PHASES), status=status)


@kind(status_values=NUMBER_VALUES)
def integer_status(queue: MakeConfig) -> Any:
    return declare(queue(states=NUMBERS))


@kind(status_values=NUMBER_VALUES)
def adopted_integer_status(queue: MakeConfig) -> Any:
    phase = mapped_column(sa.Integer(), nullable=False, default=0)
    return declare(queue(columns={"status": "phase"}, states=NUMBERS), phase=phase)


@kind(status_values=dict(OTHER_WORDS.items()))
def other_words(queue: MakeConfig) -> Any:
    return declare(queue(states=OTHER_WORDS))


# -- attributes of the application, and roles left out -----------------------------------------------------------------


@kind()
def domain_status(queue: MakeConfig) -> Any:
    return declare(
        queue(columns={"status": "queue_status", "created_at": "enqueued_at"}),
        status=mapped_column(sa.Text, nullable=False, default="draft"),
        created_at=mapped_column(sa.Text, nullable=False, default="long ago"),
    )


@kind()
def without_order(queue: MakeConfig) -> Any:
    return declare(queue(columns={"priority": None, "run_at": None}))


@kind()
def without_attempts(queue: MakeConfig) -> Any:
    return declare(queue(columns={"attempts": None, "max_attempts": None}))


@kind("update_status")
def without_lease(queue: MakeConfig) -> Any:
    return declare(queue(columns={"lease_token": None, "lease_expires_at": None, "claimed_by": None}))


@kind()
def status_only(queue: MakeConfig) -> Any:
    optional = "priority run_at attempts max_attempts last_error created_at finished_at"
    return declare(queue(columns=dict.fromkeys([*optional.split(), "lease_token", "lease_expires_at", "claimed_by"])))


@kind("delete_returning")
def own_message(queue: MakeConfig) -> Any:
    return declare(queue(rows_are_messages=True))


@kind("delete_returning")
def own_message_with_nothing_else(queue: MakeConfig) -> Any:
    return declare(queue(rows_are_messages=True, adopt={}))


def composite_values(tenant: Callable[[int], Any]) -> Callable[[int], dict[str, Any]]:
    """Return what returns the values of a job whose key is a tenant and a number."""
    return lambda number: {**payload(number), "tenant": tenant(number % 3), "number": number}


@kind("delete_returning", values=composite_values(lambda tenant: uuid.UUID(int=tenant)), schemas=("work",))
def own_message_of_many_types(queue: MakeConfig) -> Any:
    return declare(
        queue(rows_are_messages=True, columns={"run_at": "due"}),
        __tablename__="Job list",
        __table_args__=WORK,
        id=None,
        tenant=mapped_column("Tenant", sa.Uuid(), primary_key=True),
        number=mapped_column("the number", sa.BigInteger(), primary_key=True, autoincrement=False),
        phase=mapped_column(sa.Enum(Phase, schema="work"), default=Phase.NEW),
        data=mapped_column(postgresql.JSONB(), default=lambda: {"a": [1, None]}),
        words=mapped_column(postgresql.ARRAY(sa.Text()), default=lambda: ["a", 'b"']),
        raw=mapped_column(sa.LargeBinary(), default=b"\x00\xff"),
        amount=mapped_column(sa.Numeric(20, 4), default=1),
        nothing=mapped_column(postgresql.JSONB()),
        double=mapped_column(sa.BigInteger(), sa.Computed('"the number" * 2', persisted=True)),
    )


# -- keys --------------------------------------------------------------------------------------------------------------


@kind(values=composite_values(lambda tenant: uuid.UUID(int=tenant)))
def composite_key(queue: MakeConfig) -> Any:
    number = mapped_column(sa.BigInteger(), primary_key=True, autoincrement=False)
    return declare(queue(), id=None, tenant=mapped_column(sa.Uuid(), primary_key=True), number=number)


@kind()
def uuid_key(queue: MakeConfig) -> Any:
    return declare(queue(), id=mapped_column(sa.Uuid(), primary_key=True, default=uuid.uuid4))


@kind()
def uuid_key_of_the_server(queue: MakeConfig) -> Any:
    return declare(queue(), id=mapped_column(sa.Uuid(), primary_key=True, server_default=sa.func.gen_random_uuid()))


@kind()
def natural_key(queue: MakeConfig) -> Any:
    return declare(queue(), id=None, payload=mapped_column(sa.String(50), primary_key=True))


@kind()
def identity_key(queue: MakeConfig) -> Any:
    return declare(queue(), id=mapped_column(sa.BigInteger(), sa.Identity(), primary_key=True))


@kind(values=lambda number: {**payload(number), "id": datetime(2020, 1, number + 1, microsecond=1, tzinfo=UTC)})
def moment_as_key(queue: MakeConfig) -> Any:
    return declare(queue(), id=mapped_column(sa.DateTime(timezone=True), primary_key=True))


# -- schemas and names -------------------------------------------------------------------------------------------------


@kind(schemas=("work",))
def schema(queue: MakeConfig) -> Any:
    return declare(queue(), __table_args__=WORK)


@kind(schemas=("work",))
def schema_of_metadata(queue: MakeConfig) -> Any:
    return declare(queue(), metadata=sa.MetaData(schema="work"))


@kind(schemas=("work",))
def out_of_the_schema_of_metadata(queue: MakeConfig) -> Any:
    return declare(queue(), metadata=sa.MetaData(schema="work"), __table_args__={"schema": sa.schema.BLANK_SCHEMA})


@kind(schemas=("Tenant One",), options={"schema_translate_map": {"per_tenant": "Tenant One"}})
def translated_schema(queue: MakeConfig) -> Any:
    return declare(queue(), __table_args__={"schema": "per_tenant"})


@kind(schemas=("tenant",), options={"schema_translate_map": {None: "tenant"}})
def translated_default_schema(queue: MakeConfig) -> Any:
    return declare(queue())


NAMING_CONVENTION = {
    "ix": "ix_%(column_0_label)s",
    "uq": "uq_%(table_name)s_%(column_0_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
    "pk": "pk_%(table_name)s",
}


@kind()
def naming_convention(queue: MakeConfig) -> Any:
    return declare(queue(), metadata=sa.MetaData(naming_convention=NAMING_CONVENTION))


@kind()
def other_column_names(queue: MakeConfig) -> Any:
    return declare(
        queue(columns={"status": "state", "priority": "priority", "run_at": "due", "attempts": "tries"}),
        id=mapped_column("job_id", sa.Integer, primary_key=True),
        payload=mapped_column("job_payload", sa.Text, nullable=False),
        state=mapped_column("job_state", sa.Text, nullable=False, default="pending"),
        priority=mapped_column("job_priority", sa.Integer, nullable=False, default=0),
    )


@kind()
def other_column_keys(queue: MakeConfig) -> Any:
    return declare(
        queue(columns={"status": "state", "priority": "priority"}),
        id=sa.Column("job_id", sa.Integer, key="id_key", primary_key=True),
        payload=sa.Column("job_payload", sa.Text, key="payload_key"),
        state=sa.Column("job_state", sa.Text, key="state_key", nullable=False, default="pending"),
        priority=sa.Column("job_priority", sa.Integer, key="priority_key", nullable=False, default=0),
    )


@kind(schemas=("Select",))
def quoted_names(queue: MakeConfig) -> Any:
    return declare(
        queue(columns={"status": "state", "run_at": "run_at"}),
        __tablename__='My "Order" 100%',
        __table_args__={"schema": "Select"},
        id=mapped_column("Key of it", sa.Integer, primary_key=True),
        payload=mapped_column("user", sa.Text, nullable=False),
        state=mapped_column("State", sa.Text, nullable=False, default="pending"),
        run_at=mapped_column("found", sa.DateTime(timezone=True), server_default=sa.func.now()),
    )


@kind()
def longest_names(queue: MakeConfig) -> Any:
    return declare(
        queue(columns={"status": "state", "run_at": "due"}),
        __tablename__="ä" * 31 + "t",
        id=mapped_column("i" * 63, sa.Integer, primary_key=True),
        state=mapped_column("s" * 63, sa.Text, nullable=False, default="pending"),
        due=mapped_column("d" * 63, sa.DateTime(timezone=True), server_default=sa.func.now()),
    )


# -- indexes, partitions, and rows that refer to jobs ------------------------------------------------------------------


@kind()
def index_on_queue_columns(queue: MakeConfig) -> Any:
    class Base(DeclarativeBase):
        @declared_attr.directive
        def __table_args__(cls) -> Any:  # noqa: N805 - SQLAlchemy calls it with the class
            return (sa.Index(None, "created_at", "priority"), sa.CheckConstraint("priority > -10", name="sane"))

        metadata = sa.MetaData(naming_convention=NAMING_CONVENTION)

    class Job(Base, QueueMixin):
        __tablename__ = "job"
        __queue__ = queue()
        id: Mapped[int] = mapped_column(primary_key=True)
        payload: Mapped[str]

    return Job


@kind(values=composite_values(int))
def partitioned_table(queue: MakeConfig) -> Any:
    model = declare(
        queue(),
        __table_args__={"postgresql_partition_by": "HASH (tenant)"},
        id=None,
        tenant=mapped_column(sa.Integer, primary_key=True),
        number=mapped_column(sa.Integer, primary_key=True, autoincrement=False),
    )
    for part in range(2):
        partition = sa.DDL(f"CREATE TABLE part{part} PARTITION OF job FOR VALUES WITH (MODULUS 2, REMAINDER {part})")
        sa.event.listen(model.__table__, "after_create", partition)
    return model


@kind()
def child_rows(queue: MakeConfig) -> Any:
    base = new_base()

    class Part(base):
        __tablename__ = "part"
        id: Mapped[int] = mapped_column(primary_key=True)
        job_id: Mapped[int] = mapped_column(sa.ForeignKey("job.id", ondelete="CASCADE"), index=True)

    class Job(QueueMixin, base):
        __tablename__ = "job"
        __queue__ = queue()
        id: Mapped[int] = mapped_column(primary_key=True)
        payload: Mapped[str]
        # It keeps the class Part, which nothing else refers to.
        parts: Mapped[list[Part]] = relationship(
            Part, cascade="all, delete-orphan", passive_deletes=True, lazy="selectin"
        )

    return Job
