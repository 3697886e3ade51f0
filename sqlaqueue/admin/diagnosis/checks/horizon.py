"""Who keeps VACUUM from removing dead rows: sessions, prepared transactions, replication slots and standbys."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

from sqlaqueue.admin.diagnosis.examination import Examination
from sqlaqueue.admin.diagnosis.finding import Finding
from sqlaqueue.admin.diagnosis.thresholds import Thresholds
from sqlaqueue.postgresql.catalog_text import literal, quoted
from sqlaqueue.postgresql.facts import (
    HorizonHolders,
    OpenTransaction,
    PreparedTransaction,
    ReplicationSlot,
    ServerState,
    Standby,
)
from sqlaqueue.postgresql.server import horizon_holders, server_state
from sqlaqueue.texts import duration_text, moment_text

_CONSEQUENCE = (
    "VACUUM removes no row that has died since then, from any table of the database, so each claim has to pass over "
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
    for session in holders.sessions:
        if _too_old(limits, session.age, session.seconds):
            yield _session(examination, server, session)
    for prepared in holders.prepared:
        if _too_old(limits, prepared.age, prepared.seconds):
            yield _prepared(prepared)
    yield from _replication(examination, holders)
    if holders.hidden:
        yield _hidden(server, holders)


def _replication(examination: Examination, holders: HorizonHolders) -> Iterator[Finding]:
    limits = examination.thresholds
    for slot in holders.slots:
        unused = slot.inactive_seconds is not None and slot.inactive_seconds > limits.slot_inactive.total_seconds()
        if unused or _too_old(limits, max(slot.age or 0, slot.catalog_age or 0), None):
            yield _slot(examination, slot)
    for standby in holders.standbys:
        if _too_old(limits, standby.age, None):
            yield _standby(examination, standby)


def _too_old(limits: Thresholds, age: int, seconds: float | None) -> bool:
    return age > limits.horizon_age or (seconds is not None and seconds > limits.transaction_open.total_seconds())


def _transactions(age: int) -> str:
    return "1 transaction" if age == 1 else f"{age} transactions"


def describe_session(session: OpenTransaction) -> str:
    """Return the pid of a session, its role, its application and where it comes from."""
    details = [f"role {session.role}"]
    if session.application:
        details.append(f"application {session.application!r}")
    details.append("local connection" if session.client is None else f"client {session.client}")
    if session.hidden:
        details.pop()
    return f"Session {session.pid} ({', '.join(details)})"


def last_statement(session: OpenTransaction) -> str:
    """Return what the last statement of a session does, as the end of a sentence; empty if it is not known."""
    return f"; its last statement: {session.statement}" if session.statement else ""


def _session(examination: Examination, server: ServerState, session: OpenTransaction) -> Finding:
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
            f"{doing} that began at {moment_text(session.since)}, {duration_text(session.seconds)} ago, and keeps dead "
            f"rows of the last {_transactions(session.age)}{last_statement(session)}"
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
        queue=None,
        summary=f"{who} {what}.",
        consequence=_CONSEQUENCE,
        fixes=tuple(fixes),
        facts=asdict(session),
    )


def _prepared(prepared: PreparedTransaction) -> Finding:
    gid = literal(prepared.gid)
    return Finding(
        severity="warning",
        code="prepared_transaction",
        queue=None,
        summary=(
            f"The prepared transaction {prepared.gid!r} of the role {prepared.owner} has been open since "
            f"{moment_text(prepared.since)}, for {duration_text(prepared.seconds)}, and keeps dead rows of the last "
            f"{_transactions(prepared.age)}."
        ),
        consequence=f"{_CONSEQUENCE} It also keeps its locks, and survives a restart of the server.",
        fixes=(f"ROLLBACK PREPARED {gid};", f"COMMIT PREPARED {gid};"),
        facts=asdict(prepared),
    )


def _slot(examination: Examination, slot: ReplicationSlot) -> Finding:
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
        queue=None,
        summary=f"The {slot.kind} replication slot {slot.name} {state} and {kept}.",
        consequence=consequence,
        fixes=fixes,
        facts=asdict(slot),
    )


def _standby(examination: Examination, standby: Standby) -> Finding:
    where = "a local connection" if standby.client is None else standby.client
    return Finding(
        severity="warning",
        code="standby_feedback",
        queue=None,
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


def _hidden(server: ServerState, holders: HorizonHolders) -> Finding:
    role = quoted(server.role)
    sessions = "1 session" if holders.hidden == 1 else f"{holders.hidden} sessions"
    return Finding(
        severity="notice",
        code="hidden_sessions",
        queue=None,
        summary=f"The role {server.role} may not see what {sessions} of other roles in this database do.",
        consequence="Long transactions of other roles are found by the number of later transactions only.",
        fixes=(f"GRANT pg_read_all_stats TO {role};",),
        facts={"role": server.role, "sessions": holders.hidden},
    )
