"""Restore the settings that a worker sets with SET LOCAL.

In production they end with its transaction; in a test they would last until the test's rollback.
"""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue.queue.spec import QueueSpec

_CHANGED = ("lock_timeout", "synchronous_commit")
"""Entries of the crash journal change these."""


def read_settings(session: Session, spec: QueueSpec) -> tuple[str, ...]:
    """Return the settings that runs of a queue change; empty if they change none."""
    if not spec.strategy.holds_transaction:
        return ()
    current = sa.select(*(sa.func.current_setting(name, type_=sa.Text()) for name in _CHANGED))
    return tuple(session.execute(current, bind_arguments={"mapper": spec.mapper}).one())


def restore_settings(session: Session, spec: QueueSpec, settings: tuple[str, ...]) -> None:
    """Set them as :func:`read_settings` returned them."""
    if settings:
        before = [sa.func.set_config(name, value, sa.true()) for name, value in zip(_CHANGED, settings, strict=True)]
        session.execute(sa.select(*before), bind_arguments={"mapper": spec.mapper})
