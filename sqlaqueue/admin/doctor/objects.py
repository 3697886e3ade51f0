"""Tables, columns, indexes, triggers and functions that are missing, or not as the model declares them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict

import sqlalchemy as sa

from sqlaqueue.admin.doctor.examination import Examination, Finding, Severity
from sqlaqueue.admin.doctor.vacuum import describe_session, last_statement
from sqlaqueue.postgresql.facts import IndexFault, MissingObject
from sqlaqueue.postgresql.faults import (
    UPDATE_COMMAND,
    altered_objects,
    function_faults,
    missing_columns,
    missing_defaults,
    missing_tables,
    read_split_schemas,
    refused_states,
    trigger_faults,
)
from sqlaqueue.postgresql.faults_of_indexes import index_faults
from sqlaqueue.postgresql.privileges import missing_grants, missing_schema_grants, row_security
from sqlaqueue.postgresql.server import blockers, index_sizes, server_state
from sqlaqueue.queue.names import SCHEDULE, TICK
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.texts import duration_text


def check_tables(examination: Examination) -> Iterator[Finding]:
    """Find missing tables and columns, and tables that the search path finds in several schemas."""
    connection = examination.connection
    for spec in examination.specs:
        needed = tables_of(spec)
        missing = missing_tables(connection, needed)
        if missing and len(missing) == len(needed):
            yield _no_table(examination, spec, missing)
            continue
        for table in missing:
            yield Finding(
                severity="critical",
                code="missing_table",
                queue=spec.name,
                summary=f"The table {table.name} is missing{f': {table.hint}' if table.hint else ''}.",
                consequence=f"{spec.model.__name__} cannot be used: jobs are not enqueued, or no Consumer starts.",
                fixes=(_migration(), table.create),
                facts={"table": table.name},
            )
        if missing:
            continue
        for column in missing_columns(connection, needed):
            yield Finding(
                severity="critical",
                code="missing_column",
                queue=spec.name,
                summary=f"The column {column.name} is missing.",
                consequence=f"Statements of {spec.model.__name__} fail, and no Consumer starts.",
                fixes=(_migration(), column.create),
                facts={"column": column.name},
            )
        split = read_split_schemas(connection, spec)
        if split is not None:
            others = ", ".join(split.others)
            yield Finding(
                severity="critical",
                code="split_schemas",
                queue=spec.name,
                summary=f"By the search_path the jobs are in the schema {split.home}, but {others}.",
                consequence="Statements use the side tables of another schema, and no Consumer starts.",
                fixes=(split.repair,),
                facts={"schema": split.home, "others": [*split.others]},
            )


def _no_table(examination: Examination, spec: QueueSpec, missing: Sequence[MissingObject]) -> Finding:
    database = server_state(examination.connection).database
    hint = f": {missing[0].hint}" if missing[0].hint else ""
    return Finding(
        severity="critical",
        code="missing_table",
        queue=spec.name,
        summary=f"The database {database} has none of the tables of this queue{hint}. Is it the right database?",
        consequence=f"{spec.model.__name__} cannot be used: jobs are not enqueued, and no Consumer starts.",
        fixes=(_migration(), "\n".join(each.create for each in missing)),
        facts={"database": database, "tables": [each.name for each in missing]},
    )


def check_defaults(examination: Examination) -> Iterator[Finding]:
    """Find columns without the DEFAULT that the model declares."""
    for spec in examination.specs:
        for column in missing_defaults(examination.connection, spec):
            yield Finding(
                severity="critical" if column.is_of_queue else "warning",
                code="missing_default",
                queue=spec.name,
                summary=f"The column {column.name} has no DEFAULT, and the model declares one.",
                consequence="An INSERT that leaves it out fails or stores NULL, and such a job may never be claimed.",
                fixes=(column.repair,),
                facts={"column": column.name},
            )


def check_refused_states(examination: Examination) -> Iterator[Finding]:
    """Find states of jobs that a CHECK constraint or the type of the status column refuses."""
    for spec in examination.specs:
        for each in refused_states(examination.connection, spec):
            yield Finding(
                severity="warning" if each.state == "cancelled" else "critical",
                code="refused_status",
                queue=spec.name,
                summary=f"In {spec.table.fullname} {each.by} refuses the status of {each.state} jobs.",
                consequence=_REFUSED[each.state],
                fixes=(each.repair, _migration()) if each.repair else (_migration(),),
                facts={"state": each.state, "by": each.by},
            )


_REFUSED = {
    "pending": "No job can be enqueued or retried.",
    "processing": "Each claim of a job fails, so that no job runs; Consumers are alive, and log the error.",
    "completed": "Jobs that have succeeded cannot be settled, and run again.",
    "failed": "Jobs that have failed cannot be settled, and run again.",
    "cancelled": "No job can be cancelled.",
}


def check_indexes(examination: Examination) -> Iterator[Finding]:
    """Find indexes that are missing, invalid or altered, and what an interrupted build has left behind."""
    for spec in examination.specs:
        for fault in index_faults(examination.connection, spec):
            yield _of_index(examination, spec, fault)


def _of_index(examination: Examination, spec: QueueSpec, fault: IndexFault) -> Finding:
    index = f"index {fault.name} of {fault.table}"
    severity: Severity = "critical" if fault.is_unique and fault.is_of_queue else "warning"
    consequence = "Claims and rescues may read the whole table."
    if not fault.is_of_queue:
        consequence = "Queries of the application may read the whole table."
        if fault.is_unique:
            consequence = "Rows that are there may have equal values; if the fix reports some, delete or change them."
    elif fault.is_unique:
        consequence = (
            "Jobs are not unique, and enqueue() fails. If the fix reports a duplicate key, cancel or delete one of the "
            "jobs that have this key, and repeat it."
        )
    elif not fault.is_of_claims:
        consequence = "Maintenance or flow control may read the whole table."
    facts = {"index": fault.name, "table": fault.table}
    if fault.state == "missing":
        return Finding(
            severity=severity,
            code="missing_index",
            queue=spec.name,
            summary=f"The {index} is missing.",
            consequence=consequence,
            fixes=(fault.repair, _migration()),
            facts=facts,
        )
    if fault.state == "invalid":
        return Finding(
            severity=severity,
            code="invalid_index",
            queue=spec.name,
            summary=f"The {index} is invalid: its creation was interrupted or has failed.",
            consequence=f"PostgreSQL maintains it and does not use it. {consequence}",
            fixes=(fault.repair,),
            facts=facts,
        )
    if fault.state == "building":
        return _of_building(examination, spec, index, fault)
    if fault.state == "leftover":
        return Finding(
            severity="warning",
            code="leftover_index",
            queue=spec.name,
            summary=f"The {index} is what an interrupted REINDEX CONCURRENTLY has left behind.",
            consequence="It is not used, and makes each write slower.",
            fixes=(fault.repair,),
            facts=facts,
        )
    return Finding(
        severity=severity,
        code="altered_index",
        queue=spec.name,
        summary=f"The {index} is not as the model declares it: it is {fault.found}, and not {fault.wanted}.",
        consequence=consequence,
        fixes=(fault.repair, _migration()),
        facts={**facts, "found": fault.found, "wanted": fault.wanted},
    )


def _of_building(examination: Examination, spec: QueueSpec, index: str, fault: IndexFault) -> Finding:
    holder, waits, fixes = fault.waits_for, "", tuple[str, ...]()
    severity: Severity = "notice"
    if holder is not None:
        waits = (
            f", and waits for a transaction, which has been open for {duration_text(holder.seconds)}: "
            f"{describe_session(holder)}{last_statement(holder)}"
        )
        fixes = (f"-- Rolls its transaction back.\nSELECT pg_terminate_backend({holder.pid});",)
        if (holder.seconds or 0) > examination.thresholds.transaction_open.total_seconds():
            severity = "warning"
    return Finding(
        severity=severity,
        code="index_building",
        queue=spec.name,
        summary=f"The {index} is being built{waits}.",
        consequence="Until it is complete it is not used; pg_stat_progress_create_index shows how far it is.",
        fixes=fixes,
        facts={"index": fault.name, "table": fault.table, "waits_for": None if holder is None else asdict(holder)},
    )


def check_triggers(examination: Examination) -> Iterator[Finding]:
    """Find triggers that are missing or disabled."""
    for spec in examination.specs:
        for fault in trigger_faults(examination.connection, tables_of(spec)):
            is_missing = fault.state == "missing"
            yield Finding(
                severity="warning" if fault.wakes else "critical",
                code="missing_trigger" if is_missing else "disabled_trigger",
                queue=spec.name,
                summary=f"The trigger {fault.name} of {fault.table} is {fault.state}.",
                consequence=_without_trigger(wakes=fault.wakes),
                fixes=(_migration(), fault.repair) if is_missing else (fault.repair,),
                facts={"trigger": fault.name, "table": fault.table},
            )


def check_functions(examination: Examination) -> Iterator[Finding]:
    """Find functions that are missing, or of another version."""
    for spec in examination.specs:
        for fault in function_faults(examination.connection, tables_of(spec)):
            facts = {"function": fault.name, "found": fault.found, "wanted": fault.wanted}
            if fault.state == "missing":
                yield Finding(
                    severity="warning" if fault.wakes else "critical",
                    code="missing_function",
                    queue=spec.name,
                    summary=f"The {fault.kind} {fault.name} is missing.",
                    consequence=_without_trigger(wakes=fault.wakes),
                    fixes=(_migration(), fault.repair),
                    facts=facts,
                )
            elif fault.state == "outdated":
                yield Finding(
                    severity="warning",
                    code="outdated_function",
                    queue=spec.name,
                    summary=f"The {fault.kind} {fault.name} is of version {fault.found}, and {fault.wanted} is needed.",
                    consequence=_without_trigger(wakes=fault.wakes),
                    fixes=(_migration(), fault.repair),
                    facts=facts,
                )
            else:
                yield Finding(
                    severity="warning",
                    code="newer_function",
                    queue=spec.name,
                    summary=(
                        f"The {fault.kind} {fault.name} is of version {fault.found}, and this process knows version "
                        f"{fault.wanted}."
                    ),
                    consequence="The database was migrated for a newer sqlaqueue; this process may not work with it.",
                    fixes=("pip install --upgrade sqlaqueue",),
                    facts=facts,
                )


def check_altered_objects(examination: Examination) -> Iterator[Finding]:
    """Find triggers and functions that were changed by hand."""
    for spec in examination.specs:
        for each in altered_objects(examination.connection, tables_of(spec)):
            of_table = f" of {each.table}" if each.table else ""
            yield Finding(
                severity="warning" if each.wakes else "critical",
                code="altered_trigger" if each.table else "altered_function",
                queue=spec.name,
                summary=f"The {each.kind} {each.name}{of_table} is not as this version of sqlaqueue creates it.",
                consequence=_without_trigger(wakes=each.wakes),
                fixes=(each.repair, _migration()),
                facts={"name": each.name, "table": each.table},
            )


def tables_of(spec: QueueSpec) -> Sequence[sa.Table]:
    """Return the tables of a queue: of jobs, the side tables, and those of schedules if the program declares any."""
    metadata, prefix = spec.table.metadata, f"{spec.table.schema}." if spec.table.schema else ""
    declared = (metadata.tables.get(f"{prefix}{name}") for name in (SCHEDULE, TICK))
    return list(
        dict.fromkeys([spec.table, *spec.side_tables.values(), *(each for each in declared if each is not None)])
    )


def _without_trigger(*, wakes: bool) -> str:
    if wakes:
        return "Idle Consumers are not notified of new jobs, and find them at their next poll."
    return "Jobs may get no message, or be admitted wrongly, and so are not claimed."


def _migration() -> str:
    return UPDATE_COMMAND.strip("`")


# -- blocked tables ----------------------------------------------------------------------------------------------------
# Tables of a queue that a session has locked while others wait for them.


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


# -- claim indexes -----------------------------------------------------------------------------------------------------
# Whether the claim index of a queue has grown far beyond its entries, and whether the planner knows pending jobs.


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
            # The width of the hash of a key is in no statistics of a column.
            plain = (
                index for index in spec.claim_indexes if all(isinstance(each, sa.Column) for each in index.expressions)
            )
            indexes = [index for index in plain if index.table is table]
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


# -- rights ------------------------------------------------------------------------------------------------------------
# Privileges and row-level security policies that the role of the session lacks for running jobs.


_OF_WORKERS = "If workers use another role, examine the queue with theirs."


def check_schemas(examination: Examination) -> Iterator[Finding]:
    """Find schemas that the role may not use."""
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
    """Find privileges and policies that a Consumer needs and the role lacks."""
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
