"""Mapped classes as queues: :class:`QueueMixin`, and what it does when a class is mapped.

:mod:`sqlaqueue.mapping.columns` adds the queue attributes. When the mapper is constructed, roles are resolved to
columns, and the strategy attaches indexes, side tables and triggers, which ``metadata.create_all()`` creates.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, ClassVar

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.orm import Mapper

from sqlaqueue.exc import ConfigurationError, NotAQueueError, StatementError
from sqlaqueue.mapping.columns import (
    add_fields,
    check_extra_columns,
    check_subclass,
    column_of,
    complete_table,
    is_placeholder,
    new_columns,
    role_attributes,
    with_declared,
)
from sqlaqueue.postgresql.ddl import set_queue
from sqlaqueue.queue.config import WAIT_ROLES, QueueConfig
from sqlaqueue.queue.roles import UNCHANGED_ROLES, check_type, set_insert_default, states_in, trace_instances
from sqlaqueue.queue.spec import QueueSpec, check_roles
from sqlaqueue.strategies import ClaimStrategy, find_strategy
from sqlaqueue.strategies.attach import attach_flow_control, check_partition_key

# For type checkers; :mod:`sqlaqueue.mapping.columns` adds the attributes at run time.
if TYPE_CHECKING:
    from sqlaqueue._typing import Role

    _default: Any = None

    # A dataclass, so that generated constructors of dataclasses and SQLModels accept the attributes.
    @dataclass(init=False, repr=False, eq=False, kw_only=True)
    class QueueAttributes:
        """The attributes that :class:`~sqlaqueue.QueueMixin` adds to a class."""

        status: Role[str] = _default
        """The state of the job, as one of the values of ``QueueConfig.states``."""
        priority: Role[int] = _default
        """Jobs with lower values run first; 0 by default."""
        run_at: Role[datetime] = _default
        """The time from which the job can be claimed; ``now()`` of the database by default."""
        attempts: Role[int] = _default
        """The number of started runs, without those that were released."""
        max_attempts: Role[int | None] = _default
        """The limit of attempts of this job; None for that of the queue."""
        last_error: Role[str | None] = _default
        """The text of the last error."""
        created_at: Role[datetime] = _default
        """The time at which the job was enqueued."""
        finished_at: Role[datetime | None] = _default
        """The time at which the job was completed, failed or cancelled."""
        lease_token: Role[uuid.UUID | None] = _default
        """The token of the current claim; after a rescue, of the last one."""
        lease_expires_at: Role[datetime | None] = _default
        """The time from which the job can be rescued."""
        claimed_by: Role[str | None] = _default
        """The name of the worker that claimed the job."""

else:
    QueueAttributes = object


_SPEC = "__queue_spec__"


class QueueMixin(QueueAttributes):
    """Mixin that makes a mapped class a queue: its rows are the jobs.

    ::

        class Report(QueueMixin, Base):
            __tablename__ = "report"
            __queue__ = QueueConfig(strategy="update_status", max_attempts=5)

            id: Mapped[int] = mapped_column(primary_key=True)
            kind: Mapped[str]

    It adds these attributes with their columns, except as ``QueueConfig(columns=...)`` or ``QueueConfig(adopt=...)``
    says:

    - ``status``: the state of the job, one of the values of ``QueueConfig.states``;
    - ``priority``: jobs with lower values run first; 0 by default;
    - ``run_at``: the time from which the job can be claimed; ``now()`` of the database by default;
    - ``attempts``: the number of started runs, without those that were released;
    - ``max_attempts``: the limit of attempts of this job; None for that of the queue;
    - ``last_error``: the text of the last error;
    - ``created_at``, ``finished_at``: when the job was enqueued, and when it was completed, failed or cancelled;
    - ``lease_token``, ``lease_expires_at``, ``claimed_by``: the claim, the time from which the job can be rescued,
      and the worker; only under a strategy with leases.

    ``QueueConfig(extra_columns=...)`` adds ``started_at`` and ``traceparent``. The strategy determines which of them
    are required, and which indexes, triggers and tables of its own are added.
    """

    __queue__: ClassVar[QueueConfig] = QueueConfig()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Add the queue attributes that must exist before the class is mapped."""
        if queue_spec(cls) is None:
            config, _, roles = _read_config(cls)
            add_fields(cls, config, roles)
        super().__init_subclass__(**kwargs)

    @classmethod
    def __table_cls__(cls, name: str, metadata: sa.MetaData, *items: Any, **options: Any) -> Any:
        """Create the table of a declarative class with the queue columns, so that its indexes may name them."""
        if queue_spec(cls) is None:
            config, _, roles = _read_config(cls)
            columns = [item for item in items if isinstance(item, sa.Column)]
            others = [item for item in items if not isinstance(item, sa.Column)]
            items = (*columns, *new_columns(cls, config, roles), *others)
        make = getattr(super(), "__table_cls__", sa.Table)
        return make(name, metadata, *items, **options)


def queue_spec(cls: type[Any]) -> QueueSpec | None:
    """Return the queue of a mapped class, None if the class is not mapped yet or is not a queue."""
    return getattr(cls, _SPEC, None)


