"""Kinds of models: types and values of the status, other types, and roles left out."""

import enum
import uuid
from datetime import datetime
from typing import Any, ClassVar

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from sqlaqueue import QueueMixin, States
from tests.mapping.kind import Built, MakeConfig, declare, kind, payload


@kind()
def redefined_types(queue: MakeConfig) -> Built:
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
PHASE_VALUES = {
    "pending": "NEW",
    "processing": "RUNNING",
    "completed": "DONE",
    "failed": "DEAD",
    "cancelled": "CALLED_OFF",
}
NUMBERS = States(pending=0, processing=1, completed=2, failed=-1, cancelled=-2)
NUMBER_VALUES = {"pending": "0", "processing": "1", "completed": "2", "failed": "-1", "cancelled": "-2"}


class LikeStates(enum.StrEnum):
    """An Enum whose members are named like the states."""

    pending = "p"
    processing = "r"
    completed = "c"
    failed = "f"
    cancelled = "x"


@kind()
def enum_status(queue: MakeConfig) -> Built:
    model = declare(queue, __queue__=queue(states=PHASES), __table_args__={"schema": "work"})
    return Built(model=model, status_values=PHASE_VALUES, schemas=("work",))


@kind()
def enum_status_in_a_translated_schema(queue: MakeConfig) -> Built:
    model = declare(queue, __queue__=queue(states=PHASES))
    options = {"schema_translate_map": {None: "tenant"}}
    return Built(model=model, status_values=PHASE_VALUES, schemas=("tenant",), options=options)


@kind()
def adopted_enum_status(queue: MakeConfig) -> Built:
    type_ = sa.Enum(LikeStates, values_callable=lambda members: [member.value for member in members], name="called")
    model = declare(
        queue,
        __queue__=queue(columns={"status": "status"}),
        status=mapped_column(type_, nullable=False, default=LikeStates.pending),
    )
    return Built(model=model, status_values={member.name: member.value for member in LikeStates})


@kind()
def adopted_enum_of_words(queue: MakeConfig) -> Built:
    type_ = postgresql.ENUM("pending", "processing", "completed", "dead", "cancelled", name="job_state")
    model = declare(
        queue,
        __queue__=queue(columns={"status": "status"}, states=States(failed="dead")),
        status=mapped_column(type_, nullable=False, server_default="pending"),
    )
    return Built(model=model, status_values={"failed": "dead"})


@kind()
def adopted_enum_in_a_string(queue: MakeConfig) -> Built:
    model = declare(
        queue,
        __queue__=queue(columns={"status": "status"}, states=PHASES),
        status=mapped_column(sa.Enum(Phase, native_enum=False), nullable=False, default=Phase.NEW),
    )
    return Built(model=model, status_values=PHASE_VALUES)


@kind()
def integer_status(queue: MakeConfig) -> Built:
    return Built(model=declare(queue, __queue__=queue(states=NUMBERS)), status_values=NUMBER_VALUES)


@kind()
def adopted_integer_status(queue: MakeConfig) -> Built:
    model = declare(
        queue,
        __queue__=queue(columns={"status": "phase"}, states=NUMBERS),
        phase=mapped_column(sa.Integer(), nullable=False, default=0),
    )
    return Built(model=model, status_values=NUMBER_VALUES)


@kind()
def other_words(queue: MakeConfig) -> Built:
    states = States(pending="new_waiting", processing="it's running", completed="complete", failed="f", cancelled="c")
    return Built(model=declare(queue, __queue__=queue(states=states)), status_values=dict(states.items()))


# -- attributes of the application, and roles left out --------------------------------------


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
    return Built(model=declare(queue, __queue__=queue(rows_are_messages=True)))


@kind("delete_returning")
def own_message_with_nothing_else(queue: MakeConfig) -> Built:
    return Built(model=declare(queue, __queue__=queue(rows_are_messages=True, adopt={})))


@kind("delete_returning")
def own_message_of_many_types(queue: MakeConfig) -> Built:
    model = declare(
        queue,
        __queue__=queue(rows_are_messages=True, columns={"run_at": "due"}),
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
        double=mapped_column(sa.BigInteger(), sa.Computed('"the number" * 2', persisted=True)),
    )

    def values(number: int) -> dict[str, Any]:
        return {**payload(number), "tenant": uuid.UUID(int=number % 3), "number": number}

    return Built(model=model, values=values, schemas=("work",))
