"""The indexes of a queue that are missing, invalid or altered, and what a broken-off build has left over."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import sqlalchemy as sa

from sqlaqueue.postgresql.catalog.index_definitions import (
    StoredIndex,
    comparable,
    partitioned_tables,
    stored_indexes,
)
from sqlaqueue.postgresql.checks.indexes import concurrently, missing_indexes
from sqlaqueue.postgresql.ddl.sql_template import index_definition, literal_sql
from sqlaqueue.postgresql.diagnosis.relations import quoted
from sqlaqueue.postgresql.diagnosis.sessions import SESSION, open_transaction
from sqlaqueue.postgresql.diagnosis.sql import name_of, sql_text
from sqlaqueue.postgresql.identifiers import is_name_of, object_name
from sqlaqueue.queue.diagnosis_protocol import IndexFault
from sqlaqueue.queue.server_facts import OpenTransaction
from sqlaqueue.queue.spec import QueueSpec

_LEFTOVER = re.compile(r"_cc(new|old)\d*$")
"""The names that REINDEX CONCURRENTLY gives, and leaves behind when it is interrupted."""


def index_faults(connection: sa.Connection, spec: QueueSpec) -> list[IndexFault]:
    """Return what is wrong with the indexes of a queue."""
    tables = list(dict.fromkeys([spec.table, *spec.side_tables.values(), *_tables_of_claims(spec)]))
    stored = stored_indexes(connection, tables)
    by_name = {(each.table, each.name): each for each in stored}
    needed = missing_indexes(connection, spec)
    faults = _Faults(connection, spec, partitioned_tables(connection, tables))
    present: list[tuple[sa.Index, StoredIndex]] = []
    for index in _own_indexes(spec, tables):
        found = by_name.get((index.table, str(index.name)))  # type: ignore[arg-type] # every index of a model has a table
        if found is None:
            # An index of another name may serve claims as well.
            if index in needed or index not in spec.claim_indexes:
                faults.add_missing(index)
        elif not found.is_valid:
            faults.add_invalid(index, found)
        else:
            present.append((index, found))
    faults.compare(present)
    faults.add_leftovers(stored)
    faults.add_others(stored, {str(index.name) for index in _own_indexes(spec, tables)})
    return faults.found


def _tables_of_claims(spec: QueueSpec) -> Iterator[sa.Table]:
    """Yield the tables of the claim's indexes: that of existing messages is no side table."""
    yield from (index.table for index in spec.claim_indexes if index.table is not None)


def _own_indexes(spec: QueueSpec, tables: Sequence[sa.Table]) -> list[sa.Index]:
    """Return the indexes that this library has added; others are the application's own business."""
    own = [each for each in spec.table.indexes if is_name_of(str(each.name), "ix", spec.table.name, "queue")]
    side = [each for table in tables if table in spec.side_tables.values() for each in table.indexes]
    return sorted({*spec.claim_indexes, *own, *side}, key=lambda index: str(index.name))


