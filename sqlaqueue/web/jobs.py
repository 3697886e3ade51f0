"""The jobs of a queue, as a list that filters, sorts and pages."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from sqlalchemy.orm import Session
from starlette.responses import Response

from sqlaqueue.admin.job_reasons import MISCOUNTED
from sqlaqueue.consumer.pace import RESCUE
from sqlaqueue.queue.options import FINISHED, STATES
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.web.actions import LABELS, RIGHTS, count_text
from sqlaqueue.web.context import PageContext
from sqlaqueue.web.data.bulk import APPLIES_TO, BulkAction, changeable
from sqlaqueue.web.data.failures import group_filter, group_of
from sqlaqueue.web.data.job import JobLife, ShownValue, events_of, read_life
from sqlaqueue.web.data.job_columns import OTHER, JobColumn, JobColumns, indented
from sqlaqueue.web.data.job_filters import OF_STATE, OPERATORS, Condition, JobsWanted, filterable, parameter_of
from sqlaqueue.web.data.job_pages import (
    Count,
    JobPage,
    ListRequest,
    count_list,
    count_states,
    is_in_time,
    parse_request,
    read_page,
)
from sqlaqueue.web.data.job_windows import WINDOW, Cell, JobRow
from sqlaqueue.web.data.reader import ParameterError, Part, attempt_part
from sqlaqueue.web.data.waits import Group, Waits, read_waits
from sqlaqueue.web.errors import NotFound
from sqlaqueue.web.links import (
    Place,
    bad_parameters,
    columns_in,
    columns_seen,
    job_url,
    key_in,
    list_fields,
    list_url,
    place_in,
)
from sqlaqueue.web.search import FORMS, moments_of, suggestions, with_added

_NAMES = {
    "": "is",
    "min": "is at least",
    "max": "is at most",
    "starts": "starts with",
    "contains": "contains",
    "last": "is within the last",
}
"""What the conditions are called that can be added, by their operators."""

_SIGNS = _NAMES | {"": "=", "min": "≥", "max": "≤", "json": "="}

MOST_EXPORTED = 10_000
"""How many jobs a list is exported with at most."""

ACTIONS: dict[str | None, tuple[BulkAction, ...]] = {
    None: ("requeue", "cancel", "change", "purge"),
    "pending": ("cancel", "change"),
    "waiting": ("cancel",),
    "processing": ("cancel",),
    OTHER: (),
}
"""The actions that a list of jobs in one state offers; in the other states requeue and purge."""

_KILO = 1024


@dataclass(frozen=True)
class Tab:
    label: str
    url: str
    count: str
    is_current: bool
    is_part: bool


@dataclass(frozen=True)
class Header:
    label: str
    url: str | None
    """Sorts by the column; None if no index gives that order."""
    direction: str | None
    """``ascending`` or ``descending``, if the list is sorted by it."""
    is_numeric: bool


@dataclass(frozen=True)
class Chip:
    text: str
    url: str


_OF_A_BRIEF = 3


@dataclass(frozen=True)
class Brief:
    """What fits the two lines of a job on a phone."""

    state: Cell | None
    moment: Cell | None
    rest: Sequence[Cell]


@dataclass(frozen=True)
class ListView:
    context: PageContext
    request: ListRequest
    counts: Mapping[str | None, Count] | None

    def url(self, pairs: Sequence[tuple[str, str]]) -> str:
        return self.context.url("jobs", queue=self.context.queue, query=pairs)

    @property
    def is_of_other(self) -> bool:
        return self.request.wanted.state == OTHER

    @property
    def name(self) -> str:
        return (self.request.wanted.listed or "all").capitalize()

    def order_note(self, page: JobPage) -> str:
        """Return in which order the jobs are, where the head of a column does not say it."""
        wanted = self.request.wanted
        by_priority, run_at = wanted.columns.by_role.get("priority"), wanted.columns.by_role.get("run_at")
        if wanted.state == "pending" and by_priority is not None and page.sort == by_priority.name:
            rest = "has been due for the longest time" if wanted.only == "due" else "is due first"
            return f"In claim order: by priority, and then the job first that {rest}."
        key = wanted.columns.of_key[0].name
        if self.request.sort is not None or page.sort.removeprefix("-") != key:
            return ""
        if not is_in_time(wanted.columns):
            return (
                f"In the order of the key, which is not that of time: no index of this table has these jobs by time, "
                f"and there are more than {WINDOW:,} rows to sort.{self._index_hint()}"
            )
        if wanted.only == "due" and run_at is not None and run_at.name not in page.sorts:
            return "The newest keys come first, as no index of this table has the due jobs in the order of their time."
        return ""

    def _index_hint(self) -> str:
        """Return which index has the list in the order of time."""
        wanted = self.request.wanted
        if wanted.state in FINISHED and "finished_at" in wanted.columns.by_role and wanted.columns.spec.has("status"):
            return " With QueueConfig(retention=...), or an index of status and finished_at, the newest come first."
        return ""

    def tabs(self) -> list[Tab]:
        counts = self.counts or {}
        return [
            Tab(
                (state or "all").capitalize(),
                self.url(self.request.parameters(state=state, sort=None)),
                _count_text(count),
                state == self.request.wanted.listed,
                state in OF_STATE,
            )
            for state, count in counts.items()
            if state != OTHER or count.number or self.is_of_other
        ]

    def total(self) -> str:
        return _count_text((self.counts or {}).get(self.request.wanted.listed, Count(0, is_complete=False)))

    def all_label(self) -> str:
        """Return what the jobs of the list are called where an action concerns all of them."""
        count = (self.counts or {}).get(self.request.wanted.listed)
        if count is None or not count.is_complete or not count.number:
            return "All matching jobs"
        return "The 1 matching job" if count.number == 1 else f"All {count.number:,} matching jobs"

    def headers(self, page: JobPage) -> list[Header]:
        return [self._header(page, each, each.name) for each in page.columns]

    def key_header(self, page: JobPage) -> Header:
        first = self.request.wanted.columns.of_key[0]
        label = ", ".join(each.name for each in self.request.wanted.columns.of_key)
        return self._header(page, first, label)

    def _header(self, page: JobPage, column: JobColumn, label: str) -> Header:
        is_current = page.sort.removeprefix("-") == column.name
        is_descending = page.sort.startswith("-")
        url = None
        if column.name in page.sorts:
            # The other direction; at first the newest or largest, as these are looked for more often.
            sort = column.name if is_current and is_descending else f"-{column.name}"
            url = self.url(self.request.parameters(sort=sort))
        direction = ("descending" if is_descending else "ascending") if is_current else None
        return Header(label, url, direction, column.kind in {"integer", "number"} and not column.is_key)

    def chips(self, page: JobPage | None) -> list[Chip]:
        wanted = self.request.wanted
        found = [Chip(_condition_text(each), self._without(each.parameter, page)) for each in wanted.conditions]
        if wanted.key is not None:
            found.insert(0, Chip(f"key = {wanted.key}", self._without("job", page)))
        if wanted.error is not None:
            found.append(Chip(f"error {wanted.error}", self._without("error", page)))
        if wanted.message is not None:
            found.append(Chip(f"message {wanted.message}", self._without("message", page)))
        return found

    def cleared(self) -> str:
        listed = self.request.wanted.listed
        return self.url([("state", listed)] if listed else [])

    def _without(self, parameter: str, page: JobPage | None) -> str:
        return self.url([pair for pair in self.request.parameters(sort=self.kept_sort(page)) if pair[0] != parameter])

    def kept_sort(self, page: JobPage | None) -> str | None:
        """Return the order, if the list has it with another filter as well."""
        sort = self.request.sort
        return sort if page is not None and sort and sort.removeprefix("-") in page.lasting_sorts else None

    def job_url(self, page: JobPage, job: JobRow) -> str:
        return job_url(self.context, job.key, Place(self.request, page.cursor_of(job)))

    def export_url(self, form: str) -> str:
        """Return the URL of the list as a file, from the first job of this page on if it is read forwards."""
        query = [pair for pair in self.request.with_place() if pair[0] != "before"]
        return self.context.url("export", queue=self.context.queue, form=form, query=query)

    def page_url(self, name: str, cursor: str | None) -> str | None:
        return None if cursor is None else self.url([*self.request.parameters(), (name, cursor)])

    def kept(self, page: JobPage | None) -> list[tuple[str, str]]:
        """Return the parameters to which a form adds a condition."""
        return self.request.parameters(sort=self.kept_sort(page))

    def choices(self) -> list[tuple[str, list[tuple[str, str]]]]:
        """Return the conditions that can be added to those of the list, by column."""
        found = []
        for column in filterable(self.request.wanted.columns):
            names = [each for each in OPERATORS[column.kind] if each != "null"]
            choices = [(parameter_of(column, each), f"{column.name} {_NAMES[each]}") for each in names]
            if column.column.nullable and "null" in OPERATORS[column.kind]:
                null = parameter_of(column, "null")
                choices += [(f"{null}=yes", f"{column.name} is null"), (f"{null}=no", f"{column.name} is not null")]
            found.append((column.name, choices))
        return [each for each in found if each[1]]

    def moments(self) -> list[str]:
        return [each.name for each in moments_of(self.request.wanted.columns)]

    def actions(self) -> list[BulkAction]:
        offered: tuple[BulkAction, ...] = ACTIONS.get(self.request.wanted.state, ("requeue", "purge"))
        found: list[BulkAction] = []
        for each in offered:
            is_possible = each != "change" or bool(changeable(self.request.wanted.columns))
            if is_possible and self.context.may(RIGHTS[each], self.context.queue):
                found.append(each)
        return found

    def is_late(self, cell: Cell) -> bool:
        """Return whether a cell has the time since when a job of the list has been due."""
        moment = cell.moment if cell.column.role == "run_at" and self.request.wanted.state == "pending" else None
        return isinstance(moment, datetime) and moment.tzinfo is not None and moment <= datetime.now(UTC)

    def brief(self, page: JobPage, job: JobRow) -> Brief:
        """Return what a phone shows of a job: its error, or else the first values of the application."""
        cells = [cell for cell in job.cells if cell.text and not cell.is_redacted]
        moments = [cell for cell in cells if cell.moment is not None and cell.column.role is not None]
        order = page.sort.removeprefix("-")
        error = [cell for cell in cells if cell.column.role == "last_error"]
        own = [cell for cell in cells if cell.column.role is None and not cell.column.is_key]
        return Brief(
            state=None if self.request.wanted.state else next((c for c in cells if c.column.kind == "state"), None),
            moment=min(moments, key=lambda cell: cell.column.name != order, default=None),
            rest=error or own[:_OF_A_BRIEF],
        )

    def link(self, cell: Cell) -> str | None:
        return _link(self.context, cell.column, None if cell.is_cut else cell.text)


def size_text(size: int) -> str:
    if size < _KILO * _KILO:
        return f"{size / _KILO:.0f} kB"
    return f"{size / _KILO / _KILO:.1f} MB"


def _condition_text(condition: Condition) -> str:
    if condition.operator == "null":
        return f"{condition.column.name} is {'' if condition.text == 'yes' else 'not '}null"
    name = ".".join((condition.column.name, *condition.path))
    return f"{name} {_SIGNS[condition.operator]} {condition.text}"


def _count_text(count: Count) -> str:
    return count_text(count) if count.is_known else "?"


EMPTY = {
    None: ("No jobs.", "A job exists when the transaction that adds it commits."),
    "pending": ("No pending jobs.", "A job appears here when the transaction that adds it commits."),
    "waiting": ("No waiting jobs.", "A job waits until the jobs have ended that its queue names in waits_for."),
    "due": ("No due jobs.", "Pending jobs become due when the time in run_at has come."),
    "processing": ("No processing jobs.", "The page of the queue shows whether any Consumer runs."),
    "expired": ("No lease has expired.", "A lease expires if its worker dies or loses the database."),
    "completed": (
        "No completed jobs.",
        "They are kept unless QueueConfig(on_complete='delete') or a retention is set.",
    ),
    "failed": ("No failed jobs.", "A job fails when its last attempt fails, or its handler raises Fail."),
    "cancelled": (
        "No cancelled jobs.",
        "A job is cancelled by the button Cancel, by a program, or when its handler raises Cancel.",
    ),
    OTHER: ("No other jobs.", "The status of each job is one of the queue's values."),
}
"""What a list without jobs says."""


async def jobs(context: PageContext) -> Response:
    pairs = context.request.query_params.multi_items()
    problem = ""
    try:
        added = with_added(columns_in(context), pairs, context.zone)
        if added is not None:
            parse_request(columns_in(context), added)
            return context.redirect(context.url("jobs", queue=context.queue, query=added))
    except ParameterError as error:
        # What was typed stays in its field, below which the problem is shown.
        problem = f"{error.parameter.removeprefix('f.')}: {error.problem}."
        pairs = [pair for pair in pairs if pair[0] not in FORMS]
    with bad_parameters("Change it, or start from the list of all jobs."):
        request = parse_request(columns_in(context), pairs)
        if not problem and any(not value for _, value in pairs):
            # The form of the filter sends a parameter for each field that was left empty. The URL of the list, which
            # people copy, is without them.
            kept = [pair for pair in pairs if pair[1]]
            return context.redirect(context.url("jobs", queue=context.queue, query=kept))
        found, counts = await context.database.read(_read, request)
    view = ListView(context, request, counts.value)
    return context.render(
        "jobs.html",
        queue=context.queue,
        typed=context.request.query_params.get if problem else {}.get,
        problem_of_line=problem,
        suggestions=await suggestions(context, [context.queue]),
        spans=SPANS,
        view=view,
        carried=list_fields(request),
        page=found.value,
        problem_of_page=found.problem,
        problem_of_counts=counts.problem,
        empty_text=EMPTY[request.wanted.listed],
        most_exported=f"{MOST_EXPORTED:,}",
        size_text=size_text,
        rescue_seconds=round(RESCUE),
    )


def _read(session: Session, request: ListRequest) -> tuple[Part[JobPage], Part[Mapping[str | None, Count]]]:
    found = attempt_part(session, read_page, request)
    counts: Part[Mapping[str | None, Count]] = attempt_part(session, count_states, request.wanted)
    return found, counts


SPANS = ("15min", "1h", "6h", "1d", "7d", "30d")
"""The spans that the form with times offers."""

_LONG = 120
"""The number of characters from which a value has a block of its own."""


@dataclass(frozen=True)
class Button:
    action: str
    label: str
    why_not: str = ""
    is_asked: bool = False
    """Whether the user is asked before."""


@dataclass(frozen=True)
class Similar:
    """The failed jobs of a queue whose errors have one kind and one message."""

    kind: str
    message: str
    count: Count

    @property
    def fields(self) -> list[tuple[str, str]]:
        """The filter of their list."""
        return group_filter(self.kind, self.message)


@dataclass(frozen=True)
class Beside:
    """What else there is to look at from the page of a job."""

    previous: tuple[str, Place] | None = None
    """The job before it in the list that the user came from, by its key."""
    next: tuple[str, Place] | None = None
    similar: Similar | None = None
    """The group of failed jobs to which it belongs."""


async def job(context: PageContext) -> Response:
    key = key_in(context, context.request.query_params.get("key"))
    with bad_parameters():
        place = place_in(context, context.request.query_params.multi_items())
        # To learn whether another transaction has locked the job, it is locked for a moment.
        seen = functools.partial(columns_seen, context)
        read = functools.partial(_read_page, place=place)
        life, waits, beside = await context.database.read(read, columns_in(context), key, seen, read_only=False)
    if life is None:
        raise no_job(context, key)
    values = _values(life)
    error = next((each for each in values if each.column.role == "last_error" and each.text), None)
    shown = [each for each in values if each.column.role is not None and each is not error]
    return context.render(
        "job.html",
        queue=context.queue,
        life=life,
        error=error,
        waits=waits,
        beside=beside,
        place=place,
        carried=[] if place is None else place.fields(),
        job_url=functools.partial(job_url, context),
        back=None if place is None else list_url(context, place.request),
        queue_of=lambda spec: context.settings.queues[spec.name],
        members_url=functools.partial(_members_url, context),
        requeue_fields=functools.partial(_requeue_fields, context),
        events=events_of(life),
        buttons=_buttons(context, life),
        own=[each for each in values if each.column.role is None],
        of_queue=[each for each in shown if not _is_empty(each)],
        empty_of_queue=[each for each in shown if _is_empty(each)],
        link=lambda value: _link(context, value.column, None if value.size else value.text),
        block=_block,
        size_text=size_text,
        count_text=count_text,
        rescue_seconds=round(RESCUE),
    )


def no_job(context: PageContext, key: str) -> NotFound:
    return NotFound(
        f"There is no job {key[:200]} in {context.queue.name}.",
        "It was never enqueued, the transaction that inserts it is not committed, or it was deleted.",
    )


def _is_empty(value: ShownValue) -> bool:
    return value.text is None and not value.size and not value.column.is_redacted


def _read_page(
    session: Session,
    columns: JobColumns,
    key: str,
    seen: Callable[[QueueSpec], JobColumns | None],
    *,
    place: Place | None,
) -> tuple[JobLife | None, Waits | None, Beside]:
    life, waits = _read_job(session, columns, key, seen)
    if life is None:
        return None, None, Beside()
    # At the end, as these change settings of the planner.
    previous, following = (attempt_part(session, _neighbour, place, side).value for side in ("before", "after"))
    similar = attempt_part(session, _similar, columns, life).value
    return life, waits, Beside(previous, following, similar)


def _neighbour(session: Session, place: Place | None, side: str) -> tuple[str, Place] | None:
    if place is None:
        return None
    after, before = (place.at, None) if side == "after" else (None, place.at)
    try:
        found = read_page(session, replace(place.request, after=after, before=before), 1)
    except ParameterError:
        return None  # the list has another order by now, as an index was created or dropped
    return next(((each.key, replace(place, at=found.cursor_of(each))) for each in found.jobs), None)


def _similar(session: Session, columns: JobColumns, life: JobLife) -> Similar | None:
    """Return the group of a failed job, and how many failed jobs it has."""
    error = "" if life.row is None or life.state != "failed" else life.row.roles["last_error"]
    if not error or "last_error" not in columns.by_role:
        return None
    kind, message = group_of(session, columns.spec, error)
    wanted = JobsWanted(columns, state="failed", error=kind, message=message)
    return Similar(kind, message, count_list(session, wanted))


def _read_job(
    session: Session, columns: JobColumns, key: str, seen: Callable[[QueueSpec], JobColumns | None]
) -> tuple[JobLife | None, Waits | None]:
    life = read_life(session, columns, key)
    if life is None or life.row is None or not (columns.spec.waits or columns.spec.awaited_by):
        return life, None
    waits = read_waits(session, columns, key, life.row, seen)
    reasons = life.reasons.value or ()
    if life.state == "waiting" and waits.is_miscounted and not any(each.code == "open" for each in reasons):
        others = [each for each in reasons if each.code != "waits_for"]
        life = replace(life, reasons=replace(life.reasons, value=[MISCOUNTED, *others]))
    return life, waits


def _members_url(context: PageContext, group: Group, state: str | None = None) -> str | None:
    """Return the URL of the list of a group's jobs; None if no list can be filtered to have just these."""
    if group.conditions is None:
        return None
    states = [] if state is None else [("state", state)]
    queue = context.settings.queues[group.spec.name]
    return context.url("jobs", queue=queue, query=[*states, *group.conditions])


