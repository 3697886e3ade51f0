"""The verbs in steps, for engines that cannot carry one out as one statement.

Each verb is a plain function: candidates, locks, changes, rows. The statement that a program executes tells by an
execution option which verb it is (:data:`~sqlaqueue.sql.engine.STEPS`); the steps are executed in its place, in the
same transaction, and what the last one returns is its result.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import sqlalchemy as sa
from sqlalchemy.orm import FromStatement

from sqlaqueue.engines.admission import Admission
from sqlaqueue.engines.notifications import send
from sqlaqueue.flow_control.keys import KeyOrder
from sqlaqueue.notify_payloads import CLAIMED
from sqlaqueue.postgresql.triggers import channel_of
from sqlaqueue.queue.run import Key
from sqlaqueue.queue.spec import clock
from sqlaqueue.queue.strategy_protocol import ClaimSteps, FailSteps
from sqlaqueue.sql.engine import OtherEngine
from sqlaqueue.sql.types import as_library_statement

KEYS = "sqlaqueue_step_keys"
"""The name of the parameter with the keys that a step before has returned."""

Given = Mapping[str, Any]
"""The parameters with which a program executes a verb."""


def carry_out(
    engine: OtherEngine, connection: sa.Connection, steps: Any, statement: Any, given: Given
) -> tuple[Any, Given] | None:
    """Execute the steps of a verb; return the statement of the last one with its parameters, None for the verb's own.

    :param steps: what its execution option says.
    """
    if isinstance(steps, ClaimSteps):
        return claim(engine, connection, steps, statement, given)
    cancel_behind(engine, connection, steps)
    return None


class _ClaimStatements:
    """The statements of one claim, built once."""

    def __init__(self, engine: OtherEngine, steps: ClaimSteps) -> None:
        request, spec = steps.request, steps.request.spec
        waiting, change = spec.strategy.claim_in_steps(request)
        among = spec.key_in(spec.keys, sa.bindparam(KEYS, (), expanding=len(spec.keys) > 1))
        self.spec, self.request, self.announcements = spec, request, steps.announcements
        first = spec.strategy.first_due(spec, waiting, spec.table, request.limit, request.scan_range)
        self.waiting, self.candidates = waiting, engine.locked(spec, first)
        self.change = None if change is None or not steps.columns else engine.by_key(change.where(among))
        shown = steps.columns or spec.keys
        self.rows = as_library_statement(engine.by_key(sa.select(*shown).where(among)).order_by(*spec.claim_order))
        self.admission = None if request.admits_all or not spec.flow_rules else Admission(engine, request, waiting)


_claims: WeakKeyDictionary[OtherEngine, WeakKeyDictionary[ClaimSteps, _ClaimStatements]] = WeakKeyDictionary()
"""The statements of claims. A program may execute one statement on several engines."""


def claim(
    engine: OtherEngine, connection: sa.Connection, steps: ClaimSteps, statement: Any, given: Given
) -> tuple[Any, Given]:
    """Lock the first due rows, change them, and return them in claim order."""
    known = _claims.setdefault(engine, WeakKeyDictionary())
    parts = known.get(steps)
    if parts is None:
        parts = known[steps] = _ClaimStatements(engine, steps)
    spec = parts.spec
    engine.begin_steps(connection, parts.rows)
    if parts.admission is None:
        # A second table in the filter may match a job several times.
        keys: list[Key] = [*dict.fromkeys(tuple(row) for row in connection.execute(parts.candidates, given))]
    else:
        keys = parts.admission.keys(connection, given)
    bound = {KEYS: spec.bind_keys(keys)}
    if parts.change is not None and keys:
        connection.execute(parts.change, bound)
    if parts.announcements is not None:
        answered = given.get(parts.announcements.key, "")
        send(connection.connection.info, channel_of(spec), f"{CLAIMED} {len(keys)} {answered}")
    rows = parts.rows if parts.admission is None else parts.admission.in_order(parts.rows, keys)
    return (_returning(statement, rows) if steps.columns else rows), bound


def _returning(statement: Any, rows: Any) -> Any:
    """Return the statement of a claim with the rows that were claimed, and with the options of the program."""
    clone, inner = statement.options(), statement.element
    # As often as the program has wrapped the claim by from_statement().
    clone.element = _returning(inner, rows) if isinstance(inner, FromStatement) else rows
    return clone


def cancel_behind(engine: OtherEngine, connection: sa.Connection, steps: FailSteps) -> None:
    """Cancel the pending jobs behind heads of an order that are about to fail."""
    spec = steps.spec
    order = KeyOrder(spec, spec.config.order.per, spec.config.order)
    columns = [*order.columns, *order.by]
    engine.begin_steps(connection, sa.select(*columns))
    has_place = [column.is_not(None) for column in order.columns]
    failing = sa.select(*columns, order.hashed(spec.table)).where(steps.failing, *has_place).order_by(*spec.keys)
    roles = {"status": spec.status_value("cancelled"), "finished_at": clock(), "lease_token": None}
    values = {spec.columns[role]: value for role, value in roles.items() if spec.has(role)}
    for *row, hashed in connection.execute(engine.locked(spec, failing, waits=steps.waits)).all():
        same = [column == value for column, value in zip(order.columns, row, strict=False)]
        place = [sa.literal(value, by.type) for by, value in zip(order.by, row[len(same) :], strict=True)]
        pending = [spec.in_state("pending"), *same, order.hashed(spec.table) == hashed]
        behind = sa.select(*spec.keys).where(*pending, sa.tuple_(*order.by) > sa.tuple_(*place)).order_by(*spec.keys)
        # By their keys and in their order, as claims lock them: two transactions must not wait for each other.
        keys = [tuple(key) for key in connection.execute(behind)]
        cancelled = sa.update(spec.table).where(spec.key_in(spec.keys, keys), spec.in_state("pending")).values(values)
        if keys:
            connection.execute(engine.by_key(cancelled))
