"""The columns of a queue's jobs: which there are, of what kind, and which of them a list shows first.

A column has the name of its attribute. Values are compared and shown as the database stores them: a type of the
application that converts them, such as a TypeDecorator, is not called.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any, Literal

import sqlalchemy as sa
from sqlalchemy.types import TypeEngine

from sqlaqueue.postgresql.facts import Form
from sqlaqueue.queue.options import STATES
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.web.data.engines import plain_type
from sqlaqueue.web.data.reader import ParameterError

Kind = Literal[
    "state", "integer", "number", "text", "boolean", "enum", "uuid", "moment", "naive_moment", "date", "bytes", "other"
]

IsRedacted = Callable[[QueueSpec, str], bool]
"""Returns whether a column is redacted, by the name of its attribute or by its role."""

OTHER = "other"
"""The state of jobs whose status is not one of the queue's values."""

_FIRST = 4
"""The number of the user's own columns that a list shows first."""

_SHORT = 255
"""The length up to which a text column is among them."""

_LAST = ("run_at", "last_error", "created_at", "started_at", "finished_at", "attempts")
"""The roles that a list shows first, after the user's columns, in this order."""

_WITHOUT_VALUES: dict[str, tuple[str, ...]] = {
    "": ("started_at", "run_at"),
    "pending": ("started_at", "finished_at"),
    "due": ("started_at", "finished_at"),
    "waiting": ("finished_at",),
    "processing": ("run_at", "finished_at"),
    "expired": ("run_at", "finished_at", "created_at"),
}
"""Which of them say nothing, by list; in the other states run_at and started_at."""

_FURTHER: dict[str, tuple[str, ...]] = {"due": ("priority",), "expired": ("lease_expires_at", "claimed_by")}
"""The roles that some lists show as well."""


@dataclass(frozen=True, kw_only=True, eq=False)
class JobColumn:
    name: str
    column: sa.Column[Any]
    kind: Kind
    role: str | None
    """Its role in the queue; None for a column of the application."""
    is_key: bool
    is_redacted: bool
    choices: tuple[str, ...] = ()
    """The values of an enum, as the database stores them."""

    @property
    def form(self) -> Form:
        if self.kind == "text" or self.kind == "bytes":  # noqa: PLR1714 - a type checker then knows which they are
            return self.kind
        if self.kind in {"moment", "naive_moment", "date"}:
            return "moment"
        return "large" if self.kind == "other" else "short"

    @property
    def stored_type(self) -> TypeEngine[Any]:
        """The type without conversions by the application."""
        return stored_type(self.column.type)


class JobColumns(Mapping[str, JobColumn]):
    def __init__(self, spec: QueueSpec, columns: Sequence[JobColumn]) -> None:
        self.spec = spec
        self._columns = {each.name: each for each in columns}
        self._by_column = {each.column.name: each for each in columns}
        self.by_role = {each.role: each for each in columns if each.role is not None}

    def __getitem__(self, name: str) -> JobColumn:
        return self._columns[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)

    def stored_as(self, name: str) -> JobColumn | None:
        return self._by_column.get(name)

    @property
    def of_key(self) -> list[JobColumn]:
        found = [self.stored_as(column.name) for column in self.spec.keys]
        return [each for each in found if each is not None]

    def chosen(self, names: str | None, listed: str | None = None) -> list[JobColumn]:
        """Return the columns that a list shows beside the key; some have no values in some of the lists."""
        if not names:
            return self._first(listed)
        wanted: list[JobColumn] = []
        for name in names.split(","):
            if name not in self._columns:
                raise ParameterError("columns", f"there is no column {name[:100]!r}")
            if self._columns[name] not in wanted:
                wanted.append(self._columns[name])
        return wanted

    def _first(self, listed: str | None) -> list[JobColumn]:
        own = [each for each in self.values() if each.role is None and not each.is_key and _is_short(each)]
        hidden = _WITHOUT_VALUES.get(listed or "", ("run_at", "started_at"))
        further = _FURTHER.get(listed or "", ())
        roles = ["status", *further, *(role for role in _LAST if role not in hidden)]
        status, *last = [self.by_role.get(role) for role in roles]
        return [each for each in (status, *own[:_FIRST], *last) if each is not None]


