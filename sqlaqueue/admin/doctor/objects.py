"""What is wrong with a queue's objects in the database, with the rights of the role, and who has locked tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict

import sqlalchemy as sa

from sqlaqueue.admin.doctor.examination import Check, Examination, Finding
from sqlaqueue.postgresql.catalog_text import describe_session, last_statement
from sqlaqueue.postgresql.faults import (
    Fault,
    altered_objects,
    function_faults,
    missing_defaults,
    refused_states,
    table_faults,
    tables_of,
    trigger_faults,
)
from sqlaqueue.postgresql.faults_of_indexes import index_faults
from sqlaqueue.postgresql.privileges import missing_grants, missing_schema_grants, row_security
from sqlaqueue.postgresql.server import blockers, index_sizes
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.texts import duration_text


def _check_of(name: str, faults: Callable[[sa.Connection, QueueSpec], Iterable[Fault]]) -> Check:
    def check(examination: Examination) -> Iterator[Finding]:
        for spec in examination.specs:
            for fault in faults(examination.connection, spec):
                yield _finding(spec, fault)

    check.__name__ = f"check_{name}"
    return check


def _finding(spec: QueueSpec, fault: Fault) -> Finding:
    return Finding(
        severity=fault.severity,
        code=fault.code,
        queue=spec.name,
        summary=fault.summary,
        consequence=fault.consequence,
        fixes=fault.fixes,
        facts=fault.facts,
    )


check_tables = _check_of("tables", table_faults)
check_defaults = _check_of("defaults", missing_defaults)
check_refused_states = _check_of("refused_states", refused_states)
check_triggers = _check_of("triggers", trigger_faults)
check_functions = _check_of("functions", function_faults)
check_altered_objects = _check_of("altered_objects", altered_objects)


def check_indexes(examination: Examination) -> Iterator[Finding]:
    """Find faults of indexes; one that is being built is a warning after ``transaction_open`` of waiting."""
    longest = examination.thresholds.transaction_open.total_seconds()
    for spec in examination.specs:
        for fault in index_faults(examination.connection, spec):
            waits = (fault.waited or 0) > longest
            yield _finding(spec, fault._replace(severity="warning") if waits else fault)


def check_blocked_tables(examination: Examination) -> Iterator[Finding]:
    """Find the sessions that others wait for, not those that wait.

    Threshold: ``blocked_for``.
    """
    limit = examination.thresholds.blocked_for.total_seconds()
    for spec in examination.specs:
        for each in blockers(examination.connection, tables_of(spec)):
            if each.seconds < limit:
                continue
            session = each.session
            waiting = "1 session waits" if each.waiting == 1 else f"{each.waiting} sessions wait"
            doing = "idle in a transaction" if (session.state or "").startswith("idle") else "executing a statement"
            yield Finding(
                severity="critical",
                code="blocked_table",
                queue=spec.name,
                summary=(
                    f"{describe_session(session)} has locked {', '.join(each.tables)}, and {waiting} for it, the first "
                    f"for {duration_text(each.seconds)}. It is {doing}{last_statement(session)}."
                ),
                consequence="Until it ends, jobs are not enqueued, claimed or settled.",
                fixes=(f"-- Rolls its transaction back.\nSELECT pg_terminate_backend({session.pid});",),
                facts={**asdict(session), "waiting": each.waiting, "tables": [*each.tables]},
            )


_FILL = 0.7
"""Which part of a page of an index is used on average."""
_PAGE = 8192


def check_claim_indexes(examination: Examination) -> Iterator[Finding]:
    """Find indexes that are much larger than the entries that they had at the last VACUUM or ANALYZE.

    The size that they need is estimated: the number of entries, times their average width by the statistics of the
    columns, with pages that are 70 % full. Thresholds: ``index_bloat_factor``, ``index_bloat_size``.
    """
    limits = examination.thresholds
    for spec in examination.specs:
        for table in (spec.table, *spec.side_tables.values()):
            of_table = (index for index in spec.claim_indexes if index.table is table)
            # The width of the hash of a key is in no statistics of a column.
            indexes = [each for each in of_table if all(isinstance(part, sa.Column) for part in each.expressions)]
            for size in index_sizes(examination.connection, table, indexes):
                needed = max(size.rows, 0) * size.entry_width / _FILL + 2 * _PAGE
                # Before the first VACUUM or ANALYZE the number of entries is not known.
                if size.rows < 0 or size.size <= max(limits.index_bloat_size, limits.index_bloat_factor * needed):
                    continue
                yield Finding(
                    severity="notice",
                    code="index_bloat",
                    queue=spec.name,
                    summary=(
                        f"The index {size.name} has {size.size / 1024**2:.1f} MB for {size.rows:.0f} entries, which "
                        f"need about {needed / 1024**2:.1f} MB. That is an estimate: the entries at the last VACUUM or "
                        f"ANALYZE times {size.entry_width} bytes, in pages that are 70 % full."
                    ),
                    consequence="The index takes more memory than it should; claims and VACUUM may be slower.",
                    fixes=(f"REINDEX INDEX CONCURRENTLY {size.name};",),
                    facts={"index": size.name, "size": size.size, "needed": needed, "entries": size.rows},
                )


_OF_WORKERS = "If workers use another role, examine the queue with theirs."


def check_schemas(examination: Examination) -> Iterator[Finding]:
    for spec in examination.specs:
        for grant in missing_schema_grants(examination.connection, spec):
            yield Finding(
                severity="critical",
                code="missing_schema_grant",
                queue=spec.name,
                summary=f"The role of this session may not use the schema of {spec.table.fullname}.",
                consequence=f"A Consumer with this role does not start. {_OF_WORKERS}",
                fixes=(f"{grant};",),
            )


def check_privileges(examination: Examination) -> Iterator[Finding]:
    for spec in examination.specs:
        for grant in missing_grants(examination.connection, spec):
            yield Finding(
                severity="critical",
                code="missing_grant",
                queue=spec.name,
                summary=f"The role of this session lacks privileges: {grant.removeprefix('GRANT ')}.",
                consequence=f"A Consumer with this role does not start. {_OF_WORKERS}",
                fixes=(f"{grant};",),
            )
        policies, hidden = row_security(examination.connection, spec)
        if hidden is not None:
            yield Finding(
                severity="warning",
                code="hidden_rows",
                queue=spec.name,
                summary=f"{hidden[0].upper()}{hidden[1:].partition(';')[0]}.",
                consequence=f"A Consumer with this role is idle. {_OF_WORKERS}",
                fixes=("Correct the condition of its policy, or what that reads, such as a setting of the session.",),
            )
        for policy in policies:
            yield Finding(
                severity="critical",
                code="missing_policy",
                queue=spec.name,
                summary=(
                    f"Row-level security hides rows of {spec.name} from the role of this session; it lacks the "
                    f"{policy.removeprefix('CREATE ')}."
                ),
                consequence=f"A Consumer with this role does not start. {_OF_WORKERS}",
                fixes=(f"{policy};",),
            )
