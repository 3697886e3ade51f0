"""What is wrong with a queue's indexes: missing, invalid, altered or left over, each with its repair."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue.postgresql.catalog_indexes import (
    StoredIndex,
    comparable,
    index_validity,
    partitioned_tables,
    stored_indexes,
)
from sqlaqueue.postgresql.catalog_text import SESSION, name_of, open_transaction, quoted, sql_text
from sqlaqueue.postgresql.ddl import index_definition, literal_sql
from sqlaqueue.postgresql.facts import IndexFault, OpenTransaction
from sqlaqueue.postgresql.faults import UPDATE_COMMAND
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.sql.types import NEUTRAL, is_name_of, object_name
from sqlaqueue.texts import states_text

# -- indexes -----------------------------------------------------------------------------------------------------------
# Indexes of a queue in the database: those without which its statements read whole tables, or jobs are not unique.


def missing_indexes(session: Session | sa.Connection, spec: QueueSpec) -> list[sa.Index]:
    """Return the indexes of claims and rescues, and of unique jobs, that the database lacks, or that are invalid.

    For claims and rescues an index of the application counts if it begins with the same columns, and has all rows or
    the same ones.
    """
    tables = list(dict.fromkeys(index.table for index in spec.claim_indexes if index.table is not None))
    existing = [stored for stored in stored_indexes(session, tables) if stored.is_valid] if tables else []
    unique = _unique_index(spec)
    return [
        *(
            index
            for index in spec.claim_indexes
            if not any(each.table is index.table and _serves(session, each, index) for each in existing)
        ),
        *([] if unique is None or _validity(session, unique) else [unique]),
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


def missing_index_advice(session: Session | sa.Connection, spec: QueueSpec) -> str | None:
    """Return how to create the indexes that are missing, and to rebuild those that are invalid; None without any."""
    faulty = missing_indexes(session, spec)
    if not faulty:
        return None
    unique = _unique_index(spec)
    is_invalid = {index: _validity(session, index) is False for index in faulty}
    names = {index: f"{index.name} of {index.table.fullname}" for index in faulty if index.table is not None}
    missing, invalid = ([names[each] for each in names if is_invalid[each] is given] for given in (False, True))
    consequences = [
        *(["claims may read the whole table"] if any(index is not unique for index in faulty) else []),
        *(["jobs are not unique, and enqueue() fails"] if any(index is unique for index in faulty) else []),
    ]
    tables = [index.table for index in faulty if index.table is not None]
    partitioned = partitioned_tables(session, tables)
    statements = "; ".join(_repair(each, is_invalid=is_invalid[each], partitioned=partitioned) for each in faulty)
    migrate = f"Run {UPDATE_COMMAND}, where env.py has the plug-in sqlaqueue.alembic, or let" if missing else "Let"
    return (
        f"{spec.model.__name__}: {states_text('index', 'indexes', {'missing': missing, 'invalid': invalid})}, "
        f"so {', '.join(consequences)}. {migrate} the owner execute, not in a transaction: {statements}"
    )


def _repair(index: sa.Index, *, is_invalid: bool, partitioned: Collection[sa.Table]) -> str:
    element = sa.schema.DropIndex(index) if is_invalid else sa.schema.CreateIndex(index)
    statement = str(element.compile(dialect=NEUTRAL)).strip().replace("DROP INDEX", "REINDEX INDEX", 1)
    return statement if index.table in partitioned else concurrently(statement)


def concurrently(statement: str) -> str:
    """Return a statement about an index that does not keep jobs from being enqueued and claimed while it runs."""
    return statement.replace(" INDEX ", " INDEX CONCURRENTLY ", 1)


def _unique_index(spec: QueueSpec) -> sa.Index | None:
    """Return the index of ``QueueConfig(unique=...)``."""
    name = object_name("ix", spec.table.name, "queue", "unique")
    unique = (index for index in spec.table.indexes if index.name == name)
    return None if spec.config.unique is None else next(unique, None)


def _validity(session: Session | sa.Connection, index: sa.Index) -> bool | None:
    """Return whether an index is valid, None if the database lacks it."""
    return None if index.table is None else index_validity(session, index.table, str(index.name))


def has_index(connection: sa.Connection, table: sa.Table, name: str) -> bool:
    """Return whether a table has a valid index of this name."""
    return index_validity(connection, table, name) is True


# -- indexes -----------------------------------------------------------------------------------------------------------
# The indexes of a queue that are missing, invalid or altered, and what a broken-off build has left over.


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
