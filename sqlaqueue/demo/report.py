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

_LONGEST_LIST = 20


def report(
    display: Display,
    session: Session,
    model: type[FileJob],
    began: datetime,
    workers: Sequence[WorkerProcess],
    victim: WorkerProcess | None,
    findings: Findings,
) -> None:
    """Print what was found, and what the workers have said where something is wrong."""
    held = victim.holds if victim else set()
    if not findings.problems:
        display.say(f"  {findings.completed} files: every one read exactly once, none lost; SHA-256, sizes and lines agree")
    if findings.unreadable:
        display.say(f"  {len(findings.unreadable)} files that nobody can read, and their jobs failed:")
        _say_list(display, [show(path) for path in findings.unreadable])
    if findings.appeared:
        display.say(f"  {findings.appeared} files appeared only after the jobs had been enqueued")
    if victim is not None:
        rescued = {key for worker in workers for key in worker.rescued}
        how = (
            f"{len(rescued)} were rescued when their leases had expired"
            if "lease_expires_at" in model.__table__.c
            else "the database took the claim back"
        )
        display.say(f"  of the {len(held)} jobs of the killed worker, {how}; {findings.rerun} were run by others")
    _say_rate(display, session, model, began, held)
    if findings.problems:
        display.say(f"  {len(findings.problems)} things are wrong:", "bold red")
        _say_list(display, findings.problems)
        for worker in workers:
            said = worker.log.read_text(errors="replace").splitlines()
            if said:
                display.say(f"  worker {worker.number} (process {worker.pid}) said in the end:")
                _say_list(display, said[-_LONGEST_LIST:])


def _say_rate(display: Display, session: Session, model: type[FileJob], began: datetime, held: set[int]) -> None:
    """Print jobs per second, until only the jobs of the killed worker were left: then the others wait for its leases."""
    others = model.id.not_in(held)
    number, last = session.execute(sa.select(sa.func.count(), sa.func.max(model.finished_at)).where(others)).one()
    until: datetime | None = session.scalar(sa.select(sa.func.max(model.finished_at)))
    if until is None:
        return
    whole = (until - began).total_seconds()
    working = max((last - began).total_seconds(), 0.001) if number else whole
    display.say(f"  {number / working:.0f} jobs per second while jobs were waiting; {whole:.1f} seconds in all")


def _say_list(display: Display, lines: Sequence[str]) -> None:
    for line in lines[:_LONGEST_LIST]:
        display.say(f"    {line}")
    if len(lines) > _LONGEST_LIST:
        display.say(f"    and {len(lines) - _LONGEST_LIST} more")
