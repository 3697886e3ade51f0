"""Queues whose table Citus distributes by a column: the shards that a Consumer serves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError

from sqlaqueue.exc import ConfigurationError

__all__ = ["Distribution"]

SHARD = "sqlaqueue_shard"
"""The parameter of a claim with the value whose jobs it claims."""


_PYTHON_TYPES: Sequence[tuple[type[Any], type[Any]]] = ((sa.Integer, int), (sa.Enum, object), (sa.String, str))
"""What the values of a column are, by its type; other types convert more than one kind of value."""


@dataclass(frozen=True)
class Distribution:
    """The attribute by which Citus distributes a queue's table, and its values, on which a Consumer works in rotation.

    A claim takes jobs of one value, since Citus locks rows on one shard only. The next claim starts with the value
    after it, so each value is claimed after at most one claim of each other value.

    ::

        class Task(QueueMixin, Base):
            __tablename__ = "task"

            tenant: Mapped[int] = mapped_column(primary_key=True)
            id: Mapped[int] = mapped_column(primary_key=True)

        tenants = Distribution("tenant", values=[1, 2, 3])
        consumer = Consumer(Task, lambda session, task: print(task.id), sessions, distribution=tenants)

    :raises ConfigurationError: without values.
    """

    attribute: str
    """The name of the attribute; it is a part of the primary key."""
    values: Iterable[Any] | Callable[[], Iterable[Any]]
    """The values, or a function that returns them. It is called at each claim and rescue, so it must be quick."""

    def __post_init__(self) -> None:
        if isinstance(self.values, str) or not (callable(self.values) or isinstance(self.values, Iterable)):
            msg = (
                f"Distribution({self.attribute!r}, {self.values!r}): give the values to work on as a list, or a "
                "function that returns them"
            )
            raise ConfigurationError(msg)
        if not callable(self.values):
            # An iterator would be empty at the second claim.
            object.__setattr__(self, "values", tuple(self.values))
            if not self.values:
                msg = f"Distribution({self.attribute!r}, []): give at least one value to work on"
                raise ConfigurationError(msg)

    def check(self, column: sa.ColumnElement[Any]) -> None:
        """Refuse values that no row can have: each claim would fail.

        :param column: the column of the attribute.
        :raises ConfigurationError: if the values are not those of the column, or the function returns none.
        """
        called = f"Distribution({self.attribute!r}, values)"
        try:
            values = self.current_values()
        except (DBAPIError, OSError):
            # The function asks a server, which may answer later.
            raise
        except Exception as error:
            msg = f"{called}: give a list of values, or a function that returns one; it raised {error!r}"
            raise ConfigurationError(msg) from error
        wanted = next((kind for types, kind in _PYTHON_TYPES if isinstance(column.type, types)), object)
        wrong = [value for value in values if value is None or not isinstance(value, wanted)]
        if wrong:
            msg = f"{called}: {wrong[0]!r} is no value of the column {column.name}, which has the type {column.type!r}"
            raise ConfigurationError(msg)

    def current_values(self) -> list[Any]:
        """Return the values to serve now, each once."""
        return list(dict.fromkeys(self.values() if callable(self.values) else self.values))
