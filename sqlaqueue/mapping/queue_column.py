"""Queue attributes declared in the class, visible to type checkers: :func:`queue_column`."""

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
from sqlaqueue.queue.config import ROLES, did_you_mean
from sqlaqueue.queue.options import States
from sqlaqueue.queue.roles import COLUMNS

_PLACEHOLDER = "sqlaqueue_declared"
"""The key in ``Column.info`` that marks a placeholder, which the column of the queue will replace."""

_DECLARED = "__queue_declared__"
"""The declarations of a class and its bases, kept when their placeholders are replaced."""


@dataclass(frozen=True)
class Declared:
    """The declaration of one attribute by :func:`queue_column`."""

    role: str
    attribute: str
    type: TypeEngine[Any] | None
    """The type of its column; None for the type of the role."""


def queue_column(role: str, type_: TypeEngine[Any] | type[TypeEngine[Any]] | None = None) -> Any:
    """Declare an attribute as a queue attribute, so that readers and type checkers see it.

    ::

        class Email(QueueMixin, Base):
            status: Mapped[str]                                      # an attribute of the application
            queue_status: Mapped[str] = queue_column("status")       # the status of the job
            importance: Mapped[int] = queue_column("priority")

    This is the same as ``QueueConfig(columns={"status": "queue_status"})`` and can be combined with it. The library
    adds the column. A status annotated with an Enum has an Enum column: ``status: Mapped[Phase] =
    queue_column("status")``. In an SQLModel the annotation is the plain type: ``queue_status: str =
    queue_column("status")``.

    :param role: the name of a queue attribute, one of ``sqlaqueue.queue.config.ROLES``.
    :param type_: the type of the column; by default that of the role.
    :raises ConfigurationError: if there is no such role.
    """
    if role not in ROLES:
        msg = f"queue_column({role!r}): there is no such queue attribute; those are {', '.join(ROLES)}"
        raise ConfigurationError(f"{msg}{did_you_mean(str(role), ROLES)}")
    given: TypeEngine[Any] | None = None if type_ is None else sa.types.to_instance(type_)
    kind = COLUMNS[role]
    column_type = kind.make_type(States()) if given is None else given
    return mapped_column(column_type, nullable=kind.nullable, info={_PLACEHOLDER: (role, given)})


def declared_in(cls: type[Any]) -> Mapping[str, Declared]:
    """Return the declarations of a class and its bases by :func:`queue_column`, by role.

    :raises ConfigurationError: if a role is declared twice.
    """
    found: dict[str, Declared] = dict(getattr(cls, _DECLARED, {}))
    hidden: set[str] = set()
    for base in cls.__mro__:
        for attribute, value in _values(base):
            role, type_ = _placeholder(value)
            if role is not None and attribute not in hidden:
                other = found.get(role)
                if other is not None and other.attribute != attribute:
                    msg = (
                        f"{cls.__name__}: queue_column({role!r}) declares {other.attribute!r} and {attribute!r}; "
                        "declare one of them"
                    )
                    raise ConfigurationError(msg)
                if other is None:
                    found[role] = Declared(role, attribute, type_ or (_enum_of(base, attribute, role)))
            hidden.add(attribute)
    return found


def keep_declared(cls: type[Any]) -> None:
    """Store the declarations of a class before its placeholders are replaced."""
    setattr(cls, _DECLARED, declared_in(cls))


def is_placeholder(column: sa.ColumnElement[Any]) -> bool:
    """Return whether a column is a placeholder of :func:`queue_column`."""
    return _PLACEHOLDER in getattr(column, "info", ())


def _values(base: type[Any]) -> Iterator[tuple[str, Any]]:
    yield from vars(base).items()
    # In a finished class, pydantic has moved the values from the class to its fields.
    for name, field in vars(base).get("__pydantic_fields__", {}).items():
        yield name, field.default


def _placeholder(value: Any) -> tuple[str | None, TypeEngine[Any] | None]:
    found: tuple[str | None, TypeEngine[Any] | None] = (None, None)
    return value.column.info.get(_PLACEHOLDER, found) if isinstance(value, MappedColumn) else found


def _enum_of(base: type[Any], attribute: str, role: str) -> TypeEngine[Any] | None:
    """Return the column type of a status that is annotated with an Enum, otherwise None."""
    if role != "status":
        return None
    annotation = inspect.get_annotations(base).get(attribute)
    if isinstance(annotation, str):
        try:
            annotation = eval(annotation, vars(sys.modules[base.__module__]), dict(vars(base)))  # noqa: S307 - like typing.get_type_hints(), which fails if it cannot evaluate another annotation
        except Exception:  # noqa: BLE001 - the name may be undefined yet, or defined for type checkers only
            return None
    if get_origin(annotation) is Mapped:
        (annotation,) = get_args(annotation)
    return sa.Enum(annotation) if isinstance(annotation, type) and issubclass(annotation, enum.Enum) else None
