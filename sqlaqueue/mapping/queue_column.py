"""Roles that a class declares on attributes of its own, so that type checkers see them: :func:`queue_column`."""

from __future__ import annotations

import enum
import inspect
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_args, get_origin

import sqlalchemy as sa
from sqlalchemy.orm import Mapped, MappedColumn, mapped_column
from sqlalchemy.types import TypeEngine

from sqlaqueue.exc import ConfigurationError
from sqlaqueue.queue.config import ROLES, States, did_you_mean
from sqlaqueue.queue.roles import COLUMNS

_PLACEHOLDER = "sqlaqueue_declared"
"""The entry in the info of a column that stands where the queue's own is going to be."""

_FOUND = "__queue_declared__"
"""What a class and its bases have declared, once the queue's own columns have replaced the placeholders."""


@dataclass(frozen=True)
class Declared:
    """What :func:`queue_column` says of one attribute."""

    role: str
    attribute: str
    type: TypeEngine[Any] | None
    """The type of its column; None for the one that the role has."""


def queue_column(role: str, type_: TypeEngine[Any] | type[TypeEngine[Any]] | None = None) -> Any:
    """Declare which attribute of a class plays a role, so that type checkers and readers see it.

    ::

        class Email(QueueMixin, Base):
            status: Mapped[str]                                      # something else
            queue_status: Mapped[str] = queue_column("status")       # the queue's
            importance: Mapped[int] = queue_column("priority")

    It says the same as ``QueueConfig(columns={"status": "queue_status"})``, and may be used together with it. The
    column is made by the library. A status that is annotated with an Enum is stored as one:
    ``status: Mapped[Phase] = queue_column("status")``. In an SQLModel the annotation is the bare type,
    ``queue_status: str = queue_column("status")``.

    :param role: the name of a queue attribute, one of ``sqlaqueue.queue.config.ROLES``.
    :param type_: the column's type, by default that of the role.
    :raises ConfigurationError: when there is no such role.
    """
    if role not in ROLES:
        msg = f"queue_column({role!r}): there is no such queue attribute; they are {', '.join(ROLES)}"
        raise ConfigurationError(f"{msg}{did_you_mean(str(role), ROLES)}")
    given: TypeEngine[Any] | None = None if type_ is None else sa.types.to_instance(type_)
    kind = COLUMNS[role]
    column_type = kind.make_type(States()) if given is None else given
    return mapped_column(column_type, nullable=kind.nullable, info={_PLACEHOLDER: (role, given)})


def declared_in(cls: type[Any]) -> Mapping[str, Declared]:
    """Return what a class and its bases declare by :func:`queue_column`, by role.

    :raises ConfigurationError: when a role is declared twice.
    """
    found: dict[str, Declared] = dict(getattr(cls, _FOUND, {}))
    hidden: set[str] = set()
    for base in cls.__mro__:
        for attribute, value in _values(base):
            role, type_ = _placeholder(value)
            if role is not None and attribute not in hidden:
                other = found.get(role)
                if other is not None and other.attribute != attribute:
                    msg = (
                        f"{cls.__name__}: queue_column({role!r}) is given to {other.attribute!r} and to "
                        f"{attribute!r}; one attribute plays a role"
                    )
                    raise ConfigurationError(msg)
                if other is None:
                    found[role] = Declared(role, attribute, type_ or (_enum_of(base, attribute, role)))
            hidden.add(attribute)
    return found


def keep_declared(cls: type[Any]) -> None:
    """Remember what a class declares, before its placeholders are replaced."""
    setattr(cls, _FOUND, declared_in(cls))


def is_placeholder(column: sa.ColumnElement[Any]) -> bool:
    """Whether a column of a table stands where a queue's own should be."""
    return _PLACEHOLDER in getattr(column, "info", ())


def _values(base: type[Any]) -> Iterator[tuple[str, Any]]:
    yield from vars(base).items()
    # pydantic has taken the values out of a class that is made already.
    for name, field in vars(base).get("__pydantic_fields__", {}).items():
        yield name, field.default


def _placeholder(value: Any) -> tuple[str | None, TypeEngine[Any] | None]:
    found: tuple[str | None, TypeEngine[Any] | None] = (None, None)
    return value.column.info.get(_PLACEHOLDER, found) if isinstance(value, MappedColumn) else found


def _enum_of(base: type[Any], attribute: str, role: str) -> TypeEngine[Any] | None:
    """Return the type of a status that is annotated with an Enum."""
    if role != "status":
        return None
    annotation = inspect.get_annotations(base).get(attribute)
    if isinstance(annotation, str):
        try:
            annotation = eval(annotation, vars(sys.modules[base.__module__]), dict(vars(base)))  # noqa: S307 - as typing.get_type_hints() does, which fails for a class whose other annotations it cannot read
        except Exception:  # noqa: BLE001 - a name that is not there yet, or only while types are checked
            return None
    if get_origin(annotation) is Mapped:
        (annotation,) = get_args(annotation)
    return sa.Enum(annotation) if isinstance(annotation, type) and issubclass(annotation, enum.Enum) else None
