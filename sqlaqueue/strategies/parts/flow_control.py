"""The indexes, functions and triggers of flow control."""

from __future__ import annotations

import sqlalchemy as sa

from sqlaqueue.flow_control.functions import attach_admission
from sqlaqueue.flow_control.keys import FlowControl, flow_control
from sqlaqueue.postgresql.side_tables import rate
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.queue.strategy_protocol import Strategy
from sqlaqueue.strategies.parts.flow_control_checks import check_flow_control
from sqlaqueue.strategies.parts.indexes import add_index


def attach_flow_control(spec: QueueSpec, strategy: Strategy) -> None:
    """Add what flow control needs to the model's table.

    :raises ConfigurationError: with the class, the attribute and the fix, if it would not do what is configured.
    """
    check_flow_control(spec, strategy)
    flow = flow_control(spec)
    if flow is None:
        return
    _add_indexes(flow)
    attach_admission(flow, rate(spec) if flow.rates else None)


def _add_indexes(flow: FlowControl) -> None:
    spec = flow.spec
    pending = spec.in_state("pending") if spec.has("status") else None
    first = [spec.columns[role] for role in ("priority",) if spec.has(role)]
    rest = [column for column in spec.claim_order if column not in first]
    turn = [] if flow.turn is None else [flow.turn.hashed(spec.table)]
    if turn:
        add_index(spec, "turns", [*first, *turn, *rest], where=pending)
    if flow.part is not None:
        inside = rest if flow.order is None else [*flow.order.by]
        add_index(spec, "parts", [*first, *turn, flow.part.hashed(spec.table), *inside], where=pending)
    counted = [*flow.limits, *([] if flow.order is None else [flow.order])]
    if spec.strategy.holds_transaction:
        counted = []
    for key in {key.text: key for key in counted}.values():
        running = key.running(spec.table)
        if key.names:
            add_index(spec, "_".join(("running", *key.names)), [running], where=running.is_not(None))
        else:
            add_index(spec, "running", spec.keys, where=spec.in_state("processing"))
    if flow.order is not None:
        states = ["pending", *([] if spec.strategy.holds_transaction else ["processing"])]
        states += ["failed"] if flow.order.config.on_failure == "block" else []
        unfinished = [spec.columns["status"] == spec.literal(state) for state in states if spec.has("status")]
        where = sa.or_(*unfinished) if unfinished else None
        add_index(spec, "order", [flow.order.hashed(spec.table), *flow.order.by], where=where)