def _requeue_fields(context: PageContext, group: Group) -> Sequence[tuple[str, str]]:
    """Return the fields of the form that previews a requeue of the failed members; none if there is nothing to do."""
    queue = context.settings.queues[group.spec.name]
    if group.conditions is None or not context.may("requeue", queue):
        return ()
    if group.is_complete and not group.failed:
        return ()
    wanted = parse_request(group.relation.theirs, group.conditions)
    # After it, the list of all members, as that of the failed ones is empty.
    return [("action", "requeue"), ("all", "1"), ("state", "failed"), *group.conditions, *list_fields(wanted)]


def _values(life: JobLife) -> list[ShownValue]:
    return [] if life.row is None else list(life.row.values.values())


def _block(value: ShownValue) -> str | None:
    """Return a value that needs a block of its own; None for one that fits a line."""
    text = value.text
    if text is None or value.column.kind not in {"text", "bytes", "other"}:
        return None
    is_json = "JSON" in type(value.column.stored_type).__name__.upper()
    if is_json and value.column.kind == "other" and text[:1] in {"{", "["} and not value.size:
        return indented(text)
    return text if len(text) > _LONG or "\n" in text else None


def _link(context: PageContext, column: JobColumn, text: str | None) -> str | None:
    """Return the URL to which the application links a whole value."""
    if text is None:
        return None
    value: Any = int(text) if column.kind == "integer" else text
    return context.settings.link(context.queue.spec, str(column.column.key), value)


