"""The claim: :func:`claim` and the statement that a Consumer prepares once."""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from sqlalchemy.orm import undefer

from sqlaqueue._typing import AnySelect
from sqlaqueue.exc import StatementError
from sqlaqueue.mapping.runs import CLAIM_OPTION, RUN_ROLES
from sqlaqueue.notify_payloads import CLAIMED
from sqlaqueue.postgresql.claim_scan import planned_anew, planned_anew_for_many, queue_paused
from sqlaqueue.postgresql.triggers import notification
from sqlaqueue.queue.config import is_count
from sqlaqueue.queue.names import CONTROL
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.queue.strategy_protocol import ClaimSteps
from sqlaqueue.sessions import WRITES_OPTION
from sqlaqueue.sql.engine import OURS, STEPS, Steps
from sqlaqueue.sql.portable import Span, joined
from sqlaqueue.sql.types import as_library_statement
from sqlaqueue.statements.selection import JobSelection, returning_detached, select_jobs
from sqlaqueue.strategies import ClaimRequest, ScanRange
from sqlaqueue.strategies.columns import column_of
from sqlaqueue.strategies.update_status import alone_token

_CACHED_STATEMENTS = 64
_cache: dict[tuple[type[Any], int], Any] = {}


def worker_name() -> str:
    """Return the name of this process, ``host:pid``, which ``claim()`` writes to ``claimed_by``."""
    # Whatever the encoding of the database; a host may have any bytes as its name.
    host = socket.gethostname().encode("ascii", "backslashreplace").decode()
    return f"{host}:{os.getpid()}"


if TYPE_CHECKING:
    from sqlaqueue._typing import claim as claim  # noqa: PLC0414 - an explicit export, for type checkers
else:

    def claim(model: Any, /, n: int) -> Any:
        """Return a statement that claims up to ``n`` due jobs in claim order and returns their instances.

        Under a strategy with leases, commit soon: other workers see the claim after the commit. Under a strategy that
        holds a transaction, the jobs belong to the transaction until it ends. Loader options such as
        ``selectinload()`` work on the select and on the returned statement; ``joinedload()`` has no effect.

        ::

            emails = session.scalars(claim(Email, 10)).all()
            session.commit()
            mine = session.scalars(claim(select(Email).where(Email.customer_id == 1), n=1)).one_or_none()

        :param model: a queue class, or ``select(Model).where(...)`` to claim only some of its jobs.
        :param n: the maximum number of jobs. A claim may return fewer while other workers claim; an empty result does
            not mean that the queue is empty.
        :raises NotAQueueError: if ``model`` is not a queue.
        :raises StatementError: if ``n`` is not a positive integer, the rows of the select cannot be locked, or the
            queue has rates and a strategy that holds a transaction.
        """
        if not is_count(n):
            name = model.__name__ if isinstance(model, type) else type(model).__name__
            msg = f"claim({name}, {n!r}): the number of jobs must be an integer of 1 or more"
            raise StatementError(msg)
        # Building a statement takes longer than executing a small claim.
        statement = _cache.get((model, n)) if isinstance(model, type) else None
        if statement is None:
            selection = select_jobs(model, "claim")
            spec = selection.spec
            if spec.config.rates and spec.strategy.holds_transaction:
                msg = (
                    f"claim({spec.model.__name__}): the strategy {spec.config.strategy!r} holds the job in this "
                    "transaction. If it is rolled back, the RateLimit would forget that the job has started; run the "
                    'jobs with a Consumer, or use strategy="update_status"'
                )
                raise StatementError(msg)
            statement = claim_statement(selection, sa.bindparam(None, n, sa.Integer()))
            if isinstance(model, type):
                if len(_cache) >= _CACHED_STATEMENTS:
                    _cache.clear()
                _cache[model, n] = statement
        return statement


