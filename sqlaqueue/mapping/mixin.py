"""From a mapped class to a queue: :class:`QueueMixin` and what happens when a class with it is mapped.

:mod:`sqlaqueue.mapping.columns` adds the queue attributes. Once the class has its mapper, the roles are resolved and
the strategy attaches its indexes, side tables and triggers, so that ``metadata.create_all()`` makes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any, ClassVar

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.orm import ColumnProperty, InstanceState, Mapper, QueryContext
from sqlalchemy.orm.attributes import instance_state

from sqlaqueue.exc import ConfigurationError, NotAQueueError, StatementError
from sqlaqueue.keys import key_text
from sqlaqueue.mapping.attributes import QueueAttributes
from sqlaqueue.mapping.columns import (
    add_fields,
    check_subclass,
    column_of,
    complete_table,
    new_columns,
    placed_roles,
    with_declared,
)
from sqlaqueue.mapping.queue_column import is_placeholder
from sqlaqueue.postgresql.ddl import set_queue
from sqlaqueue.queue.config import QueueConfig
from sqlaqueue.queue.roles import states_of
from sqlaqueue.queue.run import Run
from sqlaqueue.queue.spec import QueueSpec, check_roles
from sqlaqueue.strategies import ClaimStrategy, find_strategy

CLAIM_OPTION = "sqlaqueue_claim"
"""The execution option by which a loading Session knows that rows were handed out by a claim."""

RUN_ROLES = ("attempts", "max_attempts", "lease_token")
"""The roles that tell which run a claim hands out."""

_KEPT_ROLES = ("priority", "created_at", "max_attempts")
"""The roles that a queue reads only; it writes all others while a job lives."""

_SPEC = "__queue_spec__"
_RUN = "sqlaqueue_run"


class QueueMixin(QueueAttributes):
    """Makes a mapped class a queue: its rows are the jobs.

    ::

        class Email(QueueMixin, Base):
            __tablename__ = "email"
            __queue__ = QueueConfig(strategy="update_status", max_attempts=5)

            id: Mapped[int] = mapped_column(primary_key=True)
            to: Mapped[str]

    The queue attributes are added to the class unless ``QueueConfig(columns=...)`` or ``QueueConfig(adopt=...)`` says
    otherwise. Which of them a queue needs depends on its strategy; leases are only kept where the strategy has them.
    """

    __queue__: ClassVar[QueueConfig] = QueueConfig()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Add the queue attributes that have to be there before the class is mapped."""
        if queue_spec(cls) is None:
            config, _, roles = _read_config(cls)
            add_fields(cls, config, roles)
        super().__init_subclass__(**kwargs)

    @classmethod
    def __table_cls__(cls, name: str, metadata: sa.MetaData, *items: Any, **options: Any) -> Any:
        """Make the table of a declarative class, with the columns of the queue before any index that names them."""
        if queue_spec(cls) is None:
            config, _, roles = _read_config(cls)
            columns = [item for item in items if isinstance(item, sa.Column)]
            others = [item for item in items if not isinstance(item, sa.Column)]
            items = (*columns, *new_columns(cls, config, roles), *others)
        make = getattr(super(), "__table_cls__", sa.Table)
        return make(name, metadata, *items, **options)


def queue_spec(cls: type[Any]) -> QueueSpec | None:
    """Return the queue of a mapped class, None for a class that is not mapped (yet) or has none."""
    return getattr(cls, _SPEC, None)


def spec_of(cls: Any) -> QueueSpec:
    """Return the queue of a mapped class.

    :raises NotAQueueError: for anything else, saying what is missing.
    """
    if not isinstance(cls, type):
        msg = f"{cls!r} is not a mapped class"
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
    strategy = find_strategy(config.strategy)
    roles = placed_roles(config, strategy)
    strategy = strategy.for_roles(roles)
    _check_deleting(cls.__name__, config, strategy)
    check_roles(cls.__name__, strategy.required_roles, roles, config)
    return config, strategy, placed_roles(config, strategy)


def _check_deleting(model: str, config: QueueConfig, strategy: ClaimStrategy) -> None:
    """Let a claim delete the rows of jobs only where the config says so in as many words."""
    named = f'"{config.strategy}"' if isinstance(config.strategy, str) else repr(config.strategy)
    if config.rows_are_messages and strategy.keeps_rows:
        msg = (
            f"{model}: QueueConfig(rows_are_messages=True): the strategy {named} does not delete the rows of its jobs; "
            'give strategy="delete_returning", or leave out rows_are_messages'
        )
        raise ConfigurationError(msg)
    if not config.rows_are_messages and not strategy.keeps_rows:
        msg = (
            f"{model}: without the queue attribute 'status' a claim of the strategy {named} deletes the row of the "
            f"job, and nothing of it is left. If the rows are to stay, {config.fix_for('status')}; if each row is its "
            "own message, to be deleted, say so with QueueConfig(rows_are_messages=True)"
        )
        raise ConfigurationError(msg)


