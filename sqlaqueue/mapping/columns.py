"""Adds the queue attributes to a class, for each way of mapping it.

An attribute that the class defines is used if the config names it. The others are added as early as the class allows:

* as fields of a dataclass or an SQLModel, before the class is processed, so that its constructor accepts them;
* as columns of the table that declarative mapping creates, so that ``__table_args__`` may name them;
* as columns of an existing ``Table``, after the mapper is constructed.

With ``QueueConfig(adopt=...)`` nothing is added.
"""

from __future__ import annotations

import enum
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, get_args, get_origin

import sqlalchemy as sa
from sqlalchemy.orm import (
    ColumnProperty,
    DeclarativeBase,
    DeclarativeBaseNoMeta,
    Mapped,
    MappedAsDataclass,
    MappedColumn,
    Mapper,
    mapped_column,
)
from sqlalchemy.types import TypeEngine

from sqlaqueue.exc import ConfigurationError
from sqlaqueue.queue.config import EXTRA_ROLES, LEASE_ROLES, ROLES, WAIT_ROLES, ExtraColumn, QueueConfig
from sqlaqueue.queue.options import States
from sqlaqueue.queue.roles import COLUMNS, states_in, states_of_new
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.strategies import ClaimStrategy
from sqlaqueue.texts import did_you_mean

_PLACEHOLDER = "sqlaqueue_declared"
"""The key in ``Column.info`` that marks a placeholder, which the column of the queue will replace."""

_DECLARED = "__queue_declared__"
"""The declarations of a class and its bases, kept when their placeholders are replaced."""


@dataclass(frozen=True)
class Declared:
    """The declaration of one attribute, by :func:`queue_column` or an annotation."""

    role: str
    attribute: str
    type: TypeEngine[Any] | None
    """The type of its column; None for the type of the role."""


