"""The matrix of models: keys, names, types and places of columns and tables."""

import enum
import uuid
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql
from sqlalchemy.orm import (
    DeclarativeBase,
    Mapped,
    declared_attr,
    mapped_column,
    relationship,
)

from sqlaqueue import QueueMixin, States
from tests.models.kind import Built, MakeConfig, kind, payload

NAMING_CONVENTION = {
    "ix": "ix_%(column_0_label)s",
    "uq": "uq_%(table_name)s_%(column_0_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
    "pk": "pk_%(table_name)s",
}


def declare(queue: MakeConfig, **attributes: Any) -> type[Any]:
    """Map a class with the usual key and payload unless they are among the attributes."""

    class Base(DeclarativeBase):
        metadata = attributes.pop("metadata", None) or sa.MetaData()

    usual = {
        "__tablename__": "job",
        "__queue__": queue() if "__queue__" not in attributes else None,
        "id": sa.Column(sa.Integer, primary_key=True),
        "payload": sa.Column(sa.Text, nullable=False),
    }
    body = {name: value for name, value in {**usual, **attributes}.items() if value is not None}
    return type("Job", (QueueMixin, Base), body)


# -- keys --------------------------------------------------------------------------------------


@kind()
def composite_key(queue: MakeConfig) -> Built:
    model = declare(
        queue,
        id=None,
        tenant=mapped_column(sa.Uuid(), primary_key=True),
        number=mapped_column(sa.BigInteger(), primary_key=True, autoincrement=False),
    )

    def values(number: int) -> dict[str, Any]:
        return {**payload(number), "tenant": uuid.UUID(int=number % 3), "number": number}

    return Built(model=model, values=values)


@kind()
def uuid_key(queue: MakeConfig) -> Built:
    return Built(model=declare(queue, id=mapped_column(sa.Uuid(), primary_key=True, default=uuid.uuid4)))


@kind()
def uuid_key_of_the_server(queue: MakeConfig) -> Built:
    key = mapped_column(sa.Uuid(), primary_key=True, server_default=sa.func.gen_random_uuid())
    return Built(model=declare(queue, id=key))


@kind()
def natural_key(queue: MakeConfig) -> Built:
    model = declare(queue, id=None, payload=mapped_column(sa.String(50), primary_key=True))
    return Built(model=model)


@kind()
def identity_key(queue: MakeConfig) -> Built:
    return Built(model=declare(queue, id=mapped_column(sa.BigInteger(), sa.Identity(), primary_key=True)))


@kind()
def moment_as_key(queue: MakeConfig) -> Built:
    model = declare(queue, id=mapped_column(sa.DateTime(timezone=True), primary_key=True))

    def values(number: int) -> dict[str, Any]:
        return {**payload(number), "id": datetime.fromisoformat(f"2020-01-0{number + 1}T00:00:00.000001+00:00")}

    return Built(model=model, values=values)


# -- places and names --------------------------------------------------------------------------


@kind()
def schema(queue: MakeConfig) -> Built:
    return Built(model=declare(queue, __table_args__={"schema": "work"}), schemas=("work",))


@kind()
def schema_of_metadata(queue: MakeConfig) -> Built:
    return Built(model=declare(queue, metadata=sa.MetaData(schema="work")), schemas=("work",))


@kind()
def out_of_the_schema_of_metadata(queue: MakeConfig) -> Built:
    model = declare(queue, metadata=sa.MetaData(schema="work"), __table_args__={"schema": sa.schema.BLANK_SCHEMA})
    return Built(model=model, schemas=("work",))


@kind()
def translated_schema(queue: MakeConfig) -> Built:
    model = declare(queue, __table_args__={"schema": "per_tenant"})
    options = {"schema_translate_map": {"per_tenant": "Tenant One"}}
    return Built(model=model, schemas=("Tenant One",), options=options)


@kind()
def translated_default_schema(queue: MakeConfig) -> Built:
    return Built(model=declare(queue), schemas=("tenant",), options={"schema_translate_map": {None: "tenant"}})


@kind()
def naming_convention(queue: MakeConfig) -> Built:
    return Built(model=declare(queue, metadata=sa.MetaData(naming_convention=NAMING_CONVENTION)))


@kind()
def other_column_names(queue: MakeConfig) -> Built:
    model = declare(
        queue,
        __queue__=queue(columns={"status": "state", "priority": "priority", "run_at": "due", "attempts": "tries"}),
        id=mapped_column("job_id", sa.Integer, primary_key=True),
        payload=mapped_column("job_payload", sa.Text, nullable=False),
        state=mapped_column("job_state", sa.Text, nullable=False, default="pending"),
        priority=mapped_column("job_priority", sa.Integer, nullable=False, default=0),
    )
    return Built(model=model)


