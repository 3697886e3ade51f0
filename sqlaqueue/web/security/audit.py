"""The audit: one log record for each action, who did what in which queue, and to how many jobs."""

from __future__ import annotations

import logging
from typing import Any

from sqlaqueue.log import fields

audit_logger = logging.getLogger("sqlaqueue.audit")
"""A logger of its own, so that an application can keep these records apart."""

_MOST_KEYS = 100


def write_audit(user: str, action: str, queue: str, *, count: int | None, **facts: Any) -> None:
    """Log an action.

    :param user: the name of the user, as the access rule says; empty if it names none.
    :param count: the number of changed jobs; None for an action on a queue or a schedule.
    :param facts: what else there is to say, such as ``keys``, ``filter`` or ``error``.
    """
    if "keys" in facts and len(facts["keys"]) > _MOST_KEYS:
        facts["keys"] = [*facts["keys"][:_MOST_KEYS], f"and {len(facts['keys']) - _MOST_KEYS} more"]
    shown = "".join(f" {name}={value!r}" for name, value in facts.items() if value not in (None, "", [], {}))
    number = "" if count is None else f" count={count}"
    extra = fields("dashboard_action", queue=queue, count=count, user=user, action=action, facts=facts)
    # repr() escapes line breaks, so that no value can forge a record.
    audit_logger.info("user=%r action=%s queue=%r%s%s", user, action, queue, number, shown, extra=extra)