def queue_column(role: str, type_: TypeEngine[Any] | type[TypeEngine[Any]] | None = None) -> Any:
    """Declare an attribute as a queue attribute, so that readers and type checkers see it.

    ::

        class Reminder(QueueMixin, Base):
            __tablename__ = "reminder"

            id: Mapped[int] = mapped_column(primary_key=True)
            status: Mapped[str]  # an attribute of the application
            queue_status: Mapped[str] = queue_column("status")  # the status of the job
            importance: Mapped[int] = queue_column("priority")

    This is the same as ``QueueConfig(columns={"status": "queue_status"})`` and can be combined with it; for an optional
    attribute, such as ``started_at``, it is the same as ``QueueConfig(extra_columns=...)`` as well. The library
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
    """Return what a class and its bases declare by :func:`queue_column` and by annotations, by role."""
    found: dict[str, Declared] = dict(getattr(cls, _DECLARED, {}))
    hidden: set[str] = set()
    for base in cls.__mro__:
        for attribute, value in _values(base):
            info = value.column.info if isinstance(value, MappedColumn) else {}
            role, type_ = info.get(_PLACEHOLDER, (None, None))
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
    return found | {role: one for role, one in _annotated_in(cls).items() if role not in found}


def _annotated_in(cls: type[Any]) -> dict[str, Declared]:
    """Return the extra columns of a class that it, or a base, annotates without a value, by role."""
    config: QueueConfig = cls.__queue__
    found: dict[str, Declared] = {}
    # The columns of an adopted table are the class's own.
    for role in () if config.adopt is not None else config.extra_roles:
        attribute = config.attribute_for(role, role)
        names = ((base, {*vars(base), *inspect.get_annotations(base)}) for base in cls.__mro__)
        base = next((base for base, defined in names if attribute in defined), None)
        if attribute is not None and base is not None and attribute not in vars(base):
            _check_annotation(cls, base, attribute, role)
            found[role] = Declared(role, attribute, None)
    return found


def is_placeholder(column: sa.ColumnElement[Any]) -> bool:
    """Return whether a column is a placeholder of :func:`queue_column`."""
    return _PLACEHOLDER in getattr(column, "info", ())


def _values(base: type[Any]) -> Iterator[tuple[str, Any]]:
    yield from vars(base).items()
    # In a finished class, pydantic has moved the values from the class to its fields.
    for name, field in vars(base).get("__pydantic_fields__", {}).items():
        yield name, field.default


def _enum_of(base: type[Any], attribute: str, role: str) -> TypeEngine[Any] | None:
    """Return the column type of a status that is annotated with an Enum, otherwise None."""
    if role != "status":
        return None
    annotation = _annotation(base, attribute)
    return sa.Enum(annotation) if isinstance(annotation, type) and issubclass(annotation, enum.Enum) else None


def _annotation(base: type[Any], attribute: str) -> Any:
    """Return the Python type in the annotation of an attribute; None if there is none, or it cannot be evaluated."""
    annotation = inspect.get_annotations(base).get(attribute)
    if isinstance(annotation, str):
        try:
            annotation = eval(annotation, vars(sys.modules[base.__module__]), dict(vars(base)))  # noqa: S307 - like typing.get_type_hints(), which fails if it cannot evaluate another annotation
        except Exception:  # noqa: BLE001 - the name may be undefined yet, or defined for type checkers only
            return None
    while get_origin(annotation) in {Mapped, Annotated}:
        annotation = get_args(annotation)[0]
    return annotation


def _check_annotation(cls: type[Any], base: type[Any], attribute: str, role: str) -> None:
    """Refuse an annotation that tells type checkers something else than what the column contains."""
    found, wanted = _annotation(base, attribute), COLUMNS[role].annotation
    if found not in (None, Any, wanted):
        text = " | ".join("None" if one is type(None) else one.__name__ for one in get_args(wanted))
        msg = (
            f"{cls.__name__}.{attribute} is annotated with {found!r}, but the {role} of the queue is {text}; annotate "
            f"it Mapped[{text}], or give the queue's {role} another name with "
            f"QueueConfig(columns={{{role!r}: 'queue_{role}'}})"
        )
        raise ConfigurationError(msg)


_Add = Callable[[type[Any], str, str, QueueConfig], None]

_ADDED = "__queue_fields__"
"""The names of the fields that were added to a class or its bases, as distinct from fields that it defines."""


def with_declared(cls: type[Any], config: QueueConfig) -> QueueConfig:
    """Return the config of a class, with its declarations by :func:`queue_column`, which may not contradict it."""
    declared = declared_in(cls)
    if not declared:
        return config
    for role, one in declared.items():
        declaration = f"{cls.__name__}.{one.attribute} = queue_column({role!r})"
        if config.adopt is not None:
            msg = (
                f"{declaration}: QueueConfig(adopt=...) adds no columns. If the table has this column, map it with "
                f"mapped_column() and name it with QueueConfig(adopt={{{role!r}: {one.attribute!r}, ...}}); otherwise "
                "use columns= instead of adopt="
            )
        elif config.attribute_for(role, one.attribute) != one.attribute:
            option = (
                f"columns={{{role!r}: {config.columns[role]!r}}}" if role in config.columns else "rows_are_messages"
            )
            msg = f"{declaration}: it contradicts QueueConfig({option}); leave out one of the two"
        else:
            continue
        raise ConfigurationError(msg)
    extra: list[ExtraColumn] = [role for role in EXTRA_ROLES if role in declared and role not in config.extra_columns]
    return replace(
        config,
        columns={**config.columns, **{role: one.attribute for role, one in declared.items()}},
        extra_columns=(*config.extra_columns, *extra),
    )


def given_roles(strategy: ClaimStrategy) -> tuple[str, ...]:
    """Return the roles that a queue has because of its strategy."""
    return () if strategy.holds_transaction else LEASE_ROLES


def check_extra_columns(model: str, given: Sequence[str], config: QueueConfig, strategy: ClaimStrategy) -> None:
    """Refuse an extra column that the queue has anyway, and another name for one that it does not have.

    :param given: the extra columns that the class names; those of ``config`` may contain declared ones as well.
    :raises ConfigurationError: with the class, the attribute and the fix.
    """
    for role in given:
        if role in given_roles(strategy):
            msg = (
                f"{model}: QueueConfig(extra_columns={tuple(given)!r}): with strategy={config.strategy!r} a queue has "
                f"{role!r} anyway; leave it out"
            )
            raise ConfigurationError(msg)
    for role in EXTRA_ROLES:
        attribute = config.columns.get(role)
        if attribute is not None and role not in (*config.extra_roles, *given_roles(strategy)):
            msg = (
                f"{model}: QueueConfig(columns={{{role!r}: {attribute!r}}}) names the attribute of {role!r}, which is "
                f"optional; {config.fix_for(role)}"
            )
            raise ConfigurationError(msg)


def role_attributes(config: QueueConfig, strategy: ClaimStrategy) -> dict[str, str]:
    """Return role to attribute for the roles of a queue with this config."""
    unused = {*EXTRA_ROLES, *LEASE_ROLES, *WAIT_ROLES} - config.extra_roles - set(given_roles(strategy))
    attributes = {role: config.attribute_for(role, None if role in unused else role) for role in ROLES}
    return {role: attribute for role, attribute in attributes.items() if attribute is not None}


def add_fields(cls: type[Any], config: QueueConfig, roles: Mapping[str, str]) -> None:
    """Add the attributes that must exist before the class is mapped.

    These are all attributes if the constructor is generated from fields, otherwise those declared by queue_column().
    """
    add = None if config.adopt is not None else _adder_for(cls)
    if add is None:
        return
    declared = {one.attribute for one in declared_in(cls).values()}
    if add is _leave_to_mapper or (add is _add_mapped_column and _has_registry(cls)):
        roles = {role: attribute for role, attribute in roles.items() if attribute in declared}
    present = _defined_by(cls)
    _check_names(cls, config, roles, present)
    missing = {role: attribute for role, attribute in roles.items() if attribute not in present}
    if declared:
        # Before the placeholders are replaced.
        setattr(cls, _DECLARED, declared_in(cls))
    for role, attribute in missing.items():
        add(cls, role, attribute, config)
    if missing and add is not _leave_to_mapper:
        setattr(cls, _ADDED, frozenset(missing.values()))


def _adder_for(cls: type[Any]) -> _Add | None:
    """Return the function that adds an attribute to a class before it is mapped, None if it will not be mapped."""
    sqlmodel = sys.modules.get("sqlmodel")
    if sqlmodel is not None and issubclass(cls, sqlmodel.SQLModel):
        return _add_sqlmodel_field
    if cls.__dict__.get("__abstract__"):
        return None
    if _is_dataclass(cls):
        return _add_dataclass_field if any("__tablename__" in vars(base) for base in cls.__mro__) else None
    if _has_registry(cls):
        return _leave_to_mapper if "__table__" in cls.__dict__ else _add_mapped_column
    # A class with a table name will be mapped by a decorator, perhaps as a dataclass.
    return _add_mapped_column if isinstance(cls.__dict__.get("__tablename__"), str) else _leave_to_mapper


def new_columns(cls: type[Any], config: QueueConfig, roles: Mapping[str, str]) -> list[sa.Column[Any]]:
    """Return the columns to add to the table of a declarative class when it is created."""
    if config.adopt is not None:
        return []
    present = _defined_by(cls)
    _check_names(cls, config, roles, present)
    present |= getattr(cls, _ADDED, frozenset())
    missing = {role: attribute for role, attribute in roles.items() if attribute not in present}
    declared = declared_in(cls)
    late = [one.attribute for one in declared.values() if one.attribute in missing.values()]
    if missing and (late or _is_dataclass(cls)):
        bases = ", ".join(["QueueMixin", *(base.__name__ for base in cls.__bases__ if base.__name__ != "QueueMixin")])
        msg = (
            f"class {cls.__name__}: QueueMixin must be the first base, class {cls.__name__}({bases}), or its "
            f"attributes cannot {'be declared in the class' if late else 'become fields'}"
        )
        raise ConfigurationError(msg)
    return [_make(cls, role, attribute, config, declared) for role, attribute in missing.items()]


def complete_table(mapper: Mapper[Any], table: sa.Table, config: QueueConfig, roles: Mapping[str, str]) -> None:
    """Add the missing columns to the table of a mapped class: all columns, if the table existed before the class."""
    if config.adopt is not None:
        return
    # A mapped SQL expression has no info.
    added = {name for name, column in mapper.columns.items() if "sqlaqueue" in getattr(column, "info", ())}
    present = (_defined_by(mapper.class_) | set(mapper.columns.keys())) - added
    _check_names(mapper.class_, config, roles, present)
    declared = declared_in(mapper.class_)
    for role, attribute in roles.items():
        if attribute not in present | added:
            column = _make(mapper.class_, role, attribute, config, declared)
            table.append_column(column)
            mapper.add_property(attribute, column)


def check_subclass(mapper: Mapper[Any], owner: type[Any], columns: Mapping[str, sa.Column[Any]]) -> None:
    """Refuse a subclass that redefines an attribute of its parent's queue.

    :param owner: the class of the queue.
    :param columns: attribute to column of the queue.
    """
    for attribute, column in columns.items():
        # SQLAlchemy would write a column of the same name in the subclass's own table together with the queue's.
        mapped = mapper.get_property(attribute) if mapper.has_property(attribute) else None
        if not isinstance(mapped, ColumnProperty) or [*map(id, mapped.columns)] != [id(column)]:
            name = mapper.class_.__name__
            msg = (
                f"{name}.{attribute}: the queue of {owner.__name__} has an attribute of this name; rename one of the "
                f"two, the queue's with QueueConfig(columns=...) in {owner.__name__}"
            )
            raise ConfigurationError(msg)


def column_of(mapper: Mapper[Any], role: str, attribute: str, config: QueueConfig) -> sa.Column[Any]:
    """Return the column that has a role; refuse an attribute that is not a column of the table."""
    # mapper.column_attrs would configure all mappers, before the classes that they refer to exist.
    column, table = mapper.columns.get(attribute), mapper.local_table
    if isinstance(column, sa.Column) and column.table is table:
        return column
    name = mapper.class_.__name__
    if config.adopt is None:
        msg = (
            f"{name}: QueueConfig(columns={{{role!r}: {attribute!r}}}) names an attribute that is not a "
            f"column of the table {table}; define {name}.{attribute} as a column, or name another attribute"
        )
        raise ConfigurationError(msg)
    known = {key: one for key, one in mapper.columns.items() if getattr(one, "table", None) is table}
    named = [key for key, one in known.items() if one.name == attribute]
    hint = f"; the column {attribute} is the attribute {named[0]!r}" if named else did_you_mean(attribute, known)
    what = f"is not a column of the table {table}" if hasattr(mapper.class_, attribute) else "does not exist"
    msg = (
        f"{name}: QueueConfig(adopt={{{role!r}: {attribute!r}}}) names an attribute that {what}; the columns of "
        f"{table} are {', '.join(known)}{hint}"
    )
    raise ConfigurationError(msg)


def left_to_server(spec: QueueSpec) -> set[sa.Column[Any]]:
    """Return the columns of a queue that the ORM's INSERT leaves out unless the program sets them."""
    # A generated constructor sets its fields.
    if getattr(spec.model, _ADDED, None):
        return set()
    return {column for role, column in spec.columns.items() if "sqlaqueue" in column.info and role != "traceparent"}


