"""Columns of the model's table in the subqueries and CTEs of a statement."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import sqlalchemy as sa
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.orm import Mapper
from sqlalchemy.sql.elements import KeyedColumnElement, conv
from sqlalchemy.sql.functions import FunctionElement

from sqlaqueue._typing import AnySelect
from sqlaqueue.exc import ConfigurationError
from sqlaqueue.flow_control.keys import flow_control
from sqlaqueue.queue.options import UNFINISHED
from sqlaqueue.queue.roles import UNCHANGED_ROLES
from sqlaqueue.queue.run import Key
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.queue.strategy_protocol import KeyRange
from sqlaqueue.sql.engine import ONLY, PLAIN, PlainIndex, exists_on
from sqlaqueue.sql.types import object_name
from sqlaqueue.texts import did_you_mean


def attribute_names(mapper: Mapper[Any]) -> dict[sa.ColumnElement[Any], str]:
    """Return the columns of a class with the names of their attributes."""
    return {column: attribute.key for attribute in mapper.column_attrs for column in attribute.columns}


def named(columns: Iterable[sa.Column[Any]]) -> list[sa.Label[Any]]:
    """Return columns for the RETURNING of a CTE, labelled with their keys.

    SQLAlchemy 2.1 refers to a column whose name has more than 57 characters by a shorter name, which the RETURNING of
    an UPDATE or DELETE does not have.
    """
    return [column.label(column.key) for column in columns]


def column_of(rows: sa.FromClause, column: KeyedColumnElement[Any]) -> sa.ColumnElement[Any]:
    """Return the column of ``rows`` that stems from ``column`` of the model's table."""
    found = rows.corresponding_column(column)
    if found is None:
        msg = f"{column} is not among the columns of {rows}"
        raise LookupError(msg)
    return found


class AmongLocked(FunctionElement[bool]):
    """The condition that a key is one of those that a SELECT finds and locks.

    PostgreSQL executes the SELECT once, also under a generic plan. An engine that cannot lock rows within another
    statement has locked them before, see :class:`~sqlaqueue.queue.strategy_protocol.LockSteps`.

    :param key: the column.
    :param rows: the SELECT, as a scalar subquery.
    """

    inherit_cache = True
    type = sa.Boolean()

    def __init__(self, key: sa.ColumnElement[Any], rows: sa.ScalarSelect[Any]) -> None:
        super().__init__(key, rows)

    def self_group(self, against: Any = None) -> Any:
        """Return the condition as it is: the base class adds ``= 1`` for databases without booleans."""
        return self


@compiles(AmongLocked)
def _render_among_locked(element: AmongLocked, compiler: Any, **options: Any) -> str:
    key, rows = element.clauses
    return str(compiler.process(key == sa.any_(sa.func.array(rows)), **options))


def numbered(prefix: str, columns: Sequence[sa.Column[Any]]) -> list[sa.Label[Any]]:
    """Return columns labelled ``prefix_0``, ``prefix_1`` and so on."""
    return [column.label(f"{prefix}_{number}") for number, column in enumerate(columns)]


def same(columns: Sequence[sa.ColumnElement[Any]], others: Sequence[sa.ColumnElement[Any]]) -> sa.ColumnElement[bool]:
    """Return the condition that columns are equal in pairs."""
    return sa.and_(*(column == other for column, other in zip(columns, others, strict=True)))


def named_in(rows: sa.FromClause, columns: Iterable[sa.Column[Any]]) -> list[sa.ColumnElement[Any]]:
    """Return the columns of ``rows`` that stem from ``columns`` of the model's table."""
    return [column_of(rows, column) for column in columns]


# -- blocking heads ----------------------------------------------------------------------------------------------------
# Failed jobs that hold the others of their key back, as ``InOrder(on_failure="block")`` says.


def holds_none_back(spec: QueueSpec) -> list[sa.ColumnElement[bool]]:
    """Return the conditions that a job is no failed one with pending jobs behind it, for statements that delete jobs.

    Deleting it would let those run.
    """
    flow = flow_control(spec)
    if flow is None or flow.order is None or flow.order.config.on_failure != "block":
        return []
    order, other = flow.order, spec.table.alias("sqlaqueue_behind")
    mine, theirs = (sa.tuple_(*(rows.c[column.key] for column in order.by)) for rows in (spec.table, other))
    behind = sa.exists().where(
        order.hashed(other) == order.of(spec.table),
        other.c[spec.columns["status"].key] == spec.literal("pending"),
        theirs > mine,
    )
    return [~sa.and_(spec.in_state("failed"), behind.correlate(spec.table))]


def waits_for_none(spec: QueueSpec) -> list[sa.ColumnElement[bool]]:
    """Return the conditions that no unfinished job waits for a job, nor a job for it, for statements that delete jobs.

    A batch may still have to read its members, and a member that was requeued would be deleted with its batch.
    """
    conditions = []
    for wait in dict.fromkeys([*spec.awaited_by, *spec.waits]):
        for owner, other in ((wait.awaited, wait.waiting), (wait.waiting, wait.awaited)):
            if owner is not spec or (owner is wait.waiting and not wait.to_many):
                continue
            rows = other.table.alias("sqlaqueue_other")
            status, states = rows.c[other.columns["status"].key], other.config.states
            live = [other.literal(state) for state in UNFINISHED if getattr(states, state) is not None]
            mine = [here if owner is wait.waiting else there for here, there in wait.pairs]
            theirs = [rows.c[(there if owner is wait.waiting else here).key] for here, there in wait.pairs]
            # Without ON DELETE the foreign key keeps the row that it refers to in any case.
            is_kept = wait.keeps and owner is (wait.waiting if wait.to_many else wait.awaited)
            refers = sa.exists().where(same(theirs, mine), *([] if is_kept else [status.in_(live)]))
            conditions.append(~refers.correlate(spec.table))
    return conditions


