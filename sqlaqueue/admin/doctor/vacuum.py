"""Checks of the doctor: whether VACUUM, ANALYZE and keys keep up with a queue's tables, and who is in the way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import sqlalchemy as sa

from sqlaqueue.admin.doctor.examination import Examination, Finding, Thresholds, change_setting, queue_tables
from sqlaqueue.postgresql import facts
from sqlaqueue.postgresql.catalog import foreign_keys_to
from sqlaqueue.postgresql.catalog_text import describe_session, last_statement, literal, quoted, table_name
from sqlaqueue.postgresql.ddl import QUEUE_VACUUM
from sqlaqueue.postgresql.server import (
    common_values,
    horizon_holders,
    key_sequences,
    notification_queue,
    server_state,
    table_statistics,
)
from sqlaqueue.strategies.delete_returning import MessageStrategy
from sqlaqueue.texts import duration_text, moment_text

_CONSEQUENCE = (
    "VACUUM removes no row that has died since then, from any table of the database, so each claim has to skip "
    "more dead rows than the one before."
)


def check_horizon(examination: Examination) -> Iterator[Finding]:
    """Find what has kept dead rows for too long.

    Thresholds: ``transaction_open``, ``horizon_age``, ``slot_inactive``.
    """
    server = server_state(examination.connection)
    if server.in_recovery:
        # On a standby, the primary decides which rows are removed.
        return
    holders = horizon_holders(examination.connection)
    limits = examination.thresholds
    old_sessions = (each for each in holders.sessions if _too_old(limits, each.age, each.seconds))
    yield from (_session(examination, server, each) for each in old_sessions)
    yield from (_prepared(each) for each in holders.prepared if _too_old(limits, each.age, each.seconds))
    for slot in holders.slots:
        unused = slot.inactive_seconds is not None and slot.inactive_seconds > limits.slot_inactive.total_seconds()
        if unused or _too_old(limits, max(slot.age or 0, slot.catalog_age or 0), None):
            yield _slot(examination, slot)
    yield from (_standby(examination, each) for each in holders.standbys if _too_old(limits, each.age, None))
    if holders.hidden:
        sessions = "1 session" if holders.hidden == 1 else f"{holders.hidden} sessions"
        yield Finding(
            severity="notice",
            code="hidden_sessions",
            summary=f"The role {server.role} may not see what {sessions} of other roles in this database do.",
            consequence="Long transactions of other roles are found by the number of later transactions only.",
            fixes=(f"GRANT pg_read_all_stats TO {quoted(server.role)};",),
            facts={"role": server.role, "sessions": holders.hidden},
        )


def _too_old(limits: Thresholds, age: int, seconds: float | None) -> bool:
    return age > limits.horizon_age or (seconds is not None and seconds > limits.transaction_open.total_seconds())


def _transactions(age: int) -> str:
    return "1 transaction" if age == 1 else f"{age} transactions"


def _session(examination: Examination, server: facts.ServerState, session: facts.OpenTransaction) -> Finding:
    who = describe_session(session)
    idle = (session.state or "").startswith("idle in transaction")
    if session.hidden:
        what = (
            f"has a transaction that keeps dead rows of the last {_transactions(session.age)}; the role {server.role} "
            "may not see since when, nor what it executes"
        )
    else:
        doing = "is idle in a transaction" if idle else "executes in a transaction"
        what = (
            f"{doing} that started at {moment_text(session.since)}, {duration_text(session.seconds)} ago, and keeps "
            f"dead rows of the last {_transactions(session.age)}{last_statement(session)}"
        )
    fixes = [f"SELECT pg_terminate_backend({session.pid});"]
    if idle and session.role is not None:
        limited = f"ALTER ROLE {quoted(session.role)} IN DATABASE {quoted(server.database)} SET"
        note = ""
        if any(spec.strategy.holds_transaction for spec in examination.specs):
            note = "-- Not for a role of workers: it also ends handlers that send no statement for that long.\n"
        fixes.append(f"{note}{fixes[0]}\n{limited} idle_in_transaction_session_timeout = '5min';")
    return Finding(
        severity="warning",
        code="idle_in_transaction" if idle else "long_transaction",
        summary=f"{who} {what}.",
        consequence=_CONSEQUENCE,
        fixes=tuple(fixes),
        facts=asdict(session),
    )


def _prepared(prepared: facts.PreparedTransaction) -> Finding:
    gid = literal(prepared.gid)
    return Finding(
        severity="warning",
        code="prepared_transaction",
        summary=(
            f"The prepared transaction {prepared.gid!r} of the role {prepared.owner} has been open since "
            f"{moment_text(prepared.since)}, for {duration_text(prepared.seconds)}, and keeps dead rows of the last "
            f"{_transactions(prepared.age)}."
        ),
        consequence=f"{_CONSEQUENCE} It also keeps its locks, and survives a restart of the server.",
        fixes=(f"ROLLBACK PREPARED {gid};", f"COMMIT PREPARED {gid};"),
        facts=asdict(prepared),
    )


def _slot(examination: Examination, slot: facts.ReplicationSlot) -> Finding:
    name = literal(slot.name)
    drop = f"SELECT pg_drop_replication_slot({name});"
    if slot.active_pid is None:
        state = "is not in use"
        if slot.inactive_since is not None:
            ago = duration_text(slot.inactive_seconds)
            state = f"has not been in use since {moment_text(slot.inactive_since)}, for {ago},"
        fixes: tuple[str, ...] = (drop,)
    else:
        state = f"is in use by the process {slot.active_pid}"
        fixes = (
            (f"-- Only if its subscriber is not needed.\nSELECT pg_terminate_backend({slot.active_pid});\n{drop}",)
            if slot.kind == "logical"
            else _on_standby(examination)
        )
    if slot.age is None:
        kept = f"keeps dead rows of the last {_transactions(slot.catalog_age or 0)} in the system catalogs"
        consequence = (
            "VACUUM removes no row of the system catalogs that has died since then, so that planning becomes slower."
        )
    else:
        kept = f"keeps dead rows of the last {_transactions(slot.age)}"
        consequence = _CONSEQUENCE
    if slot.wal_bytes:
        consequence += f" The server also keeps {slot.wal_bytes / 1024**2:.0f} MB of WAL for it."
    if slot.database is not None:
        kept += f"; it belongs to the database {slot.database}"
    return Finding(
        severity="warning",
        code="replication_slot",
        summary=f"The {slot.kind} replication slot {slot.name} {state} and {kept}.",
        consequence=consequence,
        fixes=fixes,
        facts=asdict(slot),
    )


def _standby(examination: Examination, standby: facts.Standby) -> Finding:
    where = "a local connection" if standby.client is None else standby.client
    return Finding(
        severity="warning",
        code="standby_feedback",
        summary=(
            f"The standby {standby.application!r} ({where}, process {standby.pid}) has hot_standby_feedback and keeps "
            f"dead rows of the last {_transactions(standby.age)}, for a query that runs there."
        ),
        consequence=_CONSEQUENCE,
        fixes=_on_standby(examination),
        facts=asdict(standby),
    )


def _on_standby(examination: Examination) -> tuple[str, ...]:
    seconds = examination.thresholds.transaction_open.total_seconds()
    return (
        (
            "-- On the standby: end the sessions with old transactions.\n"
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE backend_type = 'client backend' "
            f"AND pid <> pg_backend_pid() AND xact_start < now() - interval '{seconds:g} seconds';"
        ),
        (
            "-- On the standby. The server then cancels its long queries instead.\n"
            "ALTER SYSTEM SET hot_standby_feedback = off;\nSELECT pg_reload_conf();"
        ),
    )


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
            # Otherwise the next migration would change the columns back.
            first = " Change the columns of the model to BigInteger before the fix."
            yield Finding(
                severity="critical" if used >= limits.keys_used_critical else "warning",
                code="keys_run_out",
                queue=queue,
                summary=(
                    f"The sequence {sequence.sequence} of {sequence.table}.{sequence.column}, a column of type "
                    f"{sequence.column_type}, has reached {sequence.last} of {sequence.limit}: {used:.0%} are used, "
                    f"{left} numbers are left."
                ),
                consequence="When they are used up, each INSERT fails, so that no job can be added."
                + (first if sequence.column_type != "bigint" else ""),
                fixes=_fixes(examination, table, sequence),
                facts={**asdict(sequence), "limit": sequence.limit, "used": used},
            )


def _fixes(examination: Examination, table: sa.Table, sequence: facts.KeySequence) -> tuple[str, ...]:
    statements: list[str] = []
    if sequence.column_type != "bigint":
        statements += [
            "-- Locks and rewrites the tables.",
            f"ALTER TABLE {sequence.table} ALTER COLUMN {sequence.column} TYPE bigint;",
            *_referring(examination, table, sequence),
        ]
    # The sequence of an identity column follows the type of the column; its own lower MAXVALUE stays.
    follows = sequence.identity and sequence.sequence_limit == sequence.column_limit
    largest = 2**63 - 1
    if (sequence.column_type == "bigint" or not follows) and sequence.sequence_limit < largest:
        statements.append(f"ALTER SEQUENCE {sequence.sequence} AS bigint MAXVALUE {largest};")
    return ("\n".join(statements),) if statements else ()


def _referring(examination: Examination, table: sa.Table, sequence: facts.KeySequence) -> Iterator[str]:
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


def check_notification_queue(examination: Examination) -> Iterator[Finding]:
    """Find a full notification queue, and the session that most likely keeps it full.

    A listener receives no notifications within a transaction. The server does not tell which sessions listen, so the
    session with the oldest transaction is named. Thresholds: ``notification_queue``, ``notification_queue_critical``.
    """
    queue = notification_queue(examination.connection)
    limits = examination.thresholds
    if queue.usage < limits.notification_queue:
        return
    holder = ""
    fixes: tuple[str, ...] = ()
    if queue.oldest is not None:
        holder = (
            f" {describe_session(queue.oldest)} has the oldest transaction, since {moment_text(queue.oldest.since)} "
            f"({duration_text(queue.oldest.seconds)}); if it listens, it keeps the queue full."
        )
        fixes = (f"SELECT pg_terminate_backend({queue.oldest.pid});",)
    yield Finding(
        severity="critical" if queue.usage >= limits.notification_queue_critical else "warning",
        code="notification_queue_full",
        summary=(
            f"The server's notification queue is {queue.usage:.0%} full: a session that listens does not receive its "
            f"notifications.{holder}"
        ),
        consequence="When the queue is full, each commit that notifies fails, so that no job can be added.",
        fixes=fixes,
        facts={"usage": queue.usage, "oldest": None if queue.oldest is None else asdict(queue.oldest)},
    )


def check_status_statistics(examination: Examination) -> Iterator[Finding]:
    """Find queues with many pending jobs, of which the statistics of the status say that there are none.

    It counts pending jobs up to a limit, so it is made only with ``deep``. Threshold: ``changed_rows``.
    """
    if not examination.deep:
        return
    connection, most = examination.connection, examination.thresholds.changed_rows
    for spec in examination.specs:
        if not spec.has("status"):
            continue
        common = common_values(connection, spec.columns["status"])
        pending = connection.scalar(sa.select(sa.cast(spec.literal("pending"), sa.Text)))
        # Without common values there are no statistics, or each status is unique.
        if not common or pending in common:
            continue
        some: sa.Select[Any] = (
            sa.select(sa.literal_column("1")).select_from(spec.table).where(spec.in_state("pending")).limit(most + 1)
        )
        number = connection.execute(
            sa.select(sa.func.count()).select_from(some.subquery("sqlaqueue_some"))
        ).scalar_one()
        if number <= most:
            continue
        yield Finding(
            severity="warning",
            code="status_statistics",
            queue=spec.name,
            summary=(
                f"The table {spec.table.fullname} has more than {most} pending jobs, and the planner's statistics know "
                f"only these values of {spec.columns['status'].name}: {', '.join(common)}."
            ),
            consequence="The server plans for few pending jobs, so a claim may have a plan that reads all of them.",
            fixes=(f"ANALYZE {table_name(connection, spec.table)};",),
            facts={"values": [*common], "pending_more_than": most},
        )


_OFF = {"off", "false", "no", "0", "f", "n", "of", "fa", "fal", "fals"}
_DEAD_ROWS = "Each claim has to skip the dead rows, and the table grows."


def check_autovacuum(examination: Examination) -> Iterator[Finding]:
    """Find that the server does not vacuum, or does not count what there is to vacuum."""
    server = server_state(examination.connection)
    if not server.is_on("track_counts"):
        yield Finding(
            severity="warning",
            code="track_counts_off",
            summary="The server does not count the rows that change: track_counts is off.",
            consequence="Autovacuum vacuums and analyzes no table, so claims become slower and slower.",
            fixes=(change_setting(server, "track_counts", "on"),),
            facts=asdict(server.settings["track_counts"]),
        )
    if not server.is_on("autovacuum"):
        yield Finding(
            severity="warning",
            code="autovacuum_off",
            summary="The server vacuums and analyzes no table by itself: autovacuum is off.",
            consequence=f"{_DEAD_ROWS} Claims become slower and slower.",
            fixes=(change_setting(server, "autovacuum", "on"),),
            facts=asdict(server.settings["autovacuum"]),
        )


def check_table_statistics(examination: Examination) -> Iterator[Finding]:
    """Find tables that are not vacuumed or analyzed often enough.

    Thresholds: ``dead_rows``, ``dead_rows_factor``, ``dead_rows_kept``, ``vacuum_overdue``, ``changed_rows``,
    ``changed_share``, ``row_count_factor``, ``analyze_overdue``, ``new_table_rows``, ``freeze_factor``,
    ``freeze_critical``.
    """
    server = server_state(examination.connection)
    limits = examination.thresholds
    for queue, table in queue_tables(examination):
        for statistics in table_statistics(examination.connection, table):
            yield from _autovacuum_disabled(queue, statistics)
            if server.is_on("track_counts"):
                yield from _dead_rows(limits, server, queue, statistics)
                yield from _statistics(limits, server, queue, statistics)
            yield from _old_ids(limits, server, queue, statistics)


def _autovacuum_disabled(queue: str | None, table: facts.TableStatistics) -> Iterator[Finding]:
    if _is_off(table):
        yield Finding(
            severity="warning",
            code="autovacuum_disabled",
            queue=queue,
            summary=f"Autovacuum is switched off for the table {table.name}.",
            consequence=f"{_DEAD_ROWS} The planner's statistics become outdated.",
            fixes=(f"ALTER TABLE {table.name} RESET (autovacuum_enabled);",),
            facts={"table": table.name, "options": dict(table.options)},
        )


def _is_off(table: facts.TableStatistics) -> bool:
    return table.options.get("autovacuum_enabled", "on").lower() in _OFF


def _may_be_new(limits: Thresholds, server: facts.ServerState, table: facts.TableStatistics, rows: int) -> bool:
    """Return whether autovacuum may not have had the time for a table that it has never treated."""
    return rows <= limits.new_table_rows and server.is_on("autovacuum") and not _is_off(table)


def _parameter(server: facts.ServerState, table: facts.TableStatistics, name: str) -> float:
    return float(table.options[name]) if name in table.options else server.number(name)


def _vacuum_threshold(server: facts.ServerState, table: facts.TableStatistics) -> float:
    share = _parameter(server, table, "autovacuum_vacuum_scale_factor")
    threshold = _parameter(server, table, "autovacuum_vacuum_threshold") + share * max(table.rows, 0)
    # PostgreSQL 18 has a limit, of which -1 means none.
    name = "autovacuum_vacuum_max_threshold"
    most = _parameter(server, table, name) if name in server.settings else -1
    return threshold if most < 0 else min(threshold, most)


def _overdue(seconds: float | None, limit: timedelta) -> bool:
    return seconds is None or seconds > limit.total_seconds()


def _time_text(moment: object, seconds: float | None) -> str:
    return "never" if moment is None else f"{duration_text(seconds)} ago"


def _dead_rows(
    limits: Thresholds, server: facts.ServerState, queue: str | None, table: facts.TableStatistics
) -> Iterator[Finding]:
    threshold = _vacuum_threshold(server, table)
    too_many = table.dead > max(limits.dead_rows, limits.dead_rows_factor * threshold)
    late = _overdue(table.since_vacuum, limits.vacuum_overdue) or table.dead > limits.dead_rows_kept
    if not (too_many and late) or (table.last_vacuum is None and _may_be_new(limits, server, table, table.dead)):
        return
    now = "" if table.vacuum_pid is None else f" The process {table.vacuum_pid} vacuums it now: {table.vacuum_phase}."
    wanted = {name: value for name, value in QUEUE_VACUUM.items() if table.options.get(name) != value}
    options = ", ".join(f"{name} = {value}" for name, value in wanted.items())
    yield Finding(
        severity="warning",
        code="dead_rows",
        queue=queue,
        summary=(
            f"The table {table.name} has {table.dead} dead rows for {table.live} live ones; autovacuum starts at "
            f"{threshold:.0f}. It was last vacuumed: {_time_text(table.last_vacuum, table.since_vacuum)}.{now}"
        ),
        consequence=f"{_DEAD_ROWS} If VACUUM does not remove them, an old transaction keeps them.",
        fixes=(f"VACUUM (ANALYZE) {table.name};", *([f"ALTER TABLE {table.name} SET ({options});"] if wanted else [])),
        facts={
            "table": table.name,
            "dead": table.dead,
            "live": table.live,
            "threshold": threshold,
            "last_vacuum": table.last_vacuum,
            "vacuum_pid": table.vacuum_pid,
            "vacuum_phase": table.vacuum_phase,
        },
    )


def _statistics(
    limits: Thresholds, server: facts.ServerState, queue: str | None, table: facts.TableStatistics
) -> Iterator[Finding]:
    if not _overdue(table.since_analyze, limits.analyze_overdue):
        return
    if table.last_analyze is None and _may_be_new(limits, server, table, table.changed):
        return
    share = _parameter(server, table, "autovacuum_analyze_scale_factor")
    threshold = _parameter(server, table, "autovacuum_analyze_threshold") + share * max(table.rows, 0)
    changed = table.changed > max(limits.changed_rows, limits.changed_share * table.rows, threshold)
    more, less = max(table.live, table.planned_rows), min(table.live, table.planned_rows)
    # Without counters, as after a crash, it is not known how many rows there are.
    counted = table.live > 0 and table.planned_rows >= 0
    wrong = counted and more > limits.row_count_factor * max(less, 1) and more - less > limits.changed_rows
    if not (changed or wrong):
        return
    expected = "" if table.planned_rows < 0 else f", and the planner expects {table.planned_rows:.0f}"
    yield Finding(
        severity="warning",
        code="stale_statistics",
        queue=queue,
        summary=(
            f"The planner's statistics of the table {table.name} are outdated: {table.changed} rows have changed since "
            f"the last ANALYZE ({_time_text(table.last_analyze, table.since_analyze)}). It has {table.live} "
            f"rows{expected}."
        ),
        consequence="The server may choose a plan for a claim that reads the whole table.",
        fixes=(f"ANALYZE {table.name};",),
        facts={
            "table": table.name,
            "changed": table.changed,
            "live": table.live,
            "planned_rows": table.planned_rows,
            "last_analyze": table.last_analyze,
        },
    )


def _old_ids(
    limits: Thresholds, server: facts.ServerState, queue: str | None, table: facts.TableStatistics
) -> Iterator[Finding]:
    for what, age, setting in (
        ("transaction id", table.xid_age, "autovacuum_freeze_max_age"),
        ("multixact id", table.multixact_age, "autovacuum_multixact_freeze_max_age"),
    ):
        # A table's own value can only lower the server's.
        frozen_at = min(_parameter(server, table, setting), server.number(setting))
        critical = age > limits.freeze_critical
        if age > limits.freeze_factor * frozen_at or critical:
            yield Finding(
                severity="critical" if critical else "warning",
                code="wraparound",
                queue=queue,
                summary=(
                    f"The oldest {what} in the table {table.name} is {age} old; autovacuum should have frozen it at "
                    f"{frozen_at:.0f}."
                ),
                consequence=(
                    "At an age of about 2.1 billion the server refuses all writes, so that no job is claimed or added."
                ),
                fixes=(f"VACUUM (FREEZE) {table.name};",),
                facts={"table": table.name, "kind": what, "age": age, "limit": frozen_at},
            )
