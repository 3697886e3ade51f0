"""Due jobs that do not run, the Consumers of a queue, and rows that nothing cleans up."""

from __future__ import annotations

import functools
import shlex
from collections.abc import Iterator, Sequence
from datetime import timedelta
from shlex import quote
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue._typing import AnySelect
from sqlaqueue._version import __version__
from sqlaqueue.admin.doctor.examination import (
    Examination,
    Finding,
    alive_text,
    at_most,
    counted,
    live_consumers,
    number_text,
    target_of,
    worker_command,
)
from sqlaqueue.admin.explain_job import messages_of
from sqlaqueue.admin.jobs import first_known
from sqlaqueue.admin.schedules import ScheduleInfo
from sqlaqueue.admin.schedules import schedules as read_schedules
from sqlaqueue.admin.state import (
    about_consumer,
    failing_consumers,
    has_leases,
    names_if_all_quiet,
    pause_moment,
    unclaimable_jobs,
)
from sqlaqueue.consumer.settings import make_settings
from sqlaqueue.consumer.statements import ConsumerStatements
from sqlaqueue.exc import SqlaqueueError
from sqlaqueue.flow_control.keys import flow_control
from sqlaqueue.postgresql.catalog import missing_tables, sees_all
from sqlaqueue.postgresql.checks_of import checks_of
from sqlaqueue.postgresql.facts import TableRead
from sqlaqueue.postgresql.faults import MIGRATION, tables_of
from sqlaqueue.postgresql.faults_of_indexes import index_faults
from sqlaqueue.postgresql.plans import disabled_plans, on_shards, whole_reads
from sqlaqueue.postgresql.side_tables import PAUSE, is_of_live_consumer
from sqlaqueue.postgresql.triggers import wakes
from sqlaqueue.postgresql.waits import behind_failed, miscounted
from sqlaqueue.queue.names import CONSUMERS, CONTROL, CRASH_JOURNAL
from sqlaqueue.queue.options import STATES
from sqlaqueue.queue.retry_policies import seconds
from sqlaqueue.queue.run import key_text
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.queue.versions import stopped_by, too_new, too_old
from sqlaqueue.schedules.recurrence import ScheduleTables
from sqlaqueue.sql.engine import schema_of
from sqlaqueue.sql.portable import clock, converted
from sqlaqueue.strategies.columns import same
from sqlaqueue.strategies.delete_returning import MessageTable
from sqlaqueue.strategies.update_status import waits_for_duplicate
from sqlaqueue.texts import duration_text, moment_text

_FIRST_JOBS = 10_000
"""Number of due jobs, the first in claim order, among which the oldest one is looked for."""


def check_due_jobs(examination: Examination) -> Iterator[Finding]:
    """Find due jobs of queues that are paused or have no Consumer, and those that have waited for long."""
    limits = examination.thresholds
    for spec in examination.specs:
        row: Any = examination.connection.execute(_due(examination, spec)).one()
        due, oldest = row.due, None if row.since is None else (row.now - row.since).total_seconds()
        if not due:
            continue
        jobs = "1 job is" if due == 1 else f"{number_text(due, 'job')} are"
        waits = f"{jobs} due{'' if oldest is None else f', the oldest for {duration_text(oldest)}'}"
        facts = {"due": due, "oldest_due": oldest}
        alive, target = live_consumers(examination, spec), target_of(spec)
        paused = pause_moment(spec)
        paused_at = None if paused is None else examination.connection.execute(paused).scalar()
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
                summary=f"No live Consumer works for the queue {spec.name}, and {waits}.",
                consequence="Its jobs do not run, unless a program claims them without a Consumer.",
                fixes=(worker_command(examination, spec),),
                facts=facts,
            )
        running = sum(len(each.running) + each.claimed for each in alive)
        if names := names_if_all_quiet(alive):
            yield Finding(
                severity="warning",
                code="all_quiet",
                queue=spec.name,
                summary=f"Every live Consumer of the queue {spec.name} was asked to be quiet, and {waits}.",
                consequence="They claim no jobs until they are asked to resume, or another one is started.",
                fixes=(f"sqlaqueue workers {target} --resume {quote(names[0])}",),
                facts={**facts, "consumers": names},
            )
            continue
        is_old = oldest is not None and oldest >= limits.oldest_due.total_seconds()
        # Under a held transaction running jobs read as pending.
        if alive and is_old and paused_at is None and due > running:
            yield _backlog(examination, spec, waits, {**facts, "consumers": len(alive), "running": running})


