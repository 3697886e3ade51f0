"""The queue attributes as columns, and the values of the status column.

Columns have explicit types, because the ``type_annotation_map`` of the application's Base may map ``str`` or
``datetime`` to other types. Defaults are the server's: an INSERT names no column that the program has not set, so that
a role which may insert only the application's own columns can enqueue, and plain SQL gets the same values. The ORM
reads them back with the key. Only generated constructors, of dataclasses and SQLModels, set constants in Python.
"""

from __future__ import annotations

import enum
import sys
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.exc import StatementError
from sqlalchemy.orm import InstanceState
from sqlalchemy.orm.attributes import instance_state
from sqlalchemy.types import TypeDecorator, TypeEngine

from sqlaqueue.exc import ConfigurationError
from sqlaqueue.queue.options import States
from sqlaqueue.sql.portable import MomentOfInsert
from sqlaqueue.sql.types import NEUTRAL, session_setting

UNCHANGED_ROLES = ("priority", "created_at", "max_attempts")
"""The roles that the library does not change while a job is in the queue."""

# -- traceparent -------------------------------------------------------------------------------------------------------
# The trace of a job: the ``traceparent`` of W3C Trace Context, taken from OpenTelemetry or from the transaction.
#
# The column is filled when a row is inserted: by the span that was current when the instance was made, by the one
# that is current in this process, or else by the setting ``sqlaqueue.traceparent`` of the transaction, which its
# server default reads. So COPY, ``INSERT ... SELECT`` and plain SQL continue a trace as well.
#
# The span of the instance comes first, as a flush may be later than the span: what a handler adds to its session is
# flushed when its run is settled.


SETTING = "sqlaqueue.traceparent"
"""The setting of a transaction that inserts jobs without the ORM: ``SET LOCAL sqlaqueue.traceparent = '00-...-01'``."""

_LENGTH = 55
"""The characters of a ``traceparent``."""

_MADE_IN = "sqlaqueue_made_in"
"""The key in ``InstanceState.info`` of the span that was current when the instance was made."""


def current_traceparent() -> str | None:
    """Return the current span of OpenTelemetry as a ``traceparent``; None without one.

    OpenTelemetry is not imported: a program without it has no span. Plain SQL that enqueues hands it over::

        traceparent = current_traceparent()
        session.execute(
            sa.text("SELECT set_config('sqlaqueue.traceparent', :traceparent, true)"), {"traceparent": traceparent}
        )
    """
    trace: Any = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return None
    context = trace.get_current_span().get_span_context()
    if not context.is_valid:
        return None
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def made_in(state: InstanceState[Any]) -> str | None:
    """Return the span that was current when an instance was made; None if there was none."""
    made: str | None = state.info.get(_MADE_IN)
    return made


def trace_instances(cls: type[Any], attribute: str) -> None:
    """Let the instances of a mapped class, and of its subclasses, store the span in which they are made."""

    def remember(instance: Any, *_: Any) -> None:
        current = current_traceparent()
        if current is not None:
            instance_state(instance).info[_MADE_IN] = current

    def fill(_: Any, __: Any, instance: Any) -> None:
        if instance.__dict__.get(attribute) is None:
            made = made_in(instance_state(instance))
            if made is not None:
                setattr(instance, attribute, made)

    event.listen(cls, "init", remember, propagate=True)
    event.listen(cls, "before_insert", fill, propagate=True)


def server_default() -> sa.ColumnElement[Any]:
    """Return the server default of the column: the setting of the transaction, NULL if it is not set."""
    return session_setting(SETTING)


