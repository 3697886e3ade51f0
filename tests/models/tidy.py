"""A database that knows what is in it."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from psycopg import Connection, sql

if TYPE_CHECKING:
    from collections.abc import Iterator

    import sqlalchemy as sa

    from tests.servers import Database

Objects = set[tuple[str, str]]

_OBJECTS = """
    SELECT 'relation', oid::regclass::text FROM pg_class WHERE relnamespace <> ALL (%(theirs)s)
    UNION ALL SELECT 'type', oid::regtype::text FROM pg_type WHERE typnamespace <> ALL (%(theirs)s)
    UNION ALL SELECT 'function', oid::regproc::text FROM pg_proc WHERE pronamespace <> ALL (%(theirs)s)
    UNION ALL SELECT 'trigger', tgname::text FROM pg_trigger
    UNION ALL SELECT 'schema', nspname::text FROM pg_namespace WHERE oid <> ALL (%(theirs)s)
"""
_THEIRS = """
    SELECT array_agg(oid) FROM pg_namespace
    WHERE nspname IN ('pg_catalog', 'information_schema') OR nspname ~ '^pg_(toast|temp)'
"""


@dataclass
class TidyDatabase:
    """A database with a connection to look at its catalog; see the fixture ``tidy``."""

    database: Database
    connection: Connection[tuple[Any, ...]]
    empty: Objects = field(init=False)

    def __post_init__(self) -> None:
        self.empty = self.objects()

    def objects(self) -> Objects:
        """Return the kind and name of everything that is not the system's own."""
        theirs = self.connection.execute(_THEIRS).fetchone()
        assert theirs is not None
        rows = self.connection.execute(_OBJECTS, {"theirs": theirs[0]}).fetchall()
        return {(kind, name) for kind, name in rows}

    @contextlib.contextmanager
    def schemas(self, *names: str) -> Iterator[None]:
        """Create schemas, and drop them in the end, when they have to be empty."""
        for name in names:
            self.connection.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(name)))
        yield
        for name in names:
            self.connection.execute(sql.SQL("DROP SCHEMA {}").format(sql.Identifier(name)))


@contextlib.contextmanager
def created(engine: sa.Engine, *collections: sa.MetaData) -> Iterator[None]:
    """Create the tables of MetaData, and drop them in the end."""
    for metadata in collections:
        metadata.create_all(engine)
    yield
    for metadata in reversed(collections):
        metadata.drop_all(engine)
