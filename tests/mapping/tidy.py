"""A database whose objects can be listed, to find what a test left behind."""

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
    SELECT 'relation', oid::regclass::text FROM pg_class WHERE relnamespace <> ALL (%(system)s)
    UNION ALL SELECT 'type', oid::regtype::text FROM pg_type WHERE typnamespace <> ALL (%(system)s)
    UNION ALL SELECT 'function', oid::regproc::text FROM pg_proc WHERE pronamespace <> ALL (%(system)s)
    UNION ALL SELECT 'trigger', tgname::text FROM pg_trigger
    UNION ALL SELECT 'schema', nspname::text FROM pg_namespace WHERE oid <> ALL (%(system)s)
"""
_SYSTEM_SCHEMAS = """
    SELECT array_agg(oid) FROM pg_namespace
    WHERE nspname IN ('pg_catalog', 'information_schema') OR nspname ~ '^pg_(toast|temp)'
"""


@dataclass
class TidyDatabase:
    """A database with a connection that reads its catalog; see the fixture ``tidy``."""

    database: Database
    connection: Connection[tuple[Any, ...]]
    empty: Objects = field(init=False)

    def __post_init__(self) -> None:
        self.empty = self.objects()

    def objects(self) -> Objects:
        """Return kind and name of all objects that are not in system schemas."""
        system = self.connection.execute(_SYSTEM_SCHEMAS).fetchone()
        assert system is not None
        rows = self.connection.execute(_OBJECTS, {"system": system[0]}).fetchall()
        return {(kind, name) for kind, name in rows}

    @contextlib.contextmanager
    def schemas(self, *names: str) -> Iterator[None]:
        """Create schemas, and drop them afterwards; they must be empty then."""
        for name in names:
            self.connection.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(name)))
        yield
        for name in names:
            self.connection.execute(sql.SQL("DROP SCHEMA {}").format(sql.Identifier(name)))


@contextlib.contextmanager
def created(engine: sa.Engine, *collections: sa.MetaData) -> Iterator[None]:
    """Create the tables of each MetaData, and drop them afterwards."""
    for metadata in collections:
        metadata.create_all(engine)
    yield
    for metadata in reversed(collections):
        metadata.drop_all(engine)
