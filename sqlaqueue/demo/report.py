"""What the demo says in the end."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue.demo.check import Findings, show
from sqlaqueue.demo.display import Display
from sqlaqueue.demo.models import FileJob
from sqlaqueue.demo.processes import WorkerProcess

_LAST_WORDS = 20


def report(
    display: Display,
    session: Session,
    model: type[FileJob],
    findings: Findings,
    *,
    began: datetime,
    workers: Sequence[WorkerProcess],
) -> None:
    """Print what was found, and what the workers have said where something is wrong."""
    if not findings.problems:
        display.say(
            f"  {findings.completed} files: every one stored exactly once, none lost; "
            "SHA-256, size and lines as this program finds them"
        )
    if findings.unreadable:
        display.say(f"  {len(findings.unreadable)} files that cannot be read, and their jobs failed, as they should:")
        display.say_list([show(path) for path in findings.unreadable])
    if findings.appeared:
        display.say(f"  {findings.appeared} files that appeared after the jobs had been enqueued")
    leased = "lease_expires_at" in model.__table__.c
    held = {key for worker in workers if worker.killed for key in worker.holds}
    if held:
        rescued = {key for worker in workers for key in worker.rescued}
        how = (
            f"{len(rescued)} rescued when their leases had expired" if leased else "given back by the database at once"
        )
        display.say(f"  {len(held)} jobs were held by the killed worker: {how}, {findings.rerun} run by others")
    display.say(_rate(session, model, began, held if leased else set()))
    if findings.problems:
        display.say(f"  {len(findings.problems)} things are wrong:", "bold red")
        display.say_list(findings.problems)
        for worker in workers:
            if worker.last_words:
                display.say(f"  worker {worker.number} (process {worker.pid}) said in the end:")
                display.say_list(worker.last_words[-_LAST_WORDS:])


def _rate(session: Session, model: type[FileJob], began: datetime, waited_for: set[int]) -> str:
    """Return the rate until only jobs with a dead worker's lease were left, and the time until all were done."""
    count, last = sa.func.count(model.finished_at), sa.func.max(model.finished_at)
    number, until = session.execute(sa.select(count, last).where(model.id.not_in(waited_for))).one()
    end = session.execute(sa.select(last)).scalar_one()
    text = "" if end is None else f", {(end - began).total_seconds():.1f} seconds in all"
    if until is not None:
        rate = number / max((until - began).total_seconds(), 0.001)
        text = f", {rate:.0f} jobs per second{' until only these were left' if waited_for else ''}{text}"
    return f"  {number + len(waited_for)} jobs{text}"