def claim_statement(
    selection: JobSelection,
    limit: Any,
    *,
    lease: timedelta | None = None,
    worker: Any = None,
    token: Callable[[], uuid.UUID] = alone_token,
    scan_range: ScanRange | None = None,
    announcements: sa.BindParameter[str] | None = None,
    many_due: bool = False,
    few: bool = False,
    admits_all: bool = False,
    returns_deferred: bool = True,
) -> sa.sql.expression.Executable:
    """Return the statement that claims selected jobs.

    :param limit: a bound number, the maximum number of jobs.
    :param lease: by default the lease of the queue.
    :param worker: a bound text for ``claimed_by``, by default :func:`worker_name`.
    :param token: makes the token of each execution, see :mod:`sqlaqueue.strategies.update_status`.
    :param scan_range: the part of the claim order to scan, see :class:`~sqlaqueue.strategies.ClaimRequest`.
    :param announcements: the ids of the announcements that the claim answers. It notifies the other Consumers that
        their jobs are claimed.
    :param many_due: whether many jobs are due, even if the limit is low.
    :param few: whether few jobs are selected, see :class:`~sqlaqueue.strategies.ClaimRequest`.
    :param admits_all: whether flow control holds none of them back.
    :param returns_deferred: whether it returns deferred columns, for options that are added to it.
    """
    spec, entity, _, options = selection
    request = _request(selection, limit, lease, worker, token, scan_range=scan_range, few=few, admits_all=admits_all)
    claimed = spec.strategy.claim(_planned_anew(request, many_due=many_due))
    columns = [*spec.table.c]
    if not (returns_deferred or options) and spec.strategy.keeps_rows:
        columns = _without_deferred(spec, entity)
        claimed = _reduced(claimed, columns)
    if announcements is not None:
        payload = joined(f"{CLAIMED} ", sa.func.count().over(), " ", announcements)
        claimed = claimed.add_columns(notification(spec, payload).label("sqlaqueue_notification"))
    shown = None if spec.strategy.keeps_rows else partial(returning_detached, spec, entity)
    steps = {STEPS: Steps((ClaimSteps(request, columns, announcements),), shown)}
    rows = as_library_statement(claimed).execution_options(**{OURS: spec})
    if not spec.strategy.keeps_rows:
        if options:
            msg = (
                f"claim(select({entity.__name__}).options(...)): the claim deletes the row and returns a detached "
                "instance, for which nothing more can be loaded; leave out the options"
            )
            raise StatementError(msg)
        detached: sa.sql.expression.Executable = returning_detached(spec, entity, rows)
        return detached.execution_options(**{OURS: spec}, **steps)
    # The run is recorded from these attributes, even if they are deferred or load_only() leaves them out.
    needed = (undefer(getattr(entity, spec.attributes[role])) for role in RUN_ROLES if spec.has(role))
    statement = sa.select(entity).from_statement(rows).options(*options, *needed)
    return statement.execution_options(populate_existing=True, **{CLAIM_OPTION: True, WRITES_OPTION: True, **steps})


def _without_deferred(spec: QueueSpec, entity: type[Any]) -> list[sa.Column[Any]]:
    """Return the columns without the deferred ones, which may be large: instances lack them until they are read."""
    needed = {spec.attributes[role] for role in RUN_ROLES if spec.has(role)}
    properties = [each for mapper in sa.inspect(entity).self_and_descendants for each in mapper.column_attrs]
    loaded = {each.columns[0].name for each in properties if not each.deferred or each.key in needed}
    deferred = {each.columns[0].name for each in properties if each.deferred} - loaded
    return [column for column in spec.table.c if column.name not in deferred]


def _reduced(claimed: AnySelect, columns: Sequence[sa.Column[Any]]) -> AnySelect:
    left, all_of_them = {column.name for column in columns}, [*claimed.selected_columns]
    if len(left) == len(all_of_them):
        return claimed
    kept = [column for column in all_of_them if column.name in left]
    return claimed.with_only_columns(*kept, maintain_column_froms=True)


def candidates_statement(selection: JobSelection, limit: Any) -> sa.sql.expression.Executable:
    """Return a SELECT of the keys of the jobs that a claim would take; it locks them, and claims none.

    :param limit: a bound number, the maximum number of jobs.
    """
    spec = selection.spec
    request = _request(selection, limit)
    picked = spec.strategy.picked(_planned_anew(request))
    keys = sa.select(*(column_of(picked, key) for key in spec.keys)).distinct()
    options = {OURS: spec, WRITES_OPTION: True, STEPS: Steps((ClaimSteps(request, []),))}
    return as_library_statement(keys).execution_options(**options)


def _request(
    selection: JobSelection,
    limit: Any,
    lease: timedelta | None = None,
    worker: Any = None,
    token: Callable[[], uuid.UUID] = alone_token,
    *,
    scan_range: ScanRange | None = None,
    few: bool = False,
    admits_all: bool = False,
) -> ClaimRequest:
    spec, _, candidates, _ = selection
    if CONTROL in spec.side_tables:
        candidates = candidates.where(~queue_paused(spec))
    # For a bound LIMIT a generic plan assumes a tenth of the table, and scans the table.
    limit = limit.render_literal_execute()
    return ClaimRequest(
        spec=spec,
        candidates=candidates,
        limit=limit,
        lease=sa.bindparam(None, lease or spec.lease, Span()),
        worker=sa.bindparam(None, callable_=worker_name, type_=sa.Text()) if worker is None else worker,
        token=sa.bindparam(None, callable_=token, type_=sa.Uuid()),
        scan_range=scan_range,
        few=few,
        admits_all=admits_all,
    )


def _planned_anew(request: ClaimRequest, *, many_due: bool = False) -> ClaimRequest:
    """Return the request with the condition that keeps PostgreSQL from a plan for a small table."""
    planned = planned_anew() if many_due else planned_anew_for_many(request.limit)
    return request._replace(candidates=request.candidates.where(planned))
