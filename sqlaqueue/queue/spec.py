"""The resolved queue of one mapped class: its table, roles and states, which is what strategies read.

A :class:`QueueSpec` is made once, when the class is mapped, and belongs to the class that owns the
table; single-table subclasses share their parent's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import Any, cast

import sqlalchemy as sa
from sqlalchemy.orm import Mapper

from sqlaqueue.exc import ConfigurationError, StatementError
from sqlaqueue.keys import Key
from sqlaqueue.queue.backend import backend
from sqlaqueue.queue.config import FINISHED, QueueConfig
from sqlaqueue.queue.roles import literal_text
from sqlaqueue.queue.strategy import Strategy


def clock() -> sa.Function[Any]:
    """Return the database's clock at the moment the statement arrives.

    Not ``now()``: that is the start of the transaction, and a delay counted from it is already over
    when the statement runs late in a long transaction. Not ``clock_timestamp()`` either: it is
    volatile, which rules out index conditions and, on some engines, its use in SET.
    """
    return sa.func.statement_timestamp(type_=sa.DateTime(timezone=True))


@dataclass(frozen=True, eq=False)
class QueueSpec:
    """Everything a strategy needs to know of a queue; it takes no Session and asks no database."""

    mapper: Mapper[Any]
    table: sa.Table
    config: QueueConfig
    name: str
    attributes: Mapping[str, str]
    """Role to the name of the attribute that plays it; roles that are left out are missing."""
    columns: Mapping[str, sa.Column[Any]]
    """Role to its column."""
    strategy: Strategy
    side_tables: dict[str, sa.Table] = field(default_factory=dict)
    """The strategy's own tables by their purpose, such as ``"messages"``."""
    claim_indexes: list[sa.Index] = field(default_factory=list)
    """The indexes without which claims and rescues read a whole table."""

    @property
    def model(self) -> type[Any]:
        """The mapped class that owns the table."""
        return self.mapper.class_

    @property
    def keys(self) -> tuple[sa.Column[Any], ...]:
        """The columns of the primary key."""
        return cast("tuple[sa.Column[Any], ...]", self.mapper.primary_key)

    @property
    def lease(self) -> timedelta:
        """The configured lease."""
        return self.config.lease_duration

    @cached_property
    def run_attributes(self) -> tuple[str, str, str]:
        """The attributes with the token, the limit and the number of a run; empty names for those that are left out."""
        token, limit, attempts = (self.attributes.get(role, "") for role in ("lease_token", "max_attempts", "attempts"))
        return token, limit, attempts

    @property
    def keeps_claimed_by(self) -> bool:
        """Whether ``claimed_by`` stays when a run ends, and tells who ran the job last."""
        return self.strategy.holds_transaction or "started_at" in self.columns

    def has(self, role: str) -> bool:
        """Whether some column plays ``role``."""
        return role in self.columns

    def column(self, role: str, needed_for: str) -> sa.Column[Any]:
        """Return the column that plays ``role``.

        :raises StatementError: when the role was left out, naming what needed it.
        """
        try:
            return self.columns[role]
        except KeyError:
            msg = (
                f"{needed_for} needs the queue attribute {role!r}, which {self.model.__name__} leaves out; "
                f"{self.config.fix_for(role)}, or do without it"
            )
            raise StatementError(msg) from None

    def status_value(self, state: str) -> Any:
        """Return the value that the status column holds in ``state``.

        :raises StatementError: when the model's vocabulary has no word for it.
        """
        value = getattr(self.config.states, state)
        if value is None:
            msg = (
                f"{self.model.__name__} has no word for the state {state!r}; "
                f"give one in QueueConfig(states=States({state}=...))"
            )
            raise StatementError(msg)
        return value

    def truncated_error(self, error: sa.ColumnElement[Any]) -> sa.ColumnElement[Any]:
        """Return the text of an error, cut to what ``last_error`` takes: a longer one would keep a run from ending."""
        column = self.columns.get("last_error")
        # A cast cuts the text, where an assignment refuses it.
        if column is None or getattr(column.type, "length", None) is None:
            return error
        return sa.cast(error, column.type)

    def literal(self, state: str) -> sa.ColumnElement[Any]:
        """Return the value of ``state`` as a literal in SQL, see :func:`~sqlaqueue.queue.roles.literal_text`."""
        type_ = self.columns["status"].type
        return sa.literal_column(literal_text(self.status_value(state), type_), type_)

    def in_state(self, *states: str) -> sa.ColumnElement[bool]:
        """Return the condition that a job is in one of ``states``; those without a word are passed over."""
        words = [state for state in states if getattr(self.config.states, state) is not None]
        status = self.columns["status"]
        if len(words) == 1:
            return status == self.literal(words[0])
        return status.in_([self.literal(state) for state in words])

    @property
    def finished(self) -> sa.ColumnElement[bool]:
        """The condition that a job's life is over."""
        return self.in_state(*FINISHED)

    def due(self, run_at: sa.ColumnElement[Any] | None) -> list[sa.ColumnElement[bool]]:
        """Return the conditions that a job's time has come, for the ``run_at`` of a job or of its message."""
        if run_at is None:
            return []
        arrived = run_at <= clock()
        if self.columns["run_at"].nullable:
            return [sa.or_(arrived, run_at.is_(None))]
        return [arrived]

    @property
    def order_roles(self) -> tuple[str, ...]:
        """The roles that a claim is ordered by, before the key."""
        return tuple(role for role in ("priority", "run_at") if role in self.columns)

    @property
    def claim_order(self) -> tuple[sa.Column[Any], ...]:
        """The one definition of the claim's order; its ORDER BY and its index both come from here."""
        return (*(self.columns[role] for role in self.order_roles), *self.keys)

    def key_in(
        self, columns: Sequence[sa.ColumnElement[Any]], keys: Sequence[Key] | sa.BindParameter[Any]
    ) -> sa.ColumnElement[bool]:
        """Return the condition that the key in ``columns`` is one of ``keys``.

        ``keys`` may be a named :func:`~sqlalchemy.bindparam`, so that one statement serves every execution;
        its value is then made by :meth:`bind_keys`.
        """
        if len(columns) > 1:
            return sa.tuple_(*columns).in_(keys if isinstance(keys, sa.BindParameter) else list(keys))
        column = columns[0]
        if isinstance(keys, sa.BindParameter):
            # An array, not IN: the text stays the same for every number of keys, so the server can keep its plan.
            return column == sa.any_(sa.bindparam(keys.key, (), backend().key_array(column.type), unique=False))
        return column == sa.any_(sa.bindparam(None, [key[0] for key in keys], type_=backend().key_array(column.type)))

    def bind_keys(self, keys: Sequence[Key]) -> list[Any]:
        """Return the value of a bound ``keys`` of :meth:`key_in`."""
        return [key[0] for key in keys] if len(self.keys) == 1 else list(keys)


def check_roles(model: str, needed: Mapping[str, str], present: Mapping[str, Any], config: QueueConfig) -> None:
    """Refuse a model that leaves out a role its strategy cannot do without.

    :param needed: role to the reason why it is needed.
    :raises ConfigurationError: naming the class, the role and the fix.
    """
    for role, why in needed.items():
        if role not in present:
            msg = f"{model}: {why} needs the queue attribute {role!r}; {config.fix_for(role)}"
            raise ConfigurationError(msg)
