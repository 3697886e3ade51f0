"""Where the queue attributes of a class come from, for each way in which a class can be mapped.

What the class defines itself is adopted, if its config says so. The rest is made here, at the first
of these moments at which the class can take it:

* as fields of a dataclass or an SQLModel before the class is read, so that its constructor takes them;
* as columns of the table that declarative mapping is making, so that ``__table_args__`` may name them;
* as columns of a table that was there before, once the class has its mapper.

Nothing is made for a class whose config says ``adopt``.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
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

from sqlaqueue.exc import ConfigurationError
from sqlaqueue.mapping.queue_column import declared_in, keep_declared
from sqlaqueue.queue.config import LEASE_ROLES, OPT_IN_ROLES, ROLES, QueueConfig, did_you_mean
from sqlaqueue.queue.roles import COLUMNS, states_in
from sqlaqueue.strategies import ClaimStrategy

_Add = Callable[[type[Any], str, str, QueueConfig], None]

_MADE = "__queue_fields__"
"""The fields that were added to a class or one of its bases; else they would pass for its own."""


def with_declared(cls: type[Any], config: QueueConfig) -> QueueConfig:
    """Return the config of a class with what the class itself says by :func:`~sqlaqueue.queue_column`.

    :raises ConfigurationError: when the two contradict each other.
    """
    declared = declared_in(cls)
    if not declared:
        return config
    for role, one in declared.items():
        says = f"{cls.__name__}.{one.attribute} = queue_column({role!r})"
        if config.adopt is not None:
            msg = (
                f"{says}: its config says adopt, which adds no column. If the table has this column, map it with "
                f"mapped_column() and name it with QueueConfig(adopt={{{role!r}: {one.attribute!r}, ...}}); else use "
                "columns= in place of adopt="
            )
        elif config.attribute_for(role, one.attribute) != one.attribute:
            said = f"columns={{{role!r}: {config.columns[role]!r}}}" if role in config.columns else "rows_are_messages"
            msg = f"{says}: QueueConfig({said}) says otherwise; leave out one of the two"
        else:
            continue
        raise ConfigurationError(msg)
    return replace(config, columns={**config.columns, **{role: one.attribute for role, one in declared.items()}})


def placed_roles(config: QueueConfig, strategy: ClaimStrategy) -> dict[str, str]:
    """Return role to attribute for the roles that a queue with this config has."""
    unused = (*OPT_IN_ROLES, *(LEASE_ROLES if strategy.holds_transaction else ()))
    placed = {role: config.attribute_for(role, None if role in unused else role) for role in ROLES}
    return {role: attribute for role, attribute in placed.items() if attribute is not None}


def add_fields(cls: type[Any], config: QueueConfig, roles: Mapping[str, str]) -> None:
    """Add the attributes that have to be there before the class is mapped.

    These are all attributes of a class whose constructor is made from its fields, and those that it declares itself.

    :raises ConfigurationError: when the class defines an attribute of a role's name without saying what for.
    """
    add = None if config.adopt is not None else _way_to_add(cls)
    if add is None:
        return
    declared = {one.attribute for one in declared_in(cls).values()}
    if add is _leave_to_table or (add is _add_mapped_column and _has_registry(cls)):
        roles = {role: attribute for role, attribute in roles.items() if attribute in declared}
    present = _defined_by(cls)
    _check_names(cls, config, roles, present)
    made = {role: attribute for role, attribute in roles.items() if attribute not in present}
    if declared:
        keep_declared(cls)
    for role, attribute in made.items():
        add(cls, role, attribute, config)
    if made and add is not _leave_to_table:
        setattr(cls, _MADE, frozenset(made.values()))


def _way_to_add(cls: type[Any]) -> _Add | None:
    """Return what adds an attribute to a class that is not mapped yet, None for one that will not be."""
    if _is_sqlmodel(cls):
        return _add_sqlmodel_field
    if cls.__dict__.get("__abstract__"):
        return None
    if _is_dataclass(cls):
        return _add_dataclass_field if _names_table(cls) else None
    if _has_registry(cls):
        return _leave_to_table if "__table__" in cls.__dict__ else _add_mapped_column
    # With a name for its table, a decorator is going to map it, perhaps as a dataclass.
    return _add_mapped_column if isinstance(cls.__dict__.get("__tablename__"), str) else _leave_to_table


def new_columns(cls: type[Any], config: QueueConfig, roles: Mapping[str, str]) -> list[sa.Column[Any]]:
    """Return the columns that the table of a class still lacks when it is made.

    :raises ConfigurationError: when the class defines an attribute of a role's name without saying what for, and
        when it is too late for attributes that had to be fields.
    """
    if config.adopt is not None:
        return []
    present = _defined_by(cls)
    _check_names(cls, config, roles, present)
    present |= getattr(cls, _MADE, frozenset())
    missing = {role: attribute for role, attribute in roles.items() if attribute not in present}
    late = [one.attribute for one in declared_in(cls).values() if one.attribute in missing.values()]
    if missing and (late or _is_dataclass(cls)):
        bases = ", ".join(["QueueMixin", *(base.__name__ for base in cls.__bases__ if base.__name__ != "QueueMixin")])
        msg = (
            f"class {cls.__name__}: QueueMixin must stand before the other bases, class {cls.__name__}({bases}), "
            f"or its attributes cannot {'be declared by queue_column()' if late else 'become fields'}"
        )
        raise ConfigurationError(msg)
    return [_make(cls, role, attribute, config) for role, attribute in missing.items()]


def complete_table(mapper: Mapper[Any], table: sa.Table, config: QueueConfig, roles: Mapping[str, str]) -> None:
    """Add what a mapped class still lacks: all of it, when its table was there before.

    :raises ConfigurationError: when the class defines an attribute of a role's name without saying what for.
    """
    if config.adopt is not None:
        return
    # An expression may be mapped as well, and has no info.
    made = {name for name, column in mapper.columns.items() if "sqlaqueue" in getattr(column, "info", ())}
    present = (_defined_by(mapper.class_) | set(mapper.columns.keys())) - made
    _check_names(mapper.class_, config, roles, present)
    for role, attribute in roles.items():
        if attribute not in present | made:
            column = _make(mapper.class_, role, attribute, config)
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


def column_of(mapper: Mapper[Any], role: str, attribute: str, config: QueueConfig) -> sa.Column[Any]:
    """Return the column that plays a role.

    :raises ConfigurationError: when there is none, naming the class, the attribute and what it may have meant.
    """
    # Not mapper.column_attrs, which would configure all mappers before the classes that they name are there.
    column, table = mapper.columns.get(attribute), mapper.local_table
    if isinstance(column, sa.Column) and column.table is table:
        return column
    name = mapper.class_.__name__
    if config.adopt is None:
        msg = (
            f"{name}: QueueConfig(columns={{{role!r}: {attribute!r}}}) names an attribute that is no column "
            f"of the table {table}; define {name}.{attribute} as a column, or name another"
        )
        raise ConfigurationError(msg)
    there = {key: one for key, one in mapper.columns.items() if getattr(one, "table", None) is table}
    called = [key for key, one in there.items() if one.name == attribute]
    hint = f"; the column {attribute} is the attribute {called[0]!r}" if called else did_you_mean(attribute, there)
    what = "is no column of the table" if hasattr(mapper.class_, attribute) else "the class does not have, in the table"
    msg = (
        f"{name}: QueueConfig(adopt={{{role!r}: {attribute!r}}}) names an attribute that {what} {table}; "
        f"there are {', '.join(there)}{hint}"
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
    """Return the attributes that a class and its bases define, without those that are the queue's own."""
    names = {name for base in cls.__mro__ for name in (*vars(base), *inspect.get_annotations(base))}
    declared = {one.attribute for one in declared_in(cls).values()}
    return names - declared - getattr(cls, _MADE, frozenset())


