"""The relationships by which jobs wait for others, when the mappers are configured: ``QueueConfig(waits_for=...)``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.orm import Mapper, RelationshipDirection, RelationshipProperty
from sqlalchemy.sql.elements import BinaryExpression
from sqlalchemy.sql.visitors import iterate

from sqlaqueue.exc import ConfigurationError
from sqlaqueue.mapping.mixin import QueueMixin, queue_spec
from sqlaqueue.postgresql.ddl import queue_of
from sqlaqueue.postgresql.waits import attach_awaited, attach_waiting
from sqlaqueue.queue.options import WaitFor
from sqlaqueue.queue.spec import QueueSpec, WaitRelation
from sqlaqueue.strategies.columns import add_index
from sqlaqueue.texts import did_you_mean


@event.listens_for(QueueMixin, "mapper_configured", propagate=True)
def _resolve(mapper: Mapper[Any], cls: type[Any]) -> None:
    spec = queue_spec(cls)
    if spec is None or spec.mapper is not mapper or not spec.config.waits or spec.waits:
        return
    waits = [_wait(spec, given) for given in spec.config.waits]
    if spec.has("is_open") and not any(wait.to_many for wait in waits):
        msg = (
            f"{cls.__name__}: QueueConfig(extra_columns=('is_open',)): only a batch can be open, and none of "
            "waits_for leads to many jobs; leave it out"
        )
        raise ConfigurationError(msg)
    spec.waits.extend(waits)
    for wait in waits:
        # The class of the awaited jobs may be defined once, and that of the waiting ones again.
        known = [each for each in wait.awaited.awaited_by if each.full_name == wait.full_name]
        for each in known:
            wait.awaited.awaited_by.remove(each)
        wait.awaited.awaited_by.append(wait)
        _add_index(wait)
        attach_awaited(wait)
    attach_waiting(spec)


@event.listens_for(sa.MetaData, "before_create")
def _configure_all(metadata: sa.MetaData, *_: Any, **__: Any) -> None:
    configure_waits(metadata)


@event.listens_for(sa.Table, "before_create")
def _configure(table: sa.Table, *_: Any, **__: Any) -> None:
    _configure_queue(queue_of(table))


def configure_waits(metadata: sa.MetaData) -> None:
    """Configure the mappers of the queues of a MetaData whose jobs wait for others.

    Until then it is not known for what, and the tables lack their triggers and indexes.
    """
    for table in list(metadata.tables.values()):
        _configure_queue(queue_of(table))


def _configure_queue(spec: QueueSpec | None) -> None:
    if spec is not None and spec.config.waits and not spec.waits:
        spec.mapper.registry.configure(cascade=True)


def _wait(spec: QueueSpec, given: WaitFor) -> WaitRelation:
    name = given.relationship
    what = f"{spec.model.__name__}: QueueConfig(waits_for={name!r})"
    if not spec.mapper.has_property(name):
        known = [each.key for each in spec.mapper.iterate_properties if isinstance(each, RelationshipProperty)]
        msg = f"{what}: there is no such relationship{did_you_mean(name, known)}"
        raise ConfigurationError(msg)
    found = spec.mapper.get_property(name)
    if not isinstance(found, RelationshipProperty):
        msg = f"{what}: {spec.model.__name__}.{name} is no relationship; name one that leads to jobs"
        raise ConfigurationError(msg)
    awaited = queue_spec(found.mapper.class_)
    if awaited is None:
        msg = (
            f"{what}: {found.mapper.class_.__name__} is no queue; let it inherit from sqlaqueue.QueueMixin, or name a "
            "relationship to jobs"
        )
        raise ConfigurationError(msg)
    pairs, to_many = _pairs(found), found.direction is RelationshipDirection.ONETOMANY
    for reason in _reasons_against(spec, found, awaited, pairs):
        raise ConfigurationError(f"{what}: {reason}")
    on_failure = given.on_failure or ("continue" if found.uselist else "block")
    for reason in _reasons_against_states(awaited, on_failure, to_many=to_many):
        raise ConfigurationError(f"{what}: {reason}")
    key = _foreign_key(awaited.table if to_many else spec.table, pairs, to_many=to_many)
    on_delete = "NO ACTION" if key is None else (key.ondelete or "NO ACTION").upper()
    return WaitRelation(name, spec, awaited, pairs, to_many=to_many, on_failure=on_failure, on_delete=on_delete)


_Pairs = list[tuple[sa.Column[Any], sa.Column[Any]]]
"""The columns that a relationship compares: one of the waiting job, and one of the awaited job."""


def _pairs(found: RelationshipProperty[Any]) -> _Pairs:
    pairs = found.local_remote_pairs or ()
    return [(here, there) for here, there in pairs if isinstance(here, sa.Column) and isinstance(there, sa.Column)]


def _reasons_against(
    spec: QueueSpec, found: RelationshipProperty[Any], awaited: QueueSpec, pairs: _Pairs
) -> Iterator[str]:
    model, target, name = spec.model.__name__, found.mapper.class_.__name__, found.key
    if found.secondary is not None or found.direction is RelationshipDirection.MANYTOMANY:
        yield (
            f"the relationship goes through the table {getattr(found.secondary, 'name', '')}, which says nothing of "
            f"the end of a job; give one of the two tables a foreign key, or make the rows of that table jobs"
        )
    elif found.viewonly:
        yield "the relationship is viewonly, so its rows need not be all; name one with a foreign key of its own"
    elif found.mapper is not awaited.mapper:
        yield (
            f"{target} is a subclass, whose jobs share a table with those of another class; let the relationship lead "
            f"to {awaited.model.__name__}"
        )
    elif not awaited.has("status"):
        yield (
            f"the rows of {target} are messages (rows_are_messages=True), which a claim deletes: the end of a job and "
            f"its deletion cannot be distinguished; leave rows_are_messages out of {target}"
        )
    elif found.direction is RelationshipDirection.MANYTOONE and awaited.config.on_complete == "delete":
        yield (
            f'{target} has on_complete="delete": the row that {model} refers to would be deleted when it ends; leave '
            f"on_complete out of {target}, which retention= can delete later"
        )
    else:
        to_many = found.direction is RelationshipDirection.ONETOMANY
        tables = {id(here.table) for here, _ in pairs} | {id(spec.table)}, {id(there.table) for _, there in pairs}
        if len(tables[0]) > 1 or tables[1] != {id(awaited.table)}:
            yield (
                f"its foreign key is not in the tables of the two queues, {spec.table.name} and {awaited.table.name}; "
                "move it there"
            )
        elif _foreign_key(awaited.table if to_many else spec.table, pairs, to_many=to_many) is None:
            yield (
                f"{model}.{name} has a primaryjoin that is no foreign key, so that triggers cannot follow it; use a "
                "relationship that joins by a ForeignKey alone"
            )
        elif _compared(found) != len(pairs):
            yield (
                f"the primaryjoin of {model}.{name} has further conditions, which triggers cannot follow; use a "
                "relationship that joins by its foreign key alone"
            )


def _compared(found: RelationshipProperty[Any]) -> int:
    return sum(isinstance(each, BinaryExpression) for each in iterate(found.primaryjoin))


def _reasons_against_states(awaited: QueueSpec, on_failure: str, *, to_many: bool) -> Iterator[str]:
    deletes = to_many and awaited.config.on_complete == "delete"
    if awaited.config.states.completed is None and not deletes:
        name = awaited.model.__name__
        yield f"{name} has no status value for completed jobs, so none ends; set States(completed=...) in {name}"
    if on_failure != "continue" and awaited.config.states.failed is None:
        name = awaited.model.__name__
        yield f"{name} has no status value for failed jobs; set States(failed=...) in {name}"


def _foreign_key(table: sa.Table, pairs: _Pairs, *, to_many: bool) -> sa.ForeignKeyConstraint | None:
    """Return the foreign key of a table that consists of just these columns."""
    wanted = {(there, here) if to_many else (here, there) for here, there in pairs}
    for key in table.foreign_key_constraints:
        if {(element.parent, element.column) for element in key.elements} == wanted:
            return key
    return None


def _add_index(wait: WaitRelation) -> None:
    """Add the index of the foreign key, unless the table has one that begins with its columns."""
    owner = wait.awaited if wait.to_many else wait.waiting
    columns = [there if wait.to_many else here for here, there in wait.pairs]
    lists: list[list[Any]] = [list(index.expressions) for index in owner.table.indexes if not _is_partial(index)]
    lists += [list(each.columns) for each in owner.table.constraints if isinstance(each, sa.UniqueConstraint)]
    lists.append(list(owner.table.primary_key.columns))
    # On SQLite a claim looks for a member in a state that has not ended. MariaDB has an index for each foreign key, of
    # its own; it would drop that for another one, which a migration could not drop again.
    of_state = [*columns, wait.awaited.columns["status"]] if wait.to_many else columns
    if not any({*map(id, each[: len(columns)])} == {*map(id, columns)} for each in lists):
        add_index(owner, f"waits_{wait.name}", columns, plain=(of_state, None), only=("postgresql", "sqlite"))
    elif wait.to_many:
        add_index(owner, f"waits_{wait.name}", of_state, only=("sqlite",))


def _is_partial(index: sa.Index) -> bool:
    return index.dialect_options["postgresql"]["where"] is not None
