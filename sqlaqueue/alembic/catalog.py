"""What a database has of queues, read from PostgreSQL's catalog, and the operations that would restore it."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from alembic.operations import MigrateOperation
from sqlalchemy.exc import DBAPIError

from sqlaqueue.alembic import operations as ops
from sqlaqueue.postgresql.ddl import Trigger, TriggerFunction

NO_PRIVILEGE = "42501"
PREFIX = "sqlaqueue_"
"""How the names of this library's own triggers, functions and tables begin."""

_EVENTS = {4: "INSERT", 8: "DELETE", 16: "UPDATE", 32: "TRUNCATE"}
"""By ``pg_trigger.tgtype``: any other value is no plain statement trigger that fires afterwards."""

_ROW = 1
"""What is added to it for a trigger that fires for each row."""

_WHEN = re.compile(r" FOR EACH (?:ROW|STATEMENT) WHEN \((.*)\) EXECUTE FUNCTION ", re.DOTALL)

_TRIGGERS = sa.text(r"""
    SELECT n.nspname AS schema, c.relname AS table, t.tgname AS name, t.tgtype::int AS type,
           t.tgenabled::text AS enabled, t.tgoldtable AS old, t.tgnewtable AS new,
           f.pronamespace = c.relnamespace AND t.tgnargs = 0 AND t.tgconstraint = 0
             AND t.tgattr::text = '' AS plain,
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
    ORDER BY n.nspname, c.relname, t.tgname
""")
_FUNCTIONS = sa.text("""
    SELECT n.nspname AS schema, f.proname AS name, f.prosrc AS source,
           obj_description(f.oid, 'pg_proc') AS comment, pg_get_functiondef(f.oid) AS definition,
           format('COMMENT ON FUNCTION %I.%I() IS %L', n.nspname, f.proname, obj_description(f.oid, 'pg_proc'))
             AS noted,
           coalesce(f.proconfig[1], '') LIKE 'search_path=%' AS fixed,
           f.proconfig[1] = 'search_path=' || current_setting('search_path') AS here,
           f.prosecdef AS definer, public.allowed AS public,
           f.proconfig[1] = 'search_path=pg_catalog, ' || quote_ident(n.nspname) || ', pg_temp'
             AND NOT public.allowed AS closed,
           l.lanname = 'plpgsql' AND f.provolatile = 'v' AND NOT f.proisstrict
             AND f.proparallel = 'u' AND f.procost = 100 AND NOT f.proleakproof
             AND f.proconfig[2:] = ARRAY['enable_seqscan=off'] AS plain,
           EXISTS (SELECT FROM pg_trigger AS t WHERE t.tgfoid = f.oid AND NOT t.tgisinternal) AS used
    FROM pg_proc AS f
    JOIN pg_namespace AS n ON n.oid = f.pronamespace
    JOIN pg_language AS l ON l.oid = f.prolang
    CROSS JOIN LATERAL (
      SELECT EXISTS (SELECT FROM aclexplode(coalesce(f.proacl, acldefault('f', f.proowner))) WHERE grantee = 0)
    ) AS public (allowed)
    WHERE f.prorettype = 'trigger'::regtype AND n.nspname = ANY (:schemas)
    ORDER BY n.nspname, f.proname
""")
_OPTIONS = sa.text("""
    SELECT n.nspname, c.relname, c.reloptions
    FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
    WHERE c.relkind IN ('r', 'p') AND c.reloptions IS NOT NULL AND n.nspname = ANY (:schemas)
""")
_PARTITIONED = sa.text("""
    SELECT n.nspname, c.relname FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
    WHERE c.relkind = 'p' AND n.nspname = ANY (:schemas)
""")
_INDEXES = sa.text("""
    SELECT n.nspname, i.relname, x.indisvalid, pg_get_expr(x.indpred, x.indrelid)
    FROM pg_index AS x
    JOIN pg_class AS i ON i.oid = x.indexrelid
    JOIN pg_namespace AS n ON n.oid = i.relnamespace
    WHERE n.nspname = ANY (:schemas)
""")
_CHECKS = sa.text("""
    SELECT n.nspname, c.relname, k.conname, pg_get_expr(k.conbin, k.conrelid),
           (SELECT array_agg(a.attname::text) FROM pg_attribute AS a
            WHERE a.attrelid = c.oid AND a.attnum = ANY (k.conkey))
    FROM pg_constraint AS k
    JOIN pg_class AS c ON c.oid = k.conrelid
    JOIN pg_namespace AS n ON n.oid = c.relnamespace
    WHERE k.contype = 'c' AND n.nspname = ANY (:schemas)
    ORDER BY k.conname
""")
_ENUMS = sa.text("""
    SELECT n.nspname, t.typname, pg_type_is_visible(t.oid),
           (SELECT array_agg(DISTINCT c.relname::text)
            FROM pg_attribute AS a JOIN pg_class AS c ON c.oid = a.attrelid
            WHERE a.atttypid = t.oid AND NOT a.attisdropped AND c.relkind IN ('r', 'p'))
    FROM pg_type AS t JOIN pg_namespace AS n ON n.oid = t.typnamespace
    WHERE t.typtype = 'e' AND (n.nspname = ANY (:schemas) OR pg_type_is_visible(t.oid))
""")
_VISIBLE = sa.text("""
    SELECT c.relname, n.nspname
    FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
    WHERE c.relkind IN ('r', 'p') AND c.relpersistence <> 't' AND n.nspname <> 'pg_catalog'
      AND pg_table_is_visible(c.oid)
""")