def _check_names(cls: type[Any], config: QueueConfig, roles: Mapping[str, str], present: set[str]) -> None:
    for role, attribute in roles.items():
        if role in present and attribute == role and role not in config.columns:
            alone = "To let the queue add the column, annotate it without a value. " if role in EXTRA_ROLES else ""
            msg = (
                f"{cls.__name__}.{role} has the name of a queue attribute. {alone}To use it as the queue's {role}, set "
                f"QueueConfig(columns={{{role!r}: {role!r}}}); if it is something else, give the queue's {role} "
                f"another name with QueueConfig(columns={{{role!r}: 'queue_{role}'}})"
            )
            raise ConfigurationError(msg)


def _defined_by(cls: type[Any]) -> set[str]:
    """Return the names of the attributes that a class and its bases define, without added queue attributes."""
    names = {name for base in cls.__mro__ for name in (*vars(base), *inspect.get_annotations(base))}
    declared = {one.attribute for one in declared_in(cls).values()}
    return names - declared - getattr(cls, _ADDED, frozenset())


def _is_dataclass(cls: type[Any]) -> bool:
    return issubclass(cls, MappedAsDataclass)


def _has_registry(cls: type[Any]) -> bool:
    return issubclass(cls, DeclarativeBase | DeclarativeBaseNoMeta) or hasattr(cls, "registry")


