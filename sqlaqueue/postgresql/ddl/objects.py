"""Database objects for which SQLAlchemy has no construct: functions, triggers, storage parameters.

Each is a :class:`~sqlalchemy.schema.DDLElement`. :mod:`~sqlaqueue.postgresql.ddl.rendering` renders them,
:mod:`~sqlaqueue.postgresql.ddl.attach` ties them to a table.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import sqlalchemy as sa
from sqlalchemy.schema import DDLElement

_VERSION = re.compile(r"sqlaqueue, version (\d+)")


def version_comment(version: int) -> str:
    """Return the comment that stores the version of a function in the database."""
    return f"sqlaqueue, version {version}"


def version_in(comment: str | None) -> int:
    """Return the version in a function's comment; 0 without one."""
    found = _VERSION.fullmatch(comment or "")
    return int(found[1]) if found else 0


class QueueObject(DDLElement):
    """Base of the objects of a queue, which can be created and dropped."""

    inherit_cache = False
    table: sa.Table

    def created(self) -> Sequence[DDLElement]:
        """Return the statements that create the object, in order."""
        return [self]

    def dropped(self) -> DDLElement | None:
        """Return the statement that drops the object; None when PostgreSQL drops it with its table."""
        return None


@dataclass(eq=False)
class Function(QueueObject):
    """A function in PL/pgSQL that statements of a queue call, in the schema of its table.

    It runs with the caller's search path, by which the statement that calls it has found the same tables; to set
    another one takes as long as the whole call. A trigger function sets its own: under a writer's search path, the
    unqualified names in its body could mean other objects. Both disable sequential scans, because PL/pgSQL keeps a plan
    for as long as the connection lives while the table grows. A function that statements call keeps each of its plans.
    """

    kind: ClassVar[str] = "function"
    """What messages call it."""

    table: sa.Table
    name: str
    """Another one for other arguments or another result: CREATE OR REPLACE changes neither."""
    arguments: str
    """Names and types in SQL, without defaults. Migrations and checks compare them as text, so the types are built-in
    ones, and written as the server prints them: ``key bigint, since timestamp with time zone``.
    """
    returns: str
    """The type of the result, as the server prints it."""
    body: str
    """The source; ``{key}`` stands for the table under that key in ``tables``, whose schema may be translated."""
    tables: dict[str, sa.Table] = field(default_factory=dict)
    comment: str | None = None
    definer: bool = False
    """Whether it runs with its owner's privileges (``SECURITY DEFINER``), so that callers need none on ``tables``."""

    @property
    def sets_search_path(self) -> bool:
        """Whether it has a search path of its own."""
        return self.definer or self.returns == "trigger"

    @property
    def signature(self) -> str:
        """The name, unquoted, and the arguments: the function of a schema is looked up by both."""
        return f"{self.name}({self.arguments})"

    def created(self) -> Sequence[DDLElement]:
        """Return CREATE FUNCTION, the statement that makes it SECURITY DEFINER, and COMMENT."""
        secure: list[DDLElement] = [SecureFunction(self)] if self.definer else []
        comment: list[DDLElement] = [] if self.comment is None else [CommentOnFunction(self)]
        return [self, *secure, *comment]

    def dropped(self) -> DDLElement:
        """Return DROP FUNCTION: dropping the table leaves the function behind."""
        return DropFunction(self)


@dataclass(eq=False)
class TriggerFunction(Function):
    """A function that triggers call."""

    kind: ClassVar[str] = "trigger function"

    arguments: str = field(default="", init=False)
    returns: str = field(default="trigger", init=False)


@dataclass(eq=False)
class DropFunction(DDLElement):
    """Drops a :class:`Function`."""

    function: Function


@dataclass(eq=False)
class SecureFunction(DDLElement):
    """Makes a :class:`Function` SECURITY DEFINER, and revokes EXECUTE from PUBLIC.

    A role with EXECUTE could attach a trigger function to a table of its own, and so change the messages with the
    owner's privileges. The temporary schema comes last in the search path; by default it is first, and a writer's
    temporary table with the name of the real one would run its own triggers with the owner's privileges.
    """

    function: Function


@dataclass(eq=False)
class CommentOnFunction(DDLElement):
    """Writes the comment of a :class:`Function`."""

    function: Function


@dataclass(eq=False)
class Trigger(QueueObject):
    """A trigger that fires after ``event``: INSERT, UPDATE, DELETE or TRUNCATE.

    It fires once for each statement, with transition tables, or with a condition once for each row that meets it.
    """

    table: sa.Table
    name: str
    event: str
    function: TriggerFunction
    rows: dict[str, str] = field(default_factory=dict)
    """``{"NEW": name, "OLD": name}`` of the transition tables."""
    when: str | None = None
    """The condition on the rows ``NEW`` and ``OLD``, as SQL."""
    replace: bool = False
    """Whether a trigger of this name may exist already."""


@dataclass(eq=False)
class StorageParameters(QueueObject):
    """Storage parameters of a table whose rows are inserted and deleted at a high rate.

    By default autovacuum waits until a fifth of the rows is dead. A queue's table is nearly empty and rewritten all the
    time, so a fixed number of dead rows is the better threshold.
    """

    table: sa.Table
    parameters: dict[str, str] = field(
        default_factory=lambda: {
            "autovacuum_vacuum_scale_factor": "0",
            "autovacuum_vacuum_threshold": "5000",
            "autovacuum_vacuum_cost_delay": "0",
        }
    )
