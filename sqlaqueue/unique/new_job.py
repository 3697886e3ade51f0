"""A job that is to be enqueued: its instance, and the values of its columns."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

import sqlalchemy as sa
from sqlalchemy.orm import Mapper
from sqlalchemy.orm.attributes import instance_state, set_committed_value

from sqlaqueue.exc import StatementError
from sqlaqueue.sql.engine import engine_of
from sqlaqueue.strategies.twins import UniqueKey
from sqlaqueue.unique.relationships import Relationships, set_foreign_key

_COLUMNS: WeakKeyDictionary[Mapper[Any], dict[str, sa.Column[Any]]] = WeakKeyDictionary()


class NewJob:
    """One job of a call."""

    def __init__(self, job: Any) -> None:
        self.job = job
        self.mapper: Mapper[Any] = sa.inspect(job).mapper
        self.relationships = Relationships(job)

    @property
    def name(self) -> str:
        """The name of its class."""
        return self.mapper.class_.__name__

    def columns(self) -> dict[str, sa.Column[Any]]:
        """Return the columns of the class that can be written, by attribute."""
        known = _COLUMNS.get(self.mapper)
        if known is None:
            found = {each.key: each.columns[0] for each in self.mapper.column_attrs}
            known = {name: one for name, one in found.items() if isinstance(one, sa.Column) and one.computed is None}
            _COLUMNS[self.mapper] = known
        return known

    def given(self) -> dict[str, Any]:
        """Return the values that the instance has, by attribute; None stands for a default, as in a flush."""
        present, columns = instance_state(self.job).dict, self.columns()
        return {
            name: present[name]
            for name, column in columns.items()
            if name in present and (present[name] is not None or column.type.should_evaluate_none)
        }

    def set_value(self, column: sa.Column[Any], value: Any) -> None:
        """Set the attribute of a column, without events."""
        set_committed_value(self.job, self.mapper.get_property_by_column(column).key, value)

    def prepare(self) -> None:
        """Set what a flush sets: foreign keys, from objects that are flushed, the first version, and missing values.

        With None for each column without a default, nearly all rows of a call have the same columns.
        """
        for each, parent in self.relationships.parents():
            set_foreign_key(self.job, each, parent)
        version, generate = self.mapper.version_id_col, self.mapper.version_id_generator
        if isinstance(version, sa.Column) and callable(generate):
            self.set_value(version, generate(None))
        present = instance_state(self.job).dict
        for name in self.without_defaults():
            present.setdefault(name, None)

    def without_defaults(self) -> dict[str, sa.Column[Any]]:
        """Return the columns that are NULL if nothing else is given, by attribute."""
        return {
            name: column
            for name, column in self.columns().items()
            if not (column.primary_key or column.default or column.server_default or column.identity)
            and not column.type.should_evaluate_none
        }

    def set_defaults(self, connection: sa.Connection) -> None:
        """Set the defaults that Python computes, in the order of the columns, each of which may read those before."""
        context = _DefaultContext(self, connection)
        given = self.given()
        for name, column in self.columns().items():
            default: Any = column.default
            if name in given or default is None or not (default.is_scalar or default.is_callable):
                continue
            value = default.arg if default.is_scalar else default.arg(context)
            context.current_parameters[column.key] = value
            set_committed_value(self.job, name, value)

    def unique_values(self, key: UniqueKey, connection: sa.Connection) -> list[Any]:
        """Return the values by which the job is compared with others, with defaults of Python set.

        :raises StatementError: for a value that cannot be compared.
        """
        names = [self.mapper.get_property_by_column(column).key for column in key.stored]
        given = self.given()
        if any(
            given.get(name) is None and column.default is not None
            for name, column in zip(names, key.stored, strict=True)
        ):
            self.set_defaults(connection)
            given = self.given()
        for name, column in zip(names, key.stored, strict=True):
            self._check_unique_value(name, column, given)
        return [given.get(name) for name in names]

    def _check_unique_value(self, name: str, column: sa.Column[Any], given: dict[str, Any]) -> None:
        value, what = given.get(name), f"enqueue(): {self.name}.{name}"
        if isinstance(value, sa.ClauseElement) or (value is None and column.server_default is not None):
            msg = f"{what} makes jobs unique, and its value would be computed by the database; set it on the instance"
            raise StatementError(msg)
        if value is None and name in given:
            msg = f"{what} = None makes jobs unique, and is stored as a JSON null, which is no NULL; leave it out"
            raise StatementError(msg)
        length = getattr(column.type, "length", None)
        if isinstance(value, str) and isinstance(column.type, sa.String) and length is not None and len(value) > length:
            msg = f"{what} = {value!r}: the column holds {length} characters"
            raise StatementError(msg)


def set_created_at(connection: sa.Connection, key: UniqueKey, jobs: Iterable[NewJob]) -> None:
    """Set the time by which jobs belong to a period, so that it is the same when they are looked for."""
    if key.config.per is None:
        return
    column, now = key.spec.columns["created_at"], None
    for job in jobs:
        if column.default is None and job.given().get(job.mapper.get_property_by_column(column).key) is None:
            now = now or connection.scalar(sa.select(_now(connection, column)))
            job.set_value(column, now)


def _now(connection: sa.Connection, column: sa.Column[Any]) -> sa.ColumnElement[Any]:
    if engine_of(connection.dialect) is None:
        return sa.cast(sa.func.now(), column.type)
    # Other engines translate this function wherever it is, but now() of a program's statements as before.
    return sa.func.statement_timestamp(type_=column.type)


class _DefaultContext:
    """What a function that computes a default is given, see "Context-Sensitive Default Functions" in SQLAlchemy."""

    def __init__(self, job: NewJob, connection: sa.Connection) -> None:
        columns = job.columns()
        self.current_parameters = {column.key: None for column in job.without_defaults().values()}
        self.current_parameters |= {columns[name].key: value for name, value in job.given().items()}
        self.connection, self.dialect = connection, connection.dialect

    def get_current_parameters(self, isolate_multiinsert_groups: bool = True) -> dict[str, Any]:  # noqa: FBT001, FBT002 - the signature in SQLAlchemy
        """Return the values of the row, by column key."""
        return self.current_parameters
