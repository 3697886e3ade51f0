"""Reservations of beginnings, which a held strategy commits before its jobs run.

The transaction of the claim may be rolled back after handlers have called what the rate is for, and until it ends the
others would not see what it has written.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from sqlaqueue._typing import AnySelect
from sqlaqueue.flow_control.controls import flow_control
from sqlaqueue.postgresql.claims.checks import RateCheck, checks_of
from sqlaqueue.postgresql.claims.rate_rows import begin_jobs
from sqlaqueue.postgresql.key_arrays import key_array
from sqlaqueue.queue.backend import BEGUN
from sqlaqueue.queue.spec import QueueSpec


def reservation(spec: QueueSpec, chosen: sa.ColumnElement[bool]) -> tuple[AnySelect, Sequence[sa.Insert]]:
    """Return the statements that reserve beginnings, see :class:`~sqlaqueue.queue.claims_protocol.Claims`."""
    flow = flow_control(spec)
    checks = [check for check in (() if flow is None else checks_of(flow)) if isinstance(check, RateCheck)]
    columns = [column for check in checks for column in check.columns]
    jobs = sa.select(*(key.label(f"sqlaqueue_job_{number}") for number, key in enumerate(spec.keys)), *columns)
    rows = jobs.where(chosen).subquery("sqlaqueue_chosen")
    # In a record of its own: what the claim has recorded belongs to another transaction.
    record: Any = sa.bindparam(None, callable_=lambda: str(uuid.uuid4()), type_=sa.Text())
    found: list[sa.ColumnElement[Any]] = [rows.c[f"sqlaqueue_job_{number}"] for number in range(len(spec.keys))]
    for check in checks:
        found += [rows.c[check.name("key")], check.free(rows, record, lock=True)]
    array: Any = sa.bindparam(BEGUN, (), type_=key_array(sa.BigInteger()), unique=False)
    begins = [begin_jobs(check, _hashes(check, array)) for check in checks]
    return sa.select(*found), begins


def _hashes(check: RateCheck, array: Any) -> sa.FromClause:
    column = sa.column(check.name("key"), sa.BigInteger())
    return sa.func.unnest(array).table_valued(column, name="sqlaqueue_begun").render_derived("sqlaqueue_begun")
