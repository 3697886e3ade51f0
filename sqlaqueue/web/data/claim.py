"""The plan of the claim that Consumers of a queue execute, and what a claim costs at this moment."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue.admin.doctor.doctor import COMPLETE, DEFAULTS, examine
from sqlaqueue.admin.doctor.examination import Finding
from sqlaqueue.admin.doctor.objects import check_indexes
from sqlaqueue.admin.doctor.service import claim_of
from sqlaqueue.admin.jobs import bind_arguments
from sqlaqueue.postgresql.facts import PlanNode, StatementPlan
from sqlaqueue.postgresql.plans import explain
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.web.data.unavailable import Unavailable

_LOCK_TIMEOUT = "200ms"
"""A claim passes over locked rows. What it may still wait for is a lock of the whole table."""


@dataclass(frozen=True, kw_only=True)
class ClaimPlan:
    """The plan of a claim."""

    plan: StatementPlan
    is_measured: bool
    """Whether the claim was executed, and rolled back."""
    indexes: Sequence[str]
    """The indexes that it reads."""
    whole_tables: Sequence[str]
    """The tables of the queue, small ones left out, that it reads from the beginning to the end."""

    @property
    def claimed(self) -> float | None:
        """How many jobs it has claimed; None if it was not executed."""
        return self.plan.root.rows


def read_index_findings(session: Session, spec: QueueSpec) -> list[Finding]:
    """Return what the doctor finds about the indexes of claims and leases, the worst first."""
    names = {str(index.name) for index in spec.claim_indexes}
    found = examine(session, [spec.model], (*COMPLETE, check_indexes))
    return [each for each in found if each.code == "check_failed" or each.facts.get("index") in names]


def plan_claim(session: Session, spec: QueueSpec) -> ClaimPlan | Unavailable:
    """Return the plan of a claim, which is not executed."""
    return _read(session, spec, execute=False)


def measure_claim(session: Session, spec: QueueSpec) -> ClaimPlan | Unavailable:
    """Execute a claim under EXPLAIN, and return its plan. The caller rolls back; the transaction is not read-only.

    Workers that claim meanwhile pass over the jobs that it has locked, as over those of any other worker, and find them
    again with their next poll.
    """
    connection = session.connection(bind_arguments=bind_arguments(spec.model))
    connection.execute(sa.select(sa.func.set_config("lock_timeout", _LOCK_TIMEOUT, sa.true())))
    # In a savepoint, so that nothing is left of it whatever the caller does.
    with connection.begin_nested() as savepoint:
        plan = _read(session, spec, execute=True)
        savepoint.rollback()
    return plan


def _read(session: Session, spec: QueueSpec, *, execute: bool) -> ClaimPlan | Unavailable:
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


def _reads_all(node: PlanNode) -> bool:
    if node.kind != "Seq Scan":
        return False
    # For the few rows of a small table, the planner uses no index.
    read = node.planned_rows if node.rows is None else node.rows + node.removed
    return read > DEFAULTS.small_table


def _distinct(names: Iterable[str | None]) -> list[str]:
    return list(dict.fromkeys(name for name in names if name is not None))
