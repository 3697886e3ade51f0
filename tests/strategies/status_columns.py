"""Each kind of status column that a queue may have, and a walk through every statement that reads or writes one."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql
from sqlalchemy.orm import DeclarativeBase, mapped_column

from sqlaqueue import QueueConfig, QueueMixin, States
from sqlaqueue.queue.roles import literal_text
from sqlaqueue.strategies.existing_messages import ExistingMessages
from tests.models import shared

STRATEGIES = ("update_status", "batch_select", "delete_returning", "existing_messages")


class Phase(enum.Enum):
    NEW = "n"
    RUNNING = "r"
    DONE = "d"
    DEAD = "x"
    OFF = "o"


PHASES = States(
    pending=Phase.NEW, processing=Phase.RUNNING, completed=Phase.DONE, failed=Phase.DEAD, cancelled=Phase.OFF
)
NUMBERS = States(pending=0, processing=1, completed=2, failed=-1, cancelled=-2)
WORDS = tuple(word for _, word in States().items())


class Letter(sa.types.TypeDecorator[Phase]):
    """An application's own type: one letter for a phase."""

    impl = sa.String(1)
    cache_ok = True

    def process_bind_param(self, value: Phase | None, dialect: sa.Dialect) -> str | None:
        return value and value.value

    def process_result_value(self, value: str | None, dialect: sa.Dialect) -> Phase | None:
        return None if value is None else Phase(value)


class Word(sa.types.TypeDecorator[str]):
    """An application's own type over an enum of the database."""

    impl = sa.Enum(*WORDS, name="decorated")
    cache_ok = True


class Domain(sa.types.UserDefinedType[str]):
    """A domain, which the database has already: a comparison of an enum's domain with a literal it refuses."""

    cache_ok = True

    def get_col_spec(self, **_: Any) -> str:
        return "some_word"

    def literal_processor(self, dialect: sa.Dialect) -> Callable[[str], str]:
        return "'{}'".format


DOMAIN = "CREATE DOMAIN some_word AS text CHECK (value <> '')"


KINDS: dict[str, tuple[States, Callable[[], Any]]] = {
    "text": (States(), sa.Text),
    "varchar": (States(), lambda: sa.String(20)),
    "smallint": (NUMBERS, sa.SmallInteger),
    "integer": (NUMBERS, sa.Integer),
    "enum": (PHASES, lambda: sa.Enum(Phase)),
    "enum_of_words": (States(), lambda: postgresql.ENUM(*WORDS, name="Word")),
    "enum_elsewhere": (PHASES, lambda: sa.Enum(Phase, schema="Else where")),
    "enum_in_a_string": (PHASES, lambda: sa.Enum(Phase, native_enum=False)),
    "decorated": (PHASES, Letter),
    "decorated_enum": (States(), Word),
    "domain": (States(), Domain),
}


@dataclass(frozen=True)
class Model:
    """A queue with a status of some kind."""

    job: type[Any]
    note: type[Any] | None
    """The class of its messages, where the application has those."""
    states: dict[str, str]
    """The states by the words that the database has for them."""


@shared
def make_model(kind: str, strategy: str) -> Model:
    class Base(DeclarativeBase):
        pass

    states, make_type = KINDS[kind]
    type_ = make_type()
    note: type[Any] | None = None
    chosen: Any = strategy
    columns: dict[str, str | None] = {"status": "status", "last_error": "error"}
    if strategy == "existing_messages":
        body = {
            "__tablename__": "note",
            "id": mapped_column(sa.Integer, primary_key=True),
            "about": mapped_column(sa.Integer, nullable=False),
            "state": mapped_column(type_, nullable=False, default=states.pending),
        }
        note = type("Note", (Base,), body)
        chosen = ExistingMessages(note, job="about", waiting={"state": states.pending})
        columns["priority"] = None
    body = {
        "__tablename__": "job",
        "__queue__": QueueConfig(
            strategy=chosen, states=states, columns=columns, max_attempts=1, retention={"completed": 60, "failed": 60}
        ),
        "id": mapped_column(sa.Integer, primary_key=True),
        "status": mapped_column(type_, nullable=False, default=states.pending),
        # Shorter than what a rescue writes into it.
        "error": mapped_column(sa.String(20)),
    }
    job = type("Job", (QueueMixin, Base), body)
    words = {literal_text(word, type_).strip("'"): state for state, word in states.items()}
    return Model(job, note, words)
