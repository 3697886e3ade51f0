"""Whether a claim has passed over a key that another transaction had locked."""

from __future__ import annotations

import sqlalchemy as sa

from sqlaqueue.postgresql.flow_functions import CONTENDED


def was_contended() -> sa.ColumnElement[bool]:
    """Return the condition that an earlier claim of this transaction has passed over a locked key."""
    setting: sa.ColumnElement[str] = sa.func.current_setting(CONTENDED, sa.true(), type_=sa.Text())
    return sa.func.coalesce(setting == "on", sa.false())