def _backlog(examination: Examination, spec: QueueSpec, waits: str, facts: dict[str, Any]) -> Finding:
    target, number = target_of(spec), facts["consumers"]
    held_back = " Limits, rates or an order may hold them back." if flow_control(spec) is not None else ""
    look = f"sqlaqueue stats {target}" if held_back else f"sqlaqueue workers {target}"
    if facts["running"]:
        consequence = "More jobs are enqueued than run."
        fixes: tuple[str, ...] = (worker_command(examination, spec, " --processes 4"), look)
    else:
        # More workers would fail in the same way.
        consequence = "No Consumer has claimed a job: if their claims fail, their log says why."
        fixes = (look, worker_command(examination, spec, " --processes 4"))
    return Finding(
        severity="warning",
        code="backlog",
        queue=spec.name,
        summary=f"{waits[0].upper()}{waits[1:]}, though {alive_text(number)}.",
        consequence=consequence + held_back,
        fixes=fixes,
        facts=facts,
    )


def _due(examination: Examination, spec: QueueSpec) -> AnySelect:
    """Return a SELECT of the number of due jobs, up to a limit, since when the oldest is due, and what time it is."""
    messages = messages_of(spec)
    if messages is None:
        waiting = [spec.in_state("pending")] if spec.has("status") else []
        order: Sequence[sa.Column[Any]] = spec.claim_order
    else:
        waiting, order = messages.of_pending_jobs(spec), messages.order
    moments = [spec.columns[role] for role in ("run_at", "created_at") if spec.has(role)]
    since = first_known(moments).label("since")
    jobs = sa.select(since).where(*waiting, *spec.due(spec.columns.get("run_at"))).order_by(*order)
    first = jobs.limit(_FIRST_JOBS).subquery("sqlaqueue_first")
    oldest = examination.moment(sa.func.min(first.c.since))
    columns: list[sa.ColumnElement[Any]] = [sa.func.count().label("due"), oldest.label("since"), clock().label("now")]
    return sa.select(*columns).select_from(first)


def check_table_versions(examination: Examination) -> Iterator[Finding]:
    """Find side tables that another version of sqlaqueue has migrated, or that were not migrated for this one."""
    connection = examination.connection
    for spec in examination.specs:
        tables = [table for table in tables_of(spec) if table is not spec.table]
        comments = checks_of(connection).table_comments(connection, tables)
        newer, older = too_new(comments), too_old(comments)
        text = newer or older
        if text is not None:
            yield Finding(
                severity="critical",
                code="table_version",
                queue=spec.name,
                summary=f"{text[0].upper()}{text[1:]}.",
                consequence=f"No Consumer of this version starts{', and those that run stop' if newer else ''}.",
                fixes=("pip install --upgrade sqlaqueue",) if newer else (MIGRATION,),
            )


