"""What some schemas of a database contain, read once and looked up by the names of tables."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import sqlalchemy as sa

from sqlaqueue.postgresql.catalog import queries
from sqlaqueue.postgresql.catalog.reflected_objects import ReflectedFunction, ReflectedTrigger

PREFIX = "sqlaqueue_"
"""The prefix of the names of this library's triggers, functions and tables."""

QualifiedName = tuple[str | None, str]
"""A schema and a name in it. The schema is None for one that an unqualified name refers to."""

ResolvedName = tuple[str, str]
"""The actual schema of an object, and its name."""

ReflectedIndex = tuple[bool, str | None]
"""Whether an index is valid, and its predicate."""

ReflectedCheck = tuple[str, list[str]]
"""The condition of a check constraint, and the columns in it."""


class CatalogReader:
    """The triggers, functions, indexes, constraints, storage parameters and enums of some schemas.

    An unqualified table is in the first schema of the connection's search path that has a table of its name. A table
    that does not exist yet will be created in the first schema of the path. Alembic resolves names in the same way.

    :param tables: the tables that Alembic compares.
    :param schemas: the schemas that Alembic compares; None for those of the search path.
    """

    def __init__(
        self, connection: sa.Connection, tables: Iterable[QualifiedName], schemas: Iterable[str | None]
    ) -> None:
        self._connection = connection
        current = connection.scalar(sa.select(sa.func.current_schema()))
        self._current: str = current or connection.dialect.default_schema_name or "public"
        self._visible: dict[str, str] = dict([*map(tuple, connection.execute(queries.VISIBLE_TABLES))])
        names = [*tables]
        named = {schema for schema in (*schemas, *(schema for schema, _ in names)) if schema is not None}
        defaults = {self.resolve(name)[0] for name in names if name[0] is None}
        self._unnamed = {self._current, *(defaults - named)}
        self._schemas = [*(named | self._unnamed)]
        self.functions: dict[ResolvedName, ReflectedFunction] = {
            (row.schema, f"{row.name}({row.arguments})"): ReflectedFunction.from_row(
                row, self._schema_argument(row.schema)
            )
            for row in self._rows(queries.FUNCTIONS)
        }
        """By the schema and the signature."""
        self.triggers: dict[ResolvedName, dict[str, ReflectedTrigger]] = {}
        for row in self._rows(queries.TRIGGERS):
            trigger = ReflectedTrigger.from_row(row, self._schema_argument(row.schema))
            self.triggers.setdefault((row.schema, row.table), {})[trigger.name] = trigger
        self._storage_parameters = {
            (schema, table): dict(option.split("=", 1) for option in options)
            for schema, table, options in self._rows(queries.STORAGE_PARAMETERS)
        }
        self.tables: dict[ResolvedName, bool] = {
            (schema, table): partitioned for schema, table, partitioned in self._rows(queries.TABLES)
        }
        """Whether each table is partitioned."""
        self._partitions: dict[ResolvedName, ResolvedName] = {
            (schema, name): (root_schema, root) for schema, name, root_schema, root in self._rows(queries.PARTITIONS)
        }
        self._indexes: dict[ResolvedName, ReflectedIndex] = {}
        self._unique_indexes: dict[ResolvedName, str] = {}
        for schema, name, valid, predicate, unique_definition in self._rows(queries.INDEXES):
            self._indexes[schema, name] = (valid, predicate)
            if unique_definition is not None:
                self._unique_indexes[schema, name] = unique_definition
        self._checks: dict[ResolvedName, dict[str, ReflectedCheck]] = {}
        for schema, table, name, text, columns in self._rows(queries.CHECK_CONSTRAINTS):
            self._checks.setdefault((schema, table), {})[name] = (text, columns or [])
        self._enums: dict[QualifiedName, Collection[str]] = {}
        for schema, name, visible, users in self._rows(queries.ENUMS):
            self._enums |= {(each, name): users or [] for each in ([schema, None] if visible else [schema])}

    def resolve(self, table: QualifiedName) -> ResolvedName:
        """Return the actual schema of a table, or the one in which it would be created, and its name."""
        schema, name = table
        return schema or self._visible.get(name, self._current), name

    def triggers_of(self, table: QualifiedName) -> Mapping[str, ReflectedTrigger]:
        """Return the triggers of a table by name."""
        return self.triggers.get(self.resolve(table), {})

    def function(self, table: QualifiedName, signature: str) -> ReflectedFunction | None:
        """Return the function of this name and these arguments in the schema of a table."""
        return self.functions.get((self.resolve(table)[0], signature))

    def index(self, table: QualifiedName, name: str) -> ReflectedIndex | None:
        """Return the index ``name`` of a table."""
        return self._indexes.get((self.resolve(table)[0], name))

    def unique_index(self, table: QualifiedName, name: str) -> str | None:
        """Return the definition of a unique index of a table, without the names; None if there is no such index."""
        return self._unique_indexes.get((self.resolve(table)[0], name))

    def checks_of(self, table: QualifiedName) -> Mapping[str, ReflectedCheck]:
        """Return the check constraints of a table by name."""
        return self._checks.get(self.resolve(table), {})

    def storage_parameters_of(self, table: QualifiedName) -> Mapping[str, str]:
        """Return the storage parameters of a table."""
        return self._storage_parameters.get(self.resolve(table), {})

    def is_partitioned(self, table: QualifiedName) -> bool:
        """Return whether a table is partitioned."""
        return self.tables.get(self.resolve(table), False)

    def root_of_partition(self, table: QualifiedName) -> ResolvedName | None:
        """Return the partitioned table to which a partition belongs at any depth; None for any other table."""
        return self._partitions.get(self.resolve(table))

    def tables_with_enum(self, enum: QualifiedName) -> Collection[str] | None:
        """Return the names of the tables that have a column of an enum type; None if the type does not exist."""
        return self._enums.get(enum)

    def is_queue(self, table: QualifiedName) -> bool:
        """Return whether a table has the triggers or the indexes of a queue."""
        schema, name = self.resolve(table)
        pattern = re.compile(rf"ix_{re.escape(name)}_queue_(claim|lease|quarantined)$")
        return any(trigger.startswith(PREFIX) for trigger in self.triggers_of(table)) or any(
            index_schema == schema and pattern.match(index) for index_schema, index in self._indexes
        )

    def _rows(self, query: sa.TextClause) -> list[Any]:
        bound = query.bindparams(sa.bindparam("schemas", type_=sa.ARRAY(sa.Text())))
        return [*self._connection.execute(bound, {"schemas": self._schemas})]

    def _schema_argument(self, schema: str) -> str | None:
        """Return a schema as operations name it."""
        return None if schema in self._unnamed else schema