def _is_sqlmodel(cls: type[Any]) -> bool:
    sqlmodel = sys.modules.get("sqlmodel")
    return sqlmodel is not None and issubclass(cls, sqlmodel.SQLModel)


def _is_dataclass(cls: type[Any]) -> bool:
    return issubclass(cls, MappedAsDataclass)


def _has_registry(cls: type[Any]) -> bool:
    return issubclass(cls, DeclarativeBase | DeclarativeBaseNoMeta) or hasattr(cls, "registry")


def _names_table(cls: type[Any]) -> bool:
    return any("__tablename__" in vars(base) for base in cls.__mro__)


def _make(cls: type[Any], role: str, attribute: str, config: QueueConfig) -> sa.Column[Any]:
    declared, states = declared_in(cls).get(role), config.states
    type_ = None if declared is None else declared.type
    if type_ is not None and role == "status":
        states = states_in(cls.__name__, type_, states)
    column = COLUMNS[role].column(attribute, states, type_)
    column.info["sqlaqueue"] = role
    return column


def _leave_to_table(cls: type[Any], _role: str, attribute: str, _config: QueueConfig) -> None:
    """Take out what stands for a column in a class whose table is there: the column is added to the table later."""
    if attribute in vars(cls):
        delattr(cls, attribute)
    cls.__annotations__ = {name: kind for name, kind in inspect.get_annotations(cls).items() if name != attribute}


def _add_mapped_column(cls: type[Any], role: str, attribute: str, config: QueueConfig, **options: Any) -> None:
    column, kind = _make(cls, role, attribute, config), COLUMNS[role]
    mapped: Any = Mapped  # by another name, or a type checker reads what follows as an annotation
    field: Any = mapped_column(
        attribute,
        column.type,
        nullable=kind.nullable,
        server_default=column.server_default,
        default=_constant(column),
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
    column, kind = _make(cls, role, attribute, config), COLUMNS[role]
    field = Field(
        default=_constant(column),
        sa_type=column.type,
        nullable=kind.nullable,
        sa_column_kwargs={"server_default": column.server_default, "info": column.info},
    )
    cls.__annotations__ = {**inspect.get_annotations(cls), attribute: kind.annotation | None}
    setattr(cls, attribute, field)


def _constant(column: sa.Column[Any]) -> Any:
    """Return the value that a new instance has, None where the database gives it."""
    return column.default.arg if isinstance(column.default, sa.ColumnDefault) and column.default.is_scalar else None