def spec_of(cls: Any) -> QueueSpec:
    """Return the queue of a mapped class; refuse any other object by NotAQueueError."""
    if not isinstance(cls, type):
        fix = f"; give the class {type(cls).__name__}" if isinstance(cls, QueueMixin) else ""
        msg = f"{cls!r} is not a mapped class{fix}"
        raise NotAQueueError(msg)
    spec = queue_spec(cls)
    if spec is not None and sa.inspect(cls, raiseerr=False) is not None:
        return spec
    if not issubclass(cls, QueueMixin):
        msg = f"{cls.__name__} is not a queue; let it inherit from sqlaqueue.QueueMixin"
    elif cls.__dict__.get("__abstract__"):
        msg = f"{cls.__name__} is abstract and has no table; use one of its mapped subclasses"
    else:
        msg = (
            f"{cls.__name__} is not mapped; map it (a declarative Base, or registry.map_imperatively) "
            "before using it as a queue"
        )
    raise NotAQueueError(msg)


def _read_config(cls: type[Any]) -> tuple[QueueConfig, ClaimStrategy, Mapping[str, str]]:
    config = cls.__queue__
    if not isinstance(config, QueueConfig):
        msg = f"{cls.__name__}.__queue__ must be a QueueConfig, not {config!r}"
        raise ConfigurationError(msg)
    config = with_declared(cls, config)
    strategy = find_strategy(config.strategy, cls.__name__)
    check_extra_columns(cls.__name__, cls.__queue__.extra_columns, config, strategy)
    roles = role_attributes(config, strategy)
    strategy = strategy.for_roles(roles)
    _check_deletes_rows(cls.__name__, config, strategy)
    check_roles(cls.__name__, strategy.required_roles, roles, config)
    return config, strategy, role_attributes(config, strategy)


def _check_deletes_rows(model: str, config: QueueConfig, strategy: ClaimStrategy) -> None:
    """Refuse a claim that deletes the rows of jobs unless the config says ``rows_are_messages=True``."""
    named = f'"{config.strategy}"' if isinstance(config.strategy, str) else repr(config.strategy)
    if config.rows_are_messages and strategy.keeps_rows:
        msg = (
            f"{model}: QueueConfig(rows_are_messages=True): the strategy {named} does not delete the rows of its jobs; "
            'use strategy="delete_returning", or leave out rows_are_messages'
        )
        raise ConfigurationError(msg)
    if not config.rows_are_messages and not strategy.keeps_rows:
        msg = (
            f"{model}: without the queue attribute 'status' a claim of the strategy {named} deletes the job's row. To "
            f"keep the rows, {config.fix_for('status')}; to have them deleted, set QueueConfig(rows_are_messages=True)"
        )
        raise ConfigurationError(msg)


@event.listens_for(QueueMixin, "instrument_class", propagate=True)
def _check_key(mapper: Mapper[Any], cls: type[Any]) -> None:
    table, given = mapper.local_table, mapper._primary_key_argument  # noqa: SLF001 - the mapper reads __mapper_args__ later than this
    if mapper.inherits is None and isinstance(table, sa.Table) and not table.primary_key.columns and not given:
        msg = (
            f"{cls.__name__} has no primary key, which a queue needs to identify jobs; add one to the table "
            f"{table.name}, or name unique columns in __mapper_args__ = {{'primary_key': [...]}}"
        )
        raise ConfigurationError(msg)


@event.listens_for(QueueMixin, "after_mapper_constructed", propagate=True)
def _make_queue(mapper: Mapper[Any], cls: type[Any]) -> None:
    _check_placeholders(mapper, cls)
    parent = None if mapper.inherits is None else mapper.inherits.class_
    if parent is not None and not (mapper.concrete and queue_spec(parent) is None):
        _check_inheritance(mapper, cls, parent)
        return
    table = mapper.local_table
    if not isinstance(table, sa.Table):
        msg = f"{cls.__name__} is mapped to {table!r}; a queue needs a table of its own"
        raise ConfigurationError(msg)
    config, strategy, roles = _read_config(cls)
    complete_table(mapper, table, config, roles)
    columns = {role: column_of(mapper, role, attribute, config) for role, attribute in roles.items()}
    _check_key_is_unchanged(mapper, columns)
    if not config.waits:
        # Statements leave out states without a value.
        config = replace(config, states=replace(config.states, waiting=None))
    if "status" in columns:
        config = replace(config, states=states_in(cls.__name__, columns["status"].type, config.states))
    if config.waits:
        _check_waiting(cls.__name__, config, columns)
    spec = QueueSpec(
        mapper=mapper,
        table=table,
        config=config,
        # str(): SQLAlchemy cannot render its own quoted_name as a literal.
        name=config.name or str(table.fullname),
        attributes=roles,
        columns=columns,
        strategy=strategy,
    )
    setattr(cls, _SPEC, spec)
    set_queue(table, spec)
    if "traceparent" in columns:
        check_type(f"{cls.__name__}.{roles['traceparent']}", columns["traceparent"])
        set_insert_default(columns["traceparent"])
        trace_instances(cls, roles["traceparent"])
    check_partition_key(spec)
    strategy.attach(spec)
    attach_flow_control(spec, strategy)
    if "run_at" in columns and getattr(columns["run_at"].type, "timezone", False):
        event.listen(getattr(cls, roles["run_at"]), "set", _check_time_zone, propagate=True)


