"""What some schemas of a database contain, read once, and compared as PostgreSQL prints it."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError

from sqlaqueue.postgresql.ddl import BEFORE_ROW, DEFERRED_INSERT, Function, SqlTemplate, Trigger, bare_table
from sqlaqueue.sql.types import NEUTRAL

_TRIGGERS = """
    SELECT n.nspname AS schema, c.relname AS table, t.tgname AS name, t.tgtype::int AS type,
           t.tgenabled::text AS enabled, t.tgoldtable AS old, t.tgnewtable AS new,
           f.pronamespace = c.relnamespace AND t.tgnargs = 0
             AND (t.tgconstraint = 0 OR t.tgtype = 5 AND t.tginitdeferred)
             AND t.tgattr::text = '' AS plain, t.tginitdeferred AS deferred,
           f.proname AS function, pg_get_triggerdef(t.oid) AS definition,
           ARRAY(SELECT a.attname::text FROM pg_depend AS d
                 JOIN pg_attribute AS a ON a.attrelid = d.refobjid AND a.attnum = d.refobjsubid
                 WHERE d.classid = 'pg_trigger'::regclass AND d.objid = t.oid
                   AND d.refclassid = 'pg_class'::regclass AND d.refobjsubid > 0) AS columns
    FROM pg_trigger AS t
    JOIN pg_class AS c ON c.oid = t.tgrelid
    JOIN pg_namespace AS n ON n.oid = c.relnamespace
    JOIN pg_proc AS f ON f.oid = t.tgfoid
    WHERE NOT t.tgisinternal AND t.tgparentid = 0 AND n.nspname = ANY (:schemas)
"""
_IN_ORDER = " ORDER BY n.nspname, c.relname, t.tgname"

TRIGGERS = sa.text(f"{_TRIGGERS}{_IN_ORDER}")
"""Triggers of tables, with the columns that their conditions name."""

TRIGGERS_OF_TABLES = sa.text(f"{_TRIGGERS} AND c.relname = ANY (:tables){_IN_ORDER}")
"""Those of some tables. Printing the definition of a trigger waits for the lock of its table."""

FUNCTIONS = sa.text("""
    SELECT n.nspname AS schema, f.proname AS name, s.arguments, pg_get_function_result(f.oid) AS returns,
           f.prosrc AS source,
           obj_description(f.oid, 'pg_proc') AS comment, pg_get_functiondef(f.oid) AS definition,
           format('COMMENT ON FUNCTION %I.%I(%s) IS %L', n.nspname, f.proname, s.arguments,
             obj_description(f.oid, 'pg_proc')) AS comment_statement,
           coalesce(f.proconfig[1], '') LIKE 'search_path=%' AS has_search_path,
           f.proconfig[1] = 'search_path=' || current_setting('search_path') AS has_session_search_path,
           f.prosecdef AS definer, public.allowed AS public,
           f.proconfig[1] = 'search_path=pg_catalog, ' || quote_ident(n.nspname) || ', pg_temp'
             AND NOT public.allowed AS restricted,
           l.lanname = 'plpgsql' AND f.provolatile = 'v' AND NOT f.proisstrict
             AND f.proparallel = 'u' AND f.procost = 100 AND NOT f.proleakproof
             AND (CASE WHEN f.proconfig[1] LIKE 'search_path=%' THEN f.proconfig[2:] ELSE f.proconfig END
               = CASE f.prorettype WHEN 'trigger'::regtype THEN ARRAY['enable_seqscan=off']
                 ELSE ARRAY['enable_seqscan=off', 'plan_cache_mode=force_generic_plan'] END
               OR f.proconfig IS NULL) AS plain,
           f.proconfig IS NULL AS bare
    FROM pg_proc AS f
    JOIN pg_namespace AS n ON n.oid = f.pronamespace
    JOIN pg_language AS l ON l.oid = f.prolang
    CROSS JOIN LATERAL (SELECT pg_get_function_identity_arguments(f.oid)) AS s (arguments)
    CROSS JOIN LATERAL (
      SELECT EXISTS (SELECT FROM aclexplode(coalesce(f.proacl, acldefault('f', f.proowner))) WHERE grantee = 0)
    ) AS public (allowed)
    WHERE (f.prorettype = 'trigger'::regtype OR f.prokind = 'f' AND starts_with(f.proname, 'sqlaqueue_'))
      AND n.nspname = ANY (:schemas)
    ORDER BY n.nspname, f.proname
