"""The pages of queues: all of them, one, its claim, its health, all schedules, and all failures."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

import anyio
from markupsafe import Markup
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from starlette.background import BackgroundTask
from starlette.responses import Response

from sqlaqueue.admin.doctor.doctor import doctor
from sqlaqueue.admin.doctor.examination import PLACEHOLDER, SEVERITIES, Finding, target_of
from sqlaqueue.admin.schedules import ScheduleInfo
from sqlaqueue.admin.state import AboutConsumer, KeyAtLimit, about_consumer, failing_consumers
from sqlaqueue.queue.run import key_text
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.web.charts import LONG_PERIOD, Bar, Range, bar_chart, history_charts, range_chart, sparkline
from sqlaqueue.web.context import PageContext, SharedResult, both, shared_result
from sqlaqueue.web.data import queues as data
from sqlaqueue.web.data.failures import ErrorGroup, Failures, group_filter
from sqlaqueue.web.data.history import History
from sqlaqueue.web.data.past import DAY, MINUTES, SPANS, Durations, Percentiles, Throughput
from sqlaqueue.web.data.queues import COUNT_LIMIT
from sqlaqueue.web.data.reader import Memory, Part, Unavailable, attempt_part, problem_text
from sqlaqueue.web.errors import BadRequest, NotFound, PageError
from sqlaqueue.web.links import listed_url
from sqlaqueue.web.rendering import clock_text, duration, short
from sqlaqueue.web.search import suggestions
from sqlaqueue.web.settings import Action, Queue

CLAIM_SHARED_FOR = 5.0
"""Seconds for which a measured claim is shown, so that many viewers do not claim many times."""

_TIMEOUT = 2.0


@dataclass(frozen=True, kw_only=True)
class _Measured:
    plan: Part[data.ClaimPlan | Unavailable]
    findings: Part[Sequence[Finding]]
    """What is wrong with the indexes of claims."""
    problem: str = ""


async def claim(context: PageContext) -> Response:
    shown = context.queue
    measure = functools.partial(_measure, context, shown)
    measured = await shared_result(context.state, ("claim", shown.name), CLAIM_SHARED_FOR, measure)

    read_server = functools.partial(data.read_server, names_holders=context.access.sees_all)
    tables, horizon = await context.database.read(read_server, shown.spec)
    return context.render(
        "claim.html",
        queue=shown,
        measured=measured.value,
        measured_at=measured.made_at,
        verdict=verdict_of(measured.value),
        tables=tables,
        horizon=horizon,
    )


def verdict_of(measured: _Measured) -> tuple[str, str] | None:
    """Return what the plan of a claim means, with its severity or ``alive``; None if there is no plan."""
    plan, findings = measured.plan.value, measured.findings.value or ()
    if plan is None or isinstance(plan, Unavailable):
        return None
    if findings:
        worst = min((finding.severity for finding in findings), key=SEVERITIES.index)
        return worst, "An index of claims is missing or damaged, so it reads more than it has to. The repair is above."
    if plan.whole_tables:
        names = " and ".join(plan.whole_tables)
        reason = "no index is missing, so this is right only if hardly any row is due."
        return "warning", f"It reads the whole table {names}; {reason}"
    if not plan.is_measured:
        return "alive", "It would find its jobs by index. It was not executed, so its time is not known."
    used, milliseconds = plan.plan.root.buffers.used, plan.plan.execution_milliseconds
    return "alive", f"It finds its jobs by index: {used:,} buffers in {milliseconds:.1f} ms."


async def _measure(context: PageContext, shown: Queue) -> _Measured:
    database = context.database
    findings: Part[Sequence[Finding]] = await database.read(attempt_part, data.read_index_findings, shown.spec)
    try:
        # It locks rows for a moment, which a read-only transaction may not do.
        plan = await database.read(data.measure_claim, shown.spec, statement_timeout=_TIMEOUT, read_only=False)
        return _Measured(plan=Part(plan), findings=findings)
    except PageError:
        raise
    except DBAPIError as error:
        problem = problem_text(error)
    planned = await database.read(attempt_part, data.plan_claim, shown.spec)
    return _Measured(plan=planned, findings=findings, problem=problem)


FINDINGS_SHARED_FOR = 10.0
"""Seconds for which findings are shown, so that many viewers do not each send a hundred statements."""

DEEP_SHARED_FOR = 60.0


async def health(context: PageContext) -> Response:
    given = context.request.query_params.get("deep", "0")
    if given not in {"0", "1"}:
        raise BadRequest(f"deep={given[:100]}: this is neither 0 nor 1.", "Use deep=1 to read all jobs as well.")
    is_deep = given == "1"
    found = await examined(context, is_deep=is_deep)
    findings = [shown_finding(context, finding) for finding in found.value]
    failed = await _failed_jobs(context, DAY.length, DEEP_SHARED_FOR if is_deep else FINDINGS_SHARED_FOR)
    groups = groups_of(findings)
    return context.render(
        "health.html",
        # A queue of which nothing else is wrong has a group as well.
        groups=groups | {each.queue.name: groups.get(each.queue.name, []) for each in failed if each.found},
        failed={each.queue.name: each for each in failed},
        not_counted=[each for each in failed if each.problem],
        shows_kinds=lambda queue: not context.settings.is_redacted(queue.spec, "last_error"),
        queue_of=context.settings.queues.get,
        counts={severity: sum(each.severity == severity for each in findings) for severity in SEVERITIES},
        examined_at=found.made_at,
        is_deep=is_deep,
        blocked_jobs_of=lambda finding: _blocked_jobs(context, finding),
        url_of={queue.name: context.url("queue", queue=queue) for queue in context.queues}.get,
    )


@dataclass(frozen=True, kw_only=True)
class FailedJobs:
    """The failed jobs of a queue."""

    queue: Queue
    found: Failures | None
    """None if there are none, or if that is not known."""
    problem: str = ""
    """Why it is not known."""


async def _failed_jobs(context: PageContext, within: timedelta | None, seconds: float) -> Sequence[FailedJobs]:
    """Return the failed jobs of the queues that the user sees, or as they were some seconds ago."""
    names = tuple(queue.name for queue in context.queues)

    async def read() -> Sequence[FailedJobs]:
        found: list[FailedJobs] = []
        async with anyio.create_task_group() as group:
            for queue in context.queues:
                group.start_soon(_read_failed, context, queue, within, found)
        return sorted(found, key=lambda each: names.index(each.queue.name))

    return (await shared_result(context.state, ("failed", names, within, seconds), seconds, read)).value


async def _read_failed(context: PageContext, queue: Queue, within: timedelta | None, found: list[FailedJobs]) -> None:
    try:
        part: Part[Failures | Unavailable] = await context.database.read(
            attempt_part, data.read_failures_of, queue.spec, memory_of(context), within
        )
        value, problem = part.value, part.problem
    except (PageError, SQLAlchemyError) as error:
        value, problem = None, error.text if isinstance(error, PageError) else problem_text(error)
    failed = value if isinstance(value, Failures) and value.number else None
    problem = value.reason if isinstance(value, Unavailable) else problem
    found.append(FailedJobs(queue=queue, found=failed, problem=problem))


MOST_GROUPS = 100
"""The number of groups that the page of failures shows; the page of a queue shows the first ten."""


async def failures(context: PageContext) -> Response:
    """Show the failed jobs of all queues in groups: those first that have failed within the last hour."""
    found = await _failed_jobs(context, None, FINDINGS_SHARED_FOR)
    hidden = [each for each in found if context.settings.is_redacted(each.queue.spec, "last_error")]
    shown = [each for each in found if each not in hidden]
    rows = [(each.queue, group) for each in shown if each.found for group in each.found.groups]
    rows.sort(key=lambda row: (-row[1].last_hour, -row[1].number))
    return context.render(
        "failures.html",
        rows=rows[:MOST_GROUPS],
        left_out=max(0, len(rows) - MOST_GROUPS),
        capped=[each for each in shown if each.found and each.found.is_capped],
        of_attempts=[each for each in shown if each.found and each.found.of_attempts],
        not_read=[each for each in shown if each.problem],
        hidden=hidden,
        trend=trend,
        group_fields=group_fields,
        group_actions=functools.partial(group_actions, context),
    )


def trend(group: ErrorGroup) -> Markup | None:
    """Return a bar for each hour of the last day; None if it is not known when the jobs have failed."""
    if group.newest is None:
        return None
    return sparkline(group.hours, title=f"{sum(group.hours):,} within the last {len(group.hours)} hours")


def group_fields(group: ErrorGroup, state: str = "failed") -> list[tuple[str, str]]:
    return group_filter(group.kind, group.message, state)


def group_actions(context: PageContext, queue: Queue, group: ErrorGroup) -> list[tuple[str, str, str]]:
    """Return the actions on all jobs of a group: a label, the URL of the preview, and what it does."""
    retries = "Cancel the pending jobs whose last attempt has failed with this error"
    offered: list[tuple[Action, str, str, str]] = [
        ("requeue", "failed", "Requeue…", "Make them pending again, immediately or spread over some time"),
        ("purge", "failed", "Delete…", "Delete these failed jobs"),
        ("cancel", "pending", "Cancel retries…", retries),
    ]

    def url(action: str, state: str) -> str:
        fields = [("action", action), ("all", "1"), *group_fields(group, state)]
        return context.url("confirm", queue=queue, query=fields)

    return [(label, url(action, state), title) for action, state, label, title in offered if context.may(action, queue)]


def groups_of(findings: Sequence[Finding]) -> dict[str | None, list[Finding]]:
    groups: dict[str | None, list[Finding]] = {}
    for finding in sorted(findings, key=lambda each: SEVERITIES.index(each.severity)):
        groups.setdefault(finding.queue, []).append(finding)
    return {queue: groups[queue] for queue in sorted(groups, key=lambda queue: queue is not None)}


async def examined(context: PageContext, *, is_deep: bool = False) -> SharedResult[Sequence[Finding]]:
    """Return what the doctor finds in the queues that the user sees, or has found some seconds ago."""
    names = tuple(queue.name for queue in context.queues)
    models = [queue.model for queue in context.queues]

    async def examine() -> Sequence[Finding]:
        # Of these queues only: a finding may name jobs, keys and texts of its queue.
        run = functools.partial(doctor, deep=is_deep)
        findings: Sequence[Finding] = await context.database.read(run, *models) if models else []
        context.attention.remember("critical", sum(finding.severity == "critical" for finding in findings))
        return findings

    seconds = DEEP_SHARED_FOR if is_deep else FINDINGS_SHARED_FOR
    return await shared_result(context.state, ("health", names, is_deep), seconds, examine)


_HIDDEN = "(hidden)"

UNCLAIMABLE = "unclaimable_jobs"
"""The code of the finding that names jobs."""


_OF_OTHERS: dict[str, str] = {
    "idle_in_transaction": "A session that is idle in a transaction keeps dead rows.",
    "long_transaction": "A session with a long transaction keeps dead rows.",
    "prepared_transaction": "A prepared transaction keeps dead rows.",
    "replication_slot": "A replication slot keeps dead rows.",
    "standby_feedback": "A standby keeps dead rows.",
    "hidden_sessions": "The role of the dashboard may not see what some sessions of other roles do.",
    "notification_queue_full": "The server's notification queue is nearly full.",
    "blocked_table": "A session has locked a table of this queue, and other sessions wait for it.",
}
"""The findings that name sessions, with what they say to readers who do not see all queues."""

_ASK = "Which one is shown only to readers who see all queues."


def _without_sessions(finding: Finding) -> Finding:
    """Return a finding without the sessions of other applications, and without the commands that end them."""
    return replace(
        finding,
        summary=_OF_OTHERS[finding.code],
        consequence=f"{finding.consequence} {_ASK}".strip(),
        fixes=(),
        facts={},
    )


def shown_finding(context: PageContext, finding: Finding) -> Finding:
    """Return a finding as it is shown: with repairs that can be pasted, and without what the reader may not see."""
    if finding.code in _OF_OTHERS and not context.access.sees_all:
        return _without_sessions(finding)
    fixes = tuple(fix for fix in finding.fixes if PLACEHOLDER not in fix)
    if len(fixes) < len(finding.fixes):
        of_worker = any(fix.startswith("sqlaqueue worker ") for fix in finding.fixes if fix not in fixes)
        start = " Start a worker with the function that handles its jobs: no heartbeat names it." if of_worker else ""
        finding = replace(finding, fixes=fixes, consequence=f"{finding.consequence}{start}".strip())
    queue = context.settings.queues.get(finding.queue or "")
    if queue is None or not context.settings.is_redacted(queue.spec, "last_error"):
        return finding
    summary, consequence = finding.summary, finding.consequence
    # The longest first: one may be a part of another.
    for error in sorted(_errors_in(finding.facts), key=len, reverse=True):
        summary, consequence = summary.replace(error, _HIDDEN), consequence.replace(error, _HIDDEN)
    jobs = finding.facts["jobs"] if finding.code == UNCLAIMABLE else ()
    named = [{**job, "consumers": dict.fromkeys(job["consumers"], _HIDDEN)} for job in jobs]
    return replace(finding, summary=summary, consequence=consequence, facts={"jobs": named})


def _errors_in(facts: Mapping[str, Any]) -> set[str]:
    """Return the texts of errors in the facts of a finding, as its sentences have them."""
    consumers, jobs = facts.get("consumers"), facts.get("jobs")
    found = [facts.get("error")]
    found += [each.get("error") for each in consumers if isinstance(each, dict)] if isinstance(consumers, list) else []
    found += [error for each in jobs for error in each["consumers"].values()] if isinstance(jobs, list) else []
    return {str(error).removesuffix(".") for error in found if error} - {""}


def _blockers(context: PageContext, queue: Queue, consumers: Part[Sequence[Any]]) -> data.Blockers:
    """Return what blocks a queue, without the texts of errors if they are redacted."""
    is_redacted = context.settings.is_redacted(queue.spec, "last_error")
    return data.blockers_of(consumers.value or (), lambda error: _HIDDEN if is_redacted else error)


def _blocked_jobs(context: PageContext, finding: Finding) -> tuple[Queue, Sequence[data.BlockedJob]] | None:
    """Return the jobs that a finding is about, for their links; None for other findings."""
    queue = context.settings.queues.get(finding.queue or "")
    if queue is None or finding.code != UNCLAIMABLE:
        return None
    jobs = [
        data.BlockedJob(key=each["key"], error=next(iter(each["consumers"].values())), consumers=[*each["consumers"]])
        for each in finding.facts["jobs"]
    ]
    return queue, jobs


@dataclass(frozen=True, kw_only=True)
class Worker:
    """A Consumer, alive or dead."""

    queue: Queue
    row: Any
    """See :func:`sqlaqueue.admin.state.workers`."""
    left: Sequence[str] | None = None
    """The keys of jobs that are still claimed under its name, if it is dead and that is known."""

    @property
    def name(self) -> str:
        return str(self.row.name or f"{self.row.host}:{self.row.pid}")

    @property
    def about(self) -> AboutConsumer:
        return about_consumer(self.row)

    @property
    def running(self) -> list[str]:
        return [key_text(key) for key in self.row.running if isinstance(key, list) and key]

    @property
    def is_failing(self) -> bool:
        return bool(failing_consumers([self.row]))


async def workers(context: PageContext) -> Response:
    found, problems = await workers_of(context)
    return context.render(
        "workers.html",
        alive=[each for each in found if each.row.is_alive],
        dead=[each for each in found if not each.row.is_alive],
        problems=problems,
    )


async def workers_of(context: PageContext) -> tuple[list[Worker], list[str]]:
    """Return the Consumers of the queues that the user sees, and what cannot be read."""
    found: list[Worker] = []
    problems: list[str] = []
    # Each in a session of its own: a queue that waits for a lock does not delay the others.
    async with anyio.create_task_group() as group:
        for queue in context.queues:
            group.start_soon(_read_workers, context, queue, found, problems)
    found.sort(key=lambda each: (each.row.host, each.row.pid, each.queue.name))
    return found, list(dict.fromkeys(problems))


async def _read_workers(context: PageContext, queue: Queue, found: list[Worker], problems: list[str]) -> None:
    try:
        part = await context.database.read(attempt_part, data.read_workers, queue.spec)
    except (PageError, SQLAlchemyError) as error:
        text = f"{error.text} {error.advice}".strip() if isinstance(error, PageError) else problem_text(error)
        problems.append(f"{queue.name}: {text}")
        return
    if part.value is None:
        problems.append(f"{queue.name}: {part.problem}")
        return
    left = part.value.left
    if context.settings.is_redacted(queue.spec, "claimed_by"):
        left = None
    found += [
        Worker(queue=queue, row=row, left=None if row.is_alive or left is None else left.get(row.name))
        for row in part.value.rows
    ]


async def worker_of(context: PageContext, name: str, given: str) -> tuple[Worker, list[Worker]]:
    """Return a live Consumer that may be asked for something, by its queue and its id, and the other live ones."""
    queue = next((each for each in context.queues if each.name == name), None)
    if queue is None:
        raise NotFound("There is no such queue, or you have no access to it.", "Choose a Consumer from the list.")
    context.require("workers", queue)
    found = await context.database.read(data.read_workers, queue.spec)
    alive = [Worker(queue=queue, row=row) for row in found.rows if row.is_alive]
    chosen = next((each for each in alive if each.row.id == given), None)
    if chosen is None:
        raise NotFound("There is no such live Consumer.", "It may have ended; look at the list again.")
    return chosen, [each for each in alive if each is not chosen]


async def schedules(context: PageContext) -> Response:
    found, problems = await schedules_of(context)
    return context.render(
        "schedules.html",
        schedules=sorted(found, key=lambda each: (each.name, each.queue)),
        problems=list(dict.fromkeys(problems)),
        queue_of=context.settings.queues,
        can_add=any(context.may("schedule", each) and context.may("enqueue", each) for each in context.queues),
        next_ticks=lambda schedule: schedule.next_ticks(3),
        values_of=lambda schedule: _values(context, schedule),
        error_of=lambda schedule: _error(context, schedule),
    )


async def schedules_of(context: PageContext) -> tuple[list[ScheduleInfo], list[str]]:
    """Return the schedules of the queues that the user sees, and what cannot be read."""
    found: list[ScheduleInfo] = []
    problems: list[str] = []
    names = [queue.name for queue in context.queues]
    for spec in data.one_of_each_table([queue.spec for queue in context.queues]):
        part = await context.database.read(attempt_part, data.read_schedules, spec, names)
        found += part.value or ()
        problems += [part.problem] if part.problem else []
    wrong = sum(each.late is not None or each.last_error is not None for each in found)
    context.attention.remember("schedules", wrong)
    return found, problems


def schedule_texts(context: PageContext, schedule: ScheduleInfo) -> tuple[Mapping[str, str], str]:
    """Return the values that a schedule gives its jobs, and its error, as far as they are not redacted."""
    return _values(context, schedule), _error(context, schedule)


def _values(context: PageContext, schedule: ScheduleInfo) -> Mapping[str, str]:
    """Return the values that a schedule gives its jobs, without those of redacted columns."""
    spec = context.settings.queues[schedule.queue].spec
    return {name: _value_text(context, spec, name, value) for name, value in schedule.values.items()}


def _value_text(context: PageContext, spec: QueueSpec, name: str, value: Any) -> str:
    if context.settings.is_attribute_redacted(spec, name):
        return "redacted"
    return short(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str), 60)


def _error(context: PageContext, schedule: ScheduleInfo) -> str:
    if schedule.last_error is None:
        return ""
    is_redacted = context.settings.is_redacted(context.settings.queues[schedule.queue].spec, "last_error")
    return "redacted" if is_redacted else short(schedule.last_error, 500)


MOST_BLOCKED = 5
"""How many queues the first page says what blocks them."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One queue of the list; without an overview if nothing of it can be read."""

    queue: Queue
    part: Part[data.QueueOverview]
    running: int | None
    """The number of running jobs; under a strategy that holds a transaction, those of the last heartbeats."""
    blockers: data.Blockers | None


