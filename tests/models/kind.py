"""What the matrix of models is made of: a kind of model, and one model built from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase

from sqlaqueue import QueueConfig, QueueMixin

STRATEGIES = ("update_status", "delete_returning", "batch_select")

MakeConfig = Callable[..., QueueConfig]
"""Makes a config with the strategy of the cell; options are those of `QueueConfig`."""


def payload(number: int) -> dict[str, Any]:
    """Return what most kinds need to make their job of this number."""
    return {"payload": f"job {number}"}


@dataclass(kw_only=True)
class Built:
    """One mapped class and what a test has to know of it.

    Every model has an attribute ``payload``, by which a test tells its jobs apart.
    """

    model: type[Any]
    make: Callable[..., Any] | None = None
    """Makes an instance from values; the class itself by default."""
    values: Callable[[int], dict[str, Any]] = payload
    """The values of a job, apart from its queue attributes."""
    insert_into: Callable[[int], type[Any]] | None = None
    """The class of the job of a number, where it is not the model."""
    words: Mapping[str, str] = field(default_factory=dict)
    """How the states read in the database, where they are not called as usual."""
    schemas: tuple[str, ...] = ()
    """The schemas that must be there."""
    options: dict[str, Any] = field(default_factory=dict)
    """The engine's execution options."""

    others: tuple[type[Any], ...] = ()
    """Classes that the model refers to by name only; without a reference they would be collected."""

    @property
    def table(self) -> sa.Table:
        table = sa.inspect(self.model).local_table
        assert isinstance(table, sa.Table)
        return table

    @property
    def metadata(self) -> sa.MetaData:
        return self.table.metadata

    @property
    def config(self) -> QueueConfig:
        config = self.model.__queue__
        assert isinstance(config, QueueConfig)
        return config

    def attribute(self, role: str) -> str | None:
        """Return the attribute that plays a role, as the user's config has it."""
        return self.config.attribute_for(role, role)

    def column(self, attribute: str) -> sa.Column[Any]:
        column = sa.inspect(self.model).columns[attribute]
        assert isinstance(column, sa.Column)
        return column

    @property
    def is_own_message(self) -> bool:
        return self.attribute("status") is None

    def class_of(self, number: int) -> type[Any]:
        return self.model if self.insert_into is None else self.insert_into(number)

    def job_values(self, number: int, **roles: Any) -> dict[str, Any]:
        """Return the values of a job with those of its queue attributes that the model has."""
        placed = {self.attribute(role): value for role, value in roles.items()}
        placed.pop(None, None)
        return {**self.values(number), **placed}

    def job(self, number: int, **roles: Any) -> Any:
        make = self.make or self.class_of(number)
        return make(**self.job_values(number, **roles))


@dataclass(frozen=True)
class Kind:
    """A way to write a model; the strategies are those under which it makes sense."""

    build: Callable[[MakeConfig], Built]
    strategies: tuple[str, ...]


KINDS: dict[str, Kind] = {}


def kind(*strategies: str) -> Callable[[Callable[[MakeConfig], Built]], Callable[[MakeConfig], Built]]:
    """Enter a factory into the matrix under its own name."""

    def enter(build: Callable[[MakeConfig], Built]) -> Callable[[MakeConfig], Built]:
        KINDS[build.__name__] = Kind(build, strategies or STRATEGIES)
        return build

    return enter


def declare(queue: MakeConfig, **attributes: Any) -> type[Any]:
    """Map a class with the usual key and payload unless they are among the attributes."""

    class Base(DeclarativeBase):
        metadata = attributes.pop("metadata", None) or sa.MetaData()

    usual = {
        "__tablename__": "job",
        "__queue__": queue() if "__queue__" not in attributes else None,
        "id": sa.Column(sa.Integer, primary_key=True),
        "payload": sa.Column(sa.Text, nullable=False),
    }
    body = {name: value for name, value in {**usual, **attributes}.items() if value is not None}
    return type("Job", (QueueMixin, Base), body)
