"""The contract between a queue and its claim strategy: the data that both exchange, and what a strategy has to offer.

This module imports only leaves of the library, so that every folder can name a strategy in a type. The base class for
strategies, with the contract in its docstrings, is :class:`sqlaqueue.strategies.base.ClaimStrategy`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, TypeAlias
from uuid import UUID

import sqlalchemy as sa

from sqlaqueue._typing import AnySelect
from sqlaqueue.queue.run import Key

Spec: TypeAlias = Any
"""A :class:`~sqlaqueue.queue.spec.QueueSpec`. That class has a strategy as a field, and naming it here would close a
circle of imports."""

Keys = Sequence[Key] | sa.BindParameter[Any]
Token = UUID | str | sa.BindParameter[Any] | None

Verb = sa.Update | sa.Delete | sa.Insert | AnySelect
"""A statement that changes jobs. Its caller adds the RETURNING of their keys."""

ScanRange = Callable[[Sequence[sa.ColumnElement[Any]]], sa.ColumnElement[bool]]
"""Makes a condition from the columns of the claim order, as the scanned table has them."""

Privilege = Literal["SELECT", "INSERT", "UPDATE", "DELETE"]


class ClaimRequest(NamedTuple):
    """What a claim is made of. Later versions may add fields; a strategy ignores those that it has no use for."""

    spec: Spec
    candidates: AnySelect
    """A SELECT of the model, or of a subclass, with the caller's filters and without an order."""
    limit: Any
    """A bound number: the most rows to claim."""
    lease: Any
    """A bound interval: how long the claim is valid without being extended."""
    worker: Any
    """A bound text: the name of the claiming worker."""
    token: Any
    """A bound UUID, new for each execution, that identifies this claim."""
    scan_range: ScanRange | None = None
    """Limits the scan to a part of the claim order; None for all of it. The condition belongs next to the ORDER BY,
    where it can bound the scan of the index."""
    few: bool = False
    """Whether the candidates are few, and found by their keys or by an index of their own. A claim under flow control
    then reads them together, instead of key by key."""
    admits_all: bool = False
    """Whether flow control holds no job back: the claim is to settle a job that has run already."""


@dataclass(frozen=True, eq=False)
class ClaimSteps:
    """A claim in steps, for engines that cannot execute it as one statement: candidates, locks, changes, rows."""

    request: ClaimRequest
    """Without conditions that are for the planner of PostgreSQL only."""
    columns: Sequence[sa.Column[Any]]
    """What is returned of each row; none to lock the rows only, and to return their keys."""
    announcements: sa.BindParameter[str] | None = None
    """The ids of the announcements that the claim answers."""


class LockSteps(NamedTuple):
    """An UPDATE or DELETE of rows that its condition locks: the locks first, then the change of the rows by their keys.

    An engine that can lock rows within another statement executes it as it is.
    """

    keys: Sequence[sa.Column[Any]]
    """The key of the table."""
    rows: AnySelect
    """A SELECT of the keys, without a lock."""
    waits: bool = False
    """Whether it waits for rows that others have locked; otherwise it passes over them."""
    values: Mapping[sa.Column[Any], Any] = MappingProxyType({})
    """Those of its values that read other rows or columns; they are read before the change."""
    joins: bool = False
    """Whether the statement joins the SELECT; otherwise it has an ``AmongLocked`` of
    :mod:`sqlaqueue.strategies.columns`."""
    limited: bool = False
    """Whether the SELECT has a limit, so that it finds others for the rows that are locked."""


class CancelSteps(NamedTuple):
    """The cancellation of jobs: pending ones at once, running ones by a request."""

    spec: Spec
    waiting: AnySelect
    """A SELECT of the keys of the jobs without a run."""
    unfinished: AnySelect
    """A SELECT of the keys of all jobs that have not ended."""
    cancelled: sa.Update | sa.Delete
    """The change, without a condition; what a DELETE deletes becomes a dead letter."""


class DeletedSteps(NamedTuple):
    """A settlement of jobs whose rows the claim has deleted: they are inserted again, or become dead letters."""

    spec: Spec
    held: ClaimedJobs
    change: Callable[[Sequence[Any]], sa.Insert] | None = None
    """Makes the INSERT from some of the instances; None to insert nothing."""
    was_committed: bool = False
    """Whether the jobs are those whose claim was committed, and not those that this transaction holds."""