FoundIndex = tuple[bool, str | None]
"""Whether an index can be used, and its predicate."""

FoundCheck = tuple[str, list[str]]
"""The condition of a check constraint, and the columns in it."""

Place = tuple[str | None, str]
"""A schema, None for the one that an unqualified name leads to, and a name in it."""

Found = tuple[str, str]
"""The schema in which something was found, and its name."""


def condition_in(definition: str) -> str | None:
    """Return the condition of a trigger whose definition the server has written, None when it has none."""
    found = _WHEN.search(definition)
    return found[1] if found else None


def sqlstate(error: DBAPIError) -> str | None:
    """Return PostgreSQL's code of an error."""
    return getattr(error.orig, "sqlstate", None) or getattr(error.orig, "pgcode", None)


@dataclass(frozen=True)
class FoundFunction:
    """A trigger function of the database."""

    schema: str | None
    """As operations name it."""
    home: str
    """The schema that it is in."""
    name: str
    source: str
    comment: str | None
    definition: str
    noted: str
    """The statement that writes its comment."""
    plain: bool
    """It has no property that :class:`~sqlaqueue.alembic.operations.CreateFunction` would not give it."""
    fixed: bool
    """It runs with a search path of its own."""
    here: bool
    """That path is the one of this session."""
    definer: bool
    """It runs with the rights of its owner."""
    public: bool
    """Everybody may execute it."""
    closed: bool
    """It is safe to run it with the rights of its owner: nobody else can execute it, or change what its text means."""
    used: bool
    """Some trigger calls it."""

    def same(self, wanted: TriggerFunction, source: str) -> bool:
        """Tell whether it is as it was made."""
        path = self.closed if wanted.definer else self.fixed
        mine = (self.source, self.comment, self.definer, self.plain, path)
        return mine == (source, wanted.comment, wanted.definer, True, True)

    def restored(self) -> MigrateOperation:
        """Return what brings the function back as it is."""
        as_made = self.closed if self.definer else self.here
        if self.plain and as_made and self.source.startswith("\n"):
            return ops.CreateFunction(
                self.name, self.source[1:], comment=self.comment, definer=self.definer, schema=self.schema
            )
        return ops.Steps([ops.ExecuteAsWritten(self.definition), ops.ExecuteAsWritten(self.noted)])

    def put_back(self, quote: Any) -> MigrateOperation:
        """Return what brings the function back in the place of another one, whose privileges it would keep."""
        name = ".".join(map(quote, filter(None, (self.schema, self.name))))
        give, to = ("GRANT", "TO") if self.public else ("REVOKE", "FROM")
        return ops.Steps([self.restored(), ops.ExecuteAsWritten(f"{give} ALL ON FUNCTION {name}() {to} PUBLIC")])