async def overview(context: PageContext) -> Response:
    rows: Sequence[Row] = ()
    async with anyio.create_task_group() as group:
        if context.attention.needs_schedules:
            group.start_soon(_read_schedules, context)
        rows = await rows_of(context, context.queues)
    blocked = [row for row in rows if row.blockers]
    response = context.render(
        "overview.html",
        rows=rows,
        totals=_totals(rows),
        blocked=sorted(blocked, key=lambda row: row.blockers is not None and not row.blockers.is_critical),
        most_blocked=MOST_BLOCKED,
        count_limit=COUNT_LIMIT,
        spark=_spark,
        suggestions=await suggestions(context, context.queues, reads=False),
        listed_url=lambda queue, listed: listed_url(context, queue, listed),
        target_of=target_of,
        minutes=round(MINUTES.length.total_seconds() / 60),
    )
    if context.queues and context.attention.needs_examination():
        # After the page was sent: it takes longer than the page, which shows the last result.
        response.background = BackgroundTask(_refresh_findings, context)
    return response


async def rows_of(context: PageContext, queues: Sequence[Queue]) -> list[Row]:
    found: dict[str, Part[data.QueueOverview]] = {}
    # Each in a session of its own: a queue that waits for a lock does not delay the others.
    async with anyio.create_task_group() as group:
        for queue in queues:
            group.start_soon(_read_one, context, queue, found)
    return [_row(context, queue, found[queue.name]) for queue in queues]


