"""The trace of a job: the ``traceparent`` of W3C Trace Context, taken from OpenTelemetry or from the transaction.

The column is filled when a row is inserted: by the span that was current when the instance was made, by the one that is
current in this process, or else by the setting ``sqlaqueue.traceparent`` of the transaction, which its server default
reads. So COPY, ``INSERT ... SELECT`` and plain SQL continue a trace as well.

The span of the instance comes first, as a flush may be later than the span: what a handler adds to its session is
flushed when its run is settled.
"""

from __future__ import annotations

import sys
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.orm import InstanceState
from sqlalchemy.orm.attributes import instance_state

from sqlaqueue.exc import ConfigurationError
from sqlaqueue.queue.backend import backend

SETTING = "sqlaqueue.traceparent"
"""The setting of a transaction that inserts jobs without the ORM: ``SET LOCAL sqlaqueue.traceparent = '00-...-01'``."""

_LENGTH = 55
"""The characters of a ``traceparent``."""

_MADE_IN = "sqlaqueue_made_in"
"""The key in ``InstanceState.info`` of the span that was current when the instance was made."""


def current_traceparent() -> str | None:
    """Return the current span of OpenTelemetry as a ``traceparent``; None without one.

    OpenTelemetry is not imported: a program without it has no span.
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
    return backend().session_setting(SETTING)


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
