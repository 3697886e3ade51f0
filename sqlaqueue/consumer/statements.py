"""The statements of one Consumer, built once: building a statement costs more than a small claim."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from typing import Any

import sqlalchemy as sa

from sqlaqueue._typing import AnySelect
from sqlaqueue.consumer.settings import ConsumerSettings
from sqlaqueue.flow_control.held_back import held_back
from sqlaqueue.flow_control.keys import flow_control
from sqlaqueue.flow_control.rates import reservation
from sqlaqueue.postgresql.claim_scan import by_priority, from_cursor, planned_anew
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.sql.types import as_library_statement
from sqlaqueue.statements.claim import candidates_statement, claim_statement
from sqlaqueue.strategies import ClaimedJobs, ScanRange, Settlement
from sqlaqueue.strategies.columns import named
from sqlaqueue.strategies.update_status import alone_token, lost_twice, several_quarantined_token, shared_token

LIMIT = "sqlaqueue_limit"
KEYS = "sqlaqueue_keys"
EXCEPT = "sqlaqueue_except"
EXPECTED = "sqlaqueue_expected"
ANNOUNCEMENTS = "sqlaqueue_announcements"
RUN_TOKEN = "sqlaqueue_run_token"  # noqa: S105 - the name of a parameter

_ONE_AT_A_TIME = 3
"""With so many handlers or fewer, quarantined jobs run one at a time: half of the handlers are left to other jobs."""


class ConsumerStatements:
    """What a Consumer executes again and again. Parameters are bound by the names above.

    :param excluding: whether no claim takes a job among the keys bound as ``EXCEPT``, quarantined or not, and whether
        to build what searches for such jobs.
    """

    def __init__(self, settings: ConsumerSettings, *, excluding: bool = False) -> None:  # noqa: PLR0915 - one for each attribute
        selection, spec, spec_of_shard = settings.selection, settings.spec, settings.spec_of_shard

        def claims(
            narrowed: AnySelect,
            limit: Any,
            token: Callable[[], uuid.UUID] = alone_token,
            *,
            announced: Any = None,
            scan_range: ScanRange | None = None,
            few: bool = False,
            admits_all: bool = False,
        ) -> Any:
            # The name is asked for at each claim: this process may be a copy of the one that made the Consumer.
            worker = sa.bindparam(None, callable_=settings.worker, type_=sa.Text())
            return claim_statement(
                selection._replace(select=narrowed, spec=spec_of_shard),
                limit,
                lease=settings.lease,
                worker=worker,
                token=token,
                announcements=announced,
                scan_range=scan_range,
                # A claim from the cursor follows a full one.
                many_due=scan_range is not None and scan_range is cursor,
                few=few,
                admits_all=admits_all,
            )

        def candidates(narrowed: AnySelect) -> Any:
            return candidates_statement(selection._replace(select=narrowed), limit)

        def is_among(parameter: str) -> sa.ColumnElement[bool]:
            return spec.key_in(spec.keys, sa.bindparam(parameter, (), expanding=len(spec.keys) > 1))

        flow = flow_control(spec) if spec.flow_options else None
        # A cursor would pass over jobs that were held back.
        head, cursor = (
            (by_priority, from_cursor(spec)) if spec.strategy.supports_scan_range and flow is None else (None, None)
        )
        if settings.distribution is not None:
            # Its position is that of another value.
            cursor = None
        # Each execution passes its own values. The values given here serve hooks that print a statement with its
        # values: SQLAlchemy warns about a parameter that has none.
        limit, one = sa.bindparam(LIMIT, 1, sa.Integer()), sa.literal(1)
        quarantined = spec.strategy.quarantined(spec)
        together = _may_run_together(spec, selection.select, settings.concurrency)
        token = alone_token if settings.concurrency == 1 else shared_token
        usual = selection.select.where(~(is_among(EXCEPT) if quarantined is None else quarantined))
        marked = selection.select if quarantined is None else selection.select.where(quarantined)
        if excluding and quarantined is not None:
            usual, marked = usual.where(~is_among(EXCEPT)), marked.where(~is_among(EXCEPT))
            together = None if together is None else together.where(~is_among(EXCEPT))
        among = selection.select.where(is_among(KEYS))
        announced = sa.bindparam(ANNOUNCEMENTS, "", sa.Text())

        self.claim: Any = claims(usual, limit, token, scan_range=head)
        """Claims up to ``LIMIT`` jobs that are not quarantined, nor among the keys bound as ``EXCEPT``."""
        self.claim_and_notify: Any = claims(usual, limit, token, announced=announced, scan_range=head)
        """Claims, and notifies the others that jobs of the announcements bound as ``ANNOUNCEMENTS`` are claimed."""
        self.claim_from_cursor: Any = cursor and claims(usual, limit, token, scan_range=cursor)
        """As ``claim``, from a scan cursor on; None where the strategy has no such order."""
        self.claim_from_cursor_and_notify: Any = cursor and claims(
            usual, limit, token, announced=announced, scan_range=cursor
        )
        self.claim_quarantined: Any = None if quarantined is None else claims(marked, one, few=True)
        """Claims one quarantined job; None where rows cannot be marked."""
        self.claim_quarantined_together: Any = (
            None if together is None else claims(together, limit, several_quarantined_token, few=True)
        )
        """Claims up to ``LIMIT`` quarantined jobs that may run together; None where none may."""
        self.select_quarantined: Any = None if together is None else _two_waiting(spec, together)
        """Selects the keys of two of them, for a single one is claimed by ``claim_quarantined``."""
        self.claim_key: Any = claims(among, one, few=True)
        self.claim_to_settle: Any = self.claim_key
        """Claims it though flow control may hold it back: its run is to be settled, not to begin."""
        if flow is not None and spec.strategy.holds_transaction:
            self.claim_to_settle = claims(among, one, few=True, admits_all=True)
        self.claim_keys: Any = claims(among, limit, token, few=True) if excluding else None
        """Claims up to ``LIMIT`` jobs among those with the keys bound as ``KEYS``. This one and the next four are None
        in statements that exclude no jobs."""
        self.claim_locked: Any = claims(among, limit, token, few=True, admits_all=True) if excluding else None
        """Claims them though flow control may hold them back: for it, rows that this transaction has locked run."""
        self.candidates: Any = candidates(usual) if excluding else None
        """Selects and locks the keys of up to ``LIMIT`` jobs that ``claim`` would take."""
        self.candidates_among: Any = candidates(among) if excluding else None
        """Selects and locks them among the jobs with the keys bound as ``KEYS``."""
        self.candidates_quarantined: Any = candidates(marked) if excluding and quarantined is not None else None
        """Selects and locks those of quarantined jobs; None where rows cannot be marked."""
        self.quarantined_wait: Any = None if flow is None or quarantined is None else _pending_exists(spec, marked)
        """Tells whether a quarantined job is pending; None without flow control, which may hold it back."""
        self.held_back: Any = None if flow is None else held_back(flow)
        reserves = flow is not None and flow.rates and spec.strategy.holds_transaction
        self.reserve: tuple[Any, Sequence[Any]] | None = reservation(spec, is_among(KEYS)) if reserves else None
        """Reserve the beginnings of the jobs bound as ``KEYS``, see ``reservation()``; None where a claim records them
        itself, or without rates."""
        self.load_rest: Any = _load_rest(settings, is_among(KEYS))
        """Loads what the mapping adds to the jobs bound as ``KEYS`` and a claim does not return: columns of other
        tables, joined relationships, expressions. None where a claim returns everything."""
        self.complete: Any = _complete(spec)
        """Completes the runs of the jobs bound as ``KEYS``, if the token of their claim is the one bound as
        ``RUN_TOKEN``. Returns one row with the number of completed runs if this is ``EXPECTED``; otherwise a row for
        each run, with the number and the key. None if the statement needs the instances, or writes values that differ
        for each batch."""


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


def _complete(spec: QueueSpec) -> Any:
    records_run = spec.strategy.holds_transaction and (spec.has("started_at") or spec.has("claimed_by"))
    # A statement that is built once cannot hold values that differ for each batch.
    if records_run or not spec.strategy.keeps_rows:
        return None
    keys: sa.BindParameter[Any] = sa.bindparam(KEYS, (), expanding=len(spec.keys) > 1)
    verb = spec.strategy.settle(spec, ClaimedJobs([(sa.bindparam(RUN_TOKEN), keys)]), Settlement("completed"))
    if not isinstance(verb, sa.Update | sa.Delete):
        return None
    completed = verb.where(planned_anew()).returning(*named(spec.keys)).cte("sqlaqueue_ended")
    number = sa.select(sa.func.count()).select_from(completed).scalar_subquery()
    some_are_missing = number != sa.bindparam(EXPECTED, 0, sa.BigInteger())
    # Nearly always one row: to fetch a key for each job takes longer than to complete its run.
    with_keys = sa.select(sa.literal(1)).subquery("sqlaqueue_one").outerjoin(completed, some_are_missing)
    return as_library_statement(sa.select(number, *completed.c).select_from(with_keys))