def _row(context: PageContext, queue: Queue, part: Part[data.QueueOverview]) -> Row:
    blockers = None if part.value is None else _blockers(context, queue, part.value.state.consumers)
    return Row(queue=queue, part=part, running=_running(part.value), blockers=blockers)


def memory_of(context: PageContext) -> Memory:
    memory: Memory = context.state.setdefault("queue_memory", {})
    return memory


async def _read_schedules(context: PageContext) -> None:
    # What cannot be read is said on the page of schedules.
    with contextlib.suppress(PageError, SQLAlchemyError):
        await schedules_of(context)


async def _refresh_findings(context: PageContext) -> None:
    # A server that stops cancels what runs after a response, and would log a traceback of that.
    with contextlib.suppress(PageError, SQLAlchemyError, asyncio.CancelledError):
        await examined(context)


async def _read_one(context: PageContext, queue: Queue, found: dict[str, Part[data.QueueOverview]]) -> None:
    try:
        found[queue.name] = Part(await context.database.read(data.read_overview, queue.spec, memory_of(context)))
    except PageError as error:
        found[queue.name] = Part(problem=f"{error.text} {error.advice}".strip())
    except SQLAlchemyError as error:
        found[queue.name] = Part(problem=problem_text(error))


def _spark(throughput: Throughput, name: str) -> object:
    title = f"{name}: {throughput.total:,} finished within {round(MINUTES.length.total_seconds() / 60)} minutes"
    return sparkline([bucket.total for bucket in throughput.buckets], title=title)


