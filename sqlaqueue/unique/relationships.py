"""The relationships of a new job while it is out of its session.

A flush would insert a job that is in the session, and fail if it is a duplicate. So a new job is taken out of the
session and out of the collections of the objects to which it refers, until it is known whether it is inserted.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Mapper, RelationshipDirection, RelationshipProperty, Session
from sqlalchemy.orm.attributes import del_attribute, instance_state, set_attribute, set_committed_value

from sqlaqueue.exc import StatementError

_UNLOADED = {"dynamic", "write_only"}
"""Loaders of collections that are no attribute of the instance."""


class Relationships:
    """The objects to which a job refers (parents), and the others: children and members of many-to-many collections."""

    def __init__(self, job: Any) -> None:
        self._job = job
        self._mapper: Mapper[Any] = sa.inspect(job).mapper
        self._values: dict[str, Any] = {}

    def read(self, jobs: Collection[int]) -> None:
        """Read the attributes, and refuse objects that cannot wait until the job is inserted.

        :param jobs: the ids of all instances of the call.
        """
        present = instance_state(self._job).dict
        self._values = {each.key: present[each.key] for each in self._all() if each.key in present}
        self._refuse(jobs)

    def add_parents(self, session: Session) -> None:
        """Add the parents to the session. It may take jobs along, which :meth:`take_out` takes out again."""
        for each, parent in self.parents():
            if parent not in session and "save-update" in each.cascade:
                session.add(parent)

    def take_out(self, session: Session) -> None:
        """Take the job out of the session, and out of the collections of other objects."""
        state = instance_state(self._job)
        children = _pending_children(self._children(), session)
        for each in self._all():
            if each.key not in self._values:
                continue
            if each.direction is RelationshipDirection.ONETOMANY or self._is_settled(each):
                # Without events, as a collection may number its members. The children leave the session, too.
                del state.dict[each.key]
                state.committed_state.pop(each.key, None)
                continue
            if each.uselist:
                # Deleting the attribute empties the collection.
                self._values[each.key] = _copied(self._values[each.key])
            # An event removes the job from the collection of the other object.
            del_attribute(self._job, each.key)
        mine = [instance_state(one) for one in (self._job, *children) if one in session]
        session._expunge_states(mine)  # noqa: SLF001 - expunge() would take objects of the application along

    def _refuse(self, jobs: Collection[int]) -> None:
        name = self._mapper.class_.__name__
        for each, parent in self.parents():
            if id(parent) in jobs:
                msg = f"enqueue(): {name}.{each.key} is another job of the same call; enqueue that one first"
                raise StatementError(msg)
        for each in self._all():
            children = self._objects(each) if each.direction is RelationshipDirection.ONETOMANY else []
            if any(id(child) in jobs for child in children):
                msg = f"enqueue(): {name}.{each.key} has another job of the same call; enqueue this one first"
                raise StatementError(msg)
            if any(instance_state(child).key is not None for child in children):
                msg = (
                    f"enqueue(): {name}.{each.key} has objects that are in the database, and would lose them "
                    "if the job is a duplicate; set it after enqueue()"
                )
                raise StatementError(msg)

        for each in self._mapper.relationships:
            if each.lazy in _UNLOADED and sa.inspect(self._job).attrs[each.key].history.added:
                msg = (
                    f"enqueue(): {name}.{each.key} has objects, and its loader is {each.lazy!r}; add them to the job "
                    "that enqueue() returns"
                )
                raise StatementError(msg)

    def parents(self) -> Iterator[tuple[RelationshipProperty[Any], Any]]:
        """Return the objects to which the job refers, with the relationships."""
        for each in self._all():
            parent = self._values.get(each.key)
            if each.direction is RelationshipDirection.MANYTOONE and parent is not None:
                yield each, parent

    @property
    def has_others(self) -> bool:
        """Whether there are objects besides parents."""
        return any(self._objects(each) for each in self._all() if each.direction is not RelationshipDirection.MANYTOONE)

    def _is_settled(self, each: RelationshipProperty[Any]) -> bool:
        """Return whether the collection of a parent has the job as a member that is no change: after a rollback."""
        parent, back = self._values.get(each.key), each.back_populates
        if each.direction is not RelationshipDirection.MANYTOONE or parent is None or back is None:
            return False
        return any(other is self._job for other in sa.inspect(parent).attrs[back].history.unchanged or ())

    def put_parents_back(self, *, forget: bool = False) -> None:
        """Set the parents of a job that is inserted next.

        :param forget: leave them to be loaded.
        """
        for each in self._all():
            if each.direction is RelationshipDirection.MANYTOONE and each.key in self._values:
                settled, value = self._is_settled(each), self._values.pop(each.key)
                if settled:
                    set_committed_value(self._job, each.key, value)
                elif not forget:
                    set_attribute(self._job, each.key, value)

    def put_others_back(self) -> None:
        """Set the other objects of a job that is inserted next, so that the flush writes them as well."""
        for each in self._all():
            if each.key in self._values:
                value = self._values.pop(each.key)
                set_attribute(self._job, each.key, _copied(value) if each.uselist else value)

    def keep(self) -> None:
        """Set the attributes of a job that is not inserted; no other object is told."""
        for each in self._all():
            if each.key in self._values:
                value = self._values.pop(each.key)
                if each.direction is RelationshipDirection.ONETOMANY:
                    instance_state(self._job).dict[each.key] = value
                else:
                    set_committed_value(self._job, each.key, _items(value))

    def _all(self) -> Iterator[RelationshipProperty[Any]]:
        return (each for each in self._mapper.relationships if not each.viewonly and each.lazy not in _UNLOADED)

    def _objects(self, each: RelationshipProperty[Any]) -> list[Any]:
        value = self._values.get(each.key)
        if value is None:
            return []
        return list(_items(value)) if each.uselist else [value]

    def _children(self) -> list[Any]:
        ones = (each for each in self._all() if each.direction is RelationshipDirection.ONETOMANY)
        return [child for each in ones for child in self._objects(each)]


def refuse_referrers(session: Session, jobs: Collection[int]) -> None:
    """Refuse objects of the session that refer to a job which may not be inserted: a flush would write a NULL."""
    for other in [*session.new, *session.dirty]:
        present, mapper = instance_state(other).dict, sa.inspect(other).mapper
        for each in mapper.relationships:
            if each.direction is RelationshipDirection.MANYTOONE and id(present.get(each.key)) in jobs:
                msg = (
                    f"enqueue(): {mapper.class_.__name__}.{each.key} in the session refers to a job that may not be "
                    "inserted; set it after enqueue(), to the job that this returns"
                )
                raise StatementError(msg)


def set_foreign_key(job: Any, relationship: RelationshipProperty[Any], parent: Any) -> None:
    """Set the foreign key of a job to an object to which it refers, as a flush does."""
    mine: Mapper[Any] = sa.inspect(job).mapper
    there: Mapper[Any] = sa.inspect(parent).mapper
    for local, remote in relationship.local_remote_pairs or ():
        value = getattr(parent, there.get_property_by_column(remote).key)
        set_committed_value(job, mine.get_property_by_column(local).key, value)


def _pending_children(children: list[Any], session: Session) -> list[Any]:
    """Return the pending ones of some objects, with those that refer to them in turn."""
    found: list[Any] = []
    for child in children:
        if child in session.new and not any(child is other for other in found):
            found.append(child)
            found += _pending_children(_children_of(child), session)
    return found


def _children_of(other: Any) -> list[Any]:
    present, found = instance_state(other).dict, []
    for each in sa.inspect(other).mapper.relationships:
        if each.direction is RelationshipDirection.ONETOMANY and present.get(each.key) is not None:
            value = _items(present[each.key])
            found += list(value) if each.uselist else [value]
    return found


def _copied(collection: Any) -> Any:
    return collection.copy() if isinstance(collection, list | set | dict) else list(collection)


def _items(value: Any) -> Any:
    """Return the objects of a collection; another value as it is."""
    return list(value.values()) if isinstance(value, dict) else value