def _buttons(context: PageContext, life: JobLife) -> list[Button]:
    """Return the actions that make sense for the state, with the reason where one that users look for is impossible."""
    queue, found = context.queue, []
    if context.may("edit", queue) and life.state in {*STATES}:
        why = ""
        if life.is_lost:
            why = "Its lease has expired. It can be edited when it was rescued."
        elif life.state == "processing":
            why = "It is processing. Wait for its end, or cancel it first."
        label = "Edit and requeue…" if life.state in FINISHED else "Edit…"
        found.append(Button("edit", label, why))
    if context.may("enqueue", queue) and life.row is not None:
        found.append(Button("enqueue", "Enqueue another…"))
    actions: tuple[BulkAction, ...] = ("requeue", "cancel", "purge")
    for action in actions:
        # A job without a row has failed, as far as its attempts tell.
        applies = life.state in APPLIES_TO[action] or (life.row is None and action == "requeue")
        if applies and context.may(RIGHTS[action], queue):
            why = _why_not(action, life)
            # What a completed job does would be done twice.
            is_asked = action == "purge" or (action == "requeue" and life.state == "completed")
            label = LABELS[action] + ("…" if is_asked else "")
            found.append(Button(action, label, why, is_asked=is_asked))
    return found


def _why_not(action: BulkAction, life: JobLife) -> str:
    if life.row is None:
        return "Its row was deleted, so it cannot run again."
    unique = life.uniqueness.value
    if action == "requeue" and unique is not None and unique.duplicate is not None:
        return f"Its duplicate, job {unique.duplicate}, counts: only one of the two can be unfinished."
    return ""