def _running(overview: data.QueueOverview | None) -> int | None:
    if overview is None:
        return None
    depth, consumers = overview.state.depth.value, overview.state.consumers.value
    if depth is not None and depth.running is not None:
        return depth.running
    return None if depth is None or consumers is None else sum(len(each.running) for each in consumers)


def _totals(rows: Sequence[Row]) -> dict[str, str]:
    """Return the sums over all queues that could be read; a plus means that there are more."""
    states = [row.part.value.state for row in rows if row.part.value is not None]
    depths = [state.depth.value for state in states if state.depth.value is not None]
    finished = [row.part.value.throughput.value for row in rows if row.part.value is not None]
    rates = [each.per_minute for each in finished if isinstance(each, Throughput)]
    return {
        "Due": _sum(depth.due for depth in depths),
        "Pending": _sum(depth.pending for depth in depths),
        "Processing": _sum(row.running or 0 for row in rows),
        "Finished per minute": f"{sum(rates):,.0f}" if rates else "",
        "Consumers": _sum(len(state.consumers.value or ()) for state in states),
    }


def _sum(numbers: Iterable[int]) -> str:
    listed = [*numbers]
    return f"{sum(listed):,}" + ("+" if any(each >= COUNT_LIMIT for each in listed) else "")


_SPANS = {span.name: span for span in SPANS}