def _check_waiting(model: str, config: QueueConfig, columns: Mapping[str, sa.Column[Any]]) -> None:
    check_roles(model, dict.fromkeys(WAIT_ROLES[:1], "QueueConfig(waits_for=...)"), columns, config)
    if any(wait.on_failure == "cancel" for wait in config.waits):
        check_roles(model, {"cancelled_for": 'WaitFor(on_failure="cancel")'}, columns, config)
    for state in ("waiting", "cancelled"):
        if getattr(config.states, state) is None:
            msg = (
                f"{model}: QueueConfig(waits_for=...) needs a status value for {state} jobs; give one with "
                f"QueueConfig(states=States({state}=...))"
            )
            raise ConfigurationError(msg)


def _check_placeholders(mapper: Mapper[Any], cls: type[Any]) -> None:
    """Refuse queue_column() in a subclass: the queue of its parent would not use the column."""
    for attribute, column in mapper.columns.items():
        if is_placeholder(column):
            owner = queue_spec(cls)
            where = "the first class that inherits from QueueMixin" if owner is None else owner.model.__name__
            msg = f"{cls.__name__}.{attribute} = queue_column(...): declare it in the class of the queue, {where}"
            raise ConfigurationError(msg)


def _check_key_is_unchanged(mapper: Mapper[Any], columns: Mapping[str, sa.Column[Any]]) -> None:
    """Refuse a primary key that the queue would change: instances, messages and claims refer to jobs by key."""
    for role, column in columns.items():
        if role not in UNCHANGED_ROLES and column in mapper.primary_key:
            name = mapper.class_.__name__
            key = ", ".join(mapper.get_property_by_column(part).key for part in mapper.primary_key)
            msg = (
                f"{name}.{mapper.get_property_by_column(column).key} is part of the primary key ({key}), which "
                f"identifies a job, but as {role!r} it changes while the job is in the queue: take it out of the key, "
                f"or name the other columns in __mapper_args__ = {{'primary_key': [...]}} if they are unique"
            )
            raise ConfigurationError(msg)


def _check_time_zone(job: Any, value: Any, old: Any, initiator: Any) -> None:  # noqa: ARG001 - the event's signature
    """Refuse a datetime without a time zone: the server would interpret it in the time zone of its session."""
    if isinstance(value, datetime) and value.tzinfo is None:
        attribute = f"{type(job).__name__}.{initiator.key}"
        msg = f"{attribute} = {value!r}: the column has a time zone; use a datetime with tzinfo, e.g. datetime.now(UTC)"
        raise StatementError(msg)


def _check_inheritance(mapper: Mapper[Any], cls: type[Any], parent: type[Any]) -> None:
    spec = queue_spec(parent)
    if spec is None:
        msg = (
            f"{cls.__name__} inherits from {parent.__name__}, which is mapped and not a queue: let {parent.__name__} "
            f"inherit from QueueMixin instead; claim(select({cls.__name__}), n) claims only jobs of {cls.__name__}"
        )
    elif mapper.concrete:
        msg = (
            f"{cls.__name__} inherits from the queue {parent.__name__} and has a table of its own (concrete "
            "inheritance): move the shared attributes to an abstract class, and let both inherit from it"
        )
    elif "__queue__" in cls.__dict__:
        msg = f"{cls.__name__}.__queue__: a subclass shares the queue of {spec.model.__name__}; set it there"
    else:
        columns = {attribute: spec.columns[role] for role, attribute in spec.attributes.items()}
        check_subclass(mapper, spec.model, columns)
        return
    raise ConfigurationError(msg)


def specs_by_name(models: Iterable[type[Any]], what: str, *, of_one_name: str) -> dict[str, QueueSpec]:
    """Return the queues of some classes by their names, in the order of the list; a class may be listed twice.

    :param what: the class or function that was given the list, for error messages.
    :param of_one_name: what to do about two queues of one name, for the error message.
    """
    given: object = models  # without a type checker, callers may pass a class
    if isinstance(given, type) or not isinstance(given, Iterable):
        name = given.__name__ if isinstance(given, type) else repr(given)
        msg = f"{what}({name}): give a list of queue classes, as in {what}([{name}], ...)"
        raise ConfigurationError(msg)
    found: dict[str, QueueSpec] = {}
    for model in models:
        spec = spec_of(model)
        other = found.setdefault(spec.name, spec)
        if other is not spec:
            both = f"{other.model.__name__} and {spec.model.__name__}"
            msg = f"{what}: {both} are both named {spec.name!r}{of_one_name}"
            raise ConfigurationError(msg)
    if not found:
        msg = f"{what}([]): give at least one queue class"
        raise ConfigurationError(msg)
    return found