""")
"""Functions of triggers, and those with a name of this library, with what
:class:`~sqlaqueue.postgresql.catalog_schemas.ReflectedFunction` describes.
"""

STORAGE_PARAMETERS = sa.text("""
    SELECT n.nspname, c.relname, c.reloptions
    FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
    WHERE c.relkind IN ('r', 'p') AND c.reloptions IS NOT NULL AND n.nspname = ANY (:schemas)
""")

TABLES = sa.text("""
    SELECT n.nspname, c.relname, c.relkind = 'p'
    FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
    WHERE c.relkind IN ('r', 'p') AND n.nspname = ANY (:schemas)
""")
"""Tables, and whether they are partitioned."""

PARTITIONS = sa.text("""
    SELECT n.nspname, c.relname, m.nspname, r.relname
    FROM pg_class AS c
    JOIN pg_namespace AS n ON n.oid = c.relnamespace
    JOIN pg_class AS r ON r.oid = pg_partition_root(c.oid)
    JOIN pg_namespace AS m ON m.oid = r.relnamespace
    WHERE c.relispartition AND c.relkind IN ('r', 'p', 'f') AND n.nspname = ANY (:schemas)
""")
"""Partitions, each with the partitioned table at the top."""

INDEXES = sa.text("""
    SELECT n.nspname, i.relname, x.indisvalid, pg_get_expr(x.indpred, x.indrelid),
           CASE WHEN x.indisunique THEN substring(pg_get_indexdef(x.indexrelid) FROM ' USING .*') END
    FROM pg_index AS x
    JOIN pg_class AS i ON i.oid = x.indexrelid
    JOIN pg_namespace AS n ON n.oid = i.relnamespace
    WHERE n.nspname = ANY (:schemas)
""")
"""Indexes, with their predicates; of unique ones the definition after the name of the table."""

CHECK_CONSTRAINTS = sa.text("""
    SELECT n.nspname, c.relname, k.conname, pg_get_expr(k.conbin, k.conrelid),
           (SELECT array_agg(a.attname::text) FROM pg_attribute AS a
            WHERE a.attrelid = c.oid AND a.attnum = ANY (k.conkey))
    FROM pg_constraint AS k
    JOIN pg_class AS c ON c.oid = k.conrelid
    JOIN pg_namespace AS n ON n.oid = c.relnamespace
    WHERE k.contype = 'c' AND n.nspname = ANY (:schemas)
    ORDER BY k.conname
""")

ENUMS = sa.text("""
    SELECT n.nspname, t.typname, pg_type_is_visible(t.oid),
           (SELECT array_agg(DISTINCT c.relname::text)
            FROM pg_attribute AS a JOIN pg_class AS c ON c.oid = a.attrelid
            WHERE a.atttypid = t.oid AND NOT a.attisdropped AND c.relkind IN ('r', 'p'))
    FROM pg_type AS t JOIN pg_namespace AS n ON n.oid = t.typnamespace
    WHERE t.typtype = 'e' AND (n.nspname = ANY (:schemas) OR pg_type_is_visible(t.oid))
""")
"""Enum types, with the tables that have a column of the type."""

VISIBLE_TABLES = sa.text("""
    SELECT c.relname, n.nspname
    FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
    WHERE c.relkind IN ('r', 'p') AND c.relpersistence <> 't' AND n.nspname <> 'pg_catalog'
      AND pg_table_is_visible(c.oid)
