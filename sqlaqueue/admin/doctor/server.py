"""Whether a queue's objects are in the database and the server can run it: tables, indexes, rights, settings."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime

import sqlalchemy as sa

from sqlaqueue.admin.doctor.examination import Check, Examination, Finding, change_setting, missing_column, use_server
from sqlaqueue.consumer.settings import BATCH
from sqlaqueue.flow_control.keys import flow_control
from sqlaqueue.postgresql.catalog_text import describe_session, last_statement, literal
from sqlaqueue.postgresql.facts import ServerState, Severity
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
from sqlaqueue.postgresql.server import (
    announced_pid,
    backend_pid,
    blockers,
    connections,
    index_sizes,
    probe_backends,
    server_state,
    server_time,
)
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.sql.engine import pool_limit
from sqlaqueue.texts import duration_text


def check_server(examination: Examination) -> Iterator[Finding]:
    """Find that the server is too old, or cannot be written to.

    Threshold: ``oldest_server``.
    """
    server = server_state(examination.connection)
    oldest = examination.thresholds.oldest_server
    if server.version // 10_000 < oldest:
        yield Finding(
            severity="critical",
            code="old_server",
            summary=f"The server is PostgreSQL {server.version // 10_000}; sqlaqueue needs {oldest} or newer.",
            consequence="Statements of Consumers fail. Upgrade the server with pg_upgrade.",
            facts={"version": server.version},
        )
    if server.in_recovery:
        yield Finding(
            severity="critical",
            code="server_in_recovery",
            summary=f"The server {server.address}:{server.port} is a standby, which is read-only.",
            consequence="No job can be added, claimed or ended by this connection.",
            fixes=(
                *([use_server(server, *server.primary)] if server.primary is not None else []),
                "-- Only if the primary is gone for good.\nSELECT pg_promote();",
            ),
            facts={"address": server.address, "port": server.port},
        )
    elif server.is_on("default_transaction_read_only"):
        writable, name = "SET SESSION CHARACTERISTICS AS TRANSACTION READ WRITE;", "default_transaction_read_only"
        yield Finding(
            severity="critical",
            code="read_only_default",
            summary=f"Transactions are read-only by default: {name} is on, set by {_source(server, name)}.",
            consequence="No job can be added, claimed or ended.",
            fixes=(f"{writable}\n{change_setting(server, name, 'off')}",),
            facts=asdict(server.settings[name]),
        )


def _source(server: ServerState, name: str) -> str:
    return {
        "database": f"ALTER DATABASE {server.database}",
        "user": f"ALTER ROLE {server.role}",
        "database user": f"ALTER ROLE {server.role} IN DATABASE {server.database}",
        "configuration file": "the server's configuration file",
        "client": "the options of this connection",
        "session": "a SET in this session",
    }.get(server.settings[name].source, server.settings[name].source)


def check_durability(examination: Examination) -> Iterator[Finding]:
    """Find settings with which the server loses commits, or its data, in a crash."""
    server = server_state(examination.connection)
    corrupt = "After a crash of the machine the database may be corrupt; jobs may be lost or run twice."
    lost = (
        "A crash of the server may lose the last commits: a job that was added just before, or the end of a run, which "
        "then runs again."
    )
    settings: list[tuple[Severity, str, str]] = [
        ("critical", "fsync", corrupt),
        ("critical", "full_page_writes", corrupt),
        ("notice", "synchronous_commit", lost),
    ]
    for severity, name, consequence in settings:
        # Not `not is_on()`: synchronous_commit has values between the two.
        if server.settings[name].value == "off":
            yield Finding(
                severity=severity,
                code=f"{name}_off",
                summary=f"The setting {name} is off, set by {_source(server, name)}.",
                consequence=consequence,
                fixes=(change_setting(server, name, "on"),),
                facts=asdict(server.settings[name]),
            )


def check_lock_table(examination: Examination) -> Iterator[Finding]:
    """Find a lock table that is too small for claims that lock a slot for each job and limit.

    Threshold: ``claims_at_once``.
    """
    server = server_state(examination.connection)
    sessions = server.number("max_connections") + server.number("max_prepared_transactions")
    room = int(server.number("max_locks_per_transaction") * sessions)
    for spec in examination.specs:
        flow = flow_control(spec)
        if flow is None or not spec.strategy.holds_transaction:
            continue
        # Without a key, all jobs of a claim share one slot.
        locks = sum(BATCH if key.names else 1 for key in flow.keys)
        needed = examination.thresholds.claims_at_once * locks
        if needed <= room:
            continue
        wanted = -int(-needed // sessions)
        yield Finding(
            severity="notice",
            code="small_lock_table",
            queue=spec.name,
            summary=(
                f"The server's lock table has room for about {room} locks; one claim of {BATCH} jobs of {spec.name} "
                f"may take {locks}, so {examination.thresholds.claims_at_once} simultaneous claims may need {needed}."
            ),
            consequence='Claims may fail with "out of shared memory"; so may other statements at that time.',
            fixes=(
                f"-- Needs a restart of the server.\nALTER SYSTEM SET max_locks_per_transaction = {wanted};",
                f"sqlaqueue worker ... --batch-size {max(1, BATCH * room // needed)}",
            ),
            facts={"locks": room, "locks_of_claim": locks, "needed": needed},
        )


def check_clock(examination: Examination, now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> Iterator[Finding]:
    """Find a difference between the clocks that the duration of a round trip cannot explain.

    Thresholds: ``clock_difference``, ``clock_difference_critical``. ``now`` is the clock of this machine.
    """
    difference, uncertainty = min((_measure(examination, now) for _ in range(5)), key=lambda each: each[1])
    certain = abs(difference) - uncertainty
    limits = examination.thresholds
    if certain <= limits.clock_difference.total_seconds():
        return
    direction = "ahead of" if difference > 0 else "behind"
    later = "later" if difference > 0 else "earlier"
    yield Finding(
        severity="critical" if certain > limits.clock_difference_critical.total_seconds() else "warning",
        code="clock_difference",
        summary=f"The clock of this machine is {abs(difference):.1f} s {direction} the clock of the database server.",
        consequence=(
            f"A time that a program of this machine computes, such as run_at, is due that much {later} than meant. "
            "Leases, retries and schedules go by the server's clock: if that is the wrong one, they end or start too "
            "early or too late when it is corrected."
        ),
        fixes=(
            "sudo timedatectl set-ntp true  # on the machine whose clock is wrong",
            "sudo chronyc makestep  # the same where chrony runs",
        ),
        facts={"seconds": difference, "uncertainty": uncertainty},
    )


def _measure(examination: Examination, now: Callable[[], datetime]) -> tuple[float, float]:
    """Return how many seconds this machine is ahead, and how far off that may be."""
    began, here = time.monotonic(), now()
    there = server_time(examination.connection) if examination.other is None else examination.now()
    half = (time.monotonic() - began) / 2
    return (here - there).total_seconds() + half, half


_NAMED = 3
"""How many groups of connections the text names."""

_CONSUMER = 2
"""The connections of a Consumer with the default options: a worker and maintenance."""


def check_server_connections(examination: Examination) -> Iterator[Finding]:
    """Find that the server has hardly any connection left.

    Thresholds: ``connections_used``, ``connection_idle``.
    """
    limits = examination.thresholds
    seconds = limits.connection_idle.total_seconds()
    found = connections(examination.connection, seconds)
    if found.used < limits.connections_used * found.limit:
        return
    most = "; ".join(
        f"{group.number} of the role {group.role}"
        + (f" and the application {group.application!r}" if group.application else "")
        for group in found.groups[:_NAMED]
    )
    idlest = max(found.groups, key=lambda group: group.idle or 0)
    fixes = []
    if idlest.idle:
        fixes.append(
            f"-- End {idlest.idle} idle sessions.\n"
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE backend_type = 'client backend' "
            f"AND pid <> pg_backend_pid() AND usename = {literal(idlest.role)} "
            f"AND application_name = {literal(idlest.application)} AND state = 'idle' "
            f"AND state_change < now() - interval '{seconds:g} seconds';"
        )
    fixes.append(f"-- Needs a restart of the server.\nALTER SYSTEM SET max_connections = {2 * found.limit};")
    yield Finding(
        severity="warning",
        code="connections_used",
        summary=f"{found.used} of the server's {found.limit} connections are in use: {most}.",
        consequence="When none is left, workers and programs that add jobs cannot connect.",
        fixes=tuple(fixes),
        facts={"used": found.used, "limit": found.limit, "groups": [asdict(group) for group in found.groups]},
    )


def check_pool(examination: Examination) -> Iterator[Finding]:
    """Find an engine whose pool is too small for a Consumer with the default options."""
    limit = pool_limit(examination.connection.engine.pool)
    if limit is None or limit >= _CONSUMER:
        return
    yield Finding(
        severity="notice",
        code="small_pool",
        summary=f"The pool of this engine allows {limit} connection; a Consumer needs {_CONSUMER} or more.",
        consequence=f"A Consumer refuses to start with it: use create_engine(..., pool_size={_CONSUMER}).",
        facts={"limit": limit, "needed": _CONSUMER},
    )


def check_pooler(examination: Examination) -> Iterator[Finding]:
    """Find a pooler that gives each transaction another connection to the server.

    A driver is told the process id of the server's process when it connects. If statements are executed by a process
    of another id, there is a pooler in between. Only then two further connections are opened, to see whether it
    changes the process from one transaction to the next. Threshold: ``statement_timeout``.
    """
    connection = examination.connection
    executing = backend_pid(connection)
    announced = announced_pid(connection)
    if announced == executing:
        return
    pids = _probe(examination)
    if pids and pids[0] == pids[-1]:
        # In session mode a client keeps its connection, and notifications arrive.
        return
    server = server_state(connection)
    between = f"A pooler is between this engine and the server {server.address}:{server.port}"
    if pids:
        seen = f"two transactions of one connection were executed by the processes {pids[0]} and {pids[-1]}"
        summary = f"{between}, in transaction mode: {seen}."
    else:
        waited = f"{examination.thresholds.statement_timeout.total_seconds():g} s"
        summary = f"{between}; it gave no further connection within {waited}, so its mode is not known."
    yield Finding(
        severity="warning" if pids else "notice",
        code="transaction_pooler",
        summary=summary,
        consequence=(
            "In transaction mode LISTEN has no effect, so that Consumers find new jobs only by polling. Programs that "
            "add jobs may stay behind it."
        ),
        fixes=(use_server(server, server.address, server.port),),
        facts={"executing": executing, "announced": announced, "pids": [*pids], "address": server.address},
    )


def _probe(examination: Examination) -> Sequence[int]:
    """Return the process ids of further transactions; none if the pooler has no connection left for them."""
    engine = examination.connection.engine
    if engine.dialect.is_async:
        # Its connections belong to the event loop of this thread.
        return probe_backends(engine)
    found: list[int] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            found.extend(probe_backends(engine))
        except Exception as error:  # noqa: BLE001 - raised below, in the thread of the examination
            errors.append(error)

    # A pooler whose connections are all in use, one of them by this examination, keeps a client waiting.
    thread = threading.Thread(target=run, name="sqlaqueue-pooler-probe", daemon=True)
    thread.start()
    thread.join(examination.thresholds.statement_timeout.total_seconds())
    if errors:
        raise errors[0]
    return [] if thread.is_alive() else found


# -- objects of a queue ------------------------------------------------------------------------------------------------
# What is wrong with them in the database, with the rights of the role, and who has locked tables.


def _check_of(name: str, faults: Callable[[sa.Connection, QueueSpec], Iterable[Fault]]) -> Check:
    def check(examination: Examination) -> Iterator[Finding]:
        for spec in examination.specs:
            for fault in faults(examination.connection, spec):
                yield _finding(examination, spec, fault)

    check.__name__ = f"check_{name}"
    return check


def _finding(examination: Examination, spec: QueueSpec, fault: Fault) -> Finding:
    if fault.code == "missing_column":
        return missing_column(examination, spec, fault.name, fault.fixes[1:])
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
            yield _finding(examination, spec, fault._replace(severity="warning") if waits else fault)


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
                consequence="Until it ends, jobs are not enqueued, claimed or ended.",
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