def columns_of(spec: QueueSpec, is_redacted: IsRedacted) -> JobColumns:
    """Return the columns of a queue's table that its class, or a subclass in the same table, maps."""
    roles = {column: role for role, column in spec.columns.items()}
    found: dict[sa.Column[Any], JobColumn] = {}
    names: set[str] = set()
    for mapper in spec.mapper.self_and_descendants:
        for attribute in mapper.column_attrs:
            for column in attribute.columns:
                # A mapped SQL expression is no column, and that of a joined subclass is in another table.
                if not isinstance(column, sa.Column) or column.table is not spec.table or column in found:
                    continue
                # Two subclasses may have different columns under one name.
                name = attribute.key if attribute.key not in names else f"{mapper.class_.__name__}:{attribute.key}"
                names.add(name)
                role = roles.get(column)
                aliases = {name, attribute.key, column.key, column.name, *([] if role is None else [role])}
                found[column] = JobColumn(
                    name=name,
                    column=column,
                    kind="state" if role == "status" else kind_of_type(column.type),
                    role=role,
                    is_key=column in spec.keys,
                    is_redacted=any(is_redacted(spec, alias) for alias in aliases),
                    choices=choices_of(column.type),
                )
    in_order = sorted(found.values(), key=lambda each: (not each.is_key, each.role is not None))
    return JobColumns(spec, in_order)


def states_of(spec: QueueSpec) -> list[str]:
    if not spec.has("status"):
        # Claims delete the rows, so that one is pending or in the table of dead letters.
        return ["pending", "failed", "cancelled"]
    stored = [state for state in STATES if getattr(spec.config.states, state) is not None]
    # While a transaction holds a job, others see it as pending.
    named = [state for state in stored if state != "processing" or not spec.strategy.holds_transaction]
    return [*named, OTHER]


def state_of(spec: QueueSpec, status: sa.ColumnElement[Any]) -> sa.ColumnElement[str]:
    stored = [state for state in STATES if getattr(spec.config.states, state) is not None]
    whens: list[Any] = [(status == spec.literal(state), sa.literal_column(f"'{state}'")) for state in stored]
    return sa.type_coerce(sa.case(*whens, else_=sa.literal_column(f"'{OTHER}'")), sa.Text())


def stored_type(type_: TypeEngine[Any]) -> TypeEngine[Any]:
    found: TypeEngine[Any] = plain_type(type_)
    return found


def kind_of_type(type_: TypeEngine[Any]) -> Kind:
    stored = stored_type(type_)
    kinds: tuple[tuple[type[Any], Kind], ...] = (
        (sa.Enum, "enum"),
        (sa.Boolean, "boolean"),
        (sa.Integer, "integer"),
        (sa.Numeric, "number"),
        (sa.Float, "number"),
        (sa.String, "text"),
        (sa.LargeBinary, "bytes"),
        (sa.Date, "date"),
    )
    if isinstance(stored, sa.DateTime):
        return "moment" if stored.timezone else "naive_moment"
    if isinstance(stored, sa.Uuid):
        return "uuid" if stored.native_uuid else "text"
    for cls, kind in kinds:
        if isinstance(stored, cls):
            return "other" if kind == "boolean" and not getattr(stored, "native", True) else kind
    return "other"


def choices_of(type_: TypeEngine[Any]) -> tuple[str, ...]:
    stored = stored_type(type_)
    return tuple(str(label) for label in stored.enums) if isinstance(stored, sa.Enum) else ()


def _is_short(column: JobColumn) -> bool:
    if column.kind in {"bytes", "other"}:
        return False
    length = getattr(column.stored_type, "length", None)
    return (
        column.kind != "text"
        or not isinstance(column.stored_type, sa.Text | sa.LargeBinary)
        or bool(length and length <= _SHORT)
    )


_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],:]|[^\s{}\[\],:"]+', re.DOTALL)
_INDENT = "  "
_DEEPEST = 20


def indented(text: str) -> str:
    """Return JSON with a line for each element. A parser would round numbers, and refuse very long integers."""
    written: list[str] = []
    is_broken: list[bool] = []
    parts = _TOKEN.findall(text)
    for number, part in enumerate(parts):
        following = parts[number + 1] if number + 1 < len(parts) else ""
        if part in "{[":
            written.append(part)
            # Beyond some depth the indentation is most of the text: for 100 kB, up to 2 MB.
            is_broken.append(following not in "}]" and len(is_broken) < _DEEPEST)
            if is_broken[-1]:
                written.append("\n" + _INDENT * len(is_broken))
        elif part in "}]":
            if is_broken and is_broken.pop():
                written.append("\n" + _INDENT * len(is_broken))
            written.append(part)
        elif part == "," and is_broken and is_broken[-1]:
            written.append(",\n" + _INDENT * len(is_broken))
        else:
            written.append(f"{part} " if part in ",:" else part)
    return "".join(written)


def parse_exact(text: str) -> Any:
    """Return JSON as Python values; refuse NaN, infinities, and numbers that would be rounded."""

    def number(digits: str) -> float:
        value = float(digits)
        try:
            is_exact = Decimal(repr(value)) == Decimal(digits)
        except InvalidOperation:  # an exponent that not even a Decimal has
            is_exact = False
        if not is_exact:
            raise ValueError(
                f"the number {digits[:50]} would be rounded; write it as a text, or change it in a program"
            )
        return value

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is no JSON")

    return json.loads(text, parse_float=number, parse_constant=refuse)
