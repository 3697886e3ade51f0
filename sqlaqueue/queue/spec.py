"""The queue of one mapped class: its table, roles and states, from which strategies build statements.

A :class:`QueueSpec` is made once, when the class that owns the table is mapped. Subclasses share it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import Any, cast

import sqlalchemy as sa
from sqlalchemy.orm import Mapper

from sqlaqueue.exc import ConfigurationError, StatementError
from sqlaqueue.queue.config import QueueConfig
from sqlaqueue.queue.options import FINISHED, FLOW_RULES, OnFailure
from sqlaqueue.queue.roles import literal_text
from sqlaqueue.queue.run import Key
from sqlaqueue.queue.strategy_protocol import Strategy
from sqlaqueue.sql.portable import clock, converted, is_among
from sqlaqueue.sql.types import key_array

_FIRST, _LAST = datetime(1, 1, 3, tzinfo=UTC), datetime(9999, 12, 29, tzinfo=UTC)


def within_calendar(moment: sa.ColumnElement[Any]) -> sa.ColumnElement[Any]:
    """Return a time with time zone for a reader, one that Python knows.

    PostgreSQL knows ``infinity`` and years after 9999, which psycopg refuses to load, and older versions refuse to
    subtract: one such row would keep operators from reading all others.
    """
    first, last = (sa.literal(each, sa.DateTime(timezone=True)) for each in (_FIRST, _LAST))
    return sa.case((moment > last, last), (moment < first, first), else_=moment)


@dataclass(frozen=True, eq=False)
class WaitRelation:
    """A relationship of ``QueueConfig(waits_for=...)``: the jobs of a queue wait for those of another, or its own.

    The jobs that a job waits for are those with the same values in the columns of :attr:`pairs`.
    """

    name: str
    """The name of the relationship."""
    waiting: QueueSpec
    awaited: QueueSpec
    pairs: Sequence[tuple[sa.Column[Any], sa.Column[Any]]]
    """The columns of the foreign key and those it refers to: of the job that waits, and of those it waits for."""
    to_many: bool
    """Whether the jobs waited for have the foreign key: whether the job is a batch, and they are its members."""
    on_failure: OnFailure
    on_delete: str
    """What the foreign key does when the row is deleted that it refers to, such as ``SET NULL``."""

    @cached_property
    def awaited_rows(self) -> sa.FromClause:
        """The table of the jobs that are waited for, under another name: it may be that of those who wait."""
        return self.awaited.table.alias("sqlaqueue_awaited")

    @property
    def full_name(self) -> str:
        return f"{self.waiting.model.__name__}.{self.name}"

    @property
    def keeps(self) -> bool:
        """Whether the foreign key keeps the row that it refers to from being deleted."""
        return self.on_delete in {"NO ACTION", "RESTRICT"}

    @property
    def is_strict(self) -> bool:
        """Whether a job must not run unless the one that it refers to has completed."""
        return not self.to_many and self.on_failure != "continue"

    @property
    def satisfying(self) -> tuple[str, ...]:
        """The states in which a job is not waited for any more."""
        return FINISHED if self.on_failure == "continue" else ("completed",)


@dataclass(frozen=True, eq=False)
class QueueSpec:
    """All that a strategy needs for its statements. It contains no Session and reads no database.

    It is frozen but for ``side_tables`` and ``claim_indexes``, which ``attach()`` fills when the class is mapped, and
    for ``waits`` and ``awaited_by``, which are known when the mappers are configured.
    """

    mapper: Mapper[Any]
    table: sa.Table
    config: QueueConfig
    name: str
    attributes: Mapping[str, str]
    """Role to attribute name, without the roles that are left out."""
    columns: Mapping[str, sa.Column[Any]]
    """Role to column."""
    strategy: Strategy
    side_tables: dict[str, sa.Table] = field(default_factory=dict)
    """The side tables by purpose, such as ``"messages"``."""
    claim_indexes: list[sa.Index] = field(default_factory=list)
    """The indexes without which claims and rescues scan a whole table."""
    waits: list[WaitRelation] = field(default_factory=list)
    """What the jobs of this queue wait for."""
    awaited_by: list[WaitRelation] = field(default_factory=list)
    """What waits for the jobs of this queue."""
    shard: tuple[sa.Column[Any], Any] | None = None
    """The column that distributes the table, and the value that all statements are limited to; see
    :meth:`for_shard`."""

    @property
    def model(self) -> type[Any]:
        """The mapped class that owns the table."""
        return self.mapper.class_

    @property
    def keys(self) -> tuple[sa.Column[Any], ...]:
        """The columns of the primary key."""
        return cast("tuple[sa.Column[Any], ...]", self.mapper.primary_key)

    @cached_property
    def lease(self) -> timedelta:
        lease = self.config.lease
        return lease if isinstance(lease, timedelta) else timedelta(seconds=lease)

    @cached_property
    def run_attributes(self) -> tuple[str, str, str, str]:
        """The attributes of token, limit, number of attempts and trace; empty names for roles that are left out."""
        get = self.attributes.get
        return get("lease_token", ""), get("max_attempts", ""), get("attempts", ""), get("traceparent", "")

    @property
    def most_attempts(self) -> int | None:
        """The largest number of attempts that its column stores; None if the queue has no such column."""
        if not self.has("attempts"):
            return None
        kind = self.columns["attempts"].type
        bits = 16 if isinstance(kind, sa.SmallInteger) else 64 if isinstance(kind, sa.BigInteger) else 32
        return int(2 ** (bits - 1)) - 1

    @property
    def keeps_claimed_by(self) -> bool:
        """Whether ``claimed_by`` stays set when a run is settled, and so names the last worker."""
        return self.strategy.holds_transaction or "started_at" in self.columns

    @property
    def flow_rules(self) -> list[str]:
        """The names of the classes of which ``flow_control`` has rules."""
        rules = self.config.flow_control
        return [name for name, kind in FLOW_RULES.items() if any(isinstance(rule, kind) for rule in rules)]

    def has(self, role: str) -> bool:
        return role in self.columns

    def column(self, role: str, needed_for: str) -> sa.Column[Any]:
        """Return the column that has the role.

        :param needed_for: what needs the column, for the error.
        :raises StatementError: if the model leaves the role out.
        """
        try:
            return self.columns[role]
        except KeyError:
            msg = (
                f"{needed_for} needs the queue attribute {role!r}, which {self.model.__name__} leaves out; "
                f"{self.config.fix_for(role)}"
            )
            raise StatementError(msg) from None

    def status_value(self, state: str) -> Any:
        """Return the value of the status column for a state.

        :raises StatementError: if the states of the model have no value for it.
        """
        value = getattr(self.config.states, state)
        if value is None:
            msg = (
                f"{self.model.__name__} has no value for the state {state!r}; "
                f"set one with QueueConfig(states=States({state}=...))"
            )
            raise StatementError(msg)
        return value

    def truncated_error(self, error: sa.ColumnElement[Any]) -> sa.ColumnElement[Any]:
        """Return an error, truncated to the length of ``last_error``: the server refuses longer texts."""
        column = self.columns.get("last_error")
        # CAST truncates a text; assigning it raises an error.
        if column is None or getattr(column.type, "length", None) is None:
            return error
        return converted(error, column.type)

    def literal(self, state: str) -> sa.ColumnElement[Any]:
        """Return the status value of a state as an SQL literal, see :func:`~sqlaqueue.queue.roles.literal_text`."""
        type_ = self.columns["status"].type
        return sa.literal_column(self._literals[state], type_)

    @cached_property
    def _literals(self) -> dict[str, str]:
        type_, values = self.columns["status"].type, self.config.states.items()
        return {state: literal_text(self.status_value(state), type_) for state, value in values if value is not None}

    def in_state(self, *states: str) -> sa.ColumnElement[bool]:
        """Return the condition that a job is in one of ``states``; states without a value are ignored."""
        stored = [state for state in states if getattr(self.config.states, state) is not None]
        status = self.columns["status"]
        if len(stored) == 1:
            return status == self.literal(stored[0])
        return status.in_([self.literal(state) for state in stored])

    @property
    def finished(self) -> sa.ColumnElement[bool]:
        """The condition that a job is completed, failed or cancelled."""
        return self.in_state(*FINISHED)

    def due(
        self, run_at: sa.ColumnElement[Any] | None, at: sa.ColumnElement[Any] | None = None
    ) -> list[sa.ColumnElement[bool]]:
        """Return the conditions that a job is due, for ``run_at`` of the job or of its message.

        :param at: the moment at which it is due; None for now.
        """
        if run_at is None:
            return []
        arrived = run_at <= (clock() if at is None else at)
        if self.columns["run_at"].nullable:
            return [sa.or_(arrived, run_at.is_(None))]
        return [arrived]

    @property
    def order_roles(self) -> tuple[str, ...]:
        """The roles of the claim order, which the primary key follows."""
        return tuple(role for role in ("priority", "run_at") if role in self.columns)

    @property
    def claim_order(self) -> tuple[sa.Column[Any], ...]:
        """The columns of the claim order, in its ORDER BY and in its index."""
        return (*(self.columns[role] for role in self.order_roles), *self.keys)

    def for_shard(self, attribute: str, value: Any) -> QueueSpec:
        """Return the queue with statements that are limited to the jobs with one value of an attribute of the key.

        :param value: the value, or a bound parameter.
        """
        column = self.mapper.columns[attribute]
        bound = value if isinstance(value, sa.BindParameter) else sa.bindparam(None, value, column.type)
        return replace(self, shard=(column, bound))

    def on_shard(self, rows: sa.FromClause) -> list[sa.ColumnElement[bool]]:
        """Return the condition that limits the queue's table, or an alias of it, to :attr:`shard`; none without one."""
        if self.shard is None:
            return []
        column, value = self.shard
        return [rows.c[column.key] == value]

    def key_in(
        self, columns: Sequence[sa.ColumnElement[Any]], keys: Sequence[Key] | sa.BindParameter[Any]
    ) -> sa.ColumnElement[bool]:
        """Return the condition that the key in ``columns`` is one of ``keys``.

        :param keys: keys; or a named :func:`~sqlalchemy.bindparam` for a value of :meth:`bind_keys`; or one key whose
            parts are such parameters, which is compared by equality.
        """
        if not isinstance(keys, sa.BindParameter) and len(keys) == 1 and isinstance(keys[0][0], sa.BindParameter):
            return sa.and_(*(column == part for column, part in zip(columns, keys[0], strict=True)))
        if len(columns) > 1:
            return sa.tuple_(*columns).in_(keys if isinstance(keys, sa.BindParameter) else list(keys))
        column = columns[0]
        if isinstance(keys, sa.BindParameter):
            return is_among(column, sa.bindparam(keys.key, (), key_array(column.type), unique=False))
        return is_among(column, sa.bindparam(None, [key[0] for key in keys], type_=key_array(column.type)))

    def bind_keys(self, keys: Sequence[Key]) -> list[Any]:
        """Return the value for a :func:`~sqlalchemy.bindparam` given to :meth:`key_in`."""
        return [key[0] for key in keys] if len(self.keys) == 1 else list(keys)


def check_roles(model: str, needed: Mapping[str, str], present: Mapping[str, Any], config: QueueConfig) -> None:
    """Refuse a model that leaves out a role that its strategy requires.

    :param needed: role to the reason why it is required.
    :raises ConfigurationError: with the class, the role and the fix.
    """
    for role, why in needed.items():
        if role not in present:
            msg = f"{model}: {why} needs the queue attribute {role!r}; {config.fix_for(role)}"
            raise ConfigurationError(msg)
