"""A job that is to be enqueued: its instance, taken out of the session, and the values of its columns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Mapper, RelationshipDirection, RelationshipProperty, Session
from sqlalchemy.orm.attributes import del_attribute, instance_state, set_attribute, set_committed_value

from sqlaqueue.exc import StatementError
from sqlaqueue.strategies.parts.unique_key import UniqueKey


class NewJob:
    """One job of a call.

    A flush would insert it, and fail if a twin exists. So it is taken out of the session, and out of the collections of
    the objects that it refers to, until it is known to be inserted.
    """

    def __init__(self, job: Any) -> None:
        self.job = job
        self.mapper: Mapper[Any] = sa.inspect(job).mapper
        self.related: dict[str, Any] = {}
        """The values of its relationships."""

    @property
    def name(self) -> str:
        """The name of its class."""
        return self.mapper.class_.__name__

    # -- relationships ---------------------------------------------------------------------------------------------

    def take_out(self, session: Session) -> None:
        """Take the job out of the session, and add what it refers to."""
        if self.job in session:
            for other in [self.job, *self._pending_children(session)]:
                # It may have gone with the job, by the cascade of the relationship.
                if other in session:
                    session.expunge(other)
        present = instance_state(self.job).dict
        for each in self._relationships():
            if each.key in present:
                # Deleting the attribute empties a collection.
                self.related[each.key] = _copied(present[each.key]) if each.uselist else present[each.key]
                # An event removes the job from the collection of the other object.
                del_attribute(self.job, each.key)
        for each, value in self._parents():
            if value not in session and "save-update" in each.cascade:
                session.add(value)

    def fill_foreign_keys(self) -> None:
        """Set the foreign keys from the objects that the job refers to, which are flushed."""
        for each, parent in self._parents():
            set_foreign_key(self.job, each, parent)

    def put_back(self, *, inserted: bool) -> None:
        """Set the relationships again; those of a job that is not inserted, without telling the other objects."""
        restore = set_attribute if inserted else set_committed_value
        for name, value in self.related.items():
            restore(self.job, name, value)
        self.related.clear()

    @property
    def has_children(self) -> bool:
        """Whether the job has objects that refer to it, which are flushed after it."""
        many = RelationshipDirection.MANYTOONE
        return any(each.direction is not many and self.related.get(each.key) for each in self._relationships())

    def _relationships(self) -> Iterator[RelationshipProperty[Any]]:
        return (each for each in self.mapper.relationships if not each.viewonly)

    def _parents(self) -> Iterator[tuple[RelationshipProperty[Any], Any]]:
        for each in self._relationships():
            value = self.related.get(each.key)
            if each.direction is RelationshipDirection.MANYTOONE and value is not None:
                yield each, value

    def _pending_children(self, session: Session) -> list[Any]:
        """Return the objects that only this job has brought into the session."""
        present = instance_state(self.job).dict
        found = []
        for each in self._relationships():
            if each.direction is not RelationshipDirection.MANYTOONE and each.key in present:
                value = present[each.key]
                objects = value if each.uselist else [value]
                found += [other for other in objects if other is not None and other in session.new]
        return found

    # -- values ----------------------------------------------------------------------------------------------------

    def columns(self) -> dict[str, sa.Column[Any]]:
        """Return the columns of the class that can be written, by attribute."""
        found = {each.key: each.columns[0] for each in self.mapper.column_attrs}
        return {name: one for name, one in found.items() if isinstance(one, sa.Column) and one.computed is None}

    def given(self) -> dict[str, Any]:
        """Return the values that the instance has, by attribute; None stands for a default, as in a flush."""
        present, columns = instance_state(self.job).dict, self.columns()
        return {
            name: present[name]
            for name, column in columns.items()
            if name in present and (present[name] is not None or column.type.should_evaluate_none)
        }

    def unique_values(self, key: UniqueKey) -> list[Any]:
        """Return the values by which the job is compared with others, with defaults of Python set.

        :raises StatementError: for a value that only the database knows.
        """
        values = []
        for column in key.stored:
            name = self.mapper.get_property_by_column(column).key
            value = self.given().get(name)
            if value is None:
                value = self.default_of(column)
                if value is not None:
                    set_committed_value(self.job, name, value)
            if isinstance(value, sa.ColumnElement) or (value is None and column.server_default is not None):
                msg = (
                    f"enqueue(): {self.name}.{name} makes jobs unique, and its value would be computed by the "
                    "database; set it on the instance"
                )
                raise StatementError(msg)
            values.append(value)
        return values

    def default_of(self, column: sa.Column[Any]) -> Any:
        """Return the default of a column, None if it has none in Python: a value, or SQL for the database."""
        default: Any = column.default
        if default is None or default.is_sequence:
            return None
        if default.is_callable:
            return default.arg(_DefaultContext(self))
        return default.arg


def set_foreign_key(job: Any, relationship: RelationshipProperty[Any], parent: Any) -> None:
    """Set the foreign key of a job to an object that it refers to, as a flush does."""
    mine: Mapper[Any] = sa.inspect(job).mapper
    there: Mapper[Any] = sa.inspect(parent).mapper
    for local, remote in relationship.local_remote_pairs or ():
        value = getattr(parent, there.get_property_by_column(remote).key)
        set_committed_value(job, mine.get_property_by_column(local).key, value)


def set_created_at(connection: sa.Connection, key: UniqueKey, jobs: Iterable[NewJob]) -> None:
    """Set the time by which jobs belong to a period, so that it is the same when they are looked for."""
    if key.config.per is None:
        return
    column, now = key.spec.columns["created_at"], None
    for job in jobs:
        name = job.mapper.get_property_by_column(column).key
        if job.given().get(name) is None and job.default_of(column) is None:
            now = now or connection.scalar(sa.select(sa.cast(sa.func.now(), column.type)))
            set_committed_value(job.job, name, now)


def _copied(collection: Any) -> Any:
    return collection.copy() if isinstance(collection, list | set | dict) else list(collection)


class _DefaultContext:
    """What a function that computes a default is given, see "Context-Sensitive Default Functions" in SQLAlchemy."""

    def __init__(self, job: NewJob) -> None:
        columns = job.columns()
        self.current_parameters = {columns[name].key: value for name, value in job.given().items()}

    def get_current_parameters(self, isolate_multiinsert_groups: bool = True) -> dict[str, Any]:  # noqa: FBT001, FBT002 - the signature in SQLAlchemy
        """Return the values of the row, by column key."""
        return self.current_parameters
