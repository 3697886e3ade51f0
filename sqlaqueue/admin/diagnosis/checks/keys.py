"""Whether the integer keys of jobs and messages run out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

import sqlalchemy as sa

from sqlaqueue.admin.diagnosis.checks.queue_tables import queue_tables
from sqlaqueue.admin.diagnosis.examination import Examination
from sqlaqueue.admin.diagnosis.finding import Finding
from sqlaqueue.postgresql.catalog import foreign_keys_to
from sqlaqueue.postgresql.catalog_text import quoted, table_name
from sqlaqueue.postgresql.facts import KeySequence
from sqlaqueue.postgresql.server import key_sequences
from sqlaqueue.strategies.delete_returning import MessageStrategy


def check_keys(examination: Examination) -> Iterator[Finding]:
    """Find keys whose sequence, or whose column, has few numbers left.

    Thresholds: ``keys_used``, ``keys_used_critical``.
    """
    limits = examination.thresholds
    for queue, table in queue_tables(examination):
        for sequence in key_sequences(examination.connection, table):
            used = (sequence.last or 0) / sequence.limit
            if used < limits.keys_used:
                continue
            left = sequence.limit - (sequence.last or 0)
            yield Finding(
                severity="critical" if used >= limits.keys_used_critical else "warning",
                code="keys_run_out",
                queue=queue,
                summary=(
                    f"The sequence {sequence.sequence} of {sequence.table}.{sequence.column}, a column of type "
                    f"{sequence.column_type}, has reached {sequence.last} of {sequence.limit}: {used:.0%} are used, "
                    f"{left} numbers are left."
                ),
                consequence="When they are used up, each INSERT fails, so that no job can be added." + _first(sequence),
                fixes=_fixes(examination, table, sequence),
                facts={**asdict(sequence), "limit": sequence.limit, "used": used},
            )


def _first(sequence: KeySequence) -> str:
    # Otherwise the next migration would change the columns back.
    return "" if sequence.column_type == "bigint" else " Change the columns of the model to BigInteger before the fix."


def _fixes(examination: Examination, table: sa.Table, sequence: KeySequence) -> tuple[str, ...]:
    statements: list[str] = []
    if sequence.column_type != "bigint":
        statements += [
            "-- Locks and rewrites the tables.",
            f"ALTER TABLE {sequence.table} ALTER COLUMN {sequence.column} TYPE bigint;",
            *_referring(examination, table, sequence),
        ]
    # The sequence of an identity column follows the type of the column; its own lower MAXVALUE stays.
    follows = sequence.identity and sequence.sequence_limit == sequence.column_limit
    if sequence.column_type == "bigint" or not follows:
        largest = 2**63 - 1
        if sequence.sequence_limit < largest:
            statements.append(f"ALTER SEQUENCE {sequence.sequence} AS bigint MAXVALUE {largest};")
    return ("\n".join(statements),) if statements else ()


def _referring(examination: Examination, table: sa.Table, sequence: KeySequence) -> Iterator[str]:
    """Return the changes of columns that store the key: those of messages, and of foreign keys."""
    columns: dict[str, None] = {}
    for spec in examination.specs:
        if spec.table is table and isinstance(spec.strategy, MessageStrategy):
            messages = spec.strategy.messages(spec)
            name = table_name(examination.connection, messages.table)
            for column, key in zip(messages.jobs, spec.keys, strict=True):
                if quoted(key.name) == sequence.column:
                    columns[f"{name} ALTER COLUMN {quoted(column.name)}"] = None
    for foreign in foreign_keys_to(examination.connection, table):
        for name, referred in zip(foreign.columns, foreign.referred, strict=True):
            if quoted(referred) == sequence.column:
                columns[f"{quoted(foreign.schema)}.{quoted(foreign.table)} ALTER COLUMN {quoted(name)}"] = None
    for column_name in columns:
        yield f"ALTER TABLE {column_name} TYPE bigint;"
