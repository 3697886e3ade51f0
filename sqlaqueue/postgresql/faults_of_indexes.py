"""What is wrong with a queue's indexes: missing, invalid, altered or left over, each with its repair."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue.postgresql.catalog_indexes import (
    StoredIndex,
    comparable,
    index_validity,
    partitioned_tables,
    stored_indexes,
)
from sqlaqueue.postgresql.catalog_text import (
    SESSION,
    describe_session,
    last_statement,
    name_of,
    open_transaction,
    quoted,
    sql_text,
)
from sqlaqueue.postgresql.ddl import index_definition, literal_sql
from sqlaqueue.postgresql.faults import MIGRATION, Fault
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.sql.engine import exists_on
from sqlaqueue.sql.types import NEUTRAL, is_name_of, object_name
from sqlaqueue.texts import duration_text


def missing_indexes(session: Session | sa.Connection, spec: QueueSpec) -> list[sa.Index]:
    """Return the indexes of claims and rescues, and of unique jobs, that the database lacks, or that are invalid.

    For claims and rescues an index of the application counts if it begins with the same columns, and has all rows or
    the same ones.
    """
    tables = list(dict.fromkeys(index.table for index in spec.claim_indexes if index.table is not None))
    existing = [stored for stored in stored_indexes(session, tables) if stored.is_valid] if tables else []
    unique = unique_index(spec)
    return [
        *(
            index
            for index in spec.claim_indexes
            if not any(each.table is index.table and _serves(session, each, index) for each in existing)
        ),
        *([] if unique is None or validity_of(session, unique) else [unique]),
    ]


def _serves(session: Session | sa.Connection, stored: StoredIndex, index: sa.Index) -> bool:
    """Return whether an index of the database has what a claim or a rescue reads."""
    if stored.name == index.name:
        return True
    # What the library has added beside it is for something else, even where it begins with the same columns.
    is_own = is_name_of(stored.name, "ix", stored.table.name, "queue")
    columns = [each.name for each in index.expressions if isinstance(each, sa.Column)]
    first = [each.strip('"').replace('""', '"') for each in stored.elements[: len(columns)]]
    if is_own or len(columns) < len(index.expressions) or not stored.is_plain or first != columns:
        return False
    if stored.predicate is None:
        # These have few of the rows: among all they would be searched for.
        few = (object_name("ix", stored.table.name, "queue", purpose) for purpose in ("quarantined", "running"))
        return str(index.name) not in few
    where = index.dialect_options["postgresql"]["where"]
    if where is None:
        return False
    found, wanted = comparable(session, stored.table, [stored.predicate, literal_sql(where)])
    return found == wanted


def concurrently(statement: str) -> str:
    """Return a statement about an index that does not keep jobs from being enqueued and claimed while it runs."""
    return statement.replace(" INDEX ", " INDEX CONCURRENTLY ", 1)


def unique_index(spec: QueueSpec) -> sa.Index | None:
    name = object_name("ix", spec.table.name, "queue", "unique")
    unique = (index for index in spec.table.indexes if index.name == name)
    return None if spec.config.unique is None else next(unique, None)


def validity_of(session: Session | sa.Connection, index: sa.Index) -> bool | None:
    return None if index.table is None else index_validity(session, index.table, str(index.name))


def has_index(connection: sa.Connection, table: sa.Table, name: str) -> bool:
    return index_validity(connection, table, name) is True


_LEFTOVER = re.compile(r"_cc(new|old)\d*$")
"""The names that REINDEX CONCURRENTLY gives, and leaves behind when it is interrupted."""


def index_faults(connection: sa.Connection, spec: QueueSpec) -> list[Fault]:
    """Return the indexes that are missing, invalid or altered, and what an interrupted build has left over."""
    # The table of existing messages is no side table.
    of_claims = (index.table for index in spec.claim_indexes if index.table is not None)
    tables = list(dict.fromkeys([spec.table, *spec.side_tables.values(), *of_claims]))
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
        elif found.is_valid:
            present.append((index, found))
        elif found.is_being_built:
            faults.add_building(index, found)
        else:
            faults.add_invalid(index, found)
    faults.compare(present)
    faults.add_leftovers(stored)
    faults.add_others(stored, {str(index.name) for index in _own_indexes(spec, tables)})
    return faults.found


def _own_indexes(spec: QueueSpec, tables: Sequence[sa.Table]) -> list[sa.Index]:
    own = [each for each in spec.table.indexes if is_name_of(str(each.name), "ix", spec.table.name, "queue")]
    side = [each for table in tables if table in spec.side_tables.values() for each in table.indexes]
    there = (each for each in {*spec.claim_indexes, *own, *side} if exists_on(each, NEUTRAL))
    return sorted(there, key=lambda index: str(index.name))


@dataclass
class _Faults:
    """The faults found so far, and how each is worded."""

    connection: sa.Connection
    spec: QueueSpec
    partitioned: set[sa.Table]
    found: list[Fault] = field(default_factory=list)

    def add_missing(self, index: sa.Index) -> None:
        self._add(index, "missing", "is missing", self._consequence(index), (self._create(index), MIGRATION))

    def add_invalid(self, index: sa.Index, stored: StoredIndex) -> None:
        consequence = f"{_NOT_USED} {self._consequence(index)}"
        self._add(index, "invalid", _INVALID, consequence, (self._reindex(stored),))

    def add_building(self, index: sa.Index, stored: StoredIndex) -> None:
        row = self.connection.execute(_LOCKER, {"name": stored.qualified_name}).first()
        holder, waits, fixes = None if row is None else open_transaction(row), "", tuple[str, ...]()
        if holder is not None:
            waits = (
                f", and waits for a transaction, which has been open for {duration_text(holder.seconds)}: "
                f"{describe_session(holder)}{last_statement(holder)}"
            )
            fixes = (f"-- Rolls its transaction back.\nSELECT pg_terminate_backend({holder.pid});",)
        consequence = "Until it is complete it is not used; pg_stat_progress_create_index shows how far it is."
        facts = {"waits_for": None if holder is None else asdict(holder)}
        self._add(index, "building", f"is being built{waits}", consequence, fixes, facts)
        waited = None if holder is None else holder.seconds
        self.found[-1] = self.found[-1]._replace(code="index_building", severity="notice", waited=waited)

    def add_leftovers(self, stored: Sequence[StoredIndex]) -> None:
        for each in stored:
            if _LEFTOVER.search(each.name) and not each.is_valid and not each.is_being_built:
                what = "is what an interrupted REINDEX CONCURRENTLY has left behind"
                drop = f"DROP INDEX{self._concurrently(each.table)} {each.qualified_name};"
                self._add_of_application(each, "leftover", what, "It is not used, and makes each write slower.", drop)

    def add_others(self, stored: Sequence[StoredIndex], own: set[str]) -> None:
        for each in stored:
            if each.is_valid or each.is_being_built or each.name in own or _LEFTOVER.search(each.name):
                continue
            consequence = "Queries of the application may read the whole table."
            if each.is_unique:
                consequence = (
                    "Rows that are there may have equal values; if the fix reports some, delete or change them."
                )
            self._add_of_application(each, "invalid", _INVALID, f"{_NOT_USED} {consequence}", self._reindex(each))

    def compare(self, present: Sequence[tuple[sa.Index, StoredIndex]]) -> None:
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
        # The old one serves until the new one is complete.
        repair = "\n".join(
            (
                f"ALTER INDEX {stored.qualified_name} RENAME TO {quoted(old)};",
                self._create(index),
                f"DROP INDEX{self._concurrently(index.table)} {of_schema}{quoted(old)};",
            )
        )
        found = f"{'UNIQUE ' if stored.is_unique else ''}{stored.definition.partition(' USING ')[2]}"
        wanted = f"{'UNIQUE ' if index.unique else ''}{index_definition(index)}"
        what = f"is not as the model declares it: it is {found}, and not {wanted}"
        facts = {"found": found, "wanted": wanted}
        self._add(index, "altered", what, self._consequence(index), (repair, MIGRATION), facts)

    def _add(  # noqa: PLR0917 - its callers give all of them
        self,
        index: sa.Index,
        state: str,
        what: str,
        consequence: str,
        fixes: tuple[str, ...],
        facts: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        name, table = str(index.name), name_of(self.connection, index.table)  # type: ignore[arg-type] # every index of a model has a table
        self.found.append(
            Fault(
                "critical" if index.unique else "warning",
                f"{state}_index",
                name,
                f"The index {name} of {table} {what}.",
                consequence,
                fixes,
                {"index": name, "table": table, **facts},
                state=state,
                is_of_claims=index in self.spec.claim_indexes,
            )
        )

    def _add_of_application(self, stored: StoredIndex, state: str, what: str, consequence: str, fix: str) -> None:
        name, table = stored.name, name_of(self.connection, stored.table)
        summary, facts = f"The index {name} of {table} {what}.", {"index": name, "table": table}
        self.found.append(Fault("warning", f"{state}_index", name, summary, consequence, (fix,), facts, state=state))

    def _consequence(self, index: sa.Index) -> str:
        if index.unique:
            return (
                "Jobs are not unique, and enqueue() fails. If the fix reports a duplicate key, cancel or delete one of "
                "the jobs that have this key, and repeat it."
            )
        if index in self.spec.claim_indexes:
            return "Claims and rescues may read the whole table."
        return "Maintenance or flow control may read the whole table."

    def _create(self, index: sa.Index) -> str:
        create = sql_text(self.connection, sa.schema.CreateIndex(index))
        return create if index.table in self.partitioned else concurrently(create)

    def _reindex(self, stored: StoredIndex) -> str:
        return f"REINDEX INDEX{self._concurrently(stored.table)} {stored.qualified_name};"

    def _concurrently(self, table: sa.Table | None) -> str:
        return "" if table in self.partitioned else " CONCURRENTLY"


_INVALID = "is invalid: its creation was interrupted or has failed"
_NOT_USED = "PostgreSQL maintains it and does not use it."

# CREATE INDEX CONCURRENTLY waits for the transactions that may have written to the table, or have an older snapshot.
_LOCKER = sa.text(f"""
    SELECT {SESSION}
    FROM pg_stat_progress_create_index AS p JOIN pg_stat_activity AS a ON a.pid = p.current_locker_pid
    WHERE p.index_relid = CAST(CAST(:name AS text) AS regclass)
""")  # noqa: S608 - the columns are a constant


def _wanted(index: sa.Index) -> list[str]:
    where = index.dialect_options["postgresql"]["where"]
    return [*map(literal_sql, index.expressions), "true" if where is None else literal_sql(where)]


def _stored(index: StoredIndex) -> list[str]:
    return [*index.elements, index.predicate or "true"]