class LetterSteps(NamedTuple):
    """The deletion of dead letters, which may become jobs again."""

    spec: Spec
    letters: AnySelect
    """A SELECT of the columns of the job table, of the key of each letter, and of what else it has; without a lock."""
    back: Callable[[sa.FromClause], sa.Insert] | None = None
    """Makes the INSERT of jobs from the letters; None to delete them only."""
    limited: bool = False
    """Whether the SELECT has a limit, so that it finds others for the letters that are locked."""


class RescueSteps(NamedTuple):
    """A rescue that inserts the attempts that it ends."""

    spec: Spec
    expired: AnySelect
    """A SELECT of the keys of the jobs whose lease has expired, and of what the history has of their runs."""
    rescued: sa.Update
    """The change, without its keys and values."""
    values: Mapping[sa.Column[Any], Any]
    """Its values."""


class ChangeIfUnique(NamedTuple):
    """What is written into jobs that come back, and into those whose place a duplicate has taken."""

    back: Mapping[sa.Column[Any], Any]
    instead: Mapping[sa.Column[Any], Any]
    """Empty to leave the jobs that have a duplicate as they are."""
    where: Sequence[sa.ColumnElement[bool]] = ()
    """Conditions on the jobs to change."""


class JudgeSteps(NamedTuple):
    """A statement that brings jobs back unless they have a duplicate."""

    spec: Spec
    rows: AnySelect
    """A SELECT of the keys and of what duplicates are found by."""
    waits: bool
    """Whether it waits for rows that others have locked; otherwise it passes over them."""
    more: Sequence[str]
    """The names of further columns of ``rows`` that ``change`` reads."""
    change: Callable[[Any], ChangeIfUnique]
    """Makes the values from an object whose ``c`` has the columns ``more``, and that of the duplicate."""
    rescues: bool = False
    """Whether only jobs that were changed are returned, and their attempts are inserted into the history."""


class LookSteps(NamedTuple):
    """A look at jobs that wait for others, for engines whose triggers do not count."""

    spec: Spec
    part: KeyRange


class ReturnSteps(NamedTuple):
    """A statement that requeues jobs, for engines on which no trigger brings back what was cancelled for them."""

    spec: Spec
    finished: AnySelect
    """A SELECT of the keys of the jobs that are requeued."""


class FailSteps(NamedTuple):
    """A statement by which heads of an order fail, for engines on which no trigger cancels the jobs behind them."""

    spec: Spec
    failing: sa.ColumnElement[bool]
    """The condition on the jobs that the statement is about to fail."""
    waits: bool
    """Whether the statement waits for jobs that others have locked; otherwise it passes over them."""


class ClaimedJobs(NamedTuple):
    """The runs that a statement settles or extends: jobs of one claim or of several."""

    claims: Sequence[tuple[Token, Keys]]
    """The token of each claim, with the keys of its jobs."""
    jobs: Sequence[Any] = ()
    """The instances, where the caller has them."""


class Settlement(NamedTuple):
    """How runs end: the next state, and what is written with it."""

    state: Literal["completed", "pending", "failed", "cancelled"]
    starts: Any = 1
    """How many starts count as attempts; 0 returns the attempt."""
    run_at: sa.ColumnElement[Any] | None = None
    """When a job that becomes pending is due; None leaves the column as it is."""
    error: sa.ColumnElement[Any] | None = None
    """The text for ``last_error``; None leaves the column as it is."""
    started_at: sa.ColumnElement[Any] | None = None
    """When the run started, for a strategy whose claim writes nothing; None leaves ``claimed_by`` as well."""
    worker: sa.ColumnElement[Any] | None = None
    """The text for ``claimed_by``; written with ``started_at`` only."""
    quarantine: bool = False
    """Whether a job that becomes pending is quarantined: whether it fulfils :meth:`Strategy.quarantined` afterwards."""


@dataclass(frozen=True)
class KeyRange:
    """Jobs by their keys: those greater than ``after``, up to and including ``upto``; None for no bound."""

    after: Key | None = None
    upto: Key | None = None

    def holds(self, columns: Sequence[sa.ColumnElement[Any]]) -> sa.ColumnElement[bool]:
        """Return the condition that the key in ``columns``, those of a job or of its message, is in the range."""
        key = _row(columns)
        bounds = [] if self.after is None else [key > _row_of(self.after, columns)]
        if self.upto is not None:
            bounds.append(key <= _row_of(self.upto, columns))
        return sa.and_(sa.true(), *bounds)


