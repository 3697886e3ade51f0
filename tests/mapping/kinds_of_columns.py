"""Kinds of models: keys, names, schemas and partitions, and rows that refer to jobs."""

import uuid
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import (
    DeclarativeBase,
    Mapped,
    declared_attr,
    mapped_column,
    relationship,
)

from sqlaqueue import QueueMixin
from tests.mapping.kind import Built, MakeConfig, declare, kind, payload

NAMING_CONVENTION = {
    "ix": "ix_%(column_0_label)s",
    "uq": "uq_%(table_name)s_%(column_0_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
    "pk": "pk_%(table_name)s",
}


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


# -- schemas and names --------------------------------------------------------------------------


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