def check_consumers(examination: Examination) -> Iterator[Finding]:
    """Find live Consumers that receive no notifications, cannot claim some jobs, or have another version."""
    for spec in examination.specs:
        alive = live_consumers(examination, spec)
        # One that has just started has not received its own heartbeat yet.
        old = examination.thresholds.not_listening_for
        # Only PostgreSQL notifies other processes.
        notifies = examination.other is None and wakes(spec)
        deaf = [each for each in alive if notifies and not each.listening and not about_consumer(each).quiet]
        silent = [each for each in deaf if each.now - each.created_at >= old]
        if silent:
            names = ", ".join(str(each.name) for each in silent)
            yield Finding(
                severity="warning",
                code="not_listening",
                queue=spec.name,
                summary=f"{len(silent)} of {len(alive)} live Consumers receive no notifications: {names}.",
                consequence=(
                    "They find new jobs by polling only. Connect them to the server itself instead of a pooler in "
                    "transaction mode, or disable notifications by QueueConfig(notify=False)."
                ),
                facts={"consumers": [each.name for each in silent]},
            )
        yield from _failing(spec, alive)
        yield from _unclaimable_jobs(spec, alive)
        others = {each.name: each.version for each in alive if each.version != __version__}
        if others:
            listed = ", ".join(f"{name} ({version})" for name, version in others.items())
            stop = [name for name, version in others.items() if stopped_by(spec.side_tables.values(), version)]
            consequence = "Restart them after an upgrade, so that all work with the same rules."
            if stop:
                consequence = f"{', '.join(stop)} cannot use the tables of {__version__}: restart with a newer version."
            yield Finding(
                severity="warning" if stop else "notice",
                code="other_version",
                queue=spec.name,
                summary=f"Consumers of another version than {__version__} work for the queue {spec.name}: {listed}.",
                consequence=consequence,
                facts={"consumers": others},
            )


def _failing(spec: QueueSpec, alive: Sequence[Any]) -> Iterator[Finding]:
    failing = failing_consumers(alive)
    if not failing:
        return
    first, names = failing[0], ", ".join(each.name for each in failing)
    yield Finding(
        severity="critical" if len(failing) == len(alive) else "warning",
        code="claims_fail",
        queue=spec.name,
        summary=(
            f"Every claim of {len(failing)} of {len(alive)} live Consumers of the queue {spec.name} fails, since "
            f"{moment_text(first.since)}: {names}."
        ),
        consequence=f"They run no jobs. {first.name} says: {first.error.removesuffix('.')}.",
        facts={
            "consumers": [
                {"name": each.name, "failures": each.failures, "since": each.since, "error": each.error}
                for each in failing
            ]
        },
    )


def _unclaimable_jobs(spec: QueueSpec, alive: Sequence[Any]) -> Iterator[Finding]:
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
            "These jobs wait; all other jobs run. Start a version of the program that can load them, or correct their "
            "rows or the constraint, trigger or policy that refuses the change."
        ),
        fixes=(f"sqlaqueue why {target_of(spec)} {shlex.quote(first)}",),
        facts={"jobs": [{"key": key, "consumers": dict(found)} for key, found in jobs.items()]},
    )


def check_leftovers(examination: Examination) -> Iterator[Finding]:
    """Find entries of the crash journal and requests to cancel that Consumers should have deleted."""
    for spec in examination.specs:
        old = examination.ago(examination.thresholds.leftover_age)
        journal, control = spec.side_tables.get(CRASH_JOURNAL), spec.side_tables.get(CONTROL)
        if journal is not None:
            consumers = spec.side_tables[CONSUMERS]
            alive = (
                consumers.c.queue == spec.name,
                consumers.c.expires_at > clock(),
                consumers.c.name == journal.c.worker,
            )
            is_alive = sa.exists().where(*alive).correlate_except(consumers)
            entries = sa.and_(journal.c.queue == spec.name, journal.c.created_at < old, ~is_alive)
            yield from _left_over(examination, spec, journal, entries)
        if control is not None:
            asked = control.c.key != PAUSE, ~is_of_live_consumer(spec)
            requests = sa.and_(control.c.queue == spec.name, *asked, control.c.created_at < old)
            yield from _left_over(examination, spec, control, requests)


