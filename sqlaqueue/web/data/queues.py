"""What the pages of queues read: all queues at a glance, one queue, its claim, its server and its schedules."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue.admin.doctor.doctor import COMPLETE, DEFAULTS, examine
from sqlaqueue.admin.doctor.examination import Finding
from sqlaqueue.admin.doctor.server import check_indexes
from sqlaqueue.admin.doctor.service import claim_of
from sqlaqueue.admin.jobs import bind_arguments
from sqlaqueue.admin.schedules import ScheduleInfo, add_schedule, edit_schedule
from sqlaqueue.admin.schedules import schedule as stored_schedule
from sqlaqueue.admin.schedules import schedules as read_all
from sqlaqueue.admin.state import (
    Depth,
    FailingConsumer,
    KeyAtLimit,
    depth,
    failing_consumers,
    has_leases,
    is_paused,
    keys_at_limit,
    live_consumers,
    unclaimable_jobs,
    workers,
)
from sqlaqueue.exc import ConfigurationError, StatementError
from sqlaqueue.postgresql.catalog_text import describe_session
from sqlaqueue.postgresql.facts import HorizonHolders, IndexSize, PlanNode, StatementPlan, TableStatistics
from sqlaqueue.postgresql.plans import explain
from sqlaqueue.postgresql.server import horizon_holders, index_sizes, table_statistics
from sqlaqueue.queue.names import ATTEMPT, DEAD_LETTER
from sqlaqueue.queue.run import key_text
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.schedules.recurrence import Recurrence, ScheduleTables
from sqlaqueue.schedules.schedule import Schedule, from_json
from sqlaqueue.web.data import failures as failed_jobs
from sqlaqueue.web.data import past
from sqlaqueue.web.data.engines import pages_of
from sqlaqueue.web.data.history import History, end_of, has_statistics, newest_minute, read_history
from sqlaqueue.web.data.job_columns import parse_exact
from sqlaqueue.web.data.reader import Memory, Part, QueueReader, Unavailable, attempt_part

_LOCK_TIMEOUT = "200ms"
"""A claim passes over locked rows. What it may still wait for is a lock of the whole table."""


@dataclass(frozen=True, kw_only=True)
class ClaimPlan:
    plan: StatementPlan
    is_measured: bool
    """Whether the claim was executed, and rolled back."""
    indexes: Sequence[str]
    whole_tables: Sequence[str]
    """The tables of the queue, small ones left out, that it reads from the beginning to the end."""

    @property
    def claimed(self) -> float | None:
        return self.plan.root.rows


def read_index_findings(session: Session, spec: QueueSpec) -> list[Finding]:
    if not pages_of(session, spec.mapper).has_plans:
        return []
    names = {str(index.name) for index in spec.claim_indexes}
    found = examine(session, [spec.model], lambda _: (*COMPLETE, check_indexes))
    return [each for each in found if each.code == "check_failed" or each.facts.get("index") in names]


def measure_claim(session: Session, spec: QueueSpec) -> ClaimPlan | Unavailable:
    """Execute a claim under EXPLAIN, and return its plan. The caller rolls back; the transaction is not read-only.

    Workers that claim meanwhile pass over the jobs that it has locked, as over those of any other worker, and find them
    again with their next poll.
    """
    why_not = _no_plans(session, spec)
    if why_not is not None:
        return why_not
    connection = session.connection(bind_arguments=bind_arguments(spec.model))
    connection.execute(sa.select(sa.func.set_config("lock_timeout", _LOCK_TIMEOUT, sa.true())))
    # In a savepoint, so that nothing is left of it whatever the caller does.
    with connection.begin_nested() as savepoint:
        plan = plan_claim(session, spec, execute=True)
        savepoint.rollback()
    return plan


def plan_claim(session: Session, spec: QueueSpec, *, execute: bool = False) -> ClaimPlan | Unavailable:
    claim = claim_of(spec)
    if claim is None:
        return Unavailable(reason=f"No Consumer can be made for {spec.model.__name__} alone, so it has no claim.")
    connection = session.connection(bind_arguments=bind_arguments(spec.model))
    plan = explain(connection, claim, execute=execute)
    nodes = [*plan.root.nodes()]
    tables = {table.name for table in spec.strategy.locked_tables(spec)}
    return ClaimPlan(
        plan=plan,
        is_measured=execute,
        indexes=_distinct(node.index for node in nodes),
        whole_tables=_distinct(node.relation for node in nodes if _reads_all(node) and node.relation in tables),
    )


def _no_plans(session: Session, spec: QueueSpec) -> Unavailable | None:
    pages = pages_of(session, spec.mapper)
    if pages.has_plans:
        return None
    reason = f"The claim is measured on PostgreSQL only. Health says what is wrong with the indexes on {pages.title}."
    return Unavailable(reason=reason)


def _reads_all(node: PlanNode) -> bool:
    if node.kind != "Seq Scan":
        return False
    # For the few rows of a small table, the planner uses no index.
    read = node.planned_rows if node.rows is None else node.rows + node.removed
    return read > DEFAULTS.small_table


def _distinct(names: Iterable[str | None]) -> list[str]:
    return list(dict.fromkeys(name for name in names if name is not None))


COUNT_LIMIT = 10_000
"""The number up to which pending, due and running jobs are counted."""

RECENT = 5_000
"""The number of finished jobs that are read at most for the throughput of the last minutes."""


@dataclass(frozen=True, kw_only=True)
class QueueState:
    depth: Part[Depth]
    failed: Part[failed_jobs.CappedCount | Unavailable]
    paused: Part[bool]
    consumers: Part[Sequence[Any]]
    """The live ones, the oldest first, as rows with the columns of :func:`sqlaqueue.consumers`."""
    at_limit: Part[Sequence[KeyAtLimit]]


@dataclass(frozen=True, kw_only=True)
class BlockedJob:
    """A job that live Consumers cannot claim."""

    key: str
    error: str
    """What the first of them says."""
    consumers: Sequence[str]
    """Their names."""


@dataclass(frozen=True, kw_only=True)
class Blockers:
    """What keeps the jobs of a queue from running, as its live Consumers say in their heartbeats."""

    failing: Sequence[FailingConsumer]
    """The Consumers whose claims fail, those first that fail for the longest time."""
    jobs: Sequence[BlockedJob]
    alive: int
    """How many Consumers are alive."""

    def __bool__(self) -> bool:
        return bool(self.failing or self.jobs)

    @property
    def all_fail(self) -> bool:
        """Whether no Consumer runs any job."""
        return bool(self.failing) and len(self.failing) >= self.alive

    @property
    def is_critical(self) -> bool:
        """Whether jobs do not run; otherwise another Consumer runs them."""
        return self.all_fail or any(len(job.consumers) >= self.alive for job in self.jobs)


def consumer_name(consumer: Any) -> str:
    """Return the name of a Consumer with its process: several may have the same name."""
    process = f"{consumer.host}:{consumer.pid}"
    return process if consumer.name in {None, process} else f"{consumer.name} ({process})"


def blockers_of(alive: Sequence[Any], shown: Callable[[str], str] = str) -> Blockers:
    """Return what the heartbeats of the live Consumers say about jobs that do not run.

    :param alive: rows of :func:`sqlaqueue.consumers`.
    :param shown: returns what is shown of the text of an error.
    """
    jobs: dict[str, list[tuple[str, str]]] = {}
    for each in alive:
        for key, error in unclaimable_jobs(each):
            jobs.setdefault(key_text(key), []).append((consumer_name(each), error))
    failing = sorted(failing_consumers(alive), key=lambda each: each.since)
    return Blockers(
        failing=[each._replace(error=shown(each.error)) for each in failing],
        jobs=[
            BlockedJob(key=key, error=shown(found[0][1]), consumers=[name for name, _ in found])
            for key, found in jobs.items()
        ],
        alive=len(alive),
    )


MOST_LOST = 100
"""How many jobs are shown that are still claimed under the names of dead Consumers."""

_PROCESSING = 10_000
"""Among how many processing jobs, those whose leases expire first, these are looked for."""


@dataclass(frozen=True, kw_only=True)
class Workers:
    """The Consumers of a queue, alive or dead within a day."""

    rows: Sequence[Any]
    """See :func:`sqlaqueue.admin.state.workers`."""
    left: Mapping[str, Sequence[str]] | None
    """The keys of jobs that are still claimed under the names of dead Consumers; None if that is not known."""


def read_workers(session: Session, spec: QueueSpec) -> Workers:
    rows = workers(session, spec)
    alive = {row.name for row in rows if row.is_alive}
    dead = {row.name for row in rows if not row.is_alive} - alive - {None}
    if not (has_leases(spec) and spec.has("claimed_by")):
        return Workers(rows=rows, left=None)
    left: dict[str, list[str]] = {name: [] for name in dead}
    if dead:
        # By the index of leases, whose first entries are those of the dead.
        claimed_by, expires = spec.columns["claimed_by"], spec.columns["lease_expires_at"]
        columns = [*(key.label(f"key_{number}") for number, key in enumerate(spec.keys)), claimed_by.label("worker")]
        first = sa.select(*columns).where(spec.in_state("processing")).order_by(expires).limit(_PROCESSING).subquery()
        mine = sa.select(*first.c).where(first.c.worker.in_(sorted(dead))).limit(MOST_LOST)
        for *key, worker in session.execute(mine, bind_arguments=bind_arguments(spec.model)):
            left[worker].append(key_text(tuple(key)))
    return Workers(rows=rows, left=left)


@dataclass(frozen=True, kw_only=True)
class QueueOverview:
    state: QueueState
    throughput: Part[past.Throughput | Unavailable]


def read_overview(session: Session, spec: QueueSpec, memory: Memory | None = None) -> QueueOverview:
    reader = QueueReader.begin(session, spec, memory)
    return QueueOverview(
        state=read_state(reader),
        throughput=reader.part(lambda: past.read_throughput(reader, past.MINUTES, limit=RECENT)),
    )


def read_state(reader: QueueReader) -> QueueState:
    session, spec = reader.session, reader.spec
    return QueueState(
        depth=reader.part(lambda: depth(session, spec.model, limit=COUNT_LIMIT)),
        failed=reader.part(lambda: failed_jobs.count_failed(reader)),
        paused=reader.part(lambda: is_paused(session, spec)),
        consumers=reader.part(lambda: live_consumers(session, spec) or []),
        at_limit=reader.part(lambda: [*keys_at_limit(session, spec)]),
    )


def read_schedules(session: Session, spec: QueueSpec, queues: Iterable[str]) -> list[ScheduleInfo]:
    """Return the schedules of some queues from the tables that the queue of ``spec`` shares with others."""
    tables = ScheduleTables.look_up(spec)
    connection = session.connection(bind_arguments=bind_arguments(spec.model))
    # A program without schedules need not have the tables.
    if not pages_of(session, spec.mapper).has_table(connection, tables.schedules):
        return []
    wanted = set(queues)
    return [each for each in read_all(session, spec.model) if each.queue in wanted]


def one_of_each_table(specs: Iterable[QueueSpec]) -> list[QueueSpec]:
    """Return one queue for each table of schedules: those of one MetaData and schema share it."""
    found: dict[tuple[int, str | None], QueueSpec] = {}
    for spec in specs:
        tables = ScheduleTables.look_up(spec)
        found.setdefault((id(tables.metadata), tables.schema), spec)
    return list(found.values())


def read_failures_of(
    session: Session, spec: QueueSpec, memory: Memory, within: timedelta | None
) -> failed_jobs.Failures | Unavailable:
    """Return the newest failures of a queue in groups; for None, of any age."""
    return failed_jobs.read_failures(QueueReader.begin(session, spec, memory), within=within)


@dataclass(frozen=True, kw_only=True)
class QueuePast:
    span: past.ChartSpan
    throughput: Part[past.Throughput | Unavailable]
    history: Part[History | None]
    """None without statistics, and as long as no Consumer has written any of the span."""
    durations: Part[past.Durations]
    failures: Part[failed_jobs.Failures | Unavailable]


def read_present(session: Session, spec: QueueSpec, memory: Memory) -> tuple[QueueState, Part[list[ScheduleInfo]]]:
    reader = QueueReader.begin(session, spec, memory)
    return read_state(reader), reader.part(lambda: read_schedules(session, spec, [spec.name]))


def read_past(
    session: Session, spec: QueueSpec, span: past.ChartSpan | None, memory: Memory, *, shows_errors: bool = True
) -> QueuePast:
    """Return what has happened in a span of time; for None, in the shortest one in which something has ended."""
    reader = QueueReader.begin(session, spec, memory)
    found = reader.part(lambda: past.find_finished_jobs(reader))
    source = found.value
    wanted = span or _span_with_data(reader, source)
    history: Part[History | None] = Part()
    if has_statistics(spec):
        history = reader.part(lambda: read_history(session, spec, wanted, reader.now))
    counted = None if history.value is None else history.value.throughput()
    if source is None:
        problem = found.problem
        return QueuePast(
            span=wanted,
            throughput=Part(problem=problem) if counted is None else Part(counted),
            history=history,
            durations=Part(problem=problem),
            failures=Part(problem=problem),
        )
    within = max(past.SPAN, wanted.length)
    hidden = Unavailable(reason="The texts of errors are redacted.")
    failures: Part[failed_jobs.Failures | Unavailable]
    throughput = reader.part(lambda: counted or past.read_throughput(reader, wanted, source=source))
    durations = reader.part(lambda: past.read_durations(reader, source, within))
    failures = reader.part(lambda: failed_jobs.read_failures(reader, source) if shows_errors else hidden)
    return QueuePast(span=wanted, throughput=throughput, history=history, durations=durations, failures=failures)


def _span_with_data(reader: QueueReader, source: past.FinishedJobs | Unavailable | None) -> past.ChartSpan:
    """Return the shortest span in which something has ended; the shortest of all if that is not known."""
    if has_statistics(reader.spec):
        newest = reader.part(lambda: reader.execute(newest_minute(reader.spec)).scalar()).value
        if newest is not None:
            return past.span_of(reader.now, end_of(newest))
    if source is None:
        return past.HOUR
    return reader.part(lambda: past.span_with_data(reader, source)).value or past.HOUR


_GROWING = (ATTEMPT, DEAD_LETTER)
"""The side tables that grow with the number of jobs, beside those that a claim locks."""

_MOST = 5


@dataclass(frozen=True, kw_only=True)
class QueueTable:
    statistics: TableStatistics
    indexes: Sequence[IndexSize]


@dataclass(frozen=True, kw_only=True)
class Holder:
    """Something that keeps VACUUM from removing rows that have died since it began."""

    what: str
    """A session with its pid and role, a prepared transaction, a replication slot or a standby."""
    doing: str
    """Such as ``idle in transaction``; empty if that is not known."""
    since: datetime | None
    """None if that is not known."""
    age: int
    """How many transactions have begun since."""


@dataclass(frozen=True, kw_only=True)
class Horizon:
    holders: Sequence[Holder]
    hidden: int
    """How many sessions the role may not see into."""


def read_server(
    session: Session, spec: QueueSpec, *, names_holders: bool
) -> tuple[Part[list[QueueTable] | Unavailable], Part[Horizon | Unavailable]]:
    """Return the tables of a queue, and what keeps their dead rows; why not, of a database other than PostgreSQL."""
    pages = pages_of(session, spec.mapper)
    if not pages.has_plans:
        sizes = f"Sizes and dead rows are statistics of PostgreSQL, which {pages.title} does not have."
        holders = f"This is read from the catalogs of PostgreSQL. Health says what is wrong with {pages.title}."
        return Part(Unavailable(reason=sizes)), Part(Unavailable(reason=holders))
    tables: Part[list[QueueTable] | Unavailable] = attempt_part(session, read_tables, spec)
    horizon: Part[Horizon | Unavailable]
    horizon = attempt_part(session, functools.partial(read_horizon, names_holders=names_holders), spec)
    return tables, horizon


def read_tables(session: Session, spec: QueueSpec) -> list[QueueTable]:
    connection = session.connection(bind_arguments=bind_arguments(spec.model))
    tables = [spec.table, *spec.strategy.locked_tables(spec)]
    tables += [spec.side_tables[name] for name in _GROWING if name in spec.side_tables]
    found = []
    for table in dict.fromkeys(tables):
        statistics = table_statistics(connection, table)
        declared = [*table.indexes, *(index for index in spec.claim_indexes if index.table is table)]
        indexes = index_sizes(connection, table, dict.fromkeys(declared))
        # The indexes of a partitioned table are listed with its first partition.
        found += [
            QueueTable(statistics=each, indexes=indexes if number == 0 else ())
            for number, each in enumerate(statistics)
        ]
    return found


def read_horizon(session: Session, spec: QueueSpec, *, names_holders: bool = True) -> Horizon:
    """Return what keeps dead rows of the queue's database, without the text of any statement.

    :param names_holders: whether it says which they are. They may be of applications of which the reader sees nothing.
    """
    connection = session.connection(bind_arguments=bind_arguments(spec.model))
    holders = horizon_holders(connection)
    found = sorted(_named(holders) if names_holders else _unnamed(holders), key=lambda each: -each.age)
    return Horizon(holders=found[:_MOST], hidden=holders.hidden if names_holders else 0)


def _unnamed(holders: HorizonHolders) -> Iterator[Holder]:
    kinds: Sequence[tuple[str, Iterable[Any]]] = (
        ("A session", holders.sessions),
        ("A prepared transaction", holders.prepared),
        ("A replication slot", [slot for slot in holders.slots if slot.age is not None]),
        ("A standby", holders.standbys),
    )
    for what, some in kinds:
        for each in some:
            since = getattr(each, "since", None) or getattr(each, "inactive_since", None)
            yield Holder(what=what, doing=getattr(each, "state", None) or "", since=since, age=each.age)


def _named(holders: HorizonHolders) -> Iterator[Holder]:
    for session in holders.sessions:
        yield Holder(what=describe_session(session), doing=session.state or "", since=session.since, age=session.age)
    for prepared in holders.prepared:
        what = f"Prepared transaction {prepared.gid!r} of the role {prepared.owner}"
        yield Holder(what=what, doing="prepared", since=prepared.since, age=prepared.age)
    for slot in holders.slots:
        if slot.age is not None:
            doing = "not in use" if slot.active_pid is None else "in use"
            what = f"Replication slot {slot.name}"
            yield Holder(what=what, doing=doing, since=slot.inactive_since, age=slot.age)
    for standby in holders.standbys:
        what = f"Standby {standby.application!r} (process {standby.pid})"
        yield Holder(what=what, doing="hot_standby_feedback", since=None, age=standby.age)


# -- the definition of a schedule, as texts of a form ------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ScheduleForm:
    name: str
    texts: Mapping[str, str]
    """By the arguments of a Schedule."""
    version: str = ""
    """That of the stored definition; empty for a new schedule."""
    origin: str = ""
    hidden: Sequence[str] = ()
    """The attributes of redacted columns to which the schedule gives values; they stay as they are."""
    factory: str | None = None
    problem: str = ""
    """Why what was typed cannot be stored."""
    words: str = ""
    ticks: Sequence[datetime] = ()
    """When it would tick."""


NEW_SCHEDULE = {"timezone": "UTC", "values": "{}", "jitter": "0", "catch_up": "latest"}

_NEXT_TICKS = 3

IsHidden = Callable[[str], bool]
"""Returns whether an attribute is that of a redacted column."""


def read_schedule_form(session: Session, spec: QueueSpec, name: str, is_hidden: IsHidden) -> ScheduleForm:
    """Return the stored definition of a schedule.

    :raises StatementError: if the queue has no such schedule.
    """
    return _form_of(_own_schedule(session, spec, name), is_hidden)


def _own_schedule(session: Session, spec: QueueSpec, name: str) -> ScheduleInfo:
    found = stored_schedule(session, spec.model, name)
    if found.queue != spec.name:
        raise StatementError(f"the schedule {name!r} is of another queue")
    return found


def _form_of(info: ScheduleInfo, is_hidden: IsHidden) -> ScheduleForm:
    shown = {name: value for name, value in info.values.items() if not is_hidden(name)}
    grace = info.misfire_grace
    texts = {
        "cron": info.cron or "",
        "every": "" if info.every is None else f"{info.every.total_seconds():g}",
        "timezone": info.timezone,
        "values": json.dumps(shown, ensure_ascii=False, indent=2),
        "jitter": f"{info.jitter.total_seconds():g}",
        "catch_up": str(info.catch_up),
        "misfire_grace": "" if grace is None else f"{grace.total_seconds():g}",
        "skip_unfinished": "1" if info.skip_unfinished else "",
    }
    # Not of hidden values, which could be guessed from the digest. An edit leaves them as they are.
    stored = json.dumps([texts, info.origin], sort_keys=True)
    return ScheduleForm(
        name=info.name,
        texts=texts,
        version=hashlib.sha256(stored.encode()).hexdigest()[:32],
        origin=info.origin,
        hidden=[name for name in info.values if is_hidden(name)],
        factory=info.factory,
    )


def look_at_schedule(form: ScheduleForm, now: datetime) -> ScheduleForm:
    """Return the form with the next ticks of what was typed, or with what is wrong with it."""
    try:
        given = _definition(form.texts)
        every = None if given["every"] is None else timedelta(seconds=given["every"])
        recurrence = Recurrence(given["cron"], every, given["timezone"], now)
        recurrence.check()
        ticks: list[datetime] = []
        tick = recurrence.after(now)
        while tick is not None and len(ticks) < _NEXT_TICKS:
            ticks.append(tick)
            tick = recurrence.after(tick)
    except ConfigurationError as error:
        return replace(form, problem=str(error))
    return replace(form, words=recurrence.in_words(), ticks=ticks)


def save_schedule(session: Session, spec: QueueSpec, form: ScheduleForm, is_hidden: IsHidden) -> ScheduleForm | str:
    """Store a new schedule, or a changed definition, and commit; return the form again if that is not possible.

    :param form: what was typed; for an existing schedule with the version of the definition that was shown.
    :returns: ``added``, ``changed`` or ``unchanged``.
    :raises StatementError: if the queue has no such schedule.
    """
    connection = session.connection(bind_arguments=bind_arguments(spec.model))
    if not pages_of(session, spec.mapper).has_table(connection, ScheduleTables.look_up(spec).schedules):
        text = "The database has no table of schedules. Give the queue class to a Scheduler, and migrate the database."
        return replace(form, problem=text)
    # Before the block: an error would name the schedules of queues that the user may not see.
    info = _own_schedule(session, spec, form.name) if form.version else None
    try:
        given = _definition(form.texts)
        hidden = next((name for name in given["values"] if is_hidden(name)), None)
        if hidden is not None:
            return replace(form, problem=f"values: {hidden} is the attribute of a redacted column.")
        if info is None:
            values = from_json(spec, spec.mapper, given["values"])
            arguments: dict[str, Any] = given | {"values": values}
            add_schedule(session, spec.model, Schedule(form.name, spec.model, **arguments))
            return "added"
        return _change_schedule(session, spec, info, form, given=given, is_hidden=is_hidden)
    except (ConfigurationError, StatementError) as error:
        session.rollback()
        return replace(form, problem=str(error))


def _change_schedule(
    session: Session,
    spec: QueueSpec,
    info: ScheduleInfo,
    form: ScheduleForm,
    *,
    given: Mapping[str, Any],
    is_hidden: IsHidden,
) -> ScheduleForm | str:
    stored = _form_of(info, is_hidden)
    if stored.version != form.version:
        text = "The schedule was changed since this form was shown, so nothing was written. Save again to write yours."
        return replace(form, version=stored.version, hidden=stored.hidden, problem=text)
    typed = {name: text.replace("\r\n", "\n") for name, text in form.texts.items()}
    changes = {name: given[name] for name, text in stored.texts.items() if typed.get(name, "") != text}
    if not changes:
        return "unchanged"
    if "values" in changes:
        classes = {each.class_.__name__: each for each in spec.mapper.self_and_descendants}
        of = classes.get(info.model or "", spec.mapper)
        values = from_json(spec, of, given["values"])
        try:
            kept = from_json(spec, of, {name: info.values[name] for name in stored.hidden})
        except ConfigurationError:
            text = "A value of a redacted column is not of its type. Correct it in the database."
            return replace(form, problem=text)
        changes["values"] = values | kept
    try:
        edit_schedule(session, spec.model, form.name, **changes)
    except ConfigurationError as error:
        if not stored.hidden:
            raise
        # Its text may repeat any of the values.
        text = f"The definition was refused ({type(error).__name__}); the text may repeat a redacted value."
        return replace(form, problem=text)
    return "changed"


def _definition(texts: Mapping[str, str]) -> dict[str, Any]:
    """Return what was typed as arguments of a Schedule.

    :raises ConfigurationError: for a text that is no value of its field.
    """
    given = {name: text.strip() for name, text in texts.items()}
    try:
        values = parse_exact(given.get("values") or "{}")
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"values: this is no JSON that can be stored: {error}") from None
    if not isinstance(values, dict):
        raise ConfigurationError('values: write a JSON object, such as {"kind": "sales"}')
    if bool(given.get("cron")) is bool(given.get("every")):
        raise ConfigurationError("cron, every: write one of them, and leave the other one empty")
    catch_up = given.get("catch_up") or "latest"
    return {
        "cron": given.get("cron") or None,
        "every": _seconds("every", given.get("every", "")),
        "timezone": given.get("timezone") or "UTC",
        "values": values,
        "jitter": _seconds("jitter", given.get("jitter", "")) or 0,
        "catch_up": int(catch_up) if re.fullmatch("[0-9]{1,9}", catch_up) else catch_up[:100],
        "misfire_grace": _seconds("misfire_grace", given.get("misfire_grace", "")),
        "skip_unfinished": bool(given.get("skip_unfinished")),
    }


_A_HUNDRED_YEARS = timedelta(days=36525).total_seconds()


def _seconds(name: str, text: str) -> float | None:
    if not text:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds <= _A_HUNDRED_YEARS:
        raise ConfigurationError(f"{name}: write a number of seconds up to a hundred years, such as 300")
    return seconds