def _make(
    cls: type[Any], role: str, attribute: str, config: QueueConfig, declared: Mapping[str, Declared]
) -> sa.Column[Any]:
    type_ = declared[role].type if role in declared else None
    column = COLUMNS[role].column(attribute, _states(cls, config, declared), type_)
    column.info["sqlaqueue"] = role
    return column


def _states(cls: type[Any], config: QueueConfig, declared: Mapping[str, Declared]) -> States:
    """Return the values of the states for defaults, as those of the column type that the class declares."""
    status, states = declared.get("status"), config.states
    if status is not None and status.type is not None:
        states = states_in(cls.__name__, status.type, states)
    return states_of_new(states) if config.waits else states


def _new_value(cls: type[Any], role: str, config: QueueConfig) -> Any:
    """Return what the constructor of a dataclass or an SQLModel sets by default, None if the database sets it."""
    constant = COLUMNS[role].constant
    return None if constant is None else constant(_states(cls, config, declared_in(cls)))


def _leave_to_mapper(cls: type[Any], _role: str, attribute: str, _config: QueueConfig) -> None:
    """Remove the placeholder from a class with an existing table; complete_table() adds the column."""
    if attribute in vars(cls):
        delattr(cls, attribute)
    cls.__annotations__ = {name: kind for name, kind in inspect.get_annotations(cls).items() if name != attribute}