Plain = tuple[Sequence[sa.ColumnElement[Any]], sa.ColumnElement[bool] | None]
"""The columns and the condition of an index."""

_OF_OTHERS = {"finished", "unique"}
"""The purposes of indexes that neither claims nor rescues read."""


def add_index(
    spec: QueueSpec,
    purpose: str,
    columns: Sequence[sa.ColumnElement[Any]],
    where: sa.ColumnElement[bool] | None = None,
    *,
    unique: bool = False,
    plain: Plain | Literal["same"] | None = "same",
    compared: Sequence[sa.ColumnElement[Any]] = (),
    only: Sequence[str] | None = None,
) -> sa.Index:
    """Add an index to the model's table, named after its purpose.

    :param plain: columns and condition on databases other than PostgreSQL, which cannot index the hash of a key; None
        for no index there.
    :param compared: the columns of the condition beside the status. An index begins with them on databases without
        partial indexes.
    :param only: the names of the dialects that have the index; by default all, or PostgreSQL if ``plain`` is None.

    The name is final (``conv``): a naming convention would name the index after its first column, which two indexes of
    a queue may share.
    """
    name = conv(index_for(spec, purpose))
    # The table of a class that is defined again still has the index of the class before.
    for known in [index for index in spec.table.indexes if index.name == name]:
        spec.table.indexes.discard(known)
    index = sa.Index(name, *columns, unique=unique, postgresql_where=where)
    only = ("postgresql",) if plain is None else only
    if only is not None:
        index.info[ONLY] = only
        is_wanted: Any = _is_wanted
        index.ddl_if(callable_=is_wanted)
    if plain is not None:
        its, condition = (None, where) if plain == "same" else plain
        status = [spec.columns["status"]] if spec.has("status") and condition is not None else []
        index.info[PLAIN] = PlainIndex(its, condition, [*status, *compared])
    if purpose not in _OF_OTHERS and (only is None or "postgresql" in only):
        spec.claim_indexes.append(index)
    return index


def _is_wanted(_: Any, index: Any, *__: Any, dialect: Any, **___: Any) -> bool:
    return exists_on(index, dialect)


def by_index(rows: AnySelect, table: sa.FromClause, name: str) -> AnySelect:
    """Return a SELECT that finds the rows of a table by one index on MariaDB, which locks each row that it looks at.

    :param name: the name of the index, or PRIMARY.
    """
    # SQLAlchemy fills the name of the table in by the operator for texts, and the driver the parameters.
    hint = f"FORCE INDEX (`{name.replace('`', '``')}`)".replace("%", "%" * 4)
    return rows.with_hint(table, hint, "mariadb").with_hint(table, hint, "mysql")


def by_key(verb: sa.Update) -> sa.Update:
    """Return an UPDATE that finds its rows by their primary key on MariaDB, also in a small table."""
    hint = "FORCE INDEX (PRIMARY)"
    return verb.with_hint(hint, dialect_name="mariadb").with_hint(hint, dialect_name="mysql")


def index_for(spec: QueueSpec, purpose: str) -> str:
    """Return the name of the index that :func:`add_index` adds for a purpose."""
    return object_name("ix", spec.table.name, "queue", purpose)


# -- key columns -------------------------------------------------------------------------------------------------------
# The columns of attributes that a configuration names as a key, checked when a class is mapped.


def column_named(spec: QueueSpec, name: str, what: str) -> sa.Column[Any]:
    """Return the column of an attribute.

    :param what: the class and the part of its configuration, for errors.
    :raises ConfigurationError: if the class has no such attribute with a column in its own table.
    """
    column = spec.mapper.columns.get(name)
    if isinstance(column, sa.Column) and column.table is spec.table:
        return column
    # Not mapper.attrs, which would configure the mappers of classes that refer to others not mapped yet.
    is_other = column is None and spec.mapper.has_property(name)
    hint = "; of a relationship, name the attributes of its foreign key" if is_other else ""
    msg = f"{what}: there is no such attribute with a column in {spec.table.name}{hint}"
    raise ConfigurationError(msg + ("" if is_other else did_you_mean(name, spec.mapper.columns.keys())))


def key_column(spec: QueueSpec, name: str, what: str) -> sa.Column[Any]:
    """Return the column of an attribute that is a part of a key: its values are compared, and must not change.

    :raises ConfigurationError: if there is no such column, or it is not fit to be a key.
    """
    column, model = column_named(spec, name, what), spec.model.__name__
    role = next((role for role, other in spec.columns.items() if other is column), None)
    if role is not None and role not in UNCHANGED_ROLES:
        msg = f"{what}: {model}.{name} is the {role} of the queue, which changes while a job is in it; leave it out"
        raise ConfigurationError(msg)
    stored = getattr(column.type, "impl_instance", column.type)
    if getattr(stored, "__visit_name__", "") == "JSON":
        msg = f"{what}: PostgreSQL compares no values of type JSON; use JSONB for {model}.{name}"
        raise ConfigurationError(msg)
    return column


@dataclass(frozen=True)
class ListedKeys(KeyRange):
    """Some jobs by their keys."""

    spec: QueueSpec | None = None
    keys: Sequence[Key] = ()

    def holds(self, columns: Sequence[sa.ColumnElement[Any]]) -> sa.ColumnElement[bool]:
        return sa.true() if self.spec is None else self.spec.key_in(columns, self.keys)