@kind()
def other_column_keys(queue: MakeConfig) -> Built:
    model = declare(
        queue,
        __queue__=queue(columns={"status": "state", "priority": "priority"}),
        id=sa.Column("job_id", sa.Integer, key="id_key", primary_key=True),
        payload=sa.Column("job_payload", sa.Text, key="payload_key"),
        state=sa.Column("job_state", sa.Text, key="state_key", nullable=False, default="pending"),
        priority=sa.Column("job_priority", sa.Integer, key="priority_key", nullable=False, default=0),
    )
    return Built(model=model)


@kind()
def quoted_names(queue: MakeConfig) -> Built:
    model = declare(
        queue,
        __tablename__='My "Order" 100%',
        __queue__=queue(columns={"status": "state", "run_at": "run_at"}),
        __table_args__={"schema": "Select"},
        id=mapped_column("Key of it", sa.Integer, primary_key=True),
        payload=mapped_column("user", sa.Text, nullable=False),
        state=mapped_column("State", sa.Text, nullable=False, default="pending"),
        run_at=mapped_column("found", sa.DateTime(timezone=True), server_default=sa.func.now()),
    )
    return Built(model=model, schemas=("Select",))


@kind()
def longest_names(queue: MakeConfig) -> Built:
    model = declare(
        queue,
        __tablename__="ä" * 31 + "t",
        __queue__=queue(columns={"status": "state", "run_at": "due"}),
        id=mapped_column("i" * 63, sa.Integer, primary_key=True),
        state=mapped_column("s" * 63, sa.Text, nullable=False, default="pending"),
        due=mapped_column("d" * 63, sa.DateTime(timezone=True), server_default=sa.func.now()),
    )
    return Built(model=model)


@kind()
def index_on_queue_columns(queue: MakeConfig) -> Built:
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

    return Built(model=Job)


@kind()
def partitioned_table(queue: MakeConfig) -> Built:
    model = declare(
        queue,
        __table_args__={"postgresql_partition_by": "HASH (tenant)"},
        id=None,
        tenant=mapped_column(sa.Integer, primary_key=True),
        number=mapped_column(sa.Integer, primary_key=True, autoincrement=False),
    )
    for part in range(2):
        partition = sa.DDL(f"CREATE TABLE part{part} PARTITION OF job FOR VALUES WITH (MODULUS 2, REMAINDER {part})")
        sa.event.listen(model.__table__, "after_create", partition)

    def values(number: int) -> dict[str, Any]:
        return {**payload(number), "tenant": number % 3, "number": number}

    return Built(model=model, values=values)


# -- types -------------------------------------------------------------------------------------


