"""The statements of one Consumer, each built once: building a statement costs more than a small claim."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import sqlalchemy as sa

from sqlaqueue._typing import AnySelect
from sqlaqueue.consumer.settings import ConsumerSettings
from sqlaqueue.flow_control.held_back import held_back
from sqlaqueue.flow_control.keys import flow_control
from sqlaqueue.flow_control.rates import reservation
from sqlaqueue.postgresql.claim_scan import by_priority, first_pending, from_cursor, pages, planned_anew
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.sql.portable import for_effect, set_setting
from sqlaqueue.sql.types import as_library_statement
from sqlaqueue.statements.claim import candidates_statement, claim_statement
from sqlaqueue.strategies import ClaimedJobs, ScanRange, Settlement
from sqlaqueue.strategies.columns import named
from sqlaqueue.strategies.update_status import alone_token, lost_twice, several_quarantined_token, shared_token

LIMIT = "sqlaqueue_limit"
KEYS = "sqlaqueue_keys"
KEY = "sqlaqueue_key"
EXCEPT = "sqlaqueue_except"
EXPECTED = "sqlaqueue_expected"
ANNOUNCEMENTS = "sqlaqueue_announcements"
RUN_TOKEN = "sqlaqueue_run_token"  # noqa: S105 - the name of a parameter

LOCK_TIMEOUT = "500ms"
"""The longest time to wait for a lock where others wait as well, for a transaction that has enqueued a duplicate, or
for the table of the attempt history: the settlement has locked jobs, whose leases are not extended."""

_ONE_AT_A_TIME = 3
"""With so many handlers or fewer, quarantined jobs run one at a time: half of the handlers are left to other jobs."""


class ConsumerStatements:
    """What a Consumer executes again and again, each statement built when it is first used.

    Parameters are bound by the names above. The values given here serve hooks that print a statement with its values:
    SQLAlchemy warns about a parameter that has none.

    :param excluding: whether no claim takes a job among the keys bound as ``EXCEPT``, quarantined or not, and whether
        there are statements that search for such jobs.
    """

    def __init__(self, settings: ConsumerSettings, *, excluding: bool = False) -> None:
        self._settings, self._spec, self._excluding = settings, settings.spec, excluding
        self._flow = flow_control(self._spec) if self._spec.flow_rules else None
        self._selected = settings.selection.select
        self._quarantined = self._spec.strategy.quarantined(self._spec)
        self._limit, self._one = sa.bindparam(LIMIT, 1, sa.Integer()), sa.literal(1)
        self._token = alone_token if settings.concurrency == 1 else shared_token
        self._completions: dict[tuple[bool, bool, bool, bool], Any] = {}
        scans = self._spec.strategy.supports_scan_range
        self._head = by_priority if scans and self._flow is None else None
        # With a distribution, its position is that of another value. Turns have an order of their own.
        in_order = scans and settings.distribution is None and (self._flow is None or self._flow.turn is None)
        self._cursor = from_cursor(self._spec) if in_order else None

    # -- the jobs they select ------------------------------------------------------------------------------------------

    def _is_among(self, parameter: str) -> sa.ColumnElement[bool]:
        keys = self._spec.keys
        return self._spec.key_in(keys, sa.bindparam(parameter, (), expanding=len(keys) > 1))

    def _excepted(self, narrowed: AnySelect) -> AnySelect:
        return narrowed.where(~self._is_among(EXCEPT)) if self._excluding else narrowed

    @cached_property
    def _usual(self) -> AnySelect:
        if self._quarantined is None:
            return self._selected.where(~self._is_among(EXCEPT))
        return self._excepted(self._selected.where(~self._quarantined))

    @cached_property
    def _marked(self) -> AnySelect:
        return self._selected if self._quarantined is None else self._excepted(self._selected.where(self._quarantined))

    @cached_property
    def _together(self) -> AnySelect | None:
        together = _may_run_together(self._spec, self._selected, self._settings.concurrency)
        return None if together is None else self._excepted(together)

    @cached_property
    def _among(self) -> AnySelect:
        return self._selected.where(self._is_among(KEYS))

    # -- claims --------------------------------------------------------------------------------------------------------

    def _claim(
        self,
        narrowed: AnySelect,
        limit: Any,
        token: Callable[[], uuid.UUID] = alone_token,
        *,
        announced: Any = None,
        scan_range: ScanRange | None = None,
        few: bool = False,
        admits_all: bool = False,
    ) -> Any:
        settings = self._settings
        # The name is asked for at each claim: this process may be a copy of the one that made the Consumer.
        worker = sa.bindparam(None, callable_=settings.worker, type_=sa.Text())
        return claim_statement(
            settings.selection._replace(select=narrowed, spec=settings.spec_of_shard),
            limit,
            lease=settings.lease,
            worker=worker,
            token=token,
            announcements=announced,
            scan_range=scan_range,
            # A claim from the cursor follows a full one.
            many_due=scan_range is not None and scan_range is self._cursor and self._flow is None,
            few=few,
            admits_all=admits_all,
            returns_deferred=False,
        )

    @cached_property
    def _announced(self) -> Any:
        return sa.bindparam(ANNOUNCEMENTS, "", sa.Text())

    @cached_property
    def claim(self) -> Any:
        """Claims up to ``LIMIT`` jobs that are not quarantined, nor among the keys bound as ``EXCEPT``."""
        return self._claim(self._usual, self._limit, self._token, scan_range=self._head)

    @cached_property
    def claim_and_notify(self) -> Any:
        """Claims, and notifies the others that jobs of the announcements bound as ``ANNOUNCEMENTS`` are claimed."""
        return self._claim(self._usual, self._limit, self._token, announced=self._announced, scan_range=self._head)

    @property
    def has_cursor(self) -> bool:
        """Whether a claim may begin at a scan cursor: the strategy may have no such order."""
        return self._cursor is not None

    @cached_property
    def claim_from_cursor(self) -> Any:
        """As ``claim``, from a scan cursor on."""
        return self._claim(self._usual, self._limit, self._token, scan_range=self._cursor)

    @cached_property
    def claim_from_cursor_and_notify(self) -> Any:
        return self._claim(self._usual, self._limit, self._token, announced=self._announced, scan_range=self._cursor)

    @cached_property
    def first_pending(self) -> Any:
        """Selects where in the claim order a scan cursor is to be, so that it passes over no job that is held back."""
        return first_pending(self._spec)

    @property
    def marks_rows(self) -> bool:
        """Whether rows can be marked as quarantined."""
        return self._quarantined is not None

    @cached_property
    def claim_quarantined(self) -> Any:
        """Claims one quarantined job."""
        return self._claim(self._marked, self._one, few=True)

    @cached_property
    def claim_quarantined_together(self) -> Any:
        """Claims up to ``LIMIT`` quarantined jobs that may run together; None where none may."""
        if self._together is None:
            return None
        return self._claim(self._together, self._limit, several_quarantined_token, few=True)

    @cached_property
    def select_quarantined(self) -> Any:
        """Selects the keys of two of them, for a single one is claimed by ``claim_quarantined``."""
        return None if self._together is None else _two_waiting(self._spec, self._together)

    @cached_property
    def claim_key(self) -> Any:
        """Claims the job with the key bound as ``KEYS``."""
        return self._claim(self._among, self._one, few=True)

    @cached_property
    def claim_to_settle(self) -> Any:
        """Claims it though flow control may hold it back: its run is to be settled, not to begin."""
        if self._flow is None or not self._spec.strategy.holds_transaction:
            return self.claim_key
        return self._claim(self._among, self._one, few=True, admits_all=True)

    # -- claims that exclude jobs, of several steps --------------------------------------------------------------------

    @cached_property
    def claim_keys(self) -> Any:
        """Claims up to ``LIMIT`` jobs among those with the keys bound as ``KEYS``."""
        return self._claim(self._among, self._limit, self._token, few=True)

    @cached_property
    def claim_locked(self) -> Any:
        """Claims them though flow control may hold them back: for it, rows that this transaction has locked run."""
        return self._claim(self._among, self._limit, self._token, few=True, admits_all=True)

    def _candidates(self, narrowed: AnySelect) -> Any:
        return candidates_statement(self._settings.selection._replace(select=narrowed), self._limit)

    @cached_property
    def candidates(self) -> Any:
        """Selects and locks the keys of up to ``LIMIT`` jobs that ``claim`` would take."""
        return self._candidates(self._usual)

    @cached_property
    def candidates_among(self) -> Any:
        """Selects and locks them among the jobs with the keys bound as ``KEYS``."""
        return self._candidates(self._among)

    @cached_property
    def candidates_quarantined(self) -> Any:
        """Selects and locks those of quarantined jobs; None where rows cannot be marked."""
        return self._candidates(self._marked) if self.marks_rows else None

    # -- flow control --------------------------------------------------------------------------------------------------

    @cached_property
    def quarantined_wait(self) -> Any:
        """Tells whether a quarantined job is pending, that a claim may have passed over."""
        return _pending_exists(self._spec, self._marked)

    @property
    def limits_keys(self) -> bool:
        """Whether flow control may hold a job back."""
        return self._flow is not None

    @cached_property
    def held_back(self) -> Any:
        """Selects what flow control holds back; None without it."""
        return None if self._flow is None else held_back(self._flow)

    @cached_property
    def reserve(self) -> tuple[Any, Sequence[Any]] | None:
        """Reserve the beginnings of the jobs bound as ``KEYS``, see ``reservation()``.

        None where a claim records them itself, or without rates.
        """
        reserves = self._flow is not None and self._flow.rates and self._spec.strategy.holds_transaction
        return reservation(self._spec, self._is_among(KEYS)) if reserves else None

    # -- what follows a claim ------------------------------------------------------------------------------------------

    @cached_property
    def load_rest(self) -> Any:
        """Loads what the mapping adds to the jobs bound as ``KEYS`` and a claim does not return.

        These are columns of other tables, joined relationships, expressions. None where a claim returns everything.
        """
        return _load_rest(self._settings, self._is_among(KEYS))

    def complete(self, *, one: bool, kept: bool = False, limited: bool = False, plain: bool = False) -> Any:
        """Return what completes the runs of the jobs bound as ``KEYS``, if the claim's token is that of ``RUN_TOKEN``.

        It returns one row with the number of completed runs if this is ``EXPECTED``; otherwise a row for each run, with
        the number and the key. None if the statement needs the instances, or writes values that differ for each batch.

        :param one: whether it completes one run, with the parts of the key bound as ``KEY_0`` and so on; it returns no
            rows then.
        :param kept: whether the server may keep the plan.
        :param limited: whether the transaction waits for locks for a moment only, from this statement on.
        :param plain: whether it returns a row for each run in any case, with the key: an engine other than PostgreSQL
            cannot select from what an UPDATE returns.
        """
        asked = one, kept, limited, plain
        if asked not in self._completions:
            self._completions[asked] = _complete(self._spec, one=one, kept=kept, limited=limited, plain=plain)
        return self._completions[asked]

    @cached_property
    def completes(self) -> bool:
        """Whether ``complete`` returns a statement."""
        return self.complete(one=True) is not None

    @cached_property
    def pages(self) -> Any:
        return as_library_statement(pages(self._spec.table))


def _pending_exists(spec: QueueSpec, candidates: AnySelect) -> AnySelect:
    some: AnySelect = candidates.with_only_columns(sa.literal_column("1"), maintain_column_froms=True)
    return sa.select(some.where(spec.in_state("pending")).exists())


def _load_rest(settings: ConsumerSettings, is_among: sa.ColumnElement[bool]) -> Any:
    selection = settings.selection
    if not settings.spec.strategy.keeps_rows:
        return None
    mapper = sa.inspect(selection.entity)
    mappers = {mapper, *mapper.with_polymorphic_mappers}
    joined = any(each.lazy in {"joined", False, "subquery"} for one in mappers for each in one.relationships)
    computed = any(
        not (each.deferred or isinstance(each.columns[0], sa.Column)) for one in mappers for each in one.column_attrs
    )
    # An ordinary SELECT loads what instances in the session lack, and leaves the rest of them alone.
    statement = sa.select(selection.entity).where(is_among).options(*selection.options)
    return statement if len(mappers) > 1 or joined or computed else None


def _may_run_together(spec: QueueSpec, candidates: AnySelect, concurrency: int) -> AnySelect | None:
    """Return those of ``candidates`` that are quarantined and may run together, None where none may."""
    quarantined = spec.strategy.quarantined(spec)
    if quarantined is None or concurrency <= _ONE_AT_A_TIME or not spec.strategy.supports_claim_token:
        return None
    return candidates.where(quarantined, ~lost_twice(spec)) if spec.has("lease_token") else None


def _two_waiting(spec: QueueSpec, quarantined: AnySelect) -> AnySelect:
    waiting = spec.strategy.pick(spec, quarantined, *spec.keys).where(spec.in_state("pending"))
    return waiting.where(*spec.due(spec.columns.get("run_at"))).limit(2)


def _complete(spec: QueueSpec, *, one: bool, kept: bool, limited: bool, plain: bool) -> Any:
    records_run = spec.strategy.holds_transaction and (spec.has("started_at") or spec.has("claimed_by"))
    # A statement that is built once cannot hold values that differ for each batch.
    if records_run or not spec.strategy.keeps_rows:
        return None
    keys: Any = sa.bindparam(KEYS, (), expanding=len(spec.keys) > 1)
    if one:
        keys = [tuple(sa.bindparam(f"{KEY}_{number}", type_=key.type) for number, key in enumerate(spec.keys))]
    verb = spec.strategy.settle(spec, ClaimedJobs([(sa.bindparam(RUN_TOKEN), keys)]), Settlement("completed"))
    if not isinstance(verb, sa.Update | sa.Delete):
        return None
    verb = verb if kept else verb.where(planned_anew())
    if limited:
        # Not by a statement of its own, which would be one more for each settlement.
        limit = set_setting("lock_timeout", LOCK_TIMEOUT)
        verb = verb.where(for_effect(sa.select(limit).scalar_subquery()))
    if one or plain:
        return as_library_statement(verb if one else verb.returning(*spec.keys))
    completed = verb.returning(*named(spec.keys)).cte("sqlaqueue_ended")
    number = sa.select(sa.func.count()).select_from(completed).scalar_subquery()
    some_are_missing = number != sa.bindparam(EXPECTED, 0, sa.BigInteger())
    # Nearly always one row: to fetch a key for each job takes longer than to complete its run.
    with_keys = sa.select(sa.literal(1)).subquery("sqlaqueue_one").outerjoin(completed, some_are_missing)
    return as_library_statement(sa.select(number, *completed.c).select_from(with_keys))