async def queue(context: PageContext) -> Response:
    shown, database, memory = context.queue, context.database, memory_of(context)
    spec, is_redacted = shown.spec, context.settings.is_redacted(shown.spec, "last_error")
    name = context.request.query_params.get("span")
    if name is not None and name not in _SPANS:
        raise BadRequest(f"span={name[:100]}: there is no such span.", f"Use one of {', '.join(_SPANS)}.")
    span = None if name is None else _SPANS[name]
    # At the same time: one has many short statements, the other a few long ones.
    (state, schedules), past = await both(
        database.read(data.read_present, spec, memory),
        database.read(functools.partial(data.read_past, shows_errors=not is_redacted), spec, span, memory),
    )
    consumers = state.consumers.value
    return context.render(
        "queue.html",
        queue=shown,
        schedules=schedules,
        past=past,
        state=state,
        blockers=_blockers(context, shown, state.consumers),
        running=None if consumers is None else sum(len(each.running) for each in consumers),
        span=past.span,
        chosen_span=span,
        spans=_SPANS,
        count_limit=COUNT_LIMIT,
        listed_url=lambda listed: listed_url(context, shown, listed),
        trend=trend,
        group_fields=group_fields,
        group_actions=functools.partial(group_actions, context),
        key_at_limit=lambda key: _key_at_limit(context, shown, key),
        throughput_chart=lambda throughput: _throughput_chart(throughput, past.history.value),
        history_charts=history_charts,
        durations_chart=_durations_chart,
        percentile_rows=_percentile_rows,
        error_text=lambda schedule: None if is_redacted else schedule,
    )


