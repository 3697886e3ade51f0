"""Compares predicates of indexes, check constraints, and defaults of the library's columns."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import sqlalchemy as sa
from alembic.operations import ops as alembic_ops
from sqlalchemy.sql.elements import conv

from sqlaqueue.alembic.compare.diff_context import ComparedTable, DiffContext, is_queue_column
from sqlaqueue.alembic.compare.normalize import normalizing
from sqlaqueue.postgresql.catalog_schemas import PREFIX, ExpressionNormalizer, ReflectedCheck
from sqlaqueue.postgresql.ddl import index_definition, literal_sql, server_default_sql

log = logging.getLogger(__name__)


def compare_indexes_checks_and_defaults(diff: DiffContext) -> None:
    """Compare the parts of queue tables that Alembic does not compare."""
    for table, database_table, model_table in diff.remaining_tables:
        if not table.belongs_to_queue or diff.context.connection is None:
            continue
        with normalizing(diff.context.connection, table.qualified_name) as normalizer:
            comparison = _Comparison(diff, table, database_table, model_table, normalizer)
            changes = [*comparison.indexes(), *comparison.check_constraints(), *comparison.defaults()]
        if changes:
            diff.modify(table, *changes)


@dataclass(frozen=True)
class _Comparison:
    """The comparison of one table."""

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
        """Return whether an index is invalid or has another predicate."""
        name = str(index.name)
        valid, predicate = self.diff.catalog.index(self.table.qualified_name, name) or (True, None)
        where = index.dialect_options["postgresql"]["where"]
        wanted = None if where is None else literal_sql(where)
        if not valid:
            log.info("Detected invalid index %r on %r: its creation was interrupted", name, self.table.name)
            return True
        if not self.normalizer.same(self.normalizer.index_predicate, predicate, wanted):
            log.info("Detected changed predicate of index %r on %r", name, self.table.name)
            return True
        return False

    def _unique_index_is_changed(self, index: sa.Index) -> bool:
        """Return whether the index of unique jobs is invalid or differs in anything."""
        if self._index_is_changed(index):
            return True
        stored = self.diff.catalog.unique_index(self.table.qualified_name, str(index.name))
        if self.normalizer.same(self.normalizer.unique_index, stored, index_definition(index)):
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
        """Return whether the filters of ``env.py`` include an index."""
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
        """Yield the operations that create or replace ``check``, and remove it from ``existing``."""
        text = literal_sql(check.sqltext)
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
            wanted, reflected = server_default_sql(column), existing[column.name]
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