@event.listens_for(QueueMixin, "instrument_class", propagate=True)
def _check_key(mapper: Mapper[Any], cls: type[Any]) -> None:
    table, given = mapper.local_table, mapper._primary_key_argument  # noqa: SLF001 - what the class says of its key is read later than this
    if mapper.inherits is None and isinstance(table, sa.Table) and not table.primary_key.columns and not given:
        msg = (
            f"{cls.__name__} has no primary key, by which a queue tells its jobs apart; add one to the table "
            f"{table.name}, or name columns that are unique in __mapper_args__ = {{'primary_key': [...]}}"
        )
        raise ConfigurationError(msg)


@event.listens_for(QueueMixin, "after_mapper_constructed", propagate=True)
def _make_queue(mapper: Mapper[Any], cls: type[Any]) -> None:
    _keep_run_when_merged(mapper)
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
    _check_written(mapper, columns)
    if "status" in columns:
        config = replace(config, states=states_of(cls.__name__, columns["status"].type, config.states))
    spec = QueueSpec(
        mapper=mapper,
        table=table,
        config=config,
        # A plain text: of SQLAlchemy's own kind of text a statement does not know how to write it as a literal.
        name=config.name or str(table.fullname),
        attributes=roles,
        columns=columns,
        strategy=strategy,
    )
    setattr(cls, _SPEC, spec)
    set_queue(table, spec)
    strategy.attach(spec)
    if "run_at" in columns and getattr(columns["run_at"].type, "timezone", False):
        event.listen(getattr(cls, roles["run_at"]), "set", _check_zone, propagate=True)


def _check_placeholders(mapper: Mapper[Any], cls: type[Any]) -> None:
    """Refuse a column that a subclass declares by queue_column(): its parent's queue would not use it."""
    for attribute, column in mapper.columns.items():
        if is_placeholder(column):
            owner = queue_spec(cls)
            where = "a class that inherits from QueueMixin first" if owner is None else f"{owner.model.__name__}"
            msg = f"{cls.__name__}.{attribute} = queue_column(...): it belongs to the class that has the queue, {where}"
            raise ConfigurationError(msg)


def _check_written(mapper: Mapper[Any], columns: Mapping[str, sa.Column[Any]]) -> None:
    """Refuse a key that changes while a job lives: its instance, its message and its claim would name another job."""
    for role, column in columns.items():
        if role not in _KEPT_ROLES and column in mapper.primary_key:
            name = mapper.class_.__name__
            key = ", ".join(mapper.get_property_by_column(part).key for part in mapper.primary_key)
            msg = (
                f"{name}.{mapper.get_property_by_column(column).key} is part of the primary key ({key}), by which a "
                f"queue tells its jobs apart, and as its {role!r} it changes while a job lives: take it out of the "
                f"key, or name the other columns in __mapper_args__ = {{'primary_key': [...]}} if they are unique"
            )
            raise ConfigurationError(msg)


def _check_zone(job: Any, value: Any, old: Any, initiator: Any) -> None:  # noqa: ARG001 - the event's signature
    """Refuse a moment without a zone: the server would read it in that of its session, whichever that is."""
    if isinstance(value, datetime) and value.tzinfo is None:
        attribute = f"{type(job).__name__}.{initiator.key}"
        msg = f"{attribute} = {value!r}: the column has a time zone; give a datetime with tzinfo, as datetime.now(UTC)"
        raise StatementError(msg)


def _check_inheritance(mapper: Mapper[Any], cls: type[Any], parent: type[Any]) -> None:
    spec = queue_spec(parent)
    if spec is None:
        msg = (
            f"{cls.__name__} inherits the table of {parent.__name__}, which is no queue: let {parent.__name__} inherit "
            f"from QueueMixin instead, and claim(select({cls.__name__}), n) where only these are wanted"
        )
    elif mapper.concrete:
        msg = (
            f"{cls.__name__} inherits from the queue {parent.__name__} and has a table of its own (concrete "
            "inheritance): move what they share to an abstract class, and let both inherit from that"
        )
    elif "__queue__" in cls.__dict__:
        msg = f"{cls.__name__}.__queue__: a subclass shares the queue of {spec.model.__name__}; set it there"
    else:
        columns = {attribute: spec.columns[role] for role, attribute in spec.attributes.items()}
        check_subclass(mapper, spec.model, columns)
        return
    raise ConfigurationError(msg)