@dataclass
class _Faults:
    """The faults found so far."""

    connection: sa.Connection
    spec: QueueSpec
    partitioned: set[sa.Table]

    def __post_init__(self) -> None:
        self.found: list[IndexFault] = []

    def add_missing(self, index: sa.Index) -> None:
        self._add(index, "missing", self._create(index))

    def add_invalid(self, index: sa.Index, stored: StoredIndex) -> None:
        if stored.is_being_built:
            self._add(index, "building", "", waits_for=_locker(self.connection, stored))
        else:
            self._add(index, "invalid", f"REINDEX INDEX{self._concurrently(index.table)} {stored.qualified_name};")

    def add_leftovers(self, stored: Sequence[StoredIndex]) -> None:
        for each in stored:
            if _LEFTOVER.search(each.name) and not each.is_valid and not each.is_being_built:
                drop = f"DROP INDEX{self._concurrently(each.table)} {each.qualified_name};"
                table = name_of(self.connection, each.table)
                self.found.append(IndexFault(state="leftover", name=each.name, table=table, repair=drop))

    def add_others(self, stored: Sequence[StoredIndex], own: set[str]) -> None:
        """Add the invalid indexes of the application."""
        for each in stored:
            if each.is_valid or each.is_being_built or each.name in own or _LEFTOVER.search(each.name):
                continue
            self.found.append(
                IndexFault(
                    state="invalid",
                    name=each.name,
                    table=name_of(self.connection, each.table),
                    repair=f"REINDEX INDEX{self._concurrently(each.table)} {each.qualified_name};",
                    is_unique=each.is_unique,
                    is_of_queue=False,
                )
            )

    def compare(self, present: Sequence[tuple[sa.Index, StoredIndex]]) -> None:
        """Add the indexes that are defined in another way than the model's."""
        for table in dict.fromkeys(stored.table for _, stored in present):
            mine = [(index, stored) for index, stored in present if stored.table is table]
            texts: list[str] = []
            for index, stored in mine:
                texts += [*_wanted(index), *_stored(stored)]
            # One statement for all indexes of a table.
            printed = iter(comparable(self.connection, table, texts))
            for index, stored in mine:
                wanted = [next(printed) for _ in _wanted(index)]
                found = [next(printed) for _ in _stored(stored)]
                is_same = wanted == found and stored.is_plain and stored.is_unique == bool(index.unique)
                has_order = any(isinstance(each, sa.UnaryExpression) for each in index.expressions)
                if not is_same and not has_order:
                    self._add_altered(index, stored)

    def _add_altered(self, index: sa.Index, stored: StoredIndex) -> None:
        old = object_name(stored.name, "old")
        of_schema = stored.qualified_name.removesuffix(quoted(stored.name))
        concurrently = self._concurrently(index.table)
        # The old one serves until the new one is complete.
        repair = "\n".join(
            (
                f"ALTER INDEX {stored.qualified_name} RENAME TO {quoted(old)};",
                self._create(index),
                f"DROP INDEX{concurrently} {of_schema}{quoted(old)};",
            )
        )
        found = stored.definition.partition(" USING ")[2]
        unique = "UNIQUE " if stored.is_unique else ""
        self._add(
            index,
            "altered",
            repair,
            f"{unique}{found}",
            f"{'UNIQUE ' if index.unique else ''}{index_definition(index)}",
        )

    def _create(self, index: sa.Index) -> str:
        create = sql_text(self.connection, sa.schema.CreateIndex(index))
        return create if index.table in self.partitioned else concurrently(create)

    def _concurrently(self, table: sa.Table | None) -> str:
        return "" if table in self.partitioned else " CONCURRENTLY"

    def _add(
        self,
        index: sa.Index,
        state: str,
        repair: str,
        found: str = "",
        wanted: str = "",
        *,
        waits_for: OpenTransaction | None = None,
    ) -> None:
        self.found.append(
            IndexFault(
                state=state,  # type: ignore[arg-type] # its callers name them
                name=str(index.name),
                table=name_of(self.connection, index.table),  # type: ignore[arg-type] # as above
                repair=repair,
                is_of_claims=index in self.spec.claim_indexes,
                is_unique=bool(index.unique),
                found=found,
                wanted=wanted,
                waits_for=waits_for,
            )
        )


# CREATE INDEX CONCURRENTLY waits for the transactions that may have written to the table, or have an older snapshot.
_LOCKER = sa.text(f"""
    SELECT {SESSION}
    FROM pg_stat_progress_create_index AS p JOIN pg_stat_activity AS a ON a.pid = p.current_locker_pid
    WHERE p.index_relid = CAST(CAST(:name AS text) AS regclass)
""")  # noqa: S608 - the columns are a constant


def _locker(connection: sa.Connection, index: StoredIndex) -> OpenTransaction | None:
    """Return the session for which the building of an index waits."""
    row = connection.execute(_LOCKER, {"name": index.qualified_name}).first()
    return None if row is None else open_transaction(row)


def _wanted(index: sa.Index) -> list[str]:
    """Return the elements and the predicate of an index as the model has them."""
    where = index.dialect_options["postgresql"]["where"]
    return [*map(literal_sql, index.expressions), "true" if where is None else literal_sql(where)]


def _stored(index: StoredIndex) -> list[str]:
    return [*index.elements, index.predicate or "true"]