@dataclass(frozen=True)
class FoundTrigger:
    """A trigger of the database."""

    schema: str | None
    table: str
    name: str
    event: str
    """Empty for a trigger that is not as this library makes them."""
    rows: Mapping[str, str]
    when: str | None
    """The condition of a trigger that fires for each row, as the server writes it."""
    function: str
    enabled: str
    definition: str
    columns: Collection[str]
    """Those that its condition names; none of them can get another type as long as it is there."""

    def same(self, wanted: Trigger) -> bool:
        """Tell whether it is as it was made; of its condition, which the server writes otherwise, that there is one."""
        mine = (self.event, self.rows, self.when is None, self.function, self.enabled)
        return mine == (wanted.event, wanted.rows, wanted.when is None, wanted.function.name, "O")

    @property
    def plan(self) -> ops.TriggerPlan:
        """What it is, for the operation that creates it."""
        return ops.plan_of(self.event, dict(self.rows), self.when)

    def restored(self, quote: Any) -> MigrateOperation:
        """Return what brings the trigger back as it is."""
        if self.event:
            create: MigrateOperation = ops.CreateTriggers(
                self.table, self.function, {self.name: self.plan}, schema=self.schema
            )
        else:
            create = ops.ExecuteAsWritten(self.definition)
        words = {"D": "DISABLE", "R": "ENABLE REPLICA", "A": "ENABLE ALWAYS"}
        if self.enabled not in words:
            return create
        # As pg_get_triggerdef() names it, which is how it will be named then.
        table = ".".join(map(quote, filter(None, (self.schema, self.table))))
        state = f"ALTER TABLE {table} {words[self.enabled]} TRIGGER {quote(self.name)}"
        return ops.Steps([create, ops.ExecuteAsWritten(state)])