@dataclass(frozen=True, eq=False)
class RequiredPrivilege:
    """A privilege that a Consumer's role needs on a table."""

    privilege: Privilege
    table: sa.Table
    columns: Sequence[sa.Column[Any]] = ()
    """The columns that a grant may be limited to; empty when the table as a whole is meant, as with DELETE."""
    generated: Sequence[sa.Column[Any]] = ()
    """The columns whose values come from a sequence, on which USAGE is needed as well."""

    @property
    def whole(self) -> bool:
        """Whether every column is needed."""
        return len(self.columns) in {0, len(self.table.c)}


class Strategy(Protocol):
    """What the library asks of a strategy. :class:`sqlaqueue.strategies.base.ClaimStrategy` documents each member."""

    name: ClassVar[str]
    holds_transaction: ClassVar[bool]
    keeps_rows: ClassVar[bool]
    supports_scan_range: ClassVar[bool]
    supports_claim_token: ClassVar[bool]
    supports_flow_control: ClassVar[bool]
    tells_running_apart: ClassVar[bool]
    required_roles: ClassVar[Mapping[str, str]]

    def for_roles(self, spec_roles: Mapping[str, Any]) -> Any: ...
    def attach(self, spec: Spec) -> None: ...
    def locked_tables(self, spec: Any) -> Sequence[sa.Table]: ...
    def required_privileges(self, spec: Spec) -> Iterable[RequiredPrivilege]: ...
    def claim(self, request: ClaimRequest) -> AnySelect: ...
    def picked(self, request: ClaimRequest) -> sa.CTE: ...
    def quarantined(self, spec: Spec) -> sa.ColumnElement[bool] | None: ...
    def upcoming(self, spec: Spec, limit: int, *, by_priority: bool) -> AnySelect: ...
    def pending_jobs(self, spec: Spec, limit: int) -> AnySelect: ...
    def insert_new_messages(self, spec: Any, keys: Sequence[Key]) -> sa.Insert | None: ...
    def fence(self, spec: Spec, held: ClaimedJobs) -> sa.ColumnElement[bool]: ...
    def settle(self, spec: Spec, held: ClaimedJobs, settlement: Settlement) -> Verb: ...
    def extend(self, spec: Spec, held: ClaimedJobs, lease: Any) -> Verb: ...
    def restore(self, spec: Spec, held: ClaimedJobs) -> Verb | None: ...
    def rescue(self, spec: Spec) -> Verb: ...
    def rescue_some(self, spec: Spec, keys: Sequence[Key]) -> Verb: ...
    def reconcile(self, spec: Spec) -> Verb: ...
    def reconcile_range(self, spec: Spec, part: KeyRange) -> Verb | None: ...
    def cancel(self, spec: Spec, chosen: AnySelect) -> Verb: ...
    def requeue(self, spec: Spec, chosen: AnySelect) -> Verb: ...
    def purge(self, spec: Spec, chosen: AnySelect, states: Sequence[str], age: Any, limit: Any) -> Verb: ...
    def list_jobs(self, spec: Spec, chosen: AnySelect, states: Sequence[str] | None = None) -> AnySelect: ...
    def job_states(self, spec: Spec, keys: Sequence[Key]) -> AnySelect: ...
    def pick(self, spec: Spec, candidates: AnySelect, *columns: sa.Column[Any]) -> AnySelect: ...
    def lock(self, spec: Spec, rows: AnySelect, *others: sa.FromClause) -> AnySelect: ...
    def first_due(
        self, spec: Spec, waiting: AnySelect, scanned: sa.FromClause, limit: Any, scan_range: ScanRange | None
    ) -> AnySelect: ...


def _row(columns: Sequence[sa.ColumnElement[Any]]) -> sa.ColumnElement[Any]:
    return columns[0] if len(columns) == 1 else sa.tuple_(*columns)


def _row_of(key: Key, columns: Sequence[sa.ColumnElement[Any]]) -> sa.ColumnElement[Any]:
    return _row([sa.literal(value, column.type) for value, column in zip(key, columns, strict=True)])
