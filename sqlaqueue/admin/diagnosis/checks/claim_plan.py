"""Whether claims read whole tables, by the plan of the statement that a Consumer executes."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

from sqlaqueue.admin.diagnosis.examination import Examination
from sqlaqueue.admin.diagnosis.finding import Finding
from sqlaqueue.consumer.settings import make_settings
from sqlaqueue.consumer.statements import make_statements
from sqlaqueue.exc import SqlaqueueError
from sqlaqueue.postgresql.facts import TableRead
from sqlaqueue.postgresql.faults_of_indexes import index_faults
from sqlaqueue.postgresql.plans import disabled_plans, on_shards, whole_reads
from sqlaqueue.queue.spec import QueueSpec

_VERY_LARGE = 100
"""How many times as large as a small table one is for which the finding is critical."""

_STALE = 0.2
"""The share of rows that were written since the statistics were made, from which on these are out of date."""


def check_claim_plan(examination: Examination) -> Iterator[Finding]:
    """Find claims whose plan reads or sorts a table that is not small, for a reason that can be removed.

    The planner of a coordinator of Citus says nothing of the shards, which is a finding as well.

    A planner that knows better may read a table though there is an index: for instance if no job is due by far.
    """
    small = examination.thresholds.small_table
    for spec in examination.specs:
        claim = claim_of(spec)
        if claim is None:
            continue
        if on_shards(examination.connection, spec):
            yield _on_shards(spec)
            continue
        reads = whole_reads(examination.connection, claim, spec.strategy.locked_tables(spec))
        large = sorted((read for read in reads if read.rows > small), key=lambda read: -read.rows)
        reason, fix = _reason(examination, spec, large) if large else ("", "")
        if not reason:
            continue
        listed = " and ".join(f"{read.table}, of about {read.rows} rows" for read in large)
        how = "reads" if any(read.how == "scan" for read in large) else "sorts"
        yield Finding(
            severity="critical" if large[0].rows > small * _VERY_LARGE else "warning",
            code="claim_reads_table",
            queue=spec.name,
            summary=f"Each claim {how} the whole table {listed}: {reason}.",
            consequence="The more jobs there are, the longer each claim takes, and the busier is the server.",
            fixes=(fix,) if fix else (),
            facts={"tables": [read.table for read in large], "rows": large[0].rows},
        )


def _on_shards(spec: QueueSpec) -> Finding:
    return Finding(
        severity="notice",
        code="on_shards",
        queue=spec.name,
        summary=f"The jobs of {spec.name} are on shards of Citus, whose dead rows, statistics and plans are not known.",
        consequence="What slows down the claims there is not found.",
    )


def _reason(examination: Examination, spec: QueueSpec, reads: Sequence[TableRead]) -> tuple[str, str]:
    """Return why the planner uses no index of the claim, and the fix; empty texts if there is nothing to repair."""
    connection = examination.connection
    faults = [each for each in index_faults(connection, spec) if each.is_of_claims and each.state != "leftover"]
    if faults:
        names = " and ".join(f"the index {each.name} is {each.state}" for each in faults)
        return names, "\n".join(each.repair for each in faults if each.repair)
    off = disabled_plans(connection)
    if off:
        names = " and ".join(each.name for each in off)
        return f"{names} is off for this session", "\n".join(each.repair for each in off if each.repair)
    stale = [each.table for each in reads if each.analyzed_at is None or each.changed > _STALE * each.rows]
    if stale:
        listed = ", ".join(stale)
        return f"the statistics of {listed} are missing or out of date", f"ANALYZE {listed};"
    return "", ""


@functools.lru_cache(maxsize=128)
def claim_of(spec: QueueSpec) -> object | None:
    """Return the claim of a Consumer; None if the queue can have none."""
    try:
        settings = make_settings(
            spec.model,
            handlers=None,
            batch_size=None,
            concurrency=1,
            poll_interval=1,
            lease=None,
            timeout=None,
            grace=30,
            retry=None,
            name=None,
            batch=False,
        )
    except SqlaqueueError:
        return None
    claim: object = make_statements(settings).claim
    return claim
