"""Whether VACUUM and ANALYZE keep up with the tables of the queues."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from datetime import timedelta

from sqlaqueue.admin.diagnosis.checks.queue_tables import queue_tables
from sqlaqueue.admin.diagnosis.checks.settings import change_setting
from sqlaqueue.admin.diagnosis.examination import Examination
from sqlaqueue.admin.diagnosis.finding import Finding
from sqlaqueue.admin.diagnosis.thresholds import Thresholds
from sqlaqueue.postgresql.facts import ServerState, TableStatistics
from sqlaqueue.postgresql.server import server_state, table_statistics
from sqlaqueue.texts import duration_text

_OFF = {"off", "false", "no", "0", "f", "n", "of", "fa", "fal", "fals"}
_DEAD_ROWS = "Each claim has to pass over the dead rows, and the table grows."
_QUEUE_VACUUM = {
    "autovacuum_vacuum_scale_factor": "0",
    "autovacuum_vacuum_threshold": "5000",
    "autovacuum_vacuum_cost_delay": "0",
}
"""The storage parameters that the library gives to tables whose rows are deleted as soon as they are done."""


def check_autovacuum(examination: Examination) -> Iterator[Finding]:
    """Find that the server does not vacuum, or does not count what there is to vacuum."""
    server = server_state(examination.connection)
    if not server.is_on("track_counts"):
        yield Finding(
            severity="warning",
            code="track_counts_off",
            queue=None,
            summary="The server does not count the rows that change: track_counts is off.",
            consequence="Autovacuum vacuums and analyzes no table, so claims become slower and slower.",
            fixes=(change_setting(server, "track_counts", "on"),),
            facts=asdict(server.settings["track_counts"]),
        )
    if not server.is_on("autovacuum"):
        yield Finding(
            severity="warning",
            code="autovacuum_off",
            queue=None,
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


def _autovacuum_disabled(queue: str | None, table: TableStatistics) -> Iterator[Finding]:
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


def _is_off(table: TableStatistics) -> bool:
    return table.options.get("autovacuum_enabled", "on").lower() in _OFF


def _may_be_new(limits: Thresholds, server: ServerState, table: TableStatistics, rows: int) -> bool:
    """Return whether autovacuum may not have had the time for a table that it has never treated."""
    return rows <= limits.new_table_rows and server.is_on("autovacuum") and not _is_off(table)


def _parameter(server: ServerState, table: TableStatistics, name: str) -> float:
    return float(table.options[name]) if name in table.options else server.number(name)


def _vacuum_threshold(server: ServerState, table: TableStatistics) -> float:
    """Return at how many dead rows autovacuum vacuums a table."""
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


def _dead_rows(limits: Thresholds, server: ServerState, queue: str | None, table: TableStatistics) -> Iterator[Finding]:
    threshold = _vacuum_threshold(server, table)
    too_many = table.dead > max(limits.dead_rows, limits.dead_rows_factor * threshold)
    late = _overdue(table.since_vacuum, limits.vacuum_overdue) or table.dead > limits.dead_rows_kept
    if not (too_many and late) or (table.last_vacuum is None and _may_be_new(limits, server, table, table.dead)):
        return
    now = "" if table.vacuum_pid is None else f" The process {table.vacuum_pid} vacuums it now: {table.vacuum_phase}."
    wanted = {name: value for name, value in _QUEUE_VACUUM.items() if table.options.get(name) != value}
    options = ", ".join(f"{name} = {value}" for name, value in wanted.items())
    yield Finding(
        severity="warning",
        code="dead_rows",
        queue=queue,
        summary=(
            f"The table {table.name} has {table.dead} dead rows beside {table.live} live ones; autovacuum begins at "
            f"{threshold:.0f}. It was last vacuumed: {_time_text(table.last_vacuum, table.since_vacuum)}.{now}"
        ),
        consequence=f"{_DEAD_ROWS} If VACUUM does not remove them, an old transaction keeps them.",
        fixes=(
            f"VACUUM (ANALYZE) {table.name};",
            *([f"ALTER TABLE {table.name} SET ({options});"] if wanted else []),
        ),
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
    limits: Thresholds, server: ServerState, queue: str | None, table: TableStatistics
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


def _old_ids(limits: Thresholds, server: ServerState, queue: str | None, table: TableStatistics) -> Iterator[Finding]:
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
