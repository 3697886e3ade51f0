"""The kinds of models of the test matrix, and the models built from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase

from sqlaqueue import QueueConfig, QueueMixin

STRATEGIES = ("update_status", "delete_returning", "batch_select")

MakeConfig = Callable[..., QueueConfig]
"""Makes a QueueConfig with the strategy of the test and other options."""


def payload(number: int) -> dict[str, Any]:
    """Return the values of a job that most kinds need."""
    return {"payload": f"job {number}"}


@dataclass(kw_only=True)
class Built:
    """A mapped class with an attribute ``payload``, and how to make its jobs."""

    model: type[Any]
    make: Callable[..., Any] | None = None
    """Makes an instance from values; the class itself by default."""
    values: Callable[[int], dict[str, Any]] = payload
    """Returns the values of a job by number, without queue attributes."""
    insert_into: Callable[[int], type[Any]] | None = None
    """Returns the class of a job by number; the model by default."""
    status_values: Mapping[str, str] = field(default_factory=dict)
    """State to its value in the database, if they differ."""
    schemas: tuple[str, ...] = ()
    """The schemas that must exist."""
    options: dict[str, Any] = field(default_factory=dict)
    """The execution options of the engine."""

    others: tuple[type[Any], ...] = ()
    """Classes that the model refers to by name only. The reference keeps them from being garbage-collected."""

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
        """Return the attribute that has a role."""
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
        """Return the values of a job, with values for roles that the model has."""
        given = {self.attribute(role): value for role, value in roles.items()}
        given.pop(None, None)
        return {**self.values(number), **given}

    def job(self, number: int, **roles: Any) -> Any:
        make = self.make or self.class_of(number)
        return make(**self.job_values(number, **roles))


@dataclass(frozen=True)
class Kind:
    """A way to write a model, and the strategies that support it."""

    build: Callable[[MakeConfig], Built]
    strategies: tuple[str, ...]


KINDS: dict[str, Kind] = {}


def kind(*strategies: str) -> Callable[[Callable[[MakeConfig], Built]], Callable[[MakeConfig], Built]]:
    """Add a factory to the matrix under its own name."""

    def add(build: Callable[[MakeConfig], Built]) -> Callable[[MakeConfig], Built]:
        KINDS[build.__name__] = Kind(build, strategies or STRATEGIES)
        return build

    return add


def declare(queue: MakeConfig, **attributes: Any) -> type[Any]:
    """Map a class with the default key and payload, unless ``attributes`` contains them."""

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