def _add_mapped_column(cls: type[Any], role: str, attribute: str, config: QueueConfig, **options: Any) -> None:
    column, kind = _make(cls, role, attribute, config, declared_in(cls)), COLUMNS[role]
    mapped: Any = Mapped  # under another name, or type checkers would read the expression below as an annotation
    field: Any = mapped_column(
        attribute,
        column.type,
        nullable=kind.nullable,
        server_default=column.server_default,
        default=_new_value(cls, role, config),
        info=column.info,
        **options,
    )
    cls.__annotations__ = {**inspect.get_annotations(cls), attribute: mapped[kind.annotation]}
    setattr(cls, attribute, field)


def _add_dataclass_field(cls: type[Any], role: str, attribute: str, config: QueueConfig) -> None:
    # Keyword-only, so that subclasses can have fields without defaults.
    _add_mapped_column(cls, role, attribute, config, kw_only=True)


def _add_sqlmodel_field(cls: type[Any], role: str, attribute: str, config: QueueConfig) -> None:
    from sqlmodel import Field  # noqa: PLC0415 - an optional dependency

    # Not sa_column: several tables may inherit the field from a model without a table.
    column, kind = _make(cls, role, attribute, config, declared_in(cls)), COLUMNS[role]
    field = Field(
        default=_new_value(cls, role, config),
        sa_type=column.type,
        nullable=kind.nullable,
        sa_column_kwargs={"server_default": column.server_default, "info": column.info},
    )
    cls.__annotations__ = {**inspect.get_annotations(cls), attribute: kind.annotation | None}
    setattr(cls, attribute, field)