def _left_over(
    examination: Examination, spec: QueueSpec, table: sa.Table, rows: sa.ColumnElement[bool]
) -> Iterator[Finding]:
    number = counted(examination.connection, sa.select(table.c.queue).where(rows))
    if not number:
        return
    age = duration_text(examination.thresholds.leftover_age.total_seconds())
    in_journal = table.name == CRASH_JOURNAL
    if in_journal:
        what = f"{number_text(number, 'entry', 'entries')} of the crash journal"
        cause = "Their workers are dead, and pending jobs in them are run apart from other jobs."
    else:
        what = f"{number_text(number, 'request')} to cancel a job"
        cause = "The jobs have ended, or no Consumer runs them."
    yield Finding(
        severity="notice",
        code="old_journal_entries" if in_journal else "old_cancellations",
        queue=spec.name,
        summary=f"{what} older than {age} remain.",
        consequence=f"{cause} Consumers delete them after a day; so none has run for long, or its maintenance fails.",
        fixes=(examination.text(sa.delete(table).where(rows)),),
        facts={"entries" if in_journal else "requests": number},
    )


_VERY_LARGE = 100
"""How many times as large as a small table one is for which the finding is critical."""

_STALE = 0.2
"""The share of rows that were written since the statistics were made, from which on these are out of date."""


def check_claim_plan(examination: Examination) -> Iterator[Finding]:
    """Find claims whose plan reads or sorts a table that is not small, for a reason that can be removed.

    The planner of a coordinator of Citus says nothing of the shards, which is a finding as well.

    A planner that knows better may read a table though there is an index: for instance if no job is due by far.
    """
    small = examination.thresholds.small_table
    for spec in examination.specs:
        claim = claim_of(spec)
        if claim is None:
            continue
        if on_shards(examination.connection, spec):
            yield Finding(
                severity="notice",
                code="on_shards",
                queue=spec.name,
                summary=(
                    f"The jobs of {spec.name} are on shards of Citus, whose dead rows, statistics and plans are not "
                    "known."
                ),
                consequence="What slows down the claims there is not found.",
            )
            continue
        reads = whole_reads(examination.connection, claim, spec.strategy.locked_tables(spec))
        large = sorted((read for read in reads if read.rows > small), key=lambda read: -read.rows)
        reason, fix = _reason(examination, spec, large) if large else ("", "")
        if not reason:
            continue
        listed = " and ".join(f"{read.table}, of about {read.rows} rows" for read in large)
        how = "reads" if any(read.how == "scan" for read in large) else "sorts"
        yield Finding(
            severity="critical" if large[0].rows > small * _VERY_LARGE else "warning",
            code="claim_reads_table",
            queue=spec.name,
            summary=f"Each claim {how} the whole table {listed}: {reason}.",
            consequence="The more jobs there are, the longer each claim takes, and the busier is the server.",
            fixes=(fix,) if fix else (),
            facts={"tables": [read.table for read in large], "rows": large[0].rows},
        )


def _reason(examination: Examination, spec: QueueSpec, reads: Sequence[TableRead]) -> tuple[str, str]:
    """Return why the planner uses no index of the claim, and the fix; empty texts if there is nothing to repair."""
    connection = examination.connection
    faults = [each for each in index_faults(connection, spec) if each.is_of_claims and each.state != "leftover"]
    if faults:
        names = " and ".join(f"the index {each.name} is {each.state}" for each in faults)
        return names, "\n".join(each.fixes[0] for each in faults if each.state != "building")
    off = disabled_plans(connection)
    if off:
        names = " and ".join(each.name for each in off)
        return f"{names} is off for this session", "\n".join(each.repair for each in off if each.repair)
    stale = [each.table for each in reads if each.analyzed_at is None or each.changed > _STALE * each.rows]
    if stale:
        listed = ", ".join(stale)
        return f"the statistics of {listed} are missing or out of date", f"ANALYZE {listed};"
    return "", ""


@functools.lru_cache(maxsize=128)
def claim_of(spec: QueueSpec) -> object | None:
    """Return the claim of a Consumer; None if the queue can have none."""
    try:
        settings = make_settings(
            spec.model,
            handlers=None,
            batch_size=None,
            concurrency=1,
            poll_interval=1,
            lease=None,
            timeout=None,
            grace=30,
            retry=None,
            worker_name=None,
            batch=False,
        )
    except SqlaqueueError:
        return None
    claim: object = ConsumerStatements(settings).claim
    return claim


