"""Whether the server can run a queue: its version, whether it can be written to, and settings that lose jobs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

from sqlaqueue.admin.diagnosis.checks.settings import change_setting, use_server
from sqlaqueue.admin.diagnosis.examination import Examination
from sqlaqueue.admin.diagnosis.finding import Finding, Severity
from sqlaqueue.consumer.settings import BATCH
from sqlaqueue.flow_control.keys import flow_control
from sqlaqueue.postgresql.facts import ServerState
from sqlaqueue.postgresql.server import server_state


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
            queue=None,
            summary=f"The server is PostgreSQL {server.version // 10_000}; sqlaqueue needs {oldest} or newer.",
            consequence="Statements of Consumers fail. Upgrade the server with pg_upgrade.",
            facts={"version": server.version},
        )
    if server.in_recovery:
        yield Finding(
            severity="critical",
            code="server_in_recovery",
            queue=None,
            summary=f"The server {server.address}:{server.port} is a standby, which is read-only.",
            consequence="No job can be added, claimed or settled by this connection.",
            fixes=(
                *([use_server(server, *server.primary)] if server.primary is not None else []),
                "-- Only if the primary is gone for good.\nSELECT pg_promote();",
            ),
            facts={"address": server.address, "port": server.port},
        )
    elif server.is_on("default_transaction_read_only"):
        writable = "SET SESSION CHARACTERISTICS AS TRANSACTION READ WRITE;"
        yield Finding(
            severity="critical",
            code="read_only_default",
            queue=None,
            summary=(
                "Transactions are read-only by default: default_transaction_read_only is on, set by "
                f"{_source(server, 'default_transaction_read_only')}."
            ),
            consequence="No job can be added, claimed or settled.",
            fixes=(f"{writable}\n{change_setting(server, 'default_transaction_read_only', 'off')}",),
            facts=asdict(server.settings["default_transaction_read_only"]),
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
    lost = "After a crash of the machine the database may be corrupt; jobs may be lost or run twice."
    found: list[tuple[Severity, str, str]] = [("critical", "fsync", lost), ("critical", "full_page_writes", lost)]
    for severity, name, consequence in found:
        if not server.is_on(name):
            yield _off(server, severity, name, consequence)
    if server.settings["synchronous_commit"].value == "off":
        yield _off(
            server,
            "notice",
            "synchronous_commit",
            "A crash of the server may lose the last commits: a job that was added just before, or the end of a run, "
            "which then runs again.",
        )


def _off(server: ServerState, severity: Severity, name: str, consequence: str) -> Finding:
    return Finding(
        severity=severity,
        code=f"{name}_off",
        queue=None,
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
                f"may take {locks}, so {examination.thresholds.claims_at_once} claims at once may need {needed}."
            ),
            consequence='Claims may fail with "out of shared memory"; so may other statements at that time.',
            fixes=(
                f"-- Needs a restart of the server.\nALTER SYSTEM SET max_locks_per_transaction = {wanted};",
                f"sqlaqueue worker ... --batch-size {max(1, BATCH * room // needed)}",
            ),
            facts={"locks": room, "locks_of_claim": locks, "needed": needed},
        )
