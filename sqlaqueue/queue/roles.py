"""The queue attributes as columns: one factory a role, with explicit types.

Types are always explicit, because a ``type_annotation_map`` may give ``str`` or ``datetime`` another
meaning in the user's Base. Constants carry a Python default beside the server's: an INSERT by the ORM
then has nothing to read back for them, and plain SQL still gets the same value.
"""

from __future__ import annotations

import enum
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import StatementError
from sqlalchemy.types import TypeDecorator, TypeEngine

from sqlaqueue.exc import ConfigurationError
from sqlaqueue.queue.backend import backend
from sqlaqueue.queue.config import States


def literal_text(value: Any, type_: TypeEngine[Any]) -> str:
    """Return ``value`` as an SQL literal of ``type_``.

    State words stand as literals in every statement: PostgreSQL proves that a partial index may be used
    only against constants, which a bound parameter is not under a generic plan.
    """
    dialect = backend().dialect
    processor = type_.dialect_impl(dialect).literal_processor(dialect)
    if processor is None:
        msg = f"a status of type {type_!r} cannot be written as an SQL literal; use a string, an integer or an Enum"
        raise ConfigurationError(msg)
    return processor(value)


def status_type(states: States) -> TypeEngine[Any]:
    """Return the column type that holds the values of ``states``."""
    if isinstance(states.pending, enum.Enum):
        return sa.Enum(type(states.pending))
    if isinstance(states.pending, int):
        return sa.SmallInteger()
    return sa.String(max(20, *(len(str(word)) for _, word in states.items() if word is not None)))


def states_of(model: str, type_: TypeEngine[Any], states: States) -> States:
    """Return ``states`` in the values of the column that holds them.

    The default words stand for the members of an Enum that are called alike, and for nothing where there is none.

    :raises ConfigurationError: when the column cannot hold a value.
    """
    spoken = {state: _spoken(model, type_, state, word) for state, word in states.items()}
    if spoken["pending"] is None:
        msg = (
            f"{model}: its status column has no value {states.pending!r}; "
            "name one with QueueConfig(states=States(pending=...))"
        )
        raise ConfigurationError(msg)
    return States(**spoken)


def _spoken(model: str, type_: TypeEngine[Any], state: str, word: Any) -> Any:
    # A TypeDecorator has these of the type that it decorates.
    members = getattr(type_, "enum_class", None) or getattr(type_, "enums", None)
    by_default = word == getattr(States(), state)
    if members is not None and word is not None:
        alike = [member for member in members if member == word or (by_default and _is_called(member, word))]
        if isinstance(type_, TypeDecorator):
            # What it decorates is not what instances show, where it translates: that is what comes back.
            alike = [value for value in (*alike, word) if _comes_back(type_, value)]
        if alike:
            return alike[0]
        if by_default:
            return None
    elif word is None or _fits(type_, word):
        return word
    msg = (
        f"{model}: its status column cannot hold {word!r}, which QueueConfig says for {state}; "
        f"give one of its values with QueueConfig(states=States({state}=...)), or None"
    )
    raise ConfigurationError(msg)


def _comes_back(type_: TypeDecorator[Any], value: Any) -> bool:
    """Whether an application's own type over an Enum stores a value as one of its words, and reads it again."""
    dialect = backend().dialect
    stored, loaded = type_.bind_processor(dialect), type_.result_processor(dialect, None)
    try:
        word = value if stored is None else stored(value)
        again = word if loaded is None else loaded(word)
    except Exception:  # noqa: BLE001 - the application's own code, asked for a value that it may not know
        return False
    words: Any = getattr(type_, "enums", ())
    return bool(word in words and again == value)


def _is_called(member: Any, word: str) -> bool:
    return isinstance(member, enum.Enum) and (member.value == word or member.name.lower() == word)


def _fits(type_: TypeEngine[Any], word: Any) -> bool:
    try:
        literal_text(word, type_)
    except (TypeError, ValueError, AttributeError, StatementError):
        return False
    length = getattr(type_, "length", None)
    # An application's own type may write something shorter than the word.
    return length is None or isinstance(type_, TypeDecorator) or len(str(word)) <= length


@dataclass(frozen=True)
class Role:
    """How one queue attribute is stored when the library makes its column."""

    annotation: Any
    """The Python type, as ``Mapped[...]`` takes it."""
    make_type: Callable[[States], TypeEngine[Any]]
    nullable: bool = True
    constant: Callable[[States], Any] | None = None
    """The default that is a constant, if there is one."""
    server_now: bool = False
    """The default is the database's ``now()``."""

    def column(self, name: str, states: States, type_: TypeEngine[Any] | None = None) -> sa.Column[Any]:
        """Return a new column for this role, of its own type or of another one."""
        type_ = self.make_type(states) if type_ is None else type_
        options: dict[str, Any] = {"nullable": self.nullable}
        if self.constant is not None:
            options["default"] = self.constant(states)
            options["server_default"] = sa.literal_column(literal_text(options["default"], type_))
        elif self.server_now:
            options["server_default"] = sa.func.now()
        return sa.Column(name, type_, **options)


def _timestamp(_: States) -> TypeEngine[Any]:
    return sa.DateTime(timezone=True)


COLUMNS: dict[str, Role] = {
    "status": Role(Any, status_type, nullable=False, constant=lambda states: states.pending),
    "priority": Role(int, lambda _: sa.SmallInteger(), nullable=False, constant=lambda _: 0),
    "run_at": Role(datetime, _timestamp, nullable=False, server_now=True),
    "attempts": Role(int, lambda _: sa.Integer(), nullable=False, constant=lambda _: 0),
    "max_attempts": Role(int | None, lambda _: sa.SmallInteger()),
    "last_error": Role(str | None, lambda _: sa.Text()),
    "created_at": Role(datetime, _timestamp, nullable=False, server_now=True),
    "finished_at": Role(datetime | None, _timestamp),
    "lease_token": Role(uuid.UUID | None, lambda _: sa.Uuid()),
    "lease_expires_at": Role(datetime | None, _timestamp),
    "claimed_by": Role(str | None, lambda _: sa.Text()),
    "started_at": Role(datetime | None, _timestamp),
}