def check_leases(examination: Examination) -> Iterator[Finding]:
    """Find expired leases, those that last too long, and running jobs that have none."""
    for spec in filter(has_leases, examination.specs):
        yield from _expired(examination, spec)
        yield from _too_long(examination, spec)
        yield from _without_lease(examination, spec)


def _expired(examination: Examination, spec: QueueSpec) -> Iterator[Finding]:
    expires = spec.columns["lease_expires_at"]
    old = sa.select(expires).where(
        spec.in_state("processing"),
        expires <= examination.ago(examination.thresholds.lease_expired_for),
        ~waits_for_duplicate(spec),
    )
    first = at_most(old.order_by(expires), "sqlaqueue_expired")
    expired_at = examination.moment(sa.func.min(first.c[expires.key]))
    found: AnySelect = sa.select(sa.func.count(), expired_at, clock()).select_from(first)
    row: Any = examination.connection.execute(found).one()
    number, since, now = row
    if not number:
        return
    age = (now - since).total_seconds()
    alive = len(live_consumers(examination, spec))
    target = target_of(spec)
    whose = f"though {alive_text(alive)}" if alive else "and no Consumer is alive"
    then = "The log of the Consumers shows why they do not." if alive else "A Consumer rescues them when it runs."
    yield Finding(
        severity="critical",
        code="expired_leases",
        queue=spec.name,
        summary=(
            f"The leases of {number_text(number, 'job')} have expired, the first {duration_text(age)} ago, {whose}."
        ),
        consequence=f"Their workers died, and the jobs do not run until they are rescued. {then}",
        fixes=(f"sqlaqueue rescue {target}", *(() if alive else (worker_command(examination, spec),))),
        facts={"jobs": number, "seconds": age, "consumers": alive},
    )


def _too_long(examination: Examination, spec: QueueSpec) -> Iterator[Finding]:
    expires, lease = spec.columns["lease_expires_at"], timedelta(seconds=seconds(spec.config.lease))
    latest = examination.later(lease + examination.thresholds.lease_beyond)
    late = sa.and_(spec.in_state("processing"), expires > latest)
    rows = at_most(sa.select(expires).where(late).order_by(expires.desc()), "sqlaqueue_late")
    last = examination.moment(sa.func.max(rows.c[expires.key]))
    number, until = examination.connection.execute(sa.select(sa.func.count(), last).select_from(rows)).one()
    if number:
        update = sa.update(spec.table).where(late).values({expires: clock()})
        yield Finding(
            severity="warning",
            code="long_leases",
            queue=spec.name,
            summary=(
                f"{number_text(number, 'running job')} with a lease that lasts much longer than the "
                f"{duration_text(lease.total_seconds())} of QueueConfig(lease=...), the last one until "
                f"{moment_text(until)}."
            ),
            consequence=(
                "If no worker runs them, plain SQL has set them, perhaps by a role that may insert all columns: "
                "nothing rescues them before, and they occupy places of limits. The fix has them rescued soon; if a "
                "worker does run them, raise the threshold lease_beyond instead."
            ),
            fixes=(examination.text(update),),
            facts={"jobs": number, "until": until.isoformat()},
        )


def _without_lease(examination: Examination, spec: QueueSpec) -> Iterator[Finding]:
    stuck = sa.and_(spec.in_state("processing"), spec.columns["lease_expires_at"].is_(None))
    number = counted(examination.connection, sa.select(*spec.keys).where(stuck))
    if number:
        update = sa.update(spec.table).where(stuck).values({spec.columns["status"]: spec.literal("pending")})
        yield Finding(
            severity="critical",
            code="runs_without_lease",
            queue=spec.name,
            summary=f"{number_text(number, 'job')} in the state processing, without a lease: plain SQL has set it.",
            consequence="No worker runs them, and no Consumer rescues them.",
            fixes=(examination.text(update),),
            facts={"jobs": number},
        )


