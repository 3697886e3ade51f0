"""Compare the tables of queues with the database: predicates, checks, defaults, storage parameters and enum types."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import sqlalchemy as sa
from alembic.autogenerate.api import AutogenContext
from alembic.operations import MigrateOperation
from alembic.operations import ops as alembic_ops
from alembic.util import CommandError
from sqlalchemy.exc import DBAPIError
from sqlalchemy.sql.elements import conv

from sqlaqueue.alembic import operations as ops
from sqlaqueue.postgresql import ddl
from sqlaqueue.postgresql import triggers as triggers_module
from sqlaqueue.postgresql.catalog_schemas import (
    PREFIX,
    CatalogReader,
    ExpressionNormalizer,
    QualifiedName,
    ReflectedCheck,
    ResolvedName,
)
from sqlaqueue.queue.versions import refuse_to_migrate
from sqlaqueue.sql.engine import exists_on
from sqlaqueue.sql.types import object_name

TABLES = "_sqlaqueue_tables"
"""The name under which a run of autogenerate keeps the tables that it compares."""


@dataclass(eq=False)
class ComparedTable:
    """A table that passed the filters of ``env.py``."""

    qualified_name: QualifiedName
    database_table: sa.Table | None
    model_table: sa.Table | None
    modify_ops: alembic_ops.ModifyTableOps
    """The changes that Alembic has found."""

    def __post_init__(self) -> None:
        schema, self.name = self.qualified_name
        self.schema = schema if self.model_table is None else self.model_table.schema
        """The schema as operations name it: that of the model."""
        self.names = {self.name, ".".join(filter(None, (self.schema, self.name)))}
        self.spec = None if self.model_table is None else ddl.queue_of(self.model_table)
        self.objects = () if self.model_table is None else ddl.objects_of(self.model_table)
        self.functions = {each.signature: each for each in self.objects if isinstance(each, ddl.Function)}
        self.triggers = {each.name: each for each in self.objects if isinstance(each, ddl.Trigger)}
        self.unique_index = object_name("ix", self.name, "queue", "unique")
        self.belongs_to_queue = self.spec is not None or self.name.startswith(PREFIX)
        """Whether the table is a queue in the models, or a table of this library."""

    def is_dropped_by(self, op: MigrateOperation) -> bool:
        """Return whether an operation that Alembic found drops this table, or its indexes before it."""
        if isinstance(op, alembic_ops.DropTableOp):
            return (op.schema, op.table_name) == self.qualified_name
        return op is self.modify_ops

    def retyped_columns(self) -> set[str]:
        changes = (op for op in self.modify_ops.ops if isinstance(op, alembic_ops.AlterColumnOp))
        return {op.column_name for op in changes if op.modify_type is not None}

    def triggers_in(self, op: MigrateOperation) -> list[str]:
        if not isinstance(op, ops.CreateTriggers | ops.DropTriggers):
            return []
        return [*op.triggers] if (op.schema, op.table) == (self.schema, self.name) else []

    def has_message_triggers(self, op: MigrateOperation) -> bool:
        """Return whether an operation creates or drops triggers of this table that write messages."""
        return any(not name.startswith(triggers_module.PREFIX) for name in self.triggers_in(op))


def compare_version(context: AutogenContext, table: ComparedTable) -> None:
    """Refuse a table of the library that a newer version has migrated; see to the comment that has its version.

    An ``env.py`` that leaves out Alembic's comparison of comments would else write migrations that no worker notices.

    :raises CommandError: with both versions.
    """
    stored, model = table.database_table, table.model_table
    if stored is None or not table.name.startswith(PREFIX):
        return
    refused = refuse_to_migrate(table.name, stored.comment)
    if refused is not None:
        raise CommandError(refused)
    supports = context.migration_context.dialect.supports_comments
    found = any(isinstance(op, alembic_ops.CreateTableCommentOp) for op in table.modify_ops.ops)
    if supports and model is not None and model.comment and stored.comment != model.comment and not found:
        comment = alembic_ops.CreateTableCommentOp(
            table.name, model.comment, existing_comment=stored.comment, schema=table.schema
        )
        table.modify_ops.ops.append(comment)


def is_queue_column(column: sa.Column[Any]) -> bool:
    return "sqlaqueue" in column.info


@dataclass(eq=False)
class DiffContext:
    """A run of autogenerate after Alembic has compared the tables.

    The migration consists of ``before``, the operations that Alembic found, ``after`` and ``last``. The downgrade has
    the reverse operations in the reverse order.
    """

    context: AutogenContext
    upgrade: alembic_ops.UpgradeOps
    tables: Sequence[ComparedTable]
    catalog: CatalogReader
    before: list[MigrateOperation] = field(default_factory=list)
    after: list[MigrateOperation] = field(default_factory=list)
    last: list[MigrateOperation] = field(default_factory=list)
    """What the downgrade does first."""
    kept_functions: set[ResolvedName] = field(default_factory=set)
    """Functions that are not dropped, although no table of the models has them."""

    @cached_property
    def live(self) -> set[str]:
        """The tables that ``-x live=...`` names."""
        environment = self.context.migration_context.environment_context
        given = [] if environment is None else [each.partition("=") for each in environment.get_x_argument()]
        return {name.strip() for key, _, value in given if key == "live" for name in value.split(",")}

    @property
    def remaining_tables(self) -> Iterator[tuple[ComparedTable, sa.Table, sa.Table]]:
        """The tables that are both in the database and in the models: each with both of its forms, in that order."""
        for table in self.tables:
            if table.database_table is not None and table.model_table is not None:
                yield table, table.database_table, table.model_table

    def is_live(self, table: ComparedTable) -> bool:
        return bool(table.names & self.live)

    def database_table(self, name: QualifiedName) -> sa.Table | None:
        return next((table.database_table for table in self.tables if table.qualified_name == name), None)

    def message_table_name(self, table: ComparedTable) -> QualifiedName:
        """Return the name that the message table of a table has, whether or not it exists."""
        return table.qualified_name[0], object_name("sqlaqueue_message", table.name)

    def was_queue(self, table: ComparedTable) -> bool:
        has_messages = self.database_table(self.message_table_name(table)) is not None
        return self.catalog.is_queue(table.qualified_name) or has_messages

    def pending_condition(self, table: ComparedTable) -> str:
        """Return the condition under which a job is pending in the database; "" if no object contains one."""
        index = object_name("ix", table.name, "queue", "claim")
        _, predicate = self.catalog.index(table.qualified_name, index) or (True, None)
        return predicate or self.pending_condition_of_triggers(table) or ""

    def pending_condition_of_triggers(self, table: ComparedTable) -> str | None:
        """Return the condition under which the triggers of a table write a message."""
        for trigger in self.catalog.triggers_of(table.qualified_name).values():
            function = self.catalog.function(table.qualified_name, f"{trigger.function}()")
            if trigger.name.startswith(PREFIX) and function is not None:
                match = re.search(r"FROM new_rows WHERE (.+)$", function.source, re.MULTILINE)
                if match:
                    return match[1]
        return None

    def modify(self, table: ComparedTable, *operations: MigrateOperation) -> None:
        """Add operations to the changes that Alembic has found in a table.

        They come after the columns that are added, and before those that are dropped: a dropped column takes its
        indexes and constraints with it.
        """
        if not any(op is table.modify_ops for op in self.upgrade.ops):
            self.upgrade.ops.append(table.modify_ops)
        changes = table.modify_ops.ops
        drops = [number for number, op in enumerate(changes) if isinstance(op, alembic_ops.DropColumnOp)]
        first = drops[0] if drops else len(changes)
        changes[first:first] = operations


class EnumType(NamedTuple):
    schema: str | None
    name: str
    values: tuple[str, ...]

    def drop(self) -> ops.DropEnum:
        return ops.DropEnum(self.name, schema=self.schema, values=[*self.values])


def compare_enums(diff: DiffContext) -> None:
    """Create types before the columns that are added to queues, and drop types with their last column.

    Alembic creates the types of new tables only.
    """
    created, dropped = set[EnumType](), set[EnumType]()

    def new_types(columns: Iterable[sa.Column[Any]]) -> Iterator[EnumType]:
        for enum in (enum_type(column.type) for column in columns):
            if enum is None or enum in created or diff.catalog.tables_with_enum((enum.schema, enum.name)) is not None:
                continue
            created.add(enum)
            yield enum

    for table in diff.tables:
        if table.database_table is None and table.spec is not None and table.model_table is not None:
            for enum in new_types(table.model_table.columns):
                diff.before.insert(0, ops.PerDirection(down=[enum.drop()]))
        if table.belongs_to_queue:
            added = (op.column for op in table.modify_ops.ops if isinstance(op, alembic_ops.AddColumnOp))
            diff.before += [ops.CreateEnum(enum.name, [*enum.values], schema=enum.schema) for enum in new_types(added)]
        for enum in _unused_types(diff, table):
            if enum not in dropped:
                dropped.add(enum)
                # The downgrade of a dropped table creates its types with it.
                diff.last.append(enum.drop() if table.model_table is not None else ops.PerDirection([enum.drop()]))


def enum_type(type_: Any) -> EnumType | None:
    """Return the enum type that a column of ``type_`` needs in the database, None if it needs none."""
    plain = getattr(type_, "impl_instance", type_)
    plain = getattr(plain, "item_type", plain)
    if isinstance(plain, sa.Enum) and plain.native_enum and plain.name:
        return EnumType(plain.schema, str(plain.name), tuple(plain.enums))
    return None


def _unused_types(diff: DiffContext, table: ComparedTable) -> Iterator[EnumType]:
    """Yield the types that no column has any more after this migration."""
    if table.database_table is None or not (diff.was_queue(table) or table.name.startswith(PREFIX)):
        return
    dropped = {op.column_name for op in table.modify_ops.ops if isinstance(op, alembic_ops.DropColumnOp)}
    removed = [each for each in table.database_table.columns if table.model_table is None or each.name in dropped]
    kept = {enum_type(each.type) for each in table.database_table.columns if each not in removed}
    for column in removed:
        enum = enum_type(column.type)
        if enum is None or enum in kept:
            continue
        users = diff.catalog.tables_with_enum((enum.schema, enum.name))
        schema = table.qualified_name[0]
        dropped_tables = {
            other.name for other in diff.tables if other.model_table is None and other.qualified_name[0] == schema
        }
        if users is not None and not set(users) - dropped_tables - {table.name}:
            yield enum


@contextlib.contextmanager
def normalizing(connection: sa.Connection, table: QualifiedName) -> Iterator[ExpressionNormalizer]:
    """Create a temporary copy of a table, with its columns only, for as long as the block runs.

    :raises CommandError: when the role may not create it.
    """
    try:
        normalizer = ExpressionNormalizer(connection, table)
    except DBAPIError as error:
        msg = (
            f"the indexes and constraints of table {table[1]} cannot be compared: this needs the privilege to create a "
            f"temporary table (GRANT TEMPORARY ON DATABASE), and a transaction that may write ({error.orig})"
        )
        raise CommandError(msg) from error
    try:
        yield normalizer
    finally:
        normalizer.close()


log = logging.getLogger(__name__)

_BOOLEANS = {"on": "true", "yes": "true", "1": "true", "off": "false", "no": "false", "0": "false"}


def compare_storage_parameters(diff: DiffContext) -> None:
    """Compare the storage parameters of queues.

    Tables of this library have the parameters of the models and no others. Those of other tables are compared if the
    model sets any: otherwise they may have been set by an administrator.
    """
    for table in diff.tables:
        existing = diff.catalog.storage_parameters_of(table.qualified_name)
        if table.model_table is None:
            if existing and (table.name.startswith(PREFIX) or diff.was_queue(table)):
                undo = ops.SetStorageParameters(table.name, dict(existing), schema=table.schema)
                diff.before.append(ops.PerDirection(down=[undo]))
            continue
        if not table.belongs_to_queue:
            continue
        wanted = _wanted(table, table.model_table)
        if wanted or table.name.startswith(PREFIX):
            _set_parameters(diff, table, existing, wanted)


def _wanted(table: ComparedTable, model_table: sa.Table) -> dict[str, str]:
    wanted = {
        name: value
        for each in table.objects
        if isinstance(each, ddl.StorageParameters)
        for name, value in each.parameters.items()
    }
    if table.database_table is not None:
        # For a new table, Alembic writes these into CREATE TABLE.
        given = model_table.dialect_options["postgresql"].get("with") or {}
        wanted |= {str(name): str(value) for name, value in given.items()}
    return {name.lower(): value for name, value in wanted.items()}


def _set_parameters(
    diff: DiffContext, table: ComparedTable, existing: Mapping[str, str], wanted: Mapping[str, str]
) -> None:
    names = [name for name in {**wanted, **existing} if not _equal(existing.get(name), wanted.get(name))]
    if names:
        if table.database_table is not None:
            log.info("Detected changed storage parameters of %r: %s", table.name, ", ".join(names))
        diff.after.append(
            ops.SetStorageParameters(
                table.name,
                {name: wanted.get(name) for name in names},
                schema=table.schema,
                existing={name: existing.get(name) for name in names},
            )
        )


def _equal(a: str | None, b: str | None) -> bool:
    if a is None or b is None:
        return a is b
    try:
        return float(a) == float(b)
    except ValueError:
        return _BOOLEANS.get(a.lower(), a.lower()) == _BOOLEANS.get(b.lower(), b.lower())


def compare_indexes_checks_and_defaults(diff: DiffContext) -> None:
    connection = diff.context.connection
    if connection is None:
        return
    for table in diff.tables:
        # Alembic creates an index whatever its ``ddl_if()`` says.
        its = {} if table.model_table is None else {index.name: index for index in table.model_table.indexes}
        elsewhere = {name for name, index in its.items() if not exists_on(index, connection.dialect)}
        table.modify_ops.ops = [
            op
            for op in table.modify_ops.ops
            if not isinstance(op, alembic_ops.CreateIndexOp) or op.index_name not in elsewhere
        ]
    for table, database_table, model_table in diff.remaining_tables:
        if not table.belongs_to_queue:
            continue
        with normalizing(connection, table.qualified_name) as normalizer:
            comparison = _Comparison(diff, table, database_table, model_table, normalizer)
            changes = [*comparison.indexes(), *comparison.check_constraints(), *comparison.defaults()]
        if changes:
            diff.modify(table, *changes)


@dataclass(frozen=True)
class _Comparison:
    diff: DiffContext
    table: ComparedTable
    database_table: sa.Table
    model_table: sa.Table
    normalizer: ExpressionNormalizer

    def indexes(self) -> Iterator[alembic_ops.MigrateOperation]:
        """Yield the operations that replace indexes which are invalid or differ in what Alembic does not compare."""
        reflected = {str(index.name): index for index in self.database_table.indexes}
        changed_by_alembic = {
            str(op.index_name)
            for op in self.table.modify_ops.ops
            if isinstance(op, alembic_ops.CreateIndexOp | alembic_ops.DropIndexOp)
        }
        for index in sorted(self.model_table.indexes, key=lambda index: str(index.name)):
            name = str(index.name)
            if name not in reflected or not self._is_included(index, reflected[name]):
                continue
            if name == self.table.unique_index:
                changed = self._unique_index_is_changed(index)
                if not changed:
                    self._remove_changes(name)
            else:
                changed = name not in changed_by_alembic and self._index_is_changed(index)
            if changed and name not in changed_by_alembic:
                yield alembic_ops.DropIndexOp.from_index(reflected[name])
                yield alembic_ops.CreateIndexOp.from_index(index)

    def _index_is_changed(self, index: sa.Index) -> bool:
        name = str(index.name)
        valid, predicate = self.diff.catalog.index(self.table.qualified_name, name) or (True, None)
        where = index.dialect_options["postgresql"]["where"]
        wanted = None if where is None else ddl.literal_sql(where)
        if not valid:
            log.info("Detected invalid index %r on %r: its creation was interrupted", name, self.table.name)
        elif not self.normalizer.same(self.normalizer.index_predicate, predicate, wanted):
            log.info("Detected changed predicate of index %r on %r", name, self.table.name)
        else:
            return False
        return True

    def _unique_index_is_changed(self, index: sa.Index) -> bool:
        """Return whether the index of unique jobs is invalid or differs in anything."""
        if self._index_is_changed(index):
            return True
        stored = self.diff.catalog.unique_index(self.table.qualified_name, str(index.name))
        if self.normalizer.same(self.normalizer.unique_index, stored, ddl.index_definition(index)):
            return False
        log.info("Detected changed definition of index %r on %r", str(index.name), self.table.name)
        return True

    def _remove_changes(self, index: str) -> None:
        """Remove the operations on an index that does not differ.

        Alembic compares expressions as text, which PostgreSQL prints in another way, depending on the session.
        """
        self.table.modify_ops.ops = [
            op
            for op in self.table.modify_ops.ops
            if not isinstance(op, alembic_ops.CreateIndexOp | alembic_ops.DropIndexOp) or str(op.index_name) != index
        ]

    def _is_included(self, index: sa.Index, reflected: sa.Index) -> bool:
        name, context = str(index.name), self.diff.context
        schema, table = self.table.qualified_name
        return context.run_name_filters(
            name, "index", {"table_name": table, "schema_name": schema}
        ) and context.run_object_filters(index, name, "index", reflected=False, compare_to=reflected)

    def check_constraints(self) -> Iterator[alembic_ops.MigrateOperation]:
        """Yield the operations that create, replace and drop check constraints of the queue or of the library."""
        # Alembic compares check constraints by name, if it is configured to.
        changed_by_alembic = {
            str(getattr(op, "constraint_name", ""))
            for op in self.table.modify_ops.ops
            if isinstance(op, alembic_ops.AddConstraintOp | alembic_ops.DropConstraintOp)
        }
        checks = self.diff.catalog.checks_of(self.table.qualified_name)
        existing = {name: check for name, check in checks.items() if name not in changed_by_alembic}
        wanted = [each for each in self.model_table.constraints if isinstance(each, sa.CheckConstraint)]
        for check in sorted(wanted, key=lambda check: str(check.name or "")):
            if str(check.name) not in changed_by_alembic:
                yield from self._check_constraint(check, existing)
        for name, (text, columns) in existing.items():
            if self._is_dropped(name, columns):
                log.info("Detected removed check constraint %r on %r", name, self.table.name)
                yield alembic_ops.DropConstraintOp.from_constraint(self._existing_check(name, text))

    def _is_dropped(self, name: str, columns: Collection[str]) -> bool:
        """Return whether a check constraint that the models lack is dropped: others belong to the application."""
        spec = self.table.spec
        if spec is None:
            return name.startswith(f"ck_{PREFIX}")
        return not {column.name for column in spec.columns.values()}.isdisjoint(columns)

    def _check_constraint(
        self, check: sa.CheckConstraint, existing: dict[str, ReflectedCheck]
    ) -> Iterator[alembic_ops.MigrateOperation]:
        text = ddl.literal_sql(check.sqltext)
        name = None if check.name is None else str(check.name)
        if name is None or getattr(check, "_type_bound", False):
            # PostgreSQL or SQLAlchemy chose the name; the constraint of a type is added with its column.
            equal = [each for each, (stored, _) in existing.items() if each == name or self._same_check(stored, text)]
            for each in equal[:1]:
                existing.pop(each)
            if not equal and name is None:
                log.warning(
                    "a check constraint of %r is missing in the database and has no name; give it one, so that a "
                    "migration can create it",
                    self.table.name,
                )
            return
        stored, _ = existing.pop(name, ("", []))
        if stored and self._same_check(stored, text):
            return
        log.info("Detected %s check constraint %r on %r", "changed" if stored else "added", name, self.table.name)
        if stored:
            yield alembic_ops.DropConstraintOp.from_constraint(self._existing_check(name, stored))
        yield alembic_ops.AddConstraintOp.from_constraint(check)

    def _same_check(self, stored: str, wanted: str) -> bool:
        return self.normalizer.same(self.normalizer.check_constraint, stored, wanted)

    def _existing_check(self, name: str, text: str) -> sa.CheckConstraint:
        copy = sa.Table(self.database_table.name, sa.MetaData(), schema=self.database_table.schema)
        check = sa.CheckConstraint(sa.literal_column(text), name=conv(name))
        copy.append_constraint(check)
        return check

    def defaults(self) -> Iterator[alembic_ops.MigrateOperation]:
        """Yield the operations that change defaults of the library's columns."""
        altered = {op.column_name: op for op in self.table.modify_ops.ops if isinstance(op, alembic_ops.AlterColumnOp)}
        existing = {column.name: column for column in self.database_table.columns}
        for column in self.model_table.columns:
            op = altered.get(column.name)
            # A compared table that is no queue is one of the library's, and so are all its columns.
            if not (self.table.spec is None or is_queue_column(column)) or column.name not in existing:
                continue
            # Alembic itself handles the default of a column whose type changes.
            if op is not None and (op.modify_server_default is not False or op.modify_type is not None):
                continue
            wanted, reflected = ddl.server_default_sql(column), existing[column.name]
            before = getattr(reflected.server_default, "arg", None)
            text = None if wanted is None else self.normalizer.column_default(column.name, wanted)
            if text == (None if before is None else str(before)):
                continue
            log.info("Detected changed default of column '%s.%s'", self.table.name, column.name)
            if op is None:
                op = alembic_ops.AlterColumnOp(self.table.name, column.name, schema=self.table.schema)
                op.existing_type, op.existing_nullable = reflected.type, reflected.nullable
                yield op
            op.existing_server_default = reflected.server_default
            op.modify_server_default = column.server_default
