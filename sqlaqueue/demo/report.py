"""Print the result of the demo."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue.demo.check import Findings, printable
from sqlaqueue.demo.display import Display
from sqlaqueue.demo.models import FileJob
from sqlaqueue.demo.processes import WorkerProcess

_MAX_STDERR_LINES = 20


def report(
    display: Display,
    session: Session,
    model: type[FileJob],
    findings: Findings,
    *,
    started_at: datetime,
    workers: Sequence[WorkerProcess],
) -> None:
    """Print the findings, and the output of the workers if there are problems."""
    if not findings.problems:
        display.print(
            f"  {findings.completed} files: every one stored exactly once, none lost; "
            "SHA-256, size and lines as this program finds them"
        )
    if findings.unreadable:
        display.print(f"  {len(findings.unreadable)} files that cannot be read; their jobs failed, as they should:")
        display.print_list([printable(path) for path in findings.unreadable])
    if findings.appeared:
        display.print(f"  {findings.appeared} files created after the jobs were enqueued")
    leased = "lease_expires_at" in model.__table__.c
    held = {key for worker in workers if worker.killed for key in worker.holds}
    if held:
        rescued = {key for worker in workers for key in worker.rescued}
        ending = (
            f"{len(rescued)} rescued after their leases expired" if leased else "released by the database immediately"
        )
        display.print(f"  {len(held)} jobs were held by the killed worker: {ending}, {findings.rerun} run by others")
    display.print(_rate(session, model, started_at, held if leased else set()))
    if findings.problems:
        display.print(f"  {len(findings.problems)} problems:", "bold red")
        display.print_list(findings.problems)
        for worker in workers:
            if worker.stderr_lines:
                display.print(f"  worker {worker.number} (process {worker.pid}) printed:")
                display.print_list(worker.stderr_lines[-_MAX_STDERR_LINES:])


def _rate(session: Session, model: type[FileJob], started_at: datetime, rescued: set[int]) -> str:
    """Return the rate of the jobs that no dead worker held, and the time until all jobs were finished."""
    count, last = sa.func.count(model.finished_at), sa.func.max(model.finished_at)
    number, until = session.execute(sa.select(count, last).where(model.id.not_in(rescued))).one()
    end = session.execute(sa.select(last)).scalar_one()
    text = "" if end is None else f", {(end - started_at).total_seconds():.1f} seconds in total"
    if until is not None:
        rate = number / max((until - started_at).total_seconds(), 0.001)
        text = f", {rate:.0f} jobs per second{' without these' if rescued else ''}{text}"
    return f"  {number + len(rescued)} jobs{text}"
