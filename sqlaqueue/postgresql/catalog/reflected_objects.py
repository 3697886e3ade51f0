"""Functions and triggers as a database has them, and how they differ from those of a model."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from sqlaqueue.postgresql.ddl.objects import Function, Trigger
from sqlaqueue.postgresql.ddl.sql_template import bare_table
from sqlaqueue.postgresql.types import NEUTRAL

_EVENTS = {4: "INSERT", 8: "DELETE", 16: "UPDATE", 32: "TRUNCATE"}
"""By ``pg_trigger.tgtype``. Other values belong to triggers that are not plain AFTER triggers of one event."""

_FOR_EACH_ROW = 1
"""The bit of ``pg_trigger.tgtype`` that a row trigger sets."""

_WHEN = re.compile(r" FOR EACH (?:ROW|STATEMENT) WHEN \((.*)\) EXECUTE FUNCTION ", re.DOTALL)


def trigger_condition(definition: str) -> str | None:
    """Return the WHEN condition in the output of ``pg_get_triggerdef()``, None if there is none."""
    match = _WHEN.search(definition)
    return match[1] if match else None


@dataclass(frozen=True)
class ReflectedFunction:
    """A function of the database."""

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
        """Return whether the function is as the model declares it."""
        search_path = self.restricted if function.definer else self.has_search_path == function.sets_search_path
        own = (self.returns, self.comment, self.definer, self.plain, search_path)
        same = own == (function.returns, function.comment, function.definer, True, True)
        # A statement that was copied from an indented text is the same.
        sources = map(_unindented, _sources(function, self.actual_schema))
        return same and _unindented(self.source) in sources

    @classmethod
    def from_row(cls, row: Any, schema: str | None) -> ReflectedFunction:
        """Return the function in a row of the query ``FUNCTIONS``."""
        return cls(
            schema=schema,
            actual_schema=row.schema,
            name=row.name,
            arguments=row.arguments,
            returns=row.returns,
            source=row.source,
            comment=row.comment,
            definition=row.definition,
            comment_statement=row.comment_statement,
            plain=bool(row.plain),
            has_search_path=bool(row.has_search_path),
            has_session_search_path=bool(row.has_session_search_path),
            definer=row.definer,
            public=row.public,
            restricted=bool(row.restricted),
        )


def _unindented(source: str) -> list[str]:
    return [line.strip() for line in source.strip().splitlines()]


def _sources(function: Function, schema: str) -> Iterator[str]:
    """Yield the texts that a function may have: its tables are unqualified, or qualified by schema_translate_map."""
    tables = {key: bare_table(table.name, table.schema or schema) for key, table in function.tables.items()}
    for each in (function, replace(function, tables=tables)):
        yield str(each.compile(dialect=NEUTRAL)).split("$sqlaqueue$")[1]


@dataclass(frozen=True)
class ReflectedTrigger:
    """A trigger of the database."""

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
        :class:`~sqlaqueue.postgresql.catalog.normalize.ExpressionNormalizer` compares.
        """
        own = (self.event, self.transition_tables, self.when is None, self.function, self.enabled)
        return own == (trigger.event, trigger.rows, trigger.when is None, trigger.function.name, "O")

    @classmethod
    def from_row(cls, row: Any, schema: str | None) -> ReflectedTrigger:
        """Return the trigger in a row of the query ``TRIGGERS``."""
        when = trigger_condition(row.definition)
        # A model declares statement triggers without a condition, and row triggers with one.
        kind = row.type - (0 if when is None else _FOR_EACH_ROW)
        transition_tables = {"OLD": row.old, "NEW": row.new}
        return cls(
            schema=schema,
            table=row.table,
            name=row.name,
            event=_EVENTS.get(kind, "") if row.plain else "",
            transition_tables={which: name for which, name in transition_tables.items() if name is not None},
            when=when,
            function=row.function,
            enabled=row.enabled,
            definition=row.definition,
            columns=row.columns,
        )