def _throughput_chart(throughput: Throughput, history: History | None = None) -> Markup:
    """Return the chart of what has ended; if it is that of a history, with its gaps."""
    gaps = set[datetime]()
    if history is not None:
        gaps = {at for at, point in zip(history.begins, history.points, strict=True) if point is None}
    what = "attempts" if throughput.counts_attempts else "jobs"
    period = duration(throughput.bucket)
    bars = [
        Bar(
            label=clock_text(bucket.begins, with_date=throughput.bucket >= LONG_PERIOD),
            parts=bucket.counts,
            is_partial=bucket is throughput.buckets[-1] and len(throughput.buckets) > 1,
            is_gap=bucket.begins in gaps,
        )
        for bucket in throughput.buckets
    ]
    totals = ", ".join(f"{number:,} {name}" for name, number in throughput.totals.items() if number)
    covered = throughput.ends - throughput.begins
    return bar_chart(
        "throughput-chart",
        bars,
        throughput.outcomes,
        title=f"Ended {what}, one bar for each {period}",
        description=f"Within {duration(covered)}: {totals or 'none'}.",
        ticks=[*(f"{duration(covered * share)} ago" for share in (1, 0.75, 0.5, 0.25)), "now"],
    )


def _percentile_rows(durations: Durations) -> list[tuple[str, Any]]:
    """Return the rows of the table of durations, each with its percentiles, or why there are none."""
    return [("Wait", durations.waits), ("Run", durations.runs)]


def _durations_chart(durations: Durations) -> Markup | None:
    rows = [
        Range(label=label, p50=each.p50, p95=each.p95, p99=each.p99)
        for label, each in _percentile_rows(durations)
        if isinstance(each, Percentiles)
    ]
    if not rows:
        return None
    texts = [f"{row.label}: half within {duration(row.p50)}, 99 % within {duration(row.p99)}" for row in rows]
    return range_chart("durations-chart", rows, title="Wait and run times", description=f"{'. '.join(texts)}.")


def _key_at_limit(context: PageContext, shown: Queue, key: KeyAtLimit) -> str:
    """Return the values of a key, without those of redacted columns."""
    texts = [f"{name} {_value_text(context, shown.spec, name, value)}" for name, value in key.key.items()]
    return ", ".join(texts) or "The whole queue"