def check_messages(examination: Examination) -> Iterator[Finding]:
    """Find pending jobs without a message, and messages without a pending job; if asked, as it reads all jobs."""
    for spec in examination.specs if examination.deep else []:
        table = messages_of(spec)
        if table is not None:
            yield from _jobs_without(examination, spec, table)
            yield from _messages_without(examination, spec, table)


def _jobs_without(examination: Examination, spec: QueueSpec, messages: MessageTable) -> Iterator[Finding]:
    its = sa.exists().where(same(messages.jobs, spec.keys), *messages.waits).correlate(spec.table)
    rows = sa.select(*spec.keys).where(spec.in_state("pending"), ~its)
    number = counted(examination.connection, rows)
    if not number:
        return
    fix = f"sqlaqueue reconcile {target_of(spec)}"
    if spec.strategy.insert_new_messages(spec, []) is not None:
        # The application inserts its own messages, and reconcile() only deletes some.
        names = [*(column.key for column in messages.jobs), *messages.waiting]
        insert = sa.insert(messages.table).from_select(names, rows.add_columns(*messages.waiting.values()))
        fix = examination.text(insert)
    yield Finding(
        severity="critical",
        code="jobs_without_message",
        queue=spec.name,
        summary=f"{number_text(number, 'pending job')} of {spec.table.fullname} without a message.",
        consequence="They are not claimed. Writes have bypassed the triggers, or the program inserted no message.",
        fixes=(fix,),
        facts={"jobs": number},
    )


def _messages_without(examination: Examination, spec: QueueSpec, messages: MessageTable) -> Iterator[Finding]:
    # In a CASE as in MessageTable: the planner should not search for pending jobs first.
    its = sa.exists().where(same(messages.jobs, spec.keys), sa.case((spec.in_state("pending"), sa.true())))
    rows = sa.select(*messages.ids).where(*messages.waits, ~its.correlate(messages.table), sees_all(spec.table))
    number = counted(examination.connection, rows)
    if number:
        yield Finding(
            severity="warning",
            code="messages_without_job",
            queue=spec.name,
            summary=f"{number_text(number, 'message')} of {messages.table.fullname} without a pending job.",
            consequence="Each claim reads them, and takes longer.",
            fixes=(f"sqlaqueue reconcile {target_of(spec)}",),
            facts={"messages": number},
        )


def check_waiting(examination: Examination) -> Iterator[Finding]:
    """Find jobs whose count is wrong, and those that wait for failed ones; if asked, as it reads what they wait for."""
    for spec in examination.specs if examination.deep else []:
        if not spec.waits:
            continue
        number = counted(examination.connection, miscounted(spec))
        if number:
            yield Finding(
                severity="critical",
                code="miscounted_jobs",
                queue=spec.name,
                summary=f"{number_text(number, 'job')} of {spec.table.fullname} with a wrong count of awaited jobs.",
                consequence="They wait for nothing, or run too early. Writes have bypassed the triggers.",
                fixes=(f"sqlaqueue reconcile {target_of(spec)}",),
                facts={"jobs": number},
            )
        for wait in spec.waits:
            number = counted(examination.connection, behind_failed(wait)) if wait.on_failure == "block" else 0
            if number:
                yield Finding(
                    severity="warning",
                    code="waits_for_failed",
                    queue=spec.name,
                    summary=(
                        f"{number_text(number, 'job')} of {spec.table.fullname} behind jobs in {wait.name} that have "
                        "failed or were cancelled."
                    ),
                    consequence="No Consumer runs them until those are requeued and have completed.",
                    # Which ones to requeue is for people to say: the list may have failed jobs that nothing waits for.
                    fixes=(f"sqlaqueue jobs {target_of(wait.awaited)} --state failed --state cancelled",),
                    facts={"jobs": number, "relationship": wait.name},
                )