# -- the run of a job, kept beside its instance ----------------------------------------------------------------


def run_of(job: Any) -> Run | None:
    """Return the run for which a claim handed this instance out, None when it holds none."""
    run: Run | None = instance_state(job).info.get(_RUN)
    return run


def set_run(job: Any, run: Run | None) -> None:
    """Keep ``run`` beside an instance; None forgets it."""
    if run is None:
        instance_state(job).info.pop(_RUN, None)
    else:
        instance_state(job).info[_RUN] = run


def show_claimed(job: Any, spec: QueueSpec) -> None:
    """Let an instance show its claim.

    A claim that holds a transaction writes nothing: the row is counted when the run ends. The instance shows it
    before, so that a handler reads the same under every strategy.
    """
    if not spec.strategy.holds_transaction:
        return
    attributes, values = spec.attributes, job.__dict__
    # As the loading itself does it: nothing of what has just been loaded has been changed yet.
    if "attempts" in attributes:
        values[attributes["attempts"]] = (values.get(attributes["attempts"]) or 0) + 1
    if "status" in attributes and spec.config.states.processing is not None:
        values[attributes["status"]] = spec.config.states.processing


def hand_out(state: InstanceState[Any], session: Any, token: str | None = None) -> None:
    """Note that a claim has just handed out an instance, whose columns are loaded.

    This is done for every job: what is alike for all of a queue is looked up once.
    """
    job: Any = state.obj()
    spec, values, info = queue_spec(type(job)), job.__dict__, state.info
    if spec is None:
        return
    show_claimed(job, spec)
    token_name, limit_name, attempts_name = spec.run_attributes
    limit = values.get(limit_name)
    if limit is None:
        limit = spec.config.max_attempts
    key: Any = state.identity
    run = Run(key, values.get(token_name, token), values.get(attempts_name) or 1, limit)
    if session is not None and spec.strategy.holds_transaction:
        run.transaction, run.savepoint = session.get_transaction(), session.get_nested_transaction()
        if _RUN in info and _is_same_run(info[_RUN], run):
            msg = (
                f"{type(job).__name__} {key_text(run.key)} was claimed twice in one transaction, which already holds "
                "it: settle what a claim handed out and commit before the next claim"
            )
            raise StatementError(msg)
    info[_RUN] = run


def _is_same_run(one: Run, other: Run) -> bool:
    """Whether a transaction was handed a job that it holds: SKIP LOCKED passes over the locks of others only."""
    if one.transaction is None or one.transaction is not other.transaction:
        return False
    undone = one.savepoint is not None and not one.savepoint.is_active
    return not undone and one.attempt == other.attempt


@event.listens_for(QueueMixin, "pickle", propagate=True)
def _pickled(job: Any, state: dict[str, Any]) -> None:
    run: Run | None = state.get("info", {}).get(_RUN)
    if run is not None:
        held = spec_of(type(job)).strategy.holds_transaction
        state["info"] = {**state["info"], _RUN: run.copied(held=held)}


class _KeyProperty(ColumnProperty[Any]):
    """The key of a queue class: a merge that copies it to another instance brings the run along.

    A merge of instances has no event.
    """

    __slots__ = ()
    inherit_cache = True

    def merge(
        self,
        session: Any,
        source_state: InstanceState[Any],
        source_dict: Any,
        dest_state: InstanceState[Any],
        *others: Any,
        **more: Any,
    ) -> None:
        super().merge(session, source_state, source_dict, dest_state, *others, **more)
        run: Run | None = source_state.info.get(_RUN)
        its: Run | None = dest_state.info.get(_RUN)
        if run is not None and (its is None or its.claimed_at < run.claimed_at):
            dest_state.info[_RUN] = run


def _keep_run_when_merged(mapper: Mapper[Any]) -> None:
    key = mapper.get_property_by_column(mapper.primary_key[0])
    if type(key) is ColumnProperty:
        key.__class__ = _KeyProperty


# Both are called for each row that is loaded: so they are given the state, as the Session has it at hand.


@event.listens_for(QueueMixin, "load", propagate=True, raw=True)
def _loaded(state: InstanceState[Any], context: QueryContext | None) -> None:
    # None: Session.merge() says so of what it copies.
    if context is not None and CLAIM_OPTION in context.query.get_execution_options():
        hand_out(state, context.session)


@event.listens_for(QueueMixin, "refresh", propagate=True, raw=True)
def _refreshed(state: InstanceState[Any], context: QueryContext | None, attributes: Any) -> None:  # noqa: ARG001 - the event's signature
    if context is not None and CLAIM_OPTION in context.query.get_execution_options():
        hand_out(state, context.session)
