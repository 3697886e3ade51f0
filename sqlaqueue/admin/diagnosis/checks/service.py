"""Due jobs that do not run, the Consumers of a queue, and rows that nothing cleans up."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from typing import Any

import sqlalchemy as sa

from sqlaqueue._typing import AnySelect
from sqlaqueue._version import __version__
from sqlaqueue.admin.diagnosis.checks.shared import alive_text, counted, live_consumers, number_text
from sqlaqueue.admin.diagnosis.examination import Examination, target_of
from sqlaqueue.admin.diagnosis.finding import Finding
from sqlaqueue.admin.explanation.facts import unclaimable_jobs
from sqlaqueue.admin.explanation.read_facts import messages_of
from sqlaqueue.flow_control.keys import flow_control
from sqlaqueue.postgresql.catalog_text import sql_text
from sqlaqueue.postgresql.side_tables import PAUSE
from sqlaqueue.postgresql.triggers import wakes
from sqlaqueue.queue.names import CONSUMERS, CONTROL, CRASH_JOURNAL
from sqlaqueue.queue.run import key_text
from sqlaqueue.queue.spec import QueueSpec, clock, within_calendar
from sqlaqueue.texts import duration_text, moment_text

_FIRST_JOBS = 10_000
"""Number of due jobs, the first in claim order, among which the oldest one is looked for."""


def check_due_jobs(examination: Examination) -> Iterator[Finding]:
    """Find due jobs of queues that are paused or have no Consumer, and those that have waited for long."""
    limits = examination.thresholds
    for spec in examination.specs:
        row: Any = examination.connection.execute(_due(spec)).one()
        due, oldest = row.due, None if row.oldest is None else float(row.oldest)
        if not due:
            continue
        jobs = "1 job is" if due == 1 else f"{number_text(due, 'job')} are"
        waits = f"{jobs} due{'' if oldest is None else f', the oldest for {duration_text(oldest)}'}"
        facts = {"due": due, "oldest_due": oldest}
        alive, target = live_consumers(examination, spec), target_of(spec)
        paused_at = _paused_at(examination, spec)
        if paused_at is not None:
            yield Finding(
                severity="warning",
                code="paused",
                queue=spec.name,
                summary=f"The queue {spec.name} has been paused since {moment_text(paused_at)}, and {waits}.",
                consequence="No job of it is claimed.",
                fixes=(f"sqlaqueue resume {target}",),
                facts={**facts, "paused_at": paused_at},
            )
        if not alive and (oldest is None or oldest >= limits.unserved_for.total_seconds()):
            yield Finding(
                severity="critical",
                code="no_consumer",
                queue=spec.name,
                summary=f"No live Consumer serves the queue {spec.name}, and {waits}.",
                consequence="Its jobs do not run, unless a program claims them without a Consumer.",
                fixes=(f"sqlaqueue worker {target}=MODULE:HANDLER",),
                facts=facts,
            )
        running = sum(len(each.running) + each.claimed for each in alive)
        is_old = oldest is not None and oldest >= limits.oldest_due.total_seconds()
        # Under a held transaction running jobs read as pending.
        if alive and is_old and paused_at is None and due > running:
            yield _backlog(spec, waits, {**facts, "consumers": len(alive), "running": running})


def _backlog(spec: QueueSpec, waits: str, facts: dict[str, Any]) -> Finding:
    target, number = target_of(spec), facts["consumers"]
    held_back = " Limits, rates or an order may hold them back." if flow_control(spec) is not None else ""
    look = f"sqlaqueue stats {target}" if held_back else f"sqlaqueue workers {target}"
    if facts["running"]:
        consequence = "More jobs are enqueued than run."
        fixes: tuple[str, ...] = (f"sqlaqueue worker {target}=MODULE:HANDLER --processes 4", look)
    else:
        # More workers would fail in the same way.
        consequence = "No Consumer has claimed a job: if their claims fail, their log says why."
        fixes = (look, f"sqlaqueue worker {target}=MODULE:HANDLER --processes 4")
    return Finding(
        severity="warning",
        code="backlog",
        queue=spec.name,
        summary=f"{waits[0].upper()}{waits[1:]}, though {alive_text(number)}.",
        consequence=consequence + held_back,
        fixes=fixes,
        facts=facts,
    )


def _due(spec: QueueSpec) -> AnySelect:
    """Return a SELECT of the number of due jobs, up to a limit, and the seconds since the oldest of them was due."""
    messages = messages_of(spec)
    if messages is None:
        waiting = [spec.in_state("pending")] if spec.has("status") else []
        order: Sequence[sa.Column[Any]] = spec.claim_order
    else:
        waiting, order = messages.of_pending_jobs(spec), messages.order
    moments = [spec.columns[role] for role in ("run_at", "created_at") if spec.has(role)]
    # The columns may have no time zone.
    since = sa.cast(sa.func.coalesce(*moments) if moments else sa.null(), sa.DateTime(timezone=True)).label("since")
    jobs = sa.select(since).where(*waiting, *spec.due(spec.columns.get("run_at"))).order_by(*order)
    first = jobs.limit(_FIRST_JOBS).subquery("sqlaqueue_first")
    oldest = sa.extract("epoch", clock() - within_calendar(sa.func.min(first.c.since)))
    columns: list[sa.ColumnElement[Any]] = [sa.func.count().label("due"), oldest.label("oldest")]
    return sa.select(*columns).select_from(first)


def _paused_at(examination: Examination, spec: QueueSpec) -> Any:
    control = spec.side_tables.get(CONTROL)
    if control is None:
        return None
    mine = sa.and_(control.c.queue == spec.name, control.c.key == PAUSE)
    return examination.connection.execute(sa.select(control.c.created_at).where(mine)).scalar()


def check_consumers(examination: Examination) -> Iterator[Finding]:
    """Find live Consumers that receive no notifications, cannot claim some jobs, or have another version."""
    for spec in examination.specs:
        alive = live_consumers(examination, spec)
        silent = [] if not wakes(spec) else [each for each in alive if _is_silent(examination, each)]
        if silent:
            names = ", ".join(str(each.name) for each in silent)
            yield Finding(
                severity="warning",
                code="not_listening",
                queue=spec.name,
                summary=f"{len(silent)} of {len(alive)} live Consumers receive no notifications: {names}.",
                consequence=(
                    "They find new jobs by polling only. Connect them to the server itself instead of a pooler in "
                    "transaction mode, or turn notifications off by QueueConfig(notify=False)."
                ),
                facts={"consumers": [each.name for each in silent]},
            )
        yield from _unclaimable_jobs(spec, alive)
        others = {each.name: each.version for each in alive if each.version != __version__}
        if others:
            listed = ", ".join(f"{name} ({version})" for name, version in others.items())
            yield Finding(
                severity="notice",
                code="other_version",
                queue=spec.name,
                summary=f"Consumers of another version than {__version__} serve the queue {spec.name}: {listed}.",
                consequence="Restart them after an upgrade, so that all work with the same rules.",
                facts={"consumers": others},
            )


def _unclaimable_jobs(spec: QueueSpec, alive: Sequence[Any]) -> Iterator[Finding]:
    """Find jobs that live Consumers cannot claim, rescue or settle."""
    jobs: dict[str, list[tuple[str, str]]] = {}
    for each in alive:
        for key, error in unclaimable_jobs(each):
            jobs.setdefault(key_text(key), []).append((each.name, error))
    if not jobs:
        return
    first, refused = next(iter(jobs.items()))
    by_all = any(len(found) >= len(alive) for found in jobs.values())
    yield Finding(
        severity="critical" if by_all else "warning",
        code="unclaimable_jobs",
        queue=spec.name,
        summary=(
            f"{number_text(len(jobs), 'job')} of the queue {spec.name} cannot be claimed by a live Consumer; "
            f"job {first} not by {refused[0][0]}: {refused[0][1].removesuffix('.')}."
        ),
        consequence=(
            "These jobs wait; all others run. Start a version of the program that can load them, or correct their "
            "rows or the constraint, trigger or policy that refuses the change."
        ),
        fixes=(f"sqlaqueue why {target_of(spec)} {shlex.quote(first)}",),
        facts={"jobs": [{"key": key, "consumers": dict(found)} for key, found in jobs.items()]},
    )


def _is_silent(examination: Examination, consumer: Any) -> bool:
    # One that has just started has not received its own heartbeat yet.
    return not consumer.listening and consumer.age >= examination.thresholds.not_listening_for.total_seconds()


def check_leftovers(examination: Examination) -> Iterator[Finding]:
    """Find entries of the crash journal and requests to cancel that Consumers should have deleted."""
    for spec in examination.specs:
        old = clock() - examination.thresholds.leftover_age
        journal, control = spec.side_tables.get(CRASH_JOURNAL), spec.side_tables.get(CONTROL)
        if journal is not None:
            entries = sa.and_(
                journal.c.queue == spec.name, journal.c.created_at < old, ~_is_alive(spec, journal.c.worker)
            )
            yield from _left_over(examination, spec, journal, entries)
        if control is not None:
            requests = sa.and_(control.c.queue == spec.name, control.c.key != PAUSE, control.c.created_at < old)
            yield from _left_over(examination, spec, control, requests)


def _left_over(
    examination: Examination, spec: QueueSpec, table: sa.Table, rows: sa.ColumnElement[bool]
) -> Iterator[Finding]:
    number = counted(examination.connection, sa.select(table.c.queue).where(rows))
    if not number:
        return
    fix = sql_text(examination.connection, sa.delete(table).where(rows))
    age = duration_text(examination.thresholds.leftover_age.total_seconds())
    if table.name == CRASH_JOURNAL:
        yield Finding(
            severity="notice",
            code="old_journal_entries",
            queue=spec.name,
            summary=f"{number_text(number, 'entry', 'entries')} of the crash journal older than {age} remain.",
            consequence=(
                "Their workers are dead, and pending jobs in them are run apart from others. Consumers delete them "
                "after a day; so none has run for long, or its maintenance fails."
            ),
            fixes=(fix,),
            facts={"entries": number},
        )
    else:
        yield Finding(
            severity="notice",
            code="old_cancellations",
            queue=spec.name,
            summary=f"{number_text(number, 'request')} to cancel a job older than {age} remain.",
            consequence=(
                "The jobs have ended, or no Consumer runs them. Consumers delete them after a day; so none has run for "
                "long, or its maintenance fails."
            ),
            fixes=(fix,),
            facts={"requests": number},
        )


def _is_alive(spec: QueueSpec, worker: sa.ColumnElement[Any]) -> sa.ColumnElement[bool]:
    table = spec.side_tables[CONSUMERS]
    mine = sa.and_(table.c.queue == spec.name, table.c.expires_at > clock(), table.c.name == worker)
    return sa.exists().where(mine).correlate_except(table)