class Catalog:
    """What some schemas of a database have.

    A table without a schema is where Alembic finds it: in the first schema of the connection's search path that has one
    of its name, be that the schema of a tenant. One that is not there yet will be made in the first schema of the path.
    What was found is known by the schema that it is in.

    :param tables: the tables that Alembic compares.
    :param schemas: the schemas that it looks into; None for what the search path leads to.
    """

    def __init__(self, connection: sa.Connection, tables: Iterable[Place], schemas: Iterable[str | None]) -> None:
        self._connection = connection
        current = connection.scalar(sa.select(sa.func.current_schema()))
        self._current: str = current or connection.dialect.default_schema_name or "public"
        self._visible: dict[str, str] = dict([*map(tuple, connection.execute(_VISIBLE))])
        places = [*tables]
        named = {schema for schema in (*schemas, *(schema for schema, _ in places)) if schema is not None}
        homes = {self.at(place)[0] for place in places if place[0] is None}
        self._unnamed = {self._current, *(homes - named)}
        self._schemas = [*(named | self._unnamed)]
        self.functions = dict(self._read_functions())
        self.triggers: dict[Found, dict[str, FoundTrigger]] = {}
        for found, trigger in self._read_triggers():
            self.triggers.setdefault(found, {})[trigger.name] = trigger
        self._options = {
            (schema, table): dict(option.split("=", 1) for option in options)
            for schema, table, options in self._rows(_OPTIONS)
        }
        self._partitioned = {(schema, table) for schema, table in self._rows(_PARTITIONED)}
        self._indexes: dict[Found, FoundIndex] = {
            (schema, name): (valid, predicate) for schema, name, valid, predicate in self._rows(_INDEXES)
        }
        self._checks: dict[Found, dict[str, FoundCheck]] = {}
        for schema, table, name, text, columns in self._rows(_CHECKS):
            self._checks.setdefault((schema, table), {})[name] = (text, columns or [])
        self._enums: dict[Place, Collection[str]] = {}
        for schema, name, visible, users in self._rows(_ENUMS):
            self._enums |= {(each, name): users or [] for each in ([schema, None] if visible else [schema])}

    def at(self, place: Place) -> Found:
        """Return where a table is, or would be."""
        schema, name = place
        return schema or self._visible.get(name, self._current), name

    def triggers_of(self, place: Place) -> Mapping[str, FoundTrigger]:
        """Return the triggers of a table by name."""
        return self.triggers.get(self.at(place), {})

    def function(self, place: Place, name: str) -> FoundFunction | None:
        """Return the trigger function of a name beside a table, in the same schema."""
        return self.functions.get((self.at(place)[0], name))

    def index(self, place: Place, name: str) -> FoundIndex | None:
        """Return the index of a name of a table."""
        return self._indexes.get((self.at(place)[0], name))

    def checks_of(self, place: Place) -> Mapping[str, FoundCheck]:
        """Return the check constraints of a table by name."""
        return self._checks.get(self.at(place), {})

    def options_of(self, place: Place) -> Mapping[str, str]:
        """Return the storage parameters of a table."""
        return self._options.get(self.at(place), {})

    def is_partitioned(self, place: Place) -> bool:
        """Tell whether a table has partitions."""
        return self.at(place) in self._partitioned

    def users_of_enum(self, place: Place) -> Collection[str] | None:
        """Return the names of the tables that use an enum type; None when there is no such type."""
        return self._enums.get(place)

    def _rows(self, query: sa.TextClause) -> list[Any]:
        bound = query.bindparams(sa.bindparam("schemas", type_=sa.ARRAY(sa.Text())))
        return [*self._connection.execute(bound, {"schemas": self._schemas})]

    def _named(self, schema: str) -> str | None:
        """Return a schema as operations name it."""
        return None if schema in self._unnamed else schema

    def _read_functions(self) -> Iterable[tuple[Found, FoundFunction]]:
        for row in self._rows(_FUNCTIONS):
            yield (
                (row.schema, row.name),
                FoundFunction(
                    schema=self._named(row.schema),
                    home=row.schema,
                    name=row.name,
                    source=row.source,
                    comment=row.comment,
                    definition=row.definition,
                    noted=row.noted,
                    plain=bool(row.plain),
                    fixed=bool(row.fixed),
                    here=bool(row.here),
                    definer=row.definer,
                    public=row.public,
                    closed=bool(row.closed),
                    used=row.used,
                ),
            )

    def _read_triggers(self) -> Iterable[tuple[Found, FoundTrigger]]:
        for row in self._rows(_TRIGGERS):
            rows = {"OLD": row.old, "NEW": row.new}
            when = condition_in(row.definition)
            # Either a statement trigger without a condition, or one for each row with a condition.
            kind = row.type - (0 if when is None else _ROW)
            yield (
                (row.schema, row.table),
                FoundTrigger(
                    schema=self._named(row.schema),
                    table=row.table,
                    name=row.name,
                    event=_EVENTS.get(kind, "") if row.plain else "",
                    rows={which: name for which, name in rows.items() if name is not None},
                    when=when,
                    function=row.function,
                    enabled=row.enabled,
                    definition=row.definition,
                    columns=row.columns,
                ),
            )

    def is_queue(self, place: Place) -> bool:
        """Tell whether a table looks like a queue here: it has the triggers or the indexes of one."""
        schema, table = self.at(place)
        ours = re.compile(rf"ix_{re.escape(table)}_queue_(claim|lease|suspect)$")
        return any(name.startswith(PREFIX) for name in self.triggers_of(place)) or any(
            where == schema and ours.match(name) for where, name in self._indexes
        )


def index_is_valid(connection: sa.Connection, schema: str | None, name: str) -> bool | None:
    """Return whether an index can be used, None when there is none of the name."""
    translated = connection.get_execution_options().get("schema_translate_map") or {}
    query = sa.text("""
        SELECT x.indisvalid FROM pg_index AS x
        JOIN pg_class AS i ON i.oid = x.indexrelid
        JOIN pg_namespace AS n ON n.oid = i.relnamespace
        WHERE CASE WHEN :schema IS NULL THEN pg_table_is_visible(i.oid) ELSE n.nspname = :schema END
          AND i.relname = :name
    """).bindparams(sa.bindparam("schema", type_=sa.Text()), sa.bindparam("name", type_=sa.Text()))
    valid: bool | None = connection.scalar(query, {"schema": translated.get(schema, schema), "name": name})
    return valid