def check_type(name: str, column: sa.Column[Any]) -> None:
    """Refuse a column that cannot store a trace: each INSERT in a span would fail.

    :param name: of the attribute, for the error.
    :raises ConfigurationError: for a type other than a text of at least 55 characters, or one of the application's own.
    """
    type_ = column.type
    try:
        # A TypeDecorator and a type that is unknown to SQLAlchemy may convert it.
        fits = isinstance(type_, sa.types.TypeDecorator) or type_.python_type is str
    except NotImplementedError:
        fits = True
    length = getattr(type_, "length", None)
    if not fits or (length is not None and length < _LENGTH):
        msg = (
            f"{name}: the role 'traceparent' stores texts of {_LENGTH} characters, and the column is {type_!r}; use "
            "Text, or name another attribute in QueueConfig(columns={'traceparent': ...})"
        )
        raise ConfigurationError(msg)


def set_insert_default(column: sa.Column[Any]) -> None:
    """Let INSERT statements of this process write the current span, or else the setting.

    A column that has a default keeps it.

    It belongs to the column of the table, and to no field: a field of a dataclass has its own default, None.
    """
    if column.default is not None:
        return
    # A function in a bound parameter is called for each execution, so the statement stays the same.
    current = sa.bindparam("sqlaqueue_traceparent", callable_=current_traceparent, type_=sa.Text(), unique=True)
    default = sa.ColumnDefault(sa.func.coalesce(current, server_default(), type_=sa.Text()))
    default._set_parent_with_dispatch(column)  # noqa: SLF001 - SQLAlchemy has no public way to add a default to a column


def is_filled_here(column: sa.Column[Any]) -> bool:
    """Return whether INSERT statements fill the column as :func:`set_insert_default` has it, by no default of its own.

    Tables are copied with their defaults, so the default itself tells.
    """
    parts = getattr(getattr(column.default, "arg", None), "clauses", ())
    return any(getattr(each, "callable", None) is current_traceparent for each in parts)


def literal_text(value: Any, type_: TypeEngine[Any]) -> str:
    """Return ``value`` as an SQL literal of ``type_``.

    Statements contain status values as literals, because PostgreSQL uses a partial index only for constants, not for
    parameters of a generic plan.

    :raises ConfigurationError: if values of ``type_`` have no literals.
    """
    dialect = NEUTRAL
    processor = type_.dialect_impl(dialect).literal_processor(dialect)
    if processor is None:
        msg = f"a status of type {type_!r} has no SQL literals; use a text, an integer or an Enum type"
        raise ConfigurationError(msg)
    return processor(value)


def status_type(states: States) -> TypeEngine[Any]:
    """Return the type of a status column for the values of ``states``."""
    if isinstance(states.pending, enum.Enum):
        return sa.Enum(type(states.pending))
    if isinstance(states.pending, int):
        return sa.SmallInteger()
    return sa.String(max(20, *(len(str(value)) for _, value in states.items() if value is not None)))


def states_in(model: str, type_: TypeEngine[Any], states: States) -> States:
    """Return ``states`` with values of the type of the status column.

    For an Enum, a default value becomes the member with that name or value, or None if there is no such member.

    :raises ConfigurationError: if the type cannot store a value.
    """
    values = {state: _value_in(model, type_, state, value) for state, value in states.items()}
    if values["pending"] is None:
        msg = (
            f"{model}: its status column has no value {states.pending!r}; "
            "name its value with QueueConfig(states=States(pending=...))"
        )
        raise ConfigurationError(msg)
    return States(**values)


def _value_in(model: str, type_: TypeEngine[Any], state: str, value: Any) -> Any:
    # A TypeDecorator has these attributes of the type that it decorates.
    members = getattr(type_, "enum_class", None) or getattr(type_, "enums", None)
    is_default = value == getattr(States(), state)
    if members is not None and value is not None:
        found = [member for member in members if member == value or (is_default and _is_named(member, value))]
        if isinstance(type_, TypeDecorator):
            # Instances show what the TypeDecorator returns, which may not be a member of the Enum.
            found = [each for each in (*found, value) if _is_stored(type_, each)]
        if found:
            return found[0]
        if is_default:
            return None
    elif value is None or _fits(type_, value):
        return value
    msg = (
        f"{model}: its status column cannot hold {value!r}, the value of QueueConfig(states=...) for {state}; "
        f"use one of the column's values with QueueConfig(states=States({state}=...)), or None"
    )
    raise ConfigurationError(msg)


