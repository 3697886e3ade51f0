"""Whether claims read whole tables, by the plan of the statement that a Consumer executes."""

from __future__ import annotations

from collections.abc import Iterator

from sqlaqueue.admin.diagnosis.examination import Examination
from sqlaqueue.admin.diagnosis.finding import Finding
from sqlaqueue.consumer.configuration.settings import make_settings
from sqlaqueue.consumer.configuration.statements import make_statements
from sqlaqueue.exc import SqlaqueueError
from sqlaqueue.queue.backend import backend
from sqlaqueue.queue.diagnosis_protocol import IndexFault, TableRead
from sqlaqueue.queue.spec import QueueSpec

_LARGE = 100
"""From so many small tables on the finding is critical."""


def claim_plan(examination: Examination) -> Iterator[Finding]:
    """Find claims whose plan scans or sorts a table that is not small."""
    connection, facts, small = examination.connection, backend().diagnosis, examination.thresholds.small_table
    for spec in examination.specs:
        claim = _claim_of(spec)
        if claim is None:
            continue
        reads = facts.whole_reads(connection, claim, spec.strategy.locked_tables(spec))
        large = [read for read in reads if read.rows > small]
        if not large:
            continue
        faults = [each for each in facts.index_faults(connection, spec) if each.is_of_claims]
        off = [] if faults else facts.disabled_plans(connection)
        for read in large:
            reason, fixes = _reason(read, faults)
            if off:
                reason = f"the planner may not use indexes, as {' and '.join(each.name for each in off)} is off"
                resets = "\n".join(each.repair for each in off if each.repair)
                fixes = (resets,) if resets else ()
            yield Finding(
                severity="critical" if read.rows > small * _LARGE else "warning",
                code="claim_reads_table",
                queue=spec.name,
                summary=(
                    f"Each claim {'reads' if read.how == 'scan' else 'sorts'} the whole table {read.table}, of about "
                    f"{read.rows} rows: {reason}."
                ),
                consequence="The more jobs there are, the longer each claim takes, and the busier is the server.",
                fixes=fixes,
                facts={"table": read.table, "rows": read.rows, "analyzed_at": read.analyzed_at},
            )


def _claim_of(spec: QueueSpec) -> object | None:
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


def _reason(read: TableRead, faults: list[IndexFault]) -> tuple[str, tuple[str, ...]]:
    """Return why the planner uses no index of the claim, and the fixes."""
    if faults:
        names = " and ".join(f"the index {each.name} is {each.state}" for each in faults)
        return names, tuple(each.repair for each in faults if each.repair)
    when = "have never been gathered" if read.analyzed_at is None else "may be out of date"
    return f"its statistics {when}", (f"ANALYZE {read.table};",)