@kind()
def redefined_types(queue: MakeConfig) -> Built:
    class Base(DeclarativeBase):
        type_annotation_map = {
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

    return Built(model=Job)


class Phase(enum.Enum):
    NEW = 1
    RUNNING = 2
    DONE = 3
    DEAD = 4
    CALLED_OFF = 5


PHASES = States(
    pending=Phase.NEW,
    processing=Phase.RUNNING,
    completed=Phase.DONE,
    failed=Phase.DEAD,
    cancelled=Phase.CALLED_OFF,
)
PHASE_WORDS = {
    "pending": "NEW",
    "processing": "RUNNING",
    "completed": "DONE",
    "failed": "DEAD",
    "cancelled": "CALLED_OFF",
}
NUMBERS = States(pending=0, processing=1, completed=2, failed=-1, cancelled=-2)
NUMBER_WORDS = {"pending": "0", "processing": "1", "completed": "2", "failed": "-1", "cancelled": "-2"}


class Called(enum.StrEnum):
    """States called as the library calls them."""

    pending = "p"
    processing = "r"
    completed = "c"
    failed = "f"
    cancelled = "x"


@kind()
def enum_status(queue: MakeConfig) -> Built:
    model = declare(queue, __queue__=queue(states=PHASES), __table_args__={"schema": "work"})
    return Built(model=model, words=PHASE_WORDS, schemas=("work",))


@kind()
def enum_status_in_a_translated_schema(queue: MakeConfig) -> Built:
    model = declare(queue, __queue__=queue(states=PHASES))
    options = {"schema_translate_map": {None: "tenant"}}
    return Built(model=model, words=PHASE_WORDS, schemas=("tenant",), options=options)


@kind()
def adopted_enum_status(queue: MakeConfig) -> Built:
    type_ = sa.Enum(Called, values_callable=lambda members: [member.value for member in members], name="called")
    model = declare(
        queue,
        __queue__=queue(columns={"status": "status"}),
        status=mapped_column(type_, nullable=False, default=Called.pending),
    )
    return Built(model=model, words={member.name: member.value for member in Called})


@kind()
def adopted_enum_of_words(queue: MakeConfig) -> Built:
    type_ = postgresql.ENUM("pending", "processing", "completed", "dead", "cancelled", name="job_state")
    model = declare(
        queue,
        __queue__=queue(columns={"status": "status"}, states=States(failed="dead")),
        status=mapped_column(type_, nullable=False, server_default="pending"),
    )
    return Built(model=model, words={"failed": "dead"})


@kind()
def adopted_enum_in_a_string(queue: MakeConfig) -> Built:
    model = declare(
        queue,
        __queue__=queue(columns={"status": "status"}, states=PHASES),
        status=mapped_column(sa.Enum(Phase, native_enum=False), nullable=False, default=Phase.NEW),
    )
    return Built(model=model, words=PHASE_WORDS)


@kind()
def integer_status(queue: MakeConfig) -> Built:
    return Built(model=declare(queue, __queue__=queue(states=NUMBERS)), words=NUMBER_WORDS)


@kind()
def adopted_integer_status(queue: MakeConfig) -> Built:
    model = declare(
        queue,
        __queue__=queue(columns={"status": "phase"}, states=NUMBERS),
        phase=mapped_column(sa.Integer(), nullable=False, default=0),
    )
    return Built(model=model, words=NUMBER_WORDS)


@kind()
def other_words(queue: MakeConfig) -> Built:
    states = States(pending="new_waiting", processing="it's running", completed="complete", failed="f", cancelled="c")
    return Built(model=declare(queue, __queue__=queue(states=states)), words=dict(states.items()))


# -- attributes of the model's own, and attributes left out --------------------------------------


@kind()
def domain_status(queue: MakeConfig) -> Built:
    model = declare(
        queue,
        __queue__=queue(columns={"status": "queue_status", "created_at": "enqueued_at"}),
        status=mapped_column(sa.Text, nullable=False, default="draft"),
        created_at=mapped_column(sa.Text, nullable=False, default="long ago"),
    )
    return Built(model=model)


@kind()
def child_rows(queue: MakeConfig) -> Built:
    class Base(DeclarativeBase):
        pass

    class Job(QueueMixin, Base):
        __tablename__ = "job"
        __queue__ = queue()

        id: Mapped[int] = mapped_column(primary_key=True)
        payload: Mapped[str]
        parts: Mapped[list["Part"]] = relationship(cascade="all, delete-orphan", passive_deletes=True, lazy="selectin")

    class Part(Base):
        __tablename__ = "part"

        id: Mapped[int] = mapped_column(primary_key=True)
        job_id: Mapped[int] = mapped_column(sa.ForeignKey(Job.id, ondelete="CASCADE"), index=True)

    return Built(model=Job, others=(Part,))


@kind()
def without_order(queue: MakeConfig) -> Built:
    return Built(model=declare(queue, __queue__=queue(columns={"priority": None, "run_at": None})))


@kind()
def without_attempts(queue: MakeConfig) -> Built:
    return Built(model=declare(queue, __queue__=queue(columns={"attempts": None, "max_attempts": None})))


@kind("update_status")
def without_lease(queue: MakeConfig) -> Built:
    columns = {"lease_token": None, "lease_expires_at": None, "claimed_by": None}
    return Built(model=declare(queue, __queue__=queue(columns=columns)))


@kind()
def status_only(queue: MakeConfig) -> Built:
    columns = dict.fromkeys(OPTIONAL)
    return Built(model=declare(queue, __queue__=queue(columns=columns)))


OPTIONAL = (
    "priority",
    "run_at",
    "attempts",
    "max_attempts",
    "last_error",
    "created_at",
    "finished_at",
    "lease_token",
    "lease_expires_at",
    "claimed_by",
)


@kind("delete_returning")
def own_message(queue: MakeConfig) -> Built:
    return Built(model=declare(queue, __queue__=queue(columns={"status": None})))


@kind("delete_returning")
def own_message_with_nothing_else(queue: MakeConfig) -> Built:
    return Built(model=declare(queue, __queue__=queue(columns=dict.fromkeys((*OPTIONAL, "status")))))


@kind("delete_returning")
def own_message_of_many_types(queue: MakeConfig) -> Built:
    model = declare(
        queue,
        __queue__=queue(columns={"status": None, "run_at": "due"}),
        __tablename__="Job list",
        __table_args__={"schema": "work"},
        id=None,
        tenant=mapped_column("Tenant", sa.Uuid(), primary_key=True),
        number=mapped_column("the number", sa.BigInteger(), primary_key=True, autoincrement=False),
        phase=mapped_column(sa.Enum(Phase, schema="work"), default=Phase.NEW),
        data=mapped_column(postgresql.JSONB(), default=lambda: {"a": [1, None]}),
        words=mapped_column(postgresql.ARRAY(sa.Text()), default=lambda: ["a", 'b"']),
        raw=mapped_column(sa.LargeBinary(), default=b"\x00\xff"),
        amount=mapped_column(sa.Numeric(20, 4), default=1),
        nothing=mapped_column(postgresql.JSONB()),
        double=mapped_column(sa.BigInteger(), sa.Computed('"the number" * 2')),
    )

    def values(number: int) -> dict[str, Any]:
        return {**payload(number), "tenant": uuid.UUID(int=number % 3), "number": number}

    return Built(model=model, values=values, schemas=("work",))
