"""The worst finding of the doctor in one line, for commands that do something else."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

from sqlalchemy.orm import Session

from sqlaqueue import admin
from sqlaqueue.admin.doctor.doctor import CHEAP, COMPLETE, examine
from sqlaqueue.admin.doctor.examination import SEVERITIES, target_of
from sqlaqueue.log import fields, logger
from sqlaqueue.mapping.mixin import spec_of

_HURRIED = admin.Thresholds(statement_timeout=timedelta(seconds=0.25), lock_timeout=timedelta(seconds=0.1))


def worst_finding(session: Session, model: type[Any]) -> admin.Finding | None:
    """Return the worst finding, no notice, of checks that take next to no time; None if they fail."""
    try:
        found = examine(session, [model], (*COMPLETE, *CHEAP), thresholds=_HURRIED)
    except Exception:
        extra = fields("doctor_failed", queue=spec_of(model).name)
        logger.debug("doctor: the queue could not be examined", exc_info=True, extra=extra)
        return None
    return next((one for one in found if one.severity != "notice"), None)


def worst_of(findings: Iterable[tuple[admin.Finding | None, type[Any]]]) -> tuple[admin.Finding, type[Any]] | None:
    """Return the worst of the findings of several queues, with the class of its queue."""
    found = [(finding, model) for finding, model in findings if finding is not None]
    return min(found, key=lambda each: SEVERITIES.index(each[0].severity), default=None)


def worst_finding_text(finding: admin.Finding, model: type[Any]) -> str:
    """Return a finding in one line, with the command that tells the rest."""
    return (
        f"doctor: {finding.severity}: {finding.summary.rstrip('.')}; run `sqlaqueue doctor {target_of(spec_of(model))}`"
    )