def _is_stored(type_: TypeDecorator[Any], value: Any) -> bool:
    """Return whether a TypeDecorator of an Enum stores ``value`` as one of its values and loads it unchanged."""
    dialect = NEUTRAL
    to_database, from_database = type_.bind_processor(dialect), type_.result_processor(dialect, None)
    try:
        stored = value if to_database is None else to_database(value)
        loaded = stored if from_database is None else from_database(stored)
    except Exception:  # noqa: BLE001 - the application's type may raise any error for an unknown value
        return False
    members: Any = getattr(type_, "enums", ())
    return bool(stored in members and loaded == value)


def _is_named(member: Any, name: str) -> bool:
    return isinstance(member, enum.Enum) and (member.value == name or member.name.lower() == name)


def _fits(type_: TypeEngine[Any], value: Any) -> bool:
    try:
        literal_text(value, type_)
    except (TypeError, ValueError, AttributeError, StatementError):
        return False
    length = getattr(type_, "length", None)
    # A TypeDecorator may store a shorter text than the value.
    return length is None or isinstance(type_, TypeDecorator) or len(str(value)) <= length


@dataclass(frozen=True)
class Role:
    """The column that the library makes for one role."""

    annotation: Any
    """The Python type, for ``Mapped[...]``."""
    make_type: Callable[[States], TypeEngine[Any]]
    nullable: bool = True
    constant: Callable[[States], Any] | None = None
    """Makes the default, if it is a constant."""
    server_now: bool = False
    """Whether the default is ``now()`` of the database."""
    server_value: str | None = None
    """The default as SQL, which a generated constructor does not set."""
    from_trace: bool = False
    """Whether the server default is the trace that is set in the transaction."""

    def column(self, name: str, states: States, type_: TypeEngine[Any] | None = None) -> sa.Column[Any]:
        """Return a new column for this role.

        :param type_: by default the type of the role.
        """
        type_ = self.make_type(states) if type_ is None else type_
        server_side: Any = None
        if self.constant is not None:
            server_side = sa.literal_column(literal_text(self.constant(states), type_))
        elif self.server_value is not None:
            server_side = sa.text(self.server_value)
        elif self.server_now:
            server_side = MomentOfInsert()
        elif self.from_trace:
            server_side = server_default()
        else:
            # A flush writes NULL for any other column that is not set, and needs the privilege to write it.
            type_ = type_.evaluates_none()
        return sa.Column(name, type_, nullable=self.nullable, server_default=server_side)


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
    "traceparent": Role(str | None, lambda _: sa.Text(), from_trace=True),
    # A new job waits for the look that counts, at the commit of its transaction.
    "waits_for_count": Role(int | None, lambda _: sa.Integer(), server_value="1"),
    "cancelled_for": Role(str | None, lambda _: sa.Text()),
    "is_open": Role(bool, lambda _: sa.Boolean(), nullable=False, constant=lambda _: False),
}


def constant_default(column: sa.Column[Any], states: States, *, waits: bool) -> Any:
    """Return the value that a row gets for a column of the queue that its INSERT leaves out; None if that varies.

    :param waits: whether the jobs of the queue wait for others.
    """
    role = column.info.get("sqlaqueue")
    constant = None if role is None else COLUMNS[role].constant
    return None if constant is None else constant(states_of_new(states) if waits else states)


def states_of_new(states: States) -> States:
    """Return the states for defaults, where jobs wait for others: a new job is waiting until it is looked at."""
    # Values of different types are refused once the column is known.
    is_alike = type(states.waiting) is type(states.pending)
    return replace(states, pending=states.waiting, waiting=None) if is_alike else states
