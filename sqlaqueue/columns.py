"""Where the queue attributes of a class come from, for each way in which a class can be mapped.

What the class defines itself is adopted, if its config says so. The rest is made here, at the first
of these moments at which the class can take it:

* as fields of a dataclass or an SQLModel before the class is read, so that its constructor takes them;
* as columns of the table that declarative mapping is making, so that ``__table_args__`` may name them;
* as columns of a table that was there before, once the class has its mapper.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import (
    ColumnProperty,
    DeclarativeBase,
    DeclarativeBaseNoMeta,
    Mapped,
    MappedAsDataclass,
    Mapper,
    mapped_column,
)

from sqlaqueue.config import LEASE_ROLES, OPT_IN_ROLES, ROLES, QueueConfig
from sqlaqueue.exc import ConfigurationError
from sqlaqueue.roles import COLUMNS
from sqlaqueue.strategies import ClaimStrategy

_MADE = "__queue_fields__"
"""The fields that were added to a class or one of its bases; else they would pass for its own."""


def placed_roles(config: QueueConfig, strategy: ClaimStrategy) -> dict[str, str]:
    """Return role to attribute for the roles that a queue with this config has."""
    unused = (*OPT_IN_ROLES, *(LEASE_ROLES if strategy.holds_transaction else ()))
    placed = {role: config.columns.get(role, None if role in unused else role) for role in ROLES}
    return {role: attribute for role, attribute in placed.items() if attribute is not None}


def add_fields(cls: type[Any], config: QueueConfig, roles: Mapping[str, str]) -> None:
    """Add the attributes to a class whose constructor is made from its fields, and that is not mapped yet.

    :raises ConfigurationError: when the class defines an attribute of a role's name without saying what for.
    """
    if _is_sqlmodel(cls):
        add = _add_sqlmodel_field
    elif _is_dataclass(cls):
        if cls.__dict__.get("__abstract__") or not _names_table(cls):
            return
        add = _add_dataclass_field
    elif not _has_registry(cls) and isinstance(cls.__dict__.get("__tablename__"), str):
        # A decorator is going to map it, perhaps as a dataclass.
        add = _add_mapped_column
    else:
        return
    present = _defined_by(cls)
    _check_names(cls, config, roles, present)
    made = {role: attribute for role, attribute in roles.items() if attribute not in present}
    for role, attribute in made.items():
        add(cls, role, attribute, config)
    setattr(cls, _MADE, frozenset(made.values()))


def new_columns(cls: type[Any], config: QueueConfig, roles: Mapping[str, str]) -> list[sa.Column[Any]]:
    """Return the columns that the table of a class still lacks when it is made.

    :raises ConfigurationError: when the class defines an attribute of a role's name without saying what for, and
        when it is too late for attributes that had to be fields.
    """
    present = _defined_by(cls)
    _check_names(cls, config, roles, present)
    present |= getattr(cls, _MADE, frozenset())
    missing = {role: attribute for role, attribute in roles.items() if attribute not in present}
    if missing and _is_dataclass(cls):
        bases = ", ".join(["QueueMixin", *(base.__name__ for base in cls.__bases__ if base.__name__ != "QueueMixin")])
        msg = (
            f"class {cls.__name__}: QueueMixin must stand before the other bases, class {cls.__name__}({bases}), "
            "or its attributes cannot become fields"
        )
        raise ConfigurationError(msg)
    return [_make(role, attribute, config) for role, attribute in missing.items()]


def complete_table(mapper: Mapper[Any], table: sa.Table, config: QueueConfig, roles: Mapping[str, str]) -> None:
    """Add what a mapped class still lacks: all of it, when its table was there before.

    :raises ConfigurationError: when the class defines an attribute of a role's name without saying what for.
    """
    # An expression may be mapped as well, and has no info.
    made = {name for name, column in mapper.columns.items() if "sqlaqueue" in getattr(column, "info", ())}
    present = (_defined_by(mapper.class_) | set(mapper.columns.keys())) - made
    _check_names(mapper.class_, config, roles, present)
    for role, attribute in roles.items():
        if attribute not in present | made:
            column = _make(role, attribute, config)
            table.append_column(column)
            mapper.add_property(attribute, column)


def check_subclass(mapper: Mapper[Any], owner: type[Any], columns: Mapping[str, sa.Column[Any]]) -> None:
    """Refuse a subclass that defines an attribute of its parent's queue again.

    :param columns: attribute to column of the parent's queue.
    :raises ConfigurationError: naming the class that has the attribute already.
    """
    for attribute, column in columns.items():
        # A column of the same name in the child's own table would be written together with the queue's.
        mapped = mapper.get_property(attribute) if mapper.has_property(attribute) else None
        if not isinstance(mapped, ColumnProperty) or [*map(id, mapped.columns)] != [id(column)]:
            name = mapper.class_.__name__
            msg = (
                f"{name}.{attribute}: the queue of {owner.__name__} has this attribute already; rename {name}'s, "
                f"or the queue's with QueueConfig(columns=...) in {owner.__name__}"
            )
            raise ConfigurationError(msg)


def _check_names(cls: type[Any], config: QueueConfig, roles: Mapping[str, str], present: set[str]) -> None:
    for role, attribute in roles.items():
        if role in present and attribute == role and role not in config.columns:
            msg = (
                f"{cls.__name__}.{role} is a name that the queue uses. If this attribute is the queue's own {role}, "
                f"adopt it with QueueConfig(columns={{{role!r}: {role!r}}}); if it means something else, "
                f"put the queue's on another attribute with QueueConfig(columns={{{role!r}: 'queue_{role}'}})"
            )
            raise ConfigurationError(msg)


def _defined_by(cls: type[Any]) -> set[str]:
    """Return the attributes that a class and its bases define, without the fields that were added to them."""
    names = {name for base in cls.__mro__ for name in (*vars(base), *inspect.get_annotations(base))}
    return names - getattr(cls, _MADE, frozenset())


def _is_sqlmodel(cls: type[Any]) -> bool:
    sqlmodel = sys.modules.get("sqlmodel")
    return sqlmodel is not None and issubclass(cls, sqlmodel.SQLModel)


def _is_dataclass(cls: type[Any]) -> bool:
    return issubclass(cls, MappedAsDataclass)


def _has_registry(cls: type[Any]) -> bool:
    return issubclass(cls, DeclarativeBase | DeclarativeBaseNoMeta) or hasattr(cls, "registry")


def _names_table(cls: type[Any]) -> bool:
    return any("__tablename__" in vars(base) for base in cls.__mro__)


def _make(role: str, attribute: str, config: QueueConfig) -> sa.Column[Any]:
    column = COLUMNS[role].column(attribute, config.states)
    column.info["sqlaqueue"] = role
    return column


def _add_mapped_column(cls: type[Any], role: str, attribute: str, config: QueueConfig, **options: Any) -> None:
    column, kind = _make(role, attribute, config), COLUMNS[role]
    mapped: Any = Mapped  # by another name, or a type checker reads what follows as an annotation
    field: Any = mapped_column(
        attribute,
        column.type,
        nullable=kind.nullable,
        server_default=column.server_default,
        default=kind.default(config.states),
        info=column.info,
        **options,
    )
    cls.__annotations__ = {**inspect.get_annotations(cls), attribute: mapped[kind.annotation]}
    setattr(cls, attribute, field)


def _add_dataclass_field(cls: type[Any], role: str, attribute: str, config: QueueConfig) -> None:
    # By keyword only, or a subclass could not have a field without a default.
    _add_mapped_column(cls, role, attribute, config, kw_only=True)


def _add_sqlmodel_field(cls: type[Any], role: str, attribute: str, config: QueueConfig) -> None:
    from sqlmodel import Field  # noqa: PLC0415 - only where somebody uses it

    # No sa_column: a model without a table may hand its fields down to several that have one.
    column, kind = _make(role, attribute, config), COLUMNS[role]
    field = Field(
        default=kind.default(config.states),
        sa_type=column.type,
        nullable=kind.nullable,
        sa_column_kwargs={"server_default": column.server_default, "info": column.info},
    )
    cls.__annotations__ = {**inspect.get_annotations(cls), attribute: kind.annotation | None}
    setattr(cls, attribute, field)
