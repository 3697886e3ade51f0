"""What the template of a list of jobs shows, made from the page that was read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlaqueue.web.access import Action
from sqlaqueue.web.context import Context
from sqlaqueue.web.data.job_columns import OTHER, JobColumn
from sqlaqueue.web.data.job_counts import Count
from sqlaqueue.web.data.job_filters import OF_STATE, OPERATORS, Condition, filterable, parameter_of
from sqlaqueue.web.data.job_pages import JobPage, ListRequest
from sqlaqueue.web.data.job_rows import Cell
from sqlaqueue.web.pages.list_link import list_fields

_NAMES = {"": "is", "min": "from", "max": "to", "starts": "starts with", "null": "is null"}
"""What the fields of the filter are called, by their operators."""

_SIGNS = {"": "=", "min": "≥", "max": "≤", "starts": "starts with"}

ACTIONS: dict[str | None, tuple[Action, ...]] = {
    None: ("requeue", "cancel", "purge"),
    "pending": ("cancel",),
    "processing": ("cancel",),
    OTHER: (),
}
"""The actions that a list of jobs in one state offers; in the other states requeue and purge."""

_KILO = 1024


@dataclass(frozen=True)
class Tab:
    """The list of the jobs of one state, or of some of them."""

    label: str
    url: str
    count: str
    is_current: bool
    is_part: bool
    """Whether its jobs are some of the list before."""


@dataclass(frozen=True)
class Header:
    """The head of a column."""

    label: str
    url: str | None
    """Sorts by the column; None if no index gives that order."""
    direction: str | None
    """``ascending`` or ``descending``, if the list is sorted by it."""
    is_numeric: bool


@dataclass(frozen=True)
class Chip:
    """A condition of the filter, with the URL of the list without it."""

    text: str
    url: str


@dataclass(frozen=True)
class Field:
    """A field of the form of the filter."""

    name: str
    label: str
    value: str
    choices: Sequence[tuple[str, str]] = ()
    """Values with their texts, if it is a list to choose from."""
    hint: str = ""


@dataclass(frozen=True)
class ListView:
    """A list of jobs, as the template shows it."""

    context: Context
    request: ListRequest
    counts: Mapping[str | None, Count] | None

    def url(self, pairs: Sequence[tuple[str, str]]) -> str:
        """Return the URL of a list of this queue."""
        return self.context.url("jobs", queue=self.context.queue, query=pairs)

    def job_url(self, key: str) -> str:
        """Return the URL of a job."""
        return self.context.url("job", queue=self.context.queue, query={"key": key})

    @property
    def is_of_other(self) -> bool:
        """Whether it lists the jobs whose status is none of the queue's values."""
        return self.request.wanted.state == OTHER

    @property
    def name(self) -> str:
        """What the list is called."""
        return (self.request.wanted.listed or "all").capitalize()

    def order_note(self, page: JobPage) -> str:
        """Return in which order due jobs are, where the head of a column does not say it."""
        wanted = self.request.wanted
        if wanted.only != "due":
            return ""
        by_priority, run_at = wanted.columns.by_role.get("priority"), wanted.columns.by_role.get("run_at")
        if by_priority is not None and page.sort == by_priority.name:
            return "In claim order: by priority, and then the job first that has been due for the longest time."
        if run_at is not None and run_at.name not in page.sorts:
            return "The newest keys come first, as no index of this table has the due jobs in the order of their time."
        return ""

    def tabs(self) -> list[Tab]:
        """Return the lists by state."""
        counts = self.counts or {}
        return [
            Tab(
                (state or "all").capitalize(),
                self.url(self._parameters(state=state, sort=None)),
                _count_text(count),
                state == self.request.wanted.listed,
                state in OF_STATE,
            )
            for state, count in counts.items()
            if state != OTHER or count.number or self.is_of_other
        ]

    def total(self) -> str:
        """Return how many jobs the list has, as far as they were counted."""
        return _count_text((self.counts or {}).get(self.request.wanted.listed, Count(0, is_complete=False)))

    def all_label(self) -> str:
        """Return what the jobs of the list are called where an action concerns all of them."""
        count = (self.counts or {}).get(self.request.wanted.listed)
        if count is None or not count.is_complete or not count.number:
            return "All matching jobs"
        return "The 1 matching job" if count.number == 1 else f"All {count.number:,} matching jobs"

    def headers(self, page: JobPage) -> list[Header]:
        """Return the heads of the columns beside the key."""
        return [self._header(page, each, each.name) for each in page.columns]

    def key_header(self, page: JobPage) -> Header:
        """Return the head of the key, by which every list can be sorted."""
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
            url = self.url(self._parameters(sort=sort))
        direction = ("descending" if is_descending else "ascending") if is_current else None
        return Header(label, url, direction, column.kind in {"integer", "number"} and not column.is_key)

    def chips(self, page: JobPage | None) -> list[Chip]:
        """Return the conditions of the filter."""
        wanted = self.request.wanted
        found = [Chip(_condition_text(each), self._without(each.parameter, page)) for each in wanted.conditions]
        if wanted.key is not None:
            found.insert(0, Chip(f"key = {wanted.key}", self._without("job", page)))
        if wanted.error is not None:
            found.append(Chip(f"error {wanted.error}", self._without("error", page)))
        return found

    def cleared(self) -> str:
        """Return the URL of the list without conditions but the state."""
        listed = self.request.wanted.listed
        return self.url([("state", listed)] if listed else [])

    def _without(self, parameter: str, page: JobPage | None) -> str:
        return self.url([pair for pair in self._parameters(sort=self.kept_sort(page)) if pair[0] != parameter])

    def kept_sort(self, page: JobPage | None) -> str | None:
        """Return the order, if the list has it with another filter as well."""
        sort = self.request.sort
        return sort if page is not None and sort and sort.removeprefix("-") in page.lasting_sorts else None

    def page_url(self, name: str, cursor: str | None) -> str | None:
        """Return the URL of the page after or before a cursor."""
        return None if cursor is None else self.url([*self.request.parameters(), (name, cursor)])

    def _parameters(self, **changed: str | None) -> list[tuple[str, str]]:
        return self.request.parameters(**changed)

    def hidden(self, page: JobPage | None) -> list[tuple[str, str]]:
        """Return the parameters that the form of the filter keeps."""
        own = [("state", self.request.wanted.listed), ("columns", self.request.columns), ("sort", self.kept_sort(page))]
        return [(name, value) for name, value in own if value]

    def carried(self) -> list[tuple[str, str]]:
        """Return the fields with which a form of an action carries this list."""
        return list_fields(self.request)

    def first_fields(self) -> list[Field]:
        """Return the fields that are always there."""
        wanted = self.request.wanted
        names = ",".join(each.name for each in wanted.columns.of_key)
        found = [Field("job", f"Key ({names})", wanted.key or "")]
        error = wanted.columns.by_role.get("last_error")
        if error is not None and not error.is_redacted:
            found.append(Field("error", "Kind of error", wanted.error or "", hint="ValueError"))
        return found

    def groups(self) -> list[tuple[JobColumn, list[Field]]]:
        """Return the fields of each column that can be filtered."""
        given = {each.parameter: each.text for each in self.request.wanted.conditions}
        return [
            (column, [self._field(column, operator, given) for operator in _operators(column)])
            for column in filterable(self.request.wanted.columns)
            if _operators(column) and not column.is_key
        ]

    def _field(self, column: JobColumn, operator: str, given: Mapping[str, str]) -> Field:
        name = parameter_of(column, operator)
        choices: Sequence[tuple[str, str]] = ()
        if operator == "null":
            choices = (("yes", "null"), ("no", "not null"))
        elif column.kind == "boolean":
            choices = (("true", "true"), ("false", "false"))
        elif column.kind == "enum":
            choices = [(each, each) for each in column.choices]
        hints = {"moment": "2030-12-31T08:00", "naive_moment": "2030-12-31T08:00", "date": "2030-12-31"}
        return Field(name, _NAMES[operator], given.get(name, ""), choices, hints.get(column.kind, ""))

    def actions(self) -> list[Action]:
        """Return the actions that the user may carry out on jobs of this list."""
        offered = ACTIONS.get(self.request.wanted.state, ("requeue", "purge"))
        return [each for each in offered if self.context.may(each, self.context.queue)]

    def link(self, cell: Cell) -> str | None:
        """Return the URL to which the application links a value."""
        if cell.text is None or cell.is_cut:
            return None
        value: Any = int(cell.text) if cell.column.kind == "integer" else cell.text
        return self.context.settings.link(self.context.queue.spec, str(cell.column.column.key), value)


def size_text(size: int) -> str:
    """Write a number of bytes."""
    if size < _KILO * _KILO:
        return f"{size / _KILO:.0f} kB"
    return f"{size / _KILO / _KILO:.1f} MB"


def _operators(column: JobColumn) -> list[str]:
    nullable = column.column.nullable
    return [each for each in OPERATORS[column.kind] if each != "null" or nullable]


def _condition_text(condition: Condition) -> str:
    if condition.operator == "null":
        return f"{condition.column.name} is {'' if condition.text == 'yes' else 'not '}null"
    return f"{condition.column.name} {_SIGNS[condition.operator]} {condition.text}"


def _count_text(count: Count) -> str:
    if not count.is_known:
        return "?"
    return f"{count.number:,}" if count.is_complete else f"{count.number:,}+"