def check_status_values(examination: Examination) -> Iterator[Finding]:
    """Find jobs whose status is not one of the queue's values; if asked, as it reads all jobs."""
    for spec in examination.specs if examination.deep else []:
        if not spec.has("status"):
            continue
        status = spec.columns["status"]
        known = [state for state in STATES if getattr(spec.config.states, state) is not None]
        unknown: sa.ColumnElement[bool] = sa.or_(~spec.in_state(*known), status.is_(None))
        first = at_most(sa.select(converted(status, sa.Text()).label("status")).where(unknown))
        found = sa.select(first.c.status, sa.func.count()).group_by(first.c.status).order_by(first.c.status)
        rows: Any = examination.connection.execute(found).all()
        number, values = sum(count for _, count in rows), [value for value, _ in rows]
        if not number:
            continue
        end = next((state for state in ("failed", "cancelled", "completed") if state in known), "pending")
        update = sa.update(spec.table).where(unknown).values({status: spec.literal(end)})
        listed = ", ".join("NULL" if value is None else repr(value) for value in values)
        yield Finding(
            severity="warning",
            code="unknown_status",
            queue=spec.name,
            summary=f"{number_text(number, 'job')} of {spec.table.fullname} with an unknown status: {listed}.",
            consequence=(
                "They never run and are never deleted. Correct them, or name the value in QueueConfig(states=...). The "
                f"fix makes them {end}."
            ),
            fixes=(examination.text(update),),
            facts={"jobs": number, "values": values},
        )


def check_schedules(examination: Examination) -> Iterator[Finding]:
    """Find schedules that nothing fires, that cannot be fired, and whose queue nothing serves."""
    connection = examination.connection
    for spec in examination.specs:
        tables = ScheduleTables.look_up(spec)
        if _lacks(examination, [tables.schedules, tables.ticks]):
            continue
        # Closing the session does not end the caller's transaction.
        with Session(connection, autoflush=False) as session:
            stored = [each for each in read_schedules(session, spec.model) if each.queue == spec.name]
        active = [each for each in stored if each.paused_at is None or each.run_requested_at is not None]
        for each in active:
            yield from _of_schedule(each, target_of(spec))
        if active and not live_consumers(examination, spec):
            names = ", ".join(repr(each.name) for each in active)
            yield Finding(
                severity="notice",
                code="unserved_schedule",
                queue=spec.name,
                summary=f"No live Consumer works for the queue {spec.name}, for which there are schedules: {names}.",
                consequence="The jobs that they enqueue do not run until a Consumer is started.",
                fixes=(worker_command(examination, spec),),
                facts={"schedules": [each.name for each in active]},
            )


def _lacks(examination: Examination, tables: Sequence[sa.Table]) -> bool:
    connection = examination.connection
    if examination.other is None:
        return bool(missing_tables(connection, tables))
    inspector = sa.inspect(connection)
    return not all(inspector.has_table(table.name, schema_of(connection, table)) for table in tables)


def _of_schedule(schedule: ScheduleInfo, target: str) -> Iterator[Finding]:
    if schedule.last_error is not None:
        yield Finding(
            severity="critical",
            code="schedule_error",
            queue=schedule.queue,
            summary=f"The schedule {schedule.name!r} could not be fired: {schedule.last_error}.",
            consequence="It enqueues no jobs. Correct what the error names, and then let it be fired again.",
            fixes=(f"sqlaqueue schedules run {target} {quote(schedule.name)}",),
            facts={"schedule": schedule.name, "error": schedule.last_error},
        )
    elif schedule.late is not None:
        late = duration_text(schedule.late.total_seconds())
        yield Finding(
            severity="critical",
            code="late_schedule",
            queue=schedule.queue,
            summary=f"The schedule {schedule.name!r} has been overdue for {late}.",
            consequence=(
                "No process fires it, and its jobs are not enqueued. Start a Consumer with schedules=[...], or a "
                "Scheduler, that has imported its class."
            ),
            fixes=(f"sqlaqueue scheduler {target if schedule.factory is None else 'MODULE:SCHEDULES'}",),
            facts={"schedule": schedule.name, "late": schedule.late.total_seconds()},
        )