""")
"""The tables that an unqualified name finds, each with its schema."""


_DEFERRED = 5
_EVENTS = {4: "INSERT", _DEFERRED: DEFERRED_INSERT, 8: "DELETE", 16: "UPDATE", 22: BEFORE_ROW, 32: "TRUNCATE"}
"""By ``pg_trigger.tgtype``. Other values belong to triggers that the library does not have."""

_FOR_EACH_ROW = 1
"""The bit of ``pg_trigger.tgtype`` that a row trigger sets."""

_WHEN = re.compile(r" FOR EACH (?:ROW|STATEMENT) WHEN \((.*)\) EXECUTE FUNCTION ", re.DOTALL)


def trigger_condition(definition: str) -> str | None:
    """Return the WHEN condition in the output of ``pg_get_triggerdef()``, None without an error."""
    match = _WHEN.search(definition)
    return match[1] if match else None


@dataclass(frozen=True)
class ReflectedFunction:
    schema: str | None
    """The schema as operations name it: None for the default one."""
    actual_schema: str
    """The schema in which the function is."""
    name: str
    arguments: str
    returns: str
    source: str
    comment: str | None
    definition: str
    comment_statement: str
    """The statement that writes its comment."""
    plain: bool
    """It has no properties beyond those that a :class:`~sqlaqueue.postgresql.ddl.Function` sets."""
    bare: bool
    """It changes no setting."""
    has_search_path: bool
    """It sets its own search path."""
    has_session_search_path: bool
    """That path is the one of the current session."""
    definer: bool
    """It is SECURITY DEFINER."""
    public: bool
    """PUBLIC may execute it."""
    restricted: bool
    """It is safe as SECURITY DEFINER: PUBLIC may not execute it, and its search path ends with ``pg_temp``."""

    def is_as_declared(self, function: Function) -> bool:
        search_path = self.restricted if function.definer else self.has_search_path == function.sets_search_path
        own = (self.returns, self.comment, self.definer, self.bare, self.plain, search_path)
        same = own == (function.returns, function.comment, function.definer, function.bare, True, True)
        # A statement that was copied from an indented text is the same.
        sources = map(_unindented, _sources(function, self.actual_schema))
        return same and _unindented(self.source) in sources

    @classmethod
    def from_row(cls, row: Any, schema: str | None) -> ReflectedFunction:
        read = {name: value for name, value in row._mapping.items() if name != "schema"}  # noqa: SLF001 - its public name begins so
        # A function without settings has NULL in the place of false.
        flags = {name: bool(read[name]) for name in ("plain", "has_session_search_path", "restricted")}
        return cls(**{**read, **flags}, schema=schema, actual_schema=row.schema)


def _unindented(source: str) -> list[str]:
    return [line.strip() for line in source.strip().splitlines()]


def _sources(function: Function, schema: str) -> Iterator[str]:
    """Yield the texts that a function may have: its tables are unqualified, or qualified by schema_translate_map."""
    tables = {key: bare_table(table.name, table.schema or schema) for key, table in function.tables.items()}
    for each in (function, replace(function, tables=tables)):
        yield str(each.compile(dialect=NEUTRAL)).split("$sqlaqueue$")[1]


@dataclass(frozen=True)
class ReflectedTrigger:
    schema: str | None
    table: str
    name: str
    event: str
    """Empty for a trigger that :class:`~sqlaqueue.postgresql.ddl.Trigger` cannot express."""
    transition_tables: Mapping[str, str]
    when: str | None
    """The condition of a row trigger, as the server prints it."""
    function: str
    enabled: str
    """``pg_trigger.tgenabled``: O (origin), D (disabled), R (replica) or A (always)."""
    definition: str
    columns: Collection[str]
    """The columns in its condition. PostgreSQL refuses to change their types while the trigger exists."""

    def equals(self, trigger: Trigger) -> bool:
        """Return whether the trigger is as the model declares it, apart from the text of its condition.

        The server prints conditions in its own form, which
        :class:`~sqlaqueue.postgresql.catalog_schemas.ExpressionNormalizer` compares.
        """
        own = (self.event, self.transition_tables, self.when is None, self.function, self.enabled)
        return own == (trigger.event, trigger.rows, trigger.when is None, trigger.function.name, "O")

    @classmethod
    def from_row(cls, row: Any, schema: str | None) -> ReflectedTrigger:
        when = trigger_condition(row.definition)
        # A model declares statement triggers without a condition, and row triggers with one.
        kind = row.type - (0 if when is None else _FOR_EACH_ROW)
        transition_tables = {"OLD": row.old, "NEW": row.new}
        return cls(
            schema=schema,
            table=row.table,
            name=row.name,
            event=_EVENTS.get(kind, "") if row.plain and (kind == _DEFERRED) == row.deferred else "",
            transition_tables={which: name for which, name in transition_tables.items() if name is not None},
            when=when,
            function=row.function,
            enabled=row.enabled,
            definition=row.definition,
            columns=row.columns,
        )


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
        self._visible: dict[str, str] = dict([*map(tuple, connection.execute(VISIBLE_TABLES))])
        names = [*tables]
        named = {schema for schema in (*schemas, *(schema for schema, _ in names)) if schema is not None}
        defaults = {self.resolve(name)[0] for name in names if name[0] is None}
        self._unnamed = {self._current, *(defaults - named)}
        self._schemas = [*(named | self._unnamed)]
        self.functions: dict[ResolvedName, ReflectedFunction] = {
            (row.schema, f"{row.name}({row.arguments})"): ReflectedFunction.from_row(
                row, self._schema_argument(row.schema)
            )
            for row in self._rows(FUNCTIONS)
        }
        """By the schema and the signature."""
        self.triggers: dict[ResolvedName, dict[str, ReflectedTrigger]] = {}
        for row in self._rows(TRIGGERS):
            trigger = ReflectedTrigger.from_row(row, self._schema_argument(row.schema))
            self.triggers.setdefault((row.schema, row.table), {})[trigger.name] = trigger
        self._storage_parameters = {
            (schema, table): dict(option.split("=", 1) for option in options)
            for schema, table, options in self._rows(STORAGE_PARAMETERS)
        }
        self.tables: dict[ResolvedName, bool] = {
            (schema, table): partitioned for schema, table, partitioned in self._rows(TABLES)
        }
        """Whether each table is partitioned."""
        self._partitions: dict[ResolvedName, ResolvedName] = {
            (schema, name): (root_schema, root) for schema, name, root_schema, root in self._rows(PARTITIONS)
        }
        self._indexes: dict[ResolvedName, ReflectedIndex] = {}
        self._unique_indexes: dict[ResolvedName, str] = {}
        for schema, name, valid, predicate, unique_definition in self._rows(INDEXES):
            self._indexes[schema, name] = (valid, predicate)
            if unique_definition is not None:
                self._unique_indexes[schema, name] = unique_definition
        self._checks: dict[ResolvedName, dict[str, ReflectedCheck]] = {}
        for schema, table, name, text, columns in self._rows(CHECK_CONSTRAINTS):
            self._checks.setdefault((schema, table), {})[name] = (text, columns or [])
        self._enums: dict[QualifiedName, Collection[str]] = {}
        for schema, name, visible, users in self._rows(ENUMS):
            self._enums |= {(each, name): users or [] for each in ([schema, None] if visible else [schema])}

    def resolve(self, table: QualifiedName) -> ResolvedName:
        """Return the actual schema of a table, or the one in which it would be created, and its name."""
        schema, name = table
        return schema or self._visible.get(name, self._current), name

    def triggers_of(self, table: QualifiedName) -> Mapping[str, ReflectedTrigger]:
        return self.triggers.get(self.resolve(table), {})

    def function(self, table: QualifiedName, signature: str) -> ReflectedFunction | None:
        return self.functions.get((self.resolve(table)[0], signature))

    def index(self, table: QualifiedName, name: str) -> ReflectedIndex | None:
        return self._indexes.get((self.resolve(table)[0], name))

    def unique_index(self, table: QualifiedName, name: str) -> str | None:
        """Return the definition of a unique index of a table, without the names; None if there is no such index."""
        return self._unique_indexes.get((self.resolve(table)[0], name))

    def checks_of(self, table: QualifiedName) -> Mapping[str, ReflectedCheck]:
        return self._checks.get(self.resolve(table), {})

    def storage_parameters_of(self, table: QualifiedName) -> Mapping[str, str]:
        return self._storage_parameters.get(self.resolve(table), {})

    def is_partitioned(self, table: QualifiedName) -> bool:
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
        return None if schema in self._unnamed else schema


_NAME = "sqlaqueue_normalize"
_COPY = bare_table(_NAME, "pg_temp")


class ExpressionNormalizer:
    """Prints expressions over the columns of one table as PostgreSQL stores them; None if the table cannot have one.

    The database stores ``status = 'pending'`` as ``((status)::text = 'pending'::text)``. So the wanted predicate,
    constraint, condition or default is created on an empty temporary copy of the table, read back as the database
    prints it, and rolled back. Nothing about a definition has to be stored, and changes by hand are found as well.

    :raises DBAPIError: when the role may not create a temporary table, or the transaction is read-only.
    """

    def __init__(self, connection: sa.Connection, table: QualifiedName) -> None:
        schema, name = table
        self._connection = connection
        self._savepoint = connection.begin_nested()
        create = SqlTemplate(f"CREATE TEMP TABLE {_NAME} (LIKE {{table}})", table=bare_table(name, schema))
        connection.execute(create)

    def close(self) -> None:
        self._savepoint.rollback()

    @staticmethod
    def same(normalize: Callable[[str], str | None], stored: str | None, wanted: str | None) -> bool:
        """Return whether a stored expression is the wanted one.

        PostgreSQL prints ``IN`` in another form each time it is parsed and printed again, as a downgrade or a restored
        dump does. So the stored expression is normalized as well if the two differ.

        :param normalize: the method of this class for the kind of expression.
        """
        if stored is None or wanted is None:
            return stored is wanted
        normalized = normalize(wanted)
        return normalized is not None and (stored == normalized or normalize(stored) == normalize(normalized))

    def index_predicate(self, text: str) -> str | None:
        return self._created(
            f"CREATE INDEX ON {{copy}} ((1)) WHERE {text}",
            "SELECT pg_get_expr(indpred, indrelid) FROM pg_index WHERE indrelid = '{copy}'::regclass",
        )

    def unique_index(self, definition: str) -> str | None:
        """Return a definition, which is what follows the name of the table in CREATE INDEX, as PostgreSQL prints it."""
        return self._created(
            f"CREATE UNIQUE INDEX ON {{copy}} {definition}",
            "SELECT substring(pg_get_indexdef(indexrelid) FROM ' USING .*') FROM pg_index"
            " WHERE indrelid = '{copy}'::regclass",
        )

    def check_constraint(self, text: str) -> str | None:
        return self._created(
            f"ALTER TABLE {{copy}} ADD CHECK ({text})",
            "SELECT pg_get_expr(conbin, conrelid) FROM pg_constraint"
            " WHERE conrelid = '{copy}'::regclass AND contype = 'c'",
        )

    def trigger_condition(self, event: str, text: str) -> str | None:
        when = event if event == BEFORE_ROW else f"AFTER {event}"
        # The function does not matter; this one exists in every database.
        definition = self._created(
            f"CREATE TRIGGER normalize {when} ON {{copy}} FOR EACH ROW WHEN ({text})"
            " EXECUTE FUNCTION pg_catalog.suppress_redundant_updates_trigger()",
            "SELECT pg_get_triggerdef(oid) FROM pg_trigger WHERE tgrelid = '{copy}'::regclass",
        )
        return None if definition is None else trigger_condition(definition)

    def column_default(self, column: str, text: str) -> str | None:
        name = NEUTRAL.identifier_preparer.quote(column)
        return self._created(
            f"ALTER TABLE {{copy}} ALTER COLUMN {name} SET DEFAULT {text}",
            "SELECT pg_get_expr(adbin, adrelid) FROM pg_attrdef WHERE adrelid = '{copy}'::regclass",
        )

    def _created(self, create: str, read: str) -> str | None:
        try:
            with self._connection.begin_nested() as savepoint:
                self._connection.execute(SqlTemplate(create, copy=_COPY))
                text: Any = self._connection.scalar(sa.text(read.replace("{copy}", f"pg_temp.{_NAME}")))
                savepoint.rollback()
        except DBAPIError:
            return None
        return str(text)
